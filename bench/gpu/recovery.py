"""Recovery seconds by stage, by bench/recovery.py under real daemons: at 1e7 and at 1e9 parameters on a card."""

import json
import subprocess
import sys

from bench.gpu.say import ROOT, Say, begin

#: Parameters, faults, and copies of the state on other nodes, of each kind of run. 1e9 parameters are a state of 12 GB in three
#: versions: with copies it would not fit into the host's memory.
SMALL = {"cuda": ("1e7", "worker,node,join", 1), "cpu": ("1e5", "worker,node,join", 1)}
LARGE = {"cuda": ("1e9", "worker", 0), "cpu": ("1e6", "worker", 0)}


def main(say: Say, sizes: dict[str, tuple[str, str, int]] = SMALL) -> None:
    params, faults, copies = sizes[say.device]
    command = [
        sys.executable,
        str(ROOT / "bench" / "recovery.py"),
        "--params",
        params,
        "--faults",
        faults,
        "--trials",
        "1",
    ]
    command += ["--json", "--device", say.device, "--copies", str(copies)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False
    )  # whether goals are met is its exit code
    rows = json.loads(done.stdout)["rows"] if done.stdout.startswith("{") else []
    for row in rows:
        name = f"{row['size']}, {row['fault']}"
        said = "; ".join(f"{stage} {1000 * took:.0f} ms" for stage, took in row["stages"].items())
        say.figure(name, row["took_s"], "s", f"{said}; the step that comes again {row['again_s']:.2f} s")
        say.figure(
            f"{name}: beside its floor", row["rest_s"], "s", f"floor {row['floor_s']:.2f} s, {row['lost']} steps lost"
        )
    for fault in faults.split(","):
        with say.check(f"{params} parameters, {fault}", on_card="gloo carries it, and all are on processors"):
            (row,) = (row for row in rows if row["fault"] == fault)
            assert not row["lost"], f"{row['lost']} sealed steps were lost"


if __name__ == "__main__":
    begin(main)
