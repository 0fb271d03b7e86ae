"""Where the samples of one prompt lie: in one lane, or in equal parts in neighbouring ones.

The idea: lanes stay as they are. A group that does not fit into one is dealt to a *band* of neighbouring lanes, the same number
of its samples to each. What a group is compared by, a few numbers of each sample, is told to all ranks, and each computes the
groups of its lanes whole, in the group's own order, and takes what is its lane's. So whoever carries which lane, the bits are
the same, and they are those of a group that lies in one lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from elasticrl.config.relations import GROUPED
from elasticrl.ppo.advantages import contested, gains, of_all_tokens, without_critic

if TYPE_CHECKING:
    from elasticrl.config.training import Ppo
    from elasticrl.ppo.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`size` samples of each prompt, of which a lane has `part`.

    Example: Groups(size=16, part=4)  # a prompt's samples lie in four lanes
    """

    size: int = 1
    part: int = 1

    @property
    def spans(self) -> int:
        """Lanes of a band."""
        return self.size // self.part

    def members(self, lane: int) -> range:
        """Which samples of its prompts a lane has.

        >>> Groups(size=16, part=4).members(5), Groups(size=4, part=4).members(5)
        (range(4, 8), range(0, 4))
        """
        first = lane % self.spans * self.part
        return range(first, first + self.part)

    def band(self, lane: int) -> range:
        """The lanes that have the same prompts as this one.

        >>> Groups(size=16, part=4).band(5), Groups(size=4, part=4).band(5)
        (range(4, 8), range(5, 6))
        """
        first = lane - lane % self.spans
        return range(first, first + self.spans)

    def own(self, lane: int, values: torch.Tensor) -> torch.Tensor:
        """Of values of a band's samples, group by group, those of this lane."""
        return values.view(-1, self.spans, self.part)[:, lane % self.spans].reshape(-1)


def of(ppo: Ppo, lanes: int) -> Groups:
    """Those that a configuration asks for."""
    return Groups(size=ppo.group, part=ppo.part(lanes))


def advantages(run: Run, groups: Groups, ppo: Ppo, rewards: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
    """[samples, tokens] of each lane, by an algorithm without a critic, from the lanes' rewards. Collective where groups span
    lanes.
    """
    rows = run.buffer.rows
    if groups.spans == 1 or ppo.algorithm not in GROUPED:
        return {
            lane: without_critic(its, rows[lane]["mask"], ppo, rows[lane].get("lost")) for lane, its in rewards.items()
        }
    columns = {lane: (its.sum(1), rows[lane]["mask"].sum(1), _lost(run, lane)) for lane, its in rewards.items()}
    found = {}
    for lane, (scores, lengths, lost) in whole(run, groups, columns).items():
        gain = groups.own(lane, gains(scores, lengths, ppo, lost))
        found[lane] = of_all_tokens(gain, rows[lane]["mask"], rows[lane].get("lost"))
    return found


def unlike(run: Run, groups: Groups) -> Mapping[int, torch.Tensor]:
    """[samples] of each lane: whether the scores of a sample's group are not all alike. Collective."""
    lanes = dict.fromkeys(run.lanes)
    columns = {lane: (run.buffer.rows[lane]["scores"].sum(1), _lost(run, lane)) for lane in lanes}
    return {
        lane: groups.own(lane, contested(scores, groups.size, lost))
        for lane, (scores, lost) in whole(run, groups, columns).items()
    }


def whole(
    run: Run, groups: Groups, columns: Mapping[int, Sequence[torch.Tensor]]
) -> dict[int, tuple[torch.Tensor, ...]]:
    """Each lane's columns, [samples] each, as those of its whole band, [samples of the band] each: group by group, in a
    group's order. They travel as float64, which has each float32 and each bool. Collective.
    """
    told = run.gather(
        {lane: torch.stack([one.double() for one in its]).view(-1).tolist() for lane, its in columns.items()}
    )
    found = {}
    for lane, its in columns.items():
        parts = [
            torch.tensor(told[one], dtype=torch.float64).view(len(its), -1, groups.part) for one in groups.band(lane)
        ]
        together = torch.cat(parts, 2).reshape(len(its), -1)
        found[lane] = tuple(column.to(own.dtype) for column, own in zip(together, its, strict=True))
    return found


def _lost(run: Run, lane: int) -> torch.Tensor:
    rows = run.buffer.rows[lane]
    return rows["lost"] if "lost" in rows else torch.zeros(len(rows["mask"]), dtype=torch.bool)
