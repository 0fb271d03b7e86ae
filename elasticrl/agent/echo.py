"""The agent's answer to neighbours who do not hear this node's daemon: the node lives, and so do its workers.

The one idea: a daemon may be restarted or upgraded while training goes on, and its neighbours must not take its silence for the
node's death. The agent outlives the daemon, so it answers their questions in its name, with what the daemon left for it.
"""

import asyncio
import json
import time
from pathlib import Path

from elasticrl.agent.datagram import PING, PONG, Said, seal, unseal
from elasticrl.base.address import join, split
from elasticrl.base.owned import write_private
from elasticrl.base.parsed import parsed
from elasticrl.contract.model import Member

NOTE = "echo.json"


def leave_note(folder: Path, me: Member, secret: bytes) -> None:
    """The daemon tells its agent who they are, and the job's secret. For its user's eyes alone."""
    write_private(folder / NOTE, json.dumps({"node": me.node, "incarnation": me.incarnation, "secret": secret.hex()}))


class Echo(asyncio.DatagramProtocol):
    """Answers questions, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._note = folder / NOTE
        self._read_at = 0.0  # the note's time of change when it was read
        self._me = Member(node="", incarnation=0)
        self._secret = b""
        self._transport: asyncio.DatagramTransport | None = None
        self._number = 0
        self.address = ""

    async def open(self, host: str) -> None:
        """Listen on any port of this address; `address` says which."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(host, 0))
        bound = self._transport.get_extra_info("sockname")
        self.address = join(*bound[:2])

    def close(self) -> None:
        """Fall silent."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:  # noqa: ARG002 - who sent it stands in it, signed
        """A question from a member of this job is answered; noise is not."""
        if not self._informed() or self._transport is None:
            return
        asked = unseal(self._secret, data, self._me.node)
        if not isinstance(asked, str) and asked.kind == PING:
            # The clock that daemon and agent share, and that nobody can set back: so their numbers rise together.
            self._number = max(self._number + 1, time.monotonic_ns())
            # Whoever hears it is asked no more than this, so the agent needs no session.
            said = Said(
                kind=PONG, member=self._me, number=self._number, session=0, to=asked.session, asked=asked.number,
                address=self.address,
            )  # fmt: skip
            self._transport.sendto(seal(self._secret, said, asked.member.node), split(asked.address))

    def _informed(self) -> bool:
        """Read the daemon's note if it is new."""
        try:
            changed = self._note.stat().st_mtime
            if changed != self._read_at:
                note = parsed(self._note.read_text(encoding="utf-8"))
                self._me = Member(node=note["node"], incarnation=note["incarnation"])
                self._secret = bytes.fromhex(note["secret"])
                self._read_at = changed
        except (OSError, ValueError, KeyError, TypeError):
            return False  # no daemon has told us yet
        return True
