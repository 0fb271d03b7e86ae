"""Our losses and advantages beside verl's and TRL's own functions, on the same random numbers in float64.

The idea: their code runs, not a copy of its formulas. TRL is the installed package, whose trainers' methods are called on a
stand-in for a trainer; verl is a checkout (`--verl FOLDER`), whose `core_algos.py` runs with stand-ins for the modules that it
imports. Where a definition differs (docs/ALGORITHMS.md says where), the row says what was made alike.

Example: python bench/algorithms.py --verl ~/verl
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import math
import sys
import textwrap
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace as Space
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from elasticrl.config.training import Ppo
from elasticrl.ppo import kl, preference
from elasticrl.ppo.advantages import WHITENED, gae, over_batch, overlong_penalties, whiten, without_critic
from elasticrl.ppo.losses import Entries, entropies, importance_weights, logprobs, policy_loss, summed, value_loss
from elasticrl.runtime.scalars import Moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Row = tuple[str, torch.Tensor, torch.Tensor]  # what, ours, theirs

GROUP, ROWS, WIDTH, WORDS = 4, 12, 7, 11
ARGUMENTS: dict[str, Any] = {
    "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "use_bias_correction_kl": False,
}  # fmt: skip
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


class Numbers:
    """One draw: log-probabilities of three policies, rewards, a mask of lengths."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)

        def draw(scale: float, *shape: int) -> torch.Tensor:
            return scale * torch.randn(shape or (ROWS, WIDTH), generator=g, dtype=torch.float64)

        lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=g)
        self.mask = torch.arange(WIDTH)[None] < lengths
        self.new, self.old, self.ref = draw(0.5) - 1, draw(0.5) - 1, draw(0.5) - 1
        self.gain = draw(1.0, ROWS, 1).expand(ROWS, WIDTH).contiguous()
        self.rewards = torch.where(self.mask, draw(1.0), 0.0)
        self.entries = Entries(float(self.mask.sum()), float(ROWS))
        self.lengths = lengths[:, 0]
        self.values, self.critic, self.returns = draw(1.0), draw(1.0), draw(1.0)
        self.rollout = self.old + draw(0.4)  # what an engine says of the same tokens
        self.said = self.mask & (
            torch.rand(ROWS, WIDTH, generator=g) > 0.3
        )  # with a reply of an environment's in between
        self.good = torch.rand(ROWS, generator=g) > 0.4
        self.logits = draw(1.0, ROWS, WIDTH, WORDS)
        self.tokens = torch.randint(0, WORDS, (ROWS, WIDTH), generator=g)

    def ours(self, ppo: Ppo) -> torch.Tensor:
        """Our loss of the whole batch beside its gradient."""
        count = self.entries.of(ppo.loss_agg_mode, most=WIDTH)
        return sloped(self.new, lambda new: policy_loss(new, self.old, self.gain, self.mask, ppo).loss.over(count))


def sloped(at: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A loss there, and its gradient."""
    at = at.clone().requires_grad_()
    value = loss(at)
    (slope,) = torch.autograd.grad(value, at)
    return torch.cat([value.detach().reshape(1), slope.reshape(-1)])


def beside_verl(folder: Path, n: Numbers) -> Iterator[Row]:
    """Advantages, losses, aggregations and estimators of its `core_algos`."""
    core = core_algos(folder)
    mask, index = n.mask.double(), [i // GROUP for i in range(ROWS)]
    gamma = 0.9
    asks: dict[str, tuple[Ppo, Callable[..., Any], dict[str, Any]]] = {
        "GRPO (epsilon alike)": (Ppo(algorithm="grpo", group=GROUP), core.compute_grpo_outcome_advantage, {"epsilon": 1e-4}),
        "Dr.GRPO": (
            Ppo(algorithm="grpo", group=GROUP, scale_rewards="none"), core.compute_grpo_outcome_advantage,
            {"norm_adv_by_std_in_grpo": False},
        ),
        "RLOO": (Ppo(algorithm="rloo", group=GROUP), core.compute_rloo_outcome_advantage, {}),
        "OPO": (Ppo(algorithm="opo", group=GROUP), core.compute_opo_outcome_advantage, {}),
        "REINFORCE++ with a baseline": (
            Ppo(algorithm="reinforce_plus_plus_baseline", group=GROUP),
            core.compute_reinforce_plus_plus_baseline_outcome_advantage, {},
        ),
    }  # fmt: skip
    for name, (ppo, theirs, more) in asks.items():
        yield name, advantages(n, ppo), theirs(n.rewards.clone(), mask, index=index, **more)[0]
    ppo = Ppo(algorithm="reinforce_plus_plus", gamma=gamma)
    theirs = core.compute_reinforce_plus_plus_outcome_advantage(n.rewards, mask, config=Space(gamma=gamma))[0]
    yield "REINFORCE++", advantages(n, ppo), theirs

    settings = Config(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05,
        global_batch_info={},
    )  # fmt: skip
    losses = {
        "vanilla": core.compute_policy_loss_vanilla, "gspo": core.compute_policy_loss_gspo,
        "cispo": core.compute_policy_loss_cispo, "sapo": core.compute_policy_loss_sapo,
        "geo_mean": core.compute_policy_loss_geo_mean,
    }  # fmt: skip
    for mode, loss in losses.items():
        agg = (
            "seq-mean-token-mean" if mode in ("gspo", "sapo", "geo_mean") else "token-mean"
        )  # of the two it takes no other
        dual = 3.0 if mode == "vanilla" else None
        ppo = Ppo(loss_mode=mode, loss_agg_mode=agg, clip_high=0.3, dual_clip=dual)

        def verls(new: torch.Tensor, loss: Callable[..., Any] = loss, agg: str = agg) -> torch.Tensor:
            found: torch.Tensor = loss(n.old, new, n.gain, mask, loss_agg_mode=agg, config=settings)[0]
            return found

        yield f"loss {mode}, with its gradient", n.ours(ppo), sloped(n.new, verls)
    for how in MODES:
        ours = summed(n.new, n.mask, how).over(n.entries.of(how, most=WIDTH))
        theirs = core.agg_loss(n.new, mask, how) / (ROWS if how.endswith("norm") else 1)
        yield f"aggregation {how}" + (" (theirs over the samples)" if how.endswith("norm") else ""), ours, theirs
    for kind in ("k1", "k2", "k3", "k1+", "k3+"):

        def mine(new: torch.Tensor, kind: str = kind) -> torch.Tensor:
            return kl.estimate(kind, new, n.ref, n.mask).sum()

        def verls_kl(new: torch.Tensor, kind: str = kind) -> torch.Tensor:
            value = core.kl_penalty(new, n.ref, kind.removesuffix("+"))
            if kind.endswith("+"):  # its own way there ends in NotImplementedError: it looks up the name with the plus
                slope = core.kl_penalty(new, n.ref, "k2")
                value = slope - slope.detach() + value.detach()
            found: torch.Tensor = (value * mask).sum()
            return found

        yield f"divergence {kind}, with its gradient", sloped(n.new, mine), sloped(n.new, verls_kl)
    yield from critics_beside_verl(core, n)
    yield from corrections_beside_verl(folder, n)
    most, buffer, factor = WIDTH, 3, 0.5  # verl/workers/reward_manager/dapo.py has it inside of a loop
    theirs = torch.tensor(
        [min(-(int(x) - (most - buffer)) / buffer * factor, 0) for x in n.lengths], dtype=torch.float64
    )
    yield "overlong shaping (its line)", overlong_penalties(n.mask, most=most, buffer=buffer, factor=factor), -theirs


def critics_beside_verl(core: Any, n: Numbers) -> Iterator[Row]:
    """GAE, the critic's loss, and the coefficient that follows a target."""
    for what, mask in (("", n.mask), (", over a reply that is no token of the policy's", n.said)):
        gained, returns = gae(n.rewards, n.values, mask, gamma=0.9, lam=0.8)
        theirs, back = core.compute_gae_advantage_return(n.rewards, n.values, mask.double(), 0.9, 0.8)
        yield f"GAE, whitened{what}", whiten(gained, mask, Moments.of(gained, mask)), theirs * mask
        yield f"GAE's returns{what}", returns, back * mask

    def mine(new: torch.Tensor) -> torch.Tensor:
        return value_loss(new, n.values, n.returns, n.mask, clip=0.2).over(n.entries.tokens)

    def verls(new: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = core.compute_value_loss(new, n.returns, n.values, n.mask.double(), 0.2)[0]
        return found

    yield "value loss, with its gradient", sloped(n.critic, mine), sloped(n.critic, verls)
    ours, theirs = kl.Coefficient(0.05, target=6.0, horizon=100.0), core.AdaptiveKLController(0.05, 6.0, 100.0)
    pairs = []
    for step, seen in enumerate((4 * n.values[:, 0].abs() + 4).tolist()):
        ours.observe(step=step, kl=seen, samples=32)
        theirs.update(seen, 32)
        pairs.append((ours.of(step + 1), theirs.value))
    both = torch.tensor(pairs, dtype=torch.float64)
    yield "the coefficient that follows a target", both[:, 0], both[:, 1]


def corrections_beside_verl(folder: Path, n: Numbers) -> Iterator[Row]:
    """Truncated importance sampling of tokens and of answers."""
    text = (folder / "verl/trainer/ppo/rollout_corr_helper.py").read_text()
    name = "compute_rollout_correction_weights"
    part = next(part for part in text.split("\ndef ") if part.startswith(f"{name}("))
    held: dict[str, Any] = {
        "torch": torch, "verl_F": sys.modules["verl.utils.torch_functional"], "SAFETY_BOUND": 20.0,
        "compute_is_metrics": lambda **_: {},
    }  # fmt: skip
    exec(f"def {part}", held)
    for level in ("token", "sequence"):
        ppo = Ppo(importance_mode=f"{level}_truncate", importance_limit=1.5)  # type: ignore[arg-type]
        theirs = held[name](n.old - n.rollout, n.mask.double(), level, 1.5)[0]
        yield f"importance, {level}_truncate", importance_weights(n.old, n.rollout, n.mask, ppo, 1.5) * n.mask, theirs


def advantages(n: Numbers, ppo: Ppo) -> torch.Tensor:
    """Ours of the whole batch."""
    found = without_critic(n.rewards, n.mask, ppo)
    return whiten(found, n.mask, Moments.of(found, n.mask)) if ppo.algorithm in WHITENED else found


def beside_trl(n: Numbers) -> Iterator[Row]:
    """Losses of GRPOTrainer, DPOTrainer, CPOTrainer and KTOTrainer."""
    from trl import DPOTrainer, GRPOTrainer
    from trl.experimental.cpo import CPOTrainer

    kinds: dict[str, tuple[Ppo, dict[str, Any]]] = {
        "grpo": (Ppo(loss_agg_mode="seq-mean-token-mean", clip_high=0.3), {}),
        "dapo": (Ppo(clip_high=0.3), {}),
        "grpo, delta (dual_clip)": (
            Ppo(loss_agg_mode="seq-mean-token-mean", clip_high=0.3, dual_clip=1.4),
            {"args": Space(**ARGUMENTS | {"delta": 1.4})},
        ),
        "dr_grpo": (Ppo(loss_agg_mode="seq-mean-token-sum-norm", clip_high=0.3), {}),
        "luspo": (Ppo(loss_agg_mode="seq-mean-token-sum", clip_high=0.3), {}),
        "grpo, sequence level (GSPO)": (
            Ppo(loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", clip_high=0.3),
            {"importance_sampling_level": "sequence"},
        ),
        "cispo (epsilon_high is 1 + clip_high, clip_low is 1)": (Ppo(loss_mode="cispo", clip_low=1.0), {"epsilon_high": 1.2}),
        "sapo": (Ppo(loss_mode="sapo", loss_agg_mode="seq-mean-token-mean"), {}),
    }  # fmt: skip
    for name, (ppo, more) in kinds.items():

        def trls(new: torch.Tensor, name: str = name, more: dict[str, Any] = more) -> torch.Tensor:
            found: torch.Tensor = theirs_of(GRPOTrainer)(grpo_stand_in(name, new, more), None, grpo_inputs(n))
            return found

        yield f"loss {name}, with its gradient", n.ours(ppo), sloped(n.new, trls)

    half, beta = ROWS // 2, 0.3
    lengths = (n.lengths[:half], n.lengths[half:])
    for kind in ("sigmoid", "hinge", "ipo"):

        def mine(new: torch.Tensor, kind: str = kind) -> torch.Tensor:
            ratios = preference.log_ratios(new, n.ref, n.mask)
            valid = torch.ones(half, dtype=torch.bool)
            found = preference.dpo_loss(ratios[:half], ratios[half:], valid, kind=kind, beta=beta, lengths=lengths)
            return found.loss.over(half)

        def trls_dpo(new: torch.Tensor, kind: str = kind) -> torch.Tensor:
            found: torch.Tensor = theirs_of(DPOTrainer)(
                dpo_stand_in(kind, beta), dpo_model(n, new), dpo_inputs(n), False
            )
            return found

        yield f"dpo {kind}, with its gradient", sloped(n.new, mine), sloped(n.new, trls_dpo)

    def simpo(new: torch.Tensor) -> torch.Tensor:
        ratios, valid = torch.where(n.mask, new, 0.0).sum(1), torch.ones(half, dtype=torch.bool)
        found = preference.dpo_loss(
            ratios[:half], ratios[half:], valid, kind="simpo", beta=2.0, gamma=0.5, lengths=lengths
        )
        return found.loss.over(half)

    def trls_simpo(new: torch.Tensor) -> torch.Tensor:
        means = torch.where(n.mask, new, 0.0).sum(1) / n.lengths
        stand_in = Space(
            loss_type="simpo",
            simpo_gamma=0.5,
            beta=2.0,
            label_smoothing=0.0,
            alpha=0.0,
            accelerator=Space(device="cpu"),
        )
        found: torch.Tensor = CPOTrainer.cpo_loss(stand_in, means[:half], means[half:])[0].mean()
        return found

    yield "cpo simpo, with its gradient", sloped(n.new, simpo), sloped(n.new, trls_simpo)
    yield from advantages_beside_trl(n)
    yield from regularizers_beside_trl(n)
    yield from corrections_beside_trl(n)
    yield from given_beside_trl(n)


def lines_of(trainer: type, first: str, last: str) -> types.CodeType:
    """What a trainer does with what was generated, from one of its lines to before another."""
    lines = inspect.getsource(getattr(trainer, "_generate_and_score_completions"))  # noqa: B009 - mypy knows no such name
    start = lines.index(first)
    start = lines.rindex("\n", 0, start) + 1  # with its indentation
    stop = lines.rindex("\n", 0, lines.index(last, start)) + 1
    return compile(textwrap.dedent(lines[start:stop]), "trl", "exec")


def advantages_beside_trl(n: Numbers) -> Iterator[Row]:
    """Advantages of groups: the lines of GRPOTrainer and RLOOTrainer that make them."""
    from trl import GRPOTrainer, RLOOTrainer
    from trl.trainer.utils import nanstd

    worth = n.rewards.sum(1)
    first, last = 'if self.multi_objective_aggregation == "sum_then', "# Unscorable completions (every"
    of_groups = lines_of(GRPOTrainer, first, last)
    for scale in ("group", "batch", "none"):
        its = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": scale}
        held: dict[str, Any] = {
            "self": Space(**its, reward_weights=torch.ones(1)), "torch": torch, "nanstd": nanstd, "device": "cpu",
            "rewards_per_func": worth[:, None], "unscorable_mask": torch.zeros(ROWS, dtype=torch.bool),
            "num_generations": GROUP,
        }  # fmt: skip
        exec(of_groups, held)
        ours = advantages(n, Ppo(algorithm="grpo", group=GROUP, scale_rewards=scale))
        if scale == "batch":
            ours = over_batch(ours, Moments.of(worth))
        yield f"advantages, scale_rewards {scale}", ours, held["advantages"][:, None] * n.mask
    of_others = lines_of(RLOOTrainer, "grouped_rewards = ", "# Normalize advantages over the scorable")
    held = {"torch": torch, "nanstd": nanstd, "rewards": worth, "num_generations": GROUP}
    exec(of_others, held)
    yield "advantages, RLOO", advantages(n, Ppo(algorithm="rloo", group=GROUP)), held["advantages"][:, None] * n.mask


def regularizers_beside_trl(n: Numbers) -> Iterator[Row]:
    """The divergence in GRPOTrainer's loss, its entropy bonus, and the entropies that this is of."""
    from trl import GRPOTrainer
    from trl.trainer.utils import entropy_from_logits

    ppo, coef = Ppo(clip_high=0.3), 0.3
    bonus = {"_entropy_bonus_enabled": True, "use_adaptive_entropy": False, "entropy_coef": coef}

    def loss(new: torch.Tensor) -> torch.Tensor:
        return policy_loss(new, n.old, n.gain, n.mask, ppo).loss.over(n.entries.tokens)

    def trls(new: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
        inputs = grpo_inputs(n) | {"ref_per_token_logps": n.ref}
        found: torch.Tensor = theirs_of(GRPOTrainer)(grpo_stand_in("dapo", new, more), None, inputs)
        return found

    def near(new: torch.Tensor) -> torch.Tensor:
        apart = summed(kl.estimate("k3", new, n.ref, n.mask, limit=math.inf), n.mask, "token-mean")
        return loss(new) + coef * apart.over(n.entries.tokens)

    def trls_near(new: torch.Tensor) -> torch.Tensor:
        return trls(new, {"beta": coef})

    yield "loss dapo, beta (k3 without a limit)", sloped(n.new, near), sloped(n.new, trls_near)

    def varied(each: torch.Tensor) -> torch.Tensor:
        return loss(n.new) - coef * summed(each, n.mask, "token-mean").over(n.entries.tokens)

    def trls_varied(each: torch.Tensor) -> torch.Tensor:
        return trls(n.new, bonus | {"_get_per_token_logps_and_entropies": lambda *_, **__: (n.new, each, None)})

    yield "loss dapo, entropy_coef", sloped(n.values, varied), sloped(n.values, trls_varied)

    def all_of(how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.cat([how(n.logits).reshape(-1), sloped(n.logits, lambda logits: (how(logits) * n.mask).sum())])

    yield "entropies, with their gradient", all_of(entropies), all_of(entropy_from_logits)


def corrections_beside_trl(n: Numbers) -> Iterator[Row]:
    """Weights of tokens by what the engine said of them: the lines of GRPOTrainer that make them."""
    from trl import GRPOTrainer

    code = lines_of(GRPOTrainer, "per_token_logps_diff = (", "# Compute the per-token log probabilities for the")
    bounds = {
        "token_truncate": (0.0, 2.0),
        "token_mask": (0.5, 5.0),
        "sequence_truncate": (0.3, 2.0),
        "sequence_mask": (0.5, 3.0),
    }
    for mode, (low, high) in bounds.items():
        ppo = Ppo(importance_mode=mode, importance_floor=low, importance_limit=high)  # type: ignore[arg-type]
        its = {"mode": mode, "clip_min": low, "clip_max": high}
        held: dict[str, Any] = {
            "self": Space(**{f"vllm_importance_sampling_{name}": value for name, value in its.items()}),
            "torch": torch, "math": math, "mask": n.mask.double(), "old_per_token_logps": n.old,
            "sampling_per_token_logps": n.rollout,
        }  # fmt: skip
        exec(code, held)
        theirs = held["vllm_importance_sampling_ratio"].expand(ROWS, WIDTH)
        ours = importance_weights(n.old, n.rollout, n.mask, ppo, high)
        name = f"importance, {mode}" + (" with 0.5 and 5 (IcePop)" if mode == "token_mask" else "")
        yield name, ours * n.mask, theirs * n.mask


def given_beside_trl(n: Numbers) -> Iterator[Row]:
    """KTO, and the loss that SFTTrainer leaves to transformers."""
    from transformers.loss.loss_utils import ForCausalLMLoss
    from trl import KTOTrainer

    beta, weights, every = 0.3, (1.2, 0.7), torch.ones(ROWS, dtype=torch.bool)
    apart = torch.where(n.mask, n.old - n.ref, 0.0).sum(1) + 1.0  # of answers to other prompts

    def mine(new: torch.Tensor) -> torch.Tensor:
        ratios, against = preference.log_ratios(new, n.ref, n.mask), preference.kto_baseline(float(apart.mean()))
        return preference.kto_loss(ratios, n.good, every, against, beta=beta, weights=weights).loss.over(ROWS)

    def trls(new: torch.Tensor) -> torch.Tensor:
        inputs = {name: value for name, value in dpo_inputs(n).items() if not name.startswith("ref_")}
        inputs |= {
            "label": n.good,
            "ref_logps": torch.where(n.mask, n.ref, 0.0).sum(1),
            "ref_KL_logps": torch.zeros_like(apart),
        }
        found: torch.Tensor = theirs_of(KTOTrainer)(
            kto_stand_in(beta, weights, apart), dpo_model(n, new), inputs, False
        )
        return found

    yield "kto, with its gradient", sloped(n.new, mine), sloped(n.new, trls)

    def ours(logits: torch.Tensor) -> torch.Tensor:
        return summed(-logprobs(logits, n.tokens), n.mask).over(n.entries.tokens)

    def theirs(logits: torch.Tensor) -> torch.Tensor:
        labels = torch.where(n.mask, n.tokens, -100)  # of which the next one's place is taken: so one stands before
        before = torch.full((ROWS, 1), -100)
        padded = torch.cat([logits, logits[:, -1:]], 1)
        found: torch.Tensor = ForCausalLMLoss(
            padded, torch.cat([before, labels], 1), WORDS, num_items_in_batch=n.mask.sum()
        )
        return found

    # Theirs is in float32, so ours gets the same.
    logits = n.logits.float()
    yield "sft, with its gradient (float32)", sloped(logits, ours).double(), sloped(logits, theirs).double()


def kto_stand_in(beta: float, weights: tuple[float, float], apart: torch.Tensor) -> Space:
    """What KTOTrainer._compute_loss asks of its trainer."""
    return Space(
        model=Space(training=False), loss_type="kto", beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1],
        precompute_ref_logps=True, calculate_KL=True, aux_loss_enabled=False, _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0, _tp_size=1, _compute_kl_logps=lambda *_: apart,
        accelerator=Space(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
    )  # fmt: skip


def theirs_of(trainer: type) -> Callable[..., Any]:
    """A trainer's loss, which is a method of its own."""
    found: Callable[..., Any] = getattr(trainer, "_compute_loss")  # noqa: B009
    return found


def grpo_stand_in(name: str, new: torch.Tensor, more: dict[str, Any]) -> Space:
    """What GRPOTrainer._compute_loss asks of its trainer."""
    same = Space(gather=lambda x: x, reduce=lambda x, **_: x, num_processes=1)
    fields = {
        "loss_type": name.partition(",")[0].partition(" ")[0], "importance_sampling_level": "token", "epsilon_low": 0.2,
        "epsilon_high": 0.3, "beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "aux_loss_enabled": False, "use_vllm": False, "_entropy_bonus_enabled": False, "max_completion_length": WIDTH,
        "current_gradient_accumulation_steps": 1, "model": Space(training=False), "accelerator": same,
        "args": Space(**ARGUMENTS),
        "_metrics": {"eval": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (new, torch.zeros_like(new), None),
    }  # fmt: skip
    return Space(**fields | more)


def grpo_inputs(n: Numbers) -> dict[str, torch.Tensor]:
    """A batch as GRPOTrainer has it."""
    ids = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    return {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": n.mask.long(),
        "advantages": n.gain[:, 0], "old_per_token_logps": n.old, "num_items_in_batch": n.mask.sum(),
    }  # fmt: skip


def dpo_stand_in(kind: str, beta: float) -> Space:
    """What DPOTrainer._compute_loss asks of its trainer."""
    return Space(
        model=Space(training=False), loss_types=[kind], loss_weights=[1.0], label_smoothing=0.0, beta=beta, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", aux_loss_enabled=False, use_weighting=False,
        _metrics={"eval": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
        accelerator=Space(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
    )  # fmt: skip


def dpo_model(n: Numbers, new: torch.Tensor) -> Callable[..., Space]:
    """A model that finds these log-probabilities, 0 where masked as TRL's head does."""
    zero = torch.zeros_like(new)
    kept = torch.where(n.mask, new, 0.0)
    return lambda **_: Space(log_probs=kept, entropy=zero, mean_logits=zero, is_top1=zero.bool())


def dpo_inputs(n: Numbers) -> dict[str, torch.Tensor]:
    """A batch as DPOTrainer has it: the chosen ones first; the first token is the prompt's."""
    mask = torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), n.mask.long()], 1)
    ref = torch.where(n.mask, n.ref, 0.0).sum(1)
    chosen, rejected = ref.chunk(2)
    return {
        "input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip


class Config(dict[str, Any]):
    """A configuration of verl's: read by name, and asked with `get`."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def core_algos(folder: Path) -> Any:
    """verl's module, from its file; of what it imports only verl's own arithmetic is its own."""
    arithmetic = folder / "verl/utils/torch_functional.py"
    wanted = ("clip_by_value", "masked_sum", "masked_mean", "masked_var", "masked_whiten")
    parts = [f"def {part}" for part in arithmetic.read_text().split("\ndef ") if part.partition("(")[0] in wanted]
    functional = types.ModuleType("verl.utils.torch_functional")
    exec("import torch\n" + "\n".join(parts), functional.__dict__)
    stand_ins = {
        "omegaconf": {"DictConfig": dict}, "verl": {}, "verl.trainer": {}, "verl.trainer.config": {"AlgoConfig": Space},
        "verl.utils": {"as_torch_index": None, "group_mean_std": None, "torch_functional": functional},
        "verl.utils.import_utils": {"deprecated": lambda _: lambda f: f}, "verl.workers": {},
        "verl.workers.config": {"ActorConfig": Config},
    }  # fmt: skip
    for name, held in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(held)
    sys.modules["verl.utils.torch_functional"] = functional
    spec = importlib.util.spec_from_file_location("core_algos", folder / "verl/trainer/ppo/core_algos.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Prints each row's greatest difference over the draws, of its scale."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--verl", type=Path, help="a checkout of verl")
    asked.add_argument("--draws", type=int, default=20)
    options = asked.parse_args()
    worst: dict[str, float] = defaultdict(float)
    for seed in range(options.draws):
        n = Numbers(seed)
        sides = {"TRL": beside_trl(n)} | ({"verl": beside_verl(options.verl, n)} if options.verl else {})
        for side, rows in sides.items():
            for what, ours, theirs in rows:
                scale = max(float(theirs.abs().max()), 1e-3)
                name = f"{side}: {what}"
                worst[name] = max(worst[name], float((ours - theirs).abs().max()) / scale)
    for name, difference in worst.items():
        print(f"{difference:8.1e}  {name}")
    odd = sum(difference > 1e-6 for difference in worst.values())
    print(f"{len(worst)} rows, {odd} of them differ by more than 1e-6 of their scale")
    return 1 if odd else 0


if __name__ == "__main__":
    raise SystemExit(main())
