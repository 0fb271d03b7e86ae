"""What a process does whose restore was cut short before, as the next gang goes on from a checkpoint."""

from collections.abc import Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrl.runtime.restore import _Fill
from elasticrl.runtime.vault.errors import Outlived


@pytest.mark.parametrize(
    ("begun", "kept", "allow", "restores"),
    [
        (True, {"actor", "critic"}, ["parts"], True),
        (False, {"critic"}, ["parts"], True),
        (True, {"critic"}, [], True),  # and is refused there, as it names what differs
        (True, {"critic"}, ["parts"], False),
    ],
)
def test_a_model_that_a_checkpoint_lacks_begins_anew_in_a_process_that_still_has_its_beginning(
    monkeypatch: pytest.MonkeyPatch, begun: bool, kept: set[str], allow: list[str], restores: bool
) -> None:
    # Found by reading: memory of a restore that was cut short, which nothing was written to, was trained on.
    done: list[Any] = []
    shard = SimpleNamespace(layout=SimpleNamespace(shapes={}))
    given: Any = SimpleNamespace(
        begun=begun,
        roles={name: SimpleNamespace(live=SimpleNamespace(shard=shard)) for name in ("actor", "critic")},
        note_first=lambda **_: False,
        parts=SimpleNamespace(restore=lambda source, **_: done.append(source)),
    )
    tree = SimpleNamespace(checkpoint=SimpleNamespace(allow=allow))
    worker = SimpleNamespace(context=SimpleNamespace(tree=tree), beat=SimpleNamespace(nearer=lambda: None))
    generation: Any = SimpleNamespace(worker=worker, place=SimpleNamespace(resume=4))
    agreed: Any = SimpleNamespace(whole=None, checkpoint="step-00000004-g1", version=SimpleNamespace(step=4))

    @contextmanager
    def opened(_self: Any, name: str, _models: Mapping[str, Any]) -> Any:
        yield SimpleNamespace(name=name, values=dict.fromkeys(kept), nearer=None)

    monkeypatch.setattr(_Fill, "_opened", opened)
    fill = _Fill(generation, SimpleNamespace(), given, SimpleNamespace(count=0, step=0), agreed)  # type: ignore[arg-type]
    if restores:
        fill._read(set())
        assert done
    else:
        with pytest.raises(Outlived, match="keeps nothing of actor, which is to begin anew"):
            fill._read(set())
        assert not done
