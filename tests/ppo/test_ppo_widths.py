"""What is cut off a pass is padding: losses and gradients are those of whole rows, and no lane's follow from another's rows."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies
from ppo_job import job
from ppo_job import settings as ppo_settings

from elasticrl.config.training import Kl
from elasticrl.ppo.batches import Block, blocks, take
from elasticrl.ppo.losses import Entries
from elasticrl.ppo.sizes import Sizes
from elasticrl.runtime.scalars import Tally

SIZES = Sizes(tokens=150, sample=72, answer=40)
LANES, ROWS = 3, 8
quick = settings(max_examples=6, deadline=None, derandomize=True)


def lane(seed, *, longest=1.0, group=1):
    """A lane's samples as they are before an update, of lengths up to a part of the most; `group` of them have one prompt."""
    g = torch.Generator().manual_seed(seed)
    before, after = SIZES.prompt, SIZES.answer
    prompts = torch.randint(1, int(before * longest) + 1, (ROWS, 1), generator=g)
    answers = torch.randint(1, int(after * longest) + 1, (ROWS, 1), generator=g)
    prompts = prompts[::group].repeat_interleave(group, 0)
    seen, mask = (
        torch.arange(before).expand(ROWS, -1) >= before - prompts,
        torch.arange(after).expand(ROWS, -1) < answers,
    )
    attention = torch.cat([seen, mask], 1)
    found = {
        "tokens": torch.where(attention, torch.randint(0, 10, attention.shape, generator=g), 10),
        "attention": attention,
        "mask": mask,
        "kept": torch.ones(ROWS, dtype=torch.bool),
    }
    found["tokens"][:, :before] = found["tokens"][::group, :before].repeat_interleave(group, 0)
    for name in ("logprobs", "rollout_logprobs", "ref_logprobs"):
        found[name] = -2.3 + 0.3 * torch.randn(mask.shape, generator=g, dtype=torch.float64)
    for name in ("advantages", "values", "returns"):
        found[name] = torch.randn(mask.shape, generator=g, dtype=torch.float64)
    return found


def ready(path, lanes, *, joins="none", head="separate"):
    """A trainer in front of its update of these lanes' samples."""
    ppo = ppo_settings(
        batch=LANES * ROWS,
        mini_batch=LANES * ROWS,
        epochs=1,
        entropy_coef=0.1,
        kl=Kl(where="loss", coef=0.2),
        max_grad_norm=None,
    )
    trainer, run = job(path, ppo=ppo, lanes=LANES, sizes=SIZES, head=head)
    for role in run.strategies.values():
        torch.manual_seed(3)
        for param in role.params:
            param.data.normal_(0.0, 0.2)
    run.begin(0)
    run.joins = joins
    trainer.generator = None
    for number, rows in enumerate(lanes):
        run.buffer.put(number, **rows)
        run.buffer.ids[number] = [f"0/{number}.{i}" for i in range(ROWS)]
    return trainer, run


@quick
@given(strategies.integers(0, 1000))
@pytest.mark.parametrize("head", ["separate", "tied"])
def test_cut_passes_have_the_losses_and_gradients_of_one_pass_of_whole_rows(folders, head, seed):
    trainer, _ = ready(folders["qwen2"], [lane(seed)] * LANES, head=head)
    actor, critic = (copy.deepcopy(model) for model in (trainer.roles.actor, trainer.roles.critic))
    trainer.roles = replace(trainer.roles, actor=actor.double(), critic=critic.double() if critic else None)
    cut = trainer._cut(0)[0]
    assert len(cut) > 1
    assert len({block.width for block in cut}) > 1
    rows = trainer.run.buffer.rows[0]
    for role, model in (("actor", actor), ("critic", critic))[: 2 if head == "separate" else 1]:
        found = []
        for its in (cut, [Block(torch.arange(ROWS), SIZES.sample, SIZES.answer)]):
            model.zero_grad()
            tally = Tally()
            for block in its:
                trainer.losses[role](take(rows, block), Entries(50.0, 4.0), tally).backward()
            found.append((tally.sums, [param.grad.clone() for param in model.parameters() if param.grad is not None]))
        (sums, grads), (whole_sums, whole_grads) = found
        assert sums == pytest.approx(whole_sums, rel=1e-9)
        assert len(grads) == len(whole_grads) > 10
        for one, other in zip(grads, whole_grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@quick
@given(strategies.integers(0, 1000))
def test_samples_that_share_a_prompt_have_the_losses_and_gradients_that_they_have_alone(folders, seed):
    rows = lane(seed, group=4)
    trainer, _ = ready(folders["qwen2"], [rows] * LANES)
    actor = copy.deepcopy(trainer.roles.actor).double()
    trainer.roles = replace(trainer.roles, actor=actor)
    shared, found = replace(SIZES, unit=4, share=True), []
    for sizes in (SIZES, shared):
        actor.zero_grad()
        tally = Tally()
        cut = blocks(torch.arange(ROWS), rows, sizes)
        for block in cut:
            trainer.losses["actor"](take(rows, block), Entries(50.0, 4.0), tally).backward()
        found.append((tally.sums, [param.grad.clone() for param in actor.parameters()], sum(b.tokens for b in cut)))
    (sums, grads, tokens), (shared_sums, shared_grads, shared_tokens) = found
    assert shared_tokens < tokens
    assert sums == pytest.approx(shared_sums, rel=1e-6)
    for one, other in zip(
        grads, shared_grads, strict=True
    ):  # the models' norms compute in float32 whatever they are given
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(one.abs().max()))


def summed(path, lanes, joins):
    """The gradients of an update, and what it told."""
    trainer, run = ready(path, lanes, joins=joins)
    run.buffer.facts |= {"entries.0": 100.0, "entries.0.samples": 10.0}
    trainer.update(None)
    return {name: strategy.shard.grad.clone() for name, strategy in run.strategies.items()}, run.buffer.facts


@pytest.mark.parametrize("joins", ["none", "most", "all"])
def test_a_lane_has_the_same_bits_whatever_the_others_hold(folders, joins):
    """The others' samples count for nothing here, and are short, or long, and so make few passes, or many."""
    mine, found = lane(7, longest=0.4), []
    for longest in (0.2, 1.0):
        others = [lane(seed, longest=longest) for seed in (8, 9)]
        others = [{**rows, "mask": torch.zeros_like(rows["mask"])} for rows in others]
        found.append(summed(folders["qwen2"], [others[0], mine, others[1]], joins))
    (grads, told), (again, told_again) = found
    assert told == told_again
    for name, grad in grads.items():
        assert grad.any()
        assert torch.equal(grad, again[name])
