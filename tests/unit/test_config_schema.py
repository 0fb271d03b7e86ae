"""The schema's promises about itself: every field is documented, named by its unit, fit as a default, and published."""

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args

import pytest
from config_kit import RENAMED
from pydantic import ValidationError

from elasticrl.config import Tree, changes, digest, dumps, read, render, to_core
from elasticrl.config.changes import LIVE, NEVER, when
from elasticrl.config.cluster import Job, Node, Store
from elasticrl.config.section import DURATION_MARK, SIZE_MARK, leaves, sections
from elasticrl.config.training import Ppo
from elasticrl.config.tree import values
from elasticrl.contract import settings

ROOT = Path(__file__).parents[2]
DEMO = Tree(job=Job(name="demo"))


def test_every_field_says_what_it_is() -> None:
    for leaf in leaves(Tree).values():
        assert len(leaf.doc) > 20, leaf.key
        assert leaf.doc.endswith("."), leaf.key


def test_every_number_says_its_unit_or_what_more_of_it_means() -> None:
    says = re.compile(
        r"\b([Ss]econds|[Bb]ytes|steps?|Steps|[Nn]odes|[Ll]anes|[Ff]ailures|[Pp]rocesses|[Cc]opies|[Tt]okens|[Ss]amples"
        r"|[Cc]ollectives|[Cc]heckpoints|files|port|requests|[Ss]equences|[Ww]orkers|[Tt]hreads|[Nn]ats|[Bb]atches|[Ff]actor"
        r"|[Ss]hare|[Mm]ore|[Ll]ess|Fewer|Higher|Usually|number)\b"
    )
    for leaf in leaves(Tree).values():
        if isinstance(leaf.default, int | float) and not isinstance(leaf.default, bool):
            assert says.search(leaf.doc), f"{leaf.key}: {leaf.doc}"


def test_every_section_says_what_it_is() -> None:
    assert all(kind.__doc__ and kind.__doc__.strip().endswith(".") for key, kind in sections(Tree) if key)


def test_a_name_ends_in_its_unit_exactly_if_its_value_has_one() -> None:
    for leaf in leaves(Tree).values():
        assert leaf.attribute.endswith("_s") == (DURATION_MARK in leaf.marks), leaf.key
        assert leaf.attribute.endswith("_bytes") == (SIZE_MARK in leaf.marks), leaf.key


def test_every_default_and_example_is_a_value_that_would_be_accepted(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("job: {name: demo}\n")
    secret = {leaf.key for leaf in leaves(Tree).values() if leaf.secret}
    written = [f"{leaf.key}={leaf.render(leaf.default)}" for leaf in leaves(Tree).values() if not leaf.required]
    examples = [f"{leaf.key}={leaf.example}" for leaf in leaves(Tree).values()]
    for overrides in (written, examples):
        found = read(file, [one for one in overrides if one.split("=")[0] not in secret], {}).findings
        assert [
            finding for finding in found if finding.rule.startswith("must be a") and "lanes" not in finding.rule
        ] == []


def test_the_tree_is_frozen_and_hashable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DEMO.ppo.lr = 1.0
    assert hash(DEMO) == hash(Tree(job=Job(name="demo")))


def test_published_copies_are_those_of_the_code() -> None:
    remedy = "run `elasticrl config schema > configs/schema.json; elasticrl config schema --markdown > docs/CONFIGURATION.md`"
    assert (ROOT / "configs/schema.json").read_text() == render.json_schema(), remedy
    assert (ROOT / "docs/CONFIGURATION.md").read_text() == render.markdown(), remedy


def test_the_json_schema_knows_every_key_with_default_and_meaning() -> None:
    schema = json.loads(render.json_schema())
    for leaf in leaves(Tree).values():
        entry = schema["$defs"][leaf.section.__name__]["properties"][leaf.path[-1]]
        assert entry["description"] == leaf.doc
        assert leaf.required or entry["default"] == leaf.plain(leaf.default)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Membership"]["properties"]["lease_ttl"]["default"] == "10s"
    assert re.fullmatch(schema["$defs"]["Membership"]["properties"]["lease_ttl"]["pattern"], "10s")


# The core's part


def test_every_core_setting_comes_from_a_key() -> None:
    core = to_core(DEMO)
    for field in fields(settings.Settings):
        value = getattr(core, field.name)
        inner = [f"{field.name}.{one.name}" for one in fields(value)] if is_dataclass(value) else [field.name]
        for name in inner:
            key = RENAMED.get(name) or name.removesuffix("_s")
            assert key in leaves(Tree) or key in dict(sections(Tree)), f"contract.settings has {name}, no key sets it"


#: Where a core that is given nothing differs from a configuration that is empty, and why.
APART = {
    "job": "a job has no name by default in the configuration; here it is the demo's",
    "copies": "the core's own tests and the simulator play nodes that hold copies; an empty file is one machine's",
    "membership.max_nodes": "the simulator plays larger gangs than a file that names no size should seat",
    "timeouts.phase_s": "the core knows no phases by name; the configuration knows the trainer's long ones",
    "policy": "what the core has no word for it restarts; the configuration has a word for each fault",
}


def test_the_core_alone_has_the_configurations_defaults_but_for_those_listed() -> None:
    def flat(value: object, at: str = "") -> dict[str, object]:
        if not is_dataclass(value):
            return {at: value}
        return {
            k: v for f in fields(value) for k, v in flat(getattr(value, f.name), f"{at}.{f.name}".strip(".")).items()
        }

    alone, told = flat(settings.Settings()), flat(to_core(DEMO))
    assert {name for name in alone if alone[name] != told[name]} == set(APART)


def test_the_core_gets_the_values_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        """\
job: {name: demo, program: t.py, steps: 7}
store: {embedded: true, retry: 500ms}
membership: {min_nodes: 3, lease_ttl: 20s, grow: always}
recovery: {reform: 3s}
health: {quarantine: 2m}
timeouts: {phase: {rollout: 1m, update: null, save: 5s}, slack: 4}
lanes: {count: 12, exact: warn}
vault: {copies: 2}
"""
    )
    loaded = read(file, (), {})
    assert loaded.tree is not None
    core = to_core(loaded.tree)
    assert (core.job, core.lanes, core.steps, core.copies, core.retry_s, core.exact) == ("demo", 12, 7, 2, 0.5, "warn")
    assert (core.membership.min_nodes, core.membership.lease_ttl_s, core.membership.grow) == (3, 20.0, "always")
    assert (core.recovery.reform_s, core.health.quarantine_s) == (3.0, 120.0)
    assert (core.timeouts.phase_s, core.timeouts.slack) == ({"rollout": 60.0, "save": 5.0}, 4)


@pytest.mark.parametrize("algorithm", get_args(Ppo.model_fields["algorithm"].annotation))
def test_every_phase_of_the_trainer_can_be_given_a_budget(algorithm: str) -> None:
    from elasticrl.ppo.flow import of

    tree = Tree.model_validate({"job": {"name": "demo"}, "ppo": {"algorithm": algorithm}})
    assert {f"timeouts.phase.{name}" for name in of(tree.ppo).phases} <= set(leaves(Tree))


def test_every_class_of_fault_has_a_policy() -> None:
    from elasticrl.contract.verdict import Fault

    assert {f"policy.{fault.value}" for fault in Fault} <= set(leaves(Tree))


# What may change


def test_lists_of_what_may_change_name_known_keys() -> None:
    known = {*leaves(Tree), *dict(sections(Tree))}
    assert set(LIVE) | set(NEVER) <= known
    assert len({*LIVE, *NEVER}) == len(LIVE) + len(NEVER)


def test_a_change_says_when_it_takes_effect() -> None:
    update = {"job": {"name": "demo"}, "recovery": {"drain": "3s"}, "lanes": {"count": 16}, "ppo": {"lr": 0.5}}
    new = Tree.model_validate_json(json.dumps(update))
    assert [(one.key, one.old, one.new, one.when) for one in changes(DEMO, new)] == [
        ("recovery.drain", "1m", "3s", "live"),
        ("lanes.count", "8", "16", "never"),
        ("ppo.lr", "1e-06", "0.5", "restart"),
    ]
    assert changes(new, new) == ()
    assert when("policy.unknown") == "live"
    assert when("timeouts.collective") == "restart"


@pytest.mark.parametrize(
    "key",
    ["job.steps", "recovery.reform", "timeouts.phase.rollout", "timeouts.default_phase", "timeouts.floor", "timeouts.slack",
     "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every"],
)  # fmt: skip
def test_what_agents_and_workers_go_by_wants_a_restart(key: str) -> None:
    assert when(key) == "restart"


def test_the_digest_names_the_configuration() -> None:
    other = Tree(job=Job(name="demo", seed=1))
    assert digest(DEMO) == digest(Tree(job=Job(name="demo"))) != digest(other)
    assert len(json.loads(dumps(DEMO))) == len(Tree.model_fields)


def test_the_digest_is_the_same_on_all_nodes_and_in_all_runs_of_a_job() -> None:
    elsewhere = Tree(
        job=Job(name="demo"),
        node=Node(name="n1", run_dir="/tmp/elasticrl-4711", beat_port=7461),
        store=Store(endpoints=("http://10.0.0.9:2379",)),
    )
    assert digest(elsewhere) == digest(DEMO)


def test_values_are_in_the_order_of_the_schema() -> None:
    assert list(values(DEMO)) == list(leaves(Tree))


# The examples


@pytest.mark.parametrize(
    "name", ["one-machine", "two-nodes", "cluster", "own-trainer", "tools", "trl", "dense-32b", "mixture-235b"]
)
def test_each_example_loads_without_a_finding_and_is_commented(name: str) -> None:
    file = ROOT / "configs" / f"{name}.yaml"
    loaded = read(file, (), {})
    assert loaded.findings == ()
    assert loaded.tree is not None
    assert file.read_text().count("#") > 15


def test_all_examples_are_tested() -> None:
    assert {file.stem for file in (ROOT / "configs").glob("*.yaml")} == {
        "one-machine",
        "two-nodes",
        "cluster",
        "own-trainer",
        "tools",
        "trl",
        "dense-32b",
        "mixture-235b",
    }


def test_the_cluster_example_has_every_section() -> None:
    origins = read(ROOT / "configs/cluster.yaml", (), {}).origins
    assert {key.split(".")[0] for key in origins} == set(Tree.model_fields)


def test_what_show_prints_loads_to_the_same_tree(tmp_path: Path) -> None:
    for name in ("one-machine", "two-nodes", "cluster", "own-trainer", "tools", "trl", "dense-32b", "mixture-235b"):
        loaded = read(ROOT / "configs" / f"{name}.yaml", (), {})
        assert loaded.tree is not None
        file = tmp_path / "shown.yaml"
        file.write_text(render.show(loaded.tree, loaded.origins).replace('password: "***"', "password: null"))
        again = read(file, (), {})
        secrets = [line for line in file.read_text().splitlines() if " password:" in line or " token:" in line]
        assert len(secrets) == 2
        assert {str(finding.rule) for finding in again.findings} == {"must not be written in a file or an argument"}
        file.write_text("\n".join(line for line in file.read_text().splitlines() if line not in secrets))
        assert read(file, (), {}).tree == loaded.tree


@pytest.mark.parametrize("name", ["rack1/n03", "..", ".", "", "n 3", "-n3"])
def test_a_nodes_name_that_would_lead_elsewhere_is_refused(name: str) -> None:
    """It becomes folders and keys."""
    with pytest.raises(ValidationError, match="name"):
        Tree.model_validate({"job": {"name": "j"}, "node": {"name": name}})
    assert Tree.model_validate({"job": {"name": "j"}, "node": {"name": "n03.rack_1-b"}}).node.name
