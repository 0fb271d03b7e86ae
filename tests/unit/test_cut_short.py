"""What a process does whose restore was cut short before, as the next gang goes on from elsewhere, or begins anew."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticrl.config import Tree
from elasticrl.runtime.interrupt import GangError
from elasticrl.runtime.restore import _Fill, restore
from elasticrl.runtime.trained import Registered
from elasticrl.runtime.vault.errors import Outlived


def registered(*, hollow: bool, begun: bool) -> Any:
    """Two roles, and what becomes of them."""
    given: Any = Registered(Tree.model_validate({"job": {"name": "j"}}))
    shard = SimpleNamespace(layout=SimpleNamespace(shapes={}))
    given.roles = {name: SimpleNamespace(live=SimpleNamespace(shard=shard)) for name in ("actor", "critic")}
    given.hollow, given.begun = hollow, begun
    given.done = []
    given.parts = SimpleNamespace(restore=lambda source, **_: given.done.append(source))
    given.note_first = lambda **_: True
    given.begin_anew = lambda: given.done.append("anew")
    return given


def filled(given: Any, *, checkpoint: str | None, allow: Sequence[str] = ()) -> _Fill:
    """A restore, from there or anew."""
    tree = SimpleNamespace(checkpoint=SimpleNamespace(allow=allow))
    worker = SimpleNamespace(context=SimpleNamespace(tree=tree), beat=SimpleNamespace(nearer=lambda: None))
    generation: Any = SimpleNamespace(worker=worker, place=SimpleNamespace(resume=4 if checkpoint else 0))
    agreed: Any = SimpleNamespace(whole=None, checkpoint=checkpoint, version=SimpleNamespace(step=4))
    return _Fill(generation, SimpleNamespace(), given, SimpleNamespace(count=0, step=0), agreed)  # type: ignore[arg-type] # only what `_read` asks


@pytest.mark.parametrize(
    ("hollow", "begun", "kept", "allow", "restores"),
    [
        (True, False, {"actor", "critic"}, ["parts"], True),
        (False, False, {"critic"}, ["parts"], True),
        (True, False, {"critic"}, [], True),  # and is refused there, as it names what differs
        (True, False, {"critic"}, ["parts"], False),
        (False, True, {"critic"}, ["parts"], False),
    ],
)
def test_a_model_that_a_checkpoint_lacks_begins_anew_in_a_process_that_still_has_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
    *,
    hollow: bool,
    begun: bool,
    kept: Collection[str],
    allow: list[str],
    restores: bool,
) -> None:
    # Found by reading: memory of a restore that was cut short, which nothing was written to, was trained on.
    @contextmanager
    def opened(_self: Any, name: str, _models: Mapping[str, Any]) -> Any:
        yield SimpleNamespace(name=name, values=dict.fromkeys(kept), nearer=None)

    monkeypatch.setattr(_Fill, "_opened", opened)
    given = registered(hollow=hollow, begun=begun)
    fill = filled(given, checkpoint="step-00000004-g1", allow=allow)
    if restores:
        fill._read(set())
        assert given.done
    else:
        with pytest.raises(Outlived, match="keeps nothing of actor, which is to begin anew"):
            fill._read(set())
        assert not given.done


@pytest.mark.parametrize("hollow", [False, True])
def test_nobody_begins_anew_in_memory_that_was_not_filled(*, hollow: bool) -> None:
    given = registered(hollow=hollow, begun=False)
    if hollow:
        with pytest.raises(Outlived, match="a fresh process begins anew"):
            filled(given, checkpoint=None)._read(set())
    else:
        filled(given, checkpoint=None)._read(set())
    assert given.done == ([] if hollow else ["anew"])


def test_a_restore_that_is_cut_short_lets_go_of_the_parameters_that_are_on_their_way() -> None:
    """What holds them keeps this rank's connections open, and the others would wait for it."""
    gone: list[str] = []
    begun = SimpleNamespace(strategy=SimpleNamespace(forget=lambda: gone.append("actor")))
    given: Any = SimpleNamespace(roles={"actor": begun, "critic": SimpleNamespace(strategy=None)})

    def agree(*_: Any) -> None:
        raise GangError("another plan")

    worker = SimpleNamespace(timeline=SimpleNamespace(mark=lambda _name: None))
    generation, search, keeper, rest = (
        cast("Any", SimpleNamespace(**fields))
        for fields in ({"worker": worker}, {"agree": agree}, {"still": lambda: None}, {})
    )
    with pytest.raises(GangError):
        restore(generation, search, keeper, given, rest, rest)
    assert gone == ["actor"]
