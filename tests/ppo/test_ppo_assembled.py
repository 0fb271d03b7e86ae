"""From scores to the gradients of a lane's loss: what the trainer puts together, against the same sums in plain float64.

The trainer's models are real, in float64. The reference knows formulas and settings only: it is told the logits and values that
the models gave, and finds the gradients with respect to these by differences.
"""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial

import ppo_reference as reference
import pytest
import torch
from ppo_job import job, settings

from elasticrl.config.training import Kl
from elasticrl.ppo import models
from elasticrl.ppo.batches import take
from elasticrl.ppo.models import Tied
from elasticrl.ppo.rewards import Function
from elasticrl.ppo.roles import response
from elasticrl.runtime.scalars import Tally

STEP = 1e-5  # of the differences
TEMPERATURE = 0.7
COEF = 0.4
PENALTY = 0.3
SPREAD = {"logprobs": 0.4, "rollout_logprobs": 0.5, "ref_logprobs": 0.8, "values": 0.6}

common = {
    "epochs": 1,
    "micro_tokens": 30,  # three rows of a lane's four: the last block is short
    "gamma": 0.9,
    "lam": 0.8,
    "clip_low": 0.1,
    "clip_high": 0.3,
    "dual_clip": 1.2,
    "importance_limit": 1.5,
    "value_clip": 0.3,
    "value_coef": 0.7,
    "entropy_coef": 0.2,
    "missing_eos_penalty": PENALTY,
}
CASES = {
    "ppo": ("separate", {"kl": Kl(coef=COEF)}),
    "ppo, KL in the loss": ("separate", {"kl": Kl(where="loss", coef=COEF, limit=0.6), "whiten": False}),
    "tied": ("tied", {"kl": Kl(coef=COEF)}),
    "tied, KL in the loss": ("tied", {"kl": Kl(where="loss", coef=COEF)}),
    "grpo": ("separate", {"kl": Kl(where="loss", coef=COEF), "algorithm": "grpo", "group": 4}),
    "grpo, KL in the reward": ("separate", {"kl": Kl(coef=COEF), "algorithm": "grpo", "group": 4}),
    "Dr.GRPO": (
        "separate",
        {
            "kl": Kl(where="loss", coef=COEF, estimator="k2"),
            "algorithm": "grpo",
            "group": 4,
            "scale_rewards": "none",
            "loss_agg_mode": "seq-mean-token-sum-norm",
            "overlong_buffer": 2,
        },
    ),
    "GSPO": (
        "separate",
        {
            "kl": Kl(coef=COEF),
            "algorithm": "grpo",
            "group": 4,
            "scale_rewards": "batch",
            "loss_mode": "gspo",
            "loss_agg_mode": "seq-mean-token-mean",
            "importance_limit": None,
        },
    ),
    "SAPO over rloo": (
        "separate",
        {
            "kl": Kl(coef=COEF, estimator="k2"),
            "algorithm": "rloo",
            "mask_truncated": True,
            "group": 2,
            "loss_mode": "sapo",
            "dual_clip": None,
            "loss_agg_mode": "seq-mean-token-sum",
        },
    ),
    "DAPO": (
        "separate",
        {
            "kl": Kl(where="loss", coef=COEF),
            "algorithm": "grpo",
            "group": 4,
            "filter_groups": True,
            "gen_batch": 64,
            "loss_agg_mode": "seq-mean-token-mean",
        },
    ),
    "reinforce++": ("separate", {"kl": Kl(coef=COEF), "algorithm": "reinforce_plus_plus"}),
    "reinforce++ with a baseline": (
        "separate",
        {"kl": Kl(where="loss", coef=COEF), "algorithm": "reinforce_plus_plus_baseline", "group": 4},
    ),
}


class Stopped(Exception):
    pass


def score(name, alike=False):
    """Of a sample, by its id alone; with `alike` half of the groups have one score."""
    group = name.partition(".")[0]
    if alike and sum(map(ord, group)) % 2:
        return 0.5
    return sum(ord(letter) * (1 + place) for place, letter in enumerate(name)) % 17 / 8 - 1


def stopped_at(trainer, phases, name):
    phases.add(name)
    with pytest.raises(Stopped):
        trainer.step(0)
    phases.discard(name)


@pytest.fixture(params=CASES, scope="module")
def ready(request, folders):
    """A trainer that stands before its first update, with rows that a reference and a critic would never have left so."""
    head, more = CASES[request.param]
    phases: set[str] = set()

    def stop(name):
        if name in phases:
            raise Stopped

    trainer, run = job(folders["qwen2"], head=head, ppo=settings(**common | more), on_phase=stop)
    trainer.scorer = Function(
        "by id", lambda answers: [score(answer.id, settings(**common | more).filter_groups) for answer in answers]
    )
    stopped_at(trainer, phases, "advantage")
    g = torch.Generator().manual_seed(3)
    for lane in run.lanes:
        rows = run.buffer.rows[lane]
        for name in (name for name in SPREAD if name in rows):  # in one order: a set has another one in each process
            run.buffer.put(lane, **{name: rows[name] + SPREAD[name] * torch.randn(rows[name].shape, generator=g)})
    stopped_at(trainer, phases, "update")
    roles = {
        name: copy.deepcopy(model).double()
        for name, model in {"actor": trainer.roles.actor, "critic": trainer.roles.critic}.items()
        if model is not None
    }
    trainer.roles = replace(trainer.roles, temperature=TEMPERATURE, **roles)
    return trainer


def close(ours, theirs, within):
    theirs = torch.tensor(theirs, dtype=torch.float64)
    assert theirs.abs().max() > 100 * within, "nothing to compare"
    torch.testing.assert_close(ours.double(), theirs.reshape(ours.shape), rtol=0, atol=within)


def test_advantages_and_returns_are_those_of_scores_penalties_and_kl(ready):
    ppo, buffer = ready.ppo, ready.run.buffer
    rows = {lane: {name: value.tolist() for name, value in buffer.rows[lane].items()} for lane in ready.run.lanes}
    coef = COEF if ppo.kl.where == "reward" else 0.0
    ended = [end for lane in rows for end in rows[lane]["ended"]]
    assert {True, False} == set(ended)
    rewards, values, masks = [], [], []
    for lane, its in rows.items():
        for i, name in enumerate(buffer.ids[lane]):
            said = score(name, ppo.filter_groups) - (0.0 if its["ended"][i] else PENALTY)
            if ppo.overlong_buffer and any(its["mask"][i]):
                said -= reference.overlong(sum(its["mask"][i]), 4, ppo.overlong_buffer, ppo.overlong_penalty)
            pairs = zip(its["logprobs"][i], its["ref_logprobs"][i], strict=True)
            kl = [reference.divergence(ppo.kl.estimator or "k1", a, b, ppo.kl.limit) for a, b in pairs]
            rewards.append(reference.rewards_row(said, its["mask"][i], kl, coef))
            masks.append(its["mask"][i])
            values.append(its.get("values", its["mask"])[i])
    if ppo.algorithm == "reinforce_plus_plus":
        zero = [0.0] * len(masks[0])
        advantages = [
            reference.gae_row(*row, zero, mask, ppo.gamma, 1.0)[0] for *row, mask in zip(rewards, masks, strict=True)
        ]
        advantages = reference.whiten_all(advantages, masks)
    elif ppo.algorithm != "ppo":
        scores, scale = [sum(row) for row in rewards], ppo.scale_rewards if ppo.algorithm == "grpo" else "none"
        rloo = ppo.algorithm == "rloo"
        whole = reference.others_row(scores, ppo.group) if rloo else reference.group_row(scores, ppo.group, scale)
        advantages = [[x if keep else 0.0 for keep in mask] for x, mask in zip(whole, masks, strict=True)]
        if ppo.algorithm == "reinforce_plus_plus_baseline":
            advantages = reference.whiten_all(advantages, masks)
    else:
        both = [reference.gae_row(*row, ppo.gamma, ppo.lam) for row in zip(rewards, values, masks, strict=True)]
        close(torch.cat([buffer.rows[lane]["returns"] for lane in rows]), [row for _, row in both], 1e-5)
        advantages = [row for row, _ in both]
        advantages = reference.whiten_all(advantages, masks) if ppo.whiten else advantages
    close(torch.cat([buffer.rows[lane]["advantages"] for lane in rows]), advantages, 1e-5)


def test_a_lanes_loss_and_its_gradients_are_the_formulas(ready):
    lane, number, buffer = 2, 1, ready.run.buffer
    orders = {each: ready._orders(each)[number] for each in ready.run.lanes}
    entries = ready._entries(number)
    masks = [learned(buffer.rows[each])[order] for each, order in orders.items()]
    assert entries == (sum(mask.sum() for mask in masks), sum(mask.any(1).sum() for mask in masks))
    count = reference.count(entries, ready.ppo.loss_agg_mode, ready.sizes.answer)
    tally, terms, losses = Tally(), Counter(), {"actor": actor_loss, "critic": critic_loss}
    doubles = {name: wide(value) for name, value in buffer.rows[lane].items()}
    for block in (take(doubles, its) for its in ready._cut(lane)[number]):
        its = block | {"said": response(block), "mask": learned(block)}
        rows = {name: value.tolist() for name, value in its.items()}
        for role in ready.flow.trained:
            loss, outputs, gradients = computed(ready, role, block, entries, tally)
            formula = partial(losses[role], ready.ppo, rows)
            expected, found = formula(outputs)
            if not its["mask"].any():
                assert not loss
                continue
            over = count if role == "actor" else entries.tokens
            close(loss, expected / over, 1e-6)
            terms.update(found)
            for output, gradient in zip(outputs, gradients, strict=True):
                close(gradient * over, differences(partial(formula, outputs), output), 1e-5)
    terms["policy_loss"] *= entries.tokens / count
    assert tally.sums == pytest.approx(terms, rel=1e-5)
    if ready.ppo.loss_mode != "sapo":
        assert terms["clip_fraction"] > 0


def test_what_is_left_out_are_groups_that_scored_alike_what_is_too_much_and_answers_that_were_cut_off(ready):
    ppo, buffer, kept = ready.ppo, ready.run.buffer, []
    for lane in ready.run.lanes:
        names, rows, most = buffer.ids[lane], buffer.rows[lane], ppo.batch // ready.lanes
        groups = [
            {score(other, True) for other in names if other.split(".")[0] == name.split(".")[0]} for name in names
        ]
        asked = [not ppo.filter_groups or len(group) > 1 for group in groups]
        first = sorted(range(len(names)), key=lambda i, asked=asked: not asked[i])[:most]
        ended = [bool(end or not ppo.mask_truncated) for end in rows["ended"]]
        mine = [asked[i] and ended[i] and i in first for i in range(len(names))]
        assert rows["kept"].tolist() == mine
        kept += mine
    assert {*kept} == ({True, False} if ppo.filter_groups or ppo.mask_truncated else {True})
    assert buffer.facts["left_out"] == kept.count(False) / len(kept)


def learned(rows):
    return rows["mask"] & rows["kept"][:, None]


def wide(value):
    return value.double() if value.is_floating_point() else value


def computed(trainer, role, block, entries, tally):
    """(the loss, what each of the role's heads gave for the places of the response, the loss's gradient there)."""
    roles, given = trainer.roles, []
    tied = isinstance(roles.actor, Tied)
    actor = [roles.actor.actor.lm_head, roles.actor.value_head] if tied else [roles.actor.lm_head]
    heads = actor if role == "actor" else [roles.critic.score]

    def keep(_head, _inputs, out):
        out.retain_grad()
        given.append(out)

    hooks = [head.register_forward_hook(keep) for head in heads]
    loss = trainer.losses[role](block, entries, tally)
    loss.backward()
    for hook in hooks:
        hook.remove()
    at = models._before(block)  # a token's logits and value stand one place before it

    def here(values, head):
        """Of these places; the actor's head has seen no others."""
        return values if head is heads[0] and role == "actor" else values[torch.arange(len(at))[:, None], at]

    slopes = [torch.zeros_like(out) if out.grad is None else out.grad for out in given]
    for head, slope in zip(heads, slopes, strict=True):
        if head is not heads[0] or role != "actor":
            elsewhere = slope.clone()
            elsewhere[torch.arange(len(at))[:, None], at] = 0
            assert not elsewhere.any()
    outputs = [here(out.detach(), head) for head, out in zip(heads, given, strict=True)]
    plain = [(x.squeeze(-1) if x.shape[-1] == 1 else x).tolist() for x in outputs]
    return loss, plain, [here(slope, head) for head, slope in zip(heads, slopes, strict=True)]


def actor_loss(ppo, rows, outputs):
    """(the sum over the block, its terms)."""
    mask, scaled = rows["mask"], [[[x / TEMPERATURE for x in cell] for cell in row] for row in outputs[0]]
    new = [
        [reference.log_softmax(cell)[token] for cell, token in zip(cells, said, strict=True)]
        for cells, said in zip(scaled, rows["said"], strict=True)
    ]
    limit, weights = ppo.importance_limit, None
    if limit:
        weights = reference.importance(rows["logprobs"], rows["rollout_logprobs"], mask, limit)
    how = ppo.loss_agg_mode
    policy, clipped, approx_kl = reference.policy(
        new, rows["logprobs"], rows["advantages"], mask, low=ppo.clip_low, high=ppo.clip_high, dual=ppo.dual_clip,
        limit=ppo.log_ratio_limit, weights=weights, mode=ppo.loss_mode, how=how,
    )  # fmt: skip
    entropies = [[reference.entropy(cell) for cell in row] for row in scaled]
    entropy = reference.added(entropies, mask, "token-mean")
    loss = policy - ppo.entropy_coef * reference.added(entropies, mask, how)
    terms = {"policy_loss": policy, "entropy": entropy, "clip_fraction": clipped, "approx_kl": approx_kl}
    if ppo.kl.where == "loss":
        kind, limit = ppo.kl.estimator or "k3", ppo.kl.limit
        both = [zip(*pair, strict=True) for pair in zip(new, rows["ref_logprobs"], strict=True)]
        kl = [[reference.divergence(kind, policy_lp, ref_lp, limit) for policy_lp, ref_lp in row] for row in both]
        loss += ppo.kl.coef * reference.added(kl, mask, how)
    if len(outputs) == 1:
        return loss, terms
    value, more = critic_loss(ppo, rows, outputs[1:])
    return loss + ppo.value_coef * value, terms | more


def critic_loss(ppo, rows, outputs):
    """(the sum over the block, its terms)."""
    loss, _ = reference.value(outputs[0], rows["values"], rows["returns"], rows["mask"], ppo.value_clip)
    return loss, {"value_loss": loss}


def differences(formula, values):
    """The gradient of the formula's sum with respect to these nested lists, which it reads and which are put back."""
    if isinstance(values[0], list):
        return [differences(formula, row) for row in values]
    found = []
    for i, x in enumerate(values):
        values[i] = x + STEP
        more, _ = formula()
        values[i] = x - STEP
        less, _ = formula()
        found.append((more - less) / (2 * STEP))
        values[i] = x
    return found


def test_a_batch_is_scaled_by_the_rewards_of_what_is_trained_on_alone(folders):
    # Found by reading: a sample that was generated and not chosen has no reference's log-probabilities, so all of its own
    # counted as its divergence, and every advantage was many times too small.
    ppo = settings(
        algorithm="grpo", group=4, gen_batch=64, filter_groups=True, scale_rewards="batch", epochs=1, kl=Kl(coef=COEF)
    )
    trainer, run = job(folders["qwen2"], ppo=ppo)
    assert trainer.heard
    trainer.scorer = Function("by id", lambda answers: [score(answer.id, True) for answer in answers])
    trainer.step(0)
    scores, found = [], []
    for lane in run.lanes:
        rows, chosen = run.buffer.rows[lane], trainer._chosen(lane)
        scores.append(rows["scores"].sum(1)[chosen].double())
        mask = rows["mask"][chosen]
        found.append((rows["advantages"][chosen].double() * mask).sum(1) / mask.sum(1))
    whole = torch.cat(scores)
    gained = (whole.reshape(-1, 4) - whole.reshape(-1, 4).mean(1, keepdim=True)).reshape(-1)
    torch.testing.assert_close(torch.cat(found), gained / whole.std(), rtol=1e-3, atol=1e-3)
