"""The trainer over real models: the same bits however its lanes are dealt, a step cut short goes on as if it had not been."""

import dataclasses
import math
import random
import threading
from collections import Counter
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ppo_job import job, settings
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from bench.fixed_run import FixedRun
from elasticrl.config.training import Kl, Model
from elasticrl.ppo import models, sizes, tiny
from elasticrl.ppo.advantages import gae
from elasticrl.ppo.batches import take
from elasticrl.ppo.elastic import BufferPart
from elasticrl.ppo.preferences import Given, PreferenceTrainer
from elasticrl.ppo.report import lr_factor
from elasticrl.ppo.rewards import Function
from elasticrl.ppo.roles import Roles
from elasticrl.ppo.rollout.begun import Begun
from elasticrl.ppo.rollout.engine import Samples
from elasticrl.ppo.rollout.inline import TorchEngine
from elasticrl.ppo.run import Ahead, Buffer
from elasticrl.ppo.staleness import Staleness
from elasticrl.runtime.lanes import Deal
from elasticrl.runtime.optim import AdamW
from elasticrl.runtime.scalars import Tally
from elasticrl.runtime.vault.errors import CheckpointRefused

STEPS = 2
HALF = Staleness(steps=1, share=0.5)


def finish(trainer, run, steps=STEPS):
    reports = [trainer.step(i) for i in range(steps)]
    return run.digest(), [dict(report.metrics) for report in reports]


@pytest.fixture(scope="module")
def undisturbed(folders):
    return finish(*job(folders["qwen2"]))


@pytest.mark.long
def test_two_runs_have_the_same_digest_and_another_seed_another(folders, undisturbed):
    assert finish(*job(folders["qwen2"])) == undisturbed
    assert finish(*job(folders["qwen2"], seed=1))[0] != undisturbed[0]


def test_what_an_engine_says_serves_as_the_trainer_s_own_log_probabilities(folders):
    own, heard = ({**whole(folders, importance_limit=limit)} for limit in (10.0, None))
    assert "rollout_gap" in own
    assert "rollout_gap" not in heard
    assert abs(heard["approx_kl"]) < 1e-9
    assert abs(heard["kl"]) < 1e-5
    for name in ("policy_loss", "value_loss", "actor_norm", "critic_norm", "explained_variance"):
        assert heard[name] == pytest.approx(own[name], rel=1e-3, abs=1e-6)


def test_without_its_entropy_a_step_has_the_same_bits_and_says_nothing_of_it(folders):
    found = [finish(*job(folders["qwen2"], ppo=settings(calculate_entropy=asked)), steps=1) for asked in (True, False)]
    assert found[0][0] == found[1][0]
    assert "entropy" in found[0][1][0]
    assert "entropy" not in found[1][1][0]


def whole(folders, **ppo):
    trainer, _ = job(folders["qwen2"], ppo=settings(mini_batch=32, epochs=1, **ppo))
    return trainer.step(0).metrics


def test_values_that_are_made_in_the_critic_s_first_update_are_those_of_the_critic_before_it(folders):
    trainer, run = job(folders["qwen2"], ppo=settings(mini_batch=32, epochs=2))
    assert "values" not in trainer.flow
    for param in trainer.roles.critic.parameters():
        param.data += 0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
    before = deepcopy(trainer.roles.critic)
    trainer.step(0)
    for lane in run.lanes:
        rows = run.buffer.rows[lane]
        for block in trainer._first_epoch(lane):
            mine = take(rows, block)
            with torch.no_grad():
                values = torch.where(mine["mask"], models.response_values(before, mine), 0.0)
            assert values.any()
            assert torch.equal(torch.where(mine["mask"], mine["values"], 0.0), values)
        _, returns = gae(rows["rewards"], rows["values"], rows["mask"], gamma=1.0, lam=0.95)
        assert torch.equal(rows["returns"], returns)


@pytest.mark.parametrize("update", [0, 1])
def test_a_step_whose_values_are_made_in_its_update_goes_on_from_where_it_was_cut_short(folders, update):
    ppo = settings(mini_batch=32, epochs=2)
    wanted = finish(*job(folders["qwen2"], ppo=ppo, carried=((2, 0, 3, 1),)), steps=1)
    trainer, run = job(folders["qwen2"], ppo=ppo)
    loss, left = trainer.losses["actor"], [1]

    def kill(rows, entries, tally):
        if run.streams.update == update and left:
            left.pop()
            raise Killed
        return loss(rows, entries, tally)

    trainer.losses["actor"] = kill
    with pytest.raises(Killed):
        trainer.step(0)
    assert finish(trainer, run, steps=1) == wanted


@pytest.mark.long
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3, 0, 2)])
def test_lanes_in_any_order_give_the_same_digest_and_metrics(folders, undisturbed, order):
    assert finish(*job(folders["qwen2"], carried=(order,))) == undisturbed


def _rank(rank, path, folder, carried, out):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder), len(carried))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(carried))
    try:
        trainer, run = job(path, carried=carried, rank=rank, group=dist.group.WORLD)
        out.put((rank, finish(trainer, run), run.ledger))
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_a_reward_function_that_draws_draws_the_same_whoever_carries_a_lane(folders):
    def scores(answers):
        return [random.random() + torch.rand(()).item() for _ in answers]

    found = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        trainer, run = job(folders["qwen2"], carried=(order,))
        trainer.scorer = Function("scores", scores)
        found.append(finish(trainer, run, steps=1))
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize("carried", [((0, 1, 2), (3,))])
def test_two_workers_have_the_bits_of_one(folders, undisturbed, tmp_path, carried):
    context = mp.get_context("spawn")
    out = context.Queue()
    workers = [
        context.Process(target=_rank, args=(rank, folders["qwen2"], tmp_path / "store", carried, out))
        for rank in range(len(carried))
    ]
    for worker in workers:
        worker.start()
    found = [out.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    for _, result, _ in found:
        assert result == undisturbed
    _each_sample_once([entry for _, _, ledger in found for entry in ledger])


def _each_sample_once(ledger, epochs=2, batch=32):
    uses = Counter((step, epoch, sample) for step, _, epoch, _, sample in ledger)
    assert set(uses.values()) == {1}
    assert len(uses) == STEPS * epochs * batch


class Killed(Exception):
    pass


@pytest.mark.long
@pytest.mark.parametrize("phase", ["rollout", "ref", "values", "advantage", "update", "sync"])
def test_a_step_cut_short_in_any_phase_goes_on_with_the_same_samples_and_bits(folders, undisturbed, phase):
    left, generated = [1], []

    def kill(name):
        if name == phase and run.streams.step == 1 and left:
            left.pop()
            raise Killed

    trainer, run = job(folders["qwen2"], on_phase=kill)
    generate = trainer.engine.generate
    trainer.engine.generate = lambda requests, *, version: (
        generated.extend(r.id for r in requests) or generate(requests, version=version)
    )
    trainer.step(0)
    with pytest.raises(Killed):
        trainer.step(1)
    report = trainer.step(1)
    assert not left, "the fault did not fire"
    assert (run.digest(), dict(report.metrics)) == (undisturbed[0], undisturbed[1][1])
    assert max(Counter(generated).values()) == 1, "something was generated twice"
    _each_sample_once(run.ledger)


@pytest.mark.long
def test_a_step_cut_short_in_the_middle_of_an_update_goes_on_from_that_update(folders, undisturbed):
    trainer, run = job(folders["qwen2"])
    trainer.step(0)
    whole, calls = trainer.losses["critic"], []

    def loss(rows, entries, tally):
        calls.append(1)
        if len(calls) == 21:  # 4 lanes of 2 parts: in the third update, after the actor's gradients
            raise Killed
        return whole(rows, entries, tally)

    trainer.losses["critic"] = loss
    with pytest.raises(Killed):
        trainer.step(1)
    assert run.streams.update == 2
    trainer.step(1)
    assert run.digest() == undisturbed[0]
    _each_sample_once(run.ledger)


@pytest.mark.long
def test_the_buffer_survives_a_new_process(folders, undisturbed):
    """Stages and rows saved after `values` go on in a trainer that has never seen them."""
    trainer, run = job(folders["qwen2"], on_phase=lambda name: _stop(name, "advantage"))
    with pytest.raises(Killed):
        trainer.step(0)
    saved, coefficient = run.buffer.state_dict(), trainer.coefficient.state_dict()
    other, again = job(folders["qwen2"])
    again.buffer.load_state_dict(saved)
    other.coefficient.load_state_dict(coefficient)
    other.engine = None  # nothing is left to generate; sync needs one
    other.flow = dataclasses.replace(other.flow, stages=other.flow.stages[:-1])
    report = other.step(0)
    assert dict(report.metrics) == undisturbed[1][0]


def _stop(name, at):
    if name == at:
        raise Killed


def test_the_first_ratio_of_a_step_is_exactly_one(folders):
    """Old log-probabilities are made in the shapes of the update, so before anything was applied they are the same bits."""
    trainer, _ = job(folders["qwen2"], ppo=settings(mini_batch=32, epochs=1, importance_limit=10.0))
    metrics = trainer.step(0).metrics
    assert metrics["approx_kl"] == 0.0
    assert metrics["clip_fraction"] == 0.0
    assert abs(metrics["rollout_gap"]) < 1e-5
    assert metrics["kl"] == 0.0  # the reference is the actor of the start
    assert {
        "reward",
        "reward_std",
        "length",
        "entropy",
        "explained_variance",
        "actor_norm",
        "critic_norm",
    } <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_mixture_s_first_ratio_is_exactly_one_since_its_tokens_go_to_the_same_experts(tmp_path):
    """What is trained on is said by the trainer itself, in the passes of its first update: nothing has to be replayed."""
    path = tiny.write(tmp_path, arch="qwen3_moe", hidden=32, layers=2)
    ppo = settings(algorithm="grpo", group=4, mini_batch=32, epochs=1, kl=Kl(where="off"))
    trainer, _ = job(path, ppo=ppo)
    assert not trainer.heard, "an engine's rows are others: their experts may be too"
    chosen = {
        False: Counter(),
        True: Counter(),
    }  # whether there are gradients: how often which experts for a pass's tokens

    def note(_module, _inputs, out):
        _logits, _weights, experts = out
        assert experts.shape[-1] == 2
        chosen[torch.is_grad_enabled()][experts.numpy().tobytes()] += 1

    routers = [module for module in trainer.roles.actor.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    assert len(routers) == 2
    trainer.engine.model = deepcopy(trainer.roles.actor)  # whose passes are not looked at
    for router in routers:
        router.register_forward_hook(note)
    metrics = trainer.step(0).metrics
    assert metrics["approx_kl"] == 0.0
    assert metrics["clip_fraction"] == 0.0
    assert chosen[True] == chosen[False]
    assert len(chosen[True]) > 4


@pytest.mark.parametrize("head", ["separate", "tied"])
def test_a_mixture_s_auxiliary_loss_is_the_mean_of_the_passes_weighed_by_their_samples(tmp_path, head):
    path = tiny.write(tmp_path, arch="qwen3_moe", hidden=32, layers=2)
    ppo = settings(mini_batch=32, epochs=1, micro_tokens=60, router_aux_coef=0.5)
    trainer, _ = job(path, ppo=ppo, lanes=2, head=head)
    update, passes = trainer.losses["actor"], []

    def beside(rows, entries, tally):
        """Held against what transformers says of the same pass, before anything is learned from it."""
        loss = update(rows, entries, tally)
        trainer.ppo = ppo.model_copy(update={"router_aux_coef": 0.0})
        without = update(rows, entries, Tally())
        trainer.ppo = ppo
        body = trainer.roles.actor.actor if head == "tied" else trainer.roles.actor
        said = body(input_ids=rows["tokens"], output_router_logits=True, use_cache=False).router_logits
        seen = rows["attention"] & rows["mask"].any(1, keepdim=True)
        aux = load_balancing_loss_func(said, 4, 2, seen) if seen.any() else torch.zeros(())
        share = rows["mask"].any(1).sum() / entries.samples
        torch.testing.assert_close(loss - without, 0.5 * aux * share, rtol=1e-4, atol=1e-6)
        passes.append((float(aux.detach()), float(share)))
        return loss

    trainer.losses["actor"] = beside
    metrics = trainer.step(0).metrics
    assert len(passes) > 4
    assert sum(share for _, share in passes) == pytest.approx(1.0)
    assert metrics["router_aux"] == pytest.approx(sum(aux * share for aux, share in passes), rel=1e-5)


def test_a_model_without_experts_has_no_auxiliary_loss_to_weigh(folders):
    with pytest.raises(models.ModelError, match="is no mixture of experts"):
        models.check_routed(Model(path=folders["qwen2"]))


def test_a_model_that_tells_nothing_of_its_routers_is_refused_with_a_sentence():
    """Llama 4's configuration has an auxiliary loss, and its output no routers; some say None."""

    class Body(torch.nn.Module):
        def forward(self, output_router_logits=False):  # noqa: ARG002
            return self.says

    for says in (SimpleNamespace(), SimpleNamespace(router_logits=None)):
        body = Body()
        body.says = says
        with models.routed(body, asked=True), pytest.raises(models.ModelError, match="tells nothing of its routers"):
            body()


@pytest.mark.long
def test_micro_batches_change_the_gradient_only_by_rounding(folders):
    norms = [
        job(folders["qwen2"], ppo=settings(mini_batch=32, epochs=1, micro_tokens=10 * micro))[0]
        .step(0)
        .metrics["actor_norm"]
        for micro in (8, 4, 3)  # 3 does not divide 8: the last block is short
    ]
    assert norms[1:] == pytest.approx(norms[:1] * 2, rel=1e-4)


class Counting(dict):
    """Rows that count how often they are taken from."""

    taken = 0

    def items(self):
        self.taken += 1
        return super().items()


@pytest.mark.long
def test_an_update_takes_each_part_s_rows_once_for_each_role(folders):
    counted = []

    def phase(name):
        if name == "update":
            counted.extend(Counting(run.buffer.rows[lane]) for lane in range(4))
            run.buffer.rows.update(enumerate(counted))

    trainer, run = job(folders["qwen2"], on_phase=phase)
    trainer.step(0)
    passes, roles = [sum(map(len, trainer._cut(lane))) for lane in range(4)], 2
    assert min(passes) >= 2 * 2 * 2, "updates of several parts"
    assert [rows.taken for rows in counted] == [count * roles for count in passes]


@pytest.mark.long
@pytest.mark.parametrize(
    ("head", "ppo"),
    [
        ("tied", {}),
        ("separate", {"algorithm": "grpo", "group": 4, "kl": Kl(where="loss", coef=0.01)}),
        (
            "tied",
            {
                "algorithm": "rloo",
                "group": 4,
                "loss_mode": "gspo",
                "loss_agg_mode": "seq-mean-token-mean",
                "overlong_buffer": 2,
            },
        ),
        (
            "separate",
            {"algorithm": "reinforce_plus_plus", "loss_mode": "cispo", "kl": Kl(where="loss", estimator="k3+")},
        ),
        (
            "separate",
            {
                "algorithm": "grpo",
                "group": 4,
                "scale_rewards": "batch",
                "loss_mode": "sapo",
                "loss_agg_mode": "seq-mean-token-sum-norm",
                "kl": Kl(where="off"),
            },
        ),
        ("separate", {"kl": Kl(where="off"), "entropy_coef": 0.01, "dual_clip": 3.0, "importance_limit": 2.0}),
        ("separate", {"kl": Kl(coef=0.1, target=0.5, horizon=100), "missing_eos_penalty": 0.5, "schedule": "cosine"}),
    ],
)
def test_variants_run_and_are_alike_in_any_order_of_lanes(folders, head, ppo):
    results = [
        finish(*job(folders["llama"], head=head, ppo=settings(**ppo), carried=(order,)))
        for order in ((0, 1, 2, 3), (2, 0, 3, 1))
    ]
    assert results[0] == results[1]
    assert all(math.isfinite(value) for value in results[0][1][-1].values())


def test_an_adaptive_coefficient_moves(folders):
    trainer, run = job(folders["llama"], ppo=settings(kl=Kl(coef=0.1, target=0.5, horizon=100)))
    _, metrics = finish(trainer, run, steps=3)
    assert metrics[0]["kl_coef"] == 0.1
    assert metrics[1]["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 32 / 100))
    assert trainer.coefficient.of(3) != metrics[2]["kl_coef"]


def test_a_target_may_be_of_a_token_as_in_other_trainers(folders, monkeypatch):
    seen = {}
    for per in ("sample", "token"):
        trainer, run = job(folders["llama"], ppo=settings(kl=Kl(coef=0.1, per=per), lr=1e-2))
        measured = seen[per] = []
        monkeypatch.setattr(trainer.coefficient, "observe", lambda kl, into=measured, **_: into.append(kl))
        monkeypatch.setattr(trainer.coefficient, "of", lambda _: 0.1)
        lengths = [each["length"] for each in finish(trainer, run, steps=2)[1]]
    of_sample, of_token = (abs(seen[per][1]) for per in ("sample", "token"))
    assert of_sample / (2 * lengths[1]) < of_token < of_sample / (lengths[1] / 2)


class WithoutSlopes(Roles):
    """An entropy takes a look at all logits, its gradient takes memory, and no loss of given answers has one."""

    def said(self, *args, entropy=False, slopes=False, **more):
        assert not entropy
        assert not slopes
        return super().said(*args, **more)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        {"algorithm": "dpo"},
        {"algorithm": "dpo", "preference_loss": "hinge"},
        {"algorithm": "dpo", "preference_loss": "ipo"},
        {"algorithm": "dpo", "preference_loss": "simpo", "preference_beta": 2.0},
        {"algorithm": "kto", "desirable_weight": 1.5},
        {"algorithm": "sft", "loss_agg_mode": "seq-mean-token-mean"},
        *({"algorithm": name, "router_aux_coef": 0.01} for name in ("dpo", "kto", "sft")),
    ],
    ids=lambda kind: "-".join(map(str, kind.values())),
)
def test_given_answers_are_learned_in_any_order_of_lanes(folders, tmp_path, kind):
    mixture = "router_aux_coef" in kind
    path = tiny.write(tmp_path, arch="qwen3_moe", hidden=32, layers=1) if mixture else folders["qwen2"]

    def answers(step, lane):
        found = []
        for n in range(4):
            digits = [(7 * step + 3 * lane + n + k) % 10 for k in range(3)]
            prompt = (12, *digits, 13)
            found.append(Given(id=f"{step}.{lane}.{n}+", prompt=prompt, answer=(*digits[::-1], 11), good=True))
            found.append(Given(id=f"{step}.{lane}.{n}-", prompt=prompt, answer=(digits[0], 11), good=False))
        return found

    results = []
    for order in ((0, 1), (1, 0)):
        ppo = settings(**kind, batch=16, mini_batch=8, micro_tokens=44, epochs=1, lr=3e-3, entropy_coef=0.1)
        passes = sizes.of(ppo, prompt=6, answer=5)
        model = Model(path=path)
        actor = models.actor(model, path, seed=0)
        run = FixedRun(
            {"actor": (actor, lambda _name: AdamW(lr=3e-3))},
            deal=Deal(lanes=2, carried=(order,)),
            seed=0,
            parts=sizes.parts_of(ppo, 2, passes),
        )
        roles = WithoutSlopes(model=model, actor=actor, ref=models.reference(model, path))
        trainer = PreferenceTrainer(run, roles, ppo=ppo, lanes=2, steps=8, sizes=passes, given=answers, pad=10)
        results.append(finish(trainer, run, steps=8))
    assert results[0] == results[1]
    first, last = results[0][1][0], results[0][1][-1]
    told = "loss" if kind["algorithm"] == "sft" else "preference_loss"
    assert last[told] < 0.95 * first[told]
    assert last.get("right", 1.0) == 1.0
    assert last.get("router_aux", 0.0) < 2.5
    assert ("router_aux" in last) == mixture


def test_a_scorer_is_asked_once_for_a_sample_that_is_run_again(folders):
    asked = Counter()

    def once(answers):
        asked.update(a.id for a in answers)
        return [asked[a.id] * 1.0 for a in answers]

    trainer, _ = job(folders["llama"], on_phase=_once("update"))
    trainer.scorer = Function("once", once)
    with pytest.raises(Killed):
        trainer.step(0)
    assert trainer.step(0).metrics["reward"] == 1.0
    assert set(asked.values()) == {1}


def _once(phase):
    left = [1]

    def kill(name):
        if name == phase and left:
            left.clear()
            raise Killed

    return kill


def test_schedules():
    assert [lr_factor("linear", s, warmup=1, steps=5) for s in range(6)] == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert lr_factor("cosine", 5, warmup=0, steps=10) == pytest.approx(0.5)
    assert lr_factor("constant", 99, warmup=3, steps=10) == 1.0


@pytest.fixture(scope="module")
def overlapped(folders):
    return finish(*job(folders["qwen2"], staleness=HALF), steps=3)


@pytest.mark.long
def test_overlap_generates_half_of_the_next_step_by_the_weights_before(folders, overlapped):
    trainer, run = job(folders["qwen2"], staleness=HALF, steps=3)
    asked, generate = [], trainer.engine.generate

    def spy(requests, *, version):
        asked.extend((version, r.id) for r in requests)
        return generate(requests, version=version)

    trainer.engine.generate = spy
    assert finish(trainer, run, steps=3)[0] == overlapped[0]
    # 4 updates a step: 32 samples of step 0 and 16 of step 1 by version 0, then 16 + 16, and 16 in the last step.
    assert Counter(version for version, _ in asked) == {0: 48, 4: 32, 8: 16}
    assert max(Counter(name for _, name in asked).values()) == 1, "something was generated twice"
    assert [metrics.get("ahead_behind") for metrics in overlapped[1]] == [None, 4.0, 4.0]
    uses = Counter((step, epoch, sample) for step, _, epoch, _, sample in run.ledger)
    assert (set(uses.values()), len(uses)) == ({1}, 3 * 2 * 32)


@pytest.mark.long
def test_what_was_generated_ahead_in_another_width_is_generated_anew(folders):
    trainer, run = job(folders["qwen2"], staleness=HALF)
    trainer.step(0)
    later, anew = job(folders["qwen2"], staleness=HALF)
    later.engine.sampling = dataclasses.replace(later.engine.sampling, max_tokens=later.engine.sampling.max_tokens + 3)
    anew.buffer.load_state_dict(run.buffer.state_dict())
    later.step(1)
    assert all(len(rows["mask"][0]) == later.engine.sampling.max_tokens for rows in anew.buffer.rows.values())


def test_what_a_rank_lacks_of_what_is_ahead_changes_nothing_that_all_ranks_have_alike(folders):
    trainer, run = job(folders["qwen2"], staleness=HALF)
    trainer.step(0)
    early = run.buffer.ahead[1]
    lane, *_ = run.lanes
    early.rows.pop(lane)
    run.buffer.ahead[2] = early
    run.begin(1)
    trainer.generator.rollout()
    assert 2 in run.buffer.ahead, "other ranks have it still"
    assert "ahead_behind" in run.buffer.facts
    assert len(run.buffer.ids[lane]) == len(trainer.feed(1, lane)), "and what it lacks is generated"


@pytest.mark.parametrize("batch", [32, 48])
def test_what_was_generated_ahead_for_another_batch_is_generated_anew(folders, batch):
    trainer, run = job(folders["qwen2"], staleness=HALF)
    trainer.step(0)
    ahead = {name for ids in run.buffer.ahead[1].ids.values() for name in ids}
    later, anew = job(folders["qwen2"], staleness=HALF, ppo=settings(batch=batch))
    anew.buffer.load_state_dict(run.buffer.state_dict())
    asked, generate = set(), later.engine.generate

    def spy(requests, *, version):
        asked.update(request.id for request in requests)
        return generate(requests, version=version)

    later.engine.generate = spy
    later.step(1)
    wanted = {lane: [name for name, _ in later.feed(1, lane)] for lane in anew.lanes}
    assert anew.buffer.ids == wanted
    assert bool(ahead & asked) == (batch != 32)


def test_samples_that_are_ahead_are_kept_with_the_version_of_the_weights_that_made_them():
    rows = {1: {"tokens": torch.arange(6).reshape(2, 3)}}
    ahead = {step: Ahead(16, "it", rows, {1: ["0:9"]}) for step in (5, 6)}
    part = BufferPart(Buffer(step=4, ahead=ahead), lambda: [0, 1], lanes=2)
    buffer = Buffer()
    fresh = BufferPart(buffer, lambda: [0, 1], lanes=2)
    fresh.prepare(part.values())
    for (_, room), (_, there) in zip(fresh.pieces(), part.pieces(), strict=True):
        room.copy_(there)
    fresh.restored(part.values())
    assert {step: (its.version, its.of, its.ids) for step, its in buffer.ahead.items()} == {
        step: (16, "it", {1: ["0:9"]}) for step in (5, 6)
    }
    assert all(torch.equal(its.rows[1]["tokens"], rows[1]["tokens"]) for its in buffer.ahead.values())
    fresh.empty()
    assert not buffer.ahead


def test_rows_that_were_cut_into_other_lanes_are_nobodys_between_steps_and_refused_inside_of_one():
    rows = {0: {"tokens": torch.zeros(2, 3, dtype=torch.int64)}}
    early = {5: Ahead(16, "it", rows, {0: ["0:9"]})}
    ahead = BufferPart(Buffer(step=4, ahead=early), lambda: [0], lanes=1).values()
    buffer = Buffer()
    part = BufferPart(buffer, lambda: [0, 1], lanes=2)
    part.prepare(ahead)
    part.restored(ahead)
    assert (buffer.rows, buffer.ids, buffer.ahead) == ({0: {}, 1: {}}, {0: [], 1: []}, {5: Ahead(16, "it")})
    inside = BufferPart(Buffer(step=4, rows=rows, ids={0: ["0:9"]}), lambda: [0], lanes=1).values()
    with pytest.raises(
        CheckpointRefused, match=r"inside of step 4, whose samples are cut into 1 lane, and there are 2 now"
    ):
        part.prepare(inside)


@pytest.mark.parametrize("order", [(3, 1, 0, 2)])
def test_overlap_gives_the_same_bits_in_any_order_of_lanes_and_other_bits_than_without(
    folders, overlapped, undisturbed, order
):
    assert finish(*job(folders["qwen2"], staleness=HALF, carried=(order,)), steps=3) == overlapped
    first, alone = overlapped[1][0], undisturbed[1][0]
    for name in alone:  # up to who says the log-probabilities
        assert first[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), "the first step has nothing from before"
    assert overlapped[1][1] != undisturbed[1][1]


@pytest.mark.long
@pytest.mark.parametrize(("phase", "entered"), [("rollout", 1), ("rollout", 2), ("advantage", 1), ("update", 1)])
def test_an_overlapped_step_cut_short_goes_on_with_the_same_samples(folders, overlapped, phase, entered):
    left = [entered]

    def kill(name):
        if name == phase and run.streams.step == 1 and left[0]:
            left[0] -= 1
            if not left[0]:
                raise Killed

    trainer, run = job(folders["qwen2"], staleness=HALF, on_phase=kill)
    trainer.step(0)
    with pytest.raises(Killed):
        trainer.step(1)
    trainer.step(1)
    trainer.step(2)
    assert run.digest() == overlapped[0]


class Beside(TorchEngine):
    """With weights of its own and asked for all lanes at once, as one in another process; `busy` until it is waited for."""

    by_lane = False

    def crowds(self, sizes):
        return [list(range(len(sizes)))] if sizes else []

    def __init__(self, actor, sampling):
        super().__init__(deepcopy(actor), sampling)
        self.actor, self.over, self.log = actor, threading.Event(), []

    def publish(self, version):
        self.model = deepcopy(self.actor)
        super().publish(version)

    def generate(self, requests, *, version):
        if threading.current_thread() is not threading.main_thread():
            assert self.over.wait(30), "nobody came for the samples"
            self.over.clear()
        generate = super().generate
        self.log.append((version, len(requests)))
        return joined([generate(requests[i : i + 4], version=version) for i in range(0, len(requests), 4)])

    def wait(self, done):
        self.over.set()
        while not done():
            pass


@pytest.mark.long
def test_an_engine_beside_the_worker_is_busy_until_after_the_updates_and_gives_the_same_bits(folders, overlapped):
    trainer, run = job(folders["qwen2"], staleness=HALF, engine=Beside, steps=3)
    assert [stage.name for stage in trainer.flow.order[-3:]] == ["update", "ahead", "sync"]
    assert finish(trainer, run, steps=3)[0] == overlapped[0]
    assert trainer.engine.log == [(0, 32), (0, 16), (4, 16), (4, 16), (8, 16)], "by which weights, how many"


@pytest.mark.long
def test_who_waits_for_what_is_still_in_the_air_hears_its_orders(folders, overlapped):
    class Called(Beside):
        called = False

        def wait(self, done):
            if self.called:
                raise Killed
            super().wait(done)

    def kill(name):
        if name == "advantage" and run.streams.step == 1 and not trainer.engine.called:
            trainer.engine.called = True
            raise Killed

    trainer, run = job(folders["qwen2"], staleness=HALF, engine=Called, steps=3, on_phase=kill)
    trainer.step(0)
    with pytest.raises(Killed):
        trainer.step(1)
    with pytest.raises(Killed):
        trainer.generator.rollout()
    trainer.engine.wait = super(Called, trainer.engine).wait
    trainer.step(1)
    trainer.step(2)
    assert run.digest() == overlapped[0]


@pytest.fixture(scope="module")
def behind(folders):
    """Two steps to a period, by the engine in the worker."""
    return finish(*job(folders["qwen2"], staleness=Staleness(steps=2), steps=5), steps=5)


class Away(Beside):
    """One that others feed too: a fresh one has no weights. `asked`: by which weights, for which samples."""

    def __init__(self, actor, sampling):
        super().__init__(actor, sampling)
        self.version, self.asked, self.begun = -1, [], None

    def publish(self, version):
        super().publish(version)
        if self.begun is not None and version == self.begun.version:
            with torch.no_grad():
                for name, param in self.model.named_parameters():
                    param.copy_(self.begun.held[name])

    def generate(self, requests, *, version):
        assert version == self.version, "stale"
        self.asked += [(version, request.id, request.seed) for request in requests]
        return super().generate(requests, version=version)


def two_steps_behind(folders, **more):
    trainer, run = job(folders["qwen2"], staleness=Staleness(steps=2), begun=True, engine=Away, steps=5, **more)
    trainer.engine.begun = trainer.generator.begun
    return trainer, run


@pytest.mark.long
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_with_staleness_2_the_weights_of_every_second_step_generate_the_next_two(folders, behind, order):
    trainer, run = two_steps_behind(folders, carried=(order,))
    found = finish(trainer, run, steps=5)
    assert found[0] == behind[0], "an engine beside the worker makes the samples of the one in it"
    assert [metrics.get("ahead_behind") for metrics in found[1]] == [None, 4.0, 8.0, 4.0, 8.0]
    # 4 updates a step, 32 samples: those of steps 0, 1 and 2 by version 0, those of 3 and 4 by version 8.
    assert Counter(version for version, _, _ in trainer.engine.asked) == {0: 96, 8: 64}
    assert max(Counter(trainer.engine.asked).values()) == 1, "something was generated twice"
    uses = Counter((step, epoch, sample) for step, _, epoch, _, sample in run.ledger)
    assert (set(uses.values()), len(uses)) == ({1}, 5 * 2 * 32)


@pytest.mark.long
@pytest.mark.parametrize(("step", "phase"), [(0, "update"), (1, "rollout"), (2, "advantage"), (3, "update")])
def test_a_fresh_engine_in_the_middle_of_a_period_gets_the_weights_that_it_began_with(folders, behind, step, phase):
    cut = []

    def kill(name):
        if name == phase and run.streams.step == step and not cut:
            cut.append(name)
            raise Killed

    trainer, run = two_steps_behind(folders, on_phase=kill)
    for number in range(5):
        try:
            trainer.step(number)
        except Killed:
            trainer.engine.version = -1  # another life: nobody knows what the engine has
            trainer.step(number)
    assert cut
    assert run.digest() == behind[0]


def test_the_weights_that_a_period_began_with_are_kept_as_they_were():
    live = {"w": torch.ones(3)}
    begun = Begun(live.items)
    begun.at(4, 4, 16)
    live["w"] += 1
    begun.at(4, 5, 18)
    assert (begun.step, begun.version) == (4, 16)
    assert begun.held["w"].tolist() == [1, 1, 1]
    fresh = Begun(live.items)
    fresh.load_state_dict(begun.state_dict())
    fresh.at(4, 5, 20)
    assert (fresh.version, fresh.held["w"].tolist()) == (16, [1, 1, 1])
    fresh.at(6, 7, 20)
    assert (fresh.step, fresh.version) == (7, 20), "a job that was given longer periods came into the middle of one"
    assert fresh.held["w"].tolist() == [2, 2, 2]


def joined(parts):
    names = ("tokens", "attention", "mask", "logprobs", "ended")
    columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Samples(ids=tuple(i for part in parts for i in part.ids), version=parts[0].version, **columns)
