"""Whose a file is, where several jobs' lie below one folder. Pure.

The one idea: what names its job (a daemon's log, an incident, a checkpoint) vouches for what lies around it. A folder of a
job's name is that job's; else a file is of the job that alone is named in the nearest folder above it. What lies where several
are named may be of any of them.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path


class Unchosen(Exception):
    """Whose run is to be told is not known; the sentence says whose there are."""


class Owners:
    """Whose what lies below a folder is. `said`: the jobs that a file names, or a folder as a whole.

    >>> owners = Owners(Path("run"), {Path("run/log/a/n0.log"): {"a"}, Path("run/demo/log/n0.log"): {"b"}}, {"a", "b"})
    >>> [owners.of(Path("run") / each) for each in ("state/a/n0", "demo/history.jsonl", "history.jsonl")]
    ['a', 'b', None]
    """

    def __init__(self, folder: Path, said: Mapping[Path, Collection[str]], jobs: Collection[str]) -> None:
        self._folder, self._jobs = folder, frozenset(jobs)
        self._below: dict[Path, set[str]] = defaultdict(set)
        for path, names in said.items():
            for place in self._up(path):
                self._below[place] |= set(names)

    def of(self, path: Path) -> str | None:
        """The job; None if it may be any."""
        for place in self._up(path):
            if place != self._folder and place.name in self._jobs:
                return place.name
            if len(named := self._below.get(place, ())) == 1:
                return next(iter(named))
        return None

    def _up(self, path: Path) -> Iterator[Path]:
        while path != self._folder:
            yield path
            path = path.parent
        yield path


def apart(said: Iterable[Collection[str]]) -> tuple[frozenset[str], ...]:
    """The jobs by those that some file names together, as a machine's journal does.

    >>> [sorted(jobs) for jobs in apart([{"a"}, {"b", "c"}, {"c", "d"}, {}])]
    [['a'], ['b', 'c', 'd']]
    """
    found: list[frozenset[str]] = []
    for names in map(frozenset, said):
        joined = [each for each in found if each & names]
        found = [*(each for each in found if not each & names), *([names.union(*joined)] if names else [])]
    return tuple(found)


def chosen(folder: Path, said: Iterable[Collection[str]], job: str | None, known: Collection[str]) -> str | None:
    """The job that was asked for, or None where the newest is meant; Unchosen if it is not there, or if several lie apart."""
    if job is not None:
        if job not in known:
            there = f": there are {', '.join(sorted(known))}" if known else ""
            raise Unchosen(f"no run of job {job} lies below {folder}{there}")
        return job
    if len(groups := apart(said)) > 1:
        raise Unchosen(
            f"several jobs' runs lie below {folder}: {', '.join(sorted(frozenset().union(*groups)))}; name one: --job NAME"
        )
    return None
