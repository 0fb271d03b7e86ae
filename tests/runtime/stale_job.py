"""`run_job` on a file server that does not answer while there is a file `stale` in the folder of the test."""

import errno
import os

import run_job

from elasticrl.runtime.checkpoint.place import Local

digest = Local.digest


def served(place: Local, name: str, file: str) -> tuple[int, str]:
    if (place.root.parents[1] / "stale").exists():
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return digest(place, name, file)


def main() -> None:
    Local.digest = served  # type: ignore[method-assign]
    run_job.main()


if __name__ == "__main__":  # as under a daemon
    main()
