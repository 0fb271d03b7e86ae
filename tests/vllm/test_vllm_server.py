"""`vllm serve` itself, on a CPU, as the engine `server`: by the weights that it was given alone."""

import os
import subprocess
import sys

import pytest
import torch
from served_kit import requests, service, until

from elasticrl.config.training import Model
from elasticrl.ppo import models, tiny
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.server_process import Failed, Http, ServerProgram
from elasticrl.ppo.rollout.service import Served
from elasticrl.store.embedded import free_ports

pytestmark = pytest.mark.timeout(900)
GAP = 1e-5  # nats, float32


def serve(model, port):
    env = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    python = os.environ.get("ELASTICRL_VLLM_PYTHON", sys.executable)
    return subprocess.Popen(
        [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "float32", "--enforce-eager", "--max-model-len", "32", "--max-num-seqs", "64",
        ],
        env=env,
    )  # fmt: skip


def made(program, count):
    for request in requests(count):
        program.add(request.id, request)
    found = {}
    while len(found) < count:
        found |= {said.key: said for said in program.step(lambda: None)}
    return found


def gap(actor, found):
    worst = 0.0
    for request in requests(len(found)):
        said = found[request.id]
        with torch.no_grad():
            rows = actor(torch.tensor([[*request.prompt, *said.tokens]])).logits[0].log_softmax(-1)
        mine = rows[len(request.prompt) - 1 : -1].gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
        worst = max(worst, float((mine - torch.tensor(said.logprobs)).abs().max()))
    return worst


@pytest.mark.slow
def test_a_server_of_vllm_generates_by_the_weights_that_it_was_given_alone(tmp_path, monkeypatch):
    path, port = tiny.write(tmp_path / "model", hidden=64, layers=2, heads=2), free_ports()[0]
    url = f"http://127.0.0.1:{port}"
    actor = models.actor(Model(), path, seed=0)
    with torch.no_grad():
        for param in actor.parameters():
            param.mul_(1.25)

    def give(program, version):
        tag = weights.Tag(life="1 here", version=version)
        weights.write(tmp_path, tag, weights.buckets(actor, nbytes=1 << 12, dtype=torch.float32), within_s=1.0)
        program.load(tmp_path, tag)

    def up():
        try:
            return bool(Http(url, "").ask("/version", within_s=5.0))
        except Failed:
            return False

    server = serve(path, port)
    try:
        until(up, "the server", 300.0)
        asked = Served(url=url, weights="", at_once=8, load_s=60.0, answer_s=120.0)
        program = ServerProgram(service(path, program="server", server=asked))
        assert gap(actor, made(program, 8)) > 100 * GAP, "its own weights are these already: the test shows nothing"
        give(program, 1)
        found = made(program, 40)
        assert gap(actor, found) < GAP
        assert 0 < sum(said.ended for said in found.values()) < 40
        server.kill()
        server.wait()
        server = serve(path, port)
        until(up, "the next server", 300.0)
        ended = []

        def gave_up(why):
            ended.append(why)
            raise Failed(why)

        monkeypatch.setattr("elasticrl.ppo.rollout.server_process.gave_up", gave_up)
        with pytest.raises(Failed, match="it was started anew"):
            made(program, 4)
        program.drop([request.id for request in requests(4)])
        give(program, 1)
        assert gap(actor, made(program, 40)) < GAP
        program.close()
    finally:
        server.kill()
        server.wait()
