"""`python -m elasticrl.runtime.vault`: the vault server of one node and job. Started by the daemon, which it outlives."""

import argparse
import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from elasticrl.base.parent import stops
from elasticrl.base.title import title
from elasticrl.runtime.vault.channel import load_key
from elasticrl.runtime.vault.errors import VaultError
from elasticrl.runtime.vault.server import Options, Server


def options_of(argv: list[str]) -> Options:
    """The command line, as a value."""
    parser = argparse.ArgumentParser(prog="python -m elasticrl.runtime.vault", description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--dir", type=Path, required=True, help="where it keeps states: a tmpfs")
    parser.add_argument("--listen", default="", help="host:port for copies between nodes; empty: no copies")
    parser.add_argument("--key-file", type=Path, help="the job's key: copies need one")
    parser.add_argument(
        "--window-bytes", type=int, default=16 << 20, help="bytes of a copy that are on their way at once"
    )
    parser.add_argument("--deadline-s", type=float, default=5.0, help="without progress, before a transfer is given up")
    parser.add_argument(
        "--led-by",
        type=int,
        nargs="*",
        default=[],
        metavar="PID",
        help="end when these processes have: a foreground run's",
    )
    args = parser.parse_args(argv)
    return Options(
        job=args.job,
        node=args.node,
        directory=args.dir,
        listen=args.listen,
        key=load_key(args.key_file) if args.key_file else None,
        window_bytes=args.window_bytes,
        deadline_s=args.deadline_s,
        led=tuple(args.led_by),
    )


async def serve(options: Options) -> None:
    """Serve until SIGTERM, SIGINT or the job's end; says on standard output when it is ready."""
    server = Server(options)
    dropped = await server.start()
    loop = asyncio.get_running_loop()
    for number in stops():
        loop.add_signal_handler(number, server.stop)
    ready = {"ready": True, "socket": str(server.socket_path), "port": server.port, "dropped": list(dropped)}
    with suppress(OSError):  # whoever started us may have gone already: that is what we are for
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
    await server.run()


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    os.umask(0o077)
    title("vault")
    with suppress(OSError):
        os.nice(5)  # copies must not take the cores from training
    try:
        asyncio.run(serve(options_of(sys.argv[1:] if argv is None else argv)))
    except (VaultError, OSError) as error:
        sys.stderr.write(f"elasticrl vault: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
