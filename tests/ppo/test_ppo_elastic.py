"""PPO under the elastic runtime: the same bits and the same samples for any gang, and through faults at any stage."""

import json
import random
import re
import signal
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from gang_kit import Nodes

from elasticrl.ppo import estimate, tiny
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

STEPS = 8


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    chance = random.Random(5)
    lines = [f'{{"prompt": "{chance.randrange(10_000):04}"}}' for _ in range(5000)]
    lines[7:7] = ['{"prompt": "123456789"}']
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return {
        "ppo": {
            "batch": 64, "mini_batch": 32, "micro_batch": 4, "epochs": 2, "lr": 4e-3, "critic_lr": 4e-3,
            "kl": {"coef": 0.01, "target": 1.0, "horizon": 100},
        },
        "model": {"path": tiny.write(folder / "actor", hidden=32, layers=2)},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "rollout": {"max_tokens": 4},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": 6},
        "vault": {"inside": 1},  # so that there are many states to go on from
    }  # fmt: skip


def nodes(
    folder: Path,
    conf: dict[str, Any],
    *,
    strategy: str = "replicated",
    copies: int = 1,
    program: str = "elasticrl.ppo.__main__",
) -> Nodes:
    conf = {**conf, "model": {**conf["model"], "strategy": strategy}}
    return Nodes(folder, steps=STEPS, lanes=4, program=program, conf=conf, copies=copies)


def outcome(gang: Nodes, group: int = 1) -> dict[int, str]:
    """The digests of all steps; every prompt of every step was used exactly once in each epoch, whole groups at once."""
    found = read(gang.run_dir)
    assert not found.findings, found.findings
    used = audit(gang.run_dir)
    assert used.ok, used.sentence
    assert (used.steps, used.samples) == (STEPS, STEPS * 64 // group * 2)
    return dict(found.steps)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, conf: dict[str, Any]) -> dict[int, str]:
    with nodes(tmp_path_factory.mktemp("alone"), conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        return outcome(gang)


OFTEN = [("replicated", 4), ("fsdp", 3)]
RARE = [("replicated", 2), ("replicated", 3), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4)]
SELDOM = [pytest.param(*one, marks=pytest.mark.slow) for one in RARE]


@pytest.mark.parametrize(("strategy", "world"), [*OFTEN, *SELDOM])
def test_any_number_of_workers_trains_to_the_same_bits(tmp_path: Path, conf, undisturbed, strategy: str, world: int):
    conf = {**conf, "telemetry": {"format": "json", "tensorboard": str(tmp_path / "curves")}}
    with nodes(tmp_path, conf, strategy=strategy, copies=min(1, world - 1)) as gang:
        gang.plan(*(f"n{i}" for i in range(world)))
        logs = {node: worker.log for node, worker in gang.workers.items()}
        gang.until_done()
        assert outcome(gang) == undisturbed
        told = {node: events(log) for node, log in logs.items()}
    for log in logs.values():
        assert re.findall(r"prompts.jsonl: (.*)", log.read_text()) == [
            "5,000 records fit; left out: 1 (of no tokens, or too many)"
        ]
    for name in ("ppo.step", "ppo.comm"):
        assert [event["step"] for event in told["n0"] if event["event"] == name] == list(range(STEPS))
    assert [event["holds"] for event in told["n0"] if event["event"] == "ppo.guarantee"] == ["bits"]
    assert not any(told[node] for node in told if node != "n0"), "a step is told by one worker"
    assert list((tmp_path / "curves").iterdir())
    if strategy == "replicated":
        sent_as_planned(gang.tree, world, [event for event in told["n0"] if event["event"] == "ppo.comm"])


def sent_as_planned(tree, world: int, told: list[dict[str, Any]]) -> None:
    """The bytes of the gradients' all-to-alls are those of `elasticrl plan`, up to padding."""
    planned = sum(line.bytes for line in estimate.read(tree, workers=world).wire if line.what == "all_to_all")
    sent = [event["costs"]["all_to_all"]["bytes"] for event in told]
    assert len(set(sent[1:])) == 1
    assert planned <= sent[1] <= 1.05 * planned
    assert {event["timeouts"] for event in told} == {0}


def events(log: Path) -> list[dict[str, Any]]:
    """What a worker told as JSON."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"ts"')]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["replicated", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_kills_at_any_stage_cost_no_bit_and_generate_nothing_twice(tmp_path: Path, conf, undisturbed, strategy: str):
    phases = ["rollout", "logprobs", "update", "reward", "update", "values"]
    chance = random.Random(3)
    with nodes(tmp_path, conf, strategy=strategy, program="ppo_ends") as gang:
        ends = tmp_path / "ends"
        ends.mkdir()
        gang.env |= {
            "PPO_ENDS": str(ends), "ELASTICRL_HISTORY": str(tmp_path / "history"), "PPO_GENERATED": str(tmp_path / "generated"),
        }  # fmt: skip
        gang.plan("n0", "n1", "n2")
        for number, phase in enumerate(phases):
            gang.until_sealed(number + 1, within_s=240.0)
            node = chance.choice(["n0", "n1", "n2"])
            end: dict[str, Any] = {"phase": phase, "after_ms": chance.choice([0.1, 3, 6])}
            if phase == "reward":  # a slow scorer: its samples have long been kept
                end |= {"after_ms": 500, "stay": True}
            (ends / "fresh").write_text(json.dumps(end))
            (ends / "fresh").rename(ends / node)
            gang.workers[node].process.join(120)
            assert gang.workers[node].process.exitcode == -signal.SIGALRM, f"{end} did not strike"
            gang.kill_worker(node)
            gang.plan("n0", "n1", "n2")
        gang.until_done(within_s=240.0)
        assert outcome(gang) == undisturbed
    told = [json.loads(line)["step"] for line in (tmp_path / "history").read_text().splitlines()]
    assert sorted(told) == list(range(STEPS)), "each step is told once, whoever died"
    times = generated(tmp_path / "generated")
    assert len(times) == STEPS * 64
    assert len({step for (step, _), count in times.items() if count > 1}) <= phases.count("rollout"), (
        "a step that was not cut short in its rollout was generated again"
    )


def generated(path: Path) -> Counter[tuple[int, str]]:
    """In how many generations each sample was generated, by (step, id). Within one, ghosts are generated again."""
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    made = {(note["version"] // 4, name, note["generation"]) for note in notes for name in note["ids"]}
    return Counter((step, name) for step, name, _ in made)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("inside", [0, pytest.param(0.005, marks=pytest.mark.slow)])
def test_what_is_not_kept_inside_of_a_step_is_made_again_to_the_same_bits(
    tmp_path: Path, conf, undisturbed, inside: float
):
    phases = ["update", "values", "update"]
    with nodes(tmp_path, {**conf, "vault": {"inside": inside}}, program="ppo_ends") as gang:
        ends = tmp_path / "ends"
        ends.mkdir()
        gang.env |= {"PPO_ENDS": str(ends)}
        gang.plan("n0", "n1")
        for number, phase in enumerate(phases):
            gang.until_sealed(number + 1, within_s=240.0)
            (ends / "fresh").write_text(json.dumps({"phase": phase, "after_ms": 3}))
            (ends / "fresh").rename(ends / "n1")
            gang.workers["n1"].process.join(120)
            assert gang.workers["n1"].process.exitcode == -signal.SIGALRM, f"{phase} did not strike"
            gang.kill_worker("n1")
            gang.plan("n0", "n1")
        log = gang.workers["n0"].log
        gang.until_done(within_s=240.0)
        assert outcome(gang) == undisturbed
    went_on = re.findall(r"from step (\d+)\.(\d+) ", log.read_text())
    assert len(went_on) == 1 + len(phases)
    if not inside:
        assert [mark for _, mark in went_on[1:]] == ["1"] * len(phases), (
            "a function's scores are kept, and nothing else"
        )


class Whims:
    """An endpoint that scores an answer otherwise each time it is asked, and remembers; or says again what it said last."""

    def __init__(self) -> None:
        self.said: dict[str, list[float]] = {}
        self.again = False
        chance, lock = random.Random(), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805 - its name; `self` is ours
                answers = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))["answers"]
                with lock:
                    for name in () if self.again else (answer["id"] for answer in answers):
                        self.said.setdefault(name, []).append(chance.random())
                    text = json.dumps({"scores": [self.said[answer["id"]][-1] for answer in answers]}).encode()
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.mark.timeout(600)
def test_an_endpoint_s_scores_are_asked_for_once_samples_are_kept_and_used_as_they_were_recorded(tmp_path: Path, conf):
    phases = ["reward", "values"]
    with Whims() as whims:
        conf = {**conf, "reward": {"url": whims.url}, "vault": {"inside": 0}}
        with nodes(tmp_path / "killed", conf, program="ppo_ends") as gang:
            ends = gang.folder / "ends"
            ends.mkdir()
            gang.env |= {"PPO_ENDS": str(ends), "PPO_GENERATED": str(tmp_path / "generated")}
            gang.plan("n0", "n1")
            log = gang.workers["n0"].log
            for number, phase in enumerate(phases):
                gang.until_sealed(number + 1, within_s=240.0)
                (ends / "fresh").write_text(json.dumps({"phase": phase, "after_ms": 500, "stay": True}))
                (ends / "fresh").rename(ends / "n1")
                gang.workers["n1"].process.join(120)
                assert gang.workers["n1"].process.exitcode == -signal.SIGALRM, f"{phase} did not strike"
                gang.kill_worker("n1")
                gang.plan("n0", "n1")
            gang.until_done(within_s=240.0)
            killed = outcome(gang)
        marks = [mark for _, mark in re.findall(r"from step (\d+)\.(\d+) ", log.read_text())]
        assert marks == ["0", "1", "2"], "behind the rollout, and then behind its scores"
        assert set(generated(tmp_path / "generated").values()) == {1}
        # n0 had asked for its half as n1 died in `reward`, and asked again; nothing was used of it yet.
        assert Counter(map(len, whims.said.values())) == {1: STEPS * 64 - 32, 2: 32}
        whims.again = True
        with nodes(tmp_path / "replayed", conf, copies=0) as gang:
            gang.plan("n0")
            gang.until_done()
            assert outcome(gang) == killed, "it was trained on something else than what was recorded"


@pytest.mark.timeout(600)
def test_grpo_trains_to_the_same_bits_in_a_gang_and_through_kills_with_each_group_whole(tmp_path: Path, conf):
    ppo = {**conf["ppo"], "algorithm": "grpo", "group": 4, "kl": {"where": "loss", "coef": 0.01}}
    conf = {**conf, "ppo": ppo}
    with nodes(tmp_path / "alone", conf, copies=0) as gang:
        gang.plan("n0")
        gang.until_done()
        undisturbed = outcome(gang, group=4)
    with nodes(tmp_path / "killed", conf, program="ppo_ends") as gang:
        ends = gang.folder / "ends"
        ends.mkdir()
        gang.env |= {"PPO_ENDS": str(ends), "PPO_GENERATED": str(tmp_path / "generated")}
        gang.plan("n0", "n1", "n2")
        for number, (node, phase) in enumerate([("n1", "logprobs"), ("n0", "update"), ("n2", "update")]):
            gang.until_sealed(2 * number + 1, within_s=240.0)
            (ends / "fresh").write_text(json.dumps({"phase": phase, "after_ms": 6}))
            (ends / "fresh").rename(ends / node)
            gang.workers[node].process.join(120)
            assert gang.workers[node].process.exitcode == -signal.SIGALRM, f"{phase} did not strike"
            gang.kill_worker(node)
            gang.plan("n0", "n1", "n2")
        gang.until_done(within_s=240.0)
        assert outcome(gang, group=4) == undisturbed
    times = generated(tmp_path / "generated")
    assert set(times.values()) == {1}
    groups = Counter((step, name.partition(".")[0]) for step, name in times)
    assert (set(groups.values()), len(groups)) == ({4}, STEPS * 16)


LEARNS = {
    "batch": 128, "mini_batch": 64, "micro_batch": 16, "epochs": 2, "lr": 4e-3, "critic_lr": 4e-3, "gamma": 0.05,
    "clip_high": 0.5, "entropy_coef": 0.2, "kl": {"coef": 0.002},
}  # fmt: skip


@pytest.mark.timeout(900)
def test_ppo_learns_through_six_kills_what_it_learns_undisturbed(tmp_path: Path, conf):
    def learn(folder: Path, *present: str, kills: tuple[int, ...] = ()) -> tuple[list[float], dict[int, str]]:
        copies = min(1, len(present) - 1)
        learns = {**conf, "ppo": LEARNS}
        with Nodes(folder, steps=80, lanes=4, program="elasticrl.ppo.__main__", conf=learns, copies=copies) as gang:
            gang.env["ELASTICRL_HISTORY"] = str(folder / "history")
            gang.plan(*present)
            for number, step in enumerate(kills):
                gang.until_sealed(step)
                gang.kill_worker(present[number % len(present)])
                gang.plan(*present)
            gang.until_done(within_s=400.0)
            notes = [json.loads(line) for line in (folder / "history").read_text().splitlines()]
            assert sorted(note["step"] for note in notes) == list(range(80)), "each step is told once"
            rewards = {note["step"]: note["reward"] for note in notes}
            assert audit(gang.run_dir).ok
            return [rewards[step] for step in range(80)], dict(read(gang.run_dir).steps)

    undisturbed, bits = learn(tmp_path / "alone", "n0")
    rewards, same = learn(tmp_path / "killed", "n0", "n1", "n2", kills=(5, 15, 25, 35, 45, 55))
    assert same == bits
    assert rewards == undisturbed
    assert sum(rewards[:10]) / 10 < 0.25, "it knew before"
    assert sum(rewards[-10:]) / 10 > 0.9


def test_adapters_train_to_the_same_bits_and_the_reference_costs_nothing(tmp_path: Path, conf):
    conf = {**conf, "model": {**conf["model"], "lora": {"rank": 2}}}
    digests = []
    for world, engine in ((1, "torch"), (2, "torch"), (2, "served")):
        conf = {**conf, "rollout": {**conf["rollout"], "engine": engine}}
        with nodes(tmp_path / f"{world}-{engine}", conf, copies=world - 1) as gang:
            gang.env["ELASTICRL_HISTORY"] = str(gang.folder / "history")
            gang.plan(*(f"n{i}" for i in range(world)))
            gang.until_done()
            digests.append(outcome(gang))
            notes = [json.loads(line) for line in (gang.folder / "history").read_text().splitlines()]
            assert notes[0]["kl"] == 0.0, "the reference is the actor without its adapters, which begin at 0"
            assert notes[-1]["kl"] != 0.0
    assert len(set(map(str, digests))) == 1


def test_overlap_trains_to_the_same_bits_for_any_gang_and_through_a_kill(tmp_path: Path, conf):
    digests = []
    for world, engine in ((1, "torch"), (3, "torch"), (2, "served")):
        conf = {
            **conf,
            "rollout": {**conf["rollout"], "overlap": True, "engine": engine},
            "telemetry": {"format": "json"},
        }
        conf["ppo"] = {**conf["ppo"], "importance_limit": 2.0}
        with nodes(tmp_path / f"{world}-{engine}", conf, copies=min(1, world - 1), program="ppo_ends") as gang:
            members = [f"n{i}" for i in range(world)]
            ends = gang.folder / "ends"
            ends.mkdir()
            gang.env |= {"PPO_ENDS": str(ends)}
            gang.plan(*members)
            log = gang.workers["n0"].log
            logs = [gang.workers[node].log for node in members]
            for number, phase in enumerate(["update", "rollout"] if members[-1] != "n0" else []):
                gang.until_sealed(2 + 2 * number, within_s=240.0)
                (ends / "fresh").write_text(json.dumps({"phase": phase, "after_ms": 6}))
                (ends / "fresh").rename(ends / members[-1])
                gang.workers[members[-1]].process.join(120)
                assert gang.workers[members[-1]].process.exitcode == -signal.SIGALRM, f"{phase} did not strike"
                gang.kill_worker(members[-1])
                gang.plan(*members)
                logs.append(gang.workers[members[-1]].log)
            gang.until_done(within_s=240.0)
            digests.append(outcome(gang))
            told = [event for log in logs for event in events(log) if event["event"] == "ppo.step"]
            older = {event["step"]: event["metrics"].get("ahead_behind") for event in told}
            assert older == {0: None, **dict.fromkeys(range(1, STEPS), 4.0)}, (
                "a step's 4 updates, whoever died meanwhile"
            )
            if engine == "served":  # it is busy with the weights that the step began with until all updates are made
                marks = [mark for _, mark in re.findall(r"from step (\d+)\.(\d+) ", log.read_text())]
                assert len(marks) == 3
                assert set(marks) <= {"0", "1", "2"}, (
                    "the rollout, and with its scores; nothing from between the updates"
                )
    assert all(each == digests[0] for each in digests)
