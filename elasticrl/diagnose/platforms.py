"""The texts of what a job stands on, listed from sources: kernels and links, Kubernetes, containers, Slurm, Ray, file systems, hubs.

The one idea: such a program prints hundreds of errors and nearly all of them mean one class. So a few rows say what differs
(PLATFORMS), and the last row of a program says what its errors mean if no other row knows one (BACKSTOPS). A last row has a
sign that speaks only where nothing else does (`meanings.VAGUE`, and consequences).
"""

# ruff: noqa: E501 -- a row of the table is one line, however long its expression

from elasticrl.contract.evidence import Kind, Sign
from elasticrl.diagnose.rows import Text

_K, _S = Kind, Sign

#: What tells more than its program's last row does.
PLATFORMS: tuple[Text, ...] = (
    # Launchers, shells and the place that a job runs in.
    Text("command not found", _K.LIMIT, _S.UNSUITED, r"\S{1,60}(?<!py-spy): command not found", detail="a program that is not installed there", family="sched"),
    Text(": not found", _K.LIMIT, _S.UNSUITED, r"^.{0,60}sh: (?:line )?\d{1,6}: \S{1,60}: not found", detail="a program that is not installed there", family="sched"),
    Text("env: ", _K.LIMIT, _S.UNSUITED, r"/env: .{1,60}: No such file or directory", detail="a program that is not installed there", family="exception"),
    Text("KeyError: '", _K.LIMIT, _S.UNSUITED, r"KeyError: '(?:(?:LOCAL_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)|SLURM_\w{3,40}|OMPI_\w{3,40}|PMI_\w{3,20}|\w{0,12}VISIBLE_DEVICES|[A-Z]{2,20}_(?:HOME|PATH|DIR|KEY|TOKEN))'", detail="an environment variable that its launcher did not set", family="exception"),
    Text("SLURM", _K.LIMIT, _S.SETTING, r"You set `?-?-?\w{1,40}.{0,120}SLURM.{0,120}", detail="Slurm's tasks and the program's devices", family="exception"),
    Text("our machine only has", _K.LIMIT, _S.SETTING, r"You requested .{0,80}[Bb]ut your machine only has.{0,40}", detail="not enough GPUs", family="exception"),
    Text("pdsh@", _K.LIMIT, _S.SETTING, r"pdsh@\S{1,80}: \S{1,80}: (?:ssh exited|connect:|Could not|.{0,20}command not found).{0,60}", detail="ssh to the other nodes", family="sched"),
    Text("attempt to run as root", _K.LIMIT, _S.SETTING, r"has detected an attempt to run as root", detail="mpirun", family="mpi"),
    Text("binding more processes than", _K.LIMIT, _S.SETTING, detail="mpirun: binding of processes", family="mpi"),
    Text("hread creation failed", _K.LIMIT, _S.RESOURCE_LIMIT, r"libgomp: Thread creation failed.{0,60}", detail="processes (ulimit -u)", family="mem"),
    Text("OMP: Error #", _K.LIMIT, _S.RESOURCE_LIMIT, r"OMP: Error #(?:34|35|179).{0,80}", detail="processes (ulimit -u)", family="mem"),
    Text("OMP: Error #15", _K.EXCEPTION, _S.MISFIT, detail="two libraries for OpenMP", family="exception"),
    Text("RLIMIT_MEMLOCK is", _K.LIMIT, _S.UNSUITED, r"RLIMIT_MEMLOCK is \d{1,12} bytes", detail="locked memory (ulimit -l)", family="mem"),
    Text("cannot modify limit", _K.LIMIT, _S.UNSUITED, r"ulimit: .{0,60}cannot modify limit", detail="a limit that may not be raised", family="mem"),
    Text("max_map_count", _K.LIMIT, _S.RESOURCE_LIMIT, r"max_map_count.{0,40}(?:too low|is low|increase|at least)", detail="vm.max_map_count", family="mem"),
    Text("locate a modulefile", _K.LIMIT, _S.UNSUITED, r"[Uu]nable to locate a modulefile.{0,40}", detail="a module that is not there", family="sched"),
    Text("Lmod has detected", _K.LIMIT, _S.UNSUITED, r"Lmod has detected the following error.{0,80}", detail="a module that is not there", family="sched"),
    Text("hell has not been properly configured", _K.LIMIT, _S.UNSUITED, detail="conda", family="exception"),
    Text("NCCL WARN ", _K.NCCL_WARN, _S.SETTING, r"NCCL WARN .{0,30}(?:[Cc]ould not parse|[Ii]nvalid value|[Uu]nknown value|not a valid value).{0,60}", detail="a variable of NCCL", family="fabric"),
    Text("free port", _K.TCPSTORE_ERROR, _S.SETTING, r"(?:[Cc]ould ?n(?:ot|'t) find|[Nn]o|[Ff]ailed to find) .{0,10}free ports?.{0,40}", detail="no port is free", family="store"),
    Text("bind", _K.TCPSTORE_ERROR, _S.UNSUITED, r"(?:[Cc]ould ?n(?:ot|'t)|[Cc]annot|[Ff]ailed to|[Uu]nable to) bind .{0,20}(?:address|port|socket).{0,60}", detail="an address or port that cannot be had", family="store"),
    Text("specified on host", _K.LIMIT, _S.SETTING, r"No slot .{1,20} specified on host.{0,40}", detail="DeepSpeed's hostfile", family="sched"),
    Text("no GPU resources available", _K.LIMIT, _S.SETTING, detail="no GPU is visible", family="sched"),
    Text("launcher '", _K.LIMIT, _S.SETTING, r"launcher '\w{1,20}' not installed", detail="a launcher that is not installed", family="exception"),
    Text("User-specified max_model_len", _K.EXCEPTION, _S.UNSUITED, r"User-specified max_model_len.{0,120}", family="exception"),
    Text("No visible GPU devices", _K.LIMIT, _S.UNSUITED, detail="no GPU is visible", family="exception"),
    Text("Inconsistent compute device and", _K.EXCEPTION, _S.UNSUITED, r"Inconsistent compute device and .{0,60}", family="exception"),
    Text("aiting on lock file", _K.STACK, _S.WAITED, r"[Ww]aiting on lock file.{0,60}", detail="waits for a lock file"),
    Text("JobHeld", _K.LIMIT, _S.SETTING, r"\bJobHeld(?:User|Admin)\b", detail="Slurm: the job is held", family="sched"),
    Text("Reason=", _K.LIMIT, _S.SETTING, r"Reason=(?:Assoc|QOS|Partition|ReqNodeNotAvail|BadConstraints|Invalid|DependencyNever)\w{0,40}", detail="Slurm", family="sched"),
    # Libraries that do not fit.
    Text("operator ", _K.EXCEPTION, _S.MISFIT, r"operator \w{2,40}::\w{1,60} does not exist", detail="built for another torch", family="exception"),
    Text("Could not run '", _K.EXCEPTION, _S.MISFIT, r"Could not run '\w{2,40}::\w{1,60}' with arguments from the '\w{2,20}' backend", detail="built without this kind of device", family="exception"),
    Text("_OpNamespace", _K.EXCEPTION, _S.VERSIONS, r"'_OpNamespace' '\w{1,60}' object has no attribute.{0,60}", detail="its compiled part was not loaded", family="exception"),
    Text("compiled with different CUDA", _K.CUDA_ERROR, _S.VERSIONS, family="cuda"),
    Text("ot compiled with --", _K.EXCEPTION, _S.MISFIT, r"not compiled with --\w{2,40}", family="exception"),
    Text("build does not support", _K.EXCEPTION, _S.MISFIT, r"build does not support.{0,60}", family="exception"),
    Text("ABI mismatch", _K.EXCEPTION, _S.VERSIONS, r"ABI mismatch.{0,80}", family="exception"),
    Text("rotocol version", _K.VERSION, _S.VERSIONS, r"[Pp]rotocol version \d{1,8} not supported", family="exception"),
    Text("InvalidVersion", _K.EXCEPTION, _S.MISFIT, r"InvalidVersion: .{0,60}", family="exception"),
    Text("CalledProcessError: Command '", _K.EXCEPTION, _S.MISFIT, r"CalledProcessError: Command '\[?'?(?:ninja|nvcc|cmake|which|gcc|g\+\+|\S{0,60}/(?:gcc|cc|g\+\+|nvcc))'.{0,80}", detail="a kernel could not be built", family="exception"),
    Text("Unrecognized configuration class", _K.EXCEPTION, _S.MISFIT, r"Unrecognized configuration class.{0,80}", family="exception"),
    Text("is not defined", _K.EXCEPTION, _S.MISFIT, r"name '(?:amp_C|fused_\w{1,40}|flash_attn\w{0,40}|\w{1,40}_cuda|scaled_\w{1,60})' is not defined", detail="its compiled part is not installed", family="exception"),
    Text("object has no attribute", _K.EXCEPTION, _S.MISFIT, r"'\w{1,60}(?:Config|Cache|Tokenizer|TokenizerFast|Trainer|ForCausalLM|ForConditionalGeneration|Attention|DecoderLayer|PreTrainedModel)' object has no attribute.{0,60}", family="exception"),
    # Kernels, drivers and cards.
    Text("NVRM", _K.XID, _S.GPU_BROKEN, r"NVRM: .{0,100}(?:GPU lost from the bus|NV_ERR_GPU_IS_LOST|uvm encountered global fatal error)", detail="the driver has lost the GPU", family="xid"),
    Text("NVRM", _K.XID, _S.GPU_BROKEN, r"NVRM: .{0,40}(?:rm_init_adapter failed|osInitNvMapping.{0,12}(?:Cannot attach gpu|failed))", detail="the driver cannot start the GPU", family="xid"),
    Text("GPU is probably locked", _K.XID, _S.GPU_SUSPECT, detail="the driver's watchdog", family="xid"),
    Text("amdgpu", _K.KERNEL, _S.GPU_BROKEN, r"amdgpu.{0,80}(?:ring [\w.]{1,30} timeout|GPU reset ?\(\d{1,4}\) failed|GPU reset end with ret = -)", family="amd"),
    Text("Machine Check", _K.KERNEL, _S.GPU_SUSPECT, r"Hardware Error\]: (?:CPU \d{1,4}: )?Machine Check", detail="machine check"),
    Text("pcieport", _K.KERNEL, _S.GPU_SUSPECT, r"pcieport .{0,40}(?:DPC: (?:containment event|.{0,20}error)|pciehp: Slot\(\S{1,10}\): (?:Link Down|Card not present))", detail="PCIe: a device went away", family="aer"),
    Text("AER: can't recover", _K.KERNEL, _S.GPU_SUSPECT, detail="PCIe error", family="aer"),
    Text("NULL pointer dereference", _K.KERNEL, _S.NODE_GONE, r"BUG: kernel NULL pointer dereference", detail="the kernel failed", family="end"),
    Text("systemd-shutdown", _K.NODE, _S.NODE_GONE, r"systemd-shutdown\[\d{1,7}\]: .{0,60}", detail="the node was shut down", family="end"),
    Text("enter system sleep state S5", _K.NODE, _S.NODE_GONE, detail="the node was shut down", family="end"),
    Text("] trap ", _K.KERNEL, _S.CRASHED, r"\S{1,40}\[\d{1,9}\] trap (?:divide error|int3|bounds|stack segment).{0,40}", detail="a process crashed", family="end"),
    Text("__vm_enough_memory", _K.KERNEL, _S.HOST_MEMORY, r"__vm_enough_memory: .{0,60}not enough memory", family="mem"),
    Text("Slowdown", _K.KERNEL, _S.SLOW, r"\bHW Slowdown {1,60}: {1,8}Active", detail="throttled"),
    Text("carrier: link disconnected", _K.KERNEL, _S.LINK, detail="link down", family="nic"),
    Text("driver issue detected", _K.KERNEL, _S.NIC, r"(?:i40e|ice|ixgbe) .{0,60}driver issue detected.{0,40}", detail="the card's driver", family="nic"),
    Text("ueue_xmit failed", _K.KERNEL, _S.NIC, r"ib\d{1,2}: dev_queue_xmit failed.{0,40}", detail="the card does not send", family="nic"),
    Text("hw csum failure", _K.KERNEL, _S.NIC, detail="the card", family="nic"),
    Text("fabric manager", _K.CUDA_ERROR, _S.VERSIONS, r"fabric manager .{0,80}version \S{1,20} (?:don't|doesn't|does not) match", detail="fabric manager and driver", family="cuda"),
    Text("insert ", _K.CUDA_ERROR, _S.MISFIT, r"modprobe: ERROR: could not insert '?nvidia\w{0,12}", detail="the driver cannot be loaded", family="cuda"),
    Text("DKMS", _K.VERSION, _S.VERSIONS, r"(?:DKMS|dkms).{0,60}(?:[Bb]ad return status|failed|[Ee]rror!).{0,40}", detail="the driver is not built for this kernel", family="cuda", more=("dkms",)),
    Text("nvidia-persistenced", _K.CUDA_ERROR, _S.MISFIT, r"nvidia-persistenced.{0,20}: .{0,40}(?:[Ff]ailed to query NVIDIA devices|[Ff]ailed to initialize)", detail="the driver is not loaded", family="cuda"),
    Text("nvidia-peermem", _K.NCCL_WARN, _S.FABRIC, r"nvidia-peermem.{0,60}(?:Invalid|not |fail|missing).{0,40}", family="fabric"),
    # Tools that try a link.
    Text("Failed status ", _K.NCCL_WARN, _S.LINK, r"Failed status (?P<code>12|13)\b.{0,40}", detail="a transfer failed: status", family="ib"),
    Text("Failed status ", _K.NCCL_WARN, _S.FABRIC, r"Failed status (?P<code>\d{1,2}): wr_id.{0,40}", detail="a transfer failed: status", family="ib"),
    Text("modify QP", _K.NCCL_WARN, _S.LINK, r"[Ff]ailed to modify QP(?: \w{1,12})? to \w{3,4}", family="ib"),
    Text("GID index", _K.NCCL_WARN, _S.NIC, r"(?:[Uu]nable|[Ff]ailed) to (?:find|query|get) (?:a )?(?:valid )?GID(?: index)?", detail="the card has no such GID", family="ib", more=("GID",)),
    *(
        Text(f" {what}", _K.NCCL_WARN, _S.NIC, rf"(?:[Uu]nable to|[Ff]ailed to|[Cc]ould(?: not|n't)) (?:create|modify|get|open|allocate|register|query) (?:\w{{1,12}} )?{what}\b.{{0,40}}", family="ib")
        for what in ("QP", "CQ", "PD", "IB resource", "IB device", "device attribute", "protection domain", "completion queue")
    ),
    Text("mad_rpc", _K.NCCL_WARN, _S.LINK, r"_do_madrpc failed; dport.{0,30}", detail="a port of InfiniBand does not answer", family="ib"),
    Text("iberror", _K.NCCL_WARN, _S.LINK, r"iberror: failed: .{0,60}", detail="InfiniBand", family="ib"),
    Text("RDMA_CM_EVENT_", _K.NCCL_WARN, _S.LINK, r"RDMA_CM_EVENT_(?:UNREACHABLE|ROUTE_ERROR|ADDR_ERROR|CONNECT_ERROR)", family="ib"),
    Text("rdma_resolve_", _K.NCCL_WARN, _S.LINK, r"rdma_resolve_(?:route|addr).{0,20}(?:timed out|fail|No route|unreachable).{0,30}", family="ib"),
    Text("Unable to init the socket connection", _K.NCCL_WARN, _S.CALL_FAILED, family="sock"),
    Text("Couldn't connect to ", _K.NCCL_WARN, _S.CALL_FAILED, r"Couldn't connect to [\w.:-]{3,80}:\d{2,5}", family="sock"),
    Text("nc: ", _K.NCCL_WARN, _S.LINK, r"\bnc: .{0,80}(?:timed out|No route|unreachable)", family="sock"),
    Text("nc: ", _K.NCCL_WARN, _S.CALL_FAILED, r"\bnc: .{0,80}refused", family="sock"),
    Text("curl: (", _K.EXCEPTION, _S.OUTSIDE, r"curl: \((?:5|6|7|18|28|35|52|55|56|92)\) .{0,100}", detail="a server outside cannot be reached", family="hub"),
    Text("pml_ucx", _K.CARRIER, _S.CALL_FAILED, r"pml_ucx\.c:\d{1,5} {1,3}Error: .{0,120}", family="ucx"),
    # Kubernetes: reasons of events, containers and pods, as kubectl's columns, as YAML and as JSON.
    Text("DeletionByPodGC", _K.NODE, _S.NODE_GONE, detail="Kubernetes: the node was removed", family="end"),
    Text("PodGC: node", _K.NODE, _S.NODE_GONE, r"PodGC: node no longer exists", detail="Kubernetes: the node was removed", family="end"),
    Text("NodeControllerEviction", _K.NODE, _S.NODE_GONE, detail="Kubernetes: the node was given up", family="end"),
    Text("Rebooted", _K.NODE, _S.NODE_GONE, r"(?:Warning|Normal) {1,12}Rebooted\b.{0,80}|has been rebooted, boot id", detail="Kubernetes: the node was rebooted", family="end", more=("has been rebooted",)),
    Text("ContainerStatusUnknown", _K.EXIT, _S.PEER_GONE, detail="Kubernetes: nobody knows how the container ended", family="end"),
    Text("xit", _K.EXIT, _S.ABORTED, r"[Ee]xit(?: c| C|C)ode\W{1,16}134\b", detail="SIGABRT", family="end"),
    Text("xit", _K.EXIT, _S.UNSUITED, r"\b(?:Exit Code|exitCode)\W{1,16}(?:126|127|128)\b", detail="the container has no such program, or must not run it", family="end"),
    Text("xit", _K.EXIT, _S.FAILED, r"\b(?:Exit Code|exitCode)\W{1,16}(?:1|2|255)\b", detail="its container ended with an error", family="end"),
    Text("exited with code ", _K.EXIT, _S.FAILED, r"Pod: \S{1,120} exited with code (?:1|2|255)\b", detail="its container ended with an error", family="end"),
    Text("BackoffLimitExceeded", _K.EXIT, _S.FAILED, detail="Kubernetes: its pods failed again and again", family="end"),
    Text("PIDPressure", _K.LIMIT, _S.RESOURCE_LIMIT, r"condition.{0,10}\[PIDPressure\]|PIDPressure {1,20}True", detail="processes of the node", family="mem"),
    Text("low on resource: pids", _K.LIMIT, _S.RESOURCE_LIMIT, detail="processes of the node", family="mem"),
    Text("reemption", _K.LIMIT, _S.UNSUITED, r"PreemptionByScheduler|preempting to accommodate a higher priority pod", detail="Kubernetes: preempted", family="sched", more=("preempting to accommodate",)),
    Text("EvictionByEvictionAPI", _K.LIMIT, _S.UNSUITED, detail="Kubernetes: evicted", family="sched"),
    Text("CrashLoopBackOff", _K.LIMIT, _S.UNSUITED, detail="Kubernetes: a container ends as often as it starts", family="sched"),
    Text("ack-off", _K.LIMIT, _S.UNSUITED, r"[Bb]ack-off .{0,20}restarting failed container", detail="Kubernetes: a container ends as often as it starts", family="sched"),
    Text("Error from server", _K.RENDEZVOUS, _S.COORDINATOR, r"Error from server \((?:InternalError|ServiceUnavailable|Timeout|ServerTimeout|TooManyRequests)\)", detail="Kubernetes' control plane", family="rdzv"),
    Text("Error from server", _K.LIMIT, _S.UNSUITED, r"Error from server(?: \(\w{3,30}\))?: .{0,120}", detail="Kubernetes refuses what was asked", family="sched"),
    Text("runAsNonRoot", _K.LIMIT, _S.SETTING, r"container has runAsNonRoot.{0,80}", detail="Kubernetes: the container's user", family="sched"),
    # Containers.
    Text("CDI ", _K.LIMIT, _S.SETTING, r"(?:unresolvable CDI|inject(?:ing)? CDI|generate CDI|create (?:device )?CDI|CDI (?:registry|spec\w{0,10}|device\w{0,2}).{0,40}(?:fail|not found|invalid)).{0,80}", detail="the container's GPUs", family="cuda", more=(" CDI",)),
    Text("driverInitFileInfo", _K.LIMIT, _S.UNSUITED, r"driverInitFileInfo \d{1,5} result=[1-9]", detail="the container's GPUs", family="cuda"),
    Text("nv files on this host", _K.LIMIT, _S.SETTING, r"Could not find any nv files on this host", detail="the container has no GPU driver", family="cuda"),
    Text("container creation failed", _K.LIMIT, _S.UNSUITED, r"container creation failed: .{0,120}", detail="the container cannot start", family="sched"),
    Text("Cannot connect to the Docker daemon", _K.LIMIT, _S.UNSUITED, detail="the container runtime does not run", family="sched"),
    Text("pyxis: [ERROR]", _K.LIMIT, _S.SETTING, r"pyxis: {1,8}\[ERROR\].{0,120}", detail="the container plugin", family="sched", more=("[ERROR]",)),
    Text("pyxis: ", _K.LIMIT, _S.SETTING, r"pyxis: (?:error: a container with name|child \d{1,9} failed|container start failed|.{0,20}no such file|.{0,20}mkdir).{0,120}", detail="the container plugin", family="sched"),
    Text("SPANK plugin", _K.LIMIT, _S.SETTING, r"SPANK plugin .{1,60} option .{1,60} not found", detail="a plugin of Slurm that not all nodes have", family="sched"),
    # Slurm.
    Text("Node failure", _K.NODE, _S.NODE_GONE, r"error: (?P<node>[\w.-]{1,80}): tasks? [\d,-]{1,80}: Node failure", detail="Slurm: node failed", family="end"),
    # Ray.
    Text("reconnect to GCS", _K.RENDEZVOUS, _S.COORDINATOR, r"[Cc]ouldn't reconnect to GCS.{0,80}", detail="Ray's head", family="rdzv"),
    Text("check the health of this node", _K.RENDEZVOUS, _S.STORE_GONE, r"GCS failed to check the health of this node", detail="Ray's head does not hear this node", family="rdzv"),
    Text("ray client connection timeout", _K.RENDEZVOUS, _S.COORDINATOR, detail="Ray's head", family="rdzv"),
    Text("ailed to start GCS", _K.RENDEZVOUS, _S.COORDINATOR, detail="Ray's head", family="rdzv"),
    Text("ailed to start the dashboard", _K.RENDEZVOUS, _S.STORE_GONE, detail="Ray's head", family="rdzv"),
    Text("RaySystemError", _K.RENDEZVOUS, _S.STORE_GONE, r"RaySystemError: System error: (?:Broken pipe|Connection|[Ff]ailed to connect|Unknown error|.{0,60}(?:raylet|GCS|socket)).{0,80}", detail="Ray's daemons", family="rdzv"),
    Text("Check failed:", _K.RENDEZVOUS, _S.STORE_GONE, r"\((?:raylet|gcs_server)\) \S{1,60}\.(?:cc|h):\d{1,6}: {1,4}Check failed:.{0,120}", detail="a daemon of Ray ended", family="rdzv"),
    Text("GcsUnavailable", _K.RENDEZVOUS, _S.COORDINATOR, detail="Ray's head", family="rdzv"),
    Text("ailed to start ray head", _K.RENDEZVOUS, _S.COORDINATOR, detail="Ray's head", family="rdzv"),
    Text("RpcError: ", _K.RENDEZVOUS, _S.STORE_GONE, r"RpcError: (?:RPC error|[Ff]ailed to connect|[Tt]imed out|Deadline).{0,120}", detail="Ray's daemons", family="rdzv"),
    Text("ObjectFetchTimedOutError", _K.NCCL_WARN, _S.CALL_FAILED, detail="Ray: an object that cannot be fetched", family="rdzv"),
    Text("allocate any GPUs on the driver node", _K.LIMIT, _S.SETTING, detail="Ray: not enough GPUs", family="sched"),
    Text("required GPUs exceeds", _K.LIMIT, _S.SETTING, detail="Ray: not enough GPUs", family="sched"),
    # JAX.
    Text("XlaRuntimeError: ", _K.RENDEZVOUS, _S.UNMET, r"XlaRuntimeError: DEADLINE_EXCEEDED.{0,120}", detail="JAX's coordination service", family="rdzv"),
    Text("XlaRuntimeError: ", _K.RENDEZVOUS, _S.STORE_GONE, r"XlaRuntimeError: (?:UNAVAILABLE|ABORTED|CANCELLED).{0,120}", detail="JAX's coordination service", family="rdzv"),
    Text("coordination service with status", _K.RENDEZVOUS, _S.STORE_GONE, r"Failed to \w{3,20} (?:from|to|with) coordination service with status.{0,60}", detail="JAX's coordination service", family="rdzv"),
    # File systems.
    Text("fusermount", _K.DISK, _S.DISK_BROKEN, r"fusermount3?: .{0,120}(?:fail|not permitted|not found|denied|Invalid|not connected).{0,60}", detail="FUSE", family="disk"),
    Text("MessagingTk", _K.DISK, _S.DISK_BROKEN, r"MessagingTk.{0,40}>> .{0,120}", detail="BeeGFS", family="disk"),
    Text("beegfs", _K.DISK, _S.DISK_BROKEN, r"beegfs.{0,160}(?:[Nn]o connection|[Ff]ailed|[Ee]rror)", detail="BeeGFS", family="disk"),
    Text("ceph-fuse", _K.DISK, _S.DISK_BROKEN, r"ceph-fuse.{0,120}(?:evict|blocklist|fail|error|timed out)", detail="Ceph", family="disk"),
    *(
        Text(name, _K.DISK, _S.DISK_BROKEN, rf"\b{name}(?:\[\d{{1,9}}\])?: .{{0,120}}(?:ERROR|[Ee]rror|[Ff]ailed|[Tt]imed out)", detail="a file system in the network", family="disk")
        for name in ("goofys", "s3fs", "gcsfuse", "mount-s3", "blobfuse", "blobfuse2", "alluxio", "cvmfs2")
    ),
    # The way between them.
    Text("compiled with NCCL version", _K.VERSION, _S.VERSIONS, r"compiled with NCCL version.{0,20}but is running with NCCL library.{0,40}", detail="NCCL", family="fabric"),
    Text("using the same GPU", _K.NCCL_WARN, _S.SETTING, r"Ranks are using the same GPU.{0,60}", detail="several ranks on one GPU", family="fabric"),
    Text("NCCL WARN ", _K.NCCL_WARN, _S.SETTING, r"NCCL WARN (?:[Ii]nvalid (?:NCCL_\w{2,30}|device)|no device found (?:matching|after excluding)|Net : (?:No valid|error encountered when getting address|unsupported IP)|.{0,40}verify NCCL_\w{2,30}).{0,80}", detail="a variable or an address of NCCL", family="fabric"),
    Text("No algorithm/protocol available", _K.NCCL_WARN, _S.UNSUITED, r"No algorithm/protocol available for.{0,80}", detail="NCCL_ALGO or NCCL_PROTO", family="fabric"),
    Text("ailed to malloc", _K.OOM, _S.HOST_MEMORY, r"NCCL WARN Failed to malloc \d{1,20} bytes", family="mem"),
    Text("dest_addr=", _K.CARRIER, _S.SETTING, r"UCX .{0,60}connect\(.{0,40}dest_addr=(?:127\.|172\.17\.)[\d.:]{3,20}.{0,20}failed", detail="an address that other machines cannot reach (loopback or a bridge)", family="ucx"),
    Text("UCX ", _K.CARRIER, _S.FABRIC, r"(?:ucp|uct)_device\w{0,20}\.[ch].{0,20}UCX {1,4}ERROR .{0,120}|UCX {1,4}ERROR .{0,80}(?:lane for local device|local device GPU|gdaki|GDAKI)", detail="GPU memory and UCX", family="ucx"),
    Text("cuMem", _K.NCCL_WARN, _S.FABRIC, r"\bcuMem(?:Create|Map|SetAccess|Import\w{0,30}|Export\w{0,30}|AddressReserve) failed: \d{1,4}", detail="memory of one GPU that another cannot map", family="fabric", more=("CUMEM",)),
    Text("GRH is mandatory", _K.NCCL_WARN, _S.NIC, detail="RoCE: the GID", family="ib"),
    Text("IMEX", _K.NCCL_WARN, _S.FABRIC, r"IMEX.{0,80}(?:[Uu]nable|[Cc]annot|[Cc]ould n|UNAVAILABLE|DOWN|timed out).{0,60}", detail="multi-node NVLink (IMEX)", family="fabric"),
    Text("SXid", _K.XID, _S.GPU_BROKEN, r"[Ff]atal.{0,20}SXid \d{4,6}|SXid \d{4,6}.{0,40}[Ff]atal", detail="NVSwitch SXid", family="xid"),
    Text("got 0 bytes", _K.TCPSTORE_ERROR, _S.STORE_GONE, r"[Ff]ailed to recv, got 0 bytes", family="store"),
    Text("failed on SocketImpl", _K.TCPSTORE_ERROR, _S.STORE_GONE, r"(?:recv|send)\w{3,20} failed on SocketImpl", family="store"),
    # Engines, hubs and what watches a run.
    Text("mem-fraction", _K.OOM, _S.GPU_MEMORY, r"[Nn]ot enough memory.{0,60}mem-fraction", detail="the cache does not fit", family="mem"),
    Text("OfflineModeIsEnabled", _K.EXCEPTION, _S.UNSUITED, r"OfflineModeIsEnabled: .{0,120}|Cannot reach \S{1,160}: offline mode is enabled", detail="offline mode, and the file is not here", family="hub", more=("offline mode is enabled",)),
    Text("LocalEntryNotFoundError", _K.EXCEPTION, _S.OUTSIDE, detail="the hub cannot be reached", family="hub"),
    Text("nitialization has timed out", _K.EXCEPTION, _S.OUTSIDE, r"Run initialization has timed out after.{0,20}", detail="wandb's server", family="hub"),
    Text("calling W&B API", _K.EXCEPTION, _S.OUTSIDE, r"Error while calling W&B API.{0,80}", detail="wandb's server", family="hub"),
    Text("api_key not configured", _K.EXCEPTION, _S.UNSUITED, detail="wandb has no key", family="hub"),
)  # fmt: skip

#: What a program's error means if no row above knows it.
BACKSTOPS: tuple[Text, ...] = (
    # NCCL says in which of its files it met an error. What a file is about decides; a link, a card or a setting can be behind it.
    Text("NCCL WARN ", _K.NCCL_WARN, _S.UNSUITED, r"(?:graph/(?:xml|tuning)|param/\w{1,40})\.\w{1,3}:\d{1,5}.{0,60}NCCL WARN (?!Missing ).{1,120}", detail="NCCL's topology file or tuning", family="fabric"),
    Text("NCCL WARN ", _K.CARRIER, _S.FABRIC, r"(?:graph/\w{1,20}|transport/(?:p2p|shm|nvls|coll_net|profiler|generic)|misc/gdrwrap|register/\w{1,20}|mem_manager|dev_runtime\w{0,20}|ce_coll|gin/\w{1,30}|mnnvl|include/gdrwrap)\.\w{1,3}:\d{1,5}.{0,60}NCCL WARN .{1,120}", detail="NCCL's ways between GPUs", family="fabric"),
    Text("NCCL WARN ", _K.CARRIER, _S.CALL_FAILED, r"(?:misc/(?:socket|ipcsocket|ibvwrap|ibvsymbols|mlx5dv\w{0,12})|transport/net\w{0,12}|net_ib/\w{1,20}|bootstrap|ras/\w{1,20})\.\w{1,3}:\d{1,5}.{0,60}NCCL WARN .{1,120}", detail="NCCL's connections", family="sock"),
    Text("NCCL WARN ", _K.NCCL_WARN, _S.FAILED, r"(?:misc/argcheck|group|enqueue|collectives|rma/\w{1,20})\.\w{1,3}:\d{1,5}.{0,60}NCCL WARN (?!Cuda|Hip|HIP|hip).{1,120}", detail="NCCL refuses a call", family="fabric"),
    Text("Warning ", _K.LIMIT, _S.UNSUITED, r"^\s{0,8}Warning {1,12}[A-Z][A-Za-z]{3,50} {1,20}(?:<?\w{1,10}>?|\d{1,4}[smhd]\w{0,8})(?: \(x.{1,30}\))? {1,20}[a-z][\w.,/-]{2,60} {1,20}\S", detail="Kubernetes: an event", family="sched"),
    Text("pyxis: ", _K.LIMIT, _S.UNSUITED, r"error: pyxis: (?!printing|ignoring).{0,120}", detail="the container plugin", family="sched"),
    Text("enroot-", _K.LIMIT, _S.UNSUITED, r"enroot-\w{3,30}: .{0,120}", detail="the container cannot start", family="sched"),
    Text("[ERROR] ", _K.LIMIT, _S.UNSUITED, r"\[ERROR\] (?:Command not found|No such file or directory|Invalid (?:argument|image)|Failed to mount|Could not (?:find|parse|process|retrieve|acquire|change)|Unknown NVIDIA|File already exists|URL \S{1,200} returned error code): ?.{0,80}", detail="enroot", family="sched"),
    Text("spank", _K.LIMIT, _S.UNSUITED, r"error: (?:spank|Failed to invoke spank|Plugin stack).{0,120}", detail="a plugin of Slurm", family="sched", more=("Plugin stack",)),
    *(
        Text(word, _K.LIMIT, _S.UNSUITED, r"\b(?:srun|sbatch|salloc|slurmstepd|slurmd|scontrol): (?:error|fatal): (?!\*\*\*|[\w.\[\],-]{1,80}: tasks? |Terminating|Timed out waiting|[Tt]ask \d|[Dd]etected|couldn't chdir|write to unblock|step_launch|Exceeded|.{0,80}(?:CANCELLED|oom|OOM|refused|timed out|respond|route to host|reset by peer)).{1,120}", detail="Slurm", family="sched")
        for word in (": error: ", ": fatal: ")
    ),
    Text("error: _", _K.LIMIT, _S.UNSUITED, r"^(?:\[\S{1,40}\] )?(?:\[[\d.]{1,12}\] )?error: _\w{3,60}: .{1,120}", detail="Slurm", family="sched"),
    Text("GCS", _K.RENDEZVOUS, _S.STORE_GONE, r"\b[EC] \d{1,7} \d{1,7}\] .{0,80}\bGCS\b.{0,120}", detail="Ray's head", family="rdzv"),
)  # fmt: skip
