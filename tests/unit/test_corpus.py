"""The corpus of real shapes: each excerpt is whole, and the rules are as often right as the page says."""

import re
from functools import cache

import pytest

from bench.diagnose import CORPUS, KEYS, PARTS, Judged, corpus, judged, share, torches
from elasticrl.contract.verdict import Fault

#: What was reached, less some excerpts that a change may cost for a good reason: (right, confidently wrong).
REACHED = {"work": (0.97, 0.003), "held": (0.885, 0.012)}
FEWEST = 2810
#: Torches that jobs run today. The last two were nightly builds of which little is public.
TORCHES = ("1.12", "1.13", *(f"2.{minor}" for minor in range(16)))
NEWEST = ("2.12", "2.13", "2.14", "2.15")


@cache
def verdicts(part: str) -> tuple[Judged, ...]:
    """What is made of each excerpt."""
    return tuple(judged(one) for one in corpus(part))


def test_every_excerpt_is_whole_and_says_where_its_shape_was_seen() -> None:
    found = 0
    for path in sorted(CORPUS.glob("*/*.txt")):
        head, dashes, log = path.read_text(encoding="utf-8").partition("\n---\n")
        assert [line[2:].partition(":")[0] for line in head.splitlines()] == list(KEYS), path.name
        assert dashes, path.name
        assert log.strip(), path.name
        found += 1
    assert found >= FEWEST
    for part in PARTS:
        for one in corpus(part):
            assert one.source.startswith("https://"), one.name
            assert one.proof, one.name
            assert one.family, one.name


def test_no_thread_is_in_both_parts() -> None:
    work, held = ({one.source for one in corpus(part)} for part in PARTS)
    assert work & held == set()


@pytest.mark.parametrize("part", PARTS)
def test_verdicts_are_as_often_right_as_was_reached(part: str) -> None:
    found = list(verdicts(part))
    right, sure = REACHED[part]
    assert share(found, "right") >= right
    assert share(found, "sure") <= sure


def test_every_class_that_a_log_can_show_has_excerpts() -> None:
    proven = {one.proven for part in PARTS for one in corpus(part)}
    assert set(Fault) - proven <= {Fault.DIVERGENCE}


def test_each_torch_since_1_12_has_excerpts_and_the_newest_have_forty() -> None:
    counts = torches()
    assert set(TORCHES) <= counts.keys()
    assert sum(counts[torch] for torch in NEWEST) >= 40


#: The families that diagnosis was asked to know: words of theirs, as an excerpt has them (any of its lines).
ASKED = {
    "PCIe errors": r"AER:|PCIe Bus Error",
    "a device handle": r"Unable to determine the device handle",
    "a GPU that is lost": r"GPU is lost|fallen off the bus",
    "GSP": r"\bGSP\b",
    "Xid": r"NVRM: Xid",
    "CUDA 802, 804, 999": r"system not yet initialized|forward compatibility was attempted|[Ee]rror 80[24]\b|unknown error",
    "fabric manager": r"[Ff]abric ?[Mm]anager",
    "NVLS": r"NVLS|nvls",
    "heat": r"[Tt]hermal|[Tt]emperature|[Tt]hrottl",
    "stacks of the kernel": r"blocked for more than \d+ seconds|\[<0>\]",
    "EFA and libfabric": r"NET/OFI|libfabric|fi_\w+",
    "UCX": r"\bUCX\b",
    "UCX, signal 7": r"Caught signal \d+",
    "RCCL": r"\bRCCL\b|\brccl\b",
    "loopback": r"\blo:127\.0\.0\.1|127\.0\.[01]\.1",
    "no such interface": r"AF_INET|[Nn]o (?:socket |usable )?interface|SOCKET_IFNAME|Unable to find address for",
    "Slurm": r"slurmstepd|srun: |SLURM",
    "a time limit": r"TIME LIMIT|TimeLimit|DeadlineExceeded",
    "preemption and requeue": r"PREEMPT|[Pp]reempt|[Rr]equeue",
    "a node's failure": r"NODE FAILURE|NODE_FAIL|[Nn]ode fail|node_fail|NodeDied|node (?:has )?died",
    "oom-kill event": r"oom[-_ ]kill",
    "eviction": r"[Ee]victed|[Ee]viction",
    "OOMKilled": r"OOMKilled|Exit Code: +137",
    "Ray's memory monitor": r"node running low on memory|memory pressure|memory monitor",
    "an actor that died": r"actor (?:died|is dead)|ActorDiedError|RayActorError",
    "limits of threads": r"Resource temporarily unavailable|pthread_create|can't start new thread|[Tt]hread creation failed",
    "marked dead": r"marked dead",
    "hangups": r"SIGHUP|got signal: 1\b|[Ss]ignal 1 ",
    "a rendezvous that is closed": r"Rendezvous(?:Closed|Connection|GracefulExit)Error",
    "stale files of a store": r"dist_init|file://|FileStore|worker_count=\d+",
    "worker counts": r"worker_count=|world_size=|WORLD_SIZE",
    "EngineCore": r"EngineCore|EngineDead",
    "shared memory broadcast": r"shared memory broadcast",
    "HTTP 429": r"\b429\b",
    "one rank's tokenizer": r"[Tt]okeniz",
    "sizes that were never received": r"1 ?EB memory|EiB|\d{13,} bytes|[Mm]essage truncated|preamble\.length|UnpicklingError",
    "watchdogs": r"[Ww]atchdog",
    "glibc": r"GLIBC|GLIBCXX",
    "ancdata": r"ancdata",
}


@pytest.mark.parametrize("family", ASKED)
def test_each_family_that_was_asked_for_has_five_excerpts_and_most_are_right(family: str) -> None:
    words = re.compile(ASKED[family])
    found = [each for part in PARTS for each in verdicts(part) if words.search(each.excerpt.log)]
    assert len(found) >= 5
    assert share(found, "right") >= 0.8
