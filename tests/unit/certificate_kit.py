"""A small run on a disk, as workers leave it: ledger, digests with their chain, manifests. No tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from elasticrl.certificate import keys
from elasticrl.certificate.form import Begun, Certificate, Signed, signed_part
from elasticrl.certificate.make import make, named
from elasticrl.runtime.chain import Chain, link
from elasticrl.runtime.checkpoint.manifest import MANIFEST, Conditions, Manifest
from elasticrl.runtime.chronicle import Chronicle
from elasticrl.runtime.data.cursor import Cursor, SampleId, Walk
from elasticrl.runtime.data.ledger import Ledger
from elasticrl.runtime.vault.version import Lineage, Version, grow

LANES = 4
WALK = Walk(name="numbers", content="9f86", size=50, lanes=LANES, per_lane=3, seed=7)
LIVES = (
    (1, 0, 6),
    (2, 5, 9),
    (3, 9, 12),
)  # each generation: its number, the step it goes on from, the step it comes to
FACTS = Conditions(job="kit", data="numbers", versions={"torch": "2.13.0"})
KEY = Ed25519PrivateKey.generate()


def a_run(
    home: Path,
    lives: Iterable[tuple[int, int, int]] = LIVES,
    *,
    walk: Walk = WALK,
    saves: Iterable[int] = (6, 12),
    swap: Mapping[tuple[int, int], tuple[SampleId, ...]] | None = None,
    by: bool = False,
) -> Path:
    """`swap`: by step and lane, what was used in place of what was dealt. `by`: samples were generated."""
    cursor, lineage = Cursor(walk), ()
    for number, start, until in lives:
        lineage = grow(lineage, number, Version(start))
        ledger, chronicle = (
            Ledger(home, writer=f"n{number % 2}-w0"),
            Chronicle(home, f"n{number % 2}-w0", bits=lambda: "b"),
        )
        plan: dict[str, Any] = {
            "cause": f"n{number} was lost", "rung": "reform", "seats": ["n0", "n1"], "config": "c0ff", "node": f"n{number % 2}",
            "made": {"torch": "2.13.0"},
        }  # fmt: skip
        ledger.begin(
            generation=number, lineage=lineage, segments=cursor.segments, lanes=range(walk.lanes), plan=plan
        )  # fmt: skip
        chain = Chain(start - 1, head(start - 1))
        for step in range(start, until + 1):
            chain.add(step, digest(step))
            chronicle.add(step=step, generation=number, digest=digest(step), link=chain.head)
            if step in saves:
                save(home, step, number, chain.head, lineage)
            for lane in range(walk.lanes) if step < until else ():
                ids = (swap or {}).get((step, lane), cursor.ids(step, 0, lane))
                early = ids[: len(ids) // 2] if by and step else ()
                for part, weights in ((early, step - 1), (ids[len(early) :], step)):
                    ledger.record(Version(step, 1), lane, part, by=weights if by else None)
        ledger.close()
        chronicle.close()
    return home


def digest(step: int) -> str:
    return f"{step:016x}"


def head(step: int) -> str:
    found = ""
    for at in range(step + 1):
        found = link(found, at, digest(at))
    return found


def save(home: Path, step: int, generation: int, chain: str, lineage: Lineage = ()) -> Path:
    manifest = Manifest(
        version=Version(step), generation=generation, world=1, parent=None, facts=FACTS,
        contents={}, files=(), lineage=lineage, code="c0de", chain=chain,
    )  # fmt: skip
    folder = home / manifest.name
    folder.mkdir()
    (folder / MANIFEST).write_bytes(manifest.encode())
    return folder


def certificate(home: Path) -> Certificate:
    return make(a_run(home))


def signed(body: Certificate, key: Ed25519PrivateKey = KEY) -> bytes:
    """By somebody who has the key."""
    public, signature = keys.sign(key, signed_part(body))
    return Signed(body=body, key=public, signature=signature).text


def chained(body: Certificate) -> Certificate:
    """With links that follow from its digests, as somebody makes them who has the key."""
    before, states = "", []
    for each in body.states:
        before = link(before, each.step, each.digest)
        states.append(replace(each, link=before))
    return replace(body, states=tuple(states), head=before)


def renamed(generations: Iterable[Begun]) -> tuple[Begun, ...]:
    """Each names the one before it."""
    before, found = "", []
    for each in generations:
        found.append(replace(each, before=before))
        before = named(found[-1])
    return tuple(found)
