"""A picture of two nodes that train."""

from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import (
    Commit,
    Member,
    Phase,
    Plan,
    Record,
    Seat,
    View,
    Work,
)
from elasticrl.status.picture import picture

N0, N1 = (Member(node=name, incarnation=1) for name in ("n0", "n1"))


def seen(*, written=960.0, beat_at=999.6, now=1000.0):
    plan = Plan(
        generation=3,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1), Seat(member=N1, born=1)),
        causes=(Cause(why=Why.POLICY, said="as told"),),
    )
    commit = Commit(step=40, generation=3, manifest="m40", written=written)
    view = View(plan=plan, commit=commit, leader=N0)
    said = {"work": Work.TRAINING, "generation": 3, "step": 41, "phase": "rollout"}
    records = {"n0": Record(member=N0, beat_at=beat_at, **said), "n1": Record(member=N1, **said)}
    return picture("ppo", view, records, {}, needs=2, now=now)
