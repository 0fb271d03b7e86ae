"""How far a script is by its own log: which lines say so, what a flood of them costs, and when their absence is a hang."""

import time
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
from core_kit import SETTINGS, Life, leads, member, record, trains

from elasticrl.agent.gather import Beating, Usual, look
from elasticrl.agent.progress import LOOK_S, Progress
from elasticrl.base.expression import expected
from elasticrl.cli.render import status
from elasticrl.contract import events
from elasticrl.contract.beats import Snapshot, Stage
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.events import Found, Tick
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.level import Level
from elasticrl.contract.model import UNTOLD, Milestone, Phase, Plan, Record, Seat, Stall, View, Work
from elasticrl.contract.settings import Timeouts
from elasticrl.core.node.suspect import LEAST_S, LINES, Budgets, Rhythm
from elasticrl.diagnose.progress import Reader, given
from elasticrl.status.picture import on_level, picture

BAR = "\r 24%|##4       | {0}/500 [00:12<00:38,  9.93it/s]"
EVALUATES = "\r 24%|##4       | {0}/63 [00:12<00:38,  9.93it/s]"


def read(*texts: str, reader: Reader | None = None) -> Reader:
    return reduce(lambda so_far, text: so_far.after(text.encode()), texts, reader or Reader())


def far(*texts: str) -> str:
    return str(read(*texts).milestone or "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (" [2026-01-01 12:00:00] iteration      120/     500 | consumed samples: 960 |", "step 120 of 500"),
        ("Training epoch 0, iteration 120/499 | lr: 1e-4", "step 120 of 499"),
        ("step 120/500 loss 2.3", "step 120 of 500"),
        ("Step [120/500], Loss: 2.3", "step 120 of 500"),
        ("step 1,200 of 5,000", "step 1,200 of 5,000"),
        ("Epoch: [0][ 120/5005]\tTime  0.1", "step 120 of 5,005"),
        ("step:120 - global_seqlen/min:12 - actor/loss:0.2", "step 120"),
        ("\x1b[31mstep:  120  \x1b[32mloss:  7.9", "step 120"),
        ("iter 120: loss 2.3, time 12.1ms", "step 120"),
        ("{'global_step': 120, 'loss': 1.2}", "step 120"),
        ("[Rank 0] step=10, skipped=0, lr=[1e-5]", "step 10"),
        (BAR.format(120), "step 120 of 500"),
        ("\rEpoch 3:  24%|██▍   | 120/500 [00:12<00:38, 9.93it/s, v_num=0]", "step 120 of 500"),
        ("Train Epoch: 1 [1280/60000 (2%)]\tLoss: 2.3", "sample 1,280 of 60,000"),
        ("{'loss': '2.31', 'learning_rate': '1e-05', 'epoch': '0.24'}", "epoch 0.24"),
        ("{'loss': 2.31, 'learning_rate': 1e-05, 'epoch': 0.24}", "epoch 0.24"),
        ("Epoch 3/10", "epoch 3 of 10"),
        ("loss: 2.31", ""),
        ("\rMap: 100%|##| 20/20 [00:12<00:38,  9.93it/s]", ""),
        ("\rValidation DataLoader 0: 50%|##| 10/20 [00:12<00:38,  9.93it/s]", ""),
    ],
)
def test_what_trainers_write_is_understood(line: str, said: str) -> None:
    assert (far(line + "\n"), read(line + "\n").moves) == (said, 1)


@pytest.mark.parametrize("line", ["it is half past 5", "step 1.5 s", "a misstep 5", "steps: 500", "took 3 s", "100%"])
def test_other_lines_say_nothing(line: str) -> None:
    assert (far(line + "\n"), read(line + "\n").moves) == ("", 0)


def test_a_line_counts_when_it_has_ended_and_a_bar_when_its_bracket_is_closed() -> None:
    assert far("step 12") == ""
    assert far("step 12", "0/500\n") == "step 120 of 500"
    drawn = BAR.format(120)
    assert far(drawn[:-1]) == ""
    assert far(drawn) == "step 120 of 500"
    assert read(drawn[:-9], drawn[-9:], BAR.format(121)).moves == 2


def test_a_bar_that_is_drawn_anew_is_no_progress() -> None:
    assert read(*[BAR.format(120)] * 20).moves == 1
    assert read(*["step 7 loss 2.3\n"] * 20).moves == 1


def test_the_bar_of_an_evaluation_does_not_take_the_place_of_the_trainings() -> None:
    trained = [BAR.format(n) for n in range(100, 121)]
    evaluated = [EVALUATES.format(n) for n in range(1, 20)]
    assert far(*trained, *evaluated) == "step 120 of 500"
    assert read(*trained, *evaluated).moves == 40, "but it is progress"
    assert far(*trained, *evaluated, BAR.format(121)) == "step 121 of 500"


def test_a_bar_that_has_come_to_its_end_gives_way_and_so_does_a_remark() -> None:
    assert far("\r100%|##| 63/63 [00:12<00:00,  9.93it/s]\n", BAR.format(1)) == "step 1 of 500"
    assert far("resumes from step 120\n", BAR.format(121)) == "step 120"
    assert far("resumes from step 120\n", *map(BAR.format, range(121, 125))) == "step 124 of 500"
    assert far(*map(BAR.format, range(121, 125)), "step 5 loss 2.3\n") == "step 5", "what is surer goes before"


def test_an_operators_expression_stands_in_place_of_the_table() -> None:
    mine = Reader(rows=given(r"update (\d+)(?: of (?P<of>\d+))?"))
    assert str(read("step 5\nupdate 17 of 20\n", reader=mine).milestone) == "step 17 of 20"
    assert str(read("update 18\n", reader=mine).milestone) == "step 18"
    assert read("update none\n", reader=mine).milestone is None
    assert given("") == Reader().rows


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("step", "no group for the step"),
        (r"(\d+", "no regular expression"),
        (r"(a+)+ (\d+)", "may take for ever"),
        ("(x)" * 100, "300 letters"),
    ],
)
def test_an_expression_that_cannot_be_used_is_refused_with_a_sentence(expression: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("(", r"\(")):
        expected(expression)


@pytest.mark.parametrize(
    "piece",
    [
        b"step ",
        b"1%|",
        b" ",
        b"step" + b" " * 1990,
        b"epoch: [1] [ ",
        b"1,111",
        b"loss ",
        b"1it [a/s",
        b"9",
        b"\x1b[",
        b"\xff",
    ],
    ids=range(11),
)
def test_hostile_output_costs_little_and_raises_nothing(piece: bytes) -> None:
    text = (piece * (2_000 // len(piece)) + b"\n") * 500
    begun = time.process_time()
    reader = Reader().after(text)
    assert time.process_time() - begun < 1.0, "an agent reads this between two looks at its workers"
    assert len(Reader().after(b"x" * 1_000_000).tail) <= 2_000
    assert len(reader.said) <= 8


def test_a_look_reads_what_was_gained_and_tells_the_time_of_the_last_progress(tmp_path: Path) -> None:
    log, progress = tmp_path / "rank_0.log", Progress("")
    log.write_text("step 1/9\n")
    heard = progress.look(10.0, {7: log})[7]
    assert (str(heard.milestone), heard.rhythm) == ("step 1 of 9", Rhythm(newest=10.0, mark=1))
    with log.open("a") as out:
        out.write("saving\n")
    assert progress.look(10.0 + LOOK_S, {7: log})[7] == heard, "it was written to, and tells of no progress"
    with log.open("a") as out:
        out.write("step 2/9\nstep 3/9\n")
    heard = progress.look(13.0, {7: log})[7]
    assert heard.rhythm is not None
    assert (str(heard.milestone), heard.rhythm.newest, heard.rhythm.seen) == ("step 3 of 9", 13.0, 1)
    log.rename(tmp_path / "rank_0.log.1")
    log.write_text("step 4/9\n")
    assert str(progress.look(15.0, {7: log})[7].milestone) == "step 4 of 9", "its log was turned over"
    assert progress.look(16.0, {}) == {}


# ---- when silence is a hang


def rhythm(pauses: int, every_s: float, *, longest_s: float = 0.0) -> Rhythm:
    """Pauses of so long, the last at 1,000 s."""
    took = [*[every_s] * (pauses - bool(longest_s)), *[longest_s] * bool(longest_s)]
    begun = Rhythm(newest=1000.0 - sum(took))
    return reduce(lambda so_far, pause: so_far.at(so_far.newest + pause, so_far.mark + 1), took, begun)


def script(at: Rhythm | None, *, phase: str = UNTOLD, stopped: bool = False) -> Beating:
    beat = Snapshot(generation=3, phase=phase, since=995.0, state=Stage.TRAINING, pid=7)
    return Beating(slot=0, beat=beat, script=True, rhythm=at, stopped=stopped)


def facts(at: Rhythm | None, now: float, *, action: str = "tell", budgets: Budgets | None = None):
    budgets = budgets or Budgets(settings=Timeouts(progress=action))  # type: ignore[arg-type]
    return look([script(at)], 3, budgets, now)


@pytest.mark.parametrize(
    ("at", "budget_s"),
    [
        (rhythm(LINES - 1, 1.0), None),  # too few lines to know how often they come
        (rhythm(LINES, 1.0), LEAST_S),
        (rhythm(30, 12.0), 120.0),
        (rhythm(30, 1.0, longest_s=300.0), 600.0),  # an evaluation that took five minutes once
        (None, None),
    ],
)
def test_a_log_with_a_rhythm_has_a_budget(at: Rhythm | None, budget_s: float | None) -> None:
    assert facts(at, 1000.0 + (budget_s or 1e6) - 1.0).stall is None
    late = facts(at, 1000.0 + (budget_s or 1e6) + 1.0)
    if budget_s is None:
        assert late.stall is None
    else:
        assert late.stall is not None
        assert (late.stall.silent, late.stall.waiting, late.stall.budget_s) == (True, True, budget_s)
        assert str(late.stall) == f"its log shows no progress: a line was expected within {budget_s:.0f} s"


@pytest.mark.parametrize(
    ("action", "work", "silent"),
    [("off", Work.TRAINING, False), ("tell", Work.TRAINING, True), ("restart", Work.STALLED, True)],
)
def test_what_is_done_about_a_silent_log_is_the_operators_choice(action: str, work: Work, silent: bool) -> None:
    found = facts(rhythm(30, 1.0), 1100.0, action=action)
    assert (found.work, found.stall is not None) == (work, silent)


def test_a_quiet_script_goes_before_a_silent_log_and_what_a_script_tells_before_both() -> None:
    budgets = Budgets(settings=Timeouts(quiet_s=60.0))
    assert facts(rhythm(30, 1.0), 1100.0, budgets=budgets).stall == Stall(
        slot=0, step=0, phase=UNTOLD, for_s=105.0, budget_s=60.0, waiting=True
    )
    told = replace(
        script(rhythm(30, 1.0)), beat=Snapshot(generation=3, phase="train", since=1099.0, state=Stage.TRAINING)
    )
    assert look([told], 3, budgets, 1100.0).stall is None


def test_what_was_ended_for_its_silence_has_twice_as_long_where_it_was() -> None:
    """An evaluation of ten minutes that tells nothing is ended once at each length, and not for ever."""
    for action, budget_s in (("restart", 130.0), ("tell", 60.0)):
        budgets = Budgets(settings=Timeouts(progress=action))  # type: ignore[arg-type]
        at = rhythm(30, 1.0)
        usual = Usual(budgets=budgets).learn([script(at)], 1065.0)
        again = replace(script(at).beat, generation=4, pid=8)
        usual = usual.learn([replace(script(None), beat=again)], 1070.0)
        assert usual.budgets.silence(at) == budget_s
        assert usual.budgets.silence(replace(at, mark=at.mark + 2)) == 60.0, "but not beyond"


def silent_leader(action: str = "tell") -> Life:
    """It leads three nodes that train a script at generation 1."""
    settings = replace(SETTINGS, level=Level.SUPERVISED, timeouts=Timeouts(progress=action))  # type: ignore[arg-type]
    life = Life(settings=settings)
    leads(life)
    life.told(0.8, record("n00"), record("n01"), record("n02"))
    trains(life, 1.0, 1, "n00", "n01", "n02")
    life.told(1.5, *(training(name) for name in ("n00", "n01", "n02")))
    return life


def training(name: str, *, stall: Stall | None = None, evidence: tuple[Evidence, ...] = (), looked: int = 0) -> Record:
    return record(name, work=Work.TRAINING, generation=1, born=1, stall=stall, evidence=evidence, looked=looked)


SILENT = Stall(slot=0, step=120, phase=UNTOLD, for_s=61.0, budget_s=60.0, waiting=True, silent=True)


def seen_at(rank: int, sign: Sign, detail: str) -> Evidence:
    return Evidence(
        kind=Kind.STACK, sign=sign, rank=rank, node=f"n0{rank}", generation=1, detail=detail, source="stack"
    )


def asks(life: Life) -> bool:
    return any(isinstance(action, events.Inspect) for action, _ in life.state.sent.values())


def test_where_a_log_is_silent_all_are_looked_at_and_the_rank_is_named_and_nothing_is_ended() -> None:
    life = silent_leader()
    life.leased(69.9)
    life.told(70.0, training("n02", stall=SILENT))
    assert asks(life)
    life.seen(70.1, "asked", look=1, look_revision=90)
    assert not asks(life)
    waits = [seen_at(rank, Sign.WAITED, "in all_reduce") for rank in (0, 2)]
    stands = seen_at(1, Sign.ELSEWHERE, "in its dataloader: __next__ (loader.py:12)")
    life.told(
        70.5, training("n02", stall=SILENT, evidence=(waits[1],), looked=90), training("n01", evidence=(stands,), looked=90),
    )  # fmt: skip
    life.at(70.6, Found(now=0, evidence=(waits[0],), scene=90))
    life.at(71.0, Tick(now=0))
    assert not any(isinstance(action, events.Propose | events.Confine) for action, _ in life.state.sent.values())
    (advice,) = life.view.own.advice  # type: ignore[union-attr]
    assert advice.startswith("n01: rank 1 is outside of collectives, in its dataloader")
    assert advice.endswith("The job was left alone (timeouts.progress: tell).")
    life.leased(116.0)
    assert asks(life), "what was found is forgotten after a minute: they are looked at again"
    life.told(116.5, training("n02"))
    assert life.state.lead is not None
    assert life.state.lead.stalls.silent is None


def test_where_no_rank_stands_out_it_is_said_that_only_the_silence_is_known() -> None:
    life = silent_leader()
    life.leased(69.9)
    life.told(70.0, training("n02", stall=SILENT))
    life.seen(70.1, "asked", look=1, look_revision=90)
    life.at(70.2, Found(now=0, scene=90))
    (advice,) = life.view.own.advice  # type: ignore[union-attr]
    assert advice.startswith("The script's log shows no progress, and no rank stands out")


def test_a_silent_log_is_told_to_the_store_as_seldom_as_a_step() -> None:
    life = silent_leader()
    said = events.Workers(
        now=0, work=Work.TRAINING, generation=1, born=1, warm=True, endpoint="n00:29500", stall=SILENT
    )
    life.at(70.0, said)
    for tenths in range(1, 40):
        decision = life.at(70.0 + tenths / 10, replace(said, stall=replace(SILENT, for_s=61.0 + tenths / 10)))
        assert not any(isinstance(action, events.Publish) for action in decision.actions)


def test_status_shows_the_step_by_the_log_and_how_old_it_is() -> None:
    n0, n1 = member("n0"), member("n1")
    plan = Plan(
        generation=3, phase=Phase.TRAIN, seats=(Seat(member=n0, born=3), Seat(member=n1, born=3)),
        causes=(Cause(why=Why.POLICY, said="as told"),),
    )  # fmt: skip
    said = {"work": Work.TRAINING, "generation": 3, "phase": UNTOLD, "beat_at": 999.9}
    far = Milestone(unit="step", at=120, of=500, read=960.0)
    records = {"n0": Record(member=n0, milestone=far, **said), "n1": Record(member=n1, **said)}  # type: ignore[arg-type]
    made = on_level(picture("sft", View(plan=plan, leader=n0), records, {}, needs=2, now=1000.0), Level.SUPERVISED)
    assert (made.milestone, made.milestone_s) == ("step 120 of 500", 40.0)
    from dataclasses import asdict

    head, _, _, first, second, *_ = status(asdict(made), colour=False).splitlines()
    assert "generation 3  step 120 of 500, by its log (40 s ago)  2 of 2 nodes" in head
    assert "step 120 of 500 (40 s ago)" in first
    assert "step" not in second
