"""A node tests the way to its partners, outside of the trainers: `python -m elasticrl.diagnose.probe TASK.json`.

The one idea: every node answers all the time and asks when it is its turn, so nobody has to be ready at the same moment. From
the bottom up: do datagrams arrive (and back), how late, how many, how large; does TCP connect and carry; do gloo and NCCL
compute. What a layer shows decides what is at fault, so TCP is tried where datagrams are lost; each has its deadline. What
takes seconds to import is tried where nothing below it is wrong.

The task is JSON (see `Task`); what was found goes to stdout as one JSON line for each partner (`pairs.Result`), and the exit
code is 0 whatever it is. Datagrams and connections bear the task's token: what does not is dropped.
"""

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, field, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from elasticrl.base.address import split
from elasticrl.base.parsed import parsed
from elasticrl.base.value import dataclass
from elasticrl.contract.pairs import LOSS, SLOW_MS, Result, result_of, schedule
from elasticrl.contract.partition import Pair
from elasticrl.diagnose.health import offset_s

PING, PONG, BYE = 1, 2, 3
HEAD: Final = struct.Struct("!4sB8s8sIdH")  # magic, kind, token, sender, number, the sender's clock, size of the ping
MAGIC: Final = b"elP2"
LATE, LEFT, STUCK, DIED = "late", "left", "the collectives did not come back in time", "the process that computes died"
LEAST_S: Final = 0.5  # with less than this left nothing further is begun
EVERY_S: Final = 0.01  # between datagrams
COUNT: Final = 100  # datagrams to measure with
DRAIN_S: Final = 1.0  # the longest that an answer to the last one is waited for
SIZES: Final = (9000, 8000, 4000, 2000, 1500, 1450, 1400, 1280, 1000, 576)  # of packets, beside the interface's own
JUMBO: Final = 9216  # no network that is not inside of one machine carries more
CHUNK: Final = 1 << 16
KEYS: Final = 1 << 24  # bytes of all keys by which two find each other: they need kilobytes
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE, IP_MTU = 10, 3, 14  # Linux; Python names them only since 3.14
BUSY: Final = 64  # connections served at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a node is asked to do. Durations are in seconds.

    Example: Task(me="n00", token="g14", nodes={"n00": "10.0.0.1:7700", "n01": "10.0.0.2:7700"}, within_s=10.0)
    """

    me: str
    token: str  # of this probe alone: what comes from another one is dropped
    nodes: Mapping[
        str, str
    ]  # name -> host:port, which is both TCP and UDP: itself and those that it tests, at the least
    rounds: tuple[
        tuple[Pair, ...], ...
    ] = ()  # empty: `pairs.schedule` of all nodes, which must be the same on all then
    within_s: float = 10.0  # all of it; what is not done by then is reported as not tested
    start_s: float = 4.0  # how long a partner is awaited that may not have started yet
    tcp_s: float = 1.5  # for a connection, and again for the transfer
    bytes: int = 16 << 20  # sent at most to measure bandwidth
    gloo_s: float = 4.0  # for both collectives; 0: no gloo
    facts: str = ""  # what this node says of itself to those who test it: versions, as JSON
    together: bool = (
        False  # a look at leisure: one pair at a time, gloo and NCCL along the ring, and all is told to all partners
    )
    nccl: str = "off"  # off; on, where there are GPUs; or stub:FILE, a JSON list of pairs that fail ("*" for any node)

    def __post_init__(self) -> None:
        """Refuse what could never work."""
        if self.me not in self.nodes:
            raise ValueError(
                f"the probe's task is for {self.me!r}, who is none of {', '.join(sorted(self.nodes))[:200]}"
            )

    @property
    def turns(self) -> tuple[tuple[Pair, ...], ...]:
        """The rounds, as all nodes compute them."""
        return self.rounds or schedule(self.nodes)

    @property
    def partners(self) -> tuple[str, ...]:
        """Those that this node tests, in the order of the rounds."""
        return self._met(self.turns)

    @property
    def near(self) -> tuple[str, ...]:
        """Those of them with whom it computes: of many pairs a ring, as that takes its time."""
        return self._met(schedule(self.nodes)) if self.together else self.partners

    def _met(self, turns: tuple[tuple[Pair, ...], ...]) -> tuple[str, ...]:
        mine = [pair for turn in turns for pair in turn if self.me in pair]
        return tuple(dict.fromkeys(b if a == self.me else a for a, b in mine))


def task_of(plain: object) -> Task:
    """A task from JSON; ValueError or TypeError if it is none."""
    if not isinstance(plain, dict):
        raise ValueError("it is no JSON object")
    rounds = tuple(tuple((str(a), str(b)) for a, b in turn) for turn in plain.get("rounds", ()))
    return Task(**{**plain, "rounds": rounds})


@dataclass(slots=True)
class Peer:
    """What is known of a partner while datagrams fly."""

    address: tuple[Any, ...]
    heard: int = 0
    asked: set[int] = field(default_factory=set)  # numbers of pings
    times: dict[int, float] = field(default_factory=dict)  # number of a ping -> seconds until its answer
    largest: int = 0  # packet that was answered
    left: bool = False


class Post:
    """This node's datagrams: one socket sends, hears and answers."""

    def __init__(self, task: Task, family: int, address: tuple[Any, ...]) -> None:
        self.task = task
        # By digests of their names: a node knows itself and its partners only, so numbers would mean others to others.
        self._names = {digest(name): name for name in task.nodes}
        self._me = digest(task.me)
        self._token = digest(task.token)
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET:
            # Don't fragment, and don't believe what routers said of the path: this is what is to be tested.
            self.socket.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        self.socket.bind(address)
        self.peers = {name: Peer(resolve(task.nodes[name])[1]) for name in task.nodes if name != task.me}
        self._numbers = count(1)  # several threads take from it
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, kind: int, peer: str, number: int = 0, size: int = 0, clock: float | None = None) -> bool:
        """One datagram of `size` bytes, headers of IP and UDP included; False if the kernel refuses (too large, no route)."""
        body = HEAD.pack(
            MAGIC, kind, self._token, self._me, number,
            time.monotonic() if clock is None else clock, size,
        )  # fmt: skip
        try:
            self.socket.sendto(body.ljust(size - 28, b"\0"), self.peers[peer].address)
        except OSError:
            return False
        return True

    def ping(self, peer: str, size: int = 0) -> int:
        """Its number."""
        number = next(self._numbers)
        self.peers[peer].asked.add(number)
        self.send(PING, peer, number, size)
        return number

    def _listen(self) -> None:
        while True:
            try:
                data, _ = self.socket.recvfrom(1 << 16)
            except OSError:
                return
            if len(data) < HEAD.size:
                continue
            magic, kind, token, sender, number, clock, _ = HEAD.unpack_from(data)
            name = self._names.get(sender)
            if magic != MAGIC or token != self._token or name not in self.peers:
                continue
            peer = self.peers[name]
            if kind == PING:
                peer.heard += 1
                self.send(PONG, name, number, clock=clock)
            elif kind == PONG and number in peer.asked:
                peer.times.setdefault(number, time.monotonic() - clock)
            elif kind == BYE:
                peer.left = True

    def measure(self, peer: str) -> Result:
        """Reach, latency, loss and size of packets, from the first answer on."""
        known, start = self.peers[peer], time.monotonic()
        result = Result(node=self.task.me, peer=peer)
        while not known.times and time.monotonic() - start < self.task.start_s:
            self.ping(peer)
            time.sleep(EVERY_S)
        if not known.times:
            return replace(result, heard=known.heard)
        numbers = set()
        for _ in range(COUNT):
            numbers.add(self.ping(peer))
            time.sleep(EVERY_S)
        self._drain(peer, numbers)
        times = sorted(known.times[number] * 1000 for number in numbers if number in known.times)
        mtu, largest = self._sizes(peer, times[-1] / 1000 if times else DRAIN_S)
        return replace(
            result, sent=COUNT, answered=len(times), heard=known.heard, mtu=mtu, largest=largest,
            latency_ms=round(median(times), 3) if times else None,
            p99_ms=round(quantiles(times, n=100)[98], 3) if len(times) > 1 else None,
        )  # fmt: skip

    def _drain(self, peer: str, numbers: set[int]) -> None:
        deadline = time.monotonic() + DRAIN_S
        while not numbers <= set(self.peers[peer].times) and time.monotonic() < deadline:
            time.sleep(EVERY_S)

    def _sizes(self, peer: str, slowest_s: float) -> tuple[int | None, int | None]:
        """What the interface says a packet may have, and the largest that was answered."""
        mtu = mtu_towards(self.peers[peer].address, self.socket.family)
        if mtu is None:
            return None, None
        mtu = min(mtu, JUMBO)
        sizes = sorted({mtu, *(size for size in SIZES if size < mtu)}, reverse=True)
        asked: dict[int, set[int]] = {size: set() for size in sizes}
        for size in sizes * 3:  # one by one: a burst would overflow the peer's buffer, and look like a black hole
            asked[size].add(self.ping(peer, size))
            time.sleep(EVERY_S / 2)
        deadline = time.monotonic() + min(DRAIN_S, max(0.2, 2 * slowest_s))
        while time.monotonic() < deadline and not asked[sizes[0]] & set(self.peers[peer].times):
            time.sleep(EVERY_S)
        answered = [size for size in sizes if asked[size] & set(self.peers[peer].times)]
        return mtu, max(answered, default=None)


class Port:
    """This node's connections: it receives bytes and counts them, and keeps the keys by which gloo finds itself."""

    def __init__(self, task: Task, family: int, address: tuple[Any, ...]) -> None:
        self._token = digest(task.token)
        self.keys: dict[str, bytes] = {}
        self._room = threading.Semaphore(BUSY)
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(address)
        self.listener.listen(BUSY)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._one, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _one(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(10.0)
                if receive(connection, 8) != self._token:
                    return
                kind = receive(connection, 1)
                if kind == b"B":
                    self._count(connection)
                elif kind == b"K":
                    self._key(connection)
        finally:
            self._room.release()

    def _count(self, connection: socket.socket) -> None:
        total, begin = 0, time.monotonic()
        while data := connection.recv(CHUNK):
            total += len(data)
        connection.sendall(struct.pack("!Qd", total, time.monotonic() - begin))

    def _key(self, connection: socket.socket) -> None:
        """Set (a value follows) or get (nothing does); the answer is the value, or nothing if there is none."""
        key = receive(connection, struct.unpack("!H", receive(connection, 2))[0]).decode()
        (size,) = struct.unpack("!i", receive(connection, 4))
        if 0 <= size <= CHUNK:
            given = receive(connection, size)
            if key in self.keys or sum(map(len, self.keys.values())) + len(self.keys) * (1 << 10) < KEYS:
                self.keys[key] = given
        value = struct.pack("!d", time.time()) if key == "clock" else self.keys.get(key)
        connection.sendall(struct.pack("!i", -1 if value is None else len(value)) + (value or b""))


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the peer closed the connection")
        data += more
    return data


def digest(token: str) -> bytes:
    """What datagrams and connections bear."""
    return blake2b(token.encode(), digest_size=8).digest()


def resolve(endpoint: str) -> tuple[int, tuple[Any, ...]]:
    """host:port as (family, address)."""
    family, _, _, _, address = socket.getaddrinfo(*split(endpoint), type=socket.SOCK_DGRAM)[0]
    return family, address


def mtu_towards(address: tuple[Any, ...], family: int) -> int | None:
    """What the kernel would send in one piece."""
    if family != socket.AF_INET:
        return None
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(address)
            return int(sock.getsockopt(socket.IPPROTO_IP, IP_MTU))
        except OSError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What became of one connection: "ok", or what happened."""

    said: str
    mbps: float | None = None
    refused: bool = False
    begun: bool = False


def transfer(task: Task, peer: str) -> Transfer:
    """Whether TCP connects and carries, and how fast."""
    family, address = resolve(task.nodes[peer])
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(task.tcp_s)
        try:
            sock.connect(address)
        except OSError as error:
            return Transfer(
                said=f"connect: {error.strerror or error}", refused=isinstance(error, ConnectionRefusedError)
            )
        sent, begin = 0, time.monotonic()
        try:
            sock.sendall(digest(task.token) + b"B")
            chunk = bytes(CHUNK)
            while sent < task.bytes and time.monotonic() - begin < task.tcp_s / 2:
                sock.settimeout(max(0.01, begin + task.tcp_s - time.monotonic()))
                sent += sock.send(chunk)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(max(0.05, begin + 2 * task.tcp_s - time.monotonic()))
            total, _ = struct.unpack("!Qd", receive(sock, 16))
        except (OSError, struct.error) as error:
            return Transfer(said=f"stalled after at most {sent} bytes: {error}", begun=True)
        # The sender's clock: the receiver's may begin late, and a buffer that is not empty yet would count as sent.
        return Transfer(said="ok", mbps=round(total * 8 / max(time.monotonic() - begin, 1e-6) / 1e6, 1))


def stubbed(task: Task, peer: str) -> str | None:
    """What stands for the round over NCCL where there is no GPU: a file names the pairs that fail, and is read by the node
    that tests. None without it.
    """
    if not task.nccl.startswith("stub:"):
        return None
    broken = parsed(Path(task.nccl.removeprefix("stub:")).read_text(encoding="utf-8"))
    here = {task.me, peer}
    fails = any(set(pair) == here or ("*" in pair and set(pair) - {"*"} <= here) for pair in broken)
    return "stub: ncclRemoteError" if fails else "ok"


def run(task: Task, say: Callable[[Result], None]) -> None:
    """Test all partners; tell each result when it is complete. Ends within `within_s`."""
    began = time.monotonic()
    deadline = began + task.within_s
    family, address = resolve(task.nodes[task.me])
    port = Port(task, family, address)
    port.keys["facts"] = task.facts.encode()[:CHUNK]
    post = Post(task, family, address)
    results: dict[str, Result] = {}
    computing = Computing(task) if task.gloo_s else None
    asking = [
        threading.Thread(target=lambda peer=peer: results.update({peer: post.measure(peer)}), daemon=True)
        for peer in task.partners
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(max(0.0, deadline - time.monotonic()))
    for peer in task.partners:
        if task.together and post.peers[peer].times:
            meet(task, peer, min(deadline, time.monotonic() + 4 * task.tcp_s))
        results[peer] = _stream(task, post, results.get(peer) or Result(node=task.me, peer=peer), deadline)
    told = shared(task, post, port, results, "measured", time.monotonic() + 4 * task.tcp_s) if task.together else {}
    sound = computing is not None and _over_gloo(task, computing, post, results, deadline)
    for peer in task.partners:
        if computing is not None and sound and task.nccl == "on" and peer in task.near:
            results[peer] = _over_nccl(task, computing, post, results[peer], deadline)
        say(results[peer])
    if computing is not None:
        computing.close()
    if task.together:
        told |= shared(task, post, port, results, "computed", deadline - LEAST_S)
    for row in told.values():
        for result in row:
            say(result)
    _stay(task, post, deadline)


def _stay(task: Task, post: Post, deadline: float) -> None:
    """Answer those that are not done with us."""
    for peer in task.partners:
        post.send(BYE, peer)
    while time.monotonic() < deadline and not all(
        post.peers[peer].left for peer in task.partners if post.peers[peer].heard
    ):
        for peer in task.partners:
            post.send(BYE, peer)
        time.sleep(10 * EVERY_S)


def _over_gloo(task: Task, computing: "Computing", post: Post, results: dict[str, Result], deadline: float) -> bool:
    """Last, because it is slow and needs both ends at once; in the order of the rounds, or two would wait for each other. Where
    something below it is found wrong, it would say nothing new, and a gang waits for what is known already. True: all is well.
    """
    sound = all(results[peer].tcp == "ok" and not _lame(results[peer]) for peer in task.near)
    for peer in task.near:
        left_s = deadline - time.monotonic()
        if sound and left_s > LEAST_S:
            said = computing.ask("gloo", peer, min(2 * task.gloo_s, left_s), post.peers[peer])
            results[peer] = replace(results[peer], gloo=said)
    return sound and all(results[peer].gloo == "ok" for peer in task.near)


def _over_nccl(task: Task, computing: "Computing", post: Post, result: Result, deadline: float) -> Result:
    left_s = deadline - time.monotonic()
    if left_s <= LEAST_S:
        return result
    said = computing.ask("nccl", result.peer, min(2 * task.gloo_s, left_s), post.peers[result.peer])
    well, _, way = (said or "").partition(" ")
    return replace(result, nccl="ok" if well == "ok" else said, transport=way if well == "ok" else "")


def meet(task: Task, peer: str, deadline: float) -> None:
    """Wait until the partner is at our pair too. All go through the pairs in the order of rounds, so nobody waits in a ring,
    and no third one's bytes share the way with ours. Who does not come is tested all the same.
    """
    owner, names = min(task.me, peer), "/".join(sorted((task.me, peer)))
    with contextlib.suppress(OSError):
        ask_key(task, owner, f"here/{names}/{task.me}", b"1")
        while ask_key(task, owner, f"here/{names}/{peer}") is None and time.monotonic() < deadline:
            time.sleep(EVERY_S)


def shared(
    task: Task, post: Post, port: Port, results: Mapping[str, Result], key: str, deadline: float
) -> dict[str, tuple[Result, ...]]:
    """Tell the partners what was found up to here, and hear what they have; each speaks for itself."""
    port.keys[key] = json.dumps([replace(result, facts="").plain() for result in results.values()]).encode()
    found: dict[str, tuple[Result, ...]] = {}
    for peer in task.partners:
        with contextlib.suppress(OSError, ValueError):
            row = ask_key(task, peer, key) if post.peers[peer].times else b"[]"
            while row is None and time.monotonic() < deadline:
                time.sleep(10 * EVERY_S)
                row = ask_key(task, peer, key)
            said = tuple(result for plain in parsed(row or b"[]") if (result := result_of(plain)).node == peer)
            found |= {peer: said} if said else {}
    return found


def _stream(task: Task, post: Post, result: Result, deadline: float) -> Result:
    """What datagrams have shown, and what TCP does beside it."""
    peer = result.peer
    result = replace(result, heard=max(result.heard, post.peers[peer].heard))
    left_s = deadline - time.monotonic()
    if left_s < LEAST_S or _hole(result):
        return result  # not tested: a stream would only wait for what vanishes, and that is what takes time
    hurried = replace(task, tcp_s=min(task.tcp_s, left_s / 3))
    done = transfer(hurried, peer)
    if done.said == "ok":
        offset, facts = acquaint(hurried, peer)
        result = replace(result, nccl=stubbed(task, peer), offset_s=offset, facts=facts)
    return replace(result, tcp=done.said, mbps=done.mbps, refused=done.refused, begun=done.begun)


def _hole(result: Result) -> bool:
    """Do large packets vanish?"""
    return bool(result.mtu and result.largest and result.largest < result.mtu)


def _lame(result: Result) -> bool:
    """Packets are lost, or take long."""
    return result.loss > LOSS or (result.latency_ms or 0.0) > 2 * SLOW_MS


def ask_key(task: Task, owner: str, key: str, value: bytes | None = None) -> bytes | None:
    """Get, or set, a key at a node's port."""
    with socket.create_connection(resolve(task.nodes[owner])[1][:2], timeout=task.tcp_s) as sock:
        name = key.encode()
        head = struct.pack("!H", len(name)) + name + struct.pack("!i", -1 if value is None else len(value))
        sock.sendall(digest(task.token) + b"K" + head + (value or b""))
        (size,) = struct.unpack("!i", receive(sock, 4))
        if size > CHUNK:
            raise ConnectionError(f"{owner} answers with {size} bytes")
        return None if size < 0 else receive(sock, size)


def acquaint(task: Task, peer: str) -> tuple[float | None, str]:
    """How far the partner's clock is off, by the quickest of three answers, and what it says of itself."""
    best: tuple[float, float] | None = None
    try:
        for _ in range(3):
            asked, begin = time.time(), time.monotonic()
            answer = ask_key(task, peer, "clock")
            took_s = time.monotonic() - begin
            if answer is not None and len(answer) == 8 and (best is None or took_s < best[0]):
                best = took_s, offset_s(asked, struct.unpack("!d", answer)[0], asked + took_s)
        facts = ask_key(task, peer, "facts") or b""
    except OSError:
        return (best[1] if best else None), ""
    return (round(best[1], 4) if best else None), facts.decode(errors="replace")


class Computing:
    """The process that imports torch and computes: importing holds the GIL for seconds, and late answers look like loss."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "elasticrl.diagnose.probe_torch"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        self._ready = False
        plain = {**asdict(self._task), "nodes": dict(self._task.nodes)}
        print(json.dumps(plain), file=process.stdin, flush=True)
        return process

    def ask(self, carrier: str, peer: str, within_s: float, known: Peer) -> str | None:
        """How the collectives with this partner went; None if one of the two was not ready in time, or is done with its part,
        which proves nothing.
        """
        answer: list[str] = []
        thread = threading.Thread(target=lambda: answer.append(self._say(carrier, peer, within_s)), daemon=True)
        thread.start()
        deadline = time.monotonic() + within_s + self._task.gloo_s
        while not answer and not known.left and time.monotonic() < deadline:
            thread.join(10 * EVERY_S)
        thread.join(EVERY_S)
        said = answer[0] if answer else LEFT if known.left else STUCK
        if said in {STUCK, DIED, LEFT}:
            self.close()
            self._process = self._start()
        return None if said in {LATE, LEFT} else said

    def _say(self, carrier: str, peer: str, within_s: float) -> str:
        """Ask, and wait: for its import (`ready`, the first time), then for the answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        begin = time.monotonic()
        try:
            if not self._ready:
                self._ready = stdout.readline() == "ready\n"
            left_s = within_s - (time.monotonic() - begin)
            if left_s <= 0:
                return LATE
            print(f"{carrier} {left_s} {peer}", file=stdin, flush=True)
            return stdout.readline().strip() or DIED
        except (OSError, ValueError):
            return DIED

    def close(self) -> None:
        """End it, stuck or not."""
        self._process.kill()
        self._process.wait()


def main(arguments: list[str]) -> None:
    """The program. Reads the task from a file, or from stdin for "-"."""
    text = sys.stdin.read() if arguments in ([], ["-"]) else Path(arguments[0]).read_text(encoding="utf-8")
    try:
        task = task_of(parsed(text))
    except (ValueError, TypeError) as error:
        print(f"this is no task for a probe: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run(task, lambda result: print(json.dumps(result.plain()), flush=True))
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
