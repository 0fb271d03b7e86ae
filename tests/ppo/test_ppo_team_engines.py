"""Engines apart and endpoints, of jobs whose models a team shares: one member asks, and all of the team have what came."""

import json
import random
import sys
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.torch import load_file
from served_kit import STEPS, job
from server_kit import serving
from team_engine_ends import bits

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from gang_kit import Nodes

from elasticrl.ppo import tiny
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit

UPDATES = 2  # of a step
WORDS = (*tiny.WORDS, "<one>")  # an odd number: neither a team nor FSDP2 cuts it evenly


@contextmanager
def teams(folder, conf, *, workers):
    """One node with so many workers."""
    (folder / "ends").mkdir(parents=True)
    made = Nodes(
        folder, steps=STEPS, lanes=4, program="team_engine_ends", conf={**conf, "node": {"workers": workers}}, copies=0,
        slots=workers,
    )  # fmt: skip
    made.env["TEAM_ENDS"] = str(folder / "ends")
    with made:
        yield made


class Scorer(BaseHTTPRequestHandler):
    """An endpoint that never says the same twice."""

    asked = Counter()  # noqa: RUF012
    chance = random.Random(3)

    def log_message(self, *_):
        pass

    def do_POST(self):
        answers = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["answers"]
        self.asked.update(answer["id"] for answer in answers)
        text = json.dumps({"scores": [self.chance.random() for _ in answers]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def scoring():
    """Its address."""
    Scorer.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def noted(folder, kind):
    """What each worker said, by its process."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "ends").glob(f"{kind}-*")
    }


def outcome(gang):
    """The digests of all steps; every prompt of every step was used exactly once."""
    found, used = read(gang.run_dir), audit(gang.run_dir)
    assert not found.findings, found.findings
    assert used.ok, used.sentence
    assert (used.steps, used.samples) == (STEPS, STEPS * 32)
    return dict(found.steps)


def asked_once(folder):
    """No sample was asked for twice, whichever process asked. The step of each."""
    lines = [line for lines in noted(folder, "asked").values() for line in lines]
    times = Counter(name for line in lines for name in line["ids"])
    assert len(times) == STEPS * 32
    assert set(times.values()) == {1}, times.most_common(3)
    return {name: line["version"] // UPDATES for line in lines for name in line["ids"]}


def had_alike(folder):
    """Of each lane of a step all members of its team had the same samples and scores, whenever they had them."""
    came = {}
    for lines in noted(folder, "came").values():
        for line in lines:
            came.setdefault((line["step"], line["lane"]), []).append(line["bits"])
    assert len(came) == STEPS * 4
    for where, found in came.items():
        assert len(found) >= 2, f"one member alone had {where}"
        assert len(set(found)) == 1, f"members of a team had other samples or scores of {where}"


def handed_over(folder, path):
    """The first weights are those of the files, whole, bit for bit; each version's came from one worker."""
    lines = [line for lines in noted(folder, "weights").values() for line in lines]
    whole = {name: bits(tensor) for name, tensor in load_file(Path(path) / "model.safetensors").items()}
    (first,) = [line["tensors"] for line in lines if line["version"] == 0]
    assert first == whole
    assert len({json.dumps(line["tensors"]) for line in lines}) == len({line["version"] for line in lines}) > 1


@pytest.mark.parametrize(
    ("rank", "stage"),
    [pytest.param(1, "reward", marks=pytest.mark.slow), pytest.param(0, "advantage", marks=pytest.mark.long)],
)
def test_a_team_uses_each_sample_of_a_server_once_though_a_member_dies_between_asking_and_training(
    tmp_path, rank, stage
):
    """The one that does not ask, while the other asks for scores; or the one that asks, when these are there."""
    conf = job(tmp_path, {"engine": "server"})
    conf["vault"] = {"inside": 1}
    conf["model"]["tp"] = 2
    with ExitStack() as stack:
        conf["rollout"]["server"] = {"url": stack.enter_context(serving("vllm", conf["model"]["path"], tmp_path)).url}
        conf["reward"] = {"url": stack.enter_context(scoring())}
        gang = stack.enter_context(teams(tmp_path / "two", conf, workers=2))
        ends = tmp_path / "two" / "ends"
        (ends / f"rank{rank}").write_text(json.dumps({"step": 1, "stage": stage}))
        gang.plan("n0", "n1")
        gang.workers[f"n{rank}"].process.join(300)
        assert (ends / f"rank{rank}.struck").exists()
        gang.kill_worker(f"n{rank}")
        gang.plan("n0", "n1")
        gang.until_done(within_s=250.0)
        outcome(gang)
    times = asked_once(tmp_path / "two")
    assert Scorer.asked.keys() == times.keys()
    cut_short = {name for name, step in times.items() if step == 1 and stage == "reward"}
    assert {name for name, often in Scorer.asked.items() if often > 1} <= cut_short, "scores that were there"
    had_alike(tmp_path / "two")
    handed_over(tmp_path / "two", conf["model"]["path"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "strategy", "staleness"), [("tp", "fsdp", 0), ("tp", "replicated", 1), ("cp", "replicated", 0)]
)
def test_two_teams_ask_one_server_for_their_own_lanes(tmp_path, how, strategy, staleness):
    conf = job(tmp_path, {"engine": "server", "staleness": staleness}, words=WORDS)
    conf["model"] |= {how: 2, "strategy": strategy}
    with serving("sglang", conf["model"]["path"], tmp_path) as fake:
        conf["rollout"]["server"] = {"url": fake.url}
        with teams(tmp_path / "four", conf, workers=4) as gang:
            gang.plan("n0", "n1", "n2", "n3")
            gang.until_done(within_s=400.0)
            outcome(gang)
    assert len(noted(tmp_path / "four", "asked")) == 2, "one member of each team asks"
    asked_once(tmp_path / "four")
    had_alike(tmp_path / "four")
    handed_over(tmp_path / "four", conf["model"]["path"])


@pytest.mark.slow
def test_an_engine_of_our_code_gives_any_number_of_teams_the_same_bits(tmp_path):
    conf = job(tmp_path, {"engine": "served"})
    conf["model"]["tp"] = 2
    found = []
    for workers in (2, 4):
        with teams(tmp_path / f"{workers}", conf, workers=workers) as gang:
            gang.plan(*(f"n{number}" for number in range(workers)))
            gang.until_done(within_s=400.0)
            found.append(outcome(gang))
        had_alike(tmp_path / f"{workers}")
    assert found[0] == found[1]
