"""The support bundle holds what helps, and no secret, wherever one was written."""

import json
import os
import resource
import tarfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from chaos.patience import patience
from elasticrl.base.redact import HIDDEN
from elasticrl.cli import bundle
from elasticrl.cli.bundle import PART, Veil, keys_in, shortened
from elasticrl.cli.main import build

PASSWORD, TOKEN, KEY = "correct-horse-battery", "page-token-4711", "env-value-of-the-job"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's folders after a run in which every secret was written somewhere it should not be."""
    monkeypatch.setenv("ELASTICRL_RUN_DIR", str(tmp_path / "nobody"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    journal(tmp_path, "")
    for name in ("password", "token"):
        (tmp_path / name).write_text(f"{PASSWORD if name == 'password' else TOKEN}\n")
        (tmp_path / name).chmod(0o600)
    logs, state = tmp_path / "log" / "toy", tmp_path / "state" / "toy" / "n0"
    (logs / "n0" / "attempt_1").mkdir(parents=True)
    for folder in ("trace", "incidents"):
        (state / folder).mkdir(parents=True)
    leak = f"connect user=u password={PASSWORD}; again {PASSWORD}; {TOKEN}; {KEY}\n"
    (logs / "n0.daemon.log").write_text(leak)
    (logs / "n0" / "attempt_1" / "rank_0.log").write_text(
        "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123\nAuthorization: Bearer abc.def.ghi\n"
        "https://bob:hunter2hunter2@registry.example/x\n"
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----\n"
        "[Step 3] tokens: 4096 | max_tokens: 8 | reward 0.5\n" + leak
    )
    (state / "trace" / "trace-new.jsonl").write_text(
        json.dumps({"v": 1, "env": {"API_KEY": "0123456789abcdef"}}) + "\n"
    )
    (state / "incidents" / "20261121203410-g14.json").write_text(json.dumps({"cause": leak}))
    (tmp_path / "log" / "toy" / "checkpoint.safetensors").write_bytes(b"weights")
    config = tmp_path / "job.yaml"
    config.write_text(
        f"job: {{name: toy, program: train.py}}\nnode: {{state_dir: {tmp_path}/state}}\n"
        f"telemetry: {{log_dir: {tmp_path}/log}}\n"
        f"store: {{endpoints: [https://a:1], username: u, password_file: {tmp_path}/password}}\n"
        f"web: {{port: 8470, address: 0.0.0.0, token_file: {tmp_path}/token}}\n"
        f"agent: {{env: {{MY_API_KEY: {KEY}, PLAIN: shown}}}}\n"
    )
    return config


def journal(folder: Path, says: str, code: int = 0) -> None:
    """This machine's systemd has that to say of our units."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "says").write_text(says)
    program = folder / "bin" / "journalctl"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\ncat {folder}/says\nexit {code}\n')
    program.chmod(0o755)


def bundled(*arguments: str) -> Result:
    return CliRunner().invoke(build(["support-bundle"]), ["support-bundle", *arguments])


def contents(tar: Path) -> dict[str, str]:
    with tarfile.open(tar) as file:
        return {member.name: (file.extractfile(member) or open).read().decode() for member in file}  # type: ignore[union-attr,operator]


def test_no_secret_is_in_it_wherever_it_was_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    out = tmp_path / "b.tar.gz"
    done = bundled("--config", str(run), "-o", str(out))
    assert done.exit_code == 0, done.output
    files = contents(out)
    everything = "\n".join(files.values())
    for secret in (
        PASSWORD, TOKEN, KEY, "hf_abcdefghij", "abc.def.ghi", "hunter2hunter2", "MIIEabc", "0123456789abcdef",
    ):  # fmt: skip
        assert secret not in everything, secret
    assert out.stat().st_mode & 0o777 == 0o600
    assert "removed" in done.output


def test_secrets_of_the_units_and_the_daemons_own_keys_are_known_by_value(run: Path, tmp_path: Path) -> None:
    # Found by reading: whose names nobody has in a shell, and which look like any digest.
    home = tmp_path / "run" / "toy" / "n0"
    home.mkdir(parents=True)
    digits = {name: char * 64 for name, char in (("vault", "a"), ("rollout", "b"), ("roll", "c"), ("echo", "d"))}
    (home / "vault.key").write_text(digits["vault"])
    (home / "rollout.key").write_text(digits["rollout"])
    (home / "rollouts.json").write_text(json.dumps({"key": digits["roll"], "engines": []}))
    (home / "echo.json").write_text(json.dumps({"node": "n0", "incarnation": 1, "secret": digits["echo"]}))
    file = tmp_path / "environment"
    file.write_text("ELASTICRL__STORE__PASSWORD=of-the-unit's-file\nNCCL_DEBUG=of-no-interest\n")
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.write_text(
        "#!/bin/sh\ncat <<'SAID'\nId=elasticrl.service\nLoadState=loaded\n"
        f"Environment=HF_TOKEN=of-the-unit-itself\nEnvironmentFiles={file} (ignore_errors=yes)\nSAID\n"
    )
    systemctl.chmod(0o755)
    run.write_text(run.read_text().replace("node: {", f"node: {{run_dir: {tmp_path}/run, "))
    secrets = [*digits.values(), "of-the-unit's-file", "of-the-unit-itself"]
    (tmp_path / "log" / "toy" / "n0.daemon.log").write_text("\n".join([f"said {each} by mistake" for each in secrets]))
    out = tmp_path / "b.tar.gz"
    assert bundled("--config", str(run), "-o", str(out)).exit_code == 0
    text = contents(out)["elasticrl-support/logs/n0.daemon.log"]
    assert text == "\n".join([f"said {HIDDEN} by mistake"] * len(secrets))


def test_a_runtime_directory_of_somebody_else_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "job" / "n0").mkdir(parents=True)
    os.mkfifo(tmp_path / "job" / "n0" / "vault.key")  # whoever reads it waits for ever
    (tmp_path / "job" / "n0" / "rollout.key").write_text("a key that is there")
    assert list(keys_in((tmp_path / "none", tmp_path))) == ["a key that is there"]


def test_what_helps_is_in_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    out = tmp_path / "b.tar.gz"
    assert bundled("--config", str(run), "-o", str(out)).exit_code == 0
    files = {name.removeprefix("elasticrl-support/"): text for name, text in contents(out).items()}
    assert set(files) == {
        "versions.json", "config.json", "environment.json", "logs/n0.daemon.log", "logs/n0/attempt_1/rank_0.log",
        "state/n0/trace/trace-new.jsonl", "state/n0/incidents/20261121203410-g14.json",
    }  # fmt: skip
    assert "elasticrl" in json.loads(files["versions.json"])
    assert json.loads(files["environment.json"])["NCCL_DEBUG"] == "WARN"
    assert "shown" in files["config.json"]
    assert "tokens: 4096 | max_tokens: 8" in files["logs/n0/attempt_1/rank_0.log"], "figures are no secrets"
    assert "user=u" in files["logs/n0.daemon.log"]


def test_where_the_daemon_is_a_unit_its_log_is_in_it(run: Path, tmp_path: Path) -> None:
    # Found by reading: of a daemon that had ended nothing was there, which is when somebody reports.
    journal(tmp_path, f"daemon.refused password={PASSWORD}\n")
    assert bundled("--config", str(run), "-o", str(tmp_path / "b.tar.gz")).exit_code == 0
    files = contents(tmp_path / "b.tar.gz")
    assert files["elasticrl-support/journal.log"] == "daemon.refused password=[removed]\n"
    assert "--unit elasticrl*" in (tmp_path / "asked").read_text()
    journal(tmp_path, "", code=1)
    assert bundled("--config", str(run), "-o", str(tmp_path / "c.tar.gz")).exit_code == 0
    assert "not read" in contents(tmp_path / "c.tar.gz")["elasticrl-support/journal.txt"]


@pytest.mark.usefixtures("run")
def test_folders_of_one_name_are_both_in_it(tmp_path: Path) -> None:
    for node in ("n00", "n01"):
        (tmp_path / node / "logs").mkdir(parents=True)
        (tmp_path / node / "logs" / "x.log").write_text(node)
    folders = [str(tmp_path / node / "logs") for node in ("n00", "n01")]
    assert bundled(*folders, "-o", str(tmp_path / "b.tar.gz")).exit_code == 0
    files = contents(tmp_path / "b.tar.gz")
    assert [files[f"elasticrl-support/{n}-logs/x.log"] for n in (0, 1)] == ["n00", "n01"]


def test_folders_can_be_named_without_a_configuration(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    assert bundled(str(run.parent / "log"), "-o", str(out)).exit_code == 0
    assert "elasticrl-support/log/toy/n0.daemon.log" in contents(out)
    assert bundled(str(tmp_path / "nothing"), "-o", str(out)).exit_code == 2
    again = bundled(str(run.parent / "log"), "-o", str(out))
    assert (again.exit_code, "cannot be written: File exists; name another" in again.output) == (2, True)


def test_a_disk_that_is_full_is_said_and_nothing_half_is_left(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100, hard)
    )  # of this process's files: what comes after fails as on a full disk
    try:
        said = bundled("--config", str(run), "-o", str(out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (said.exit_code, out.exists()) == (1, False)
    assert "cannot be written: File too large; put it elsewhere" in said.output


def test_it_is_closed_to_others_and_says_what_is_not_in_it(tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    said = bundled("-o", str(out))
    assert "no logs and no state are in it" in said.output
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_job_that_was_begun_under_another_name_is_said_to_lie_elsewhere(run: Path, tmp_path: Path) -> None:
    """Found by a newcomer: after `elasticrl run ... job.name=mine` the bundle was empty, and nobody said so."""
    assert (
        "no logs and no state of the job" not in bundled("--config", str(run), "-o", str(tmp_path / "1.tar.gz")).output
    )
    run.write_text(run.read_text().replace("name: toy", "name: other"))
    said = bundled("--config", str(run), "-o", str(tmp_path / "2.tar.gz")).output
    assert f"no logs and no state of the job other are in it; {tmp_path}/log has those of toy" in said


def test_where_there_is_too_much_the_oldest_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    for age, name, word in ((100, "z-new.log", "w"), (1000, "a-old.log", "token")):
        log = tmp_path / "logs" / name
        log.write_text(
            word * (60_000 // len(word))
        )  # in which a look for secrets that goes back and forth takes minutes
        os.utime(log, (time.time() - age, time.time() - age))
    monkeypatch.setattr(bundle, "WHOLE", 100_000)
    out, begun = tmp_path / "b.tar.gz", time.monotonic()
    assert bundled(str(tmp_path / "logs"), "-o", str(out)).exit_code == 0
    assert time.monotonic() - begun < patience(20.0)
    assert [name for name in contents(out) if name.endswith(".log")] == ["elasticrl-support/logs/z-new.log"]


def test_a_configuration_that_is_refused_is_told_with_its_findings(run: Path, tmp_path: Path) -> None:
    run.write_text(run.read_text() + "vault: {copies: 99}\n")
    out = tmp_path / "b.tar.gz"
    assert bundled("--config", str(run), "-o", str(out)).exit_code == 0
    files = contents(out)
    assert "vault.copies" in files["elasticrl-support/config-findings.txt"]
    assert PASSWORD not in "".join(files.values())


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("password=abcdef next", "password=[removed] next"),
        ('"api_key": "xyz123",', '"api_key": "[removed]",'),
        ("ELASTICRL__STORE__PASSWORD=abc", "ELASTICRL__STORE__PASSWORD=[removed]"),
        ("store.password_file=null", "store.password_file=null"),
        ("max_tokens: 128", "max_tokens: 128"),
        (f"x_secret_{'k' * 200}=abcdef", f"x_secret_{'k' * 200}=[removed]"),
        (f"{'z' * 50}https://u:{'p' * 2000}@h", f"{'z' * 50}https://u:[removed]@h"),
        ("a tokenizer: fast", "a tokenizer: fast"),
        ("postgres://bob:hunt@er2@db:1/x", "postgres://bob:[removed]@db:1/x"),
        ("http://a:8000 and http://b/@c", "http://a:8000 and http://b/@c"),
        ("nothing here", "nothing here"),
        (r'"said": "{\"api_key\": \"xyz123\"}"', r'"said": "{\"api_key\": \"[removed]\"}"'),
        ("Authorization: Token abcdef123", "Authorization: [removed]"),
        ('"--hf-token", "abcdef", "--steps"', '"--hf-token", "[removed]", "--steps"'),
        ("train.py --api-key abcdef --steps 3", "train.py --api-key [removed] --steps 3"),
        ("-" * 300_000, "-" * 300_000),
    ],
)
def test_the_veil(text: str, left: str) -> None:
    assert Veil([]).over(text) == left


@pytest.mark.parametrize("secret", ['pa"ss\\word1', "geheüim99", "a\tb\nc"])
def test_a_secret_is_known_however_it_is_written(secret: str) -> None:
    for text in (secret, json.dumps({"x": secret}), json.dumps({"x": secret}, ensure_ascii=False)):
        assert HIDDEN in Veil([secret]).over(text)


def test_a_long_file_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    file = tmp_path / "long.log"
    file.write_text("first\n" + "x" * 79 + "\n" + ("y" * 79 + "\n") * (PART // 80 + 1000) + "last\n")
    text = shortened(file)
    assert text.startswith("first\n")
    assert text.endswith("last\n")
    assert "bytes are left out" in text
    assert len(text) <= PART + 100


def test_versions_for_a_bug_report() -> None:
    runner, app = CliRunner(), build(["version"])
    told = json.loads(runner.invoke(app, ["version", "--verbose", "--json"]).stdout)
    assert {"elasticrl", "python", "system", "machine", "grpcio", "etcd"} <= set(told)
    assert told["elasticrl"] in runner.invoke(app, ["version"]).stdout
    assert "grpcio" in runner.invoke(app, ["version", "--verbose"]).stdout
