"""All that can be known before anything breaks: numbered checks of this machine for one job, each with what to do.

The one idea: a check is a value (`health.Check`), so the doctor is a list of small functions that yield them, and printing,
numbering and the exit code are one place. Nothing here starts, changes or breaks anything: what is written is written beside
the checkpoints under a name of its own, and removed. torch is never imported: versions are read from what is installed.
"""

import asyncio
import contextlib
import os
import platform
import re
import socket
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from elasticrl.base.parsed import parsed
from elasticrl.config import ConfigError, Finding, Tree, run_dir
from elasticrl.config.ports import PORTS
from elasticrl.contract import versions as versions_of
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.pairs import SILENT, Result, findings
from elasticrl.core.judge import matrix
from elasticrl.diagnose import amd, environment, fabric, health, kernel_log, nvidia, proc, transport, units
from elasticrl.diagnose.health import FAIL, OK, SKIP, WARN, Check
from elasticrl.diagnose.job_store import embedded, store_settings
from elasticrl.diagnose.program import absent
from elasticrl.store import StoreError, open_store

#: Packages that must be the same on all nodes, where they are installed.
SAME: Final = ("elasticrl", "torch", "numpy", "transformers", "safetensors", "vllm", "deepspeed", "nvidia-nccl-cu12",
               "nvidia-nccl-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime", "nvidia-cudnn-cu12")  # fmt: skip
SPEED: Final = 64 << 20  # bytes written to learn the speed
LOOK_S: Final = 1.0  # between two looks at counters
ROUNDS: Final = 9  # questions to the store, for its latency


def versions() -> dict[str, str]:
    """What this machine runs, by name; without importing any of it."""
    found = {"python": platform.python_version()}
    for name in SAME:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        found["driver"] = text.partition("Module")[2].split()[0]
    return found


def installed() -> Iterator[Check]:
    """What this machine runs."""
    found = versions()
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    lacks = "torch" not in found
    yield Check(
        name="versions", level=WARN if lacks else OK, value=said + f", Linux {platform.release()}",
        why="Ranks with other versions compute other bits, or do not find each other.",
        remedy="Install the training part: pip install 'elasticrl[train]'." if lacks else "",
    )  # fmt: skip


def other_nccl(env: Mapping[str, str]) -> Iterator[Check]:
    """A NCCL that the loader may find before the one torch was built with: from a module, or from the system."""
    given = [*re.split(r"[: ]+", env.get("LD_PRELOAD", "")), env.get("VLLM_NCCL_SO_PATH", "")]
    found = [path for path in given if Path(path).name.startswith("libnccl.so")]
    for folder in filter(None, env.get("LD_LIBRARY_PATH", "").split(":")):
        with contextlib.suppress(OSError):
            found += sorted(str(path) for path in Path(folder).glob("libnccl.so*"))
    strange = [
        path for path in found if not path.rpartition("/")[0].endswith("nvidia/nccl/lib")
    ]  # torch's wheel has it there
    if strange:
        yield Check(
            name="versions.nccl", level=WARN, value=f"beside torch's own NCCL there is {', '.join(strange)}",
            why="torch's wheels bring the NCCL that they were tested with; another one mixes versions, often on a few nodes.",
            remedy="Take it out of LD_LIBRARY_PATH, LD_PRELOAD and VLLM_NCCL_SO_PATH (module unload nccl).",
        )  # fmt: skip


def differing(of: Mapping[str, Mapping[str, str]]) -> tuple[Evidence, ...]:
    """Nodes whose versions are not those of most, from `versions()` of each.

    >>> [fact.node for fact in differing({"a": {"torch": "2.13.0"}, "b": {"torch": "2.13.0"}, "c": {"torch": "2.12.1"}})]
    ['c']
    """
    return tuple(map(evidence, versions_of.odd(of, missing="none")))


def evidence(odd: versions_of.Differs) -> Evidence:
    """As a fact. Example: torch 2.12.1, others 2.13.0"""
    detail = f"{odd.name} {odd.mine}" + (f", others {odd.usual}" if odd.usual else "")
    return Evidence(
        kind=Kind.VERSION, sign=Sign.VERSIONS, node=odd.node, detail=detail[:200], source="doctor", check=odd.name
    )


def linted(tree: Tree | None, env: Mapping[str, str], nodes: int | None) -> Iterator[Check]:
    """The workers' environment: ours, and what the configuration adds."""
    found = environment.lint(workers(tree, env), machine(nodes))
    yield from _complaints(found, "environment", "")
    if not found:
        yield Check(name="environment", level=OK, value="nothing that is wrong, unknown or outdated")


def in_units(tree: Tree | None, nodes: int | None) -> Iterator[Check]:
    """The same of what systemd gives our units, where there are any: this shell's environment is not theirs."""
    known = units.units()
    wrong: dict[environment.Finding, list[str]] = {}
    for unit in known:
        for finding in environment.lint(workers(tree, unit.environment), machine(nodes)):
            if finding.name in unit.environment:  # else the configuration has it, and it is named above
                wrong.setdefault(finding, []).append(unit.name)
    strange = [
        replace(c, name=f"units.{c.name}", value=f"{u.name}: {c.value}")
        for u in known
        for c in other_nccl(u.environment)
    ]
    yield from strange
    for finding, names in wrong.items():
        yield from _complaints((finding,), "units", f"in {' and '.join(names)}: ")
    unread = {path: why for unit in known for path, why in unit.unread.items()}
    for path, why in unread.items():
        yield Check(
            name="units.file", level=WARN, value=f"their EnvironmentFile {path} cannot be read ({why})",
            why="What it sets is not looked at; systemd does not start a unit without a file that has to be there.",
            remedy="Run the doctor as root, or create the file.",
        )  # fmt: skip
    if known and not (wrong or unread or strange):
        said = f"nothing that is wrong, unknown or outdated in {' and '.join(unit.name for unit in known)}"
        yield Check(name="units", level=OK, value=said)


def _complaints(found: Iterable[environment.Finding], where: str, who: str) -> Iterator[Check]:
    for finding in found:
        level = {"fail": FAIL, "warn": WARN}.get(finding.level, OK)
        yield Check(
            name=f"{where}.{finding.name}", level=level, value=f"{who}{finding.name}={finding.value}: {finding.said}",
            why="A variable that is wrong or unknown is silently ignored, or means something else.", remedy=finding.remedy,
        )  # fmt: skip


def machine(nodes: int | None) -> environment.Machine:
    """What the linter has to know of this one."""
    ports = fabric.ports()
    return environment.Machine(
        interfaces=frozenset(health.interfaces()), hcas=frozenset(port.name.partition(":")[0] for port in ports),
        vendor="nvidia" if Path("/proc/driver/nvidia").exists() else "amd" if Path("/dev/kfd").exists() else "", nodes=nodes,
        megatron=find_spec("megatron") is not None, active=frozenset(port.name for port in ports if port.active),
    )  # fmt: skip


def workers(tree: Tree | None, env: Mapping[str, str]) -> dict[str, str]:
    """The environment that workers get: ours, the profile's, and `agent.env`, which wins."""
    added = dict(tree.agent.env) if tree else {}
    if tree is not None:
        added = environment.PROFILES[tree.comm.profile].apply({**env, **added}) | added
    return {**env, **added}


def network(tree: Tree | None) -> Iterator[Check]:
    """The interface and address of this node, its RDMA ports, and its ports."""
    nics = health.interfaces()
    named = tree.node.interface if tree else None
    why = "Beats, copies and collectives go this way; libraries guess another one on machines with several."
    if named is not None and named not in nics:
        yield Check(
            name="network.interface", level=FAIL, value=f"node.interface {named} does not exist; there are "
            f"{', '.join(sorted(nics))}", why=why, remedy="Correct node.interface.",
        )  # fmt: skip
    elif named is not None:
        down = nics[named] not in {"up", "unknown"}
        yield Check(
            name="network.interface", level=FAIL if down else OK, value=f"{named} is {nics[named]}, {_mtu(named)}", why=why,
            remedy=f"ip link set {named} up, or another node.interface." if down else "",
        )  # fmt: skip
    else:
        up = sorted(nic for nic, state in nics.items() if state == "up")
        several = len(up) > 1
        yield Check(
            name="network.interface", level=WARN if several else OK, value=", ".join(f"{nic} ({_mtu(nic)})" for nic in up),
            why=why, remedy="Name the one to use: node.interface." if several else "",
        )  # fmt: skip
    for port in fabric.ports():
        yield Check(
            name=f"network.hca.{port.name}", level=OK if port.active else WARN,
            value=f"{port.state or 'no state'} {port.kind} {port.rate}",
            why="NCCL falls back to sockets when it finds no active port.",
            remedy="" if port.active else "ibstat; cable and subnet manager.",
        )  # fmt: skip
    if tree is not None:
        yield from _ports(tree)


def _mtu(nic: str) -> str:
    try:
        return "MTU " + Path(f"/sys/class/net/{nic}/mtu").read_text(encoding="ascii").strip()
    except OSError:
        return "MTU unknown"


def _ports(tree: Tree) -> Iterator[Check]:
    host = tree.node.address or ""
    if host:
        yield _bindable("network.address", host, 0, socket.SOCK_STREAM, "node.address")
    for one in PORTS:
        if port := one.port(tree):
            kind = socket.SOCK_STREAM if one.kind == "tcp" else socket.SOCK_DGRAM
            yield _bindable(
                f"network.port.{one.name}", one.address(tree), port, kind, f"{one.key} ({one.kind.upper()})"
            )


def _bindable(name: str, host: str, port: int, kind: socket.SocketKind, what: str) -> Check:
    why = "A port that somebody has, or an address of another machine, ends the daemon's start, or costs its probes or metrics."
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=kind, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as sock:
            if kind is socket.SOCK_STREAM:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        return Check(
            name=name, level=FAIL, value=f"{what}: {host}:{port}: {error.strerror or error}", why=why,
            remedy="See who has it (ss -tulpn): a daemon of this job that runs already is fine. Else correct the setting.",
        )  # fmt: skip
    return Check(
        name=name, level=OK, value=f"{what}: {host or '*'}{f':{port}' if port else ''} is ours to use", why=why
    )


def checkpoints(tree: Tree) -> Iterator[Check]:
    """The directory of checkpoints: what it is on, whether it keeps its promises, how fast, how much room."""
    place = tree.checkpoint.dir
    if "://" in place:
        yield Check(name="checkpoint.dir", level=SKIP, value=f"{place}: object stores are not looked at")
        return
    folder = Path(run_dir(tree, tree.node.name or socket.gethostname()))
    try:
        there = next((p for p in (folder, *folder.parents) if p.is_dir()), Path("/"))
    except OSError:  # a stale mount, which is told of below
        there = Path("/")
    mount = proc.mount_of(_read("/proc/self/mountinfo"), str(there.resolve()))
    if mount is not None:
        yield _filesystem(tree, mount)
    yield from health.disk(folder, "checkpoint", need=_needed(tree, folder))
    if os.access(there, os.W_OK):
        yield _promises(there)
        yield _speed(there)


def _filesystem(tree: Tree, mount: proc.Mount) -> Check:
    why = "A rename that is not atomic, or a write that is not safe after fsync, leaves torn checkpoints."
    remedy = ""
    if mount.kind in health.IN_MEMORY:
        level, remedy = FAIL, "This is memory: nothing survives a reboot. Use a disk."
    elif mount.kind in health.NETWORKED:
        soft = "soft" in mount.options
        level = FAIL if soft else WARN
        remedy = (
            "Mount it `hard`: with `soft` a slow server corrupts what is written."
            if soft
            else "A network file system stalls saves when its server does: watch the commit's age."
        )
    elif mount.kind == "overlay":
        level, remedy = WARN, "This is a container's own layer, which goes with it: mount a volume."
    elif tree.checkpoint.shared and tree.membership.max_nodes > 1 and tree.node.interface != "lo":
        level, remedy = (
            WARN,
            "checkpoint.shared says that all nodes see it, and this is a local file system: name one that they share.",
        )
    else:
        level = OK
    return Check(
        name="checkpoint.filesystem", level=level, value=f"{mount.kind} at {mount.point}", why=why, remedy=remedy
    )


def _needed(tree: Tree, folder: Path) -> int:
    """Bytes for one more checkpoint as large as the newest, beside those that are kept; 1 GiB where there is none."""
    saved = sorted(path for path in folder.glob("step-*") if path.is_dir())
    if not saved:
        return health.GIB
    size = sum(file.stat().st_size for file in saved[-1].rglob("*") if file.is_file())
    return int(size * (1 + max(0, tree.checkpoint.keep_last - len(saved))) * 1.1) + (64 << 20)


def _promises(folder: Path) -> Check:
    """What the saver relies on: fsync of files and folders, a rename that replaces, and a lock nobody else gets."""
    why = "A save is published by a rename after everything has been flushed."
    probe = folder / f".elasticrl-doctor-{os.getpid()}"
    doing = "mkdir"
    try:
        probe.mkdir()
        new, old = probe / "new", probe / "old"
        doing = "write and fsync"
        for path, text in ((old, b"old"), (new, b"new")):
            with path.open("wb") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        doing = "rename over an existing file"
        new.replace(old)
        doing = "fsync of a folder"
        handle = os.open(probe, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        doing = "read back"
        same = old.read_bytes() == b"new" and not new.exists()
        doing = "rename of a folder"
        moved = probe.with_name(probe.name + ".moved")
        probe.rename(moved)
        moved.rename(probe)
    except OSError as error:
        return Check(
            name="checkpoint.semantics", level=FAIL, value=f"{doing}: {error.strerror}", why=why,
            remedy="Use a file system that does this (ext4, xfs, NFS mounted hard), or give the job the right to it.",
        )  # fmt: skip
    finally:
        with contextlib.suppress(OSError):
            for left in probe.iterdir():
                left.unlink()
            probe.rmdir()
    return Check(
        name="checkpoint.semantics", level=OK if same else FAIL, value="fsync and rename do what they promise" if same
        else "a file read after a rename is not the one that was written", why=why,
        remedy="" if same else "Use another file system.",
    )  # fmt: skip


def _speed(folder: Path) -> Check:
    probe = folder / f".elasticrl-doctor-{os.getpid()}.speed"
    begin = time.monotonic()
    try:
        with probe.open("wb") as stream:
            block = os.urandom(1 << 20)  # not zeros: some storage does not write those
            for _ in range(SPEED >> 20):
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return Check(name="checkpoint.speed", level=FAIL, value=str(error.strerror), remedy="Free space.")
    finally:
        probe.unlink(missing_ok=True)
    rate = SPEED / (time.monotonic() - begin) / 1e6
    slow = rate < 50
    return Check(
        name="checkpoint.speed", level=WARN if slow else OK, value=f"{rate:.0f} MB/s written and safe",
        why="Writing is in the background, but a save that takes longer than the time between saves is given up.",
        remedy="Fewer saves (checkpoint.every), or a faster disk." if slow else "",
    )  # fmt: skip


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def configured(found: Iterable[Finding]) -> Iterator[Check]:
    """What the configuration's own check says."""
    for finding in found:
        yield Check(
            name=f"config.{finding.key or 'file'}", level=FAIL if finding.level == "error" else WARN,
            value=f"{finding.rule} ({finding.values})", why="The configuration does not fit together.",
            remedy=finding.remedy,
        )  # fmt: skip


async def store(tree: Tree) -> AsyncIterator[Check]:
    """The etcd of the job: which members answer, how fast, which versions."""
    why = "Plans, leases and commits are written there; an outage costs nothing while nothing else breaks."
    own = embedded(tree, dies_with_us=False).running() if tree.store.embedded else None
    endpoints = (own.endpoint,) if own is not None else tree.store.endpoints
    if not endpoints:
        said = "no endpoints: the daemon starts an etcd of its own, and none runs now"
        yield Check(name="store", level=SKIP, value=said, why=why)
        return
    try:
        async with open_store(store_settings(tree, endpoints)) as client:
            status = await client.status()
            times = []
            for _ in range(ROUNDS if status.ok else 0):
                begin = time.monotonic()
                await client.get("plan")
                times.append(time.monotonic() - begin)
    except ConfigError as error:  # a file of a secret that is not here, or that others may read
        for finding in error.findings:
            said = f"{finding.where.name} {finding.rule} ({finding.values})"
            yield Check(name="store", level=FAIL, value=said, why=why, remedy=finding.remedy)
        return
    except StoreError as error:
        yield Check(name="store", level=FAIL, value=str(error), why=why, remedy="See the endpoints, TLS and user.")
        return
    for end in status.endpoints:
        yield Check(
            name=f"store.{end.endpoint}", level=FAIL if end.problem else OK, why=why,
            value=end.problem or f"etcd {end.version}{', leads' if end.leader else ''}, {end.size / 1e6:.1f} MB",
            remedy="Start it; check the address, the firewall and the certificates." if end.problem else "",
        )  # fmt: skip
    if times:
        late = statistics.median(times) > 0.1
        yield Check(
            name="store.latency", level=WARN if late else OK, value=f"{statistics.median(times) * 1000:.1f} ms, the median "
            f"of {len(times)} reads", why=why, remedy="A disk of its own for etcd; members near each other." if late else "",
        )  # fmt: skip
    single = len(status.endpoints) == 1 and tree.membership.max_nodes > 1
    for text in (*status.warnings, *(["one member only: its death is an outage"] if single else [])):
        yield Check(
            name="store.advice", level=WARN, value=text, why=why, remedy="Three or five members of a current version."
        )


def probed(results: Sequence[Result], me: str, ends: Mapping[str, str]) -> Iterator[Check]:
    """What the probe of pairs found: each way, and, from this node, clocks and versions. `ends`: each node's address.

    Whoever was not met had time to come, as all are run together: it is not taken for one that may be about to begin.
    """
    for fact in findings(results, waited=True):
        value, remedy = fact.detail, "" if fact.sign is Sign.HEALTHY else "See the verdict."
        if value.startswith(SILENT):
            other = str(fact.node if fact.peer == me else fact.peer)
            end = ends.get(other, "an address that is not known")
            value = f"{other} at {end} does not answer: {value}"
            remedy = (
                f"Was doctor run on {other} at the same time, with the same list? If so: is that its address (ip -br addr), "
                f"and does a firewall let both ways through (nc -vz {' '.join(end.rsplit(':', 1))}; nft list ruleset)?"
            )
        yield Check(
            name=f"pair.{fact.node}-{fact.peer}", level=OK if fact.sign is Sign.HEALTHY else FAIL, value=value,
            why="Every collective goes over such pairs.", remedy=remedy,
        )  # fmt: skip
    for result in results:
        if result.node == me and result.offset_s is not None:
            yield health.clock(result.offset_s, result.peer)
    for fact in differing(
        {me: versions()} | {result.peer: facts_of(result.facts) for result in results if result.facts}
    ):
        yield Check(
            name=f"versions.{fact.node}", level=FAIL, value=fact.detail, remedy="Install the same versions everywhere.",
            why="Ranks with other versions compute other bits, or do not find each other.",
        )  # fmt: skip


def compared(results: Sequence[Result], me: str, rdma: Collection[str]) -> Iterator[Check]:
    """What all pairs show beside each other: the odd one out, packet sizes, and the way that NCCL took; `rdma`: our ports."""
    late, slow = matrix.late(matrix.trips(results)), matrix.slow(matrix.rates(results))
    for name, odd, unit, remedy in (
        (
            "latency",
            late,
            "ms",
            "ip -s link and ethtool -S on it (errors, speed); traceroute (a detour); tc qdisc (a shaper).",
        ),
        ("rate", slow, "Mbit/s", "ethtool on it (speed, duplex), cable, switch port; then ask again."),
    ):
        if odd is not None:
            yield Check(
                name=f"matrix.{name}", level=WARN, remedy=remedy,
                value=f"{odd.said}: {odd.worst:,.4g} {unit} at worst, usual are {odd.usual:,.4g}",
                why="A collective is as fast as its slowest way, and all others wait for it.",
            )  # fmt: skip
        elif len({result.node for result in results}) > 2:
            yield Check(name=f"matrix.{name}", level=OK, value=f"no way is far off the others' {unit}")
    sizes = matrix.mtus(results)
    if len(set(sizes.values())) > 1:
        usual = Counter(sizes.values()).most_common(1)[0][0]
        odd_ones = ", ".join(f"{node} {size}" for node, size in sorted(sizes.items()) if size != usual)
        yield Check(
            name="matrix.mtu", level=WARN, value=f"{odd_ones}; others {usual}",
            why="Large packets are cut or vanish where a smaller MTU begins, and RDMA takes the least of both ends.",
            remedy="ip link set INTERFACE mtu N: the same on all nodes, and no more than the switches carry.",
        )  # fmt: skip
    elif len(sizes) > 1:
        yield Check(name="matrix.mtu", level=OK, value=f"{next(iter(sizes.values()))} on all {len(sizes)} nodes")
    taken = {result.transport for result in results if result.node == me and result.transport}
    said = transport.sockets(taken, rdma)
    if taken:
        yield Check(
            name="pair.transport", level=WARN if said else OK, value=said or ", ".join(sorted(taken)),
            why="NCCL falls back to sockets without a warning, and they are many times slower.",
            remedy=transport.REMEDY if said else "",
        )  # fmt: skip


def nccl_here() -> bool:
    """Whether a probe can try NCCL, or RCCL: a GPU's driver, and a torch that was built for one."""
    there = Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()
    return there and not versions().get("torch", "+cpu").endswith("+cpu")


def facts_of(text: str) -> dict[str, str]:
    """A node's versions, as it says them."""
    try:
        plain = parsed(text)
    except ValueError:
        return {}
    return {str(key)[:60]: str(value)[:60] for key, value in plain.items()} if isinstance(plain, dict) else {}


def shared(tree: Tree, env: Mapping[str, str], cards: int) -> Iterator[Check]:
    """Worker k computes on card k: with more workers than cards some share one."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    count = cards if visible is None else min(cards, len([card for card in visible.split(",") if card.strip()]))
    if not cards or tree.node.device == "cpu":
        return
    enough = count >= tree.node.workers
    said = f"{count} for {tree.node.workers} workers (node.workers)" + (
        f"; CUDA_VISIBLE_DEVICES={visible}" if visible else ""
    )
    yield Check(
        name="gpu.count", level=OK if enough else FAIL, value=said, why="NCCL refuses two workers of one node on one card.",
        remedy="" if enough else f"Set node.workers to {count}." if count else "Let the workers see the cards.",
    )  # fmt: skip


async def examine(
    tree: Tree | None, found: Iterable[Finding] = (), *, env: Mapping[str, str], nodes: int | None = None
) -> list[Check]:
    """Everything but the probe of other nodes."""
    before = health.counters(time.monotonic())
    checks = [*configured(found), *installed(), *other_nccl(env), *linted(tree, env, nodes), *in_units(tree, nodes)]
    checks += network(tree)
    if tree is not None and tree.node.role != "rollout" and (why := absent(tree)):
        remedy = "Put the program at the same place on every node, or name it by its whole path."
        checks.append(
            Check(name="program", level=FAIL, value=why, why="Workers would end as they start.", remedy=remedy)
        )
    if tree is not None:
        checks += checkpoints(tree)
        checks += [check async for check in store(tree)]
        checks += health.disk(Path(tree.node.state_dir), "state", need=2 * tree.telemetry.trace_limit_bytes)
        checks += health.shm(next(p for p in (Path(tree.vault.dir), *Path(tree.vault.dir).parents) if p.exists()))
    else:
        checks += [*health.disk(Path.cwd(), "disk"), *health.shm()]
    checks += [*health.pressures(), *health.memory(), *health.load(), *health.limits()]
    time.sleep(max(0.0, before.at + LOOK_S - time.monotonic()))  # counters need two looks  # noqa: ASYNC251 - nobody else waits
    checks += health.gained(before, health.counters(time.monotonic()))
    if tree is not None:
        checks += shared(tree, workers(tree, env), nvidia.cards())
    cards, none = nvidia.gpus()
    theirs, neither = await asyncio.to_thread(amd.gpus)
    checks += (*cards, *theirs) or (Check(name="gpu", level=SKIP, value=f"{none}; {neither}"),)
    checks += [*fabric.gone(), *fabric.links(), *fabric.acs(), *fabric.gids(workers(tree, env))]
    checks.append(health.kernel(*kernel_log.whole())[0])
    return checks
