"""Losses and advantages against the slow reference: float64 to 1e-10, float32 to 1e-5 of the term's scale."""

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import hypothesis.strategies as st
import ppo_reference as reference
import pytest
import torch
from hypothesis import given, settings

from elasticrl.ppo import kl, losses, preference
from elasticrl.ppo.advantages import (
    explained_variance,
    gae,
    group_advantages,
    last_valid,
    token_rewards,
    whiten,
)
from elasticrl.ppo.rewards import placed
from elasticrl.runtime.lanes import Fold, Node
from elasticrl.runtime.scalars import Moments

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
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

    def same(self, ours, theirs):
        theirs = torch.tensor(theirs, dtype=torch.float64).reshape(ours.shape)
        scale = theirs.abs().max().item() if theirs.numel() else 0.0
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
@given(batches)
def test_what_is_under_the_mask_changes_nothing(b):
    mask = b.mask()
    rewards, values, other = b.numbers(1), b.numbers(2), torch.full((b.rows, b.width), float("nan"), dtype=b.dtype)
    clean = gae(rewards, values, mask, gamma=0.99, lam=0.9)
    dirty = gae(torch.where(mask, rewards, other), torch.where(mask, values, other), mask, gamma=0.99, lam=0.9)
    for x, y in zip(clean, dirty, strict=True):
        assert torch.equal(x, y)
    new = torch.where(mask, b.numbers(3), other).requires_grad_()
    term = losses.policy_loss(new, torch.where(mask, b.numbers(4), other), torch.where(mask, rewards, other), mask)
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


@quick
@given(
    batches,
    st.sampled_from([None, 1.5, 3.0]),
    st.sampled_from([20.0, 0.3]),
    st.sampled_from([(0.2, 0.2), (0.1, 0.4)]),
    st.booleans(),
)
def test_policy_loss(b, dual, limit, clips, weighted):
    mask, new, old, adv = b.mask(), b.numbers(1), b.numbers(2), b.numbers(3)
    rollout = b.numbers(4)
    weights = losses.importance_weights(old, rollout, mask, 2.0) if weighted else None
    if weights is not None:
        b.same(weights, reference.importance(old.tolist(), rollout.tolist(), mask.tolist(), 2.0))
    low, high = clips
    ours = losses.policy_loss(
        new,
        old,
        adv,
        mask,
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
        log_ratio_limit=limit,
        weights=weights,
    )
    loss, clipped, approx, tokens = reference.policy(
        new.tolist(),
        old.tolist(),
        adv.tolist(),
        mask.tolist(),
        low=low,
        high=high,
        dual=dual,
        limit=limit,
        weights=weights.tolist() if weights is not None else None,
    )
    b.same(ours.loss.total, loss)
    b.same(ours.approx_kl.total, approx)
    assert ours.clipped.total.item() == clipped
    assert ours.loss.entries.item() == tokens


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


@quick
@given(batches, st.sampled_from([1, 2, 4]))
def test_group_advantages(b, group):
    scores = b.numbers(1, shape=(b.rows * group,))
    mask = b.mask().repeat_interleave(group, 0)
    theirs = reference.group_row(scores.tolist(), group)
    expected = [[x if keep else 0.0 for keep in row] for x, row in zip(theirs, mask.tolist(), strict=True)]
    b.same(group_advantages(scores, mask, group), expected)


@quick
@given(batches)
def test_preference_losses(b):
    shape = (b.rows,)
    chosen, rejected = b.numbers(1, 5.0, shape), b.numbers(2, 5.0, shape)
    keep, good = b.numbers(3, shape=shape) > -0.5, b.numbers(4, shape=shape) > 0
    b.same(
        preference.dpo_loss(chosen, rejected, keep, beta=0.2).loss.total,
        reference.dpo(chosen.tolist(), rejected.tolist(), keep.tolist(), 0.2),
    )
    ours = preference.kto_loss(chosen, good, keep, preference.kto_baseline(0.4), beta=0.2)
    b.same(ours.loss.total, reference.kto(chosen.tolist(), good.tolist(), keep.tolist(), 0.4, 0.2))
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
        term = losses.policy_loss(new[part], old[part], adv[part], mask[part]).loss
        fold.put(Node(lane, lane + 1), term.over(tokens))
    loss, _, _, count = reference.policy(
        new.tolist(), old.tolist(), adv.tolist(), mask.tolist(), low=0.2, high=0.2, dual=None, limit=20.0, weights=None
    )
    b.same(fold.total(), loss / max(count, 1))

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
    losses.policy_loss(new, old, adv, mask).loss.total.backward()
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
