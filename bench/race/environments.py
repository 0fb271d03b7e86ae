"""The peers' environments: one folder each beside .venv, with pinned versions from PyPI, made once and kept.

    python bench/race/environments.py [torchft nvrx dlrover]

An environment is whole when its stamp says which pins it was made from; other pins make it anew. What could not be installed is
data, not an exception: the race says so in its table.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"
PINS: Mapping[str, Sequence[str]] = {
    "torchft": (TORCH, "torchft-nightly==2026.10.26", "numpy==2.3.5"),
    "nvrx": (TORCH, "nvidia-resiliency-ext==0.4.1", "numpy==2.3.5"),
    # DLRover imports protobuf and does not ask for it.
    "dlrover": (TORCH, "dlrover[k8s]==0.6.1", "protobuf==7.36.2", "numpy==2.3.5"),
}
PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a peer lives. Example: Environment(peer="torchft", python=Path(".venv-race-torchft/bin/python"), problem="")"""

    peer: str
    python: Path
    problem: str  # why it cannot run; empty if it can

    @property
    def bin(self) -> Path:
        return self.python.parent


def environment(peer: str) -> Environment:
    """The peer's environment, made if it is not there."""
    folder = ROOT / f".venv-race-{peer}"
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    pins = "\n".join(PINS[peer])
    if stamp.exists() and stamp.read_text() == pins:
        return Environment(peer=peer, python=python, problem="")
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making {folder.name}: {' '.join(PINS[peer])}", file=sys.stderr)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINS[peer]]
    for command in ([sys.executable, "-m", "venv", str(folder)], install):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return Environment(peer=peer, python=python, problem=f"not installed within {PATIENCE_S:.0f} s")
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            return Environment(peer=peer, python=python, problem=f"pip: {' '.join(last)[:160]}")
    stamp.write_text(pins)
    return Environment(peer=peer, python=python, problem="")


def main() -> int:
    made = [environment(peer) for peer in sys.argv[1:] or PINS]
    for each in made:
        print(f"{each.peer}: {each.problem or each.python}")
    return 1 if any(each.problem for each in made) else 0


if __name__ == "__main__":
    sys.exit(main())
