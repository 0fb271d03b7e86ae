"""What happens again and again: how long is waited each time, and when the job stops."""

from dataclasses import replace

import pytest
from core_kit import SETTINGS, Life, leads, member, plan, record, trains

from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Probed, Propose, Tick, Workers
from elasticrl.contract.evidence import Sign
from elasticrl.contract.model import Exit, Intent, Phase, Plan, Quarantine, Record, Rung, Stall, Strike, Work
from elasticrl.core.lead.strikes import explained, strike_of, worst
from elasticrl.core.node.state import Failures


@pytest.mark.parametrize("often", [1024, 1025, 5000])
def test_no_wait_is_too_long_to_be_computed(often: int) -> None:
    life = Life("n00/1")
    leads(life)
    put_out = Quarantine(member=member("n02"), cause=Cause(why=Why.POLICY, said="not heard"), strikes=often)
    life.view = replace(life.view, quarantines={"n02": put_out})
    trains(life, 2.6, 1, "n00", "n01", backend="gloo", fallbacks=often)
    life.leased(2.9)
    life.at(3.0, Tick(now=0))
    health = life.state.settings.health
    assert life.state.lead is not None
    assert life.state.lead.custody.confined.keys() == {"n02"}
    life.leased(health.quarantine_max_s)
    life.at(health.quarantine_max_s + 1.0, Tick(now=0))
    assert not any("Confine" in line or "on gloo" in line for line in life.lines)
    life.leased(health.quarantine_max_s + 3.0)
    life.at(health.quarantine_max_s + 4.0, Tick(now=0))
    told = "\n".join(life.lines)
    assert "Confine n02/1 let go" in told
    assert "training runs over gloo" in told


# ---- what is distrusted


def failed(said: str) -> Cause:
    return Cause(why=Why.FAILED, said=said)


TWICE = Strike(cause=failed("exit code 1: ValueError"), step=7, count=2)


def proposed(life: Life) -> Plan:
    return next(a.plan for a, _ in life.state.sent.values() if isinstance(a, Propose))


def reloads(life: Life, now: float, generation: int = 2) -> None:
    """A gang that has failed twice at one step is told to read the disk, and has not yet done so."""
    leads(life)
    life.told(1.0, life.view.own, record("n01"))
    written = plan(generation, "n00", "n01", rung=Rung.RELOAD, strike=TWICE)
    life.seen(now, "reload", plan=written, plan_revision=10 * generation)
    life.at(now, Workers(now=0, work=Work.JOINING, generation=generation, born=2, warm=True, endpoint="n00:29500"))
    life.told(now, life.view.own, record("n01", work=Work.JOINING, generation=generation, born=2))


def lost_node(life: Life) -> None:
    assert life.view.records is not None
    life.seen(4.0, "n01 is gone", records={"n00": life.view.records["n00"]})


def pause(life: Life) -> None:
    life.seen(4.0, "pause", intent=Intent.PAUSE, intent_generation=2)


@pytest.mark.parametrize("why", [lost_node, pause])
def test_vaults_that_are_distrusted_still_are_after_a_hold(why) -> None:
    life = Life("n00/1")
    reloads(life, 3.0)
    life.leased(3.9)
    why(life)
    held = proposed(life)
    assert held.phase is Phase.HOLD
    life.seen(4.5, "held", plan=replace(held, generation=3), plan_revision=30, intent=Intent.RUN)
    life.at(4.6, Workers(now=0, work=Work.PARKED, generation=3, born=2, warm=True, endpoint="n00:29500"))
    life.told(5.0, life.view.own, record("n01", work=Work.PARKED, generation=3, born=2))
    for now in range(6, 30, 3):
        life.leased(float(now))
    after = proposed(life)
    assert (after.phase, after.rung, after.strike) == (Phase.TRAIN, Rung.RELOAD, TWICE)
    assert {seat.born for seat in after.seats} == {4}, "who has loaded from a vault starts afresh"


def test_a_pause_after_the_disk_was_read_and_trained_from_reads_it_no_more() -> None:
    life = Life("n00/1")
    reloads(life, 3.0)
    life.at(3.5, Workers(now=0, work=Work.TRAINING, generation=2, born=2, warm=True, endpoint="n00:29500"))
    life.told(3.6, life.view.own, record("n01", work=Work.TRAINING, generation=2, born=2))
    life.leased(3.9)
    pause(life)
    life.seen(4.5, "held", plan=replace(proposed(life), generation=3), plan_revision=30, intent=Intent.RUN)
    life.at(4.6, Workers(now=0, work=Work.PARKED, generation=3, born=2, warm=True, endpoint="n00:29500"))
    life.told(5.0, life.view.own, record("n01", work=Work.PARKED, generation=3, born=2))
    for now in range(6, 12, 3):
        life.leased(float(now))
    assert proposed(life).rung is Rung.REFORM


@pytest.mark.parametrize("read", [True, False])
def test_a_stall_sends_a_gang_to_the_disk_again_only_if_it_has_not_trained_from_it_yet(read: bool) -> None:
    life = Life("n00/1")
    reloads(life, 3.0)
    work = Work.TRAINING if read else Work.JOINING
    life.at(3.5, Workers(now=0, work=work, generation=2, born=2, warm=True, endpoint="n00:29500", step=9))
    life.told(3.6, life.view.own, record("n01", work=work, generation=2, born=2, step=9))
    if read:
        life.told(4.0, life.view.own, record("n01", work=Work.STALLED, generation=2, born=2, step=9))
    for now in range(5, 311, 3):
        life.leased(float(now))
        life.told(float(now), life.view.own)
        if any(isinstance(a, Propose) for a, _ in life.state.sent.values()):
            break
    asked = proposed(life)
    assert (asked.phase, asked.rung) == (Phase.PROBE, Rung.START if read else Rung.RELOAD)
    now = life.now
    life.seen(now + 0.1, "probe", plan=replace(asked, generation=3), plan_revision=30)
    life.at(now + 0.2, Probed(now=0, generation=3, unreachable=()))
    parked = record("n01", work=Work.PARKED, generation=3, born=2, step=9, unreachable=(), answered=3)
    life.told(now + 0.3, life.view.own, parked)
    after = proposed(life)
    assert (after.phase, after.rung) == (Phase.TRAIN, Rung.RESTART if read else Rung.RELOAD)
    assert after.strike is not None
    # Of what loads too slowly the setting is named, as that is what there is to do.
    unformed = Cause(why=Why.UNFORMED, setting="recovery.reload")
    assert after.strike.cause == (Cause(why=Why.STALLED) if read else unformed)


# ---- crash loops


@pytest.mark.parametrize(
    "ends",
    [
        ["ValueError: bad batch", "KeyError: 'x'", "ValueError: bad batch"],
        ["shape [3, 4] is not [4, 4]", "shape [7, 4] is not [8, 4]", "shape [1, 2] is not [2, 2]"],
        ["out of memory: process 4711 has 3.10 GiB", "out of memory: process 12 has 2.9 GiB", "bad object 0x7f2a"],
    ],
)
def test_a_crash_loop_is_one_whatever_it_says(ends: list[str]) -> None:
    strike = None
    for number, cause in enumerate(ends, 1):
        strike = strike_of(strike, failed(cause), 7, own=True)
        assert (strike.step, strike.count) == (7, number)


def test_a_strike_says_whether_there_were_others() -> None:
    said = []
    strike = None
    for name in ("ValueError", "ValueError", "KeyError", "ValueError"):
        strike = strike_of(strike, replace(failed(f"{name}, again"), raised=name), 7, own=True)
        said.append((strike.cause.raised, strike.mixed))
    assert said == [("ValueError", False)] * 2 + [("ValueError", True)] * 2


def test_only_progress_beyond_its_step_makes_a_failure_a_first_one() -> None:
    again = strike_of(TWICE, failed("KeyError"), 5, own=True)
    assert (again.step, again.count) == (7, 3), "it has to get beyond the step of the first"
    assert strike_of(TWICE, TWICE.cause, 8, own=True) == Strike(cause=TWICE.cause, step=8, count=1)


def test_a_stall_counts_with_its_like_at_its_step_alone() -> None:
    once = replace(TWICE, count=1)
    stall = Cause(why=Why.STALLED)
    assert strike_of(once, stall, 7) == Strike(cause=stall, step=7, count=1)
    assert strike_of(TWICE, stall, 7) is TWICE
    assert strike_of(Strike(cause=stall, step=7, count=1), stall, 7).count == 2


@pytest.mark.parametrize(("newest", "count"), [(7, 2), (8, 1)])
def test_a_worker_that_fails_as_it_starts_counts_by_how_far_the_job_had_got(newest: int, count: int) -> None:
    life = Life("n00/1")
    leads(life)
    life.told(1.0, life.view.own, record("n01"))
    trains(life, 2.6, 1, "n00", "n01", strike=replace(TWICE, count=1))
    life.at(3.0, Workers(now=0, work=Work.TRAINING, generation=1, born=1, warm=True, endpoint="n00:29500", step=newest))
    life.leased(3.5)
    died = Exit(generation=1, slot=0, step=0, cause="exit code 1: ImportError", own=True)
    life.told(4.0, replace(life.view.own, step=newest), record("n01", work=Work.FAILED, generation=1, exit=died))
    strike = proposed(life).strike
    assert strike is not None
    assert (strike.step, strike.count) == (newest, count)


# ---- whose peer has gone, as they say

REFUSED = Exit(
    generation=1, slot=0, step=7, cause="exit code 1: DistNetworkError: Connection refused", own=False,
    raised="torch.distributed.DistNetworkError",
)  # fmt: skip
STANDS = Stall(slot=0, step=7, phase="update", for_s=12.0, budget_s=10.0, waiting=False)
SCRIPT = replace(SETTINGS, level="supervised", copies=0, exact="off")


def ends(life: Life, *records: Record, strike: Strike | None = None) -> Plan | None:
    """A gang of three in which these have failed; and the plan for it."""
    leads(life)
    life.told(1.0, life.view.own, record("n01"), record("n02"))
    trains(life, 2.6, 1, "n00", "n01", "n02", strike=strike)
    life.leased(3.5)
    left = REFUSED if life.state.settings is SCRIPT else None
    work = Work.FAILED if left else Work.PARKED
    life.at(3.9, Workers(now=0, work=work, generation=1, born=1, warm=True, endpoint="n00:29500", exit=left))
    life.told(4.0, life.view.own, *records)
    return plans(life)


def plans(life: Life) -> Plan | None:
    return next((a.plan for a, _ in life.state.sent.values() if isinstance(a, Propose)), None)


def gone(name: str, left: Exit = REFUSED, **more: object) -> Record:
    return record(name, work=Work.FAILED, generation=1, born=1, exit=left, **more)


@pytest.mark.parametrize("settings", [SETTINGS, SCRIPT])
def test_a_gang_whose_workers_all_say_that_a_peer_is_gone_counts_until_somebody_is_known_to_be(settings) -> None:
    killed = replace(REFUSED, cause="signal 9 (SIGKILL)", signal=9, raised="")
    for others, left in (
        ([gone("n01"), gone("n02")], (1, 1)),
        ([gone("n01", suspects=("n02/1",))], None),
        ([gone("n01"), gone("n02", killed)], None),
        ([gone("n01"), record("n02", work=Work.TRAINING, generation=1, born=1, stall=STANDS)], None),
        ([gone("n01"), record("n02", work=Work.TRAINING, generation=1, born=1, leaving=True)], None),
        ([gone("n01", replace(REFUSED, own=True)), gone("n02")], (1, 0)),
    ):
        written = ends(Life("n00/1", settings), *others)
        assert written is not None
        assert written.phase is Phase.TRAIN
        counted = written.strike and (written.strike.count, written.strike.unblamed)
        assert counted == left
        assert written.rung is not Rung.RELOAD


def test_what_nobody_is_blamed_for_costs_no_step_that_is_in_memory() -> None:
    before = Strike(cause=failed(REFUSED.cause), step=7, count=1, unblamed=1)
    written = ends(Life("n00/1"), gone("n01"), gone("n02"), strike=before)
    assert written is not None
    assert (written.strike, written.rung) == (replace(before, count=2, unblamed=2, mixed=True), Rung.REPLACE)


@pytest.mark.parametrize("settings", [SETTINGS, SCRIPT])
def test_before_such_a_job_ends_it_waits_until_whoever_has_gone_would_be_known(settings) -> None:
    life = Life("n00/1", settings)
    before = Strike(cause=failed(REFUSED.cause), step=7, count=2, unblamed=2)
    assert ends(life, gone("n01"), strike=before) is None
    assert "waiting to learn which one was lost" in life.state.reason
    life.leased(9.0)
    life.at(13.8, Tick(now=0))
    assert plans(life) is None
    life.leased(13.9)
    life.at(4.0 + settings.membership.lease_ttl_s + 0.1, Tick(now=0))
    written = proposed(life)
    assert (written.phase, written.exit_code) == (Phase.STOP, 70)
    assert (written.causes[0].why, written.causes[0].count) == (Why.CRASH_LOOP, 3)
    assert not any("Confine" in line for line in life.lines)


def test_who_is_known_to_have_gone_explains_what_nobody_was_blamed_for_before() -> None:
    life = Life("n00/1", SCRIPT)
    before = Strike(cause=failed(REFUSED.cause), step=7, count=3, unblamed=2)
    assert ends(life, gone("n01"), strike=before) is None
    life.told(5.0, gone("n02", replace(REFUSED, cause="signal 9 (SIGKILL)", signal=9, raised="")))
    written = proposed(life)
    assert written.strike == replace(before, count=1, unblamed=0)
    assert explained(replace(before, count=2)) is None
    assert explained(TWICE) is TWICE


@pytest.mark.parametrize(
    ("unblamed", "own", "phase"),
    [(2, True, Phase.TRAIN), (1, True, Phase.TRAIN), (0, True, Phase.STOP), (1, False, Phase.TRAIN)],
)
def test_deaths_that_were_told_of_too_late_and_failures_are_not_added_up(
    unblamed: int, own: bool, phase: Phase
) -> None:
    """Found by reading: two deaths whose victims were heard first, and one ValueError, were a crash loop of three."""
    before = Strike(cause=failed(REFUSED.cause), step=7, count=2, unblamed=unblamed)
    written = ends(Life("n00/1"), gone("n01", replace(REFUSED, own=own)), gone("n02"), strike=before)
    assert written is not None
    assert written.phase is phase
    assert written.strike is not None
    assert written.strike.count == 3


@pytest.mark.parametrize(("others", "against"), [((), {"n01"}), ((gone("n02"),), set())])
def test_who_alone_says_at_exact_that_a_peer_is_gone_may_be_the_one_that_drops_it(others, against: set[str]) -> None:
    life = Life("n00/1")
    assert ends(life, gone("n01"), *others) is not None
    assert life.state.lead is not None
    assert life.state.lead.custody.failures.keys() == against


@pytest.mark.parametrize(("count", "phase"), [(2, Phase.TRAIN), (1, Phase.STOP)])
def test_a_node_that_drops_its_connections_is_put_out_before_the_job_ends_for_it(count: int, phase: Phase) -> None:
    """Found by reading: one card that reset its connections ended the job where the others could have gone on."""
    life = Life("n00/1")
    leads(life)
    life.told(1.0, life.view.own, record("n01"), record("n02"))
    trains(life, 2.6, 1, "n00", "n01", "n02", strike=Strike(cause=failed(REFUSED.cause), step=7, count=2, unblamed=2))
    assert life.state.lead is not None
    before = Failures(generation=0, step=7, count=count)
    lead = life.state.lead
    life.state = life.state.but(lead=replace(lead, custody=replace(lead.custody, failures={"n01": before})))
    life.leased(3.5)
    life.told(4.0, gone("n01"))
    assert plans(life) is None
    life.leased(9.0)
    life.leased(13.9)
    life.at(4.0 + SETTINGS.membership.lease_ttl_s + 0.1, Tick(now=0))
    written = proposed(life)
    assert (written.phase, any("Confine n01/1 held" in line for line in life.lines)) == (phase, phase is Phase.TRAIN)
    if phase is Phase.TRAIN:
        assert written.seated == ("n00", "n02")
        assert written.strike is not None
        assert worst(written.strike) == 2, "if it happens once more without that node, it was the program"


@pytest.mark.parametrize("settings", [SETTINGS, SCRIPT])
@pytest.mark.parametrize("slot", [None, 0])
def test_a_node_whose_agent_starts_no_process_is_no_victim(settings, slot: int | None) -> None:
    unstarted = Exit(
        generation=1, slot=slot, step=7, cause="no process could be started within 60 s", own=False, sign=Sign.GONE
    )
    life = Life("n00/1", settings)
    written = ends(life, gone("n01", unstarted))
    assert written is not None
    assert written.strike is None
    assert life.state.lead is not None
    assert life.state.lead.custody.failures.keys() == {"n01"}, "it counts against that node, and not against the job"
