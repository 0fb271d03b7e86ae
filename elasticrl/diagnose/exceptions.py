"""Exceptions and tracebacks of Python programs, where no row of a table knows the text. Pure.

The one idea: an exception that nothing else explains is most often the program's, and how sure that is depends on its type and
on where the traceback ends: in somebody's own file, in a library that was called, or in a wait for others.
"""

import re
from typing import Final

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Sign

#: An exception's last line, as Python prints it.
EXCEPTION: Final = re.compile(
    r"(?:^|\s|: |\])(?P<name>(?:[A-Za-z_]\w{0,40}\.){0,6}(?:[A-Z]\w{1,50}(?:Error|Exception|Interrupt)|Exception))"
    r"(?:: ?(?P<said>.{0,300})|(?:\(\))?\s*$)"
)
#: The same of any type, which is looked for only right after a frame of a traceback.
_ANY: Final = re.compile(
    r"^(?:\[rank\d{1,6}\]: ?)?(?P<name>(?:[A-Za-z_]\w{0,40}\.){0,6}(?:[A-Z][a-z]\w{0,60}|\w{1,40}Error))"
    r"(?:: (?P<said>.{0,300})|\s{0,8}$)"
)
_FRAME: Final = (
    re.compile(r'File ["“](?P<file>[^"”\n]{1,300})["”], line \d{1,7}(?! in )(?:, in (?P<at>\S{1,80}))?'),
    re.compile(r"^[│| ]{0,4}(?P<file>[/~.][\w./~@+-]{1,200}\.py):\d{1,6} in (?P<at>[\w<>]{1,80})"),
    re.compile(r"File (?P<file>[\w/~.@+-]{1,200}\.py):\d{1,6}, in (?P<at>[\w.<>]{1,80})"),
)

_RAISES: Final = re.compile(r"raise (?P<name>[A-Za-z_][\w.]{1,120})\((?P<said>.{0,200})")

#: What only a mistake of the program or its data brings about, if it is raised in the program's own file.
_PLAIN: Final = frozenset({
    "KeyError", "IndexError", "NameError", "SyntaxError", "ZeroDivisionError", "UnboundLocalError", "RecursionError",
    "ValidationError", "ConfigAttributeError", "ConfigKeyError", "IndentationError", "UnicodeDecodeError", "JSONDecodeError",
    "NotADirectoryError", "FloatingPointError", "IsADirectoryError", "DatasetGenerationError", "UnpicklingError", "TypeError",
})  # fmt: skip
#: What most often is one, and may be a setting, or a library of another version.
_LIKELY: Final = frozenset({
    "AssertionError", "ValueError", "PermissionError", "FileExistsError", "FileNotFoundError", "CompilationError",
    "OverflowError",
})  # fmt: skip
#: What a library of another version brings about as well as the program.
_VERSIONED: Final = frozenset({"ModuleNotFoundError", "AttributeError", "NotImplementedError"})
#: Exceptions that say nothing of who is at fault: torn-down peers, agents that report.
_SECOND_HAND: Final = frozenset({
    "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "ChildFailedError", "SignalException",
    "BrokenPipeError", "EOFError", "ConnectionResetError", "ConnectionAbortedError", "CancelledError",
    "RayTaskError", "RayActorError", "ActorDiedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException",
    "RendezvousConnectionError", "RendezvousTimeoutError", "TimeoutError", "TimeoutExpired", "OutOfMemoryError", "MemoryError",
    "StopIteration", "DistributedError", "SystemExit", "StopAsyncIteration", "GeneratorExit", "EngineDeadError",
    "EngineGenerateError", "TrainingFailedError", "TuneError", "WorkerGroupError", "MultiprocessingError", "Warning",
})  # fmt: skip
#: Words with which a message passes on what somebody else said.
_PASSED_ON: Final = re.compile(
    r"CUDA error|CUDA driver|cudaError|HIP error|cuDNN error|[Rr]oot cause|[Bb]ackground process|previous error|core proc|"
    r"see (?:the )?(?:above|stack|log)"
)
_DIED: Final = re.compile(
    r"(?:[Ww]orker|[Pp]rocess|[Aa]ctor|[Nn]ode|[Ss]erver).{0,60}(?:died|dead|killed|exited|crashed|terminated|disconnected)"
)
_VERSION: Final = re.compile(
    r"\b[Vv]ersions? (?:of|is|must|mismatch|\d)|[Uu]pgrade|[Dd]owngrade|[Ii]ncompatib|[Pp]lease (?:re)?install|pip install|"
    r"no longer supported|deprecated|(?:is|are) not supported (?:on|by|in|with)|[Uu]nsupported (?:version|device|arch)|"
    r"(?:is|are|was) not installed|to be installed|requires? [\w.\[\]-]{2,40} ?(?:[<>=]=|>|version)|[Rr]equired? version|"
    r"too old|[a-z] ?[<>]=? ?\d{1,3}\.\d|"
    r"[Nn]o (?:valid|suitable|compatible|supported|usable) (?:[\w-]{1,30} ){0,2}(?:backend|kernel|implementation)\b|"
    r"\bno (?:[\w-]{1,30} )?kernel for\b|requires? (?:a )?(?:GPU|device)s? (?:with|of) (?:at least )?(?:sm|SM|compute)"
)
#: Settings of launchers and of how a job is cut among ranks.
_PLACE: Final = re.compile(
    r"\bport\b|\b[Ee]nv(?:iron(?:ment)?)? ?var(?:iable)?|MASTER_|VISIBLE_DEVICES|LOCAL_RANK|local_rank|WORLD_SIZE|ulimit|"
    r"[Dd]eep[Ss]peed config|main_process_(?:ip|port)|device_map|ifname|[Nn]o (?:GPU resources|slots) available|"
    r"[Hh]ost ?(?:name|file)|[Pp]ermission|\bnum_(?:machines|nodes|processes)\b|"
    r"\b(?:nnodes|nproc_per_node|node_rank|ngpus?|gpu_ids)\b|"
    r"[Nn]umber of (?:GPUs|gpus|devices|processes|nodes|ranks|workers)|[Ww]orld.?[Ss]ize|\b(?:tp|pp|dp|cp|ep|sp)_size\b|"
    r"(?:TP|PP|DP|CP|EP)[_ ]size|(?:tensor|pipeline|context|data|expert|sequence|model)[_ -](?:model[_ -])?parallel.{0,40}size"
)
#: A message that tells which option or variable to change.
_OPTION: Final = re.compile(
    r"\b(?:[Dd]ecreas|[Ii]ncreas|[Rr]educ|[Ll]ower|[Rr]ais|[Ss]et|[Uu]s|[Pp]ass|[Ss]pecify|[Ee]nabl|[Dd]isabl|[Aa]dd|[Pp]rovid|[Cc]heck)"
    r"(?:e|ing|ting|es|s)?\b.{0,60}?(?:(?<![\w-])--[a-z][\w-]{2,40}|\b[A-Z]{2,20}(?:_[A-Z0-9]{2,20}){1,6}\b|`[a-z]+(?:_[a-z]+){1,6}(?:=|`))"
)
#: What the words of an exception of no telling type speak for, if they speak of anything; the first that fits counts.
_GUESSES: Final = (
    (_PASSED_ON, Sign.RAISED),
    (re.compile(r"[Rr]endezvous|[Cc]oordinat|\b(?:TCP|KV)?[Ss]tore\b"), Sign.UNMET),
    (re.compile(r"[Tt]imed ?out|[Tt]imeout"), Sign.WAITED),
    (_DIED, Sign.PEER_GONE),
    (re.compile(r"[Cc]onnection|[Ss]ocket|[Uu]nreachable|[Nn]etwork|getaddrinfo"), Sign.CALL_FAILED),
    (_VERSION, Sign.MISFIT),
    (_PLACE, Sign.UNSUITED),
    (_OPTION, Sign.UNSUITED),
)
#: Words of collectives and of other processes: who says them may be anybody's victim.
_OTHERS: Final = re.compile(
    r"NCCL|nccl|[Gg]loo|H(?:CCL|ccl)|peer|monitoredBarrier|[Cc]ommunicator|[Ss]ubprocess|child process|exit ?code|"
    r"[Ww]orker.{0,40}fail|killed by|server is|unavailable|actor"
)
#: Files whose frames only pass an exception on, or wait for somebody: a traceback that breaks off there tells nothing.
_PASSES_ON: Final = re.compile(
    r"torch[/\\]distributed[/\\](?:run|launch|launcher|elastic|c10d_logger|distributed_c10d|rendezvous|device_mesh|rpc|constants)\b|"
    r"multiprocessing[/\\]|accelerate[/\\]commands|deepspeed[/\\](?:launcher|comm)|concurrent[/\\]futures|(?:subprocess|runpy|threading|"
    r"contextlib|selectors|socket|ssl|queue|signal|traceback|logging)\.py|asyncio|<(?!module)|torchrun|ray[/\\](?:_private|_raylet)|"
    r"_raylet\.pyx|horovod|importlib|[/\\]bin[/\\]|wandb|vllm[/\\]v1[/\\]engine[/\\]|multiproc_executor|accelerate[/\\]state|hydra[/\\]|"
    r"[/\\](?:click|fire|typer)[/\\]|single_controller"
)
_IMPORTS: Final = re.compile(r"<frozen importlib|importlib[/\\]__init__\.py")
_WAITS: Final = re.compile(
    r"process_group|model_parallel|distributed|DistributedDataParallel|_verify_param|communicat|connect|synchron|"
    r"\b(?:barrier|all_?reduce|all_?gather\w{0,12}|reduce_scatter\w{0,12}|broadcast\w{0,12}|ray\.get|wait|recv|join|"
    r"\w{0,10}launch\w{0,12}|spawn|run_busy_loop|call_method|main|_?run|execute_method)\("
)
#: Files and functions in which a process stands that waits for another one of its machine.
_STANDS: Final = re.compile(r"(?:queues?|connection|selectors|threading|synchronize|popen_fork|dataloader)\.py$")
_STILL: Final = frozenset({
    "get", "poll", "_poll", "recv", "recv_bytes", "_recv", "_recv_bytes", "wait", "select", "acquire", "join", "_try_get_data",
    "_next_data", "_get_data", "_get_batch", "_wait_for_tstate_lock",
})  # fmt: skip
_LIBRARY: Final = re.compile(r"(?:site|dist)-packages[/\\]")
_STANDARD: Final = re.compile(
    r"[/\\]lib[/\\]python3\.\d{1,2}[/\\]"
)  # a cut file or reply ends in its json, and in its os
_OF_A_VALUE: Final = re.compile(
    r"'(?:NoneType|dict|list|str|int|float|tuple|set|bool|function|bytes|Namespace|generator)' object has no attr"
)
_DEEP: Final = 400  # speakers whose tracebacks are followed at once


@dataclass(frozen=True, slots=True)
class LastFrame:
    """Where a traceback is.

    Example: LastFrame(file="/job/train.py", at="main", code="loss = step(batch)")
    """

    file: str
    at: str
    code: str = ""

    @property
    def library(self) -> bool:
        """Whether that is code of an installed package."""
        return _LIBRARY.search(self.file) is not None

    @property
    def own(self) -> bool:
        """Whether it is the program's."""
        return not self.library and _STANDARD.search(self.file) is None

    @property
    def waits(self) -> bool:
        """Whether it waits for another process here: somebody interrupted it."""
        return self.at in _STILL and _STANDS.search(self.file) is not None

    @property
    def raises(self) -> re.Match[str] | None:
        """What is raised here, where the code says it."""
        return _RAISES.match(self.code)

    @property
    def telling(self) -> bool:
        """Whether a traceback that breaks off here tells anything."""
        return (
            self.waits
            or self.raises is not None
            or not (_PASSES_ON.search(self.file) or _WAITS.search(self.code) or _WAITS.search(self.at))
        )


class Tracebacks:
    """The tracebacks of one stream of lines, by who speaks: the last frame of each that has not met its exception yet."""

    def __init__(self) -> None:
        self._open: dict[object, tuple[LastFrame, int]] = {}

    def follow(self, who: object, text: str, number: int) -> tuple[LastFrame | None, re.Match[str] | None]:
        """Read a record. The last frame of the traceback that it goes on with, and an exception of any type that ends it."""
        if "File" in text or ".py" in text:
            found = [match for expression in _FRAME for match in expression.finditer(text)]
            if found and _IMPORTS.search(found[-1]["file"]) and who in self._open:
                self._open[who] = self._open[who][0], number  # what it imports failed, and it says who does
                return None, None
            if found:
                match = found[-1]
                if len(self._open) < _DEEP or who in self._open:
                    code = text[match.end() :].strip()[:200]
                    self._open[who] = LastFrame(match["file"], match["at"] or "", code), number
                return None, None
        frame, last = self._open.get(who, (None, 0))
        if frame is None:
            return None, None
        if ended := _ANY.match(text) if number - last <= 4 else None:
            del self._open[who]
            return frame, ended
        if EXCEPTION.search(text) and not text.startswith(("    ", "\t")):
            self._open.pop(who)
            return frame, None
        if not frame.code and text.strip(" ^~│|"):
            self._open[who] = LastFrame(frame.file, frame.at, text.strip()[:200]), number
        elif not text.strip(" ^~│|"):
            self._open[who] = frame, number
        return frame, None

    def broken_off(self) -> list[LastFrame]:
        """Those that have met no exception, where they tell something."""
        frames = [frame for frame, _ in self._open.values() if frame.telling]
        self._open.clear()
        return frames


def sign_of(name: str, said: str, frame: LastFrame | None) -> Sign | None:
    """What an exception that no text explains speaks for; None: for nothing."""
    name = name.rsplit(".", 1)[-1]
    if name == "KeyboardInterrupt":
        return Sign.WAITED
    if name in _SECOND_HAND or name.endswith("Warning"):
        return None
    library = frame is not None and frame.library
    if name == "ImportError":
        return Sign.MISFIT
    if name in _VERSIONED:
        return Sign.MISFIT if library and not _OF_A_VALUE.search(said) else Sign.MISTAKE
    if name in _PLAIN:
        return Sign.PROGRAM if frame is not None and frame.own else Sign.MISTAKE
    if name in _LIKELY:
        if _VERSION.search(said):
            return Sign.MISFIT
        return Sign.UNSUITED if _PLACE.search(said) or _OPTION.search(said) else Sign.MISTAKE
    for expression, sign in _GUESSES:
        if expression.search(said) or expression.search(name):
            return sign
    return Sign.RAISED if _OTHERS.search(said) or _OTHERS.search(name) else Sign.FAILED


def exception_in(text: str) -> re.Match[str] | None:
    """The first exception in a record that may have an opinion of its own."""
    if "Error" not in text and "Exception" not in text and "Interrupt" not in text:
        return None
    for match in EXCEPTION.finditer(text):
        if match["name"].rsplit(".", 1)[-1] not in _SECOND_HAND:
            return match
    return None
