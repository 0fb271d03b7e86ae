"""File, environment and command line to one tree, or to all that is wrong with them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrl.cli.bundle import secrets_here
from elasticrl.config import ConfigError, Loaded, changes, dumps, load, loads, read, render, reveal, to_core
from elasticrl.config.source import flow
from elasticrl.config.tree import Tree, values
from elasticrl.core.node.suspect import Budgets

SMALL = """\
job: {name: demo, program: train.py}
store: {embedded: true}
"""

Reader = Callable[..., Loaded]


@pytest.fixture
def given_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Reads a text as the file c.yaml."""
    monkeypatch.chdir(tmp_path)

    def reader(text: str | bytes, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
        Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return read("c.yaml", overrides, environ or {})

    return reader


def lines(loaded: Loaded) -> list[str]:
    return [str(finding).split("\n", maxsplit=1)[0] for finding in loaded.findings]


def good(loaded: Loaded) -> Tree:
    assert loaded.tree is not None, "\n".join(map(str, loaded.findings))
    return loaded.tree


# Where values come from


def test_a_small_file_gives_a_tree_of_defaults(given_text: Reader) -> None:
    loaded = given_text(SMALL)
    assert (good(loaded).job.name, good(loaded).membership.lease_ttl_s, loaded.findings) == ("demo", 10.0, ())


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(given_text: Reader) -> None:
    text = SMALL + "ppo:\n  lr: 0.1\n  eps: 0.1\n  gamma: 0.5\n"
    environ = {"ELASTICRL__PPO__LR": "0.2", "ELASTICRL__PPO__EPS": "0.2", "HOME": "/root", "ELASTICRL_CONFIG": "x"}
    loaded = given_text(text, ["ppo.lr=0.3"], environ)
    ppo = good(loaded).ppo
    assert (ppo.lr, ppo.eps, ppo.gamma, ppo.lam) == (0.3, 0.2, 0.5, 0.95)
    assert {key: str(origin) for key, origin in loaded.origins.items() if key.startswith("ppo.")} == {
        "ppo.lr": "command line",
        "ppo.eps": "environment ELASTICRL__PPO__EPS",
        "ppo.gamma": "c.yaml:6",
    }


def test_overrides_are_read_as_yaml(given_text: Reader) -> None:
    overrides = [
        "ppo.lr=1e-5",
        "ppo.betas=[0.8, 0.9]",
        "ppo.max_grad_norm=null",
        "job.args=['a b', --x=1, 2]",
        'node.name="null"',
        "membership.lease_ttl=20s",
        "lanes.bucket=1MiB",
        "ppo.kl={coef: 0.5, where: loss}",
    ]
    tree = good(given_text(SMALL, overrides))
    assert (tree.ppo.lr, tree.ppo.betas, tree.ppo.max_grad_norm) == (1e-5, (0.8, 0.9), None)
    assert (tree.job.args, tree.node.name) == (("a b", "--x=1", "2"), "null")
    assert (tree.membership.lease_ttl_s, tree.lanes.bucket_bytes) == (20.0, 1 << 20)
    assert (tree.ppo.kl.coef, tree.ppo.kl.where) == (0.5, "loss")


def test_a_good_override_mends_a_bad_value_in_the_file(given_text: Reader) -> None:
    text = SMALL + "ppo: {lr: fast}\nmembership: {keepalive: 4}\n"
    assert good(given_text(text, ["ppo.lr=0.5", "membership.keepalive=4s"])).ppo.lr == 0.5
    [finding] = given_text(text, ["ppo.lr=0.5", "membership.keepalive=6s"]).findings
    assert finding.key == "membership.lease_ttl", "a mended value is held to the relations again"


def test_names_for_the_workers_environment_are_free_and_join(given_text: Reader) -> None:
    text = SMALL + "agent:\n  env:\n    OMP_NUM_THREADS: 4\n    NCCL_DEBUG: INFO\n"
    loaded = given_text(
        text, ["agent.env.nccl_X=no"], {"ELASTICRL__AGENT__ENV__NCCL_DEBUG": "WARN", "ELASTICRL__AGENT__ENV__A__B": "1"}
    )
    env = good(loaded).agent.env
    assert dict(env) == {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN", "nccl_X": "no", "A__B": "1"}
    assert str(loaded.origins["agent.env.OMP_NUM_THREADS"]) == "c.yaml:5"
    with pytest.raises(TypeError):
        env["X"] = "y"  # type: ignore[index]


def test_a_plain_scalar_is_the_text_it_looks_like_where_a_text_is_wanted(given_text: Reader) -> None:
    tree = good(given_text(SMALL, ["node.name=007", "node.address=no", "telemetry.wandb=1e5"]))
    assert (tree.node.name, tree.node.address, tree.telemetry.wandb) == ("007", "no", "1e5")


def test_anchors_aliases_and_merges_are_understood(given_text: Reader) -> None:
    text = SMALL + (
        "placement:\n"
        "  actor: &big\n    strategy: fsdp\n    offload: cpu\n"
        "  critic: *big\n"
        "  ref: {<<: *big, offload: none}\n"
    )
    loaded = given_text(text)
    placement = good(loaded).placement
    assert (placement.critic.strategy, placement.ref.strategy, placement.ref.offload) == ("fsdp", "fsdp", "none")
    assert str(loaded.origins["placement.ref.strategy"]) == "c.yaml:5"


def test_of_several_merges_the_first_wins_and_a_circle_ends(given_text: Reader) -> None:
    text = SMALL + (
        "placement:\n"
        "  actor: &one {strategy: fsdp}\n"
        "  critic: &two {strategy: replicated, offload: cpu}\n"
        "  ref: &three {<<: [*one, *two, *three], where: train}\n"
        "  reward: {<<: *three}\n"
    )
    placement = good(given_text(text)).placement
    assert (placement.ref.strategy, placement.ref.offload, placement.reward.strategy) == ("fsdp", "cpu", "fsdp")


def test_a_section_whose_keys_are_all_commented_out_is_empty(given_text: Reader) -> None:
    assert good(given_text(SMALL + "ppo:\n  # lr: 1\nagent:\n  env:\n")).ppo.lr == 1e-6


def test_a_byte_order_mark_does_not_matter(given_text: Reader) -> None:
    assert good(given_text(b"\xef\xbb\xbf" + SMALL.encode())).job.name == "demo"


# What is refused, and how it is said


def test_five_mistakes_of_different_kinds_are_five_findings_by_line(given_text: Reader) -> None:
    text = """\
job:
  name: demo
  program: train.py
store: {embedded: true}
membership:
  lease_tll: 20s
  keepalive: 6s
  beat: 200
lanes:
  count: 8
  exact: requires
  count: 9
"""
    loaded = given_text(text, ["membership.lease_ttl=10s"])
    assert lines(loaded) == [
        "c.yaml:6 membership.lease_tll must be a known key (the nearest is lease_ttl).",
        "c.yaml:8 membership.beat must be a duration over 0s (200 has no unit).",
        "c.yaml:11 lanes.exact must be one of require, warn, off (requires is not).",
        "c.yaml:12 lanes.count must be given once (line 10 and line 12 both have it).",
        (
            "command line membership.lease_ttl must exceed 2 x keepalive + store.retry"
            " (10s is not over 2 x 6s + 1s; store.retry is not set)."
        ),
    ]
    assert [finding.remedy for finding in loaded.findings] == [
        "Rename it to lease_ttl, or remove it.",
        "Write its unit behind it, for example beat: 200s.",
        "Write exact: require.",
        "Remove one of the two.",
        "Raise lease_ttl to 16s or lower keepalive to 3.4s.",
    ]
    assert loaded.tree is None


def test_a_finding_reads_as_the_style_guide_has_it(given_text: Reader) -> None:
    text = (
        SMALL.replace("embedded: true", "embedded: true, retry: 2s")
        + "membership:\n  lease_ttl: 10s\n  keepalive: 4s\n"
    )
    [finding] = given_text(text).findings
    assert str(finding) == (
        "c.yaml:4 membership.lease_ttl must exceed 2 x keepalive + store.retry (10s is not over 2 x 4s + 2s).\n"
        "    Raise lease_ttl to 12s or lower keepalive to 3s."
    )


def test_a_relation_is_reported_at_the_key_that_was_written(given_text: Reader) -> None:
    [line] = lines(given_text(SMALL + "membership:\n  keepalive: 5s\n"))
    assert line == (
        "c.yaml:4 membership.lease_ttl must exceed 2 x keepalive + store.retry"
        " (10s is not over 2 x 5s + 1s; membership.lease_ttl and store.retry are not set)."
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "c.yaml must have content (the file is empty)."),
        ("# nothing\n---\n", "c.yaml must have content (the file is empty)."),
        ("a:\n\tb: 1\n", r"c.yaml:2 must be YAML (column 1: found character '\t' that cannot start any token)."),
        ("job: [1,\n", "c.yaml:2 must be YAML (column 1: expected the node content, but found '<stream end>')."),
        ("job: 'x\n", "c.yaml:2 must be YAML (column 1: found unexpected end of stream)."),
        ("a: b: c\n", "c.yaml:1 must be YAML (column 5: mapping values are not allowed here)."),
        ("a: 1\n---\nb: 1\n", "c.yaml:2 must be YAML (column 1: but found another document)."),
        ("a: *x\n", "c.yaml:1 must be YAML (column 4: found undefined alias 'x')."),
        ("job: {name: x}\nppo: \x00\n", "c.yaml:2 must be printable text (the character U+0000 is not)."),
        (b"job:\n  name: caf\xe9\n", "c.yaml:2 must be UTF-8 text (byte 0xe9 at offset 16 is not)."),
        ("[" * 1200, "c.yaml must be YAML (it is nested too deeply to be read)."),
        ("- a\n", "c.yaml:1 must be a section ([a] is not)."),
        ("just words\n", 'c.yaml:1 must be a section ("just words" is not).'),
    ],
)
def test_what_cannot_be_read_is_one_finding_with_its_line(given_text: Reader, text: str | bytes, line: str) -> None:
    found = lines(given_text(text))
    assert (found[:1] if "section" in line else found) == [line]


def test_a_missing_file_is_a_finding(tmp_path: Path) -> None:
    assert lines(read("/no.yaml", (), {})) == ["/no.yaml must be a file that can be read (no such file or directory)."]
    assert lines(read(tmp_path, (), {})) == [f"{tmp_path} must be a file that can be read (is a directory)."]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("ppo: {lr: -1}", "c.yaml:3 ppo.lr must be a number over 0 (-1 is not)."),
        ("ppo: {lr: .inf}", "c.yaml:3 ppo.lr must be a number over 0 (.inf is not)."),
        ("ppo: {lr: .nan}", "c.yaml:3 ppo.lr must be a number over 0 (.nan is not)."),
        ("ppo: {batch: 64.0}", "c.yaml:3 ppo.batch must be a whole number at least 1 (64.0 is not)."),
        ("ppo: {batch: true}", "c.yaml:3 ppo.batch must be a whole number at least 1 (true is not)."),
        ('ppo: {batch: "64"}', 'c.yaml:3 ppo.batch must be a whole number at least 1 ("64" is not).'),
        ("ppo: {batch: " + "9" * 5000 + "}", None),
        ("ppo: {whiten: yes}", "c.yaml:3 ppo.whiten must be true or false (yes is not)."),
        ("ppo: {batch: }", "c.yaml:3 ppo.batch must be a whole number at least 1 (null is not)."),
        (
            "ppo: {betas: [0.9]}",
            "c.yaml:3 ppo.betas must be a list of 2 values, each a number at least 0 and under 1 ([0.9] is not).",
        ),
        ("ppo: 3", "c.yaml:3 ppo must be a section (3 is not)."),
        ("ppo: {lr: {x: 1}}", "c.yaml:3 ppo.lr must be a number over 0 (a mapping)."),
        ("ppo: {lr: !!python/object:os.system x}", None),
        ("ppo: {lr: &a [*a]}", "c.yaml:3 ppo.lr must be a number over 0 (lists or mappings inside of one another)."),
        ("lanes: {bucket: 4GB}", "c.yaml:3 lanes.bucket must be a size over 0B (4GB is not)."),
        ("lanes: {bucket: 4}", "c.yaml:3 lanes.bucket must be a size over 0B (4 has no unit)."),
        ("recovery: {reform: 0s}", "c.yaml:3 recovery.reform must be a duration over 0s (0s is not)."),
        (
            "node: {interface: 10, beat_port: 99999}",
            "c.yaml:3 node.beat_port must be a whole number at least 0 and at most 65535 (99999 is not).",
        ),
        (
            "reward: {function: f}",
            "c.yaml:3 reward.function must be a Python function, module:function or null (f is not).",
        ),
        ("agent: {env: {A: null}}", "c.yaml:3 agent.env.A must be names with a text each (null is not)."),
        (
            "agent: {env: {A: [1]}}",
            "c.yaml:3 agent.env.A must be names with a text each (lists or mappings inside of one another).",
        ),
        ("agent: {env: {A: 1, A: 2}}", "c.yaml:3 agent.env.A must be given once (line 3 and line 3 both have it)."),
        ("agent: {env: 3}", 'c.yaml:3 agent.env must be names with a text each ("3" is not).'),
        ("? [a, b]\n: 1", "c.yaml:3 must have plain words as keys ([a, b] is not one)."),
        ("ppo.lr: 1e-5", "c.yaml:3 ppo.lr must be a known key (in a file, lr is a key of the section ppo)."),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_it_must_be(
    given_text: Reader, more: str, line: str | None
) -> None:
    loaded = given_text(SMALL + more + "\n")
    assert len(loaded.errors) == 1
    assert loaded.tree is None
    if line is not None:
        assert lines(loaded) == [line]


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("membership.min_node", "Rename it to min_nodes, or remove it."),
        ("membership.lr", "Write it as ppo.lr, or remove it."),
        ("memberships.min_nodes", "Rename it to membership, or remove it."),
        ("xyzzy", "Remove it; `elasticrl config schema --markdown` lists all keys."),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(given_text: Reader, key: str, remedy: str) -> None:
    [finding] = given_text(SMALL, [f"{key}=1"]).findings
    assert (finding.rule, finding.remedy) == ("must be a known key", remedy)


def test_an_unknown_variable_and_a_bare_word_are_refused(given_text: Reader) -> None:
    assert lines(given_text(SMALL, ["ppo.lr"], {"ELASTICRL__PPO__LRR": "1", "ELASTICRL__": "1"})) == [
        "environment ELASTICRL__ must be a known key (no known key is like it).",
        "environment ELASTICRL__PPO__LRR ppo.lrr must be a known key (the nearest is lr).",
        "command line must be an override (ppo.lr has no =).",
    ]


def test_a_phase_of_a_scripts_own_has_a_budget_by_its_name(given_text: Reader) -> None:
    text = SMALL + "timeouts: {phase: {evaluate: 5m, eval_s: 3s, gather: null}}\n"
    loaded = given_text(text, ["timeouts.phase.gather=20s"], {"ELASTICRL__TIMEOUTS__PHASE__EVALUATE": "6m"})
    assert loaded.findings == ()
    core = to_core(good(loaded)).timeouts
    assert core.phase_s == {"rollout": 300.0, "update": 300.0, "evaluate": 360.0, "eval_s": 3.0, "gather": 20.0}
    assert Budgets(settings=core).budget("evaluate") == 360.0
    assert str(loaded.origins["timeouts.phase.gather"]) == "command line"
    assert loads(dumps(good(loaded))) == good(loaded) != good(given_text(SMALL))
    assert secrets_here(good(loaded)) == secrets_here(good(given_text(SMALL)))
    assert [(one.key, one.old, one.new, one.when) for one in changes(good(given_text(SMALL)), good(loaded))] == [
        ("timeouts.phase.evaluate", "null", "6m", "restart"),
        ("timeouts.phase.eval_s", "null", "3s", "restart"),
        ("timeouts.phase.gather", "null", "20s", "restart"),
    ]
    again = given_text(
        render.show(good(loaded), loaded.origins).replace("password: null", "").replace("token: null", "")
    )
    assert good(again) == good(loaded)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("warm", "5s", "warm must be the name of a phase (it is what the runtime calls a state of its own)."),
        ("outside", "5s", "outside must be the name of a phase (it is what the runtime calls a state of its own)."),
        ("'a b'", "5s", "a b must be the name of a phase (it is not a letter and up to 31 letters, digits, dashes and"),
        ("'9'", "5s", "9 must be the name of a phase (it is not a letter and up to 31 letters, digits, dashes and"),
        ("a" * 33, "5s", "a" * 33 + " must be the name of a phase (it is not a letter and up to 31 letters, digits"),
        ("rollout_s", "5s", "rollout_s must be a known key (the nearest is rollout)."),
        ("evaluate", "5", "evaluate must be a duration over 0s or null (5 has no unit)."),
        ("evaluate", "soon", "evaluate must be a duration over 0s or null (soon is not)."),
        ("evaluate", "{a: 1s}", "evaluate must be a duration over 0s or null (a mapping)."),
    ],
)
def test_what_cannot_be_a_phase_or_its_budget_is_refused(given_text: Reader, name: str, value: str, line: str) -> None:
    loaded = given_text(SMALL + f"timeouts:\n  phase:\n    {name}: {value}\n")
    assert loaded.tree is None
    [said] = lines(loaded)
    assert said.startswith(f"c.yaml:5 timeouts.phase.{line}")


def test_a_phase_that_is_near_to_a_known_one_is_taken_with_a_warning(given_text: Reader) -> None:
    loaded = given_text(SMALL, ["timeouts.phase.rolout=5m", "timeouts.phase.disks=5m"])
    assert to_core(good(loaded)).timeouts.phase_s["rolout"] == 300.0
    [finding] = loaded.findings
    assert str(finding) == (
        "command line timeouts.phase.rolout warning: should be a phase that the script begins"
        " (no phase of elasticrl.ppo is called so; the nearest is rollout).\n"
        '    Rename it to rollout, unless the script has run.phase("rolout").'
    )


def test_a_phase_that_the_trainer_does_not_have_has_no_effect(given_text: Reader) -> None:
    own = SMALL.replace("train.py", "elasticrl.ppo") + "model: {path: m}\ndata: {path: d}\nreward: {function: a:b}\n"
    loaded = given_text(own, ["timeouts.phase.gather=5m", "timeouts.phase.rolout=5m", "timeouts.phase.disks=5m"])
    assert [(one.level, one.rule, one.remedy) for one in loaded.findings] == [
        ("warning", "has no effect with elasticrl.ppo", "Remove it."),
        ("warning", "has no effect with elasticrl.ppo", "Rename it to rollout."),
    ]


def test_a_rule_between_budgets_counts_a_scripts_own_and_says_where_it_was_written(given_text: Reader) -> None:
    [line] = lines(given_text(SMALL + "timeouts:\n  phase:\n    evaluate: 20m\n"))
    assert line.startswith("c.yaml:5 timeouts.collective must exceed the longest phase")
    assert "(10m is not over evaluate's 20m + 1s + 10s" in line


def test_a_misspelt_required_key_is_one_finding(given_text: Reader) -> None:
    assert lines(given_text("job:\n  nmae: demo\n  program: x.py\nstore: {embedded: true}\n")) == [
        "c.yaml:2 job.nmae must be a known key (the nearest is name)."
    ]


def test_a_required_key_of_another_kind_is_one_finding(given_text: Reader) -> None:
    for name in ("{a: 1}", "null", "A B", "[a]"):
        found = given_text("job:\n  name: " + name + "\n  program: x.py\nstore: {embedded: true}\n").findings
        assert [(finding.key, finding.rule[:14]) for finding in found] == [("job.name", "must be a name")]


def test_a_key_that_was_probably_meant_is_not_blamed_for_its_default(given_text: Reader) -> None:
    text = SMALL + "vault: {copies: 1}\n"
    assert [finding.key for finding in given_text(text).findings] == ["vault.copies"]
    for wrong in ("membership: {min_nodse: 2}", "membershp: {min_nodes: 2}"):
        assert len(given_text(text + wrong + "\n").findings) == 1


def test_a_missing_required_key_is_reported_at_its_section(given_text: Reader) -> None:
    assert lines(given_text("\njob: {program: x.py}\nstore: {embedded: true}\n")) == [
        "c.yaml:2 job.name must be given (it has no default)."
    ]


def test_load_raises_all_findings_at_once(given_text: Reader) -> None:
    given_text(SMALL + "ppo: {lr: x, eps: y}\n")
    with pytest.raises(ConfigError) as caught:
        load("c.yaml", environ={})
    assert str(caught.value).count("must be") == len(caught.value.findings) == 2


# Secrets


def test_a_password_comes_from_the_environment_and_is_any_text(given_text: Reader) -> None:
    for password in ("geheim", "{x: [", "007", "a: b", "*", "~", "'", "null", " x"):
        environ = {"ELASTICRL__STORE__PASSWORD": password, "ELASTICRL__STORE__USERNAME": "u"}
        store = good(given_text(SMALL, (), environ)).store
        assert reveal(store.password, store.password_file) == password
        assert repr(store.password) == "SecretStr('**********')"


@pytest.mark.parametrize("source", ["file", "command line"])
def test_a_password_in_a_file_or_an_argument_is_refused_and_not_repeated(given_text: Reader, source: str) -> None:
    if source == "file":
        loaded = given_text(SMALL.replace("embedded: true", "embedded: true, password: hunter2"))
    else:
        loaded = given_text(SMALL, ["store.password=hunter2"])
    [finding] = loaded.findings
    assert finding.rule == "must not be written in a file or an argument"
    assert "hunter2" not in str(finding) + str(finding.plain())
    assert "ELASTICRL__STORE__PASSWORD" in finding.remedy
    assert "store.password_file" in finding.remedy


def test_a_password_file_must_be_closed_to_others(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("geheim\n")
    for mode in (0o400, 0o440):
        file.chmod(mode)
        assert reveal(None, str(file)) == "geheim"
    file.chmod(0o444)
    with pytest.raises(ConfigError, match=r"must be closed to others \(its mode is 0444\)"):
        reveal(None, str(file))
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="must hold a password"):
        reveal(None, str(file))
    with pytest.raises(ConfigError, match="no such file"):
        reveal(None, str(tmp_path / "none"))
    assert reveal(None, None) is None


# Handing it on


def test_a_tree_survives_its_way_through_json_without_its_secrets(given_text: Reader) -> None:
    environ = {"ELASTICRL__STORE__PASSWORD": "geheim", "ELASTICRL__STORE__USERNAME": "u"}
    tree = good(
        given_text(SMALL + "agent: {env: {A: b}}\nppo: {betas: [0.1, 0.2]}\n", ["vault.timeout=1234ms"], environ)
    )
    text = dumps(tree)
    assert "geheim" not in text
    assert '"password"' not in text
    back = loads(text)
    different = [key for key, value in values(tree).items() if values(back)[key] != value]
    assert different == ["store.password"]


@given(st.text(max_size=300))
def test_no_text_makes_the_reader_raise(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert read(file, (), {}).tree is None


@given(st.text(max_size=40))
def test_no_override_makes_the_reader_raise(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "small.yaml"
    file.write_text(SMALL)
    for key in ("ppo.lr", "agent.env", "store.endpoints", "job", "node.name"):
        read(file, [f"{key}={text}", text], {"ELASTICRL__" + text: text})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=3
    )
)
def test_what_is_printed_reads_back_as_the_same_value(value: object) -> None:
    from elasticrl.config.finding import DEFAULT
    from elasticrl.config.source import compose, plain

    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        return  # no key takes one
    node = compose(flow(value), DEFAULT)
    assert node is not None
    assert plain(node) == (tuple(value) if isinstance(value, list) else value)  # type: ignore[arg-type]
