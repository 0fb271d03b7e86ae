"""What nodes run, compared by the leader, who sees all of their records."""

import time
from collections.abc import Mapping
from dataclasses import replace

from elasticrl.contract import versions
from elasticrl.contract.events import Found
from elasticrl.contract.evidence import HEALTH, Evidence, Sign
from elasticrl.contract.model import Record
from elasticrl.core.judge.judge import judge
from elasticrl.core.node.state import State
from elasticrl.core.step import found
from elasticrl.daemon.shared import Desk


class Comparison:
    """Who has another torch or NCCL is named, seated or not; of all else that differs an operator is told."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._records: Mapping[str, Record] | None = None  # that were compared last
        self._claimed: set[Evidence] = set()  # versions that differ, as they were named
        self._differ = ""  # what else does, in words

    def decided(self, state: State) -> None:
        """After each step of the core."""
        records, plan = state.view.records, state.view.plan
        if state.lead is None or not records or records is self._records:
            return
        from elasticrl.diagnose import doctor

        self._records = records
        odd = versions.odd(versions.claimed(records))
        fatal = versions.FATAL if self._desk.on_gpus else versions.FATAL - {"nccl"}
        said = versions.sentence(each for each in odd if each.name not in fatal)
        if said and said != self._differ:
            self._desk.log.info("versions.differ", said=said, remedy=versions.REMEDY)
        self._differ = said
        differ = {replace(doctor.evidence(each), source=HEALTH) for each in odd if each.name in fatal}
        facts = sorted(differ - self._claimed, key=str)
        over = sorted(self._claimed - differ, key=str)  # it has come back with the others' torch, or not at all
        self._claimed = differ
        if over:
            well = tuple(replace(fact, sign=Sign.HEALTHY, detail=f"{fact.detail}: no longer") for fact in over)
            self._desk.post(Found(now=time.monotonic(), evidence=well))
        seated = {seat.member.node for seat in plan.seats} if plan else set()
        if facts:
            self._desk.post(Found(now=time.monotonic(), evidence=tuple(facts)))
        for fact in facts:
            if fact.node not in seated:  # else the verdict on the gang says it
                self._desk.log.info("verdict.found", **found(judge([fact])).fields)
