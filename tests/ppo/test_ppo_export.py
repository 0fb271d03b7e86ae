"""What a job has trained, out of its checkpoint: `from_pretrained` loads it, adapters merged in, a tied head left out."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from gang_kit import Nodes

from elasticrl.cli.main import build
from elasticrl.config.training import Model
from elasticrl.ppo import models, tiny
from elasticrl.runtime.checkpoint.load import open_checkpoint
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.vault.source import dtype_of

CONFIG = """\
job: {{name: job, seed: 7}}
store: {{embedded: true}}
model: {{path: {path}{more}}}
data: {{path: {path}}}
reward: {{function: a:b}}
"""
ADAPTERS = ", lora: {rank: 2, alpha: 6}"
TIED = ", value_head: tied"


def small(folder: Path, **model: Any) -> dict[str, Any]:
    """A job's configuration, with its model and its prompts in this folder."""
    tiny.write(folder / "base", hidden=32, layers=2, **model)
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n:04}"}}\n' for n in range(100)))
    return {
        "ppo": {"batch": 16, "mini_batch": 16, "micro_tokens": 40, "lr": 4e-3},
        "model": {"path": str(folder / "base")},
        "reward": {"function": "elasticrl.ppo.tasks:reverse"},
        "rollout": {"max_tokens": 4},
        "data": {"path": str(folder / "prompts.jsonl"), "max_prompt": 6},
    }


def whole(run: Path) -> dict[str, torch.Tensor]:
    """The actor's tensors, out of the run's checkpoint."""
    where = place(run / "checkpoints" if (run / "checkpoints").is_dir() else run)
    [name] = where.names()
    source, tensors = open_checkpoint(where, name), {}
    for full, piece in source.wholes("actor.").items():
        tensors[full.removeprefix("actor.")] = torch.empty(piece.shape, dtype=dtype_of(piece.dtype))
        source.fill([(piece, tensors[full.removeprefix("actor.")])])
    return tensors


@pytest.fixture(params=["lora", pytest.param("team", marks=pytest.mark.slow), "tied", "both"], scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(the kind of model, the folder of the base model, the run's folder, its configuration, the checkpoint's tensors)."""
    tmp_path = tmp_path_factory.mktemp(request.param)
    base, conf = tmp_path / "base", small(tmp_path)
    kind = "lora" if request.param == "team" else request.param  # the same, of a model that two share
    more = {"lora": ADAPTERS, "tied": TIED, "both": ADAPTERS + TIED}[kind]
    if request.param == "team":
        conf["model"]["tp"], conf["node"] = 2, {"workers": 2}
    if kind != "tied":
        conf["model"]["lora"] = {"rank": 2, "alpha": 6}
    if kind != "lora":
        conf["model"]["value_head"] = "tied"
    with Nodes(tmp_path / "gang", steps=2, lanes=4, program="elasticrl.ppo.__main__", conf=conf, copies=0) as gang:
        gang.plan(*["n0", "n1"][: 1 + (request.param == "team")])
        gang.until_done()
        run = gang.run_dir
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG.format(path=base, more=more))
    return kind, base, run, config, whole(run)


def elasticrl(*arguments: object, ok: int = 0) -> str:
    done = CliRunner().invoke(build(["checkpoint"]), list(map(str, arguments)))
    assert done.exit_code == ok, done.output
    return done.output


def loaded(folder: Path):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.state_dict()


def test_an_exported_model_loads_and_has_what_was_trained(trained, tmp_path: Path):
    kind, base, run, config, tensors = trained
    said = elasticrl("checkpoint", "export", run, tmp_path / "out", "--config", config)
    assert "step-00000002" in said
    found = loaded(tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("12")["input_ids"] == [1, 2]
    deep = "actor." if kind != "lora" else ""
    untrained = loaded(base)
    assert found.keys() == untrained.keys()
    changed = 0
    for name, weight in untrained.items():
        expected = tensors.get(deep + name, weight)
        module = f"{deep}base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.default.weight" in tensors:
            down, up = (tensors[f"{module}.lora_{which}.default.weight"] for which in "AB")
            expected = weight + 6 / 2 * up @ down
        torch.testing.assert_close(found[name], expected)
        changed += not torch.equal(found[name], weight)
    assert changed > 10
    elasticrl("checkpoint", "export", run, tmp_path / "half", "--config", config, "--dtype", "bfloat16")
    half = loaded(tmp_path / "half")
    assert {weight.dtype for weight in half.values()} == {torch.bfloat16}
    assert all(torch.equal(half[name], weight.bfloat16()) for name, weight in found.items())


def of_teams(folder: Path, conf: dict[str, Any], *, teams: int, **model: Any) -> Path:
    """The run's folder, of one step."""
    conf = {**conf, "model": {**conf["model"], **model}}
    size = model.get("tp", 1) * model.get("cp", 1)
    conf["node"] = {"workers": size}
    copies = min(size, size * teams - 1)
    with Nodes(folder, steps=1, lanes=2, program="elasticrl.ppo.__main__", conf=conf, copies=copies) as gang:
        gang.plan(*(f"n{i}" for i in range(size * teams)))
        gang.until_done(within_s=120.0)
        return gang.run_dir


ODD = (*tiny.WORDS, "<one>")  # an odd number: neither a team nor FSDP2 cuts it evenly
NOTHING = 1e-60  # a learning rate that no float32 notices


@pytest.mark.parametrize(
    ("arch", "model"),
    [
        pytest.param("qwen2", {"tp": 2, "strategy": "fsdp"}, marks=pytest.mark.long),
        pytest.param("qwen2", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"cp": 2, "strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"tp": 2, "strategy": "fsdp"}, marks=pytest.mark.slow),
    ],
)
def test_what_teams_export_is_bit_for_bit_the_model_that_each_member_read_a_part_of(
    tmp_path: Path, arch: str, model: dict[str, Any]
):
    """The step that they make changes nothing, so what comes out is what a load without teams has."""
    conf = small(tmp_path, arch=arch, words=ODD)
    conf["ppo"] |= {"lr": NOTHING, "critic_lr": NOTHING}
    run = of_teams(tmp_path / "gang", conf, teams=2, **model)
    (tmp_path / "job.yaml").write_text(CONFIG.format(path=tmp_path / "base", more=""))
    elasticrl("checkpoint", "export", run, tmp_path / "out", "--config", tmp_path / "job.yaml")
    expected, found = loaded(tmp_path / "base"), loaded(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_adapters_of_teams_are_those_of_one_worker_and_merge_to_the_bits_of_an_unsharded_model(
    tmp_path: Path, strategy: str
):
    """In the first step the second matrices alone have a gradient, as they are 0: of the first ones each bit is the seed's."""
    conf = small(tmp_path, words=ODD)
    conf["model"]["lora"] = {"rank": 2, "alpha": 6}
    alone = whole(of_teams(tmp_path / "one", conf, teams=1))
    run = of_teams(tmp_path / "gang", conf, teams=2, tp=2, strategy=strategy)
    tensors = whole(run)
    unsharded = models.actor(Model.model_validate(conf["model"]), str(tmp_path / "base"), seed=7)
    firsts = {name: param for name, param in unsharded.named_parameters() if "lora_A" in name}
    assert [name for name, param in firsts.items() if not torch.equal(tensors[name], param)] == []
    seconds = [name for name in tensors if "lora_B" in name]
    assert len(seconds) == len(firsts) == 2 * 7
    for name in seconds:  # of a gradient that is nearly 0 the sign may be another one
        assert torch.isclose(tensors[name], alone[name], rtol=1e-2).double().mean() > 0.98, name
    lacks = unsharded.load_state_dict(tensors, strict=False)
    assert not lacks.unexpected_keys
    models.export(unsharded, tmp_path / "expected")
    (tmp_path / "job.yaml").write_text(CONFIG.format(path=tmp_path / "base", more=ADAPTERS))
    elasticrl("checkpoint", "export", run, tmp_path / "out", "--config", tmp_path / "job.yaml")
    expected, found = loaded(tmp_path / "expected"), loaded(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    untrained = loaded(tmp_path / "base")
    assert sum(not torch.equal(found[name], untrained[name]) for name in found) == 2 * 7


def test_without_the_configuration_a_tied_actor_loads_and_adapters_are_refused(trained, tmp_path: Path):
    kind, base, run, config, tensors = trained
    if kind != "tied":
        said = elasticrl("checkpoint", "export", run, tmp_path / "out", ok=1)
        assert "has adapters only" in said
        assert "--config" in said
        assert not (tmp_path / "out").exists()
    else:
        elasticrl("checkpoint", "export", run, tmp_path / "out", "--beside", base / "config.json")
        found = loaded(tmp_path / "out")
        assert all(torch.equal(weight, tensors[f"actor.{name}"]) for name, weight in found.items())
        assert "value_head.weight" in tensors
        assert not any("value_head" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    if kind != "tied":
        tiny.write(tmp_path / "moved", hidden=32, layers=2, seed=9)
        moved = tmp_path / "moved.yaml"
        moved.write_text(config.read_text().replace(str(base), str(tmp_path / "moved")))
        said = elasticrl("checkpoint", "export", run, tmp_path / "merged", "--config", moved, ok=1)
        assert "its adapters belong to other ones" in said
        assert not (tmp_path / "merged").exists()
    other = tmp_path / "other.yaml"
    other.write_text(config.read_text().replace(ADAPTERS, "").replace(TIED, ""))
    said = elasticrl("checkpoint", "export", run, tmp_path / "other", "--config", other, ok=1)
    assert "was not written by a job of this configuration" in said
    assert not (tmp_path / "other").exists()
    assert "by hand" in elasticrl("checkpoint", "export", run, "x", "--config", config, "--prefix", "actor.", ok=2)
