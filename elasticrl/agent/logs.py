"""Where workers' output lies: `attempt_<generation>/rank_<r>.log`, and `latest` for the newest.

The idea: a worker writes into its file itself, so nobody's death can lose what it wrote. To rotate is to rename the file and to
tell the worker to open a new one; until it does, it goes on writing into the renamed. No log is worth a worker: where a folder
takes nothing new (a full disk, one that is read-only), output goes on where it went before, and `problem` says why.
"""

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

ATTEMPTS: Final = 20  # the newest that are kept
WARM: Final = 200  # files of processes without a rank: one that crashes as it starts is started for ever
ATTEMPT: Final = re.compile(r"attempt_(\d+)")
log = logging.getLogger(__name__)


class Logs:
    """The log folder of one node's workers."""

    def __init__(self, folder: Path, *, limit_bytes: int, keep: int) -> None:
        self.folder = folder
        self.problem = ""  # why the newest file could not be made, or not be moved away; empty when it could
        self._limit_bytes = limit_bytes
        self._keep = keep
        (folder / "warm").mkdir(parents=True, exist_ok=True)

    def warm(self, number: int) -> Path:
        """Of a process without a rank."""
        old = sorted((self.folder / "warm").glob("process_*.log"), key=_written)[:-WARM]
        for file in old:
            file.unlink(missing_ok=True)
        return self.folder / "warm" / f"process_{os.getpid()}_{number}.log"

    def ranked(self, generation: int, rank: int, present: Path) -> Path:
        """Of a rank in a generation. The `present` one, if there can be no other."""
        attempt = self.folder / f"attempt_{generation}"
        try:
            if not attempt.is_dir():
                attempt.mkdir(parents=True)
                self._forget(generation)
        except OSError as error:
            self._refused(error)
            return present
        self.problem = ""
        return attempt / f"rank_{rank}.log"

    def show(self, generation: int) -> None:
        """`latest` points to this generation's logs from now on."""
        latest, fresh = self.folder / "latest", self.folder / f".latest_{os.getpid()}"
        try:
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(f"attempt_{generation}")
            fresh.replace(latest)
        except OSError as error:
            self._refused(error)

    def _forget(self, generation: int) -> None:
        """The attempts that are not among the newest. Later ones are of a job of this name that was begun in another store."""
        known = {int(match[1]): path for path in self.folder.iterdir() if (match := ATTEMPT.fullmatch(path.name))}
        for number in sorted(number for number in known if number <= generation)[:-ATTEMPTS]:
            shutil.rmtree(known[number], ignore_errors=True)

    def rotate(self, file: Path) -> bool:
        """Move a log that has grown too large out of the way; True if its writer must open a new one."""
        try:
            if file.stat().st_size < self._limit_bytes:
                return False
        except OSError:
            return False
        try:
            for age in range(self._keep - 1, 0, -1):
                older = file.with_name(f"{file.name}.{age}")
                if older.exists():
                    older.replace(file.with_name(f"{file.name}.{age + 1}"))
            file.replace(file.with_name(f"{file.name}.1"))
        except OSError as error:
            self._refused(error)
            return False
        self.problem = ""
        return True

    def _refused(self, error: OSError) -> None:
        """Said once, and in the same words for every file: it is asked for again at each look."""
        why = f"the log folder {self.folder} takes nothing new ({error.strerror}): workers write on where they wrote before"
        if why != self.problem:
            log.warning("%s", why)
        self.problem = why


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


class TorchLogs(LogsSpecs):
    """What torch's process classes want to know: no redirection (a worker opens its log itself), and where errors go."""

    def __init__(self, error_file: Path) -> None:
        super().__init__(log_dir=str(error_file.parent))
        self._error_file = error_file

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """One process, so everything at 0."""
        envs[0]["TORCHELASTIC_ERROR_FILE"] = str(self._error_file)
        return LogsDest(stdouts={0: ""}, stderrs={0: ""}, error_files={0: str(self._error_file)})

    @property
    def root_log_dir(self) -> str:
        """Where the error file lies."""
        return str(self._error_file.parent)
