"""How a part says what it finds: a row at a time, each written at once, so that what was found stands whatever comes next."""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu.found import Row

ROOT = Path(__file__).parents[2]
LAST = 6  # lines of an error


@dataclass(frozen=True, slots=True)
class Say:
    """A part's own end of it. `card` is whether it runs on one."""

    device: str
    rows: Path
    folder: Path

    @property
    def card(self) -> bool:
        """Whether there is one."""
        return self.device == "cuda"

    def row(self, name: str, state: Any, **more: Any) -> None:
        """As it stands."""
        row = Row(name=name, state=state, **more)
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(f"{row.state}: {row.name} {row.value if row.value is not None else ''} {row.unit} {row.said}", flush=True)

    def figure(self, name: str, value: float, unit: str, said: str = "") -> None:
        """A number."""
        self.row(name, "figure", value=value, unit=unit, said=said)

    @contextmanager
    def check(self, name: str, *, on_card: str = "") -> Iterator[None]:
        """It passes unless something in it raises. `on_card`: what a run without a card does not show of it."""
        begun = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the next row is tried whatever this one came to
            traceback.print_exc()
            self.row(name, "failed", value=took_s(begun), unit="s", said=last(error))
        else:
            state = "not on cpu" if on_card and not self.card else "passed"
            self.row(name, state, value=took_s(begun), unit="s", said=on_card if state != "passed" else "")

    def has(self, name: str, *packages: str) -> bool:
        """Whether these packages are there; else the row says which is not."""
        if lacks := [package for package in packages if find_spec(package) is None]:
            self.row(name, "missing", said=f"not installed here: {', '.join(lacks)}")
        return not lacks


def took_s(begun: float) -> float:
    """Of a check: as exact as anybody wants it."""
    return round(time.monotonic() - begun, 2)


def last(error: BaseException) -> str:
    """An error's last lines."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join([type(error).__name__ + ": " + (lines[0] if lines else ""), *lines[1:][-LAST:]])


def begin(main: Callable[[Say], None]) -> None:
    """A part's program: `python -m bench.gpu.NAME --device cuda --rows FILE --folder FOLDER`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "runtime"), str(ROOT / "tests" / "ppo")]
    os.environ |= {"ELASTICRL_TEST_DEVICE": asked.device, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking CUDA itself before a fork would break it in the children
    main(Say(asked.device, asked.rows, asked.folder))
