"""One line of every kind of trouble, found among others and read as what it is a sign of."""

# ruff: noqa: E501 -- a line of a log is as long as it is

import random
import re

import pytest
from logs_kit import parse

from elasticrl.contract.evidence import Sign
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.judge import judge
from elasticrl.diagnose.texts import TEXTS

#: (line as a program prints it, its sign, the class if nothing else is known)
LINES = [
    ("EOFError: Ran out of input", Sign.DAMAGED, Fault.DISK),
    ("zipfile.BadZipFile: File is not a zip file", Sign.DAMAGED, Fault.DISK),
    ("[ 512.2] BUG: workqueue lockup - pool cpus=3 node=0 flags=0x0 nice=0 stuck for 34s!", Sign.HOST_STUCK, Fault.HOST_HANG),
    ("[ 512.2] rcu: rcu_sched kthread starved for 5250 jiffies! g1 f0x0", Sign.HOST_STUCK, Fault.HOST_HANG),
    ("[ 512.2] i915 0000:03:00.0: [drm] GPU HANG: ecode 12:1:85dffffb, in python3", Sign.GPU_SUSPECT, Fault.GPU_FAULT),
    ("Unable to detect the device handle for GPU0000:B1:00.0: Unknown Error", Sign.GPU_BROKEN, Fault.GPU_FAULT),
    ("[ 512.2] swiotlb buffer is full (sz: 65536 bytes), total 32768 (slots)", Sign.UNSUITED, Fault.CONFIG),
    ("   Reason=JobLaunchFailure Dependency=(null)", Sign.UNSUITED, Fault.CONFIG),
    ("The current node has not been updated within 30 seconds, this could happen", Sign.COORDINATOR, Fault.COORDINATOR),
    ("Worker exit detail: Owner's node has crashed.", Sign.NODE_GONE, Fault.DEAD_NODE),
    ("panic: runtime error: index out of range [3] with length 3", Sign.ABORTED, Fault.DEAD_RANK),
    ("link mlx5_0/1 state DOWN physical_state DISABLED netdev ib0", Sign.LINK, Fault.NETWORK),
    ("n:1:2 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>", Sign.UNSUITED, Fault.CONFIG),
    ("[ 512.200417] NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus", Sign.GPU_BROKEN, Fault.GPU_FAULT),
    ("[ 512.200417] NVRM: Xid (PCI:0000:44:00): 31, pid=1, MMU Fault", Sign.BAD_ACCESS, Fault.USER_ERROR),
    ("[ 512.200417] NVRM: Xid (PCI:0000:44:00): 43, pid=1, Ch 08", Sign.TOLD, Fault.UNKNOWN),
    ("[ 512.200417] amdgpu 0000:83:00.0: amdgpu: GPU reset begin!", Sign.GPU_BROKEN, Fault.GPU_FAULT),
    ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", Sign.GPU_BROKEN, Fault.GPU_FAULT),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", Sign.BAD_ACCESS, Fault.USER_ERROR),
    ("RuntimeError: CUDA error: device-side assert triggered", Sign.PROGRAM, Fault.USER_ERROR),
    ("RuntimeError: CUDA error: unspecified launch failure", Sign.GPU_SUSPECT, Fault.GPU_FAULT),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", Sign.VERSIONS, Fault.VERSION_MISMATCH),
    ("RuntimeError: CUDA error: invalid device ordinal", Sign.SETTING, Fault.CONFIG),
    ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", Sign.GPU_MEMORY, Fault.OOM_GPU),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Sign.GPU_MEMORY, Fault.OOM_GPU),
    ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB", Sign.GPU_MEMORY, Fault.OOM_GPU),
    ("ValueError: No available memory for the cache blocks. Try increasing it", Sign.GPU_MEMORY, Fault.OOM_GPU),
    ("node-a:1:2 [0] NCCL WARN Failed to CUDA calloc async 4096 bytes", Sign.GPU_MEMORY, Fault.OOM_GPU),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to", Sign.HOST_MEMORY,
     Fault.OOM_HOST),
    ("OSError: [Errno 12] Cannot allocate memory", Sign.HOST_MEMORY, Fault.OOM_HOST),
    ("terminate called after throwing an instance of 'std::bad_alloc'", Sign.HOST_MEMORY, Fault.OOM_HOST),
    ("RuntimeError: DataLoader worker (pid 812) is killed by signal: Killed.", Sign.HOST_MEMORY, Fault.OOM_HOST),
    ("RuntimeError: DataLoader worker (pid 812) is killed by signal: Bus error. It is possible that", Sign.SHM_FULL, Fault.CONFIG),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed", Sign.OOM_KILLED,
     Fault.OOM_HOST),
    ("kernel: Out of memory: Killed process 812 (python) total-vm:8kB", Sign.OOM_KILLED, Fault.OOM_HOST),
    (("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: End of file. Some "
     "common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called"),
     Sign.KILLED, Fault.DEAD_RANK),
    ("OSError: [Errno 24] Too many open files", Sign.RESOURCE_LIMIT, Fault.CONFIG),
    ("node-a:1:2 [0] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", Sign.RESOURCE_LIMIT, Fault.CONFIG),
    ("RuntimeError: can't start new thread", Sign.RESOURCE_LIMIT, Fault.CONFIG),
    ("OSError: [Errno 122] Disk quota exceeded", Sign.DISK_FULL, Fault.DISK),
    ("RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed", Sign.DISK_FULL, Fault.DISK),
    ("OSError: [Errno 30] Read-only file system: 'ckpt/step-8'", Sign.DISK_BROKEN, Fault.DISK),
    ("OSError: [Errno 116] Stale file handle", Sign.DISK_BROKEN, Fault.DISK),
    ("RuntimeError: [enforce fail at pair.cc:450] op.preamble.length <= op.nbytes. 8192 vs 4096", Sign.MISMATCH, Fault.DESYNC),
    ("RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 20000 ms", Sign.ABSENT, Fault.HOST_HANG),
    ("  - [1] joined but didn't finish collective #12 (count from 1)", Sign.WAITED, Fault.HOST_HANG),
    ("  - [0] finished collective #11, but didn't join collective #12", Sign.ABSENT, Fault.HOST_HANG),
    ("ImportError: libtorch_cuda.so: undefined symbol: ncclCommRegister", Sign.VERSIONS, Fault.VERSION_MISMATCH),
    ("Failed to initialize NVML: Driver/library version mismatch", Sign.VERSIONS, Fault.VERSION_MISMATCH),
    ("n:1:2 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error", Sign.LINK, Fault.NETWORK),
    ("n:1:2 [0] NCCL WARN Net : Call to recv from 192.0.2.5<3333> failed : Connection timed out", Sign.LINK, Fault.NETWORK),
    ("n:1:2 [0] NCCL WARN Net : Call to recv from 192.0.2.5<3333> failed : Broken pipe", Sign.PEER_GONE, Fault.DEAD_RANK),
    ("n:1:2 [0] NCCL WARN Bootstrap : no socket interface found", Sign.SETTING, Fault.CONFIG),
    ("n:1:2 [0] NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152", Sign.FABRIC, Fault.FABRIC),
    ("n:1:2 [0] NCCL WARN Cuda failure 801 'operation not supported'", Sign.FABRIC, Fault.FABRIC),
    ("n:1:2 [0] NCCL WARN NET/IB : Got completion from peer fe80::1%ib0<3> with error 4, opcode 3, len 3, vendor err 81",
     Sign.FABRIC, Fault.FABRIC),
    ("RuntimeError: [pair.cc:534] Connection closed by peer [192.0.2.9]:41233", Sign.PEER_GONE, Fault.DEAD_RANK),
    ("RuntimeError: Timed out waiting 10000ms for recv operation to complete", Sign.WAITED, Fault.HOST_HANG),
    ("RuntimeError: Unable to find address for: eth7", Sign.SETTING, Fault.CONFIG),
    ("RuntimeError: The server socket has failed to listen on any local network address. code: -98, name: EADDRINUSE",
     Sign.SETTING, Fault.CONFIG),
    ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.", Sign.SETUP_WAITED,
     Fault.COORDINATOR),
    ("torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (h, 29500).",
     Sign.COORDINATOR, Fault.COORDINATOR),
    ("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.",
     Sign.COORDINATOR, Fault.COORDINATOR),
    ("[2026-01-01] [ERROR] [launch.py:321:sigkill_handler] ['python'] exits with return code = -9", Sign.KILLED, Fault.DEAD_RANK),
    ("  traceback : Signal 11 (SIGSEGV) received by PID 812", Sign.CRASHED, Fault.DEAD_RANK),
    ("The node with node id: ab12 has been marked dead because the detector has missed too many heartbeats", Sign.NODE_GONE,
     Fault.DEAD_NODE),
    ("[ 512.200417] INFO: task python:812 blocked for more than 120 seconds.", Sign.HOST_STUCK, Fault.HOST_HANG),
    ("[ 512.200417] mlx5_core 0000:12:00.0 eth2: Link down", Sign.LINK, Fault.NETWORK),
    ("[rank1]:[E ProcessGroupNCCL.cpp:1] Could not acquire GIL within 300 ms on exit, possible GIL induced hang",
     Sign.HOST_STUCK, Fault.HOST_HANG),
    ("[Sun Jan 11 09:52:01 2026] NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED]",
     Sign.GPU_BROKEN, Fault.GPU_FAULT),
    ("NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13", Sign.TOLD, Fault.UNKNOWN),
    ("n:1:2 [0] NCCL WARN NET/IB : req 0/1 tag 0 peer 192.0.2.6<5868> collective mismatch error, local size 496640 remote size 65536",
     Sign.MISMATCH, Fault.DESYNC),
    ("error msg: Culprit rank 22; Error type: SIZE_OR_SYNTAX_MISMATCH, Expected input sizes", Sign.MISMATCH, Fault.DESYNC),
    ("2026-09-05T17:40:21-07:00 n02 systemd-logind[1410]: Power key pressed short.", Sign.NODE_GONE, Fault.DEAD_NODE),
    ("004 (6591392.000.000) 2026-10-02 13:10:50 Job was evicted.", Sign.NODE_GONE, Fault.DEAD_NODE),
    ("ERROR 07-04 17:35:16 [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.",
     Sign.GONE, Fault.DEAD_RANK),
    ("RayWorkerProc rank=[0] died unexpectedly", Sign.GONE, Fault.DEAD_RANK),
    ("usage threshold of 0.95. Ray killed this worker (ID: 79a5) because it was the most recently scheduled task; to see more",
     Sign.OOM_KILLED, Fault.OOM_HOST),
    ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", Sign.OOM_KILLED, Fault.OOM_HOST),
    ("torch.AcceleratorError: CUDA error: operation not permitted", Sign.UNSUITED, Fault.CONFIG),
    ("RuntimeError: BAD_STATUS", Sign.CALL_FAILED, Fault.NETWORK),
    ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)", Sign.MISTAKE, Fault.USER_ERROR),
    ("ValueError: mat1 and mat2 do not fit", Sign.MISTAKE, Fault.USER_ERROR),
]  # fmt: skip


@pytest.mark.parametrize(("line", "sign", "fault"), LINES, ids=[line[:50] for line, _, _ in LINES])
def test_a_line_of_trouble_is_found_among_others_and_means_what_it_says(line: str, sign: Sign, fault: Fault) -> None:
    quiet = "step 12 loss 0.1\n" * 300
    facts = parse(quiet + line + "\n" + quiet)
    assert sign in {fact.sign for fact in facts}, [str(fact) for fact in facts]
    assert judge(facts).fault is fault
    assert {fact.line for fact in facts} == {line}


HEALTHY = [
    "n:1:2 [0] NCCL INFO NET/IB : No device found.",
    "n:1:2 [0] NCCL INFO Bootstrap : Using eth0:192.0.2.1<0>",
    "n:1:2 [0] NCCL INFO Connected all rings",
    "n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
    "WARNING: memory usage 81 %, no error so far",
    "epoch 3: 0 failed requests, connection pool of 8 open, eval error 0.031",
    "UserWarning: An output with one or more elements was resized",
    "saved checkpoint to /data/ckpt/step-100 (error feedback buffers included)",
    'n:1:2 [3] init.cpp:126 NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
    "INFO reward model: mean squared error 0.12, signal to noise 3.1",
    "Registered signal handlers for SIGTERM and SIGINT",
    "Warning: timeout for collectives is 600 s; heartbeat every 30 s",
    "[W socket.cpp:601] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - Cannot assign requested address).",
    "slurmstepd: error: couldn't chdir to `/home/u/x': No such file or directory: going to /tmp instead",
    " [WARNING]  sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.3",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "PING 192.0.2.2: 5 packets transmitted, 5 received, 0% packet loss, time 4ms",
    "n:1:2 [0] NCCL INFO Failed to open libibverbs.so[.1]",
    "Could not cache non-existence of file. Will ignore error and continue. Error: [Errno 30] Read-only file system: '/c/m.json'",
    "root - WARNING - Error running lspci: [Errno 2] No such file or directory: 'lspci', fallback to use device_name",
    "INFO 05-21 05:16:15 [gpu_worker.py:200] Available KV cache memory: 52.13 GiB",
]


@pytest.mark.parametrize("line", HEALTHY)
def test_what_healthy_runs_print_is_no_fault(line: str) -> None:
    verdict = judge(parse(line * 1 + "\n"))
    assert (verdict.fault, verdict.ranks, verdict.nodes) == (Fault.UNKNOWN, (), ())
    assert verdict.cause == "nothing in the evidence shows a failure"


def test_no_expression_has_an_unbounded_repetition() -> None:
    """What keeps every line cheap: `*` and `+` do not occur; `{n,m}` does."""
    for text in TEXTS:
        plain = text.pattern.replace(r"\+", "").replace(r"\*", "")
        assert "*" not in plain, text
        assert "+" not in plain, text


#: Substrings that stand elsewhere in such a line than where the row's expression looks.
ELSEWHERE = {
    "NVRM", "amdgpu", "mlx5_", "Resource temporarily unavailable", "btl: tcp: Match incoming connection", "mad_rpc",
    "file might be corrupted", "Minimum requirement is", "NCCL_IGNORE_", "shared memory segment", "Assertion `",
    "could not be found or opened", "unable to be used", "communicate with the NVIDIA driver", "libc++abi", ": fatal error: ",
    "current state is TrainingState", "with dtype", "when calling the",
}  # fmt: skip


def lines(parts: object, chance: random.Random) -> str:
    """A text that an expression matches, by its parts."""
    text = ""
    for kind, value in parts:  # type: ignore[attr-defined]
        match str(kind), value:
            case "LITERAL", code:
                text += chr(code)
            case "NOT_LITERAL", _:
                text += "~"
            case "ANY", _:
                text += chance.choice("ab 1")
            case "IN", options if str(options[0][0]) == "NEGATE":
                text += next(
                    letter for letter in "qjz~" if ("LITERAL", ord(letter)) not in {(str(k), v) for k, v in options}
                )
            case "IN", options:
                what, option = chance.choice(options)
                if str(what) == "RANGE":
                    text += chr(chance.randint(*option))
                else:
                    text += chr(option) if str(what) == "LITERAL" else CATEGORIES[str(option)]
            case "MAX_REPEAT", (least, most, inner):
                text += "".join(lines(inner, chance) for _ in range(chance.choice((least, min(int(most), least + 3)))))
            case "SUBPATTERN", (*_, inner):
                text += lines(inner, chance)
            case "BRANCH", (_, branches):
                text += lines(chance.choice(branches), chance)
    return text


CATEGORIES = {
    "CATEGORY_DIGIT": "7", "CATEGORY_WORD": "w", "CATEGORY_SPACE": " ", "CATEGORY_NOT_SPACE": "s", "CATEGORY_NOT_WORD": ":",
    "CATEGORY_NOT_DIGIT": "d",
}  # fmt: skip


def test_what_a_row_s_expression_matches_has_one_of_its_substrings() -> None:
    """Else the expression is never tried there: a capital letter in a substring hid a fourth of the alternatives of 80 rows."""
    chance = random.Random(1)
    alike: dict[object, set[str]] = {}
    for row in TEXTS:
        alike.setdefault((row.kind, row.sign, row.pattern), set()).update(row.needles)
    unseen = {}
    for row in TEXTS:
        if not row.pattern or row.needle in ELSEWHERE:
            continue
        parts, needles = re._parser.parse(row.pattern), alike[row.kind, row.sign, row.pattern]  # type: ignore[attr-defined]
        samples = [lines(parts, chance) for _ in range(40)]
        missed = [sample for sample in samples if not any(needle in sample for needle in needles)]
        if len(missed) > 12:
            unseen[row.needle] = missed[0]
    assert unseen == {}
