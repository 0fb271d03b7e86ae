"""The same digests with one to four workers on one card, replicated and under FSDP2, over NCCL and over gloo."""

from pathlib import Path

from bench.gpu.say import Say, begin

STEPS = 8
NCCL = "gloo carries it, as there is no NCCL"


def digests_of(folder: Path, strategy: str, world: int, **conf: object) -> dict[int, str]:
    """Of a gang of so many to which nothing happens; each sample was used once."""
    from gang_kit import Nodes, digests

    from elasticrl.runtime.data.audit import audit

    with Nodes(folder, steps=STEPS, strategy=strategy, copies=min(1, world - 1), conf=conf) as nodes:
        nodes.plan(*(f"n{number}" for number in range(world)))
        nodes.until_done()
        found = audit(nodes.run_dir)
        assert found.ok, found.sentence
        return digests(nodes.run_dir)


def main(say: Say) -> None:
    alone: dict[int, str] = {}
    for strategy in ("replicated", "fsdp"):
        for world in (1, 2, 3, 4):
            with say.check(f"{strategy}, {world} of {world} on one card", on_card=NCCL):
                found = digests_of(say.folder / f"{strategy}{world}", strategy, world)
                alone = alone or found
                assert len(found) == STEPS + 1, f"{len(found)} steps have digests"
                assert found == alone, f"digests part: {found} and, of one worker, {alone}"
    with say.check("replicated, 3 workers over gloo", on_card="gloo carries all of it here"):
        assert digests_of(say.folder / "gloo", "replicated", 3, comm={"backend": "gloo"}) == alone


if __name__ == "__main__":
    begin(main)
