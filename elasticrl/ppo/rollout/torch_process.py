"""The torch engine as an engine process's program: the very code that generates in a worker, by weights that were sent.

The idea: same code, same shapes, same weights, so the same bits as engine `torch`; what it adds is a life of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from elasticrl.config.training import Model
from elasticrl.ppo import models
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import drawn
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.rollout.process import Said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from elasticrl.ppo.rollout.engine import Request
    from elasticrl.ppo.rollout.service import Service


class TorchProgram:
    """One block of requests at a time."""

    def __init__(self, service: Service) -> None:
        torch.set_num_threads(service.threads)
        asked = {"dtype": service.dtype, "attention": service.attention, "lora": service.lora}
        config = Model.model_validate_json(json.dumps(asked))
        # The very model of the worker: frozen weights go through other kernels, to other bits.
        self._model = models.actor(config, service.model, seed=0).to(service.device)
        self._engine = TorchEngine(self._model, service.sampling, check=lambda: self._alive())  # noqa: PLW0108 - it changes
        self._waiting: dict[str, tuple[Request, int | None]] = {}
        self._alive: Callable[[], None] = lambda: None
        self.versions = {"torch": torch.__version__}
        embeddings: Any = self._model.get_input_embeddings()  # type: ignore[operator] # transformers', or peft's around it
        self.vocabulary = int(embeddings.num_embeddings)

    def load(self, home: Path, tag: weights.Tag) -> None:
        """Copies these weights into the model. Torn if one is missing, or has no place in it."""
        missing = {name: param for name, param in self._model.named_parameters() if param.requires_grad}
        with torch.no_grad():
            for name, tensor in weights.read(home, tag, within_s=1.0):
                place = missing.pop(name, None)
                if place is None or place.shape != tensor.shape:
                    raise weights.Torn(f"{name} {tuple(tensor.shape)} was sent, and this model has no place for it")
                place.copy_(tensor)
        if missing:
            raise weights.Torn(f"{len(missing)} weights were not sent ({min(missing)}, ...)")

    def add(self, key: str, request: Request, *, tokens: int | None = None) -> None:
        """Puts the request behind those that wait."""
        self._waiting[key] = (request, tokens)

    def drop(self, keys: Iterable[str]) -> None:
        """Forgets requests that nobody waits for."""
        for key in keys:
            self._waiting.pop(key, None)

    def step(self, alive: Callable[[], None]) -> Iterable[Said]:
        """Generates one block: of what waits, what has the width of the first, and is drawn like it."""
        self._alive = alive
        first, tokens = next(iter(self._waiting.values()))  # a check is a block of its own
        like = (
            first.block,
            first.width,
            first.draw,
            tokens,
        )  # one width: of several the engine would make several blocks
        block = {k: r for k, (r, t) in self._waiting.items() if (r.block, r.width, r.draw, t) == like}
        if not first.block:
            block = dict(list(block.items())[: self._engine.rows])
        full = self._engine.sampling
        its = drawn(full, first.draw)
        self._engine.sampling = its if tokens is None else replace(its, max_tokens=tokens)
        try:
            found: Any = self._engine.generate([replace(r, draw=None) for r in block.values()], version=0)
        finally:
            self._engine.sampling = full
        for i, key in enumerate(block):
            self._waiting.pop(key, None)
            count = int(found.mask[i].sum())
            yield Said(
                key=key,
                tokens=tuple(found.tokens[i, full.prompt_tokens :][:count].tolist()),
                logprobs=tuple(found.logprobs[i, :count].tolist()),
                ended=bool(found.ended[i]),
            )
