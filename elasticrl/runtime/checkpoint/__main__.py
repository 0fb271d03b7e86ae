"""`python -m elasticrl.runtime.checkpoint`: the background writer of one worker. Started by `Saver`, ends with its worker."""

import argparse
import sys

from elasticrl.runtime.checkpoint.writer import serve


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m elasticrl.runtime.checkpoint", description=__doc__)
    parser.add_argument("--writer", type=int, required=True, help="the descriptor of the socket to the worker")
    parser.add_argument(
        "--orphan-s", type=float, default=30.0, help="how long others are waited for without the worker"
    )
    args = parser.parse_args(argv)
    serve(args.writer, args.orphan_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
