"""`python -m elasticrl.ppo.rollout.process`: the engine beside the workers, a process of its own that they come and go from.

The idea: one loop, one thread. It reads what visitors ask, lets its program make one step, sends what is finished. It answers
only once it has really generated something; it generates for trainers only by a set of weights that it has read whole; and it
ends by itself when nobody has spoken to it for a while, so that nothing has to remember to end it. On a rollout node it also
listens on TCP: who comes from there proves first that it knows the job's key, and may bring the weights along.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import struct
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from elasticrl.base.address import split
from elasticrl.base.strangers import HELLO_S, put_out
from elasticrl.contract.model import REFUSED
from elasticrl.ppo.rollout.service import ENGINE_LOCK, LOADS, SPEC, Service, Unfit
from elasticrl.ppo.rollout.wire import PROTOCOL, SOCKET, STRANGERS, Door, Frame, Inbox, Lost
from elasticrl.runtime.vault.channel import keep_alive, load_key
from elasticrl.runtime.vault.errors import VaultError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from elasticrl.ppo.rollout.engine import Request
    from elasticrl.ppo.rollout.intake import Intake
    from elasticrl.ppo.rollout.judges import Case, Judges
    from elasticrl.ppo.rollout.weights import Tag

ALIVE_S: Final = 0.2  # between signs of life while something is generated
GLANCE_S: Final = 0.05  # between looks who has come, while something is generated
MEANWHILE: Final = frozenset({"hello", "probe", "generate", "judge", "check"})  # what is answered while something is
LOOK_S: Final = 1.0  # between looks whether to end, while there is nothing to do
AT_ONCE: Final = 64  # who are let in at one look: the others at the next
COMPLAIN_S: Final = 60.0  # between two lines about strangers
CHECK: Final = "check"  # the key of a request that only shows that the engine works


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One finished answer. Example: Said(key="3/0:17", tokens=(3, 1, 11), logprobs=(-0.2, -1.1, -0.01), ended=True)"""

    key: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool


class Program(Protocol):
    """What generates."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Of the libraries that compute."""

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows, from 0 on: any other would end whatever computes it, and the process with it."""

    def load(self, home: Path, tag: Tag) -> None:
        """These weights, and nothing kept of the old ones. Torn if they cannot be had."""

    def add(self, key: str, request: Request, *, tokens: int | None = None) -> None:
        """One more to generate, of so many tokens if not as many as it is set to."""

    def drop(self, keys: Iterable[str]) -> None:
        """Nobody waits for these any more."""

    def step(self, alive: Callable[[], None]) -> Iterable[Said]:
        """Goes on a little. Calls `alive` now and then if it takes long. One that `tells` returns soon, and calls it
        only when it has seen that what generates is alive.
        """


@dataclass(slots=True, eq=False)
class Visitor:
    """One connection: what it still waits for, and what was not sent yet."""

    sock: socket.socket
    number: int
    inbox: Inbox = field(default_factory=Inbox)
    out: bytearray = field(default_factory=bytearray)
    waits: dict[str, str] = field(default_factory=dict)  # key -> the visitor's own id of the request
    gone: bool = False
    door: Door | None = None  # until it has proved that it is one of the job
    address: str = ""  # where it comes from, if that is another machine
    came: float = field(default_factory=time.monotonic)
    parting: bool = False  # gone as soon as it has been told why

    def tell(self, op: str, raw: bytes = b"", **says: object) -> None:
        """One frame, sent when there is room."""
        self.out += Frame(says={"op": op, **says}, raw=raw).pack(self.inbox.signer)


def the_key(file: str) -> bytes:
    """By which those who come from elsewhere are known. Unfit without one: an empty key would let anybody in."""
    try:
        key = load_key(Path(file))
    except (OSError, VaultError) as error:
        raise Unfit(f"the job's key cannot be read: {error}") from None
    if key is None:
        raise Unfit(f"the key file {file} is empty; this node's daemon writes it when it starts")
    return key


class Server:
    """The loop. `run` returns when it is time to end.

    Long because one loop serves all who ask, on two sockets, between the rows that it generates.
    """

    def __init__(self, program: Program, service: Service, home: Path, judges: Judges | None = None) -> None:
        self.program, self.service, self.home, self.judges = program, service, home, judges
        self.tag: Tag | None = None
        self._visitors: dict[str, Visitor] = {}  # by key of what they wait for
        self._cases: list[tuple[Visitor, int, Case]] = []  # to be judged, with the visitor's own id of each
        self._later: list[
            tuple[Visitor, Frame]
        ] = []  # what was asked while something is generated, and must wait for it
        self._hears = False  # also while something is generated
        self._all: set[Visitor] = set()
        self._count = self._made = 0
        self._complained = -COMPLAIN_S
        self._over = ""
        self._heard = self._alive_at = self._looked_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._port = 0
        self._key = the_key(service.key_file) if service.listen else b""
        self._intake = intake(home)  # of weights that somebody brings along

    def prove(self) -> None:
        """A real generation, before anybody is answered; and the weights that lie there, if they are whole. Torn if they do not
        fit this model.
        """
        from elasticrl.ppo.rollout import weights

        with socket.socket() as nobody:
            self._add_check(Visitor(nobody, 0))
            while self._visitors:
                self._step()
        found = weights.tag_of(self.home)
        if found is None or not weights.good(self.home, found):
            return
        try:
            self._load(found)
        except Lost as error:  # a trainer writes others, and will have them taken
            print(f"without weights: {error}", flush=True)
        except weights.Torn:
            if weights.tag_of(self.home) == found:
                weights.forget(self.home)  # or the next engine would end by them too
            raise

    def run(self) -> str:
        """Why it ended."""
        path = self.home / SOCKET
        path.unlink(missing_ok=True)
        with ExitStack() as stack:
            here = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            here.bind(str(path))
            path.chmod(0o600)
            self._listen(here, lambda: None)
            mine = path.stat().st_ino
            if self.service.listen:
                self._port = self._open_door(stack.enter_context(away(self.service.listen)))
            self._heard = time.monotonic()
            while not self._over:
                self._look()
                if self._busy:
                    self._hears = True
                    self._step()
                    self._hears = False
                    self._catch_up()
                elif time.monotonic() - self._heard > self.service.idle_s:
                    self._over = f"no trainer has spoken for {self.service.idle_s:g} s"
                elif not path.exists() or path.stat().st_ino != mine:
                    return "its folder was taken away"
        path.unlink(missing_ok=True)
        return self._over

    @property
    def _busy(self) -> bool:
        """Somebody waits for something."""
        return bool(self._visitors or self._cases)

    def _listen(self, sock: socket.socket, door: Callable[[], Door | None]) -> None:
        sock.listen(64)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, door)

    def _open_door(self, sock: socket.socket) -> int:
        """For those who know the job's key. The port."""
        service = self.service
        self._listen(sock, lambda: Door(job=service.job, node=service.node, key=self._key))
        return int(sock.getsockname()[1])

    # ---- visitors

    def _look(self) -> None:
        for visitor in self._all:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if visitor.out else 0)
            self._selector.modify(visitor.sock, wanted, visitor)
        for key, events in self._selector.select(0.0 if self._busy else LOOK_S):
            if not isinstance(key.data, Visitor):
                listening: socket.socket = key.fileobj  # type: ignore[assignment] # what was registered is one
                with suppress(OSError):  # all are in, or one has gone again
                    for _ in range(AT_ONCE):
                        sock, where = listening.accept()
                        self._let_in(sock, where, key.data())
            elif events & selectors.EVENT_READ and not key.data.gone:
                self._hear(key.data)
        for visitor in self._all:  # what they had said by now was read, however long the last look is ago
            late = time.monotonic() - visitor.came > HELLO_S
            visitor.gone |= late and (visitor.door is not None or visitor.parting)
        self._send()

    def _let_in(self, sock: socket.socket, where: Any, door: Door | None) -> None:
        sock.setblocking(False)
        self._count += 1
        visitor = Visitor(sock, self._count, door=door, address=where[0] if door else "")
        if door is not None:
            strangers = sorted((who for who in self._all if who.door and not who.gone), key=lambda who: who.number)
            late = put_out({who: who.address for who in strangers}, visitor.address)
            if late is not None:
                late.gone = True
        self._all.add(visitor)
        self._selector.register(sock, selectors.EVENT_READ, visitor)
        if door is not None:
            keep_alive(sock)
            visitor.inbox.limit = STRANGERS
            visitor.tell("challenge", **door.challenge())

    def _hear(self, visitor: Visitor) -> None:
        def read() -> None:
            data = visitor.sock.recv(1 << 20)
            visitor.gone = not data
            for frame in visitor.inbox.feed(data):
                if visitor.door is not None:
                    self._prove_it(visitor, visitor.door, frame)
                elif not visitor.parting:
                    self._heard = time.monotonic()
                    behind = any(other is visitor for other, _ in self._later)
                    if self._hears and (behind or frame.says["op"] not in MEANWHILE):
                        self._later.append((visitor, frame))
                    else:
                        self._answer(visitor, frame)

        self._try(visitor, read)

    def _catch_up(self) -> None:
        """With what came while something was generated."""
        later, self._later = self._later, []
        for visitor, frame in later:
            if visitor in self._all and not visitor.gone:
                self._try(visitor, partial(self._answer, visitor, frame))

    def _try(self, visitor: Visitor, work: Callable[[], None]) -> None:
        try:
            work()
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
            self._complain(f"visitor {visitor.number} makes no sense: {error!r}")
            visitor.gone = True
        except Exception:  # noqa: BLE001 - our own mistake, which must not end what all others wait for
            print(f"bug: visitor {visitor.number} was not answered\n{traceback.format_exc()}", flush=True)
            visitor.gone = True

    def _complain(self, said: str) -> None:
        """Once a minute: anybody may come again and again, and the log lies in memory, beside the weights."""
        now = time.monotonic()
        if now >= self._complained + COMPLAIN_S:
            self._complained = now
            print(said, flush=True)

    def _prove_it(self, visitor: Visitor, door: Door, frame: Frame) -> None:
        """A visitor from elsewhere says who it is."""
        visitor.door = None
        answer = door.answer(frame.says)
        if answer is None:
            self._complain(f"visitor {visitor.number} does not know the job's key")
            visitor.tell("no", kind="key", why=f"{door.node} says: the caller does not know the job's key")
            visitor.parting = True
            return
        signer, proof = answer
        visitor.tell("welcome", mac=proof)
        visitor.inbox.trust(signer)

    def _send(self) -> None:
        for visitor in list(self._all):
            with suppress(BlockingIOError):
                try:
                    while visitor.out and not visitor.gone:
                        del visitor.out[: visitor.sock.send(visitor.out)]
                except BlockingIOError:
                    pass
                except OSError:
                    visitor.gone = True
            if visitor.gone or (visitor.parting and not visitor.out):
                self._forget(visitor)

    def _forget(self, visitor: Visitor) -> None:
        self.program.drop(visitor.waits)
        for key in visitor.waits:
            del self._visitors[key]
        self._cases = [each for each in self._cases if each[0] is not visitor]
        self._intake.left(visitor.number)
        self._all.discard(visitor)
        self._selector.unregister(visitor.sock)
        visitor.sock.close()

    # ---- what they ask

    def _answer(self, visitor: Visitor, frame: Frame) -> None:
        says = frame.says
        if says.get("v") != PROTOCOL:
            visitor.tell("no", kind="other", why=f"this engine speaks version {PROTOCOL}, not {says.get('v')}")
        elif says["op"] == "hello":
            visitor.tell(
                "hello", v=PROTOCOL, pid=os.getpid(), service=self.service.digest, makes=self.service.makes,
                tag=self.tag and asdict(self.tag), versions=dict(self.program.versions), port=self._port,
                card=self.service.device.startswith("cuda"),
            )  # fmt: skip
        elif says["op"] == "probe":
            visitor.tell("probed")
        elif says["op"] in self._intake.ops:
            self._come(visitor, frame)
        elif says["op"] == "load":
            self._take(visitor, says["tag"])
        elif says["op"] == "generate":
            self._generate(visitor, frame)
        elif says["op"] == "judge" and self.judges is not None:
            self._cases.append((visitor, says["id"], self.judges.case(says["role"], frame.raw, says["shape"])))
        elif says["op"] == "check":
            self._add_check(visitor)
        elif says["op"] == "end":
            visitor.tell("ended")
            self._over = "it was told to"
            self._send()
        else:
            visitor.tell("no", kind="other", why=f"this engine does not know {says['op']!r}")

    def _take(self, visitor: Visitor, told: Mapping[str, Any]) -> None:
        from elasticrl.ppo.rollout import weights

        tag = weights.Tag(**told)
        if tag != self.tag:
            for other in {other for other in self._visitors.values() if CHECK not in other.waits.values()}:
                self.program.drop(other.waits)
                for key in other.waits:
                    del self._visitors[key]
                other.waits.clear()
                other.tell("no", kind="stale", why=f"weights of version {tag.version} came in the middle of this")
            while (
                self._visitors
            ):  # checks alone, of one token each: of what computes, something by the old weights would stay
                self._go_on()
            if weights.tag_of(self.home) != tag:
                visitor.tell(
                    "no", kind="torn", why=f"there are no whole weights of version {tag.version} in {self.home}"
                )
                return
            try:
                self._load(tag)
            except weights.Torn as error:
                visitor.tell("no", kind="torn", why=str(error))
                self._over = "its weights are half of two sets"
                self._send()
                return
            except Lost as error:  # somebody writes; nothing was read, and nobody is answered by no weights
                visitor.tell("no", kind="torn", why=str(error))
                return
        visitor.tell("loaded", tag=told)

    def _come(self, visitor: Visitor, frame: Frame) -> None:
        """Weights from another node."""
        from elasticrl.ppo.rollout.weights import Torn

        try:
            if self._intake.take(visitor.number, visitor.sock.getsockname()[0], frame):
                visitor.tell("stored")
        except (Torn, Lost) as error:
            visitor.tell("no", kind="torn", why=str(error))

    def _load(self, tag: Tag) -> None:
        self.tag = None  # half of two sets, until all of it is here
        start = time.monotonic()
        fresh = self.home / f"{LOADS}.new"
        fresh.write_text(f"{start}", encoding="ascii")
        fresh.rename(self.home / LOADS)
        try:
            self.program.load(self.home, tag)
        finally:
            (self.home / LOADS).unlink(missing_ok=True)
        self.tag = tag
        print(f"weights of version {tag.version} in {time.monotonic() - start:.3f} s", flush=True)

    def _generate(self, visitor: Visitor, frame: Frame) -> None:
        from elasticrl.ppo.rollout.engine import Draw, Request
        from elasticrl.ppo.rollout.weights import Tag

        says = frame.says
        asked = Tag(**says["tag"])
        if asked != self.tag:
            have = "none that are whole" if self.tag is None else f"{self.tag.version} of life {self.tag.life!r}"
            visitor.tell(
                "no", kind="stale", why=f"version {asked.version} of life {asked.life!r} was asked, it has {have}"
            )
            return
        at, requests = 0, list[Request]()
        columns = [says[column] for column in ("ids", "seeds", "lengths", "widths", "blocks", "draws")]
        for name, seed, length, width, block, draw in zip(*columns, strict=True):
            prompt = struct.unpack_from(f"<{length}i", frame.raw, 4 * at)
            at += length
            mine = (
                f"{visitor.number}/{block}" if block else ""
            )  # a lane may be asked for by two, one of whom is replaced
            its = None if draw is None else Draw(**draw)
            requests.append(Request(id=name, prompt=prompt, seed=seed, width=width, block=mine, draw=its))
        sampling = self.service.sampling
        for request in requests:
            fits, tokens = sampling.prompt_tokens, sampling.max_tokens
            if why := amiss(request, fits=fits, tokens=tokens, vocabulary=self.program.vocabulary):
                visitor.tell("no", kind="other", why=f"sample {request.id!r} cannot be generated: {why}")
                return
        for request in requests:
            key = f"{visitor.number}/{request.id}"
            visitor.waits[key] = request.id
            self._visitors[key] = visitor
            self.program.add(key, request)

    def _add_check(self, visitor: Visitor) -> None:
        from elasticrl.ppo.rollout.engine import Request

        key = f"{visitor.number}/{CHECK}"
        visitor.waits[key] = CHECK
        self._visitors[key] = visitor
        self.program.add(key, Request(id=CHECK, prompt=(self.service.sampling.pad,), seed=0), tokens=1)

    # ---- generating

    def _step(self) -> None:
        if self._cases:
            self._judge()
        if self._visitors:
            self._go_on()
        self._alive(told=not getattr(self.program, "tells", False))

    def _judge(self) -> None:
        """The oldest case."""
        assert self.judges is not None, "who has none takes no cases"
        first = visitor, name, case = self._cases[0]  # it stays there meanwhile: its visitor waits
        found = self.judges.judge(case, self._alive)
        if not self._cases or self._cases[0] is not first:
            return  # its visitor has gone
        del self._cases[0]
        visitor.tell("judged", found.contiguous().numpy().tobytes(), id=name, shape=list(found.shape))

    def _go_on(self) -> None:
        for said in self.program.step(self._alive):
            visitor = self._visitors.pop(said.key, None)
            if visitor is None:
                continue
            self._made += 1
            count = len(said.tokens)
            raw = struct.pack(f"<{count}i{count}f", *said.tokens, *said.logprobs)
            visitor.tell("sample", raw, id=visitor.waits.pop(said.key), ended=said.ended)

    def _alive(self, *, told: bool = True) -> None:
        """Whoever waits is told that it is not in vain, and whoever comes is heard: it would take us for dead."""
        now = time.monotonic()
        if self._hears and now - self._looked_at >= GLANCE_S:
            self._looked_at = now
            self._look()
        if not told or now - self._alive_at < ALIVE_S:
            return
        self._alive_at = self._heard = now
        for visitor in {
            *self._visitors.values(),
            *(case[0] for case in self._cases),
            *(asked[0] for asked in self._later),
        }:
            if len(visitor.out) < 1 << 20:
                visitor.tell("alive")
                with suppress(OSError):
                    del visitor.out[: visitor.sock.send(visitor.out)]


def amiss(request: Request, *, fits: int, tokens: int, vocabulary: int) -> str:
    """Why a request cannot be generated; "" if it can.

    >>> from elasticrl.ppo.rollout.engine import Request
    >>> amiss(Request(id="0/17", prompt=(3, 1, 16), seed=5), fits=7, tokens=4, vocabulary=16)
    "token 16 of its prompt is none of the model's 16: is the tokenizer that model's own?"
    """
    from elasticrl.ppo.rollout.engine import odd_draw

    if request.draw is not None and (why := odd_draw(request.draw, tokens)):
        return why
    if not 0 < len(request.prompt) <= fits:
        return f"its prompt has {len(request.prompt)} tokens, where 1 to {fits} fit"
    if type(request.width) is not int or (request.width and not len(request.prompt) <= request.width <= fits):
        return f"its width {request.width!r} is neither 0 nor {len(request.prompt)} to {fits}"
    if strange := [token for token in request.prompt if not 0 <= token < vocabulary]:
        return (
            f"token {strange[0]} of its prompt is none of the model's {vocabulary}: is the tokenizer that model's own?"
        )
    if type(request.seed) is not int or not 0 <= request.seed < 1 << 63:
        return f"its seed {request.seed!r} is no whole number of 63 bits"
    return ""


@contextmanager
def away(listen: str) -> Iterator[socket.socket]:
    """A TCP socket bound to that address."""
    host, port = split(listen)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        yield sock


def main() -> int:
    """One engine, to its end."""
    parser = argparse.ArgumentParser(description="A rollout engine, started by the trainer beside it.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--lock", type=int, required=True, help="the open file whose lock says that an engine is here")
    given = parser.parse_args()
    os.set_inheritable(given.lock, False)
    os.pwrite(given.lock, f"{os.getpid()}\n".encode(), 0)
    assert (given.home / ENGINE_LOCK).stat().st_ino == os.fstat(given.lock).st_ino
    service = Service.loads((given.home / SPEC).read_text(encoding="utf-8"))
    start = time.monotonic()
    from elasticrl.ppo.rollout import weights

    try:
        server = Server(program_of(service), service, given.home, judges_of(service))
    except Unfit as error:
        print(error, flush=True)
        return REFUSED
    try:
        server.prove()
    except weights.Torn as error:
        print(error, flush=True)
        return 1
    print(json.dumps({"ready_s": round(time.monotonic() - start, 2), **server.program.versions}), flush=True)
    why = server.run()
    print(f"ends: {why}", flush=True)
    weights.forget(given.home)
    return 0


def intake(home: Path) -> Intake:
    """Where weights from elsewhere come in."""
    from elasticrl.ppo.rollout.intake import Intake

    return Intake(home)


def program_of(service: Service) -> Program:
    """What the configuration asks for. Imports only that."""
    if service.program == "vllm":
        from elasticrl.ppo.rollout.vllm_process import VllmProgram

        return VllmProgram(service)
    if service.program == "server":
        from elasticrl.ppo.rollout.server_process import ServerProgram

        return ServerProgram(service)
    from elasticrl.ppo.rollout.torch_process import TorchProgram

    return TorchProgram(service)


def judges_of(service: Service) -> Judges | None:
    """The roles that live here, if there are any."""
    if not service.judges:
        return None
    from elasticrl.ppo.rollout.judges import Judges

    return Judges(service)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # whatever threads a library left
