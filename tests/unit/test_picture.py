"""What `elasticrl status` shows of each node and of the newest commit, and how old that is."""

from dataclasses import asdict, replace
from os import terminal_size

from picture_kit import seen

from elasticrl.cli import render, screen
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import (
    LOADING,
    MEETING,
    Commit,
    Exit,
    Intent,
    Member,
    Phase,
    Plan,
    Quarantine,
    Record,
    Rung,
    Seat,
    View,
    Work,
)
from elasticrl.contract.verdict import Confidence, Fault, Verdict
from elasticrl.status.past import Broken, Missing, Past
from elasticrl.status.picture import Picture, picture

N0, N1 = (Member(node=name, incarnation=1) for name in ("n0", "n1"))


def test_a_row_has_the_phase_of_its_workers_and_the_age_of_their_beat():
    one, two = seen().rows
    assert (one.phase, one.beat_s) == ("rollout", 0.4)
    assert (two.phase, two.beat_s) == ("rollout", None)  # an older daemon does not say


def test_a_job_that_is_to_grow_trains_on():
    plan = Plan(
        generation=3,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1), Seat(member=N1, born=3)),
        causes=(Cause(why=Why.POLICY, said="so"),),
    )
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
    assert lines[2].split() == ["node", "rank", "state", "step", "phase", "note"]
    assert lines[3].split() == ["*", "n0/1", "0", "training", "41", "rollout", "leader"]
    assert lines[4].split() == ["n1/1", "1", "training", "41", "rollout"]
    older = render.status(asdict(seen(now=1005.0)), colour=False).splitlines()
    assert older[3].split() == ["*", "n0/1", "0", "training", "41", "(5.4", "s", "ago)", "rollout", "leader"]


def in_teams(*, ended: Exit | None = None, team: int = 2):
    seats = (Seat(member=N0, born=1, slots=4), Seat(member=N1, born=1, slots=4))
    verdict = Verdict(
        fault=Fault.DEAD_RANK, ranks=(5,), nodes=(), confidence=Confidence.HIGH, cause="rank 5 died", remedy="See why."
    )
    plan = Plan(generation=3, phase=Phase.TRAIN, seats=seats, team=team, lanes=4, verdict=verdict)
    said = {"generation": 3, "step": 41, "phase": "rollout", "slots": 4}
    records = {
        "n0": Record(member=N0, work=Work.TRAINING, **said),
        "n1": Record(member=N1, work=Work.FAILED if ended else Work.TRAINING, exit=ended, **said),
    }
    return picture("ppo", View(plan=plan, leader=N0), records, {}, needs=2, now=1000.0)


def test_where_workers_share_a_model_each_row_has_its_teams_and_a_dead_members_is_named():
    killed = Exit(generation=3, slot=1, step=41, cause="signal 9 (SIGKILL)", own=False, signal=9)
    found = in_teams(ended=killed)
    lines = render.status(asdict(found), colour=False).splitlines()
    assert [line.split()[:6] for line in lines[2:5]] == [
        ["node", "rank", "team", "state", "step", "phase"],
        ["*", "n0/1", "0-3", "0-1", "training", "41"],
        ["n1/1", "4-7", "2-3", "failed", "41", "rollout"],
    ]
    assert [(row.team, row.teams) for row in found.rows] == [(0, 2), (2, 2)]
    assert found.rows[1].note == "team 2: signal 9 (SIGKILL)"
    assert any("rank 5 of team 2" in said for said in found.advice)
    assert "team" not in render.status(asdict(in_teams(ended=killed, team=1)), colour=False)
    assert [(row.team, row.teams) for row in in_teams(team=1).rows] == [(None, 0), (None, 0)]


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
    plan = Plan(generation=1, phase=Phase.TRAIN, seats=(Seat(member=N0, born=1),), causes=(Cause(why=Why.BEGUN),))
    (row,) = picture("ppo", View(plan=plan, leader=N0), {"n0": Record(member=N0)}, {}, needs=1).rows
    assert (row.rank, row.state) == (0, "no worker")


def test_a_job_that_is_over_needs_no_more_nodes():
    plan = Plan(
        generation=4, phase=Phase.STOP, exit_code=0, causes=(Cause(why=Why.POLICY, said="all 41 steps are made"),)
    )
    assert picture("ppo", View(plan=plan), {}, {}, needs=2).advice == ()
    assert picture("ppo", View(), {}, {}, needs=2).advice == ("2 more nodes are needed: start elasticrl on them.",)


def test_a_node_whose_workers_never_get_ready_is_named_with_the_reason():
    why = "a process ended before it was warm: exit code 1: ModuleNotFoundError: No module named 'peft'"
    found = picture("ppo", View(), {"n0": Record(member=Member(node="n0", incarnation=1), problem=why)}, {}, needs=1)
    assert (found.rows[0].state, found.rows[0].note) == ("warming up", why)
    assert found.advice[0] == (
        f"n0 cannot get its workers ready ({why}). Their logs are on that node, under telemetry.log_dir. It keeps trying."
    )


def test_a_new_life_is_not_shown_as_kept_out_for_the_one_that_died():
    def state(quarantine: Quarantine, incarnation: int) -> str:
        record = Record(member=Member(node="n0", incarnation=incarnation), warm=1)
        return picture("ppo", View(), {"n0": record}, {"n0": quarantine}, needs=1).rows[0].state

    assert state(Quarantine(member=N0, cause=Cause(why=Why.POLICY, said="silent")), 1) == "quarantined"
    assert state(Quarantine(member=N0, cause=Cause(why=Why.POLICY, said="silent")), 2) == "spare"
    assert state(Quarantine(member=N0, cause=Cause(why=Why.POLICY, said="silent"), strikes=3), 2) == "quarantined"
    assert state(Quarantine(member=N0, cause=Cause(why=Why.POLICY, said="silent"), strikes=3, held=False), 1) == "spare"


def test_who_has_no_seat_for_a_cut_way_is_shown_with_what_is_awaited():
    record = Record(member=N0, warm=True)
    cut = Quarantine(
        member=N0, cause=Cause(why=Why.UNREACHED, who=(N0,)), held=False, cuts=(("n0", "n1"), ("n1", "n0")), found=4
    )

    def shown(**said: object) -> tuple[str, str]:
        row = picture("ppo", View(), {"n0": replace(record, **said)}, {"n0": cut}, needs=1).rows[0]
        return row.state, row.note

    assert shown() == ("spare", "no seat until a test of the connection to n1 passes")
    assert shown(tested=4, reached=("n1",)) == ("spare", "")


def test_while_the_store_is_silent_nobody_is_called_gone():
    # Found by reading: in an outage of etcd `status` said that all others had died, while they trained.
    plan = Plan(
        generation=3,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1), Seat(member=N1, born=1)),
        causes=(Cause(why=Why.POLICY, said="as told"),),
    )
    own = {"n1": Record(member=N1, work=Work.TRAINING, generation=3, step=41)}
    known = View(plan=plan, leader=N0)
    found = picture("ppo", known, own, {}, needs=2, silent=True)
    assert [(row.node, row.rank, row.state) for row in found.rows] == [("n0", 0, "unknown"), ("n1", 1, "training")]
    assert (found.state, found.nodes, found.known) == ("TRAINING", 2, 2)
    assert "The store does not answer" in found.advice[0]
    assert picture("ppo", known, own, {}, needs=2).rows[0].state == "gone"


def test_a_gang_that_broke_while_the_store_is_away_is_not_told_as_training():
    # Found by a new user: for as long as etcd stood still after a worker's death, `status` said TRAINING, with exit code 0.
    plan = Plan(
        generation=3,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1), Seat(member=N1, born=1)),
        causes=(Cause(why=Why.POLICY, said="all"),),
    )
    known = View(plan=plan, leader=N0)

    def told(work, **more):
        records = {n.node: Record(member=n, work=Work.TRAINING, generation=3, step=41) for n in (N0, N1)}
        records["n1"] = Record(member=N1, work=work, generation=3, step=44)
        return picture("ppo", known, records, {}, needs=2, **more)

    assert told(Work.TRAINING, away=True).state == "TRAINING"
    found = told(Work.PARKED, away=True)
    assert (found.state, found.step) == ("WAITING FOR ETCD", 44)
    assert found.reason == "generation 3 does not train, and no new plan can be written: all; to train on 2 nodes"
    assert "The store does not answer" in found.advice[0]
    assert told(Work.PARKED).state != "WAITING FOR ETCD"


def test_of_a_job_that_is_over_nobody_is_sent_to_look_at_the_store():
    # Found by a new user: `elasticrl run` said "The store does not answer" under the last picture, after all had gone well.
    plan = Plan(
        generation=3,
        phase=Phase.STOP,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.FINISHED, step=40),),
        exit_code=0,
    )
    for told in ({"away": True}, {"away": True, "silent": True}):
        shown = picture("ppo", View(plan=plan), {"n0": Record(member=N0)}, {}, needs=1, **told)
        assert (shown.state, shown.advice) == ("FINISHED", ())


def test_what_led_to_the_plan_is_told_with_its_age_once_it_is_over():
    # Found by a new user: "n1/1 leaves" stood there for six minutes, also when n1 was back.
    plan = Plan(
        generation=3, phase=Phase.TRAIN, seats=(Seat(member=N0, born=1),), causes=(Cause(why=Why.LEFT, who=(N1,)),)
    )
    records = {"n0": Record(member=N0, work=Work.TRAINING, generation=3)}

    def second(planned_s, **more):
        told = asdict(picture("ppo", View(plan=plan), records, {}, needs=1, planned_s=planned_s))
        return render.status(told, colour=False, **more).splitlines()[1]

    assert second(300.0) == "n1/1 left; training on 1 node (5 m ago)"
    assert second(300.0, ages=False) == second(9.0) == second(None) == "n1/1 left; training on 1 node"


def test_a_job_that_has_just_as_many_nodes_as_it_needs_says_so_if_it_had_more():
    # Found by a new user: who did as was advised, and drained the one that was gone, was not warned any more.
    plan = Plan(
        generation=3,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1), Seat(member=N1, born=1)),
        causes=(Cause(why=Why.POLICY, said="two"),),
    )
    records = {n.node: Record(member=n, work=Work.TRAINING, generation=3) for n in (N0, N1)}

    def advice(most, needs):
        return picture(
            "ppo", View(plan=plan, leader=N0), records, {}, past=Past(began=1.0, most=most), needs=needs
        ).advice

    (line,) = advice(3, 2)
    assert line.startswith("The job has 2 nodes left of 3, and needs 2. If another node goes, the job has to wait.")
    assert advice(2, 2) == advice(3, 1) == ()


def test_a_node_that_died_is_not_to_be_admitted_and_a_pause_says_what_is_in_memory_alone():
    verdict = Verdict(
        fault=Fault.DEAD_NODE, nodes=("n1",), cause="n1 went away", confidence=Confidence.HIGH, remedy="Look."
    )
    plan = Plan(
        generation=3,
        phase=Phase.HOLD,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.POLICY, said="held"),),
        verdict=verdict,
    )
    out = {"n1": Quarantine(member=N1, cause=Cause(why=Why.POLICY, said="n1/1 is not heard"))}

    def advice(verdict):
        records = {"n0": Record(member=N0, work=Work.PARKED, generation=3, step=45), "n1": Record(member=N1)}
        commit = Commit(step=40, generation=2)
        view = View(plan=replace(plan, verdict=verdict), leader=N0, commit=commit, intent=Intent.PAUSE)
        return " ".join(picture("ppo", view, records, out, needs=1).advice)

    assert "elasticrl admit n1" not in advice(verdict)
    died = View(plan=replace(plan, verdict=verdict))
    assert picture("ppo", died, {"n1": Record(member=N1)}, out, needs=1).rows[-1].state == "lost"
    assert "elasticrl admit n1" in advice(replace(verdict, fault=Fault.NETWORK))
    assert "5 steps since the commit are in memory: elasticrl stop ends the job with a save." in advice(verdict)


def test_a_daemon_that_was_started_again_leaves_a_trace_for_a_while():
    # Found by a new user: the leader's daemon was killed and came back, and `status` said nothing of it.
    plan = Plan(
        generation=3, phase=Phase.TRAIN, seats=(Seat(member=N0, born=1),), causes=(Cause(why=Why.POLICY, said="so"),)
    )

    def note(now, taken_at=1000.0, *, taken="died", **more):
        record = Record(member=N0, work=Work.TRAINING, generation=3, taken_at=taken_at, taken=taken)
        told = picture("ppo", View(plan=plan), {"n0": record}, {}, needs=1, now=now)
        return (
            render.status(asdict(told), colour=False, **more)
            .splitlines()[3]
            .partition("training")[2]
            .split(maxsplit=2)[2:]
        )

    assert note(1012.0) == ["daemon died and was restarted 12 s ago; its workers kept running"]
    died = Record(member=N0, work=Work.TRAINING, generation=3, taken_at=1000.0, taken="died")
    of = {
        now: picture("ppo", View(plan=plan, leader=N0), {"n0": died}, {}, needs=1, now=now).advice
        for now in (1012.0, 1700.0)
    }
    assert of[1012.0][0].startswith(
        "The daemon of n0 died and was restarted; its workers kept running. The end of its log says why"
    )
    assert of[1700.0] == ()
    assert note(1012.0, taken="handed") == ["daemon restarted 12 s ago; its workers kept running"]
    (killed,) = note(1012.0, taken="killed")
    assert killed == "restarted 12 s ago after all its processes had died (the machine stayed up)"
    assert note(1700.0) == note(1012.0, taken_at=0.0) == []


def test_nobody_is_sent_to_the_switch_for_a_node_that_is_gone():
    verdict = Verdict(
        fault=Fault.NETWORK, nodes=("n0", "n1"), cause="the way between n0 and n1 is cut", confidence=Confidence.HIGH,
        remedy="Check link and switch.",
    )  # fmt: skip
    plan = Plan(
        generation=4,
        phase=Phase.HOLD,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.POLICY, said="held"),),
        verdict=verdict,
    )
    records = {"n0": Record(member=N0, work=Work.PARKED, generation=4)}
    gone = Past(began=1.0, missing=(Missing(member=N1, at=2.0),))
    assert any("switch" in line for line in picture("ppo", View(plan=plan), records, {}, needs=2).advice)
    advice = picture("ppo", View(plan=plan), records, {}, past=gone, needs=2).advice
    assert not any("switch" in line for line in advice)
    assert any(line.startswith("n1 is gone: start elasticrl there again") for line in advice)


def test_a_node_whose_words_are_lost_is_named_with_the_reason():
    why = "the log folder /var/log/elasticrl takes nothing new (No space left on device): workers write on elsewhere"
    records = {"n0": Record(member=N0), "n1": Record(member=N1, unlogged=why)}
    found = picture("ppo", View(), records, {}, needs=1)
    assert found.advice[-1:] == (f"n1 cannot write its log: {why}. Make room there (df), or repair the folder.",)


def test_what_a_node_says_twice_is_said_once_and_with_its_name():
    # Found by a newcomer: "this node: paused by an operator; paused by an operator".
    paused = Plan(
        generation=4,
        phase=Phase.HOLD,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.PAUSED, nodes=("an operator",)),),
    )
    said = {"needs": 1, "node": "n0"}
    twice = picture("ppo", View(plan=paused), {}, {}, here="paused by an operator", **said)
    assert "this node" not in render.status(asdict(twice), colour=False)
    other = picture("ppo", View(plan=paused), {}, {}, here="out of the plan; leads", **said)
    assert "n0 (this node): out of the plan; leads" in render.status(asdict(other), colour=False)


STOPPED = Plan(
    generation=4, phase=Phase.STOP, seats=(Seat(member=N0, born=1),), spares=(Seat(member=N1, born=0),), exit_code=75,
    causes=(Cause(why=Why.STOPPED, nodes=("an operator",)),),
)  # fmt: skip
COMMIT = Commit(step=18680, generation=4, manifest="m", written=960.0)


def test_a_job_that_is_begun_again_is_not_shown_as_the_one_that_has_ended():
    # Found by a newcomer: for six seconds after the same command was given again it was STOPPED.
    def shown(*members: Member, leaving: bool = False):
        records = {each.node: Record(member=each, leaving=leaving) for each in members}
        return picture("ppo", View(plan=STOPPED, commit=COMMIT), records, {}, needs=1, now=1000.0)

    for again in (shown(replace(N0, incarnation=2)), shown(Member(node="n7", incarnation=1))):
        assert (again.state, again.exit_code, again.step) == ("FORMING", None, 18680)
        assert again.reason == "begins again from step 18,680 after: stopped by an operator"
    for ends in (shown(N0, N1), shown(N1), shown(), shown(Member(node="n7", incarnation=1), leaving=True)):
        assert (ends.state, ends.exit_code, ends.reason) == ("STOPPED", 75, "stopped by an operator")


def test_who_was_drained_stays_in_the_table_until_the_next_plan():
    # Found by a reader: "n2/1 leaves", by whose order? And then "3 of 3 nodes", as if nobody was away.
    n2 = Member(node="n2", incarnation=1)

    def seen(cause: Cause, needs: int = 1, **more: Record) -> Picture:
        seats = (Seat(member=N0, born=1), Seat(member=N1, born=1))
        plan = Plan(generation=4, phase=Phase.TRAIN, seats=seats, causes=(cause,))
        records = {each.node: Record(member=each, work=Work.TRAINING, generation=4) for each in (N0, N1)}
        return picture("ppo", View(plan=plan, leader=N0), {**records, **more}, {}, drains={"n2": n2}, needs=needs)

    leaves = Cause(why=Why.LEFT, who=(n2,))
    left = seen(leaves)
    assert (left.nodes, left.known, left.rows[2].state, left.advice) == (2, 3, "drained", ())
    assert left.rows[2].note == "drained by an operator; comes back when elasticrl is started there"
    other = Cause(why=Why.LEFT, who=(replace(n2, incarnation=11),))
    assert seen(other).known == seen(Cause(why=Why.SILENT, who=(n2,), nodes=("n0",))).known == 2
    still = seen(leaves, n2=Record(member=n2, leaving=True))
    assert still.rows[2].state == "leaving", "it is still there"
    (said,) = seen(leaves, needs=2).advice
    assert said.startswith("n2 was drained. If another node goes, the job has to wait.")


def test_who_died_and_is_back_has_power():
    # Found by a reader: "look at the node's power", while its next life was warming up in the row above.
    verdict = Verdict(
        fault=Fault.DEAD_NODE, nodes=("n1", "n2"), cause="both", confidence=Confidence.HIGH, remedy="Look."
    )
    plan = Plan(
        generation=4,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.POLICY, said="so"),),
        verdict=verdict,
    )

    def advice(n1: int, n2: int) -> str:
        lives = (Member(node="n1", incarnation=n1), Member(node="n2", incarnation=n2))
        out = {
            each.node: Quarantine(member=replace(each, incarnation=1), cause=Cause(why=Why.POLICY, said="not heard"))
            for each in lives
        }
        records = {each.node: Record(member=each) for each in lives}
        return picture("ppo", View(plan=plan, leader=N0), records, out, needs=1).advice[0]

    assert advice(1, 1).startswith("dead_node (n1, n2): Look. More")
    assert advice(2, 1).startswith("dead_node (n1, n2): Look. More")
    assert advice(2, 3).startswith("dead_node (n1, n2): back as n1/2 and n2/3, let in when ready. ")
    plan = replace(
        plan, seats=(*plan.seats, *(Seat(member=Member(node=f"n{n}", incarnation=n + 1), born=4) for n in (1, 2)))
    )
    assert advice(2, 3).startswith("dead_node (n1, n2): back as n1/2 and n2/3. The logs"), "they are in"


def test_who_was_taken_for_dead_and_lives_is_told_by_what_its_incident_was_told_anew_as():
    # Found by a reader: the README's picture could not come about, as the plan's own verdict stays.
    verdict = Verdict(
        fault=Fault.DEAD_NODE, nodes=("n1",), cause="n1 went away", confidence=Confidence.HIGH, remedy="Look."
    )
    plan = Plan(
        generation=4,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.POLICY, said="so"),),
        verdict=verdict,
    )
    out = {"n1": Quarantine(member=N1, cause=Cause(why=Why.POLICY, said="not heard"))}
    records = {"n0": Record(member=N0, work=Work.TRAINING, generation=4), "n1": Record(member=N1, warm=True)}

    def seen(fault: Fault, generation: int) -> Picture:
        told = Verdict(
            fault=fault, nodes=("n1",), cause="n1 lives", confidence=Confidence.HIGH, remedy="Check its link."
        )
        last = Broken(at=1.0, verdict=told, said=told.said, generation=generation, broke=3, seconds=1.0)
        return picture(
            "ppo", View(plan=plan, leader=N0), records, out, past=Past(began=1.0, last=last, faults=1), needs=1
        )

    lives = seen(Fault.NETWORK, 4)
    assert lives.rows[1].state == "quarantined"
    assert "elasticrl admit n1" in lives.advice[0]
    assert lives.advice[1].startswith("network (n1): Check its link")
    for other in (seen(Fault.DEAD_NODE, 4), seen(Fault.NETWORK, 3)):
        assert other.rows[1].state == "lost"
        assert other.advice[-1].startswith("dead_node (n1): Look.")


def test_who_was_drained_once_and_came_back_is_drained_no_more():
    # Found by a reader: n2/1 had been drained, n2/2 was killed, and "n2 was drained" stood there again.
    plan = Plan(
        generation=4, phase=Phase.HOLD, seats=(Seat(member=N0, born=1),), causes=(Cause(why=Why.POLICY, said="held"),)
    )

    def advice(life: int) -> str:
        n2 = Member(node="n2", incarnation=life)
        return picture(
            "ppo", View(plan=plan), {"n0": Record(member=N0)}, {"n2": Quarantine(member=n2, cause=Cause(why=Why.UNREACHED))},
            drains={"n2": Member(node="n2", incarnation=1)}, needs=2,
        ).advice[0]  # fmt: skip

    assert "on n2 again (it was drained)" in advice(1)
    assert "drained" not in advice(2)


def test_a_gang_that_forms_does_not_train_yet():
    plan = Plan(
        generation=4,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1),),
        causes=(Cause(why=Why.POLICY, said="so"),),
        rung=Rung.REFORM,
    )
    joins, trains = (Record(member=N0, work=work, generation=4) for work in (Work.JOINING, Work.TRAINING))
    forms = picture("ppo", View(plan=plan), {"n0": joins}, {}, needs=1)
    assert (forms.state, forms.reason) == ("RECOVERING", "so; to train on 1 node")
    assert picture("ppo", View(plan=plan), {"n0": trains}, {}, needs=1).reason == "so; training on 1 node"


def test_a_job_that_holds_says_that_who_was_drained_would_do():
    # Found by a newcomer: it held, and nothing told that the node which was drained before was the one to start.
    plan = Plan(generation=4, phase=Phase.HOLD, seats=(Seat(member=N0, born=1), Seat(member=N1, born=1)))

    def advice(*drained: Member) -> str:
        drains = {each.node: each for each in drained}
        return picture("ppo", View(plan=plan), {"n0": Record(member=N0)}, {}, drains=drains, needs=2).advice[0]

    n2, n3 = (Member(node=name, incarnation=1) for name in ("n2", "n3"))
    assert advice() == "1 more node is needed: start elasticrl on it."
    assert advice(n2) == "1 more node is needed: start elasticrl on n2 again (it was drained), or elsewhere."
    assert "on n2 and n3 again (they were drained)" in advice(n2, n3)
    assert advice(N0) == advice(), "it is back"


def test_a_crash_loop_is_advised_on_until_it_is_begun_again():
    plan = replace(STOPPED, exit_code=70, verdict=None)
    ended = picture("ppo", View(plan=plan), {"n0": Record(member=N0)}, {}, needs=1)
    again = picture("ppo", View(plan=plan), {"n0": Record(member=replace(N0, incarnation=2))}, {}, needs=2)
    assert "The job stopped at this fault" in ended.advice[-1]
    assert again.advice[0] == "1 more node is needed: start elasticrl on it."
    assert not [text for text in again.advice if "stopped" in text]


def test_a_job_of_which_only_the_commit_is_seen_begins_from_it():
    found = picture("ppo", View(commit=COMMIT), {}, {}, needs=2)
    assert (found.state, found.step) == ("FORMING", 18680)
    assert found.reason == "begins again from step 18,680; no plan yet: waiting for nodes and a leader"


def test_who_was_drained_may_be_the_one_that_is_missed_next():
    # Found by a newcomer: after a drain there were "2 of 2 nodes, needs 2", and no word of what one more loss does.
    def advice(needs: int, drains: dict[str, Member], *, spare: bool = False) -> tuple[str, ...]:
        plan = Plan(generation=3, phase=Phase.TRAIN, seats=(Seat(member=N0, born=1), Seat(member=N1, born=1)))
        said = {"work": Work.TRAINING, "generation": 3}
        records = {"n0": Record(member=N0, **said), "n1": Record(member=N1, **said)}
        records |= {"n7": Record(member=Member(node="n7", incarnation=1), warm=True)} if spare else {}
        return picture("ppo", View(plan=plan, leader=N0), records, {}, drains=drains, needs=needs).advice

    n2 = {"n2": Member(node="n2", incarnation=1)}
    assert advice(2, n2) == (
        "n2 was drained. If another node goes, the job has to wait. Start elasticrl on it again, or on another node.",
    )
    assert advice(2, {}) == (), "so many were configured"
    assert advice(1, n2) == ()
    assert advice(2, n2, spare=True) == ()
    assert advice(2, {"n1": N1}) == (), "it is back, or has not gone yet"


def test_what_no_gang_is_there_to_save_is_told():
    def unsaved(phase: Phase, seated: str, there: str, needs: int, **more: bool) -> int:
        lives = {name: Member(node=name, incarnation=1) for name in seated}
        plan = Plan(
            generation=3, phase=phase, seats=tuple(Seat(member=each, born=1) for each in lives.values()), **more
        )
        records = {name: Record(member=lives[name], step=166) for name in there}
        return picture("ppo", View(plan=plan, commit=Commit(step=160, generation=2)), records, {}, needs=needs).unsaved

    assert unsaved(Phase.HOLD, "a", "a", 2) == 6
    assert unsaved(Phase.HOLD, "ab", "a", 1) == 6
    assert unsaved(Phase.HOLD, "ab", "ab", 2) == 0, "paused: it forms once more, and saves"
    assert unsaved(Phase.HOLD, "a", "a", 2, saves=True) == 0, "it saves"
    assert unsaved(Phase.TRAIN, "ab", "ab", 2) == 0


def test_a_job_that_an_operator_has_wait_is_paused() -> None:
    # Found by a reader: it was HOLDING, as one that waits for nodes.
    held = Plan(
        generation=4, phase=Phase.HOLD, seats=(Seat(member=N0, born=1),), causes=(Cause(why=Why.POLICY, said="so"),)
    )
    view = View(plan=held, leader=N0)
    assert picture("ppo", view, {}, {}, needs=1).state == "HOLDING"
    assert picture("ppo", replace(view, intent=Intent.PAUSE), {}, {}, needs=1).state == "PAUSED"


def test_whose_gang_trains_is_not_shown_as_forming() -> None:
    # Found by readers: a record is written as its worker begins to train, and "reform" stood there for seconds.
    plan = Plan(
        generation=4,
        phase=Phase.TRAIN,
        seats=(Seat(member=N0, born=1), Seat(member=N1, born=1)),
        causes=(Cause(why=Why.POLICY, said="so"),),
    )

    def phases(work: Work) -> list[str]:
        records = {
            "n0": Record(member=N0, work=Work.TRAINING, generation=4, step=40, phase="update"),
            "n1": Record(member=N1, work=work, generation=4, step=40, phase="reform"),
        }
        return [row.phase for row in picture("ppo", View(plan=plan, leader=N0), records, {}, needs=1).rows]

    assert phases(Work.TRAINING) == ["update", ""]
    assert phases(Work.JOINING) == ["update", "reform"]
