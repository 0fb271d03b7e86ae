"""The same scenarios on hosts of one's own, over ssh: `python -m chaos.run live --hosts hosts.yaml`, first with `--dry-run`.

The one idea: on a host each fault is one script, its undoing another, its proof a third, so a dry run can print all that would
be done. Whatever is to be undone, the host undoes by itself too after a while: a driver that loses its way leaves no host cut
off, and no process stopped.

The job is one's own, under its daemons as ever. What is judged is what an outsider sees in the store: faults struck, steps came
again within their budgets, generations and commits only rose, all nodes train in the end.
"""

import asyncio
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import TypeAdapter, ValidationError

from chaos.faults import Fault, holder
from chaos.live.checks import AFTER_S, BLOCKING, BUDGETS
from chaos.scenario import Scenario, Unusable
from elasticrl.base.address import split
from elasticrl.contract.model import Record
from elasticrl.daemon.outside import look
from elasticrl.shell import keys
from elasticrl.shell.keys import namespace
from elasticrl.store import StoreError, StoreSettings, open_store

NOT_NOW, NO_EFFECT = 9, 8  # exit codes of a script: there is nobody to strike; it was struck, and nothing came of it
SCRIPT_S = 60.0  # for a script on a host
GUARD_S = 60.0  # beyond a fault's own time, until its host undoes it by itself
REST_S = 5.0  # without a word from the driver, before a fault that has no time of its own is over
LAG_S = 12.0  # records in the store say how far a node is only now and then
LOOK_S = 0.5

#: Whom to look for among a host's processes. The brackets keep a pattern from finding the script that it stands in.
PATTERNS: Final[Mapping[str, str]] = {
    "daemon": r"[e]lasticrl(\.cli\.main)? daemon ",
    "agent": r"-m [e]lasticrl\.agent |[e]lasticrl agent ",
    "vault": r"-m [e]lasticrl\.runtime\.vault",
}
SIGNALS: Final[Mapping[str, tuple[str, str]]] = {
    "kill_worker": ("worker", "KILL"), "term_worker": ("worker", "TERM"), "stop_worker": ("worker", "STOP"),
    "kill_agent": ("agent", "KILL"), "pause_agent": ("agent", "STOP"),
    "kill_daemon": ("daemon", "KILL"), "term_daemon": ("daemon", "TERM"), "pause_daemon": ("daemon", "STOP"),
    "kill_vault": ("vault", "KILL"), "term_vault": ("vault", "TERM"), "pause_vault": ("vault", "STOP"),
}  # fmt: skip
CUTS: Final = frozenset(
    [
        "isolate",
        "leader_alone",
        "link_down",
        "cut_link",
        "cut_store",
        "store_alone",
        "partition",
        "lossy_node",
        "mtu_hole",
    ]
)
ASKED: Final = frozenset(["drain", "drain_and_back", "pause"])
KNOWN: Final = frozenset([*SIGNALS, *CUTS, *ASKED, "kill_node"])

PROLOGUE: Final = """
alive() { test -d /proc/$1 && ! grep -q '^State:.[ZX]' /proc/$1/status; }
gone() { for i in $(seq 100); do alive $1 || return 0; sleep 0.1; done; return 1; }
of() { { tr '\\0' ' ' < /proc/$1/cmdline; ls -l /proc/$1/fd; cat /proc/$1/maps; } 2> /dev/null | grep -qE -- "$2"; }
""".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The cluster, as its file has it.

    Example: Hosts(job="ppo-staging", store=("http://10.0.0.1:2379",), hosts={"n00": "10.0.0.10", "n01": "10.0.0.11"})
    """

    job: str
    store: tuple[str, ...]
    hosts: Mapping[str, str]  # a node's name in the job, and where it is reached
    shell: str = "ssh -o BatchMode=yes -o ConnectTimeout=5 root@{host} -- {command}"
    start: str = "systemctl start elasticrl"  # a daemon that has ended
    command: str = "elasticrl"
    keep: tuple[int, ...] = (22,)  # TCP ports that no cable's fault touches
    factor: float = 1.0  # of all budgets


def load(path: Path) -> Hosts:
    """From its file; Unusable with all that is wrong."""
    try:
        return TypeAdapter(Hosts).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise Unusable(f"{path}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to do on one host. Empty scripts are not run."""

    node: str
    do: str
    undo: str = ""
    proof: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the job when a fault strikes."""

    rows: tuple[Mapping[str, Any], ...]  # of the picture
    addresses: Mapping[str, str]  # by node, as peers reach it


def orders(hosts: Hosts, fault: Fault, known: Known, number: int) -> list[Order]:
    """The scripts of a fault; none, if it cannot be done now."""
    node = whom(fault.node, known, hosts)
    guard = (fault.for_s or REST_S) + GUARD_S
    if fault.kind in SIGNALS:
        return [signalled(hosts, fault, node, guard)] if node else []
    if fault.kind == "kill_node":
        return [Order(node=node, do=all_killed(hosts, node), undo=hosts.start)] if node else []
    if fault.kind == "pause":
        first, job = min(hosts.hosts), f"--job {shlex.quote(hosts.job)}"
        return [
            Order(node=first, do=f"{hosts.command} pause --yes {job}", undo=f"{hosts.command} resume {job}"),
        ]
    if fault.kind in ASKED:
        drained = f"{hosts.command} drain {shlex.quote(node)} --yes --force --job {shlex.quote(hosts.job)}"
        return [Order(node=node, do=drained, undo=hosts.start)] if node else []
    return cut(hosts, fault, node, known, number, guard)


def whom(role: str, known: Known, hosts: Hosts) -> str:
    """The node of a role or name; empty if there is none that the file has."""
    seated = [row["node"] for row in sorted(known.rows, key=lambda row: row["rank"] or 0) if row["rank"] is not None]
    leader = next((row["node"] for row in known.rows if row["leader"]), "")
    spares = [row["node"] for row in known.rows if row["state"] == "spare"]
    if role not in hosts.hosts and role[1:].isdigit():  # n2 of a scenario: the third of the file
        return next(iter(sorted(hosts.hosts)[int(role[1:]) :]), "")
    found = holder(role, seats=seated, leader=leader, spares=spares)
    return found if found in hosts.hosts else ""


def find(hosts: Hosts, node: str, what: str) -> str:
    """A command that prints process numbers: of this job's, which has folders of its own, as other jobs may run there too."""
    if what != "worker":
        mine = shlex.quote(f"/{hosts.job}/{node}(/| |$)".replace(".", r"\."))
        return f"for p in $(pgrep -f -- {shlex.quote(PATTERNS[what])}); do of $p {mine} && echo $p; done"
    rows = "import json,sys; print(*[row['pid'] for row in json.load(sys.stdin) if row['pid']], sep='\\n')"
    return f"{hosts.command} top --job {shlex.quote(hosts.job)} --json | python3 -c {shlex.quote(rows)}"


def signalled(hosts: Hosts, fault: Fault, node: str, guard: float) -> Order:
    """A signal to one process, and proof that it took."""
    what, name = SIGNALS[fault.kind]
    begin = f'{PROLOGUE}\np="$({find(hosts, node, what)} | head -n 1)"; test -n "$p" || exit {NOT_NOW}; kill -{name} $p'
    if name == "STOP":
        stands = "for i in $(seq 50); do grep -q '^State:.T' /proc/$p/status && break; sleep 0.1; done"
        later = f"setsid -f sh -c 'sleep {guard:g}; kill -CONT '$p > /dev/null 2>&1 < /dev/null"
        note = f"echo $p > /tmp/elasticrl-chaos-{what}"
        undo = f"kill -CONT $(cat /tmp/elasticrl-chaos-{what}); rm -f /tmp/elasticrl-chaos-{what}"
        test = f"grep -q '^State:.T' /proc/$p/status || exit {NO_EFFECT}"
        return Order(node=node, do=f"{begin}; {later}; {note}\n{stands}; {test}", undo=undo)
    back = hosts.start if what == "daemon" else ""
    return Order(node=node, do=f"{begin}\ngone $p || exit {NO_EFFECT}", undo=back)


def all_killed(hosts: Hosts, node: str) -> str:
    """Every process of a node at once, the daemon first."""
    every = "; ".join(f'k="$k $({find(hosts, node, what)})"' for what in ("daemon", "vault", "agent", "worker"))
    left = f'sleep 0.5; test -z "$({find(hosts, node, "agent")})" || exit {NO_EFFECT}'
    return f"{PROLOGUE}\nk=; {every}; kill -KILL $k 2> /dev/null; {left}; exit 0"


def cut(hosts: Hosts, fault: Fault, node: str, known: Known, number: int, guard: float) -> list[Order]:
    """Rules that drop frames, on each host that they befall; each counts what it has dropped."""
    stores = sorted({split(endpoint.split("//", 1)[-1])[0] for endpoint in hosts.store})
    others = [address for name, address in sorted(known.addresses.items()) if name != node]
    names = sorted(known.addresses.keys() & hosts.hosts.keys())
    extra = ""
    match fault.kind:
        case "isolate":
            plan = {node: others}
        case "leader_alone" | "link_down":
            plan = {node: [*others, *stores]}
        case "lossy_node":
            plan = {node: others}
            extra = f"numgen random mod 1000 < {int(1000 * min(0.9, fault.value or 0.2))} "
        case "mtu_hole":
            plan = {node: others}
            extra = f"meta length gt {int(fault.value or 600)} "
        case "cut_link":
            peer = whom(fault.peer, known, hosts)
            peer = peer if peer != node else next((name for name in names if name != node), "")
            plan = {node: [known.addresses[peer]] if peer in known.addresses else []}
        case "cut_store":
            plan = {node: stores}
        case "store_alone":
            plan = dict.fromkeys(names, stores)
        case _:
            half = names[: len(names) // 2]
            plan = {name: [known.addresses[other] for other in names if other not in half] for name in half}
    table = f"inet elasticrl_chaos_{number}"
    return [
        Order(
            node=name,
            do=dropping(table, addresses, extra, fault.way, hosts.keep, guard),
            undo=f"nft delete table {table}",
            proof=f"nft list table {table} | grep -q 'packets [1-9]' || exit {NO_EFFECT}",
        )
        for name, addresses in plan.items()
        if name and addresses
    ]


def dropping(table: str, addresses: Sequence[str], extra: str, way: str, keep: Sequence[int], guard: float) -> str:
    """The rules, whose host takes them back by itself after a while."""
    lines = [f"nft add table {table}"]
    ports = ", ".join(map(str, keep))
    for chain, side, port in (("input", "saddr", "dport"), ("output", "daddr", "sport")):
        if way == ("out" if chain == "input" else "in"):
            continue
        hook = f"{{ type filter hook {chain} priority -10; }}"
        lines.append(f"nft add chain {table} {chain} {shlex.quote(hook)}")
        if ports:
            lines.append(f"nft add rule {table} {chain} tcp {port} {shlex.quote(f'{{ {ports} }}')} accept")
        for address in addresses:
            family = "ip6" if ":" in address else "ip"
            rule = f"{family} {side} {address} {extra}counter drop"
            lines.append(f"nft add rule {table} {chain} {shlex.quote(rule)}")
    later = f"setsid -f sh -c 'sleep {guard:g}; nft delete table {table}' > /dev/null 2>&1 < /dev/null"
    return "set -e\n" + "\n".join([*lines, later])


def why_not(scenario: Scenario) -> str:
    """Why a scenario cannot be run on hosts; empty if it can."""
    unknown = sorted({fault.kind for fault in scenario.faults} - KNOWN)
    if unknown:
        return f"hosts have no {', '.join(unknown)}"
    if any(fault.when for fault in scenario.faults):
        return "a place in a step is known to the lab's own job alone"
    return "" if scenario.faults else "nothing goes wrong in it"


@dataclass(slots=True)
class Seen:
    """What was seen of the job over time."""

    steps: list[tuple[float, int]] = field(default_factory=list)  # when each new one was seen first
    generation: int = 0
    committed: int = 0
    wrong: list[str] = field(default_factory=list)

    def take(self, at: float, picture: Mapping[str, Any]) -> None:
        """One look."""
        for what in ("generation", "committed"):
            if picture[what] < getattr(self, what):
                self.wrong.append(f"{what} fell from {getattr(self, what)} to {picture[what]}")
            setattr(self, what, max(getattr(self, what), picture[what]))
        if not self.steps or picture["step"] > self.steps[-1][1]:
            self.steps.append((at, picture["step"]))

    def late(self, fault: Fault, begun: float, factor: float) -> str:
        """Why steps did not come in time after a fault; empty if they did."""
        budget = budget_s(fault, factor)
        after = [at for at, _ in self.steps if at > begun]
        if after and after[0] - begun <= budget:
            return ""
        came = f"after {after[0] - begun:.1f} s" if after else "never"
        return f"{fault.kind}: the next steps came {came}, the budget is {budget:g} s"


def budget_s(fault: Fault, factor: float) -> float:
    """How long it may take until new steps are seen."""
    return BUDGETS.get(fault.kind, AFTER_S) * factor + LAG_S


class Tour:
    """Plays scenarios on hosts. `say` gets lines; with `dry` nothing is done but said."""

    def __init__(self, hosts: Hosts, *, say: Callable[[str], None], dry: bool = False) -> None:
        self.hosts, self.say, self.dry = hosts, say, dry
        self.seen = Seen()
        self.failed: list[str] = []
        self.struck = 0
        self._number = 0

    def play(self, scenarios: Iterable[Scenario]) -> int:
        """All of them; the exit code."""
        for scenario in scenarios:
            if why := why_not(scenario):
                self.say(f"{scenario.name}: left out: {why}")
                continue
            self.say(f"{scenario.name}: {scenario.about}")
            before = len(self.failed)
            if self.dry:
                self._tell(scenario)
                continue
            self._one(scenario)
            self.failed += [f"{scenario.name}: {what}" for what in self.seen.wrong]
            self.seen.wrong = []
            self.say(
                "  ok" if len(self.failed) == before else "\n".join(f"  VIOLATION  {w}" for w in self.failed[before:])
            )
        self.say(
            f"{self.struck} faults struck; " + (f"{len(self.failed)} violations" if self.failed else "no violation")
        )
        return 1 if self.failed else 0

    def _tell(self, scenario: Scenario) -> None:
        rows = tuple(
            {"node": node, "rank": rank, "leader": rank == 0, "state": "training"}
            for rank, node in enumerate(sorted(self.hosts.hosts))
        )
        known = Known(rows=rows, addresses=dict(self.hosts.hosts))
        for fault in scenario.faults:
            for order in orders(self.hosts, fault, known, self._number):
                for word, script in (("do", order.do), ("proof", order.proof), ("undo", order.undo)):
                    if script:
                        self.say(
                            f"  {fault.kind} at {fault.at:g} s, {word}: {' '.join(self._command(order.node, script))}"
                        )
            self._number += 1

    def _one(self, scenario: Scenario) -> None:
        if not self._well(scenario.liveness_s):
            self.failed.append(f"{scenario.name}: not all nodes train, before anything was done")
            return
        begun = time.monotonic()
        undo: list[tuple[float, Fault, list[Order]]] = []
        over: list[tuple[Fault, float]] = []  # and since when steps are due
        waiting = sorted(scenario.faults, key=lambda fault: fault.at or 0.0)
        while waiting or undo:
            now = time.monotonic() - begun
            while waiting and (waiting[0].at or 0.0) <= now:
                fault = waiting.pop(0)
                done = self._strike(scenario, fault)
                if done:
                    undo.append((now + (fault.for_s or 0.0), fault, done))
                    over.append((fault, time.monotonic()))
            for entry in [entry for entry in undo if entry[0] <= now]:
                undo.remove(entry)
                _, fault, done = entry
                self._undo(scenario, fault, done)
                if fault.kind in BLOCKING:
                    over = [(one, time.monotonic() if one is fault else at) for one, at in over]
            self._look()
            time.sleep(LOOK_S)  # between looks at the job, until the next fault is due or over
        well = self._well(scenario.liveness_s)
        factor = self.hosts.factor
        while any(
            self.seen.late(fault, at, factor) and time.monotonic() < at + budget_s(fault, factor) for fault, at in over
        ):
            self._look()
            time.sleep(LOOK_S)  # a record says how far it is now and then; a budget ends the waiting
        late = [said for fault, at in over if (said := self.seen.late(fault, at, self.hosts.factor))]
        self.failed += [f"{scenario.name}: {said}" for said in late]
        if not well:
            self.failed.append(
                f"{scenario.name}: not all nodes train {scenario.liveness_s:g} s after the last fault was over"
            )

    def _strike(self, scenario: Scenario, fault: Fault) -> list[Order]:
        known = self._known()
        done: list[Order] = []
        self._number += 1
        for order in orders(self.hosts, fault, known, self._number) if known else []:
            code, said = self._run(order.node, order.do)
            if code == NOT_NOW:
                continue
            if code:
                self.failed.append(
                    f"{scenario.name}: {fault.kind} did not strike {order.node} (exit code {code}): {said[-300:]}"
                )
            done.append(order)  # what was begun is undone
        if not done:
            self.failed.append(f"{scenario.name}: {fault.kind} found nobody to strike")
        else:
            self.struck += 1
            self.say(f"  {fault.kind} {', '.join(order.node for order in done)}")
        return done

    def _undo(self, scenario: Scenario, fault: Fault, done: list[Order]) -> None:
        proofs = [self._run(order.node, order.proof)[0] for order in done if order.proof]
        if proofs and all(proofs):
            self.failed.append(f"{scenario.name}: {fault.kind} dropped no frame")
        for order in done:
            if order.undo:
                code, said = self._run(order.node, order.undo)
                if code:
                    self.failed.append(
                        f"{scenario.name}: {fault.kind} could not be undone on {order.node}: {said[-300:]}"
                    )

    def _command(self, node: str, script: str) -> list[str]:
        host = self.hosts.hosts[node]
        words = shlex.split(self.hosts.shell)
        remote = words[0].rpartition("/")[2] == "ssh"  # which hands its words to a shell, in one
        command = ["sh", "-c", shlex.quote(script) if remote else script]
        return [part for word in words for part in (command if word == "{command}" else [word.format(host=host)])]

    def _run(self, node: str, script: str) -> tuple[int, str]:
        try:
            done = subprocess.run(
                self._command(node, script), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SCRIPT_S
            )
        except subprocess.TimeoutExpired:
            return -1, f"no answer within {SCRIPT_S:.0f} s"
        return done.returncode, done.stdout + done.stderr

    def _settings(self) -> StoreSettings:
        return StoreSettings(endpoints=self.hosts.store, namespace=namespace(self.hosts.job), timeout_s=5.0)

    def _look(self) -> dict[str, Any] | None:
        try:
            picture = asyncio.run(look(self._settings()))
        except StoreError:
            return None
        self.seen.take(time.monotonic(), picture)
        return picture

    def _known(self) -> Known | None:
        async def addresses() -> dict[str, str]:
            async with open_store(self._settings()) as store:
                listing = await store.scan(keys.MEMBERS)
            records = [keys.load(Record, entry.value, entry.key) for entry in listing.entries]
            return {record.member.node: split(record.beat)[0] for record in records if record.beat}

        picture = self._look()
        try:
            return Known(rows=tuple(picture["rows"]), addresses=asyncio.run(addresses())) if picture else None
        except (StoreError, keys.Unreadable):
            return None

    def _well(self, within_s: float) -> bool:
        """Whether all nodes of the file train, now or soon."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            picture = self._look()
            if picture is not None and picture["state"] == "TRAINING":
                training = {row["node"] for row in picture["rows"] if row["state"] == "training"}
                if training >= set(self.hosts.hosts):
                    return True
            time.sleep(LOOK_S)  # between looks, up to the deadline
        return False
