"""Frozen weights and end tokens are what the job has computed with, also where no process is left that has seen it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from elasticrl.config.tree import Tree
from elasticrl.ppo.frozen import ENDS, Frozen, OtherFiles
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.progress import Progress


def reference(value: float) -> nn.Module:
    model = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    for param in model.parameters():
        param.data.fill_(value)
    return model


def life(
    state: dict[str, Any],
    *,
    ref: float = 1.0,
    ends: tuple[int, ...] = (7,),
    allow: tuple[str, ...] = (),
    peers: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """A fresh process, of rank 0, goes on from that state and begins a generation; the state that it keeps then."""
    tree = Tree.model_validate(
        {"job": {"name": "j"}, "model": {"path": "actor", "ref_path": "maker/ref"}, "checkpoint": {"allow": allow}}
    )
    frozen, progress = Frozen(tree, "cpu"), Progress()
    frozen.model("ref", lambda: reference(ref))
    frozen.ends(ends)
    progress.load_state_dict(state)
    base: Any = SimpleNamespace(
        context=SimpleNamespace(node="n0"), rank=0, progress=progress, tell=lambda words: [words, *peers]
    )
    frozen.compare(base)
    return progress.state_dict()


OLD = {"step": 4, "update": 0, "mark": 0, "count": 4, "chain": [-1, ""]}  # as it was before sums were kept


def test_fresh_processes_refuse_another_reference_than_the_state_was_made_with_unless_told():
    kept = life(OLD)
    assert life(kept) == kept
    with pytest.raises(Misuse) as refused:
        life(kept, ref=2.0)
    sentence = str(refused.value)
    assert sentence.startswith(
        "The frozen weights of ref, read from maker/ref, are others than the job has computed with on rank 0 (n0)."
    )
    assert sentence.endswith("or continue with these: --allow frozen (checkpoint.allow).")
    other = life(kept, ref=2.0, allow=("frozen",))
    assert life(other, ref=2.0) == other != kept, "from there on these are the job's"
    with pytest.raises(Misuse, match="others than the job has computed with"):
        life(other)


def test_end_tokens_are_compared_as_weights_are(capsys: pytest.CaptureFixture[str]):
    kept = life(OLD)
    with pytest.raises(Misuse, match="The tokens that end an answer, read from actor, are others than the job has"):
        life(kept, ends=(7, 3))
    peer = {"node": "n1", "here": kept["frozen"], "proven": {}}
    for told in ([peer], [peer, peer]):
        with pytest.raises(
            OtherFiles, match=r"The tokens that end an answer, read from actor, are .* on rank 0 \(n0\)\."
        ):
            life(kept if len(told) == 1 else OLD, ends=(7, 3), peers=told)
    odd = {**peer, "here": {**kept["frozen"], ENDS: 0}}
    assert life(kept, peers=[odd])["frozen"] == kept["frozen"], "whose files are the job's goes on"
    assert "others than the job has computed with on rank 1 (n1)." in capsys.readouterr().out
