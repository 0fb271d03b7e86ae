"""What is wrong with an environment: variables that do not exist, moved, mean something else, or do not go together.

The one idea: most folklore about NCCL is set in the environment,
and nothing ever complains: an unknown name or an unreadable
value is silently ignored. So each name is looked up in `variables`, each value in a table of what it may be, and the few
rules about pairs are functions. A clean environment gives nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from elasticrl.base.value import dataclass
from elasticrl.diagnose.variables import KNOWN, NCCL_NUMBERS, NEVER, OPEN_FAMILIES, REMOVED, RENAMED, WHOLE_FAMILIES


class Problem(StrEnum):
    """What is the matter with a variable."""

    RENAMED = "renamed"
    REMOVED = "removed"
    NEVER_EXISTED = "never_existed"
    WRONG_VALUE = "wrong_value"
    NO_EFFECT = "no_effect"
    DANGEROUS = "dangerous"


class Level(StrEnum):
    """How bad it is: `fail` will not work, `warn` does something else than meant, `hint` could be better."""

    FAIL = "fail"
    WARN = "warn"
    HINT = "hint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to change.

    Example: Finding(name="NCCL_TIMEOUT", value="1200000", problem=Problem.NEVER_EXISTED, level=Level.WARN, said="...",
    remedy="...")
    """

    name: str
    value: str
    problem: Problem
    level: Level
    said: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}: {self.said}. {self.remedy}"

    def plain(self) -> dict[str, str]:
        """For JSON."""
        return {
            "name": self.name, "value": self.value, "problem": str(self.problem), "level": str(self.level),
            "said": self.said, "remedy": self.remedy,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is known of the machine the environment is for. None: not known, and rules that need it say nothing."""

    interfaces: frozenset[str] | None = None  # /sys/class/net
    hcas: frozenset[str] | None = None  # /sys/class/infiniband
    active: frozenset[str] | None = None  # RDMA ports that are: "mlx5_0:1"
    vendor: str | None = None  # "nvidia", "amd", "" for none
    nodes: int | None = None  # of the job
    megatron: bool = False  # it is installed


def lint(environment: Mapping[str, str], machine: Machine | None = None) -> tuple[Finding, ...]:
    """All findings, by name."""
    machine = machine or Machine()
    found = [finding for name in environment for finding in _one(name, environment[name])]
    found += [finding for rule in RULES for finding in rule(environment, machine)]
    return tuple(sorted(found, key=lambda finding: (finding.name, finding.problem)))


def _one(name: str, value: str) -> Iterator[Finding]:
    """A variable by itself."""
    if name in NEVER:
        yield Finding(
            name=name, value=value, problem=Problem.NEVER_EXISTED, level=Level.WARN, said="this variable does not exist "
            "and never did",
            remedy=NEVER[name],
        )  # fmt: skip
    elif name in REMOVED:
        since, remedy = REMOVED[name]
        yield Finding(
            name=name, value=value, problem=Problem.REMOVED, level=Level.WARN, said=f"gone since {since}", remedy=remedy
        )
    elif name in RENAMED:
        new, since = RENAMED[name]
        yield Finding(
            name=name, value=value, problem=Problem.RENAMED, level=Level.HINT, said=f"it is {new} today ({since})",
            remedy=f"Set {new} instead.",
        )  # fmt: skip
    elif name.startswith(WHOLE_FAMILIES) and name not in KNOWN and not name.startswith(OPEN_FAMILIES):
        near = get_close_matches(name, sorted(KNOWN | set(RENAMED)), n=1, cutoff=0.8)
        meant = RENAMED[near[0]][0] if near and near[0] in RENAMED else near[0] if near else ""
        yield Finding(
            name=name, value=value, problem=Problem.NEVER_EXISTED, level=Level.WARN, said="nothing reads this variable",
            remedy=f"Did you mean {meant}?" if meant else "Remove it.",
        )  # fmt: skip
    elif name in VALUES:
        if said := VALUES[name](value):
            yield _wrong(name, value, said)
    elif name in NCCL_NUMBERS and number(value) is None:
        yield _wrong(name, value, "NCCL reads a number here, ignores this word and keeps its default")
    if name in REMARKS and REMARKS[name][0](value):
        _, problem, level, said, remedy = REMARKS[name]
        yield Finding(name=name, value=value, problem=problem, level=level, said=said, remedy=remedy)


def _wrong(name: str, value: str, said: str) -> Finding:
    return Finding(
        name=name,
        value=value,
        problem=Problem.WRONG_VALUE,
        level=Level.FAIL,
        said=said,
        remedy="Correct the value or remove the variable.",
    )


_NUMBER = re.compile(r"\s*([+-]?)(?:0[xX]([0-9a-fA-F]{1,16})|(0[0-7]{0,22})|([1-9][0-9]{0,18}))\s*", re.ASCII)


def number(value: str) -> int | None:
    """As C reads it (`strtoll` with base 0), and NCCL with it; None where C would stop before the end, or it is too large.

    >>> number("22"), number(" -1"), number("0x16"), number("026"), number("08"), number("1e3"), number("1_0"), number("")
    (22, -1, 22, 22, None, None, None, None)
    """
    found = _NUMBER.fullmatch(value)
    if found is None:
        return None
    sign, hexadecimal, octal, decimal = found.groups()
    read = int(sign + (hexadecimal or octal or decimal), 16 if hexadecimal else 8 if octal else 10)
    return read if -(1 << 63) <= read < 1 << 63 else None


def _is_number(value: str) -> bool:
    return number(value) is not None


def _between(low: int, high: int, hint: str = "") -> Callable[[str], str]:
    def check(value: str) -> str:
        read = number(value)
        if read is not None and low <= read <= high:
            return ""
        return f"it must be a number from {low} to {high}" + (f" ({hint})" if hint else "")

    return check


def _words(*allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        known = {word.lower() for word in allowed}
        given = [
            word.strip().lstrip("^").lower() for part in value.split(";") for word in part.rsplit(":", 1)[-1].split(",")
        ]
        wrong = [word for word in given if word not in known]
        return f"{', '.join(map(repr, wrong))} is none of {', '.join(allowed)}" if wrong else ""

    return check


_LEVELS = ("LOC", "NVL", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "C2C")


def _level(value: str) -> str:
    return "" if _is_number(value) or value.upper() in _LEVELS else f"it must be one of {', '.join(_LEVELS)}"


#: What a value may be: "" or what is wrong with it.
VALUES: Final[Mapping[str, Callable[[str], str]]] = MappingProxyType({
    "NCCL_DEBUG": _words("VERSION", "WARN", "INFO", "ABORT", "TRACE"),
    "NCCL_ALGO": _words("Tree", "Ring", "CollnetDirect", "CollnetChain", "CollNet", "NVLS", "NVLSTree", "PAT"),
    "NCCL_PROTO": _words("LL", "LL128", "Simple"),
    "NCCL_NET": lambda value: "" if value.strip() else "it is empty",
    "NCCL_NET_GDR_LEVEL": _level,
    "NCCL_P2P_LEVEL": _level,
    "NCCL_IB_TIMEOUT": _between(0, 31, "an exponent: 4.096 us x 2^value, 20 is 4.3 s; it is no number of seconds"),
    "NCCL_IB_RETRY_CNT": _between(0, 7),
    "NCCL_SOCKET_NTHREADS": _between(1, 16),
    "NCCL_NSOCKS_PERTHREAD": _between(1, 16),
    "NCCL_NTHREADS": lambda value: "" if number(value) in {64, 128, 256, 512} else "it must be 64, 128, 256 or 512",
    "NCCL_P2P_DISABLE": _between(0, 1),
    "NCCL_CROSS_NIC": _between(0, 2),
    "NCCL_NVLS_ENABLE": _between(0, 2),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _between(0, 3, "0 none, 1 tear down, 2 clean up only, 3 tear down without clean-up"),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": _between(1, 10**7),
    "TORCH_FR_BUFFER_SIZE": _between(0, 10**8),
    "GLOO_DEVICE_TRANSPORT": _words("TCP", "TCP_TLS", "IBVERBS", "UV"),
})  # fmt: skip

_Remark = tuple[Callable[[str], bool], Problem, Level, str, str]
_on: Callable[[str], bool] = lambda value: value.strip() == "1"  # noqa: E731 -- a name for a table's column
_zero: Callable[[str], bool] = lambda value: value.strip() == "0"  # noqa: E731

#: Values that are legal and rarely what was meant.
REMARKS: Final[Mapping[str, _Remark]] = MappingProxyType({
    "NCCL_IB_DISABLE": (
        _zero, Problem.NO_EFFECT, Level.HINT, "0 is the default and forces nothing",
        "To fail instead of falling back to sockets, set NCCL_NET=IB."),
    "NCCL_IB_GID_INDEX": (
        lambda value: value.strip() not in {"", "-1"}, Problem.DANGEROUS, Level.WARN,
        "it concerns RoCE only, and NCCL chooses the right index itself since 2.21; a fixed one is wrong on some hosts",
        "Remove it unless show_gids says that every node has the same table."),
    "NCCL_NET_GDR_LEVEL": (
        _is_number, Problem.WRONG_VALUE, Level.HINT, "integers are a legacy form whose meaning may change (2 meant PXB)",
        "Use LOC, PIX, PXB, PHB or SYS."),
    "NCCL_P2P_LEVEL": (
        _is_number, Problem.WRONG_VALUE, Level.HINT, "integers are a legacy form whose meaning may change",
        "Use LOC, NVL, PIX, PXB, PHB or SYS."),
    "NCCL_NVLS_ENABLE": (
        lambda value: value.strip() in {"0", "2"}, Problem.DANGEROUS, Level.HINT,
        "0 gives up NVLink SHARP, for diagnosis only; 2 is the default, which since NCCL 2.29 fails instead of falling back",
        "Remove it once the diagnosis is done."),
    "NCCL_PROTO": (
        lambda value: "LL128" in value.upper() and "^" not in value, Problem.DANGEROUS, Level.WARN,
        "forcing LL128 corrupts data on systems where NCCL does not choose it itself", "Remove it."),
    "NCCL_IB_TIMEOUT": (
        lambda value: 24 <= (number(value) or 0) <= 31, Problem.DANGEROUS, Level.WARN,
        "it is an exponent: a dead link is noticed after minutes to hours", "Stay at or below 22 (17 s a try, 7 tries)."),
    "NCCL_P2P_DISABLE": (
        _on, Problem.DANGEROUS, Level.HINT, "GPUs of a node no longer talk to each other directly, which is much slower",
        "For diagnosis only; then fix ACS/IOMMU or the driver."),
    "NCCL_SHM_DISABLE": (
        _on, Problem.DANGEROUS, Level.HINT, "GPUs of a node without P2P talk over the network then",
        "For diagnosis only; if it was for a small /dev/shm, enlarge that (--shm-size)."),
    "NCCL_DEBUG": (
        lambda value: value.strip().upper() == "TRACE", Problem.DANGEROUS, Level.WARN,
        "it slows every collective down and fills disks", "Use WARN, or INFO while diagnosing."),
    "CUDA_LAUNCH_BLOCKING": (
        _on, Problem.DANGEROUS, Level.WARN, "every kernel launch waits for its end: several times slower",
        "For debugging only; remove it in production."),
    "TORCH_COMPILE_DEBUG": (
        _on, Problem.DANGEROUS, Level.HINT, "each compilation writes its intermediate code to disk", "For debugging only."),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        _zero, Problem.DANGEROUS, Level.WARN, "a failed collective then hangs for ever instead of ending its process",
        "Leave it to elasticrl, or use 3 (torch's default)."),
    "TORCH_NCCL_BLOCKING_WAIT": (
        _on, Problem.DANGEROUS, Level.HINT, "the host waits in every collective: no overlap with computation",
        "Remove it; asynchronous error handling finds the same errors."),
})  # fmt: skip

_Env = Mapping[str, str]


def _no_dump(env: _Env, _: Machine) -> Iterator[Finding]:
    sizes = [env[name] for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE") if name in env]
    if (
        env.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "").lower() in {"1", "true", "y", "yes"}
        and sizes
        and sizes[0].strip() == "0"
    ):
        yield Finding(
            name="TORCH_NCCL_DUMP_ON_TIMEOUT", value=env["TORCH_NCCL_DUMP_ON_TIMEOUT"], problem=Problem.NO_EFFECT,
            level=Level.WARN,
            said="there is nothing to dump: the flight recorder's buffer is 0", remedy="Set TORCH_FR_BUFFER_SIZE=2000.",
        )  # fmt: skip


def _sockets(env: _Env, machine: Machine) -> Iterator[Finding]:
    threads, each = env.get("NCCL_SOCKET_NTHREADS"), env.get("NCCL_NSOCKS_PERTHREAD")
    if (number(threads or "") or 0) * (number(each or "") or 0) > 64:
        yield Finding(
            name="NCCL_NSOCKS_PERTHREAD", value=each or "", problem=Problem.WRONG_VALUE, level=Level.WARN,
            said=f"{threads} threads x {each} sockets is over NCCL's limit of 64: it lowers the second itself",
            remedy="Keep the product of NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD at or below 64.",
        )  # fmt: skip
    verbs = env.get("NCCL_NET", "").upper() == "IB" or bool(machine.hcas and not _disabled(env))
    for name, value in (("NCCL_SOCKET_NTHREADS", threads), ("NCCL_NSOCKS_PERTHREAD", each)):
        if value is not None and verbs:
            yield Finding(
                name=name, value=value, problem=Problem.NO_EFFECT, level=Level.HINT,
                said="it concerns the socket transport only, and this job goes over InfiniBand or RoCE", remedy="Remove "
                "it.",
            )  # fmt: skip


def _disabled(env: _Env) -> bool:
    return env.get("NCCL_IB_DISABLE", "0").strip() not in {"", "0"} or env.get("NCCL_NET", "").lower() == "socket"


def _verbs(env: _Env, machine: Machine) -> Iterator[Finding]:
    if env.get("NCCL_NET", "").upper() == "IB" and env.get("NCCL_IB_DISABLE", "0").strip() not in {"", "0"}:
        yield Finding(
            name="NCCL_IB_DISABLE", value=env["NCCL_IB_DISABLE"], problem=Problem.DANGEROUS, level=Level.FAIL,
            said="it contradicts NCCL_NET=IB: no network is left", remedy="Remove one of the two.",
        )  # fmt: skip
    if _disabled(env):
        for name in sorted(env):
            if name.startswith("NCCL_IB_") and name != "NCCL_IB_DISABLE" and name in KNOWN:
                yield Finding(
                    name=name, value=env[name], problem=Problem.NO_EFFECT, level=Level.HINT,
                    said="InfiniBand and RoCE are switched off by NCCL_IB_DISABLE or NCCL_NET", remedy="Remove it.",
                )  # fmt: skip
    elif "NCCL_IB_HCA" in env:
        yield from _hca(env["NCCL_IB_HCA"], machine)


def _off(env: _Env, machine: Machine) -> Iterator[Finding]:
    """Sockets by order where there is something better. (One node needs no network.)"""
    if not machine.active or machine.nodes == 1 or not _disabled(env):
        return
    name = "NCCL_NET" if env.get("NCCL_NET", "").lower() == "socket" else "NCCL_IB_DISABLE"
    yield Finding(
        name=name, value=env[name], problem=Problem.DANGEROUS, level=Level.WARN,
        said=f"NCCL goes over sockets, and {', '.join(sorted(machine.active)[:8])} are active RDMA ports: many times slower",
        remedy="Remove it, or comm.profile: ib or roce in place of what sets it.",
    )  # fmt: skip


def hcas(value: str) -> tuple[bool, bool, tuple[str, ...]]:
    """What NCCL_IB_HCA says, `[^][=]name[:port],...`: whether these are left out, whether names are whole (else each is a
    prefix), and the list.

    >>> hcas("^=mlx5_0:1, mlx5_1"), hcas("mlx5")
    ((True, True, ('mlx5_0:1', 'mlx5_1')), (False, False, ('mlx5',)))
    """
    listed = value.removeprefix("^")
    parts = (part.strip() for part in listed.removeprefix("=").split(","))
    return value.startswith("^"), listed.startswith("="), tuple(filter(None, parts))


def _hca(value: str, machine: Machine) -> Iterator[Finding]:
    exclude, exact, listed = hcas(value)
    names = [part.partition(":")[0] for part in listed]
    if machine.hcas is not None:
        lost = [n for n in names if not any(h == n if exact else h.startswith(n) for h in machine.hcas)]
        if lost and not exclude:
            yield _wrong(
                "NCCL_IB_HCA",
                value,
                f"{', '.join(lost)} does not exist here; there are {', '.join(sorted(machine.hcas)) or 'none'}",
            )
    if exact:
        return
    others = (machine.hcas or frozenset()) | set(names)
    caught = {n: sorted(h for h in others if h != n and h.startswith(n)) for n in names}
    if machine.hcas is not None:
        # A bare family such as "mlx5" is meant as a prefix; the name of a device is not.
        bad = [n for n in names if n in machine.hcas and caught[n]]
    else:
        bad = [n for n in names if n.endswith(("_1", "_2"))]
    if bad:
        example = caught[bad[0]][0] if caught[bad[0]] else f"{bad[0]}0"
        yield Finding(
            name="NCCL_IB_HCA", value=value, problem=Problem.DANGEROUS, level=Level.WARN,
            said=f"names are prefixes: {bad[0]} also matches {example}",
            remedy=f"Write {'^' if exclude else ''}={value.lstrip('^')} for exact names.",
        )  # fmt: skip


def _interfaces(env: _Env, machine: Machine) -> Iterator[Finding]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"):
        value = env.get(name, "")
        if not value or value.startswith("^"):
            continue
        exact = name.startswith("GLOO") or value.startswith("=")
        names = [part.strip() for part in value.lstrip("=").split(",") if part.strip()]
        if machine.interfaces is not None:
            lost = [n for n in names if not any(i == n if exact else i.startswith(n) for i in machine.interfaces)]
            if lost:
                have = ", ".join(sorted(machine.interfaces))
                yield _wrong(name, value, f"interface {', '.join(lost)} does not exist here; there are {have}")
        if machine.nodes is not None and machine.nodes > 1 and set(names) == {"lo"}:
            yield _wrong(name, value, f"lo reaches no other node, and the job has {machine.nodes}")


def _connections(env: _Env, machine: Machine) -> Iterator[Finding]:
    value = env.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if value.strip() == "1" and not machine.megatron:
        yield Finding(
            name="CUDA_DEVICE_MAX_CONNECTIONS", value=value, problem=Problem.DANGEROUS, level=Level.WARN,
            said="1 is for Megatron's tensor and context parallelism on Ampere and Hopper; with FSDP2 or on Blackwell it "
            "serialises "
            "communication behind computation",
            remedy="Remove it unless the job uses Megatron.",
        )  # fmt: skip


def _waits(env: _Env, _: Machine) -> Iterator[Finding]:
    blocking = env.get("TORCH_NCCL_BLOCKING_WAIT", env.get("NCCL_BLOCKING_WAIT", "0"))
    handling = env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", env.get("NCCL_ASYNC_ERROR_HANDLING"))
    if blocking.strip() == "1" and handling is not None and handling.strip() != "0":
        name = (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING"
            if "TORCH_NCCL_ASYNC_ERROR_HANDLING" in env
            else "NCCL_ASYNC_ERROR_HANDLING"
        )
        yield Finding(
            name=name, value=handling, problem=Problem.NO_EFFECT, level=Level.WARN,
            said="blocking wait is set too, and wins: errors are raised where the host waits", remedy="Remove "
            "TORCH_NCCL_BLOCKING_WAIT.",
        )  # fmt: skip


def _range(env: _Env, _: Machine) -> Iterator[Finding]:
    low = env.get("NCCL_MIN_CTAS", env.get("NCCL_MIN_NCHANNELS", env.get("NCCL_MIN_NRINGS", "")))
    high = env.get("NCCL_MAX_CTAS", env.get("NCCL_MAX_NCHANNELS", env.get("NCCL_MAX_NRINGS", "")))
    least, greatest = number(low), number(high)
    if least is not None and greatest is not None and least > greatest:
        name = next(n for n in ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS") if n in env)
        yield _wrong(name, low, f"the least number of channels, {low}, is over the greatest, {high}")


def _vendor(env: _Env, machine: Machine) -> Iterator[Finding]:
    if machine.vendor is None:
        return
    for name in sorted(env):
        wrong = machine.vendor != "amd" and name.startswith(("RCCL_", "HSA_", "HIP_VISIBLE", "ROCR_"))
        wrong = wrong or (machine.vendor != "nvidia" and name in {"NCCL_NVLS_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"})
        if wrong and name not in NEVER:
            here = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs"}.get(machine.vendor, "no GPUs")
            yield Finding(
                name=name, value=env[name], problem=Problem.NO_EFFECT, level=Level.HINT, said="this machine has "
                f"{here}", remedy="Remove it.",
            )  # fmt: skip


def _visible(env: _Env, _: Machine) -> Iterator[Finding]:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        listed = [part.strip() for part in env.get(name, "").split(",") if part.strip()]
        if len(set(listed)) < len(listed):
            yield _wrong(name, env[name], "it names a device twice: the driver hides that one and all after it")
    hip, cuda = env.get("HIP_VISIBLE_DEVICES"), env.get("CUDA_VISIBLE_DEVICES")
    if hip is not None and cuda is not None and hip != cuda:
        yield Finding(
            name="HIP_VISIBLE_DEVICES", value=hip, problem=Problem.DANGEROUS, level=Level.WARN,
            said=f"CUDA_VISIBLE_DEVICES says {cuda!r}; libraries differ in which of the two they follow", remedy="Set one "
            "of them.",
        )  # fmt: skip


def _no_way(env: _Env, _: Machine) -> Iterator[Finding]:
    if all(env.get(f"NCCL_{way}_DISABLE", "0").strip() == "1" for way in ("P2P", "SHM", "IB")):
        yield Finding(
            name="NCCL_P2P_DISABLE", value="1", problem=Problem.DANGEROUS, level=Level.WARN,
            said="P2P, shared memory and InfiniBand are all switched off: even GPUs of one node talk over TCP",
            remedy="For diagnosis only; remove them one by one.",
        )  # fmt: skip


#: Rules that need more than one variable, or the machine.
RULES: Final = (
    _no_dump, _sockets, _verbs, _off, _interfaces, _connections, _waits, _range, _vendor, _visible, _no_way,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Settings for one kind of fabric, each with its reason. What the operator has set himself always wins."""

    name: str
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # name -> (value, reason)

    def apply(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What to add to an environment."""
        return {name: value for name, (value, _) in self.settings.items() if name not in environment}


_FAIL_LOUDLY = "fail at the start instead of falling back to sockets, which is many times slower and goes unnoticed"
_FLAP = "4.096 us x 2^22 = 17 s a try, 7 tries: outlives a flapping link or a rerouting switch"

#: `comm.profile`. What depends on the site (interface and HCA names, traffic class) is left to `agent.env`.
PROFILES: Final[Mapping[str, Profile]] = MappingProxyType({
    profile.name: profile
    for profile in (
        Profile(name="none"),
        Profile(name="diagnose", settings={  # without a fabric's settings: what NCCL finds by itself is to be seen
            "NCCL_DEBUG": ("INFO", "says which interfaces, transports and algorithms were chosen, in the workers' logs"),
            "NCCL_DEBUG_SUBSYS": ("INIT,ENV,NET,GRAPH", "set-up only: no line for each collective"),
        }),
        Profile(name="single-node-pcie", settings={
            "NCCL_DEBUG": ("WARN", "errors name their cause"),
            "NCCL_IB_DISABLE": ("1", "one node: no NIC is needed, and probing for one can only fail"),
            "NCCL_SOCKET_IFNAME": ("lo", "set-up traffic stays in the machine, whatever the network does"),
        }),
        Profile(name="ib", settings={
            "NCCL_DEBUG": ("WARN", "errors name their cause"),
            "NCCL_NET": ("IB", _FAIL_LOUDLY),
            "NCCL_IB_TIMEOUT": ("22", _FLAP),
            "NCCL_IB_RETRY_CNT": ("7", "the most there is"),
        }),
        Profile(name="roce", settings={
            "NCCL_DEBUG": ("WARN", "errors name their cause"),
            "NCCL_NET": ("IB", _FAIL_LOUDLY),
            "NCCL_IB_TIMEOUT": ("22", _FLAP),
            "NCCL_IB_RETRY_CNT": ("7", "the most there is"),
            "NCCL_IB_ROCE_VERSION_NUM": ("2", "RoCE v2 is routable; the GID index itself is chosen by NCCL since 2.21"),
        }),
        Profile(name="ethernet", settings={
            "NCCL_DEBUG": ("WARN", "errors name their cause"),
            "NCCL_NET": ("Socket", "no verbs are looked for on hosts that have half of them"),
            "NCCL_SOCKET_NTHREADS": ("4", "one flow does not fill a fast link"),
            "NCCL_NSOCKS_PERTHREAD": ("4", "4 x 4 = 16 flows, well under the limit of 64"),
        }),
        Profile(name="mi300", settings={
            "NCCL_DEBUG": ("WARN", "errors name their cause"),
            "HSA_NO_SCRATCH_RECLAIM": ("1", "scratch memory is not given back and taken again between kernels"),
            "RCCL_MSCCL_ENABLE": ("0", "RCCL's usage tips advise it for training with these GPUs"),
        }),
    )
})  # fmt: skip
