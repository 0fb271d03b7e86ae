"""The linter knows every variable of the checklist, and says nothing on a clean environment."""

import pytest

from elasticrl.diagnose.environment import PROFILES, Finding, Level, Machine, Problem, lint
from elasticrl.diagnose.variables import KNOWN, NEVER, REMOVED, RENAMED

IB8 = frozenset(f"mlx5_{i}" for i in range(12))


def problems(environment: dict[str, str], machine: Machine | None = None) -> set[tuple[str, Problem]]:
    return {(finding.name, finding.problem) for finding in lint(environment, machine)}


def only(environment: dict[str, str], machine: Machine | None = None) -> Finding:
    (finding,) = lint(environment, machine)
    return finding


CLEAN = {
    "PATH": "/usr/bin", "HOME": "/root", "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "NCCL_IB_TIMEOUT": "22", "NCCL_ALGO": "Ring", "NCCL_MIN_CTAS": "4",
    "NCCL_MAX_CTAS": "16",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": "nccl.%h.%p", "NCCL_RAS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1",
    "NCCL_COMM_BLOCKING": "0", "CUDA_VISIBLE_DEVICES": "0,1", "CUDA_HOME": "/usr/local/cuda", "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1",
    "CUDA_LAUNCH_BLOCKING": "0",
    "NCCL_PROFILER_PLUGIN": "x", "NCCL_INSPECTOR_ENABLE": "1",
}  # fmt: skip


def test_a_clean_environment_gives_nothing() -> None:
    machine = Machine(interfaces=frozenset({"lo", "eth0"}), hcas=IB8, vendor="nvidia", nodes=4)
    assert lint({}) == lint(CLEAN) == lint(CLEAN, machine) == ()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_clean_and_gives_each_setting_with_a_reason(profile: str) -> None:
    settings = PROFILES[profile].apply({})
    assert lint(settings) == ()
    assert all(reason for _, reason in PROFILES[profile].settings.values())


def test_what_the_operator_set_himself_wins_over_the_profile() -> None:
    assert "NCCL_IB_TIMEOUT" not in PROFILES["ib"].apply({"NCCL_IB_TIMEOUT": "20"})


#: The checklist's verdicts: (name, value) -> what is the matter.
CHECKLIST = {
    ("NCCL_MAX_RINGS", "8"): Problem.NEVER_EXISTED,
    ("NCCL_TIMEOUT", "1200000"): Problem.NEVER_EXISTED,
    ("NCCL_TIMEOUT_MS", "360000000"): Problem.NEVER_EXISTED,
    ("NCCL_DETERMINISTIC", "1"): Problem.NEVER_EXISTED,
    ("VERL_DEBUG", "1"): Problem.RENAMED,
    ("VERL_LOG_LEVEL", "INFO"): Problem.RENAMED,
    ("NCCL_MIN_NRINGS", "4"): Problem.RENAMED,
    ("NCCL_MAX_NRINGS", "8"): Problem.RENAMED,
    ("NCCL_MIN_NCHANNELS", "4"): Problem.RENAMED,
    ("NCCL_MAX_NCHANNELS", "4"): Problem.RENAMED,
    ("NCCL_ASYNC_ERROR_HANDLING", "1"): Problem.RENAMED,
    ("NCCL_BLOCKING_WAIT", "0"): Problem.RENAMED,
    ("NCCL_DESYNC_DEBUG", "1"): Problem.RENAMED,
    ("NCCL_ENABLE_TIMING", "1"): Problem.RENAMED,
    ("NCCL_IB_GDR_LEVEL", "PHB"): Problem.RENAMED,
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"): Problem.RENAMED,
    ("NCCL_TREE_THRESHOLD", "0"): Problem.REMOVED,
    ("NCCL_LL_THRESHOLD", "0"): Problem.REMOVED,
    ("NCCL_SINGLE_RING_THRESHOLD", "0"): Problem.REMOVED,
    ("VLLM_USE_V1", "1"): Problem.REMOVED,
    ("NCCL_IB_DISABLE", "0"): Problem.NO_EFFECT,
    ("NCCL_IB_GID_INDEX", "3"): Problem.DANGEROUS,
    ("NCCL_NVLS_ENABLE", "0"): Problem.DANGEROUS,
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1"): Problem.DANGEROUS,
    ("CUDA_LAUNCH_BLOCKING", "1"): Problem.DANGEROUS,
    ("NCCL_NET_GDR_LEVEL", "2"): Problem.WRONG_VALUE,
    ("NCCL_ALGO", "Treee"): Problem.WRONG_VALUE,
    ("NCCL_IB_TIMEOUT", "1200"): Problem.WRONG_VALUE,
    ("NCCL_SOCKET_NTHREADS", "32"): Problem.WRONG_VALUE,
    ("NCCL_DEBUG", "DEBUG"): Problem.WRONG_VALUE,
    ("NCCL_CUMEM_ENABLE", "true"): Problem.WRONG_VALUE,
    ("NCCL_IB_HCA", "mlx5_0,mlx5_1"): Problem.DANGEROUS,
}  # fmt: skip


@pytest.mark.parametrize(("variable", "problem"), CHECKLIST.items(), ids=str)
def test_the_checklists_verdict_is_given_with_a_remedy(variable: tuple[str, str], problem: Problem) -> None:
    finding = only(dict([variable]))
    assert finding.problem is problem
    assert finding.remedy
    assert str(finding).startswith(f"{variable[0]}=")


@pytest.mark.parametrize("name", [
    "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_NVLS_ENABLE", "NCCL_IB_DISABLE", "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NET_GDR_LEVEL", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CUMEM_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_COMM_BLOCKING", "NCCL_RAS_ENABLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "RCCL_MSCCL_ENABLE",
    "GLOO_SOCKET_IFNAME", "TORCH_NCCL_AVOID_RECORD_STREAMS", "NCCL_NET", "NCCL_HOSTID",
])  # fmt: skip
def test_what_exists_is_known_and_in_no_table_of_mistakes(name: str) -> None:
    assert name in KNOWN
    assert name not in NEVER | REMOVED
    assert name not in RENAMED


def test_a_typing_error_gets_the_name_that_was_meant() -> None:
    assert "NCCL_SOCKET_IFNAME" in only({"NCCL_SOCKET_IFNAM": "eth0"}).remedy
    assert "NCCL_MAX_CTAS" in only({"NCCL_MAX_NRING": "8"}).remedy
    assert only({"NCCL_QQQ": "8"}).remedy == "Remove it."


def test_the_product_of_socket_threads_is_at_most_64() -> None:
    assert lint({"NCCL_SOCKET_NTHREADS": "8", "NCCL_NSOCKS_PERTHREAD": "8"}) == ()
    assert only({"NCCL_SOCKET_NTHREADS": "13", "NCCL_NSOCKS_PERTHREAD": "5"}).name == "NCCL_NSOCKS_PERTHREAD"


def test_socket_threads_do_nothing_over_infiniband() -> None:
    sockets = {"NCCL_SOCKET_NTHREADS": "4"}
    assert lint(sockets) == ()
    assert problems(sockets, Machine(hcas=IB8)) == {("NCCL_SOCKET_NTHREADS", Problem.NO_EFFECT)}


def test_hca_names_are_prefixes_unless_an_equals_sign_says_otherwise() -> None:
    machine = Machine(hcas=IB8)
    caught = only({"NCCL_IB_HCA": "mlx5_0,mlx5_1"}, machine)
    assert "mlx5_1 also matches mlx5_10" in caught.said
    assert "=mlx5_0,mlx5_1" in caught.remedy
    assert lint({"NCCL_IB_HCA": "=mlx5_0,mlx5_1"}, machine) == ()
    assert lint({"NCCL_IB_HCA": "mlx5"}, machine) == ()
    assert only({"NCCL_IB_HCA": "=mlx5_77"}, machine).level is Level.FAIL


def test_an_interface_must_exist_and_reach_other_nodes() -> None:
    here = Machine(interfaces=frozenset({"lo", "eth0"}), nodes=2)
    assert only({"NCCL_SOCKET_IFNAME": "ib0"}, here).problem is Problem.WRONG_VALUE
    assert only({"GLOO_SOCKET_IFNAME": "eth"}, here).problem is Problem.WRONG_VALUE
    assert lint({"NCCL_SOCKET_IFNAME": "eth"}, here) == lint({"NCCL_SOCKET_IFNAME": "^docker,lo"}, here) == ()
    assert "no other node" in only({"NCCL_SOCKET_IFNAME": "lo"}, here).said


def test_settings_that_contradict_each_other_are_found() -> None:
    assert ("NCCL_IB_DISABLE", Problem.DANGEROUS) in problems({"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"})
    assert ("NCCL_IB_TIMEOUT", Problem.NO_EFFECT) in problems({"NCCL_IB_DISABLE": "1", "NCCL_IB_TIMEOUT": "20"})
    assert ("NCCL_MIN_CTAS", Problem.WRONG_VALUE) in problems({"NCCL_MIN_CTAS": "9", "NCCL_MAX_CTAS": "8"})
    assert ("TORCH_NCCL_DUMP_ON_TIMEOUT", Problem.NO_EFFECT) in problems(
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"}
    )
    blocking = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert ("TORCH_NCCL_ASYNC_ERROR_HANDLING", Problem.NO_EFFECT) in problems(blocking)
    ways = {f"NCCL_{way}_DISABLE": "1" for way in ("P2P", "SHM", "IB")}
    assert any("switched off" in finding.said for finding in lint(ways))


def test_sockets_by_order_where_rdma_ports_are_active_are_a_warning_and_not_on_one_node() -> None:
    there = Machine(hcas=IB8, active=frozenset({"mlx5_0:1", "mlx5_1:1"}), nodes=4)
    finding = only({"NCCL_IB_DISABLE": "1"}, there)
    assert (finding.name, finding.problem, "mlx5_0:1, mlx5_1:1" in finding.said) == (
        "NCCL_IB_DISABLE",
        Problem.DANGEROUS,
        True,
    )
    assert only({"NCCL_NET": "Socket"}, there).name == "NCCL_NET"
    assert (
        lint({"NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "WARN"}, Machine(active=frozenset(), nodes=4))[0].level
        is Level.HINT
    )
    for machine in (Machine(hcas=IB8, active=there.active, nodes=1), Machine(hcas=IB8, active=frozenset(), nodes=4)):
        assert lint({"NCCL_NET": "Socket"}, machine) == ()


def test_vendors_variables_do_nothing_on_the_others_gpus() -> None:
    assert problems({"RCCL_MSCCL_ENABLE": "0", "HSA_NO_SCRATCH_RECLAIM": "1"}, Machine(vendor="nvidia")) == {
        ("RCCL_MSCCL_ENABLE", Problem.NO_EFFECT), ("HSA_NO_SCRATCH_RECLAIM", Problem.NO_EFFECT),
    }  # fmt: skip
    assert lint({"RCCL_MSCCL_ENABLE": "0", "HSA_NO_SCRATCH_RECLAIM": "1"}, Machine(vendor="amd")) == ()


def test_one_connection_is_right_for_megatron_only() -> None:
    assert lint({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, Machine(megatron=True)) == ()


def test_a_number_is_read_as_c_reads_it() -> None:
    assert lint({"NCCL_IB_TIMEOUT": "022"}) == (), "eighteen"
    assert only({"NCCL_IB_TIMEOUT": "030"}).problem is Problem.DANGEROUS, "twenty-four"
    assert only({"NCCL_IB_TIMEOUT": " 0x19"}).problem is Problem.DANGEROUS, "twenty-five"
    for word in ("08", "1_0", "0b1", "0o7", "٣", "9" * 400, "22 s"):  # Python reads some of these
        assert only({"NCCL_IB_TIMEOUT": word}).problem is Problem.WRONG_VALUE, word
    assert lint({"NCCL_SOCKET_NTHREADS": "010", "NCCL_NSOCKS_PERTHREAD": "010"}) == (), "eight times eight"
    assert lint({"NCCL_MIN_CTAS": "010", "NCCL_MAX_CTAS": "8"}) == ()
    assert only({"NCCL_MIN_CTAS": "011", "NCCL_MAX_CTAS": "8"}).problem is Problem.WRONG_VALUE


@pytest.mark.parametrize(
    "value",
    ["", " ", "-", "0x", "010", "08", "٣", "²", "1e3", "^", "=", "^=", ",", ":", "=:1", "\x00", "9" * 400, "9" * 5000],
)
def test_no_value_breaks_the_linter(value: str) -> None:
    names = [
        *sorted(KNOWN),
        *RENAMED,
        *REMOVED,
        *NEVER,
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    ]
    lint(dict.fromkeys(names, value), Machine(interfaces=frozenset({"lo"}), hcas=IB8, vendor="", nodes=2))
