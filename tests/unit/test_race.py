"""The race judges from what was written: which steps count, what was lost, and what is said of those that never came back."""

import json
from datetime import UTC, datetime
from xml.etree import ElementTree as ET

import pytest

from bench.race import results
from bench.race.environments import PINS
from bench.race.judge import (
    Deal,
    Outcome,
    deal,
    first_step,
    fresh,
    names,
    pause,
    progress,
    same_bits,
    samples,
    steps_lost,
)
from bench.race.race import FAULTS, RECORD, recorded, schedule
from bench.race.sides import SIDES, Peer
from chaos.live.local import Sealed

NODES = ("n0", "n1", "n2")


def line(
    at: float, node: str, step: int, *, generation: int = 1, world: int = 3, pid: int = 0, digest: str = "a"
) -> Sealed:
    rank = int(node[1:])
    return Sealed(
        at=at, node=node, pid=pid or 10 + rank, step=step, generation=generation, rank=rank, world=world, digest=digest
    )


def step(at: float, number: int, nodes: tuple[str, ...] = NODES, **more: int) -> list[Sealed]:
    return [line(at + 0.001 * place, node, number, **more) for place, node in enumerate(nodes)]


def test_sides_run_in_turn_so_that_a_slow_minute_meets_all():
    assert schedule(["a", "b"], ["worker", "stop"], 2) == [
        (1, "worker", "a"),
        (1, "worker", "b"),
        (1, "stop", "a"),
        (1, "stop", "b"),
        (2, "worker", "a"),
        (2, "worker", "b"),
        (2, "stop", "a"),
        (2, "stop", "b"),
    ]


def test_a_race_goes_on_where_it_stands_and_repeats_what_never_began():
    done = [
        Outcome(side="a", fault="worker", day="2026-11-22"),
        Outcome(side="b", fault="worker", end="did not start: late", day="2026-11-22"),
        Outcome(side="b", fault="stop", end="not run: it cannot", day="2026-11-24"),
    ]
    assert schedule(["a", "b"], ["worker", "stop"], 2, done) == [
        (1, "worker", "b"),
        (1, "stop", "a"),
        (2, "worker", "a"),
        (2, "worker", "b"),
        (2, "stop", "a"),
        (2, "stop", "b"),
    ]
    assert results.days(done) == "2026-11-22 to 2026-11-24"
    assert schedule(["a", "b"], ["stop"], None, done) == [(1, "stop", "a")], "one more than all have"
    assert schedule(["b"], ["stop"], None, done) == [(2, "stop", "b")]


def test_a_step_that_was_under_way_when_the_blow_fell_proves_nothing():
    lines = [*step(1.0, 7), *step(1.06, 8), *step(3.0, 8, ("n0", "n2"), generation=2, world=2)]
    new = fresh(lines, 1.05)
    assert first_step(new, ("n0", "n2")) == pytest.approx(3.001)
    assert first_step(new, NODES, world=3) is None


def test_a_restarted_process_is_fresh_even_in_a_generation_of_the_same_number():
    lines = [*step(1.0, 7), *(line(4.0 + place, node, 5, pid=99 + place) for place, node in enumerate(NODES))]
    assert first_step(fresh(lines, 2.0), NODES, world=3) == 6.0


def test_a_step_that_one_of_them_has_not_made_is_not_whole():
    assert first_step(step(5.0, 9, ("n0", "n1")), NODES) is None


def test_the_longest_silence_counts_whenever_it_began():
    lines = [line(at, "n0", place) for place, at in enumerate((1.0, 1.1, 4.0, 4.1, 4.2))]
    assert pause(lines, ["n0"], 2.0, 5.0) == pytest.approx(2.9)
    assert pause(lines, ["n0"], 4.05, 5.0) == pytest.approx(0.1)


def test_who_is_silent_still_has_no_pause():
    lines = [line(at, "n0", place) for place, at in enumerate((1.0, 1.1, 1.2))]
    assert pause(lines, ["n0"], 1.15, 9.0) is None


def test_who_was_struck_is_waited_for_unless_it_stays_away():
    lines = [*step(1.0, 7), *step(3.0, 8, ("n0", "n1"), generation=2, world=2)]
    away = progress(lines, "node", ("n0", "n1"), at=2.0, now=4.0)
    assert (away.survivors_s, away.full_s, away.enough) == (pytest.approx(1.001), None, True)
    assert not progress(lines, "node-back", ("n0", "n1"), at=2.0, now=4.0).enough
    back = progress([*lines, *step(5.0, 9, generation=3)], "node-back", ("n0", "n1"), at=2.0, now=6.0)
    assert (back.survivors_s, back.full_s, back.enough) == (pytest.approx(1.001), pytest.approx(3.002), True)


def test_after_a_power_cut_nobody_survives_and_all_are_waited_for():
    lines = step(1.0, 7)
    assert not progress(lines, "power", (), at=2.0, now=9.0).enough
    back = progress([*lines, *step(8.0, 1, generation=5)], "power", (), at=2.0, now=9.0)
    assert (back.survivors_s, back.full_s, back.enough) == (None, pytest.approx(6.002), True)


def test_a_coordinators_death_is_watched_for_a_while_and_its_node_waited_for():
    times = [1.0 + 0.5 * place for place in range(60)]
    lines = [line(at, node, place) for place, at in enumerate(times) for node in NODES]
    assert not progress(lines, "coordinator", NODES, at=2.2, now=20.0).enough
    quiet = progress(lines, "coordinator", NODES, at=2.2, now=30.0)
    assert (quiet.survivors_s, quiet.full_s, quiet.enough) == (pytest.approx(0.5), None, True)
    assert not progress(lines, "coordinator", ("n1", "n2"), at=2.2, now=30.0).enough
    assert not progress(lines, "coordinator", NODES, at=2.2, now=60.0).enough  # all fell silent at 30.5


def test_steps_that_are_made_again_are_lost():
    lines = [*step(1.0, 41), *step(1.05, 42), *step(9.0, 21, generation=2)]
    assert steps_lost(lines, 2.0) == 22
    assert steps_lost([*lines[:6], *step(9.0, 43, generation=2)], 2.0) == 0
    assert steps_lost(lines[:6], 2.0) is None


def test_a_slow_nodes_late_word_of_a_step_is_no_second_time():
    lines = [*step(1.0, 41), line(1.05, "n0", 42), line(2.5, "n2", 42, generation=2), *step(3.0, 43, generation=2)]
    assert steps_lost(lines, 2.0) == 0


def test_of_a_step_that_was_tried_twice_the_last_try_counts():
    lines = [
        *step(1.0, 1),
        *step(2.0, 2),
        *step(5.0, 2, ("n0", "n1"), generation=2, world=2),
        *step(6.0, 3, generation=2),
    ]
    taken = [
        ((1, 1), [(0, 1), (2, 3), (4, 5)]),
        ((2, 1), [(6, 7), (8, 9), (10, 11)]),
        ((2, 2), [(6, 8, 10), (7, 9, 11)]),
    ]
    deals = [
        Deal(step=number, generation=generation, rank=rank, samples=share)
        for (number, generation), shares in taken
        for rank, share in enumerate(shares)
    ]
    assert samples(lines, deals) == (0, 0)
    assert samples(lines, deals[:-1]) == (3, 0)  # 7, 9 and 11 were dealt, and are in no step that counts
    again = Deal(step=2, generation=2, rank=1, samples=(0, 9, 11))
    assert samples(lines, [*deals[:-1], again]) == (1, 1)  # 7 is lost, 0 was in step 1 already
    assert samples(lines, [*deals[:-1], again], since=2) == (1, 1)


def test_what_was_dropped_before_the_fault_is_not_put_to_it():
    lines = [*step(1.0, 1), *step(2.0, 2), *step(3.0, 3)]
    deals = [Deal(step=1, generation=-1, rank=0, samples=(0, 1)), Deal(step=2, generation=1, rank=0, samples=(2, 3))]
    assert samples(lines, deals) == (2, 0)
    assert samples(lines, deals, since=2) == (0, 0)


def test_a_line_of_the_samples_is_read():
    assert deal("step 41 generation 3 rank 0 samples 240,243") == Deal(
        step=41, generation=3, rank=0, samples=(240, 243)
    )


def test_bits_are_those_of_the_last_step_that_both_have():
    lines = [line(1.0, "n0", 5, digest="x"), line(2.0, "n0", 6, digest="y")]
    assert same_bits(lines, {5: "x", 6: "y"}) is True
    assert same_bits(lines, {5: "x", 6: "z"}) is False
    assert same_bits(lines, {5: "x"}) is True
    assert same_bits(lines, {}) is None


def test_blame_says_who_said_it():
    assert (
        names([("n2", "exitcode: 1"), ("n1", "exitcode: -9"), ("n0", "exitcode: 1")])
        == "exitcode: -9 (n1); exitcode: 1 (n0, n2)"
    )


def outcomes() -> list[Outcome]:
    return [
        Outcome(
            side="elasticrl", fault="worker", survivors_s=0.2, full_s=0.21, steps_lost=0, samples_lost=0, samples_repeated=0,
            same_bits=True, blamed="n1/1: rank 1 died", load=9.0,
        ),
        Outcome(side="torchrun", fault="worker", end="job lost", load=9.0),
        Outcome(side="torchrun", fault="worker", survivors_s=4.0, full_s=4.0, steps_lost=12, same_bits=False, load=9.0),
        Outcome(side="elasticrl", fault="store", survivors_s=0.06, load=9.0),
        Outcome(side="torchrun", fault="store", end="not run: it has no store"),
        Outcome(side="torchrun", fault="coordinator", end="not within 60 s", load=9.0),
    ]  # fmt: skip


def test_what_never_came_back_is_counted_and_never_averaged_away():
    assert results.seconds([4.0, None, 6.0], ["", "job lost", ""]) == "5.00 (4.00-6.00), 1 of 3 job lost"
    assert results.seconds([None, None], ["job lost", "job lost"]) == "job lost"
    assert results.seconds([None], [""]) == "-"


def test_the_short_table_has_a_row_for_each_fault_and_a_column_for_each_side():
    assert results.rows(outcomes()) == [
        ["worker", "0.20 / 0.21", "4.00 / 4.00, 1 of 2 job lost"],
        ["coordinator", "-", "not within 60 s"],
        ["store", "0.06 / -", "not run"],
    ]


def test_the_page_says_load_trials_what_was_lost_and_what_would_help():
    page = results.page(
        outcomes(),
        {"cores": 2, "torch": "2.13.0", "python": "3.11.7"},
        datetime(2026, 11, 22, tzinfo=UTC),
        {"elasticrl": "a spare", "torchrun": "defaults"},
        {("torchrun", "worker"): "an option", ("elasticrl", "worker"): "never shown: it lost nothing"},
        "A storm passed.",
    )
    assert "\n\nA storm passed.\n\n" in page
    assert "2026-11-22, 2 cores, python 3.11.7, torch 2.13.0. Trials of each: 1 to 2. Load when they began: 9.0" in page
    assert results.BUSY in page
    assert "| worker | torchrun | 2 | 4.00 | 4.00, 1 of 2 job lost | 12 | - / - | no | nobody | an option |" in page
    assert "| worker | elasticrl | 1 | 0.20 | 0.21 | 0 | 0 / 0 | yes | n1/1: rank 1 died |  |" in page
    assert "| coordinator | torchrun | 1 | - | not within 60 s | - | - / - | - | nobody | none known to us |" in page
    assert "- torchrun, store: it has no store." in page
    assert "never shown" not in page


def test_a_job_that_never_trained_says_nothing_about_the_fault():
    late = Outcome(
        side="elasticrl", fault="worker", end="did not start: 3 ranks do not train: not within 240 s", load=70.0
    )
    page = results.page([*outcomes(), late], {"cores": 2}, datetime.now(UTC), {}, {})
    assert results.rows([*outcomes(), late]) == results.rows(outcomes())
    assert "| worker | elasticrl | 1 | 0.20 | 0.21 |" in page
    assert "- elasticrl, worker: did not start: 3 ranks do not train: not within 240 s." in page
    assert results.rows([late]) == [["worker", "did not start"]]


def test_a_quiet_machine_is_not_called_busy():
    page = results.page(
        [Outcome(side="a", fault="worker", full_s=1.0, load=0.2)], {"cores": 2}, datetime.now(UTC), {}, {}
    )
    assert results.BUSY not in page


def test_the_plot_has_a_dot_for_each_trial_that_came_back_and_a_word_for_the_others():
    tree = ET.fromstring(results.plot(outcomes()))
    kind = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in tree.iter(f"{kind}text")]
    assert len(list(tree.iter(f"{kind}circle"))) == 3 + 2  # and one per side in the legend
    assert texts.count("job lost") == 1
    assert texts.count("not within 60 s") == 1


def test_the_readme_says_medians_what_never_came_and_what_was_lost_at_most():
    more = [
        Outcome(side="elasticrl", fault="power", full_s=16.2, steps_lost=12, samples_lost=0, samples_repeated=0),
        Outcome(side="torchrun", fault="power", full_s=8.94, steps_lost=1, samples_lost=46, samples_repeated=2),
        Outcome(side="torchrun", fault="power", full_s=9.96, steps_lost=4, samples_lost=3, samples_repeated=7),
        Outcome(side="torchrun", fault="join", survivors_s=6.39, full_s=9.4),
    ]
    table = results.comparison([*outcomes(), *more]).splitlines()
    assert table[0].startswith("Trials of each: 1 to 2, ")
    assert table[-10:] == [
        "|  | elasticrl | torchrun |",
        "| --- | --- | --- |",
        "| kill -9 of one worker | 0.20 / 0.21 | 4.0 / 4.0, 1 of 2 job lost |",
        "| the coordinator dies, back after 0.5 s | - | not within 60 s |",
        "| the whole store dies, back after 0.5 s | 0.06 | not run |",
        "| a third node joins | - | 6.4 / 9.4 |",
        "| power loss of all, back after 0.5 s | 16 | 9.4 |",
        "| steps that power loss took | 12 | 2.5 (1-4) |",
        "| samples lost / used twice, at most in one fault | 0 / 0 | 46 / 7 |",
        "| of trials whose bits were compared: the undisturbed run's | 1 of 1 | 0 of 1 |",
    ]


def job(side: str, *, mixed: bool = False, share: float = 0.985, wrong: str = "", bits: bool | None = True) -> str:
    """A line of goodput.jsonl."""
    cost = {"median": 0.26, "min": 0.1, "max": 0.81, "count": 20}
    result = {
        "steps": 22786, "of_undisturbed": share, "lost_by_kind_s": {"worker": cost}, "faults": {"worker": 20, "node": 20},
        "same_bits": bits, "lost": bool(wrong), "wrong": wrong,
    }  # fmt: skip
    about = {"settings": {"minutes": 20.0, "every": 30.0}, "noise": "", "day": "2026-11-26", "commit": "abc"}
    return json.dumps({"side": side, "mixed": mixed, "result": result, **about})


def test_the_newest_job_of_each_side_that_was_struck_again_and_again_is_told_of():
    lost = "its last step was after 31 s and 2 faults"
    lines = [job("elasticrl", share=0.5), job("torchrun", share=0.02, wrong=lost, bits=None), job("elasticrl")]
    jobs = results.newest([*lines, job("elasticrl", mixed=True, share=0.962)])
    faults, cost, when = "40, every 30 s for 20 minutes", "worker 0.26 (0.10-0.81)", "2026-11-26, abc"
    rows = [
        ["elasticrl", faults, "22786", "98.5 %", cost, "yes", "", when],
        ["torchrun", faults, "22786", "2.0 %", cost, "-", lost, when],
        ["elasticrl (faults of all kinds)", faults, "22786", "96.2 %", cost, "yes", "", when],
    ]
    assert results.goodput(jobs) == rows
    page = results.page(outcomes(), {"cores": 2}, datetime.now(UTC), {}, {}, jobs=jobs)
    assert results.markdown(results.JOB_HEAD, rows) in page


def test_only_what_stands_between_the_marks_is_written_anew():
    text = f"before\n\n{results.BEGIN}\n\nold\n\n{results.END}\n\nafter\n"
    made = results.between_marks(text, "new")
    assert made == text.replace("old", "new")
    assert results.between_marks(made, "new") == made
    with pytest.raises(AssertionError, match="has no"):
        results.between_marks("no marks", "new")


def test_the_page_and_the_results_say_what_the_trials_say():
    """Red after a new race: `python bench/race/race.py --report` writes both anew."""
    trials = recorded(RECORD)
    readme = results.PAGE.read_text(encoding="utf-8")
    assert results.between_marks(readme, results.comparison(trials)) == readme
    page = (RECORD.parent / "RESULTS.md").read_text(encoding="utf-8")
    head = ["fault", *results.sides(trials)]
    assert results.markdown(head, results.rows(trials)) in page
    remedies = {(name, fault): how for name, side in SIDES.items() for fault, how in side.remedy.items()}
    assert results.markdown(results.HEAD, results.detail(trials, remedies)) in page


def test_every_side_can_do_every_fault_or_says_why_not():
    for name, side in SIDES.items():
        for fault in FAULTS:
            assert fault in side.faults or hasattr(side, fault.replace("-", "_")), f"{name} has no {fault}"
        assert set(side.remedy) | set(side.faults) <= set(FAULTS)
        if issubclass(side, Peer) and side.environment:
            assert side.environment in PINS
    assert set(results.FAULTS) == set(FAULTS)


def test_all_that_peers_run_in_is_pinned():
    assert all("==" in pin for pins in PINS.values() for pin in pins)
