"""The wheel is whole: built from the source distribution, installed where no repository is, it runs a job."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from elasticrl.cli.main import VERBS

ROOT = Path(__file__).parents[2]


MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 512,
}  # fmt: skip
#: Imports all that is in the package, and prints what it wanted and did not find.
IMPORTS = """
import importlib, pkgutil, elasticrl
for module in pkgutil.walk_packages(elasticrl.__path__, "elasticrl.", onerror=lambda name: None):
    try:
        module.name.endswith("__main__") or importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(error.name)
"""
#: What the extras bring; a module that needs one of them is imported only where it is asked for.
EXTRAS = {
    *("torch", "numpy", "transformers", "tokenizers", "safetensors", "peft", "deepspeed", "vllm"),
    *("matplotlib", "etcd3", "tensorboard"),
}
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
#: What each pattern of pyproject.toml takes into a wheel. setuptools takes one without a wildcard as it stands, there or not.
SOURCES = {
    **{pattern: list(ROOT.glob(pattern)) for patterns in SETUPTOOLS["data-files"].values() for pattern in patterns},
    **{
        f"elasticrl/{pattern}": list(ROOT.glob(f"elasticrl/{pattern}"))
        for pattern in SETUPTOOLS["package-data"]["elasticrl"]
    },
}


def tracked() -> list[str]:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in files.split("\0") if name and (ROOT / name).exists()]


def copied_by_the_dockerfile() -> set[str]:
    """The files that its first stage, which builds the wheel, has."""
    stage = (ROOT / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")[1]
    sources = [word for line in stage.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
    return {name for name in tracked() if any(name == source or name.startswith(source + "/") for source in sources)}


def named_by_the_manifest() -> set[str]:
    """The files that MANIFEST.in takes into a source distribution."""
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    grafts = tuple(f"{folder}/" for words in lines if words[0] == "graft" for folder in words[1:])
    names = {name for words in lines if words[0] == "include" for name in words[1:]}
    return {name for name in tracked() if name in names or name.startswith(grafts)}


def test_every_file_that_the_code_reads_is_package_data() -> None:
    """What lies in the package and is no Python is named in pyproject.toml, or it would be missing in a wheel."""
    named = {path for pattern, paths in SOURCES.items() if pattern.startswith("elasticrl/") for path in paths}
    files = {path for path in (ROOT / "elasticrl").rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    assert files - named == set()


def test_every_pattern_of_a_wheel_finds_files() -> None:
    assert [pattern for pattern, paths in SOURCES.items() if not paths] == []


def pinned(lines: Iterable[str]) -> dict[str, str]:
    return {line.split("==")[0]: line.split("==")[1].split()[0] for line in lines if "==" in line and line[0].isalnum()}


def needed() -> set[str]:
    """What the daemon needs, with all that these need."""
    found: set[str] = set()
    todo = [requirement for requirement in metadata.requires("elasticrl") or [] if "extra ==" not in requirement]
    while todo:
        parsed = Requirement(todo.pop())
        name = canonicalize_name(parsed.name)
        if name not in found and (parsed.marker is None or parsed.marker.evaluate({"extra": ""})):
            found.add(name)
            todo += metadata.requires(name) or []
    return found


def test_all_that_a_daemon_needs_is_installed_by_its_sum() -> None:
    text = (ROOT / "configs/locks/daemon.txt").read_text(encoding="utf-8")
    locked = pinned(text.splitlines())
    assert {canonicalize_name(name) for name in locked} == needed()
    pins = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    assert locked.items() <= pins.items(), "and at the versions that are tested together"
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", part) for part in re.split(r"\n(?=[A-Za-z])", text)[1:])
    for file in ("Makefile", "Dockerfile", "docs/QUICKSTART.md"):
        assert "--require-hashes" in (ROOT / file).read_text(encoding="utf-8")


def test_no_setuptools_that_writes_outside_of_its_folder_may_build_us() -> None:
    """Those before 78.1.1 do (CVE-2025-47273)."""
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    for version, allowed in (("78.1.0", False), ("78.1.1", True), ("80.0", True)):
        assert Requirement(wanted).specifier.contains(version) is allowed


def test_what_the_units_have_in_their_environment_is_installed_for_its_owner_alone(tmp_path: Path) -> None:
    subprocess.run(["make", "-s", "install-systemd", f"DESTDIR={tmp_path}"], cwd=ROOT, check=True)
    assert stat.S_IMODE((tmp_path / "etc/elasticrl/environment").stat().st_mode) == 0o600
    kept = (tmp_path / "usr/lib/tmpfiles.d/elasticrl.conf").read_text(encoding="utf-8").splitlines()
    assert "z /etc/elasticrl/environment 0600 root root -" in kept, "also where it was installed before"


def test_the_dockerfile_copies_all_that_a_wheel_is_made_of() -> None:
    needed = {str(path.relative_to(ROOT)) for paths in SOURCES.values() for path in paths}
    needed |= {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}
    needed |= {name for name in tracked() if name.startswith("elasticrl/")}
    assert needed - copied_by_the_dockerfile() == set()


def test_a_source_distribution_has_all_that_a_wheel_is_made_of() -> None:
    """The package itself, its data, README and pyproject.toml are taken by setuptools without being named."""
    needed = {str(path.relative_to(ROOT)) for paths in SOURCES.values() for path in paths}
    needed = {name for name in needed if not name.startswith("elasticrl/")} | {
        "Dockerfile",
        "LICENSE",
        "constraints.txt",
    }
    assert needed - named_by_the_manifest() == set()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution that it is built from."""
    place = tmp_path_factory.mktemp("built")
    source, out = place / "source", place / "dist"  # a build leaves its traces beside the sources
    copy(tracked(), source)
    build("--outdir", str(out), str(source))
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def copy(names: Iterable[str], to: Path) -> None:
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes((ROOT / name).read_bytes())


def build(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *words], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_dockerfile_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    copy(copied_by_the_dockerfile(), tmp_path / "source")
    build("--wheel", "--outdir", str(tmp_path), str(tmp_path / "source"))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file, zipfile.ZipFile(built[0]) as other:
        assert set(file.namelist()) == set(other.namelist())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_brings_what_it_needs_where_there_is_no_torch(built: tuple[Path, Path], tmp_path: Path) -> None:
    """With its own dependencies alone, from the package index: a name that is missing in pyproject.toml is found here."""
    place, home = tmp_path / "venv", tmp_path / "home"
    home.mkdir()
    venv.create(place, with_pip=False)
    install = [
        *(sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "--quiet"),
        *("--constraint", str(ROOT / "constraints.txt"), str(built[0])),
    ]
    done = subprocess.run(install, capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stderr
    assert not list(place.glob("lib/*/site-packages/torch"))

    def elasticrl(*words: str, code: int = 0) -> str:
        env = {"PATH": f"{place}/bin:/usr/bin:/bin", "HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
        done = subprocess.run(["elasticrl", *words], capture_output=True, text=True, cwd=home, env=env, timeout=120)
        assert done.returncode == code, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    config = str(place / "share" / "elasticrl" / "configs" / "cluster.yaml")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    models = [f"{key}={tmp_path}" for key in ("model.path", "model.critic_path", "reward.model")]
    assert str(place) in elasticrl("version", "--verbose")
    assert "ok" in elasticrl("config", "check", config)
    assert "memory that stays" in elasticrl("plan", config, *models)
    assert "lease_ttl" in elasticrl("config", "show", config)
    elasticrl("config", "schema")
    log = ROOT / "tests" / "data" / "nccl_logs"
    elasticrl("diagnose", "--log", str(log))
    elasticrl("status", "--run-dir", str(home), code=1)
    for verb in VERBS:
        elasticrl(verb, "--help")
    done = subprocess.run([place / "bin" / "python", "-c", IMPORTS], capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= EXTRAS, "a module is imported that neither the dependencies nor an extra bring"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_runs_a_job_where_no_repository_is(
    built: tuple[Path, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    wheel, sdist = built
    home = tmp_path / "home"
    home.mkdir()
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert not [name for name in names if name.startswith(("tests", "chaos", "bench"))]
    for part in (
        "elasticrl/store/etcd.pb",
        "elasticrl/report/page.css",
        "elasticrl/daemon/web.js",
        "elasticrl.service",
    ):
        assert any(part in name for name in names), part
    with tarfile.open(sdist) as file:
        assert any(name.endswith("tests/unit/test_packaging.py") for name in file.getnames())

    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stderr
    # The dependencies come from here; what is installed here in development mode does not, as no .pth of ours is read there.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (place / "lib" / version / "site-packages" / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    short = Path(tempfile.mkdtemp(prefix="e", dir="/tmp"))  # a socket's path may have 107 characters
    request.addfinalizer(lambda: shutil.rmtree(short))
    env = {
        "PATH": f"{place}/bin:/usr/bin:/bin",
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(short),
        "TMPDIR": str(tmp_path),
    }
    env |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}

    def elasticrl(*words: str, timeout: float = 300) -> str:
        done = subprocess.run(["elasticrl", *words], capture_output=True, text=True, cwd=home, env=env, timeout=timeout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    share = place / "share" / "elasticrl"
    assert str(place) in elasticrl("version", "--verbose")
    config = str(share / "configs" / "one-machine.yaml")
    script = share / "docs" / "examples" / "supervised.py"
    own = [f"job.program={script}", "job.args=[--steps, '20']", "job.steps=20", f"vault.dir={tmp_path}/vault"]
    assert "ok" in elasticrl("config", "check", config, *own)
    assert (share / "systemd" / "elasticrl.service").exists()
    said = elasticrl("run", config, "--nodes", "2", *own, timeout=600)
    assert "FINISHED" in said or "step 20" in said
    assert "exactly once" in elasticrl("audit", str(home / "run" / "checkpoints" / "one-machine"))
    assert "20 steps on 2 nodes" in elasticrl("report", str(home / "run"), "-o", str(tmp_path / "r.html"))
