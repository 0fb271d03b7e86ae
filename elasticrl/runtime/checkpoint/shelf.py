"""The checkpoints of a place: list, verify, find the newest good one, commit, prune. Imports no tensor library.

The one idea: trust is recomputed, never remembered. `newest_good` hashes the newest committed checkpoint and steps back, with
a sentence for each one that it had to leave out.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from elasticrl.runtime.checkpoint.manifest import COMMITTED, MANIFEST, Committed, FileEntry, Manifest, parse_name
from elasticrl.runtime.checkpoint.place import STAGING, TRASH, UNREAD, Place, Url, explained, is_away
from elasticrl.runtime.vault.errors import CheckpointCorrupt, CheckpointError, CheckpointRefused, CheckpointUnread
from elasticrl.runtime.vault.version import Version

NONE: Final[Mapping[str, str]] = MappingProxyType({})
LEFT_S = (
    3600.0  # a save of another generation into which nothing was written for so long: over any usual checkpoint.timeout
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One checkpoint as a list shows it. `manifest` is None, and `problem` says why, if it can't be read."""

    name: str
    version: Version
    generation: int
    committed: bool
    manifest: Manifest | None = None
    problem: str = ""
    foreign: bool = False  # it is whole, and of another version's format


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A file that is not what was written. Example: see `sentence`."""

    name: str
    file: str
    shard: int | None
    node: str
    why: str
    unread: bool = False  # it was not seen: only reading it fails today

    @property
    def sentence(self) -> str:
        """For people."""
        owner = "" if self.shard is None else f" (shard {self.shard}, written by {self.node or 'an unknown node'})"
        return f"{self.name}: {self.file}{owner} {self.why}"

    @property
    def proven(self) -> bool:
        """It was seen, and not only that reading fails today."""
        return not self.unread


@dataclass(frozen=True, slots=True)
class Amiss:
    """What is wrong with one file, after its name."""

    why: str
    unread: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest good checkpoint, and a sentence for each newer one that is not good."""

    manifest: Manifest
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fresh:
    """The checkpoint that was just published, by `node`. What this node wrote it has hashed as it did, and would read from its
    cache, which says nothing of the disk. What others wrote on a file system that is shared nobody has read yet.
    """

    name: str
    node: str


def listing(place: Place) -> tuple[Entry, ...]:
    """All published checkpoints, the newest first."""
    entries: list[Entry] = []
    with explained("Listing checkpoints", place, UNREAD):
        for name in place.names():
            parsed = parse_name(name)
            assert parsed is not None
            version, generation = parsed
            manifest, problem, foreign = None, "", False
            try:
                manifest = read_manifest(place, name)
            except (CheckpointCorrupt, CheckpointRefused) as error:
                problem, foreign = str(error), isinstance(error, CheckpointRefused)
            entries.append(
                Entry(
                    name=name,
                    version=version,
                    generation=generation,
                    committed=_is_committed(place, name),
                    manifest=manifest,
                    problem=problem,
                    foreign=foreign,
                )
            )
    return tuple(sorted(entries, key=lambda e: (e.version, e.generation), reverse=True))


def read_manifest(place: Place, name: str) -> Manifest:
    """One checkpoint's manifest; CheckpointCorrupt if it is missing, torn, changed or another one's, CheckpointRefused if it is
    of another format.
    """
    return _manifest(place, name)[0]


def _manifest(place: Place, name: str) -> tuple[Manifest, bytes]:
    """The same, and its text."""
    try:
        text = place.read(name, MANIFEST)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{name} has no {MANIFEST}: its save never ended.") from error
    except OSError as error:
        if is_away(error):
            raise
        raise CheckpointUnread(f"{name}/{MANIFEST} {_unread(error).why}.") from error
    manifest = Manifest.decode(text, f"{name}/{MANIFEST}")
    if manifest.name != name:
        raise CheckpointCorrupt(f"{name} holds the manifest of {manifest.name}: directories were mixed up.")
    return manifest, text


def verify(place: Place, name: str) -> tuple[Problem, ...]:
    """Hash every file of a checkpoint again; what is wrong with which shard of which node. CheckpointStorage if the place is
    away.
    """
    with explained(f"Verifying {name}", place, UNREAD):
        return _verified(place, name, partial(_hashed, place, name))


def looked_at(place: Place, name: str, *, fresh: Fresh | None = None) -> tuple[Problem, ...]:
    """The same, without reading what is far: at a URL it is enough that a file is there, and as long as it was. Who reads of it
    checks what it reads, block by block. So it is for what the node of a `fresh` one wrote itself.
    """
    far = isinstance(place, Url)
    if not far and (fresh is None or fresh.name != name):
        return verify(place, name)

    def look(file: FileEntry) -> Amiss | None:
        if far or (fresh is not None and file.node in {fresh.node, ""}):  # its publisher writes what is nobody's shard
            return _as_long(place, name, sizes, file)
        return _hashed(place, name, file)

    with explained(f"Looking at {name}", place, UNREAD):
        sizes: dict[str, int | None] = {}
        with suppress(FileNotFoundError):
            sizes = place.sizes(name) if isinstance(place, Url) else sizes
        return _verified(place, name, look)


def _verified(place: Place, name: str, look: Callable[[FileEntry], Amiss | None]) -> tuple[Problem, ...]:
    try:
        manifest, text = _manifest(place, name)
    except (CheckpointCorrupt, CheckpointRefused) as error:
        unread = isinstance(error, CheckpointUnread)
        return (Problem(name=name, file=MANIFEST, shard=None, node="", why=str(error), unread=unread),)
    problems = [
        Problem(name=name, file=file.name, shard=file.shard, node=file.node, why=amiss.why, unread=amiss.unread)
        for file in manifest.files
        if (amiss := look(file))
    ]
    if amiss := _commit_problem(place, name, text):
        problems.append(Problem(name=name, file=COMMITTED, shard=None, node="", why=amiss.why, unread=amiss.unread))
    return tuple(problems)


def _as_long(place: Place, name: str, sizes: Mapping[str, int | None], file: FileEntry) -> Amiss | None:
    """What is wrong with a file of which only the size is known; None if nothing is. A listing may be old or know no sizes, so
    against it the store's word on the file itself counts; a file of which nobody knows the size is there.
    """
    size = sizes.get(file.name)
    if size != file.nbytes:
        try:
            size = place.size(name, file.name)
        except FileNotFoundError:
            return Amiss("is missing")
    return None if size is None else _of_size(size, file)


def _of_size(size: int, file: FileEntry) -> Amiss | None:
    return None if size == file.nbytes else Amiss(f"has {size} bytes instead of {file.nbytes}")


def _unread(error: OSError) -> Amiss:
    return Amiss(f"cannot be read ({error.strerror or error})", unread=True)


def _hashed(place: Place, name: str, file: FileEntry) -> Amiss | None:
    """The same by its bytes."""
    try:
        size, found = place.digest(name, file.name)
    except FileNotFoundError:
        return Amiss("is missing")
    except OSError as error:
        if is_away(error):
            raise
        return _unread(error)
    if amiss := _of_size(size, file):
        return amiss
    if found != file.sha256:
        return Amiss(f"was changed: its sha256 is {found[:12]}... instead of {file.sha256[:12]}...")
    return None


def newest_good(
    place: Place,
    *,
    commit: str | None = None,
    uncommitted: bool = False,
    damaged: Mapping[str, str] = NONE,
    fresh: Fresh | None = None,
) -> Found | None:
    """The newest checkpoint whose every byte is what was written. None if there is none. At a URL no data is read: there the
    one whose files are as long as they were, but for those `damaged` in which somebody has found a changed block. Nor is it of
    what was just written here (`fresh`).

    CheckpointStorage if the place is away: then nothing is known of any. CheckpointRefused if it is of another version's
    format: no older one is taken in its place.

    Only committed ones count: those with a COMMITTED record, and the one that the store names as its commit. `uncommitted`
    also takes what was saved but never committed: for a run without a daemon, whose checkpoints nobody but itself commits, and
    for an operator who exports (`--uncommitted`), as when the store is lost.
    """
    passed_over: list[str] = []
    for entry in listing(place):
        if not (entry.committed or entry.name == commit or uncommitted):
            continue
        if entry.foreign:
            raise CheckpointRefused(f"This version cannot go on from what is at {place}: {entry.problem}")
        sentence = entry.problem or damaged.get(entry.name, "")
        if not sentence:
            problems = looked_at(place, entry.name, fresh=fresh)
            if not problems:
                assert entry.manifest is not None
                return Found(manifest=entry.manifest, passed_over=tuple(passed_over))
            sentence = problems[0].sentence + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
        passed_over.append(f"step {entry.version} of generation {entry.generation} is not good: {sentence}")
    if passed_over:
        raise CheckpointCorrupt(
            f"No checkpoint at {place} is good: {'; '.join(passed_over)}. Restore one from a backup, or start anew in another "
            "place; nothing here was changed."
        )
    return None


def mark_committed(place: Place, name: str) -> Committed:
    """To be called after the transaction: from now on the checkpoint is committed even for those who lost the store."""
    with explained(f"Marking {name} as committed", place):
        text = place.read(name, MANIFEST)
        manifest = Manifest.decode(text, f"{name}/{MANIFEST}")
        record = Committed(
            name=name,
            generation=manifest.generation,
            manifest_sha256=hashlib.sha256(text).hexdigest(),
        )
        place.put(name, COMMITTED, record.encode())
    return record


def mark_all(place: Place, name: str) -> None:
    """The same, and of the commit that it follows, whose mark may have failed: else that one would pass for a mere save."""
    with explained(f"Marking {name} as committed", place):
        parent = read_manifest(place, name).parent
        bare = parent is not None and not _is_committed(place, parent)
    if parent is not None and bare:
        with suppress(CheckpointError):  # it may have gone
            mark_committed(place, parent)
    mark_committed(place, name)


def read_committed(place: Place, name: str) -> Committed | None:
    """The record that `mark_committed` left, if it can be read, is whole and fits the manifest beside it. OSError if the place
    is away: then nobody knows.
    """
    try:
        return _record(name, place.read(name, COMMITTED), place.read(name, MANIFEST))
    except OSError as error:
        if is_away(error):
            raise
        return None


def _record(name: str, text: bytes, manifest: bytes) -> Committed | None:
    try:
        record = Committed.decode(text, f"{name}/{COMMITTED}")
    except CheckpointCorrupt:
        return None
    return record if (record.name, record.manifest_sha256) == (name, hashlib.sha256(manifest).hexdigest()) else None


def _is_committed(place: Place, name: str) -> bool:
    """A commit record that no longer fits, or cannot be read, still says that there was a commit: the checkpoint is then bad,
    not uncommitted. OSError if the place is away.
    """
    try:
        place.read(name, COMMITTED)
    except FileNotFoundError:
        return False
    except OSError as error:
        if is_away(error):
            raise
    return True


def _commit_problem(place: Place, name: str, manifest: bytes) -> Amiss | None:
    """What is wrong with the commit record beside a manifest of this text; None if nothing is, or if there is none."""
    try:
        text = place.read(name, COMMITTED)
    except FileNotFoundError:
        return None
    except OSError as error:
        if is_away(error):
            raise
        return _unread(error)
    fits = _record(name, text, manifest) is not None
    return None if fits else Amiss(f"does not fit {MANIFEST}: one of the two was changed")


def best_of(entries: Sequence[Entry], *, commit: str | None = None, uncommitted: bool = False) -> Entry | None:
    """Of the committed ones that were evaluated the one with the highest score, of equals the newest."""
    scored = [
        (e.manifest.score, e.version, e.generation, e)
        for e in entries
        if e.manifest is not None and e.manifest.score is not None and (e.committed or e.name == commit or uncommitted)
    ]
    return max(scored, key=lambda one: one[:3], default=(None,))[-1]


def doomed(
    entries: Sequence[Entry], *, keep_last: int, keep_every: int = 0, keep_best: bool = False, good: str | None,
    commit: str | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Which checkpoints may go. Never the newest good one, never the one the store names, never one newer than the last commit.

    `keep_every`: those at multiples of so many steps stay for good. `keep_best`: so does the best of them. What was saved but
    never committed goes once a later one is committed: no transaction can name it any more.
    """
    committed = [e for e in entries if e.committed or e.name == commit]
    # The generation first: after a step back the commits of those before are of later steps, and yet are earlier commits.
    newest = max(((e.generation, e.version) for e in committed), default=None)
    stay = {
        e.name for e in sorted(committed, key=lambda e: (e.version, e.generation), reverse=True)[: max(keep_last, 1)]
    }
    stay |= {e.name for e in committed if keep_every and e.version.step % keep_every == 0 and not e.version.update}
    best = best_of(entries, commit=commit) if keep_best else None
    stay |= {name for name in (good, commit, best and best.name) if name}
    return tuple(
        e.name
        for e in entries
        if e.name not in stay and newest is not None and (e.committed or (e.generation, e.version) < newest)
    )


def prunable(
    place: Place,
    *,
    keep_last: int,
    keep_every: int = 0,
    keep_best: bool = False,
    generation: int | None = None,
    commit: str | None = None,
    idle_s: float | None = None,
    fresh: Fresh | None = None,
) -> tuple[str, ...]:
    """What `doomed` names, and what saves of generations before `generation`, and this one's before its newest commit, left
    unfinished. `generation`: the job's present one. Who does not know it goes by the newest commit's, which may be another
    job's, brought here to begin with: what somebody may still be writing then stays. `idle_s`: and whatever nobody has written
    into for so long.

    The newest good one is looked for by hashing: what a hasty prune trusts is what a disaster finds broken. At a URL sizes have
    to do, as it would travel whole after each commit. So they have for what this node has just written (`fresh`).
    CheckpointCorrupt if nothing is good: every byte may then be needed for a rescue.
    """
    with explained("Looking through checkpoints", place):
        entries = listing(place)
        found = newest_good(place, commit=commit, fresh=fresh)
        good = found.manifest.name if found else None
        gone = list(
            doomed(entries, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, good=good, commit=commit)
        )
        told = generation is not None
        if generation is None:
            generation = max((e.generation for e in entries if e.committed or e.name == commit), default=None)
        for leftover in place.leftovers():
            parsed = parse_name(leftover.removeprefix(STAGING))
            older = generation is not None and parsed is not None and parsed[1] < generation
            left_s = place.idle_s(leftover) or 0.0
            deserted = idle_s is not None and left_s > idle_s
            if leftover.startswith(TRASH) or (older and (told or left_s > LEFT_S)) or deserted:
                gone.append(leftover)
        # Of its own generation alone: after a step back older generations' commits are newer than what is being saved.
        own = [e.version for e in entries if e.generation == generation and (e.committed or e.name == commit)]
        if generation is not None and own:
            behind = overtaken(place, max(own), generation)
            gone.extend(name for name in behind if told or (place.idle_s(name) or 0.0) > LEFT_S)
    return tuple(dict.fromkeys(gone))


def overtaken(place: Place, version: Version, generation: int, *, earlier: bool = False) -> tuple[str, ...]:
    """What saves of this generation before `version` left unfinished, for the one that publishes to clear away once it comes to
    `version`: it saves one after the other, so nobody will finish those. `earlier`: and saves of earlier generations, which
    writers that have outlived their workers may still finish.
    """
    found: list[str] = []
    with explained("Looking for what failed saves left", place):
        for leftover in place.leftovers():
            parsed = parse_name(leftover.removeprefix(STAGING))
            theirs = parsed is not None and (parsed[1] == generation or (earlier and parsed[1] < generation))
            if parsed is not None and theirs and parsed[0] < version:
                found.append(leftover)
    return tuple(found)


def clear(place: Place, names: Iterable[str]) -> None:
    """Remove these checkpoints and leftovers."""
    with explained("Pruning checkpoints", place):
        for name in names:
            if name.startswith(STAGING):
                place.abandon(name.removeprefix(STAGING))
            else:
                place.remove(name)


def prune(
    place: Place, *, keep_last: int, keep_every: int = 0, keep_best: bool = False, generation: int | None = None,
    commit: str | None = None, fresh: Fresh | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Remove what is `prunable`, and nothing where no checkpoint is good; the names that went."""
    try:
        gone = prunable(
            place, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, generation=generation, commit=commit,
            fresh=fresh,
        )  # fmt: skip
    except (CheckpointCorrupt, CheckpointRefused):
        return ()
    clear(place, gone)
    return gone
