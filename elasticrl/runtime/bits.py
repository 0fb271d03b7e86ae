"""What decides the bits that this process computes, as a value that can be compared and spoken about.

The idea: the settings known to change results are named one by one, so that a difference can be said in words; and a probe, a
hash of a few small computations on the kernels that a model uses, catches what has no name. Two nodes with equal probes may
train one job exactly; two with unequal ones may not, whatever their settings say.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b

from elasticrl import __version__
from elasticrl.base.parsed import parsed
from elasticrl.contract.versions import WIRE


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """A node's fingerprint. `str(bits)` is what goes into its record, the plan and the chronicle, and what `parse` reads.

    Example: Bits(torch="2.13.0+cpu", isa="AVX512", threads=1, dtype="float32", ..., probe="6f0c3d9a51e2b874")
    """

    torch: str
    device: str  # what computes: the processor's model, or the GPU's name and CUDA's version
    isa: str  # what ATen dispatches to: ATEN_CPU_CAPABILITY, or the best the processor has
    threads: int
    dtype: str
    deterministic: bool
    matmul: str  # float32_matmul_precision; "high" and "medium" round inputs
    onednn: bool
    libraries: str  # environment variables that steer MKL and oneDNN
    probe: str

    def __str__(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Bits:
        """The inverse of str()."""
        return cls(**parsed(text))


WORDS = {
    "torch": "torch", "device": "device", "isa": "instruction set", "threads": "torch threads", "dtype": "default dtype",
    "deterministic": "deterministic algorithms", "matmul": "float32 matmul precision", "onednn": "oneDNN",
    "libraries": "library settings", "probe": "probe",
}  # fmt: skip


def difference(theirs: Bits, ours: Bits) -> str | None:
    """Why `theirs` computes other bits than `ours`, to be put after a node's name; None if it does not.

    Example: "computes other bits: instruction set AVX2 instead of AVX512"
    """
    # The probe is the proof. A processor of another model that passes it computes the same; a setting, however, may act on
    # something that the probe does not exercise.
    named = [
        f.name
        for f in fields(Bits)
        if f.name not in ("probe", "device") and getattr(theirs, f.name) != getattr(ours, f.name)
    ]
    if theirs.probe == ours.probe and not named:
        return None
    if theirs.device != ours.device:
        named.append("device")
    words = [
        f"{WORDS[name]} {getattr(theirs, name) or 'none'} instead of {getattr(ours, name) or 'none'}" for name in named
    ]
    return "computes other bits: " + (
        "; ".join(words) or "no setting differs, but the same small computation gives another result"
    )


def bits() -> Bits:
    """This process's fingerprint, as it is set up now. A few milliseconds after the first time."""
    import torch

    steering = (
        "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "ONEDNN_MAX_CPU_ISA",
        "CUBLAS_WORKSPACE_CONFIG",
        "FLASH_ATTENTION_DETERMINISTIC",
        "NVIDIA_TF32_OVERRIDE",
    )
    return Bits(
        torch=torch.__version__,
        device=device(),
        isa=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        matmul=torch.get_float32_matmul_precision(),
        onednn=bool(torch.backends.mkldnn.enabled),
        libraries=" ".join(f"{name}={os.environ[name]}" for name in steering if name in os.environ),
        probe=_probe("cuda" if torch.cuda.is_available() else "cpu"),
    )


def versions() -> str:
    """What this process runs, as JSON: what an operator makes equal on all nodes, whatever it does to bits."""
    import torch

    found = {"python": platform.python_version(), "elasticrl": __version__, "wire": WIRE, "torch": torch.__version__}
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return json.dumps(found, separators=(",", ":"))


def device() -> str:
    """What computes: a card with its CUDA, or the processor."""
    import torch

    cuda = torch.cuda.is_available()
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if cuda else processor()


def processor() -> str:
    """The model of this machine's processor."""
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123 - not a file of ours
            words = dict(line.split(":", 1) for line in lines.read().split("\n\n")[0].splitlines() if ":" in line)
        return {key.strip(): value.strip() for key, value in words.items()}["model name"]
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def _probe(device: str) -> str:
    """A hash of one small transformer block's output and gradients, at the shapes where kernels are known to branch."""
    import torch
    from torch.nn import functional

    generator = torch.Generator("cpu").manual_seed(20)  # whatever the script has made the default device
    digest = blake2b(digest_size=8)

    def some(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
        return made.to(device).requires_grad_()

    # One row, a few and many: matrix products take other paths for each. Rows long enough to be shared out among threads.
    for rows, width in ((1, 40), (3, 67), (130, 96)):
        x, w, v = some(rows, width), some(width, width), some(width)
        h = functional.layer_norm(x, (width,), v) @ w
        a = functional.scaled_dot_product_attention(h[None], x[None], h[None], is_causal=True)[0]
        y = functional.log_softmax(functional.gelu(a) + torch.tanh(h).exp(), dim=-1)
        (y * y).mean().backward()  # type: ignore[no-untyped-call]
        for result in (y, x.grad, w.grad, v.grad):
            assert result is not None
            digest.update(result.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    with torch.no_grad():
        digest.update(repr(some(100_000).sum().item()).encode())
        onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if device == "cpu" and onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            x, w = some(5, 1200), some(96, 1200)  # answers are generated with these products
            made = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")  # noqa: SLF001 - torch shows it nowhere
            digest.update(made.numpy().tobytes())
    return digest.hexdigest()
