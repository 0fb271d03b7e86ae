"""Where workers' output lies: `attempt_<generation>/rank_<r>.log`, and `latest` for the newest.

The idea: a worker writes into its file itself, so nobody's death can lose what it wrote. To rotate is to rename the file and to
tell the worker to open a new one; until it does, it goes on writing into the renamed.
"""

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs


class Logs:
    """The log folder of one node's workers."""

    def __init__(self, folder: Path, *, limit_bytes: int, keep: int) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._keep = keep
        (folder / "warm").mkdir(parents=True, exist_ok=True)

    def warm(self, number: int) -> Path:
        """Of a process without a rank."""
        return self.folder / "warm" / f"process_{os.getpid()}_{number}.log"

    def ranked(self, generation: int, rank: int) -> Path:
        """Of a rank in a generation; `latest` points there from now on."""
        attempt = self.folder / f"attempt_{generation}"
        attempt.mkdir(parents=True, exist_ok=True)
        latest, fresh = self.folder / "latest", self.folder / f".latest_{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(attempt.name)
        fresh.replace(latest)
        return attempt / f"rank_{rank}.log"

    def rotate(self, log: Path) -> bool:
        """Move a log that has grown too large out of the way; True if its writer must open a new one."""
        try:
            if log.stat().st_size < self._limit_bytes:
                return False
        except OSError:
            return False
        for age in range(self._keep - 1, 0, -1):
            older = log.with_name(f"{log.name}.{age}")
            if older.exists():
                older.replace(log.with_name(f"{log.name}.{age + 1}"))
        log.replace(log.with_name(f"{log.name}.1"))
        return True


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
