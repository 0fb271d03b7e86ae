"""Roles that only compute, on rollout nodes: the reference's log-probabilities and a reward model's scores of a trainer's rows.

The idea: a trainer sends the very blocks that it would put through a model of its own, so whoever answers
computes the same bits. Nothing here depends on the actor's weights: an engine that has none yet may be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elasticrl.config.training import Model
from elasticrl.ppo import models
from elasticrl.ppo.roles import Roles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.rollout.service import Service
    from elasticrl.ppo.rollout.wire import Frame, Talk


@dataclass(frozen=True, eq=False)
class Case:
    """A block of rows that a role is asked about. Each is another, whatever it holds.

    Example: Case("ref", {"tokens": tensor[8, 40], "attention": tensor[8, 40], "mask": tensor[8, 32], "start": tensor[8]})
    """

    role: str
    rows: Rows


def packed(rows: Rows) -> bytes:
    """As it travels: tokens, where answers start, attention, mask."""
    numbers = (rows["tokens"].to(torch.int32), rows["start"].to(torch.int32))
    parts = (*numbers, rows["attention"].to(torch.uint8), rows["mask"].to(torch.uint8))
    return b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts)


def unpacked(raw: bytes, shape: Sequence[int]) -> Rows:
    """The rows again; `shape` is how many, the tokens of each, and how many of these are of the response."""
    count, width, answer = map(int, shape)
    if min(count, width, answer) < 1 or len(raw) != count * (5 * width + 4 + answer):
        raise ValueError(f"{len(raw)} bytes are not {count} rows of {width} tokens, {answer} of them a response's")
    tokens, rest = raw[: 4 * count * (width + 1)], raw[4 * count * (width + 1) :]
    numbers = torch.frombuffer(bytearray(tokens), dtype=torch.int32).long()
    start = numbers[count * width :]
    if not 1 <= int(start.min()) <= int(start.max()) <= width:
        raise ValueError(f"a response that starts at none of the places 1 to {width}")
    flags = torch.frombuffer(bytearray(rest), dtype=torch.uint8).bool()
    return {
        "tokens": numbers[: count * width].view(count, width),
        "start": start,
        "attention": flags[: count * width].view(count, width),
        "mask": flags[count * width :].view(count, answer),
    }


def verdicts(talk: Talk, cases: Sequence[Case], found: dict[Case, torch.Tensor]) -> None:
    """Has the engine at the other end judge these; each is found as soon as it is done."""
    names = dict(enumerate(cases))
    for name, case in names.items():
        shape = (*case.rows["tokens"].shape, case.rows["mask"].shape[1])
        talk.send("judge", packed(case.rows), role=case.role, id=name, shape=shape)
    while names:
        frame = talk.receive()  # a sign of life at least, in every `health_timeout`
        if frame.says["op"] == "judged":
            found[names.pop(frame.says["id"])] = values_of(frame)


def values_of(frame: Frame) -> torch.Tensor:
    """What a role said: float32 in the shape that is told."""
    return torch.frombuffer(bytearray(frame.raw), dtype=torch.float32).view(*map(int, frame.says["shape"]))


class Judges:
    """The models, in the engine's process."""

    def __init__(self, service: Service) -> None:
        torch.set_num_threads(service.threads)
        self._device = service.device
        self._alive: Callable[[], None] = lambda: None
        config = Model.model_validate({"dtype": service.judges_dtype, "attention": service.attention})
        makers = {"ref": models.reference, "reward": models.reward_model}
        self._models = {role: self._ready(makers[role](config, path)) for role, path in service.judges.items()}
        ref: Any = self._models.get("ref")
        self._roles = Roles(
            model=config, actor=ref, ref=ref, device=service.device, temperature=service.sampling.temperature,
            most_logits=service.judges_logits,
        )  # fmt: skip

    def _ready(self, model: nn.Module) -> nn.Module:
        for layers in (module for module in model.modules() if isinstance(module, torch.nn.ModuleList)):
            for layer in layers:
                layer.register_forward_hook(lambda *_: self._alive())
        return model.to(self._device)

    def case(self, role: str, raw: bytes, shape: Sequence[int]) -> Case:
        """What a trainer has sent. KeyError, ValueError or TypeError if it is nothing that can be judged here."""
        self._models[role]
        return Case(role, unpacked(raw, shape))

    @torch.no_grad()
    def judge(self, case: Case, alive: Callable[[], None]) -> torch.Tensor:
        """[rows, response] of the reference, [rows] of a reward model. Calls `alive` now and then."""
        self._alive = alive
        rows = {name: value.to(self._device) for name, value in case.rows.items()}
        if case.role == "ref":
            return self._roles.reference(rows)[0].float().cpu()
        return models.whole_scores(self._models[case.role], rows["tokens"], rows["attention"]).cpu()
