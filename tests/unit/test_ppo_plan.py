"""`elasticrl plan`, as a process: the figures with their formulas, the flow, refusals; and no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "one-machine.yaml"
SHAPE = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
OWN = ("job.program=train.py", "model.path=null", "model.strategy=fsdp", "store.embedded=true")


def plan(*arguments: object, config: Path = CONFIG, **more: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICRL")}
    command = [sys.executable, "-m", "elasticrl.cli.main", "plan", str(config), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean | {"COLUMNS": "200"} | more)


@pytest.fixture
def large(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return f"model.path={tmp_path}"


@pytest.mark.parametrize(("name", "parameters"), [("dense-32b", "32.8B"), ("mixture-235b", "235B")])
def test_what_large_examples_say_of_themselves_fits_their_cards(name: str, parameters: str) -> None:
    config = ROOT / "configs" / f"{name}.yaml"
    command = f"elasticrl plan configs/{name}.yaml --parameters {parameters} --memory 131GiB"
    assert command in " ".join(line.removeprefix("# ") for line in config.read_text().splitlines())
    done = plan("--parameters", parameters, "--memory", "131GiB", config=config)
    assert done.returncode == 0, done.stderr
    assert "are left for that" in done.stdout


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (["model.tp=8"], "model.tp is 8, and does not divide num_attention_heads, which is 28"),
        (["model.tp=7", "node.workers=7"], "model.tp is 7, and does not divide num_key_value_heads, which is 4"),
        (["model.tp=4", "model.cp=2"], "model.tp x model.cp is 8, and does not divide num_attention_heads"),
    ],
)
def test_a_model_that_a_team_cannot_share_is_refused(large: str, how: list[str], said: str) -> None:
    conf = ("node.workers=8", "membership.max_nodes=2", "lanes.count=8", "ppo.batch=64", "ppo.mini_batch=64")
    done = plan(large, *conf, *how)
    assert done.returncode == 2
    assert said in done.stderr


def test_what_members_of_a_team_share_is_divided(large: str) -> None:
    conf = ("node.workers=4", "membership.max_nodes=2", "lanes.count=8", "ppo.batch=64", "ppo.mini_batch=64")

    def figures(*more: str) -> dict[tuple[str, str], int]:
        found = json.loads(plan(large, *conf, *more, "--json").stdout)
        return {(line["role"], line["what"]): line["bytes"] for line in (*found["memory"], *found["transient"])}

    plain, cut, shared = figures(), figures("model.tp=2"), figures("model.cp=2")
    for what in ("weights", "optimizer"):
        assert shared["actor", what] == plain["actor", what], "the optimizer is spread over all of them"
    for role in ("actor", "ref"):
        assert cut[role, "weights"] * 2 == pytest.approx(plain[role, "weights"])
    assert cut["rollout", "KV cache"] * 2 == plain["rollout", "KV cache"] == shared["rollout", "KV cache"]
    assert shared["actor", "activations"] < cut["actor", "activations"] < plain["actor", "activations"]
    assert cut["actor", "activations"] < 0.6 * plain["actor", "activations"], "most of it are logits, which are cut too"


def test_what_spares_hold_that_load_ahead_is_said(large: str) -> None:
    conf = ("node.workers=4", "membership.max_nodes=2", "lanes.count=8", "ppo.batch=64", "ppo.mini_batch=64")
    notes = json.loads(plan(large, *conf, "agent.load_ahead=true", "--json").stdout)["notes"]
    assert any("a node's 4 spare processes" in note for note in notes)


def test_a_known_model_has_the_parameters_it_is_known_for(large: str) -> None:
    found = json.loads(plan(large, "--json").stdout)
    weights = {line["role"]: line for line in found["memory"] if line["what"] == "weights"}
    assert weights["actor"]["bytes"] == 4 * 7_615_616_512  # Qwen2.5-7B
    assert "7,615,616,512" in weights["actor"]["formula"]
    assert found["peak"] > found["fixed"] == sum(line["bytes"] for line in found["memory"])


@pytest.mark.long
def test_a_name_on_the_hub_is_looked_up_and_what_the_hub_does_not_give_is_said(tmp_path: Path) -> None:
    cached = tmp_path / "models--maker--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text(json.dumps(SHAPE))
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = plan("model.path=maker/model", "--json", **offline)
    assert "7,615,616,512" in found.stdout, found.stderr
    done = plan("model.path=maker/other", **offline)
    assert done.returncode == 2
    assert "maker/other is neither a folder here nor to be had from the hub (" in done.stderr


def test_a_role_on_rollout_nodes_takes_no_memory_of_a_worker(large: str) -> None:
    away = ("placement.ref.where=rollout", "rollout.nodes=2", "rollout.engine=served", "store.embedded=true")
    roles = [
        {line["role"] for line in json.loads(plan(large, "--json", *more).stdout)["memory"]} for more in ((), away)
    ]
    assert roles[0] - roles[1] == {"ref"}
    assert "@ rollout nodes" in plan("--graph", *away).stdout


def test_what_does_not_fit_is_said_with_what_to_do(large: str) -> None:
    done = plan(large, "--memory", "80GiB", "data.max_prompt=1024", "rollout.max_tokens=1024", "ppo.micro_tokens=8192")
    assert done.returncode == 0
    assert "the largest that fit: none fits" in done.stdout
    assert "# the peak of" in done.stdout
    assert "timeouts.phase.rollout is 30s" in done.stdout
    sharded = plan(large, "--memory", "640GiB", "--workers", 4, "model.strategy=fsdp", "--json")
    assert json.loads(sharded.stdout)["largest_micro_tokens"] == 8 * 16


def test_the_flow_names_where_each_stage_runs() -> None:
    done = plan("--graph", "model.strategy=fsdp")
    assert "values     critic   samples -> values  @ every worker, fsdp" in done.stdout


def test_the_flow_names_how_each_role_is_sharded_and_which_are_offloaded() -> None:
    def where(*arguments: str) -> dict[str, str]:
        lines = [line.partition("  @ ") for line in plan("--graph", *arguments).stdout.splitlines()]
        return {head.split()[1]: place for head, at, place in lines if at}

    found = where(
        "placement.ref.strategy=fsdp",
        "placement.ref.offload=cpu",
        "placement.actor.offload=cpu",
        "reward.function=null",
        "reward.model=m",
    )
    assert found["ref"] == "every worker, fsdp, offload cpu"
    assert found["reward"] == "every worker, replicated"
    assert found["logprobs"] == "every worker, replicated, offload cpu"
    assert found["values"] == "every worker, replicated"
    assert found["update"] == "every worker, replicated, offload cpu; and replicated"
    plain = where("model.lora.rank=4")
    assert plain["ref"] == "every worker, replicated, without its adapters"
    assert plain["reward"] == "every worker", "a function is nowhere else than its caller"
    assert plain["update"] == "every worker, replicated"


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("model.path=/nonexistent",), "/nonexistent/config.json does not exist"),
        (("--memory", "lots"), "lots"),
        (OWN, "model.path is not set: name a folder in Hugging Face's layout (model.path=FOLDER), or say how many"),
        (
            ("job.program=train.py", "model.path=/nonexistent"),
            "Or say how many parameters train.py trains: --parameters 7B.",
        ),
        ((*OWN, "--parameters", "7GB"), "7GB is no number of things: write it like 7B, 350M, 1.5e9 or 7_000_000_000"),
        (("--parameters", "7B"), "--parameters is for a program of your own, and job.program is elasticrl.ppo"),
        (("--parameters", "7B", "--graph"), "--parameters: only without --graph"),
        (("ppo.batch=7",), "ppo.batch"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = plan(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("workers", [4, 7])
def test_a_model_of_a_scripts_own_is_reckoned_by_its_count_as_one_with_a_shape_is(large: str, workers: int) -> None:
    gang = (*OWN, "membership.max_nodes=8", "membership.min_nodes=2", "lanes.count=64", "vault.copies=1", "--json")
    own = json.loads(plan(*gang, "--workers", workers, "--parameters", "7_615_616_512").stdout)
    assert own["workers"] == workers
    pairs = ("ppo.algorithm=dpo", "ppo.batch=128", "ppo.mini_batch=128", "ppo.epochs=1")  # one in each lane: one pass
    known = json.loads(plan(*gang, "job.program=elasticrl.ppo", large, *pairs, "--workers", workers).stdout)
    for part in ("host", "wire", "memory"):
        mine = {line["what"]: line["bytes"] for line in own[part]}
        theirs = {line["what"]: line["bytes"] for line in known[part] if line["role"] == "actor"}
        gathered = 4 * (2 * 152064 * 3584 + 3584 + 2 * 233057792)  # what fsdp gathers of it is not known of a count
        less = dict.fromkeys(("weights", "gradients"), gathered) if part == "memory" else {}
        assert mine.keys() == theirs.keys()
        assert mine == {what: pytest.approx(size - less.get(what, 0), abs=1) for what, size in theirs.items()}
    assert own["budgets"] == own["transient"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("written", "count"), [("7B", "7,000,000,000"), ("350M", "350,000,000"), ("1.5e9", "1,500,000,000")]
)
def test_a_count_is_taken_as_models_are_called(written: str, count: str) -> None:
    done = plan(*OWN, "--parameters", written, "--memory", "1GiB")
    assert f"3 rows x 4 B x T {count} / W" in done.stdout, done.stderr
    assert "micro-batch" not in done.stdout
    assert "phase budgets" not in done.stdout
    assert "is over 90% of 1,073,741,824 B: use more workers" in done.stdout


@pytest.mark.parametrize(
    ("device", "strategy", "said"), [("cpu", "replicated", True), ("cpu", "fsdp", False), ("cuda", "replicated", False)]
)
def test_where_memory_comes_before_the_first_step_that_is_said(device: str, strategy: str, said: bool) -> None:
    conf = ("--parameters", "20M", f"node.device={device}", f"model.strategy={strategy}", "--json")
    notes = json.loads(plan(*OWN, *conf).stdout)["notes"]
    assert any("in use before the first step begins" in note for note in notes) == said


def test_what_a_scripts_own_passes_may_take_is_said() -> None:
    found = json.loads(plan(*OWN, "--parameters", "350M", "--memory", "80GiB", "--json").stdout)
    assert found["notes"][-1].startswith(f"{int(0.9 * (80 << 30)) - found['fixed']:,} B of 85,899,345,920 B are left")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    done = plan(f"model.path={tmp_path}")
    assert done.returncode == 2
    assert (
        "'mamba', whose size is not known here; known are llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"
        in done.stderr
    )


def test_planning_imports_no_torch() -> None:
    script = "import sys, elasticrl.ppo.estimate, elasticrl.cli.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
