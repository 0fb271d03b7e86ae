"""Makes a certificate of what a run left on its disks, or says why there can be none.

The one idea: nothing is signed that was not computed again from the run's own files: the links of the chain, the samples of
each step, the state's digest from the bytes of the last checkpoint. A run that does not hold together gets no certificate.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from elasticrl import __version__
from elasticrl.base.redact import veiled
from elasticrl.base.regular import read_regular
from elasticrl.certificate.dealt import first_of
from elasticrl.certificate.form import (
    FORMAT,
    Begun,
    Certificate,
    Early,
    End,
    Model,
    Node,
    Recovery,
    Saved,
    State,
    Used,
    canonical,
    plain,
)
from elasticrl.certificate.merkle import root_of, root_of_steps
from elasticrl.certificate.model import NoModel, digest_of_state, of_checkpoint
from elasticrl.runtime.chain import link
from elasticrl.runtime.checkpoint.manifest import MANIFEST, Manifest
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.chronicle import History, Line
from elasticrl.runtime.chronicle import read as read_digests
from elasticrl.runtime.data.audit import Examined, Use, examine
from elasticrl.runtime.data.ledger import Record
from elasticrl.runtime.vault.errors import StateError
from elasticrl.runtime.vault.version import Version, longest

LETTERS: Final = 1000  # of a cause
NEAR: Final = 64  # links that one may follow
LAST_UPDATE: Final = 1 << 62  # of any step


class Uncertain(Exception):
    """There is no certificate of this run; the sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What daemons' logs say of a generation, where they are there."""

    reason: str = ""
    rung: str = ""
    ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A checkpoint, by its manifest."""

    path: Path
    manifest: Manifest
    sha256: str


def make(home: Path, *, logs: Mapping[int, Told] | None = None, last: int | None = None) -> Certificate:
    """Of the run whose checkpoints, ledger and digests are in `home`, up to the state after `last` steps: without it up to the
    newest checkpoint, or the newest digest if there is none. Uncertain if it does not hold together.
    """
    logs = logs or {}
    history = _history(home)
    found = _checkpoints(home)
    states = _chained(history.rows)
    last = _last(states, found, last)
    states = tuple(state for state in states if state.step <= last)
    links = {state.step: state.link for state in states}
    for each in found:
        _on_the_chain(each, links, last)
    examined = _examined(home, last)
    segments, used = examined.segments, _used(examined, last)
    generations = _generations(examined, logs)
    model, why = _model(home, found, states[-1], history.kind)
    ends: dict[int, int] = {}
    if segments[-1].walk.size is None:
        for _, sample in (use for step, uses in examined.used.items() if step < last for use in uses):
            ends[sample.epoch] = max(ends.get(sample.epoch, -1), sample.index)
    return Certificate(
        certificate=FORMAT,
        job=found[-1].manifest.facts.job if found else home.name,
        made_by=__version__,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        data=_each(each.manifest.facts.data for each in found),
        package_sha256=_each(each.manifest.code for each in found),
        packages=_versions(found),
        scripts=history.scripts,
        bits=history.bits,
        kind=history.kind,
        nodes=_nodes(examined),
        generations=generations,
        history=named(generations[-1]),
        recoveries=_recoveries(generations, history.rows, logs),
        states=states,
        head=states[-1].link,
        segments=segments,
        ends=tuple(End(epoch=epoch, index=index) for epoch, index in sorted(ends.items())),
        used=used,
        root=root_of_steps(each.root for each in used),
        skipped=examined.audit.skipped,
        filtered=examined.audit.filtered,
        checkpoints=tuple(_saved(each) for each in found if each.manifest.version.step <= last),
        model=model,
        no_model=why,
    )


# -- the chain


def _history(home: Path) -> History:
    try:
        history = read_digests(home)
    except (StateError, OSError) as error:
        raise Uncertain(str(error)) from error
    if not history.ok:
        raise Uncertain(
            f"{history.sentence}. Either the run was gone on from an older step with other settings (a fork), or something "
            "computed wrongly: see `elasticrl verify`."
        )
    return history


def _chained(rows: Sequence[Line]) -> tuple[State, ...]:
    """The chain that leads to the newest digest, oldest first."""
    nodes: list[tuple[Line, int]] = []  # each link that follows from another, and its place
    seen: set[tuple[int, str]] = set()
    loose: list[Line] = []
    for row in sorted(rows, key=lambda row: (row.step, -row.generation)):
        if not row.link or (row.step, row.link) in seen:
            continue
        near = range(len(nodes) - 1, max(len(nodes) - 1 - NEAR, -1), -1)
        earlier = next((at for at in near if link(nodes[at][0].link, row.step, row.digest) == row.link), None)
        if earlier is None and row.link != link("", row.step, row.digest):
            loose.append(row)
            continue
        seen.add((row.step, row.link))
        nodes.append((row, -1 if earlier is None else earlier))
    if loose:
        steps = ", ".join(str(row.step) for row in loose[:5])
        raise Uncertain(
            f"the chain of digests is broken at step {steps}: the digest before it is not here, or a line was changed. If the "
            "nodes have disks of their own, put the directories of all nodes side by side."
        )
    if not nodes:
        raise Uncertain("no digest here has a link: the chain was not made (lanes.digest: off?)")
    at = max(range(len(nodes)), key=lambda at: (nodes[at][0].step, nodes[at][0].generation))
    found: list[State] = []
    while at >= 0:
        row, at = nodes[at]
        found.append(State(step=row.step, generation=row.generation, digest=row.digest, link=row.link))
    return tuple(reversed(found))


def _last(states: Sequence[State], found: Sequence[_Found], last: int | None) -> int:
    steps = {state.step for state in states}
    if last is None:
        saved = [each.manifest.version.step for each in found if not each.manifest.version.update]
        last = max((step for step in saved if step in steps), default=states[-1].step)
    if last not in steps:
        raise Uncertain(f"there is no digest of the state after {last} steps; the newest is of {states[-1].step}")
    if last == 0:
        raise Uncertain("nothing was trained yet: the only state is the one that the run began with")
    return last


# -- checkpoints


def _checkpoints(home: Path) -> tuple[_Found, ...]:
    """By step. One that cannot be read says nothing."""
    found = []
    for path in sorted({*home.glob(f"*/{MANIFEST}"), *home.glob(f"*/*/{MANIFEST}")}):
        if path.parent.name.startswith("."):
            continue
        with suppress(StateError, OSError):
            text = read_regular(path)
            manifest = Manifest.decode(text, str(path))
            if manifest.name == path.parent.name and not manifest.version.update:
                found.append(_Found(path=path.parent, manifest=manifest, sha256=hashlib.sha256(text).hexdigest()))
    return tuple(sorted(found, key=lambda each: (each.manifest.version, each.manifest.generation, each.sha256)))


def _on_the_chain(each: _Found, links: Mapping[int, str], last: int) -> None:
    step, name = each.manifest.version.step, each.manifest.name
    if step <= last and each.manifest.chain != links.get(step):
        raise Uncertain(
            f"{name} is a checkpoint from a fork: its chain at step {step} is {each.manifest.chain[:16] or 'not there'}, and "
            f"this run's is {links.get(step, 'not there')[:16]}. Move it elsewhere, or certify the run that it is of."
        )


def _saved(each: _Found) -> Saved:
    manifest = each.manifest
    return Saved(
        name=manifest.name, step=manifest.version.step, generation=manifest.generation, link=manifest.chain,
        manifest_sha256=each.sha256,
    )  # fmt: skip


def _model(home: Path, found: Sequence[_Found], state: State, kind: str) -> tuple[Model | None, str]:
    """The model of the last state, and why there is none."""
    mine = [each for each in found if each.manifest.version.step == state.step and each.path.parent == home]
    whole = [each for each in mine if len(each.manifest.shards) == each.manifest.world]
    if not whole:
        return None, f"there is no whole checkpoint of step {state.step} here"
    name = whole[-1].manifest.name
    try:
        digest = digest_of_state(place(home), name, kind)
        sha256, tensors, nbytes = of_checkpoint(place(home), name)
    except NoModel as why:
        return None, str(why)[:LETTERS]
    if digest != state.digest:
        raise Uncertain(
            f"{name} is not the state that the run had after step {state.step}: its bytes come to the digest {digest}, and "
            f"the run wrote {state.digest}. It is a model that is not the run's, or the disk has changed it."
        )
    return Model(
        checkpoint=name, step=state.step, digest=digest, sha256=sha256, tensors=tensors, nbytes=nbytes
    ), ""  # fmt: skip


# -- samples


def _examined(home: Path, last: int) -> Examined:
    try:
        found = examine(home, through=Version(last - 1, LAST_UPDATE))
    except (StateError, OSError) as error:
        raise Uncertain(str(error)) from error
    if not found.audit.ok:
        raise Uncertain(found.audit.sentence)
    if found.audit.last < last - 1:
        raise Uncertain(f"the ledger has samples up to step {found.audit.last} only, and not up to {last - 1}")
    return found


def _used(examined: Examined, last: int) -> tuple[Used, ...]:
    first = first_of(examined.segments)
    return tuple(_of_step(step, examined.used.get(step, {})) for step in range(first, last))


def _of_step(step: int, uses: Mapping[Use, Record]) -> Used:
    turns = {turn for turn, _ in uses}
    by = {(sample.epoch, sample.index): record.by for (_, sample), record in uses.items()}
    most = Counter(by.values()).most_common()
    main = max((weights for weights, _ in most if weights is not None), default=None)
    early = [
        Early(by=w, epoch=sample[0], index=sample[1]) for sample, w in sorted(by.items()) if w is not None and w != main
    ]
    return Used(
        step=step, samples=len(by), root=root_of(step, by, len(turns)), by=main, early=tuple(early)
    )  # fmt: skip


# -- generations


def _generations(examined: Examined, logs: Mapping[int, Told]) -> tuple[Begun, ...]:
    found: list[Begun] = []
    digest = ""
    for number in sorted({*examined.lineages, *logs}):
        lineage = examined.lineages.get(number, ())
        plans, told = examined.plans.get(number, ()), logs.get(number, Told())
        first: Mapping[str, Any] = plans[0] if plans else {}
        cut = lineage[-1] if lineage else None
        whole = longest(lineage, examined.lineages.values()) if lineage else ()
        row = Begun(
            number=number,
            parent=whole[-2].generation if len(whole) > 1 else 0,
            step=None if cut is None else max(cut.start.step, 0),
            update=0 if cut is None else cut.start.update,
            cause=veiled(str(first.get("cause") or told.reason or "not told"))[0][:LETTERS],
            rung=str(first.get("rung") or told.rung),
            seats=tuple(map(str, first.get("seats", ()))),
            config=str(first.get("config", "")),
            before=digest,
        )
        digest = named(row)
        found.append(row)
    return tuple(found)


def named(row: Begun) -> str:
    """A hash of a generation, and so of all before it, as it names the one before."""
    return hashlib.sha256(canonical(plain(row))).hexdigest()


def _recoveries(generations: Sequence[Begun], rows: Sequence[Line], logs: Mapping[int, Told]) -> tuple[Recovery, ...]:
    """Of each generation that goes on from another."""
    reached: dict[int, int] = {}  # by generation, its newest step
    for row in rows:
        reached[row.generation] = max(reached.get(row.generation, 0), row.step)
    found = []
    for each in generations:
        if each.step is None or not each.parent:
            continue
        newest = max((step for number, step in reached.items() if number < each.number), default=0)
        ms = logs[each.number].ms if each.number in logs else None
        found.append(Recovery(generation=each.number, step=each.step, again=max(newest - each.step, 0), ms=ms))
    return tuple(found)


def _nodes(examined: Examined) -> tuple[Node, ...]:
    found: dict[tuple[Any, ...], Node] = {}
    for plan in (plan for plans in examined.plans.values() for plan in plans):
        made = plan.get("made")
        if isinstance(made, dict):
            node = Node(name=str(plan.get("node", "")), made={str(name): str(value) for name, value in made.items()})
            found.setdefault((node.name, *sorted(node.made.items())), node)
    return tuple(found[key] for key in sorted(found))


def _versions(found: Sequence[_Found]) -> tuple[Mapping[str, str], ...]:
    distinct: list[Mapping[str, str]] = []
    for each in found:
        if each.manifest.facts.versions and each.manifest.facts.versions not in distinct:
            distinct.append(each.manifest.facts.versions)
    return tuple(distinct)


def _each(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({value for value in values if value}))
