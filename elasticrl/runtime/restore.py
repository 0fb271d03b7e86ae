"""Everything registered as it was after the newest version that is whole everywhere: how a gang that has formed begins.

The one idea: all agree on what they go on from before anybody changes anything. Then strategies are built around the models,
filled with what was agreed on, and compared; from there on the keeper keeps what this generation makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrl.runtime import alike
from elasticrl.runtime.chain import Chain
from elasticrl.runtime.checkpoint import tree as trees
from elasticrl.runtime.checkpoint.far import Patience
from elasticrl.runtime.checkpoint.load import open_checkpoint, permitted
from elasticrl.runtime.checkpoint.manifest import Conditions, differences
from elasticrl.runtime.checkpoint.place import Url
from elasticrl.runtime.checkpoint.shelf import read_manifest
from elasticrl.runtime.fetched import open_together
from elasticrl.runtime.keeper import facts_of
from elasticrl.runtime.sealing import Sealing
from elasticrl.runtime.spread import spread
from elasticrl.runtime.team import whole_name
from elasticrl.runtime.vault.errors import BlockCorrupt, CheckpointRefused, Outlived
from elasticrl.runtime.vault.version import grow

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from elasticrl.config import Tree
    from elasticrl.runtime.agree import Agreed
    from elasticrl.runtime.generation import Generation
    from elasticrl.runtime.keeper import Keeper
    from elasticrl.runtime.progress import Progress, Sealed
    from elasticrl.runtime.search import Search
    from elasticrl.runtime.trained import Registered
    from elasticrl.runtime.vault.piece import Piece
    from elasticrl.runtime.vault.source import Source


def restore(
    generation: Generation, search: Search, keeper: Keeper, given: Registered, progress: Progress, sealed: Sealed
) -> Sealing:
    """Puts all of it back; what this generation makes from here on goes into what is returned. Collective."""
    try:
        return _restored(generation, search, keeper, given, progress, sealed)
    except BaseException:
        for role in given.roles.values():
            if role.strategy is not None:
                role.strategy.forget()
        raise


def _restored(
    generation: Generation, search: Search, keeper: Keeper, given: Registered, progress: Progress, sealed: Sealed
) -> Sealing:
    worker, mark = generation.worker, generation.worker.timeline.mark
    keeper.still()
    while True:
        agreed = search.agree(generation, keeper)
        mark("agree")
        here = spread(generation, given, agreed)
        mark("spread")
        given.capture(progress, keeper.ledger)
        if agreed.remembered:  # the parameters come over the gang beside what comes from the vaults
            for role in given.roles.values():
                role.live.show_ahead()
        try:
            _Fill(generation, keeper, given, progress, agreed).all_but(here)
            break
        except BlockCorrupt as error:  # all ranks raise it, of a checkpoint that none of them has used yet
            search.pass_over(str(agreed.checkpoint), str(error))
    # Before anything is published, which would make them alike.
    alike.check_beginning(agreed, generation.gang, given.cursor, given.roles)
    alike.check_buffers(generation.gang, given.roles, given.others, worker.say)
    for role in given.roles.values():
        role.live.show()
    given.hollow = False
    mark("publish")
    sealing = Sealing(generation, keeper, given, progress, sealed, agreed)
    mark("digest")
    return sealing


def patience_s(tree: Tree) -> float:
    """For how long one rank may ask a store that fails, while the others wait for it in a collective: what it asks first and
    last may hang until their deadlines, and a quarter of the time is left.
    """
    room_s = 0.75 * tree.timeouts.collective_s - 2 * tree.checkpoint.answer_s
    return max(0.0, min(tree.checkpoint.wait_s, room_s))


class _Fill:
    """Fills what is registered, from the vault, a checkpoint or anew."""

    def __init__(
        self, generation: Generation, keeper: Keeper, given: Registered, progress: Progress, agreed: Agreed
    ) -> None:
        self.generation, self.worker, self.keeper = generation, generation.worker, keeper
        self.given, self.progress, self.agreed = given, progress, agreed
        self.allow = self.worker.context.tree.checkpoint.allow

    def all_but(self, here: Collection[str]) -> None:
        """The roles that are `here` stay as they are."""
        worker, place, agreed = self.worker, self.generation.place, self.agreed
        if (cursor := self.given.cursor) is not None:
            cursor.allow |= set(self.allow)
        facts = facts_of(worker.context, batch=cursor.batch if cursor else 0, data=cursor.describe() if cursor else "")
        self._permit(facts)
        values = self._read(here)
        self._permit_memory(facts)
        self._begin_keeping(facts)
        if "ledger" in values:
            self.keeper.restored(trees.join(values["ledger"], {}))
        worker.timeline.mark("restore")
        for sentence in agreed.passed_over:
            worker.say(sentence)
        if agreed.version.step < place.resume:
            worker.say(
                f"step {place.resume} was committed, but cannot be read: {agreed.version.step} is the newest that is good"
            )

    def _permit(self, facts: Conditions) -> None:
        """What differs from the run that wrote the checkpoint is said, or refused."""
        if (name := self.agreed.checkpoint) is not None:
            place = self.keeper.place
            manifest = self.agreed.manifest or read_manifest(place, name)
            self.keeper.follows = Chain(manifest.version.step, manifest.chain)
            for change in permitted(place, manifest, facts, allow=self.allow):
                self.worker.say(change.sentence)

    def _permit_memory(self, facts: Conditions) -> None:
        """The same of what a vault had: somebody may have changed the configuration while nobody trained."""
        before = self.progress.facts
        now: dict[str, Any] = {
            "lanes": facts.lanes, "batch": facts.batch, "data": facts.data,
            "threads": self.worker.context.tree.lanes.threads, "tp": facts.tp,
            "cp": facts.cp,
        }  # fmt: skip
        self.progress.facts = now
        if not self.agreed.remembered:
            return
        found = differences(Conditions(**before), Conditions(**now), allow=self.allow)
        if refused := [change.sentence for change in found if change.refuse]:
            said = " ".join(refused)
            raise CheckpointRefused(f"This run can't continue from step {self.agreed.version} in memory. {said}")
        for change in found:
            self.worker.say(change.sentence)

    def _read(self, here: Collection[str]) -> Mapping[str, Any]:
        """Puts what was agreed on into the parts, or puts them back to the beginning; raises where that would lose steps.
        Returns the values that were read.
        """
        keeper, given, progress, agreed = self.keeper, self.given, self.progress, self.agreed
        resume = self.generation.place.resume
        lived = given.note_first(made=bool(agreed.version.step or progress.count))
        models = {name: set(map(whole_name, role.live.shard.layout.shapes)) for name, role in given.roles.items()}
        if agreed.whole is not None:

            def choose(source: Source) -> Sequence[Piece]:
                alike.check_kept(source, models)
                return given.parts.needs(source, but=here)

            with keeper.vault.gather(
                agreed.whole,
                choose=choose,
                timeout_s=self.worker.context.tree.vault.timeout_s,
                check=lambda: self.generation.flag.check("getting shards"),
                nearer=self.worker.beat.nearer,
            ) as source:
                source.nearer = self.worker.beat.nearer
                self.worker.timeline.mark("gather")
                given.parts.restore(source, allow=() if agreed.remembered else self.allow, but={*here, "ledger"})
                values, self.worker.timeline.read = source.values, source.read
            keeper.void_after(agreed.whole.version, agreed.whole.generation)
            return values
        if agreed.checkpoint is not None:
            with self._opened(agreed.checkpoint, models) as source:
                source.nearer = self.worker.beat.nearer
                gone = sorted(given.roles.keys() - source.values.keys())
                if gone and given.changed and "parts" in self.allow:
                    raise Outlived(
                        f"{source.name} keeps nothing of {', '.join(gone)}, which is to begin anew (checkpoint.allow): a fresh "
                        "process does that, as this one's model is no longer what it began with"
                    )
                given.parts.restore(source, allow=self.allow, but={"ledger"})
                return source.values
        if resume:
            raise CheckpointRefused(
                f"Step {max(resume, progress.step)} was reached, but no vault and no checkpoint at {keeper.place} "
                "has a whole state. Bring the checkpoints back, or start a job of another name."
            )
        if progress.count or given.changed:
            raise Outlived(
                f"what was made until step {progress.step} is lost with those who had it, and nothing was saved before: "
                "a fresh process begins anew, as this one's model is no longer what it began with"
            )
        if lived:
            given.begin_anew()
        return {}

    def _opened(self, name: str, models: Mapping[str, Collection[str]]) -> Source:
        """A checkpoint, of which all that is needed here can be read."""
        place, parts = self.keeper.place, self.given.parts
        if not isinstance(place, Url) or (manifest := self.agreed.manifest) is None:
            source = open_checkpoint(place, name, check=False)
            alike.check_kept(source, models)
            return source

        def choose(source: Source) -> Sequence[Piece]:
            alike.check_kept(source, models)
            return parts.needs(source, but={"ledger"})

        def check() -> None:
            self.generation.flag.check("reading a checkpoint")
            self.worker.beat.still()  # the store has a deadline of its own for each answer

        patience = Patience(wait_s=patience_s(self.worker.context.tree), check=check)
        return open_together(place, manifest, self.generation.gang, choose, patience)

    def _begin_keeping(self, facts: Conditions) -> None:
        """From here on the keeper keeps what this generation makes."""
        place, agreed, keeper = self.generation.place, self.agreed, self.keeper
        keeper.begin(
            place,
            lineage=grow(agreed.lineage, place.generation, agreed.version),
            segments=self.given.segments,
            lanes=self.generation.carried if self.generation.records else (),
            facts=facts,
            chain=self.progress.chain,
            whole=agreed.whole if agreed.remembered else None,
            soon=agreed.exposed,
        )
        if agreed.published:
            keeper.whole(agreed.published)
