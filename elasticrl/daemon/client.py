"""The asking end of the control socket: blocking, and cheap to import, because `elasticrl status` has 300 ms.

`control` says what is spoken.
"""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elasticrl.base.parsed import parsed

VERSION = 1
SEEN = frozenset({"ping", "status", "crew", "logs"})  # what a daemon says without its store, if need be
SEEN_S = 15.0  # for that
STORE_S = 60.0  # for the rest: a daemon says itself that its store has not answered within store.timeout


def pack(answer: Mapping[str, Any]) -> bytes:
    """An answer as one line."""
    return json.dumps({"v": VERSION, **answer}, separators=(",", ":"), default=str).encode() + b"\n"


class Unanswered(RuntimeError):
    """The daemon did not answer, or said no."""


def ask(path: Path, verb: str, *, deadline_s: float | None = None, **fields: Any) -> Any:
    """Ask a daemon and wait for its answer; blocking, for the command line. Raises `Unanswered` with what to do."""
    within_s = deadline_s or (SEEN_S if verb in SEEN else STORE_S)
    for answer in ask_stream(path, verb, deadline_s=within_s, **fields):
        return answer
    raise Unanswered(gone(path))


def ask_stream(path: Path, verb: str, *, deadline_s: float | None = None, **fields: Any) -> Any:
    """The same for a question with many answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(deadline_s)
        try:
            sock.connect(str(path))
        except OSError as error:
            remedy = "start it (systemctl start elasticrl), or ask the store: --store"
            raise Unanswered(f"no daemon answers at {path} ({error.strerror}); {remedy}") from None
        try:
            sock.sendall(pack({"verb": verb, **fields}))
            sock.shutdown(socket.SHUT_WR)  # there is no other question: the daemon closes after its last answer
            for line in sock.makefile("rb"):
                answer = parsed(line)
                if not answer.get("ok"):
                    raise Unanswered(answer.get("error", "refused"))
                yield answer["value"]
        except TimeoutError:
            raise Unanswered(
                f"the daemon at {path} did not answer within {deadline_s:.0f} s; its log says why"
            ) from None
        except (OSError, ValueError):  # its connection broke, maybe in the middle of a line
            raise Unanswered(gone(path)) from None


def gone(path: Path) -> str:
    """What is said where a daemon ended during a question."""
    return (
        f"the daemon at {path} ended before it had answered; its log says why, and elasticrl status whether it is back"
    )
