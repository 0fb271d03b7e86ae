"""A question to the whole job: where is every worker at this moment? An operator asks it, and nobody decides by the answers.

The one idea: the question is one key that every member watches anyway, and each answer is a key of that node's own, under its
lease. Whoever asks waits until all have answered or its time is over; who did not is named.
"""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticrl.base.value import dataclass
from elasticrl.contract.beats import Page
from elasticrl.contract.evidence import Evidence, bounded
from elasticrl.contract.model import Member, Work
from elasticrl.contract.verdict import Fault, Known, rank_names
from elasticrl.contract.wire import Report
from elasticrl.core.judge.judge import judge
from elasticrl.core.node import dossier
from elasticrl.core.node.state import State
from elasticrl.shell import keys
from elasticrl.store.protocol import Store

LOOK_S = 5.0  # for all stacks and recorders of a node
MOVES_S = 1.0  # in which a worker that goes on has said so


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A node's answer.

    Example: Where(to=1204, member=Member(node="n03", incarnation=1), moved=(6, 7))
    """

    to: int  # the question's revision
    member: Member
    evidence: tuple[Evidence, ...] = ()
    ranks: tuple[int, ...] = ()  # that run there
    moved: tuple[int, ...] = ()  # of them, those that went on while they were looked at
    stalled: bool = False  # it has a worker that has made no progress for too long


async def ask(store: Store, nodes: Collection[str], within_s: float) -> dict[str, Where]:
    """What these nodes answer within this time, by node. StoreError or TimeoutError if they cannot be asked."""
    deadline = asyncio.get_running_loop().time() + within_s
    found: dict[str, Where] = {}
    async with asyncio.timeout_at(deadline):
        to = await store.put(keys.WHERE, keys.dump(len(nodes)))
    with suppress(TimeoutError):  # who has not answered by then is named
        async with (
            asyncio.timeout_at(deadline),
            aclosing(store.watch((keys.ANSWERS,), to)) as batches,  # type: ignore[type-var]
        ):
            async for batch in batches:
                for event in batch.events:
                    with suppress(keys.Unreadable):
                        said = keys.load(Where, event.entry.value, event.key) if event.entry else None
                        if said and said.to == to:
                            found[said.member.node] = said
                if batch.relist is not None or found.keys() >= set(nodes):
                    break
    return found


async def answer(store: Store, said: Where, lease: int) -> None:
    """Say it."""
    await store.put(keys.answer_key(said.member.node), keys.dump(said), lease)


async def look(report: Report | None, witnesses: Path, me: Member, to: int, within_s: float) -> Where:
    """Where this node's workers are, and which of them go on. Nothing is disturbed."""
    from elasticrl.diagnose import stalled

    workers = report.workers if report else ()
    pages: dict[int, Page] = {}
    for worker in workers:
        with suppress(FileNotFoundError):  # it has ended since it was told of
            pages[worker.rank] = Page(Path(worker.beat))
    before = {rank: page.read() for rank, page in pages.items()}
    found, _ = await asyncio.gather(
        asyncio.to_thread(
            stalled.collect, witnesses, {worker.rank: worker.pid for worker in workers},
            within_s=min(LOOK_S, within_s), node_of=lambda _: me.node,
        ),
        asyncio.sleep(MOVES_S),
    )  # fmt: skip
    return Where(
        to=to,
        member=me,
        ranks=tuple(sorted(worker.rank for worker in workers)),
        evidence=tuple(
            replace(bounded(fact), generation=report.generation if report else 0) for fact in found.evidence
        ),
        moved=tuple(rank for rank, page in pages.items() if page.read() is not before[rank]),
        stalled=bool(report and (report.stall or report.work is Work.STALLED)),
    )


def told(state: State, answers: Mapping[str, Where], silent: Collection[str]) -> dict[str, Any]:
    """Where everybody is, and what that says, for an operator.

    Of a job that goes on somebody is always elsewhere while others wait for him: that is no verdict, but what it would be if it
    stayed so.
    """
    from elasticrl.diagnose import stacks

    plan = state.view.plan
    generation = plan.generation if plan else 0
    nodes = plan.node_of if plan else {}
    facts = Known(world=plan.world if plan else None, nodes=nodes)
    gang = range(generation, generation + 1)
    kept = dossier.concerning(state.known.facts, gang, frozenset(nodes.values()), state.known.passed)
    seen = tuple(fact for answer in answers.values() for fact in answer.evidence)
    moved = sorted({rank for answer in answers.values() for rank in answer.moved})
    stalled = any(answer.stalled for answer in answers.values())
    verdict = judge((*kept, *seen) if stalled else kept, facts)
    lasting = None if stalled or moved else judge((*kept, *seen), facts)
    ranks = sorted({rank for answer in answers.values() for rank in answer.ranks})
    unseen = [] if silent else ["no workers run"]
    unseen = [f"{rank_names(ranks)} {'run' if ranks[1:] else 'runs'}; where they are is unknown"] if ranks else unseen
    said = [*([stacks.summary(seen)] if stacks.summary(seen) else unseen)]
    said += [f"{node} has not answered" for node in sorted(silent)]
    return {
        "said": "; ".join(said), "reason": plan.reason if plan else "", "moved": moved,
        "verdict": verdict.plain(), "evidence": [fact.plain() for fact in (*kept, *seen)],
        "if_it_lasts": lasting.plain() if lasting and lasting.fault not in {Fault.UNKNOWN, verdict.fault} else None,
        "before": plan.verdict.plain() if plan and plan.verdict else None,
    }  # fmt: skip
