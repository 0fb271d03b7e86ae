"""The wheel is whole: built from the source distribution, installed where no repository is, it runs a job."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_file_that_the_code_reads_is_package_data() -> None:
    """What lies in the package and is no Python is named in pyproject.toml, or it would be missing in a wheel."""
    import tomllib

    conf = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    named = {path for pattern in conf["package-data"]["elasticrl"] for path in (ROOT / "elasticrl").glob(pattern)}
    files = {path for path in (ROOT / "elasticrl").rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    assert files - named == set()
    assert all(list(ROOT.glob(pattern)) for patterns in conf["data-files"].values() for pattern in patterns)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_runs_a_job_where_no_repository_is(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    out, home = tmp_path / "dist", tmp_path / "home"
    home.mkdir()
    source = tmp_path / "source"  # a build leaves its traces beside the sources
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
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
