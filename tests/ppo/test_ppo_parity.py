"""Losses and advantages against the slow reference: float64 to 1e-10, float32 to 1e-5 of the term's scale."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isfinite

import hypothesis.strategies as st
import ppo_reference as reference
import pytest
import torch
from hypothesis import given, settings

from elasticrl.config.training import Ppo
from elasticrl.ppo import kl, losses, preference
from elasticrl.ppo.advantages import (
    WHITENED,
    contested,
    explained_variance,
    gae,
    last_valid,
    over_batch,
    overlong_penalties,
    token_rewards,
    whiten,
    without_critic,
)
from elasticrl.ppo.rewards import placed
from elasticrl.runtime.lanes import Fold, Node
from elasticrl.runtime.scalars import Moments

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MODES = ("vanilla", "gspo", "geo_mean", "cispo", "sapo")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
quick = settings(max_examples=40, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Batch:
    seed: int
    rows: int
    width: int
    dtype: torch.dtype
    masks: str  # of which kind

    def mask(self):
        g = torch.Generator().manual_seed(self.seed)
        if self.masks == "none":
            return torch.zeros(self.rows, self.width, dtype=torch.bool)
        if self.masks == "holes":
            return torch.rand(self.rows, self.width, generator=g) < 0.6
        lengths = torch.randint(0, self.width + 1, (self.rows, 1), generator=g)
        return torch.arange(self.width)[None] < lengths

    def numbers(self, purpose, scale=1.0, shape=None):
        g = torch.Generator().manual_seed(self.seed * 1000 + purpose)
        return torch.randn(shape or (self.rows, self.width), generator=g, dtype=torch.float64).mul(scale).to(self.dtype)

    def same(self, ours, theirs, least=0.0):
        """`least`: what it is reckoned of is that large at least, though its result may be smaller."""
        theirs = torch.tensor(theirs, dtype=torch.float64).reshape(ours.shape)
        scale = max(theirs.abs().max().item() if theirs.numel() else 0.0, least)
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=TOLERANCE[self.dtype] * scale)


batches = st.builds(
    Batch,
    seed=st.integers(0, 10_000),
    rows=st.integers(0, 5),
    width=st.integers(0, 7),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    masks=st.sampled_from(["lengths", "holes", "none"]),
)


@quick
@given(batches, st.sampled_from([1.0, 0.97, 0.0]), st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_is_the_sum_over_what_follows_and_returns_are_made_before_whitening(b, gamma, lam):
    mask, rewards, values = b.mask(), b.numbers(1), b.numbers(2)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    both = [
        reference.gae_row(r, v, m, gamma, lam)
        for r, v, m in zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
    ]
    b.same(advantages, [row for row, _ in both])
    b.same(returns, [row for _, row in both])
    white = whiten(advantages, mask, Moments.of(advantages, mask))
    b.same(white, reference.whiten_all([row for row, _ in both], mask.tolist()))


@quick
@given(batches, st.sampled_from(MODES))
def test_what_is_under_the_mask_changes_nothing(b, mode):
    mask = b.mask()
    rewards, values, other = b.numbers(1), b.numbers(2), torch.full((b.rows, b.width), float("nan"), dtype=b.dtype)
    clean = gae(rewards, values, mask, gamma=0.99, lam=0.9)
    dirty = gae(torch.where(mask, rewards, other), torch.where(mask, values, other), mask, gamma=0.99, lam=0.9)
    for x, y in zip(clean, dirty, strict=True):
        assert torch.equal(x, y)
    new = torch.where(mask, b.numbers(3), other).requires_grad_()
    term = losses.policy_loss(
        new, torch.where(mask, b.numbers(4), other), torch.where(mask, rewards, other), mask, Ppo(loss_mode=mode)
    )
    (term.loss.total + losses.value_loss(new, other, other, torch.zeros_like(mask)).total).backward()
    assert isfinite(term.loss.total.item())
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert not new.grad[~mask].any()


@quick
@given(batches, st.booleans())
def test_the_score_lies_on_the_last_valid_token_and_kl_on_each(b, with_kl):
    mask, kls = b.mask(), b.numbers(2)
    ended = b.numbers(3, shape=(b.rows,)) > 0
    raw = b.numbers(1, shape=(b.rows,)).tolist()
    coef = 0.3 if with_kl else 0.0
    scores = placed(raw, mask).to(b.dtype) if b.dtype == torch.float32 else _placed64(raw, mask)
    ours = token_rewards(scores, mask, ended, penalty=0.5, kl=kls if with_kl else None, coef=coef)
    rows = zip(raw, ended.tolist(), mask.tolist(), kls.tolist(), strict=True)
    b.same(ours, [reference.rewards_row(s if e else s - 0.5, m, k, coef) for s, e, m, k in rows])
    assert (last_valid(mask).sum(1) == mask.any(1).long()).all()


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@quick
@given(batches, st.sampled_from([0.0, 0.5]), st.sampled_from([1.3, 5.0]))
def test_importance_weights(mode, b, floor, limit):
    mask, trainer, rollout = b.mask(), b.numbers(1), b.numbers(2)
    ours = losses.importance_weights(trainer, rollout, mask, Ppo(importance_mode=mode, importance_floor=floor), limit)
    b.same(ours, reference.importance(trainer.tolist(), rollout.tolist(), mask.tolist(), limit, floor, mode))


@pytest.mark.parametrize("mode", MODES)
@quick
@given(
    batches,
    st.sampled_from([None, 1.5, 3.0]),
    st.sampled_from([20.0, 0.3]),
    st.sampled_from([(0.2, 0.2), (0.1, 0.4)]),
    st.booleans(),
    st.sampled_from(AGGREGATIONS),
)
def test_policy_loss(mode, b, dual, limit, clips, weighted, how):
    mask, new, old, adv = b.mask(), b.numbers(1), b.numbers(2), b.numbers(3)
    rollout = b.numbers(4)
    weights = losses.importance_weights(old, rollout, mask, Ppo(), 2.0) if weighted else None
    if weights is not None:
        b.same(weights, reference.importance(old.tolist(), rollout.tolist(), mask.tolist(), 2.0))
    low, high = clips
    ppo = Ppo(
        loss_mode=mode, loss_agg_mode=how, clip_low=low, clip_high=high, dual_clip=dual, log_ratio_limit=limit,
        tau_pos=0.8, tau_neg=1.3,
    )  # fmt: skip
    ours = losses.policy_loss(new, old, adv, mask, ppo, weights)
    loss, clipped, approx = reference.policy(
        new.tolist(),
        old.tolist(),
        adv.tolist(),
        mask.tolist(),
        low=low,
        high=high,
        dual=dual,
        limit=limit,
        weights=weights.tolist() if weights is not None else None,
        mode=mode,
        taus=(0.8, 1.3),
        how=how,
    )
    b.same(ours.loss.total, loss)
    b.same(ours.approx_kl.total, approx, least=1.0)  # a ratio and its log, which nearly cancel
    assert ours.clipped.total.item() == clipped
    assert ours.loss.entries == (mask.sum() if how == "token-mean" else mask.any(1).sum())


@quick
@given(batches, st.sampled_from(AGGREGATIONS), st.integers(1, 5))
def test_an_aggregation_is_the_same_however_rows_are_cut_into_lanes(b, how, lanes):
    mask, values = b.mask(), b.numbers(1)
    entries = losses.Entries(float(mask.sum()), float(mask.any(1).sum()))
    count = entries.of(how, most=9)
    assert count == reference.count(entries, how, 9)
    parts = [slice(b.rows * i // lanes, b.rows * (i + 1) // lanes) for i in range(lanes)]
    whole = sum(losses.summed(values[part], mask[part], how).over(count) for part in parts)
    b.same(whole, reference.added(values.tolist(), mask.tolist(), how) / count)


@pytest.mark.parametrize("mode", ["gspo", "cispo", "sapo"])
@quick
@given(batches)
def test_the_gradients_of_the_surrogates(mode, b):
    """gspo: that of the sample's own ratio, where a sample has one advantage; cispo: the weight's; sapo: the gate's slope."""
    mask, old = b.mask(), b.numbers(2).double()
    new, adv = b.numbers(1).double().requires_grad_(), b.numbers(3, shape=(b.rows, 1)).double().expand(b.rows, b.width)
    ppo = Ppo(loss_mode=mode, clip_low=0.3, clip_high=0.4)
    losses.policy_loss(new, old, adv, mask, ppo).loss.total.backward()
    assert new.grad is not None
    again = new.detach().requires_grad_()
    log_ratio = torch.where(mask, again - old, 0.0)
    ratio = log_ratio.exp()
    if mode == "gspo":
        ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
        terms = torch.minimum(ratio * adv, ratio.clamp(0.7, 1.4) * adv).expand_as(mask)
    elif mode == "cispo":
        terms = ratio.detach().clamp(0.7, 1.4) * adv * again
    else:
        slope = adv.new_tensor((1.0, 1.05))[(adv <= 0).long()]
        gate = torch.sigmoid(slope * (ratio.detach() - 1))
        terms = 4 * gate * (1 - gate) * ratio.detach() * adv * again
    torch.where(mask, -terms, 0.0).sum().backward()
    assert again.grad is not None
    torch.testing.assert_close(new.grad, again.grad, rtol=0, atol=1e-10)


@quick
@given(batches, st.sampled_from(["k1", "k2", "k3", "k1+", "k3+"]))
def test_estimators_of_the_divergence_and_their_gradients(b, kind):
    mask, policy, ref = b.mask(), b.numbers(2).double().requires_grad_(), b.numbers(3, 3.0).double()
    found = kl.estimate(kind, policy, ref, mask, limit=5.0)
    found.sum().backward()
    rows = [list(zip(*row, strict=True)) for row in zip(policy.tolist(), ref.tolist(), mask.tolist(), strict=True)]
    value, slope = reference.divergence, reference.divergence_slope
    b.same(found, [[value(kind, p, r, 5.0) if keep else 0.0 for p, r, keep in row] for row in rows])
    assert policy.grad is not None
    b.same(policy.grad, [[slope(kind, p, r, 5.0) if keep else 0.0 for p, r, keep in row] for row in rows])


@quick
@given(batches, st.sampled_from([None, 0.2, 1.0]))
def test_value_loss(b, clip):
    mask, new, old, returns = b.mask(), b.numbers(1), b.numbers(2), b.numbers(3)
    ours = losses.value_loss(new, old, returns, mask, clip=clip)
    loss, tokens = reference.value(new.tolist(), old.tolist(), returns.tolist(), mask.tolist(), clip)
    b.same(ours.total, loss)
    assert ours.entries.item() == tokens


@quick
@given(batches, st.sampled_from([0.7, 1.0, 2.0]))
def test_logprobs_entropy_and_both_kls(b, temperature):
    logits = b.numbers(1, 2.0, (b.rows, b.width, 5))
    tokens = torch.randint(0, 5, (b.rows, b.width), generator=torch.Generator().manual_seed(b.seed))
    every = torch.ones(b.rows, b.width, dtype=torch.bool)
    theirs = [[reference.log_softmax([x / temperature for x in cell]) for cell in row] for row in logits.tolist()]
    b.same(
        losses.logprobs(logits, tokens, temperature),
        [[lp[t] for lp, t in zip(r, ts, strict=True)] for r, ts in zip(theirs, tokens.tolist(), strict=True)],
    )
    entropy = [[reference.entropy([x / temperature for x in cell]) for cell in row] for row in logits.tolist()]
    b.same(losses.entropies(logits, temperature), entropy)
    policy, ref = b.numbers(2), b.numbers(3, 3.0)
    pairs = [list(zip(p, r, strict=True)) for p, r in zip(policy.tolist(), ref.tolist(), strict=True)]
    b.same(kl.k1(policy, ref), [[p - r for p, r in row] for row in pairs])
    b.same(kl.k3(policy, ref, every, limit=10.0), [[reference.k3(p, r, 10.0) for p, r in row] for row in pairs])


@pytest.mark.parametrize(
    "kind", ["group", "batch", "none", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
@quick
@given(
    batches,
    st.sampled_from([2, 4]),
    st.sampled_from([1.0, 0.9]),
)
def test_advantages_without_a_critic(kind, b, group, gamma):
    rewards = b.numbers(1, shape=(b.rows * group, b.width))
    mask = b.mask().repeat_interleave(group, 0)
    rewards = torch.where(mask, rewards, 0.0)
    algorithm, scale = ("grpo", kind) if kind in ("group", "batch", "none") else (kind, "group")
    ppo = Ppo(algorithm=algorithm, group=group, scale_rewards=scale, gamma=gamma)
    ours, scores, keep = without_critic(rewards, mask, ppo), rewards.sum(1), mask.tolist()
    if kind == "batch" and len(scores):
        ours = over_batch(ours, Moments.of(scores))
    if algorithm in WHITENED:
        ours = whiten(ours, mask, Moments.of(ours, mask))
    if kind == "reinforce_plus_plus":
        zero = [0.0] * b.width
        found = [reference.gae_row(r, zero, m, gamma, 1.0)[0] for r, m in zip(rewards.tolist(), keep, strict=True)]
    else:
        row = reference.others_row if kind == "rloo" else partial(reference.group_row, by=scale)
        row = partial(reference.group_row, by="none") if kind == "reinforce_plus_plus_baseline" else row
        each = row(scores.tolist(), group)
        each = reference.opo_row(scores.tolist(), mask.sum(1).tolist(), group) if kind == "opo" else each
        found = [[x if k else 0.0 for k in m] for x, m in zip(each, keep, strict=True)]
    b.same(ours, reference.whiten_all(found, keep) if algorithm in WHITENED else found)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo"])
@quick
@given(batches)
def test_what_is_lost_is_as_if_it_had_never_been_in_its_group(kind, b):
    """The first of four is lost, whatever its score is: the others have the advantages of a group of three."""
    rewards, mask = b.numbers(1, shape=(b.rows * 4, b.width)), b.mask().repeat_interleave(4, 0)
    rewards = torch.where(mask, rewards, 0.0)
    lost = torch.arange(b.rows * 4) % 4 == 0
    found = without_critic(rewards + 1e3 * lost[:, None], mask, Ppo(algorithm=kind, group=4), lost)
    assert not found[lost].any()
    b.same(found[~lost], without_critic(rewards[~lost], mask[~lost], Ppo(algorithm=kind, group=3)).tolist())
    alike = contested(torch.tensor([9.0, 1.0, 1.0, 1.0, 9.0, 1.0, 2.0, 1.0]), 4, torch.tensor([True, *[False] * 3] * 2))
    assert alike.tolist() == [False] * 4 + [True] * 4


@quick
@given(batches, st.sampled_from([(7, 3, 1.0), (5, 5, 0.5)]))
def test_overlong_shaping(b, how):
    mask, scores = b.mask(), torch.zeros(b.rows, b.width, dtype=b.dtype)
    most, buffer, factor = how
    ended = torch.ones(b.rows, dtype=torch.bool)
    found = overlong_penalties(mask, most=most, buffer=buffer, factor=factor)
    expected = [reference.overlong(sum(row), most, buffer, factor) if any(row) else 0.0 for row in mask.tolist()]
    b.same(token_rewards(scores, mask, ended, overlong=found).sum(1), [-x for x in expected])


@quick
@given(batches)
def test_preference_losses(b):
    shape = (b.rows,)
    chosen, rejected = b.numbers(1, 5.0, shape), b.numbers(2, 5.0, shape)
    keep, good = b.numbers(3, shape=shape) > -0.5, b.numbers(4, shape=shape) > 0
    lengths = tuple(torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(b.seed + i)) for i in (0, 1))
    for kind in ("sigmoid", "hinge", "ipo", "simpo"):
        b.same(
            preference.dpo_loss(chosen, rejected, keep, kind=kind, beta=0.2, gamma=0.5, lengths=lengths).loss.total,
            reference.dpo(
                chosen.tolist(), rejected.tolist(), keep.tolist(), 0.2, kind, 0.5, [n.tolist() for n in lengths]
            ),
        )
    ours = preference.kto_loss(chosen, good, keep, preference.kto_baseline(0.4), beta=0.2, weights=(1.5, 0.7))
    b.same(ours.loss.total, reference.kto(chosen.tolist(), good.tolist(), keep.tolist(), 0.4, 0.2, (1.5, 0.7)))
    assert preference.kto_baseline(-3.0) == 0.0


@quick
@given(batches, st.integers(1, 5))
def test_a_loss_cut_into_lanes_is_the_loss_of_the_whole_never_a_mean_of_means(b, lanes):
    """Lanes of uneven sizes, empty ones too, folded over the tree and divided once."""
    mask, new, old, adv = b.mask(), b.numbers(1), b.numbers(2), b.numbers(3)
    cuts = [b.rows * i * i // (lanes * lanes) for i in range(lanes + 1)]
    parts = [slice(lo, hi) for lo, hi in pairwise(cuts)]
    tokens = float(mask.sum().item())
    fold = Fold[torch.Tensor](lanes, torch.add)
    for lane, part in enumerate(parts):
        term = losses.policy_loss(new[part], old[part], adv[part], mask[part], Ppo()).loss
        fold.put(Node(lane, lane + 1), term.over(tokens))
    loss, _, _ = reference.policy(new.tolist(), old.tolist(), adv.tolist(), mask.tolist())
    b.same(fold.total(), loss / max(tokens, 1))

    moments = Fold[Moments](lanes, lambda x, y: x + y)
    for lane, part in enumerate(parts):
        moments.put(Node(lane, lane + 1), Moments.of(adv[part], mask[part]))
    whole = torch.cat([whiten(adv[part], mask[part], moments.total()) for part in parts])
    if tokens:
        b.same(torch.where(mask, whole, 0.0), reference.whiten_all(_zero(adv, mask), mask.tolist()))


def _placed64(scores, mask):
    return torch.where(last_valid(mask), torch.tensor(scores, dtype=torch.float64)[:, None], 0.0)


def test_scores_of_tokens_stand_on_their_tokens():
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    expected = torch.tensor([[0.1, 0.0, 0.2], [0.0, 0.0, 0.0], [0.0, 0.7, 0.0]])
    assert torch.equal(placed([[0.1, 0.2], 0.3, 0.7], mask), expected)


def _zero(values, mask):
    return torch.where(mask, values, 0.0).tolist()


def test_the_gradient_of_the_clipped_surrogate_vanishes_only_where_the_clip_bites():
    new = torch.tensor([[0.5, 0.1, -0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    adv = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    old, mask = torch.zeros_like(adv), torch.ones_like(adv, dtype=torch.bool)
    losses.policy_loss(new, old, adv, mask, Ppo()).loss.total.backward()
    assert new.grad is not None
    expected = torch.tensor([[0.0, -1.0, 0.0, 1.0]], dtype=torch.float64) * new.detach().exp()
    torch.testing.assert_close(new.grad, expected)


def test_explained_variance_is_one_for_a_seer_and_zero_for_the_mean():
    returns = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(Moments.of(returns), Moments.of(returns - returns)) == 1.0
    assert explained_variance(Moments.of(returns), Moments.of(returns - returns.mean())) == pytest.approx(0.0)
    assert explained_variance(Moments.of(torch.ones(3)), Moments.of(torch.randn(3))) == 0.0


def test_an_adaptive_coefficient_is_steered_and_measuring_a_step_twice_changes_nothing():
    c = kl.Coefficient(0.1, target=6.0, horizon=100)
    c.observe(step=0, kl=12.0, samples=10)  # an error of 1, clipped to 0.2
    assert c.of(1) == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    assert c.of(0) == 0.1
    once = c.state_dict()
    c.observe(step=0, kl=12.0, samples=10)
    assert c.state_dict() == once
    other = kl.Coefficient(9.9, target=6.0, horizon=100)
    other.load_state_dict(once)
    for x in (c, other):
        x.observe(step=1, kl=3.0, samples=10)
    assert other.state_dict() == c.state_dict()
    fixed = kl.Coefficient(0.1)
    fixed.observe(step=0, kl=99.0, samples=10)
    assert fixed.of(1) == 0.1
    again = kl.Coefficient(0.4)  # the configuration was changed for a restart
    again.load_state_dict(fixed.state_dict())
    assert again.of(1) == 0.4


def test_a_batch_beyond_the_horizon_steers_by_a_fifth_and_never_below_0():
    c = kl.Coefficient(0.1, target=6.0, horizon=200)
    c.observe(step=0, kl=0.0, samples=1024)
    assert c.of(1) == pytest.approx(0.1 * (1 - 0.2))
    c.observe(step=1, kl=99.0, samples=1024)
    assert c.of(2) == pytest.approx(0.08 * (1 + 0.2))
