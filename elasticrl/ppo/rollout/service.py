"""What an engine process is asked to be: all it has to know, in one page that lies in its home.

The idea: a worker that comes by compares pages. An engine with the same one is adopted, another is ended and started anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from elasticrl.base.parsed import parsed
from elasticrl.ppo import sizes
from elasticrl.ppo.rollout.engine import Sampling

if TYPE_CHECKING:
    from elasticrl.config import Tree
    from elasticrl.config.training import Vllm

SPEC: Final = "engine.json"
ENGINE_LOCK: Final = "engine.lock"  # held by the engine for its whole life
LOADS: Final = "engine.loads"  # there while the engine takes weights, and hears nobody: since when


class Unfit(RuntimeError):
    """This engine cannot be had here; the sentence says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that somebody else starts.

    Example: Served(url="http://127.0.0.1:8000", weights="", at_once=256, load_s=30.0, answer_s=1800.0)
    """

    url: str
    weights: str  # a folder that it can read; "": the engine's home
    at_once: int
    load_s: float  # that it has to take weights
    answer_s: float  # and for one answer

    @classmethod
    def of(cls, tree: Tree) -> Served:
        """As the configuration has it."""
        asked = tree.rollout.server
        return cls(
            url=asked.url, weights=asked.weights or "", at_once=asked.at_once, load_s=tree.rollout.sync_timeout_s,
            answer_s=asked.answer_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One engine. The fields from gpu_memory_utilization on are passed on to vLLM.

    Example: Service(program="torch", model="/models/qwen", sampling=Sampling(...), ...)
    """

    program: Literal["torch", "vllm", "server"]
    model: str
    sampling: Sampling
    dtype: str
    attention: str
    device: str
    threads: int
    idle_s: float
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    tensor_parallel: int
    max_num_seqs: int
    chunked_prefill: bool
    prefix_caching: bool
    batch_invariant: bool
    lora: Mapping[str, Any] = field(default_factory=dict)  # the actor's adapters; empty: all its weights are trained
    # Roles that live with it, by where their models are, and the type that those compute in.
    judges: Mapping[str, str] = field(default_factory=dict)
    judges_dtype: str = "float32"
    judges_logits: int = 0  # `Roles.most_logits`
    server: Served | None = None  # of the program `server`
    # On a rollout node, where trainers come from elsewhere.
    listen: str = ""  # host:port; "": nobody else is let in
    job: str = ""
    node: str = ""
    key_file: str = ""
    key_digest: str = ""  # an engine with a key that is not the job's any more is another engine

    @classmethod
    def of(cls, tree: Tree, sampling: Sampling, *, device: str) -> Service:
        """As the configuration has it."""
        vllm: Vllm = tree.rollout.vllm
        return cls(
            program=program_of(tree.rollout.engine),
            model=str(tree.model.path),
            sampling=sampling,
            # The program `torch` computes as the worker's own engine does, so that the bits are the same.
            dtype=tree.model.dtype if tree.rollout.foreign else "float32",
            attention=tree.model.attention,
            device=device,
            threads=tree.lanes.threads,
            idle_s=tree.rollout.idle_s,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            kv_cache_bytes=vllm.kv_cache_bytes,
            tensor_parallel=vllm.tensor_parallel,
            max_num_seqs=vllm.max_num_seqs,
            chunked_prefill=vllm.chunked_prefill,
            prefix_caching=vllm.prefix_caching,
            batch_invariant=vllm.batch_invariant,
            lora=tree.model.lora.model_dump(mode="json") if tree.model.lora.rank else {},
            judges=judges_of(tree),
            judges_dtype=tree.model.dtype,
            judges_logits=sizes.most_logits(tree.ppo) if judges_of(tree) else 0,
            server=Served.of(tree) if tree.rollout.engine == "server" else None,
        )

    @classmethod
    def loads(cls, text: str) -> Service:
        """From its page."""
        plain = parsed(text)
        sampling, server = plain.pop("sampling"), plain.pop("server")
        return cls(
            **plain,
            server=Served(**server) if server else None,
            sampling=Sampling(**{**sampling, "eos": tuple(sampling["eos"])}),
        )

    def dumps(self) -> str:
        """Its page."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @property
    def digest(self) -> str:
        """What tells one from another."""
        return _digest(self.dumps())

    @property
    def makes(self) -> str:
        """What tells apart those that make other samples of the same weights: the rest is each node's own affair."""
        s = self
        judges = (sorted(s.judges), s.judges_dtype, s.judges_logits)
        return _digest(
            json.dumps(
                [
                    s.program,
                    asdict(s.sampling),
                    s.dtype,
                    s.attention,
                    s.threads,
                    s.batch_invariant,
                    judges,
                    dict(s.lora),
                ]
            )
        )


def program_of(engine: str) -> Literal["torch", "vllm", "server"]:
    """What generates in the process: `served` is the very code that `torch` is in the worker."""
    return "vllm" if engine == "vllm" else "server" if engine == "server" else "torch"


def judges_of(tree: Tree) -> dict[str, str]:
    """Which roles live on rollout nodes, by where their models are."""
    roles = {
        "ref": (tree.placement.ref.where, tree.model.ref_path or tree.model.path),
        "reward": (tree.placement.reward.where, tree.reward.model),
    }
    return {role: str(path) for role, (where, path) in roles.items() if where == "rollout"}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
