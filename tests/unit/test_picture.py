"""What `elasticrl status` shows of each node and of the newest commit, and how old that is."""

from dataclasses import asdict, replace
from os import terminal_size

from elasticrl.cli import render, screen
from elasticrl.core.model import LOADING, MEETING, Commit, Member, Phase, Plan, Quarantine, Record, Seat, View, Work
from elasticrl.daemon.picture import picture

N0, N1 = (Member(node=name, incarnation=1) for name in ("n0", "n1"))


def seen(*, written=960.0, beat_at=999.6, now=1000.0):
    plan = Plan(
        generation=3, phase=Phase.TRAIN, seats=(Seat(member=N0, born=1), Seat(member=N1, born=1)), reason="as told"
    )
    commit = Commit(step=40, generation=3, manifest="m40", written=written)
    view = View(plan=plan, commit=commit, leader=N0)
    said = {"work": Work.TRAINING, "generation": 3, "step": 41, "phase": "rollout"}
    records = {"n0": Record(member=N0, beat_at=beat_at, **said), "n1": Record(member=N1, **said)}
    return picture("ppo", view, records, {}, needs=2, now=now)


def test_a_row_has_the_phase_of_its_workers_and_the_age_of_their_beat():
    one, two = seen().rows
    assert (one.phase, one.beat_s) == ("rollout", 0.4)
    assert (two.phase, two.beat_s) == ("rollout", None)  # an older daemon does not say


def test_a_job_that_is_to_grow_trains_on():
    plan = Plan(generation=3, phase=Phase.TRAIN, seats=(Seat(member=N0, born=1), Seat(member=N1, born=3)), reason="so")
    said = {"work": Work.JOINING, "generation": 3}
    records = {"n0": Record(member=N0, born=1, step=41, phase="rollout", **said)}
    records["n1"] = Record(member=N1, born=3, phase=LOADING, **said)
    shown = picture("ppo", View(plan=plan, leader=N0), records, {}, needs=1, now=1000.0)
    assert shown.state == "GROWING"
    assert [(row.state, row.phase) for row in shown.rows] == [("training", "rollout"), ("joining", "warm")]
    parted = {**records, "n0": replace(records["n0"], phase=MEETING)}
    assert picture("ppo", View(plan=plan, leader=N0), parted, {}, needs=1, now=1000.0).rows[0].state == "joining"


def test_the_age_of_the_commit_is_shown():
    assert seen().committed_s == 40.0
    assert seen(written=0.0).committed_s is None
    assert seen(written=1003.0).committed_s == 0.0  # another machine's clock is ahead


def test_status_shows_phase_beat_and_age():
    lines = render.status(asdict(seen()), colour=False).splitlines()
    assert lines[0] == "ppo  TRAINING  generation 3  step 41 (committed 40, 40 s ago)  2 of 2 nodes, needs 2"
    assert lines[2].split() == ["node", "rank", "state", "step", "phase", "as", "of", "note"]
    assert lines[3].split() == ["*", "n0", "0", "training", "41", "rollout", "0.4", "s", "leader"]
    assert lines[4].split() == ["n1", "1", "training", "41", "rollout", "-"]


def test_what_differs_at_each_look_can_be_left_out():
    first, later = (render.status(asdict(seen(now=now)), colour=False, ages=False) for now in (1000.0, 1100.0))
    assert first == later
    assert "rollout" not in first


def test_on_a_small_screen_of_a_large_job_what_wants_to_be_seen_is_seen():
    well = asdict(seen().rows[1])
    rows = [{**well, "node": f"n{i:03}", "rank": i} for i in range(500)]
    rows[317] |= {"state": "quarantined", "rank": None, "note": "2 neighbours cannot hear it"}
    large = {**asdict(seen()), "rows": rows, "advice": ["n317 is out of the plan: elasticrl admit n317"]}
    shown = screen.frame(
        render.watched(large, "no step for 40 s", colour=False) + "\n\nq ends", terminal_size((80, 24))
    )
    for words in ("elasticrl admit n317", "no step for 40 s", "quarantined", "484 lines more", "q ends"):
        assert words in shown


def test_what_a_worker_says_steers_no_terminal():
    odd = asdict(seen())
    odd["rows"][1]["note"] = "ValueError: \x1b[2K\x1b]0;title\x07 no\nway"
    odd["reason"] = "died of \x1b[31m"
    said = render.status(odd, colour=False) + render.event(
        {"event": "x", "cause": "\x1b[31m", "z": "\x1b"}, colour=False
    )
    assert "\x1b" not in said
    assert "ValueError: ?[2K?]0;title? no?way" in said
    assert screen.clip("\x1b[2K no end", 80) == "\x1b[2K no end"


def test_a_node_whose_worker_has_not_begun_is_said_to_have_none():
    plan = Plan(generation=1, phase=Phase.TRAIN, seats=(Seat(member=N0, born=1),), reason="first plan")
    (row,) = picture("ppo", View(plan=plan, leader=N0), {"n0": Record(member=N0)}, {}, needs=1).rows
    assert (row.rank, row.state) == (0, "no worker")


def test_a_job_that_is_over_needs_no_more_nodes():
    plan = Plan(generation=4, phase=Phase.STOP, exit_code=0, reason="all 41 steps are made")
    assert picture("ppo", View(plan=plan), {}, {}, needs=2).advice == ()
    assert picture("ppo", View(), {}, {}, needs=2).advice == ("2 more nodes are needed: start elasticrl there.",)


def test_a_node_whose_workers_never_get_ready_is_named_with_the_reason():
    why = "a process ended before it was warm: exit code 1: ModuleNotFoundError: No module named 'peft'"
    found = picture("ppo", View(), {"n0": Record(member=Member(node="n0", incarnation=1), problem=why)}, {}, needs=1)
    assert (found.rows[0].state, found.rows[0].note) == ("warming up", why)
    assert found.advice[0] == (
        f"n0 cannot get its workers ready ({why}). Their logs lie on it, under telemetry.log_dir. It tries on."
    )


def test_a_new_life_is_not_shown_as_kept_out_for_the_one_that_died():
    def state(quarantine: Quarantine, incarnation: int) -> str:
        record = Record(member=Member(node="n0", incarnation=incarnation), warm=1)
        return picture("ppo", View(), {"n0": record}, {"n0": quarantine}, needs=1).rows[0].state

    assert state(Quarantine(member=N0, reason="silent"), 1) == "quarantined"
    assert state(Quarantine(member=N0, reason="silent"), 2) == "spare"
    assert state(Quarantine(member=N0, reason="silent", strikes=3), 2) == "quarantined"
    assert state(Quarantine(member=N0, reason="silent", strikes=3, held=False), 1) == "spare"


def test_while_the_store_is_silent_nobody_is_called_gone():
    # Found by reading: in an outage of etcd `status` said that all others had died, while they trained.
    plan = Plan(
        generation=3, phase=Phase.TRAIN, seats=(Seat(member=N0, born=1), Seat(member=N1, born=1)), reason="as told"
    )
    own = {"n1": Record(member=N1, work=Work.TRAINING, generation=3, step=41)}
    known = View(plan=plan, leader=N0)
    found = picture("ppo", known, own, {}, needs=2, silent=True)
    assert [(row.node, row.rank, row.state) for row in found.rows] == [("n0", 0, "unknown"), ("n1", 1, "training")]
    assert (found.state, found.nodes, found.known) == ("TRAINING", 2, 2)
    assert "The store does not answer" in found.advice[0]
    assert picture("ppo", known, own, {}, needs=2).rows[0].state == "gone"


def test_a_node_whose_words_are_lost_is_named_with_the_reason():
    why = "the log folder /var/log/elasticrl takes nothing new (No space left on device): workers write on elsewhere"
    records = {"n0": Record(member=N0), "n1": Record(member=N1, unlogged=why)}
    found = picture("ppo", View(), records, {}, needs=1)
    assert found.advice[-1:] == (f"n1 keeps no log as it should: {why}. Make room there (df), or mend the folder.",)
