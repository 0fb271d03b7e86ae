"""Rules for when only victims spoke: what follows from a cause that the evidence does not show, and waits.

The one idea: nobody is blamed for having waited. What such jobs turned out to have is said with confidence `low`.
"""

from elasticrl.contract.evidence import Sign
from elasticrl.contract.verdict import Confidence, Fault, Verdict, rank_names
from elasticrl.core.judge.case import Case
from elasticrl.core.judge.meanings import CONSEQUENCES, WATCHDOGS

SHORT_TIMEOUT_MS = 120_000  # a collective timeout that a save or an evaluation on one rank easily exceeds
HERE = ("localhost", "127.0.0.1", "::1")  # a far end of this name may be any process of that machine
LATE_RUN = 100_000  # collectives after which preparation is long over


def aborted(case: Case) -> Verdict | None:
    """One rank, or few, ended by abort(), and nothing says why: it ended first, whatever it was that it could not stand."""
    ranks = tuple(sorted(case.aborted))
    told = [f for f in case.evidence if f.sign is Sign.ABORTED and f.rank in case.aborted]
    if not ranks or (case.facts.world and 2 * len(ranks) > case.facts.world):
        return None
    return Verdict(
        fault=Fault.DEAD_RANK, ranks=ranks, confidence=Confidence.LOW, cause=f"{rank_names(ranks)} died: it called abort()",
        remedy="Read what that rank printed before it aborted; a library's own check, or its native stack, says why.",
        because=tuple(told[:4]), against=("its log shows an error of its own, or a peer sent it what it did not expect",),
    )  # fmt: skip


def followed(case: Case) -> Verdict | None:
    """Consequences without a cause: somebody else is at fault, and the evidence does not show who."""
    for sign, meaning in CONSEQUENCES.items():
        told = [fact for fact in case.evidence if fact.sign is sign and not case.late(fact)]
        if not told or (sign is Sign.ABORTED and any(wait.kind in WATCHDOGS for wait in case.waits)):
            continue  # a watchdog that has waited in vain aborts: that says nothing new
        peers = tuple(sorted({fact.peer for fact in told if fact.peer and fact.peer not in HERE}))
        nodes = peers if sign is Sign.PEER_GONE and len(peers) == 1 else ()
        speak = {fact.rank for fact in case.evidence if fact.sign is not Sign.NOISE}
        silent = tuple(sorted(case.facts.heard - speak)) if sign is Sign.PEER_GONE else ()
        ranks = silent if len(silent) == 1 else ()
        words = meaning.words + (f" (far end: {nodes[0]})" if nodes else "")
        if ranks:
            words += f"; {rank_names(ranks)} is the one of which nothing more was heard"
        return Verdict(
            fault=meaning.fault, ranks=ranks, nodes=nodes, confidence=meaning.confidence, cause=words,
            remedy=meaning.remedy, because=tuple(told[:4]), against=(meaning.contradicted_by,),
        )  # fmt: skip
    return None


def starved(case: Case) -> Verdict | None:
    """Only victims spoke. What such jobs turn out to have, most often; nobody is named."""
    if not case.waits:
        return None
    waited = [fact for fact in case.waits if fact.sign is Sign.WAITED]
    because = tuple((waited or list(case.waits))[:4])
    ranks = rank_names(sorted(case.waiting))
    timeouts = [fact.timeout_ms for fact in waited if fact.timeout_ms]
    seqs = [fact.seq for fact in waited if fact.seq is not None]
    late = any(f.elapsed_ms and f.timeout_ms and f.elapsed_ms > 2 * f.timeout_ms for f in waited)
    note = (
        " ('ran for' is far over the timeout: the watchdog was stuck as well, so it does not tell when this began)"
        if late
        else ""
    )
    if timeouts and max(timeouts) <= SHORT_TIMEOUT_MS:
        return Verdict(
            fault=Fault.CONFIG, because=because,
            cause=f"{ranks or 'some ranks'} gave up after only {max(timeouts) / 1000:.0f} s: the timeout is likely "
            "shorter than what one rank does "
            f"between two collectives (a save, an evaluation, loading){note}",
            remedy="Give the group a timeout longer than its slowest phase (new_group(timeout=...)), and see what the "
            "silent rank did.",
            against=("the silent rank is stuck far longer than any save", "it was still progressing when the timeout came"),
        )  # fmt: skip
    who = ranks or "some rank"
    barrier = any(fact.numel_in is not None and fact.numel_in <= 1 for fact in waited)
    if seqs and min(seqs) >= LATE_RUN and not barrier and len(case.waiting) > 1:  # of one alone nothing can be compared
        return Verdict(
            fault=Fault.DESYNC, because=because,
            cause=f"{who} waited for somebody who did not come, after {min(seqs):,} collectives that worked: most likely "
            "uneven inputs or an early "
            f"exit (the end of an epoch, an evaluation on some ranks only), else a host that is stuck{note}",
            remedy="Compare batch counts and shard sizes of the ranks; seed every split; use join() or drop_last. Collect "
            "the other ranks' logs.",
            against=("a rank is found alive and stuck on its host",
                     "all ranks are in the same collective (then it is the network)"),
        )  # fmt: skip
    setup = [fact for fact in case.waits if fact.sign is Sign.SETUP_WAITED]
    if setup and not waited:
        absent = tuple(sorted({rank for fact in setup for rank in fact.ranks} - case.waiting))
        cause = (
            f"{who} waited for {rank_names(absent) or 'the others'} at the rendezvous of a group and it did not come in time: "
            "still loading or preparing, never started, or not reachable"
        )
        remedy = (
            "See what the absent rank did meanwhile; raise the timeout for long preparation; check the interface (not lo) and "
            "the port."
        )
        against = ("the absent rank was waiting too (then the network between them is at fault)",)
        fault = Fault.HOST_HANG if absent else Fault.COORDINATOR  # of nobody it is known that it was reached at all
        return Verdict(fault=fault, ranks=absent, because=tuple(setup[:4]), cause=cause, remedy=remedy, against=against)
    stuck = [fact for fact in case.waits if fact.sign is Sign.WATCHDOG_STUCK]
    what = (
        "the watchdog of " + who + " made no progress: a CUDA or NCCL call that does not return, or a held GIL"
        if stuck and not waited
        else (
            f"{who} waited {'at a barrier' if barrier else 'in a collective'} for somebody who did not come: most likely "
            "a host elsewhere "
            "(data, save, evaluation, compilation)"
        )
    )
    return Verdict(
        fault=Fault.HOST_HANG, because=because, cause=what + note,
        remedy="The culprit is a rank that prints nothing here: collect all ranks' logs and stacks (py-spy dump), and the "
        "flight recorder (TORCH_FR_BUFFER_SIZE=2000).",
        against=("all ranks are in the same collective (then it is network or fabric)",
                 "the ranks are in different collectives (then it is desync)"),
    )  # fmt: skip


def cut_off(case: Case) -> Verdict | None:
    """Nothing but a traceback without its last line: what raised is not known, and most often it is the program."""
    cut = [fact for fact in case.evidence if fact.sign is Sign.CUT_OFF]
    if not cut:
        return None
    ranks = tuple(sorted({fact.rank for fact in cut if fact.rank is not None}))
    who = rank_names(ranks) or "one rank"
    return Verdict(
        fault=Fault.USER_ERROR, confidence=Confidence.LOW, because=tuple(cut[:4]),
        cause=f"{who} raised something that the log does not show ({cut[0].detail}): most likely an exception of the program's "
        "own",
        remedy="Read the end of that traceback: the log breaks off before it.",
        against=("the end of the traceback names something else",),
    )  # fmt: skip
