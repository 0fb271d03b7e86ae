"""The texts that broken jobs print, and what each is a sign of: one row a text, and nothing else.

The one idea: a row is a cheap substring, a regular expression and a sign. The substring lets a line skip the row in
nanoseconds; the expression has only bounded repetitions, so that no line can make it slow. Rows are tried from the top and
the first of each family wins, so a precise text stands above a vague one.
"""

# ruff: noqa: E501, S108 -- a row of the table is one line, however long its expression; /dev/shm is somebody else's text

import re
from dataclasses import field
from functools import cached_property

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import MISTAKES, Kind, Sign


@dataclass(frozen=True)  # no slots: the compiled expression is kept
class Text:
    """One text. Named groups: rank, ranks, peer, node, code, seconds; the whole match is the detail if `detail` is ""."""

    needle: str  # must be in the line, else the expression is not tried
    kind: Kind
    sign: Sign
    pattern: str = ""  # "" means that the needle says it all
    detail: str = ""
    family: str = field(default="")  # of one family, only the first row that matches a line counts

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """Compiled when it is first needed: most runs never see most texts."""
        return re.compile(self.pattern or re.escape(self.needle))


_K, _S = Kind, Sign
_HARD_XIDS = (
    "46|48|54|56|61|62|63|64|66|74|78|79|92|93|94|95|110|119|120|121|122|123|136|137|140|143|144|145|149|150|151|154"
)

#: Health of machines: kernel, GPU, memory, disk.
MACHINE: tuple[Text, ...] = (
    Text("oom-kill", _K.OOM_KILLER, _S.OOM_KILLED, r"oom-kill:constraint|invoked oom-killer|oom-kill event", family="oomk"),
    Text("oom_kill", _K.OOM_KILLER, _S.OOM_KILLED, r"[Dd]etected \d{1,6} oom_kill events?|oom_kill [1-9]\d{0,6}", family="oomk"),
    Text("emory", _K.OOM_KILLER, _S.OOM_KILLED,
         r"(?:Out of memory|emory cgroup out of memory): ?Kill(?:ed)? process (?P<code>\d{1,9})", family="oomk"),
    Text("illed", _K.OOM_KILLER, _S.OOM_KILLED, r"killed by the OOM killer|OOMKilled|Memory limit exceeded.{0,20}killed", family="oomk"),
    Text("running low on memory", _K.OOM_KILLER, _S.OOM_KILLED, r"[Ww]orkers? .{0,80}killed due to .{0,40}running low on memory",
         family="oomk"),
    Text("killed due to memory pressure", _K.OOM_KILLER, _S.OOM_KILLED, family="oomk"),

    Text("oom", _K.OOM_KILLER, _S.OOM_KILLED, r"oom_kill(?:_event)? (?:events? )?in Step|slurmstepd.{0,60}oom-kill", family="oomk"),
    Text("Out Of Memory", _K.OOM_KILLER, _S.OOM_KILLED, r"srun: error: (?P<node>[\w.-]{1,80}): tasks? (?P<ranks>[\d,-]{1,80}): Out Of Memory", family="oomk"),
    Text("low on resource: memory", _K.OOM_KILLER, _S.OOM_KILLED, r"node was low on resource: memory.{0,160}", detail="evicted for memory", family="oomk"),
    Text("low on resource", _K.DISK, _S.DISK_FULL, r"node was low on resource: ephemeral-storage", detail="evicted for local storage", family="mem"),
    Text("etermine the device handle", _K.XID, _S.GPU_BROKEN, r"Unable to determine the device handle for GPU.{0,60}", detail="nvidia-smi cannot reach a GPU",
         family="xid"),
    Text("fallen off the bus", _K.XID, _S.GPU_BROKEN, r"(?:Xid.{0,60})?fallen off the bus", detail="GPU off the bus", family="xid"),
    Text("is lost", _K.XID, _S.GPU_BROKEN, r"GPU is lost|Unable to determine the device handle for GPU.{0,60}GPU is lost",
         detail="GPU lost", family="xid"),
    Text("NVRM", _K.XID, _S.TOLD, r"Xid \(?(?:PCI:)?(?P<peer>[\w:.]{4,20})?\)?: ?(?P<code>14[4-9]|150), .{0,30}Nonfatal", detail="Xid", family="xid"),


    Text("SXid", _K.XID, _S.GPU_SUSPECT, r"SXid \(?(?:PCI:)?(?P<peer>[\w:.]{4,20})?\)?: ?(?P<code>\d{4,6}), .{0,20}Non-fatal", detail="NVSwitch SXid", family="xid"),
    Text("SXid", _K.XID, _S.GPU_BROKEN, r"SXid \(?(?:PCI:)?(?P<peer>[\w:.]{4,20})?\)?: ?(?P<code>\d{4,6})\b", detail="NVSwitch SXid", family="xid"),
    Text("caused by previous Xid", _K.XID, _S.GPU_BROKEN, rf"caused by previous Xid (?P<code>{_HARD_XIDS})\b", detail="after Xid", family="xid"),
    Text("caused by previous Xid", _K.XID, _S.TOLD, family="xid"),
    Text("GSP", _K.XID, _S.GPU_BROKEN, r"(?:Timeout (?:after \d{1,6}s )?(?:of )?waiting for RPC (?:response )?from GSP|GSP RPC [Tt]imeout|kgspRpcRecvPoll.{0,60}failed|"
         r"GSP.{0,20}(?:task (?:exception|crash)|crash(?:ed)?|unhandled exception))", detail="the GPU's firmware does not answer", family="xid"),
    Text("NV_ERR_RESET_REQUIRED", _K.XID, _S.GPU_BROKEN, detail="the driver demands a GPU reset", family="xid"),
    Text("HW Exception by GPU", _K.XID, _S.GPU_BROKEN, r"HW Exception by GPU node.{0,80}GPU Hang", detail="AMD GPU hang", family="amd"),
    Text("NVRM", _K.XID, _S.GPU_BROKEN, rf"Xid \(?(?:PCI:)?(?P<peer>[\w:.]{{4,20}})?\)?: ?(?P<code>{_HARD_XIDS})\b", detail="Xid",
         family="xid"),
    Text("NVRM", _K.XID, _S.BAD_ACCESS, r"Xid \(?(?:PCI:)?(?P<peer>[\w:.]{4,20})?\)?: ?(?P<code>13|31)\b", detail="Xid",
         family="xid"),
    Text("NVRM", _K.XID, _S.TOLD, r"Xid \(?(?:PCI:)?(?P<peer>[\w:.]{4,20})?\)?: ?(?P<code>43|45)\b", detail="Xid", family="xid"),
    Text("NVRM", _K.XID, _S.GPU_SUSPECT, r"Xid \(?(?:PCI:)?(?P<peer>[\w:.]{4,20})?\)?: ?(?P<code>\d{1,3})\b", detail="Xid",
         family="xid"),
    Text("NVRM", _K.XID, _S.GPU_BROKEN, r"RmInitAdapter failed", detail="the driver cannot start the GPU", family="xid"),
    Text("uncorrectable hardware errors", _K.KERNEL, _S.GPU_BROKEN, r"amdgpu.{0,80}uncorrectable hardware errors", family="amd"),
    Text("amdgpu", _K.KERNEL, _S.GPU_BROKEN, r"GPU reset (?:begin|\(\d|failed)|ring \w{1,20} timeout|device lost from bus", family="amd"),

    Text("PROTECTION_FAULT", _K.CUDA_ERROR, _S.BAD_ACCESS, r"amdgpu.{0,80}VM_L2_PROTECTION_FAULT_STATUS:0x\w{1,8}", family="amd"),
    Text("Memory access fault by GPU", _K.CUDA_ERROR, _S.BAD_ACCESS, family="amd"),

    Text("PCIe Bus Error", _K.KERNEL, _S.NOISE, r"PCIe Bus Error: severity=Corrected", family="aer"),
    Text("AER:", _K.KERNEL, _S.NOISE, r"AER: (?:Multiple )?[Cc]orrect(?:ed|able)", family="aer"),
    Text("PCIe Bus Error", _K.KERNEL, _S.GPU_SUSPECT, r"PCIe Bus Error: severity=Uncorrect\w{1,6}", detail="PCIe error", family="aer"),
    Text("AER:", _K.KERNEL, _S.GPU_SUSPECT, r"AER: (?:Multiple )?Uncorrect\w{1,6}", detail="PCIe error", family="aer"),
    Text("ritical temperature", _K.KERNEL, _S.NODE_GONE, r"[Cc]ritical temperature reached.{0,60}", detail="thermal shutdown"),
    Text("Thermal", _K.KERNEL, _S.SLOW, r"(?:HW|SW)[ _](?:Thermal|Power Brake)[ _]Slowdown\W{1,40}Active", detail="throttled"),
    Text("cpu clock throttled", _K.KERNEL, _S.SLOW, r"[Tt]emperature above threshold, cpu clock throttled", detail="throttled"),
    Text("AER:", _K.KERNEL, _S.GPU_SUSPECT, r"AER: .{0,30}Uncorrect\w{0,5} \(Fatal\)", detail="PCIe fatal error"),
    Text("Machine Check", _K.KERNEL, _S.GPU_SUSPECT, r"Hardware Error\]: Machine Check|mce: .{0,20}Machine Check", detail="machine check"),
    Text("Kernel panic", _K.KERNEL, _S.NODE_GONE, detail="kernel panic"),
    Text("ink", _K.KERNEL, _S.LINK, r"mlx\d_core.{0,60}Link down|(?:\beth\d|\bib\d|\bens?\w{1,8}|\bbond\d).{0,40}[Ll]ink"
         r"(?: status)?(?: is| definitely)? [Dd]own|NIC Link is Down", detail="link down"),
    # Error words of CUDA and HIP.
    Text("ECC error", _K.CUDA_ERROR, _S.GPU_BROKEN, r"uncorrectable (?:NVLink|ECC) error", detail="uncorrectable ECC error", family="cuda"),
    Text("NVLink error", _K.CUDA_ERROR, _S.GPU_BROKEN, r"uncorrectable NVLink error", detail="NVLink error", family="cuda"),
    Text("hardware stack error", _K.CUDA_ERROR, _S.GPU_SUSPECT, family="cuda"),
    Text("illegal memory access", _K.CUDA_ERROR, _S.BAD_ACCESS, family="cuda"),
    Text("misaligned address", _K.CUDA_ERROR, _S.BAD_ACCESS, family="cuda"),
    Text("illegal instruction was", _K.CUDA_ERROR, _S.BAD_ACCESS, family="cuda"),
    Text("device-side assert", _K.CUDA_ERROR, _S.PROGRAM, family="cuda"),
    Text("no kernel image is available", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("driver version is insufficient", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("NVIDIA driver on your system is too old", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("device kernel image is invalid", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("river/library version mismatch", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),

    Text("not yet initialized", _K.CUDA_ERROR, _S.FABRIC, r"system not yet initialized", detail="CUDA 802: the fabric manager is not ready", family="cuda"),
    Text("CUDA_ERROR_SYSTEM_NOT_READY", _K.CUDA_ERROR, _S.FABRIC, detail="CUDA 802: the fabric manager is not ready", family="cuda"),
    Text("fabricmanager", _K.CUDA_ERROR, _S.FABRIC, r"(?:nvidia-|nv-)fabricmanager.{0,200}(?:[Ff]ail|FAILURE|not (?:running|loaded|found)|inactive|mismatch)", detail="fabric manager",
         family="cuda"),
    Text("unsupported display driver", _K.CUDA_ERROR, _S.VERSIONS, r"unsupported display driver / cuda driver combination", family="cuda"),
    Text("forward compatibility was attempted", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("PTX was compiled with an unsupported toolchain", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("unsupported toolchain", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("Found no NVIDIA driver", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("compiled with a different CUDA", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("is not compatible with the current PyTorch", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("CUDA unknown error", _K.CUDA_ERROR, _S.GPU_SUSPECT, family="cuda"),
    Text("CUDA_ERROR_UNKNOWN", _K.CUDA_ERROR, _S.GPU_SUSPECT, family="cuda"),
    Text("No devices were found", _K.CUDA_ERROR, _S.GPU_SUSPECT, family="cuda"),
    Text("invalid device ordinal", _K.CUDA_ERROR, _S.SETTING, family="cuda"),
    Text("busy or unavailable", _K.CUDA_ERROR, _S.GPU_SUSPECT, r"CUDA-capable device.{0,20}busy or unavailable", family="cuda"),
    Text("no CUDA-capable device", _K.CUDA_ERROR, _S.GPU_SUSPECT, family="cuda"),
    Text("No CUDA GPUs are available", _K.CUDA_ERROR, _S.SETTING, family="cuda"),
    Text("unspecified launch failure", _K.CUDA_ERROR, _S.GPU_SUSPECT, family="cuda"),
    Text("CUDA error: unknown error", _K.CUDA_ERROR, _S.GPU_SUSPECT, family="cuda"),

    Text("GLIBC", _K.EXCEPTION, _S.VERSIONS, r"version `?GLIBC(?:XX)?_[\d.]{1,12}'? not found", detail="C library", family="exception"),
    Text("CXXABI", _K.EXCEPTION, _S.VERSIONS, r"version `?CXXABI_[\d.]{1,12}'? not found", detail="C++ library", family="exception"),
    Text("cannot open shared object file", _K.EXCEPTION, _S.VERSIONS, r"lib(?:cu|nv|nccl|torch|c10|amdhip|roc|hip|mpi|fabric)\S{0,60}: cannot open shared object file",
         family="exception"),
    # Memory.

    Text("ried to allocate", _K.OOM, _S.MISMATCH, r"[Tt]ried to allocate (?:[\d.]{1,20} (?:PiB|EiB|PB|EB)|(?:\d{4,12})(?:\.\d{1,4})? (?:TiB|TB)|more than 1 ?EB)",
         detail="a size that nobody meant: it came from another collective, or from garbage", family="mem"),
    Text("out of memory", _K.OOM, _S.GPU_MEMORY, r"(?:CUDA|HIP)(?: error:)? ?[Oo]ut [Oo]f [Mm]emory|[Cc]uda failure (?:\d{1,4} )?'out of memory'"
         r"|hip failure (?:\d{1,4} )?'out of memory'|CUDA driver error: out of memory|OutOfMemoryError", family="mem"),
    Text("OutOfMemoryError", _K.OOM, _S.GPU_MEMORY, r"(?:torch|cuda)\S{0,20}OutOfMemoryError", family="mem"),
    Text("ALLOC_FAILED", _K.OOM, _S.GPU_MEMORY, r"CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED", family="mem"),
    Text("No available memory for the cache blocks", _K.OOM, _S.GPU_MEMORY, family="mem"),
    Text("ailed to C", _K.OOM, _S.GPU_MEMORY, r"Failed to (?:CUDA|Cuda) (?:m|c)alloc", family="mem"),
    Text("annot allocate memory", _K.LIMIT, _S.RESOURCE_LIMIT, r"ibv_\w{1,30} failed with error Cannot allocate memory",
         detail="locked memory (ulimit -l)", family="mem"),
    Text("annot allocate memory", _K.OOM, _S.HOST_MEMORY, family="mem"),
    Text("can't allocate memory", _K.OOM, _S.HOST_MEMORY, family="mem"),
    Text("DefaultCPUAllocator: not enough memory", _K.OOM, _S.HOST_MEMORY, family="mem"),
    Text("std::bad_alloc", _K.OOM, _S.HOST_MEMORY, family="mem"),
    Text("MemoryError", _K.OOM, _S.HOST_MEMORY, r"(?<![\w.])(?:\w{1,40}\.){0,4}_?(?:Array)?MemoryError\b", family="mem"),
    Text("DataLoader worker", _K.OOM, _S.SHM_FULL, r"DataLoader worker.{0,60}killed by signal: Bus error", family="mem"),
    Text("DataLoader worker", _K.OOM, _S.HOST_MEMORY, r"DataLoader worker.{0,60}killed by signal: Killed", family="mem"),
    Text("out of shared memory", _K.LIMIT, _S.SHM_FULL, family="mem"),
    Text("insufficient shared memory", _K.LIMIT, _S.SHM_FULL, family="mem"),
    Text("/dev/shm", _K.LIMIT, _S.SHM_FULL, r"(?:[Ee]rror|failed|unable|No space).{0,120}/dev/shm|/dev/shm.{0,160}(?:No space|failed|not enough)",
         family="mem"),
    Text("posix_fallocate failed", _K.LIMIT, _S.SHM_FULL, family="mem"),

    Text("items of ancdata", _K.LIMIT, _S.RESOURCE_LIMIT, r"received \d items of ancdata", detail="open files (ulimit -n)"),
    Text("Bus error", _K.LIMIT, _S.SHM_FULL, r"nonexistent physical address|Bus error.{0,60}(?:shm|shared memory)", detail="/dev/shm", family="mem"),
    Text("max locked memory", _K.LIMIT, _S.RESOURCE_LIMIT, r"[Pp]lease set max locked memory.{0,40}", detail="locked memory (ulimit -l)", family="mem"),
    Text("cannot allocate memory for thread-local data", _K.OOM, _S.HOST_MEMORY, family="mem"),
    Text("ObjectStoreFullError", _K.OOM, _S.HOST_MEMORY, r"ObjectStoreFullError.{0,80}", family="mem"),
    Text("OutOfDiskError", _K.DISK, _S.DISK_FULL, r"OutOfDiskError.{0,80}", family="mem"),
    Text("Too many open files", _K.LIMIT, _S.RESOURCE_LIMIT, detail="open files (ulimit -n)"),
    Text("unable to open shared memory object", _K.LIMIT, _S.RESOURCE_LIMIT, detail="open files (ulimit -n)"),
    Text("an't start new thread", _K.LIMIT, _S.RESOURCE_LIMIT, detail="processes (ulimit -u)"),
    Text("Resource temporarily unavailable", _K.LIMIT, _S.RESOURCE_LIMIT, r"(?:pthread_create|fork|clone).{0,40}Resource temporarily",
         detail="processes (ulimit -u)"),
    # Disk.
    Text("No space left on device", _K.DISK, _S.DISK_FULL, family="mem"),
    Text("uota exceeded", _K.DISK, _S.DISK_FULL, r"[Dd]isk quota exceeded", family="mem"),
    Text("ead-only file system", _K.DISK, _S.DISK_BROKEN, family="disk"),
    Text("Input/output error", _K.DISK, _S.DISK_BROKEN, r"(?:Errno 5|OSError|IOError|I/O).{0,20}Input/output error", family="disk"),
    Text("tale file handle", _K.DISK, _S.DISK_BROKEN, family="disk"),
    Text("I/O error", _K.DISK, _S.DISK_BROKEN, r"(?:blk_update_request: |critical )?I/O error, dev \w{2,20}", family="disk"),
    Text("EXT4-fs error", _K.DISK, _S.DISK_BROKEN, family="disk"),
    Text("file write failed", _K.DISK, _S.DISK_FULL, r"PytorchStreamWriter failed.{0,80}file write failed|inline_container.{0,60}file write failed",
         family="mem"),

    Text("Remote I/O error", _K.DISK, _S.DISK_BROKEN, family="disk"),
    Text("endpoint is not connected", _K.DISK, _S.DISK_BROKEN, r"[Tt]ransport endpoint is not connected", family="disk"),
    Text("annot send after transport endpoint shutdown", _K.DISK, _S.DISK_BROKEN, family="disk"),
    Text("nput/output error", _K.DISK, _S.DISK_BROKEN, r": [Ii]nput/output error", family="disk"),
    Text("nvme", _K.DISK, _S.DISK_BROKEN, r"nvme\d{1,3}(?:n\d{1,3})?: .{0,60}(?:timeout|controller is down|I/O error|Device not ready)", detail="NVMe", family="disk"),
    Text("XFS", _K.DISK, _S.DISK_BROKEN, r"XFS \(\S{1,30}\): .{0,80}(?:[Cc]orruption|I/O [Ee]rror|shut(?:ting)? down)", detail="XFS", family="disk"),
    Text("LustreError", _K.DISK, _S.DISK_BROKEN, r"LustreError: .{0,120}", detail="Lustre", family="disk"),
    Text("Lustre:", _K.DISK, _S.DISK_BROKEN, r"Lustre: .{0,120}Connection to \S{1,60}.{0,60} was lost", detail="Lustre", family="disk"),
    Text("unexpected pos", _K.DISK, _S.DISK_FULL, r"inline_container.{0,80}unexpected pos \d{1,20} vs \d{1,20}", detail="a write that came short", family="mem"),
    Text("not responding", _K.DISK, _S.DISK_BROKEN, r"nfs: server \S{1,60} not responding", detail="NFS server silent", family="disk"),
)  # fmt: skip

#: What ranks say of each other, and of the way between them.
BETWEEN: tuple[Text, ...] = (

    Text("NET/OFI", _K.NCCL_WARN, _S.PEER_GONE, r"NET/OFI.{0,200}(?:[Uu]nresponsive (?:receiver|peer)|peer .{0,30}(?:closed|gone)).{0,80}", family="ofi"),
    Text("NET/OFI", _K.NCCL_WARN, _S.NIC, r"NET/OFI.{0,120}(?:[Nn]o eligible providers|[Cc]ould ?n.t (?:find|open)|fi_getinfo|no provider).{0,80}", family="ofi"),
    Text("NET/OFI", _K.NCCL_WARN, _S.RESOURCE_LIMIT, r"NET/OFI.{0,200}Cannot allocate memory.{0,40}", detail="locked memory (ulimit -l)", family="ofi"),
    Text("NET/OFI", _K.NCCL_WARN, _S.LINK, r"NET/OFI.{0,160}(?:completed with error|RC: -?\d{1,6}|[Uu]nable to write to EQ|prov_errno|CQE).{0,120}", family="ofi"),
    Text("retry count exceeded", _K.NCCL_WARN, _S.LINK, r"[Tt]ransport retry count exceeded.{0,80}", family="ib"),
    Text("Endpoint timeout", _K.NCCL_WARN, _S.LINK, r"UCX.{0,120}[Ee]ndpoint timeout", family="ucx"),
    Text("UCX", _K.NCCL_WARN, _S.PEER_GONE, r"UCX.{0,160}(?:[Cc]onnection reset by (?:remote )?peer|[Rr]emote operation error|peer failure)", family="ucx"),
    Text("ibv_create_qp", _K.LIMIT, _S.RESOURCE_LIMIT, r"ibv_create_qp\(?.{0,80}failed: Cannot allocate memory", detail="locked memory (ulimit -l)", family="mem"),
    Text("UCX", _K.NCCL_WARN, _S.NIC, r"UCX.{0,40}(?:network device|no active|[Nn]o (?:usable|such) )(?:transport|device)?.{0,80}", family="ucx"),
    Text("unable to complete a TCP connection", _K.NCCL_WARN, _S.LINK, family="mpi"),
    Text("unable to reach each other", _K.NCCL_WARN, _S.LINK, family="mpi"),
    Text("lost communication with a remote daemon", _K.NODE, _S.NODE_GONE, r"ORTE has lost communication with a remote daemon", detail="mpirun: a node is lost", family="end"),
    Text("not enough slots available", _K.LIMIT, _S.SETTING, family="mpi"),
    Text("ismatch between collectives", _K.COLLECTIVE_MISMATCH, _S.MISMATCH,
         r"Detected mismatch between collectives on ranks.{0,40}?Rank (?P<rank>\d{1,6})(?:.{0,900}?but Rank (?P<ranks>\d{1,6}))?",
         family="mismatch"),
    Text("ismatched collective detected", _K.COLLECTIVE_MISMATCH, _S.MISMATCH, r"ismatched collective detected(?:.{0,120}?rank (?P<ranks>\d{1,6}))?",
         family="mismatch"),
    Text("lagging/dead/mismatched ranks", _K.COLLECTIVE_MISMATCH, _S.TOLD, family="mismatch"),
    Text("joined but didn't finish", _K.COLLECTIVE_MISMATCH, _S.WAITED, r"\[(?P<ranks>[\d, ]{1,200})\] joined but didn't finish collective"),
    Text("but didn't join", _K.COLLECTIVE_MISMATCH, _S.ABSENT,
         r"\[(?P<ranks>[\d, ]{1,200})\] (?:finished collective #?\d{1,12}, )?but didn't join"),
    Text("op.preamble.length <= op.nbytes", _K.GLOO_ERROR, _S.MISMATCH, family="mismatch"),
    Text("expects same model across all ranks", _K.COLLECTIVE_MISMATCH, _S.MISMATCH,
         r"expects same model across all ranks, but Rank \d{1,6}.{0,80}?rank (?P<ranks>\d{1,6})?", family="mismatch"),
    Text("collective mismatch error", _K.NCCL_WARN, _S.MISMATCH, r"(?:peer (?P<peer>[^\s<]{1,80})\S{0,10} )?collective mismatch error.{0,60}", family="mismatch"),
    Text("Culprit rank", _K.RECORDER, _S.MISMATCH, r"Culprit rank (?P<ranks>\d{1,6}); Error type: \w{0,40}MISMATCH", family="fr"),
    Text("appears not to match", _K.COLLECTIVE_MISMATCH, _S.MISMATCH, r"params?\[\d{1,6}\] in this process.{0,80}appears not to match",
         family="mismatch"),
    Text("message truncated", _K.NCCL_WARN, _S.MISMATCH, r"[Mm]essage truncated ?: receiv\w{2,4} \d{1,15}", family="mismatch"),
    Text("failed to pass monitoredBarrier", _K.GLOO_ERROR, _S.ABSENT, r"Ranks? (?P<ranks>[\d, ]{1,200}) failed to pass monitoredBarrier"),
    Text("Mismatched NCCL version", _K.NCCL_WARN, _S.VERSIONS, r"Mismatched NCCL version detected.{0,20}rank (?P<rank>\d{1,6}) version"
         r".{0,20}rank (?P<ranks>\d{1,6}) version"),
    Text("undefined symbol", _K.EXCEPTION, _S.VERSIONS, r"undefined symbol: ?\w{0,60}", family="exception"),
    Text("have finished reduction in the prior iteration", _K.EXCEPTION, _S.PROGRAM, family="exception"),
    Text("shapes cannot be multiplied", _K.EXCEPTION, _S.PROGRAM, family="exception"),
    Text("size mismatch for", _K.EXCEPTION, _S.PROGRAM, family="exception"),
    Text("Expected all tensors to be on the same device", _K.EXCEPTION, _S.PROGRAM, family="exception"),
    Text("does not require grad and does not have a grad_fn", _K.EXCEPTION, _S.PROGRAM, family="exception"),
    Text("symbol lookup error", _K.EXCEPTION, _S.VERSIONS, family="exception"),
    Text("Duplicate GPU detected", _K.NCCL_WARN, _S.SETTING, r"Duplicate GPU detected ?: rank (?P<rank>\d{1,6}) and rank (?P<ranks>\d{1,6})"),
    # NCCL over InfiniBand and RoCE. Status 12: retries exceeded; 5: flushed, a consequence of an error elsewhere.
    Text("Got completion", _K.NCCL_WARN, _S.PEER_GONE,
         r"Got completion(?: from peer (?P<peer>[^\s<]{1,80}))?.{0,40}? with (?:error |status ?= ?(?:\w{1,40}\()?)(?P<code>5)\b.{0,80}", family="ib"),
    Text("Got completion", _K.NCCL_WARN, _S.FABRIC,
         r"Got completion(?: from peer (?P<peer>[^\s<]{1,80}))?.{0,40}? with (?:error |status ?= ?(?:\w{1,40}\()?)(?P<code>[1-4]|6|9|10|11)\b.{0,80}",
         family="ib"),
    Text("Got completion", _K.NCCL_WARN, _S.LINK,
         r"Got completion(?: from peer (?P<peer>[^\s<]{1,80}))?.{0,40}? with (?:error |status ?= ?(?:\w{1,40}\()?)(?P<code>\d{1,3})\b.{0,80}",
         family="ib"),
    Text("ibv_modify_qp", _K.NCCL_WARN, _S.NIC, r"ibv_modify_qp failed with.{0,20}(?:No such device|Invalid argument|Operation not permitted).{0,40}",
         family="ib"),
    Text("ibv_modify_qp", _K.NCCL_WARN, _S.LINK, r"ibv_modify_qp failed with.{0,80}", family="ib"),

    Text("ibv_reg_", _K.NCCL_WARN, _S.FABRIC, r"ibv_reg_(?:dmabuf_)?mr\w{0,12} failed(?!.{0,30}Cannot allocate).{0,80}", family="ib"),
    Text("ibv_", _K.NCCL_WARN, _S.NIC, r"Call to ibv_(?!reg_mr|create)\w{1,40} failed.{0,80}", family="ib"),
    Text("async", _K.NCCL_WARN, _S.LINK, r"NET/IB ?: ?\S{0,40} ?(?:Got )?(?:async|non-fatal async)[^:]{0,20}event ?: ?.{0,10}?(?:port error|link|lid).{0,40}",
         family="ib"),
    Text("async fatal event", _K.NCCL_WARN, _S.NIC, r"async fatal event.{0,80}", family="ib"),
    Text("Unable to open device", _K.NCCL_WARN, _S.NIC, r"NET/IB ?: Unable to open device \S{0,40}", family="ib"),
    Text("No device found", _K.NCCL_WARN, _S.NOISE, r"NET/IB ?: No device found", family="ib"),
    Text("incompatible devices", _K.NCCL_WARN, _S.SETTING, r"Attempted to (?:connect|merge) incompatible devices", family="ib"),
    # NCCL over sockets.


    Text("amily not supported by protocol", _K.NCCL_WARN, _S.SETTING, r"Address family not supported by protocol", family="sock"),
    Text("is neither AF_INET", _K.NCCL_WARN, _S.SETTING, r"family \d{1,6} is neither AF_INET.{0,40}", detail="an address without a family: the interface is wrong or gone", family="sock"),
    Text("onnect", _K.NCCL_WARN, _S.SETTING, r"NCCL WARN.{0,80}onnect(?:ion)? to (?:127\.\d{1,3}\.\d{1,3}\.\d{1,3}|::1|fe80:[\w:%.]{1,60}|172\.17\.\d{1,3}\.\d{1,3})<\d{1,6}>"
         r".{0,20}(?:failed|returned).{0,60}", detail="an address that other machines cannot reach (loopback, link-local or a container's bridge)", family="sock"),
    Text("onnect to", _K.NCCL_WARN, _S.LINK, r"(?:onnect(?:ion)?|connect) to (?P<peer>[^\s<]{1,80})(?:<\d{1,6}>)? (?:failed|returned) ?:? ?"
         r"(?:Software caused connection abort|No route to host|Network is unreachable|Connection timed out|Host is down|Operation timed out)", family="sock"),
    Text("onnect", _K.NCCL_WARN, _S.LINK, r"Call to connect (?:to (?P<peer>\S{1,80}) )?(?:returned|failed).{0,20}"
         r"(?:No route to host|Network is unreachable|[Tt]imed out|abort)", family="sock"),
    Text("No route to host", _K.NCCL_WARN, _S.LINK, family="sock"),
    Text("Network is unreachable", _K.NCCL_WARN, _S.LINK, family="sock"),
    Text("no socket interface found", _K.NCCL_WARN, _S.SETTING, family="sock"),
    Text("No usable listening interface", _K.NCCL_WARN, _S.SETTING, family="sock"),
    Text("o interface found", _K.NCCL_WARN, _S.SETTING, r"NET/\w{2,10} ?: (?:No IP|no) interface found", family="sock"),
    Text("Unable to find address for", _K.GLOO_ERROR, _S.SETTING, family="sock"),
    Text("Unable to find interface", _K.GLOO_ERROR, _S.SETTING, family="sock"),
    Text("losed by remote peer", _K.NCCL_WARN, _S.PEER_GONE, r"onnection closed by remote peer ?(?P<peer>[^\s<]{0,80})", family="sock"),
    Text("while polling for opId", _K.NCCL_WARN, _S.PEER_GONE, r"Socket recv failed while polling for opId", family="sock"),
    Text("onnection refused", _K.NCCL_WARN, _S.CALL_FAILED, r"(?:NCCL WARN|NET/|socket\w{5,20}|Call to connect).{0,160}Connection refused",
         family="sock"),
    Text("Call to ", _K.NCCL_WARN, _S.PEER_GONE,
         r"Call to (?:recv|send)\w{0,6} (?:(?:from|to) (?P<peer>[^\s<]{1,80})\S{0,12} )?failed ?: (?:Broken pipe|Connection reset by peer)",
         family="sock"),
    Text("Call to ", _K.NCCL_WARN, _S.LINK,
         r"Call to (?:recv|send)\w{0,6} (?:(?:from|to) (?P<peer>[^\s<]{1,80})\S{0,12} )?failed ?: (?:Connection timed out|No route to host)",
         family="sock"),
    Text("onnection reset by peer", _K.NCCL_WARN, _S.PEER_GONE, r"NCCL WARN.{0,160}onnection reset by peer", family="sock"),
    # NCCL's own ways inside a machine.

    Text("nvls", _K.NCCL_WARN, _S.FABRIC, r"transport/nvls\.cc.{0,40}NCCL WARN.{0,100}", detail="NVLS", family="fabric"),
    Text("IMEX", _K.NCCL_WARN, _S.FABRIC, r"IMEX.{0,80}(?:fail|not |error).{0,60}", detail="multi-node NVLink (IMEX)", family="fabric"),
    Text("CUDA_ERROR_NOT_PERMITTED", _K.NCCL_WARN, _S.FABRIC, family="fabric"),
    Text("nvidia_peermem", _K.NCCL_WARN, _S.FABRIC, r"nvidia_peermem.{0,60}(?:not |fail|missing).{0,40}", family="fabric"),
    Text("p2p.cc", _K.NCCL_WARN, _S.FABRIC, r"transport/p2p\.cc.{0,40}NCCL WARN.{0,100}", detail="P2P", family="fabric"),
    Text("NVLS", _K.NCCL_WARN, _S.FABRIC, r"Failed to bind NVLink SHARP.{0,120}|NVLS.{0,60}(?:[Cc]uda failure|failed).{0,60}", family="fabric"),
    Text("operation not supported", _K.NCCL_WARN, _S.FABRIC, r"[Cc]uda failure (?:\d{1,4} )?'operation not supported'", family="fabric"),
    Text("cuMem", _K.NCCL_WARN, _S.FABRIC, r"cuMem\w{2,40} failed.{0,60}|CUMEM.{0,60}failed.{0,40}", family="fabric"),
    Text("IpcGetMemHandle", _K.NCCL_WARN, _S.FABRIC, r"(?:hip|cuda)IpcGetMemHandle failed.{0,60}", family="fabric"),
    Text("IpcOpenMemHandle", _K.NCCL_WARN, _S.FABRIC, r"(?:hip|cuda)IpcOpenMemHandle.{0,20}failed.{0,60}", family="fabric"),
    Text("peer access is not supported", _K.NCCL_WARN, _S.FABRIC, family="fabric"),
    Text("peer mapping resources exhausted", _K.NCCL_WARN, _S.FABRIC, family="fabric"),
    Text("has no transport for", _K.NCCL_WARN, _S.FABRIC, r"Rank (?P<rank>\d{1,6}) has no transport for.{0,60}", family="fabric"),
    Text("P2P is disabled between NVLINK", _K.NCCL_WARN, _S.NOISE, family="fabric"),
    # What the calls returned.
    Text("emote process exited", _K.NCCL_ERROR, _S.PEER_GONE, family="returned"),
    Text("ncclRemoteError", _K.NCCL_ERROR, _S.PEER_GONE, family="returned"),
    Text("ncclSystemError", _K.NCCL_ERROR, _S.CALL_FAILED, family="returned"),
    Text("nhandled system error", _K.NCCL_ERROR, _S.CALL_FAILED, family="returned"),
    Text("ncclUnhandledCudaError", _K.NCCL_ERROR, _S.RAISED, family="returned"),
    Text("nhandled cuda error", _K.NCCL_ERROR, _S.RAISED, family="returned"),
    Text("ncclInternalError", _K.NCCL_ERROR, _S.RAISED, family="returned"),
    Text("ncclInvalidUsage", _K.NCCL_ERROR, _S.SETTING, family="returned"),
    Text("nvalid usage", _K.NCCL_ERROR, _S.SETTING, r"NCCL.{0,160}invalid usage", family="returned"),
    Text("ncclInvalidArgument", _K.NCCL_ERROR, _S.PROGRAM, family="returned"),
    Text("NCCL WARN", _K.NCCL_WARN, _S.RAISED, r"NCCL WARN (?:Cuda|Hip|hip|HIP) failure(?!.{0,10}out of memory).{0,80}", family="fabric"),
    # gloo.
    Text("losed by peer", _K.GLOO_ERROR, _S.PEER_GONE, r"onnection closed by peer \[?(?P<peer>[^\s\]]{1,80})", family="gloo"),
    Text("gloo", _K.GLOO_ERROR, _S.PEER_GONE, r"gloo/.{0,120}(?:Connection reset by peer|Broken pipe|Connection refused)", family="gloo"),
    Text("onnection reset by peer", _K.GLOO_ERROR, _S.PEER_GONE, r"(?:[Rr]ead error|writev|Socket) ?\[?(?P<peer>[^\s\]]{1,80})\]?.{0,20}onnection reset by peer",
         family="gloo"),
    Text("imed out waiting", _K.GLOO_ERROR, _S.WAITED, r"Timed out waiting (?P<seconds>\d{1,9})ms for (?:recv|send)", family="gloo"),
    Text("Application timeout caused pair closure", _K.GLOO_ERROR, _S.WAITED, family="gloo"),
    Text("connectFullMesh failed", _K.GLOO_ERROR, _S.CALL_FAILED, family="gloo"),
    Text("onnect timeout", _K.GLOO_ERROR, _S.LINK, r"[Cc]onnect timeout \[(?P<peer>[^\s\]]{1,80})", family="gloo"),
    # TCPStore, rendezvous.
    Text("imeout waiting for key", _K.TCPSTORE_ERROR, _S.SETUP_WAITED,
         r"(?:\[(?P<rank>\d{1,6})\] is setting up NCCL communicator.{0,80}?from \[(?P<ranks>\d{1,6})\].{0,200}?)?imeout waiting for key.{0,80}",
         family="store"),
    Text("wait timeout after", _K.TCPSTORE_ERROR, _S.SETUP_WAITED, r"wait timeout after (?P<seconds>\d{1,9})ms.{0,120}", family="store"),
    Text("store based barrier", _K.TCPSTORE_ERROR, _S.SETUP_WAITED,
         r"Timed out initializing process group in store based barrier on rank:? (?P<rank>\d{1,6}).{0,160}", family="store"),
    Text("waiting for clients", _K.TCPSTORE_ERROR, _S.SETUP_WAITED, r"imed out after \d{1,9} seconds waiting for clients.{0,60}", family="store"),
    Text("lient socket has timed out", _K.TCPSTORE_ERROR, _S.SETUP_WAITED, r"client socket has timed out after.{0,120}", family="store"),
    Text("EADDRINUSE", _K.TCPSTORE_ERROR, _S.SETTING, family="store"),
    Text("ddress already in use", _K.TCPSTORE_ERROR, _S.SETTING, family="store"),
    Text("TCPStore server has shut down", _K.TCPSTORE_ERROR, _S.STORE_GONE, family="store"),
    Text("TCPStore", _K.TCPSTORE_ERROR, _S.STORE_GONE, r"TCPStore\.cpp.{0,60}(?:sendBytes|recvValue\w{0,20}|recvBytes|recvVector\w{0,10}) failed", family="store"),
    Text("DistNetworkError", _K.TCPSTORE_ERROR, _S.STORE_GONE, r"DistNetworkError.{0,160}(?:Connection reset|Broken pipe|failed to recv|Connection was likely closed)",
         family="store"),
    Text("RendezvousConnectionError", _K.RENDEZVOUS, _S.COORDINATOR, family="rdzv"),
    Text("onnection to the C10d store has failed", _K.RENDEZVOUS, _S.COORDINATOR, family="rdzv"),

    Text("RendezvousClosedError", _K.RENDEZVOUS, _S.COORDINATOR, family="rdzv"),
    Text("Failed to connect to GCS", _K.RENDEZVOUS, _S.COORDINATOR, detail="Ray's head", family="rdzv"),
    Text("GCS", _K.RENDEZVOUS, _S.COORDINATOR, r"(?:[Ff]ailed to connect to|[Uu]nable to connect to|[Ll]ost connection to|cannot connect to).{0,20}GCS", detail="Ray's head", family="rdzv"),
    Text("ontact slurm controller", _K.RENDEZVOUS, _S.COORDINATOR, r"Unable to contact slurm controller.{0,60}", detail="slurmctld", family="rdzv"),
    Text("imed out on send/recv operation", _K.RENDEZVOUS, _S.COORDINATOR, r"(?:srun|salloc|sbatch|slurm_\w{1,40}).{0,120}Socket timed out on send/recv operation", detail="Slurm's daemons",
         family="rdzv"),
    Text("RendezvousTimeoutError", _K.RENDEZVOUS, _S.SETUP_WAITED, family="rdzv"),
    Text("etcdserver:", _K.STORE, _S.COORDINATOR, r"etcdserver: (?:request timed out|no leader|mvcc: database space exceeded|leader changed).{0,40}"),
    Text("Missing", _K.NCCL_WARN, _S.NOISE, r"NCCL WARN Missing \"[^\"]{1,60}\"", family="rccl-noise"),
)  # fmt: skip

#: How processes ended, and what their watchers said.
ENDS: tuple[Text, ...] = (

    Text("TIME LIMIT", _K.LIMIT, _S.SETTING, r"(?:CANCELLED|TERMINATED) AT .{0,60}DUE TO TIME LIMIT", detail="Slurm: the time limit of the job", family="sched"),
    Text("PREEMPTION", _K.LIMIT, _S.SETTING, r"CANCELLED AT .{0,60}DUE TO PREEMPTION", detail="Slurm: preempted", family="sched"),
    Text("NODE FAILURE", _K.NODE, _S.NODE_GONE, r"CANCELLED AT .{0,60}DUE TO NODE FAILURE.{0,80}", detail="Slurm: node failed", family="end"),
    Text("Node failure on", _K.NODE, _S.NODE_GONE, r"srun: error: Node failure on (?P<node>[\w.,\[\]-]{1,80})", detail="Slurm: node failed", family="end"),
    Text("CANCELLED AT", _K.EXIT, _S.TOLD, r"(?:JOB|STEP) \S{1,40} .{0,60}CANCELLED AT", detail="Slurm: cancelled", family="end"),
    Text("task", _K.EXIT, _S.KILLED, r"srun: error: (?P<node>[\w.-]{1,80}): tasks? (?P<ranks>[\d,]{1,80}): (?:Killed|Exited with exit code 137)", detail="SIGKILL", family="end"),
    Text("task", _K.EXIT, _S.CRASHED, r"srun: error: (?P<node>[\w.-]{1,80}): tasks? (?P<ranks>[\d,]{1,80}): (?:Segmentation fault|Bus error|Floating point|Illegal instruction)", detail="signal",
         family="end"),
    Text("task", _K.EXIT, _S.ABORTED, r"srun: error: (?P<node>[\w.-]{1,80}): tasks? (?P<ranks>[\d,]{1,80}): (?:Aborted|Exited with exit code 134)", detail="SIGABRT", family="end"),
    Text("nvalid generic resource", _K.LIMIT, _S.SETTING, r"Invalid generic resource \(gres\) specification", family="sched"),
    Text("credential expired", _K.LIMIT, _S.SETTING, r"[Jj]ob credential expired", detail="Slurm: the clocks of the nodes differ", family="sched"),
    Text("FailedScheduling", _K.LIMIT, _S.SETTING, r"FailedScheduling.{0,160}", family="sched"),
    Text("nsufficient nvidia.com/gpu", _K.LIMIT, _S.SETTING, family="sched"),
    Text("ImagePull", _K.LIMIT, _S.SETTING, r"ErrImagePull|ImagePullBackOff", family="sched"),
    Text("DeadlineExceeded", _K.LIMIT, _S.SETTING, r"Job was active longer than specified deadline|reason\W{1,4}DeadlineExceeded", detail="Kubernetes: the deadline of the job", family="sched"),
    Text("NodeNotReady", _K.NODE, _S.NODE_GONE, detail="Kubernetes: node not ready", family="end"),
    Text("NodeLost", _K.NODE, _S.NODE_GONE, detail="Kubernetes: node lost", family="end"),
    Text("xit", _K.EXIT, _S.KILLED, r"[Ee]xit(?: c|C)ode\W{1,4}137\b", detail="SIGKILL", family="end"),
    Text("xit", _K.EXIT, _S.CRASHED, r"[Ee]xit(?: c|C)ode\W{1,4}139\b", detail="segmentation fault", family="end"),
    Text("got signal: 1", _K.EXIT, _S.KILLED, r"got signal: 1\b", detail="SIGHUP: the terminal or session it ran in was closed", family="end"),
    Text("death signal", _K.EXIT, _S.KILLED, r"Received (?:1|SIGHUP|Signals\.SIGHUP) death signal", detail="SIGHUP: the terminal or session it ran in was closed", family="end"),

    Text("EXIT STRING", _K.EXIT, _S.KILLED, r"EXIT STRING: Killed \(signal 9\)", detail="SIGKILL", family="end"),
    Text("EXIT STRING", _K.EXIT, _S.CRASHED, r"EXIT STRING: .{0,40}\(signal (?P<code>11|7|4|8)\)", detail="signal", family="end"),
    Text("exited on signal", _K.EXIT, _S.CRASHED, r"exited on signal (?P<code>11|7|4|8)\b", detail="signal", family="end"),
    Text("exited on signal", _K.EXIT, _S.ABORTED, r"exited on signal 6\b", detail="SIGABRT", family="end"),
    Text("Caught signal", _K.EXIT, _S.CRASHED, r"Caught signal (?P<code>11|4|8)\b", detail="signal", family="end"),
    Text("ngine", _K.EXIT, _S.PEER_GONE, r"EngineDeadError|EngineCore (?:died|encountered a fatal error)|Engine core proc \S{0,40} ?died|Engine (?:loop|process) (?:is dead|died)",
         detail="the rollout engine's process ended", family="end"),
    Text("shared memory broadcast block", _K.HEARTBEAT_MONITOR, _S.WAITED, r"No available (?:shared memory broadcast )?block found in \d{1,6} second", detail="vLLM waits for one of its workers"),
    Text("illed when", _K.EXIT, _S.KILLED, r"[Ww]orker (?:process )?died or was killed (?:while|when) executing.{0,40}", detail="a worker died",
         family="end"),
    Text("died or was killed", _K.EXIT, _S.KILLED, r"worker died or was killed while executing.{0,60}", detail="a worker died", family="end"),
    Text("ctor", _K.EXIT, _S.KILLED, r"(?:RayActorError|ActorDiedError)\b.{0,60}", detail="a worker died", family="end"),
    Text("SYSTEM_ERROR", _K.EXIT, _S.KILLED, r"exit type: SYSTEM_ERROR", detail="a worker died", family="end"),
    Text("WorkerCrashedError", _K.EXIT, _S.KILLED, detail="a worker died", family="end"),
    Text("Signal 9", _K.EXIT, _S.KILLED, r"Signal 9 \(SIGKILL\) received by PID \d{1,9}", detail="SIGKILL", family="end"),
    Text("Signal", _K.EXIT, _S.CRASHED, r"Signal (?P<code>11|7|4|8) \(SIG\w{2,5}\) received by PID", detail="signal", family="end"),
    Text("Signal 6", _K.EXIT, _S.ABORTED, r"Signal 6 \(SIGABRT\) received by PID", detail="SIGABRT", family="end"),
    Text("xitcode", _K.EXIT, _S.KILLED, r"exitcode {0,8}: {0,3}-9\b", detail="SIGKILL", family="end"),
    Text("xitcode", _K.EXIT, _S.CRASHED, r"exitcode {0,8}: {0,3}-(?P<code>11|7|4|8)\b", detail="signal", family="end"),
    Text("xitcode", _K.EXIT, _S.ABORTED, r"exitcode {0,8}: {0,3}-6\b", detail="SIGABRT", family="end"),
    Text("xitcode", _K.EXIT, _S.TOLD, r"exitcode {0,8}: {0,3}-?\d{1,3}\b", detail="exit", family="end"),
    Text("return code", _K.EXIT, _S.KILLED, r"exits with return code ?= ?-9\b", detail="SIGKILL", family="end"),
    Text("return code", _K.EXIT, _S.CRASHED, r"exits with return code ?= ?-(?P<code>11|7|4|8)\b", detail="signal", family="end"),
    Text("egmentation fault", _K.EXIT, _S.CRASHED, detail="segmentation fault", family="end"),
    Text("closing signal", _K.EXIT, _S.TOLD, r"Sending process \d{1,9} closing signal SIG\w{2,5}", detail="told to stop", family="end"),
    Text("exited on signal 9", _K.EXIT, _S.KILLED, detail="SIGKILL", family="end"),
    Text("NODE_FAIL", _K.NODE, _S.NODE_GONE, r"NODE[_ ]FAIL\w{0,4}", detail="Slurm: node failed", family="end"),
    Text("raylet", _K.NODE, _S.NODE_GONE, r"raylet .{0,80}(?:marked dead|missed too many heartbeats)", detail="Ray: node dead", family="end"),
    Text("marked dead because", _K.NODE, _S.NODE_GONE, r"node with node id.{0,160}marked dead because", detail="Ray: node dead", family="end"),
    Text("not acquire GIL", _K.HEARTBEAT_MONITOR, _S.HOST_STUCK, r"Could not acquire GIL within \d{1,6} ms", detail="GIL held"),
    Text("blocked for more than", _K.KERNEL, _S.HOST_STUCK, r"task \S{1,40} blocked for more than \d{1,5} seconds", detail="file system or driver (kernel: blocked task)"),
    Text("soft lockup", _K.KERNEL, _S.HOST_STUCK, r"soft lockup - CPU#\d{1,4} stuck", detail="kernel soft lockup"),
)  # fmt: skip

TEXTS: tuple[Text, ...] = MACHINE + BETWEEN + ENDS

#: An exception's last line, as Python prints it.
EXCEPTION = re.compile(
    r"(?:^|\s|: |\])(?P<name>(?:[A-Za-z_]\w{0,40}\.){0,6}[A-Z]\w{1,50}(?:Error|Exception|Interrupt))(?:: ?(?P<said>.{0,300})|\s*$)"
)

#: Exceptions that only the program itself can cause.
PROGRAMS_OWN = MISTAKES | {
    "ImportError", "ModuleNotFoundError", "FileNotFoundError", "UnicodeDecodeError", "JSONDecodeError", "UnpicklingError",
    "NotADirectoryError", "IsADirectoryError", "DatasetGenerationError", "PermissionError",
}  # fmt: skip

#: Exceptions that say nothing of who is at fault: torn-down peers, agents that report, people who pressed ^C.
SECOND_HAND = frozenset({
    "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "ChildFailedError", "SignalException",
    "KeyboardInterrupt", "BrokenPipeError", "EOFError", "ConnectionResetError", "ConnectionAbortedError", "CancelledError",
    "RayTaskError", "RayActorError", "ActorDiedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException",
    "RendezvousConnectionError", "RendezvousTimeoutError", "TimeoutError", "TimeoutExpired", "OutOfMemoryError", "MemoryError",
    "StopIteration", "DistributedError",
})  # fmt: skip
