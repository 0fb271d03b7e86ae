"""Groups that are larger than a lane: what they are compared by, and their bits on any number of workers and through kills."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from elastic_kit import ending, small, strike
from gang_kit import Nodes
from ppo_job import job, settings
from turns_kit import WORDS, turned

from elasticrl.config.training import Kl, Ppo
from elasticrl.ppo import groups, tiny
from elasticrl.ppo.groups import Groups, advantages, unlike
from elasticrl.ppo.staleness import Staleness
from elasticrl.runtime.chronicle import read
from elasticrl.runtime.data.audit import audit
from elasticrl.runtime.data.cursor import Cursor, Segment, Walk
from elasticrl.runtime.vault.errors import DataError

KINDS = [
    {"algorithm": "grpo"},
    {"algorithm": "grpo", "scale_rewards": "none"},
    {"algorithm": "rloo"},
    {"algorithm": "opo"},
    {"algorithm": "reinforce_plus_plus_baseline"},
]
TOKENS = 5


def told(rows: dict[int, dict[str, torch.Tensor]], sent: list[int] | None = None) -> Any:
    """A run of these lanes, alone."""

    def gather(numbers):
        if sent is not None:
            sent.append(sum(map(len, numbers.values())))
        return dict(numbers)

    return SimpleNamespace(buffer=SimpleNamespace(rows=rows), lanes=sorted(rows), gather=gather)


def samples(prompts: int, size: int) -> dict[str, torch.Tensor]:
    """Of all groups, in order."""
    g, count = torch.Generator().manual_seed(3), prompts * size
    mask = torch.arange(TOKENS) < torch.randint(1, TOKENS + 1, (count, 1), generator=g)
    scores = torch.where(mask, torch.randint(0, 3, (count, 1), generator=g) / 3 + torch.zeros(TOKENS), 0.0)
    scores[:size] = 1.0  # the first group is alike
    return {"mask": mask, "scores": scores, "lost": torch.rand(count, generator=g) < 0.2}


def dealt(whole: dict[str, torch.Tensor], its: Groups, lanes: int) -> dict[int, dict[str, torch.Tensor]]:
    """The same samples in lanes, by the words of the page: lane by lane the band's prompts, of each the lane's members."""
    found = {}
    bands = lanes // its.spans
    prompts = len(whole["mask"]) // its.size // bands
    for lane in range(lanes):
        mine = [p + lane // its.spans * prompts for p in range(prompts)]
        places = [p * its.size + member for p in mine for member in its.members(lane)]
        found[lane] = {name: value[places] for name, value in whole.items()}
    return found


@pytest.mark.parametrize("lanes", [4, 8, 16, 48])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("turns", [False, True])
def test_an_advantage_is_that_of_the_same_group_in_one_lane_to_the_last_bit(lanes, kind, turns):
    ppo = Ppo(batch=48, group=16, **kind)
    whole = samples(3, 16)
    if not turns:
        del whole["lost"]
    alone = advantages(told({0: whole}), groups.of(ppo, 1), ppo, {0: whole["scores"]})[0]
    agreed = unlike(told({0: whole}), groups.of(ppo, 1))[0]
    its = groups.of(ppo, lanes)
    assert its.spans == {4: 4, 8: 8, 16: 16, 48: 16}[lanes]
    rows = dealt(whole, its, lanes)
    run = told(rows)
    found = advantages(run, its, ppo, {lane: mine["scores"] for lane, mine in rows.items()})
    apart, wanted = unlike(run, its), dealt({"mask": whole["mask"], "gain": alone, "unlike": agreed}, its, lanes)
    for lane in range(lanes):
        assert torch.equal(found[lane], wanted[lane]["gain"])
        assert torch.equal(apart[lane], wanted[lane]["unlike"])
    assert alone[16:].any()
    assert not agreed[:16].any()
    assert agreed[16:].any()


def test_a_group_that_lies_in_one_lane_is_told_to_nobody():
    ppo, sent = Ppo(batch=48, group=16, algorithm="grpo"), list[int]()
    rows = dealt(samples(3, 16), groups.of(ppo, 3), 3)
    advantages(told(rows, sent), groups.of(ppo, 3), ppo, {lane: its["scores"] for lane, its in rows.items()})
    assert not sent


def test_lanes_of_a_band_have_the_same_samples_and_the_others_follow():
    data = {"size": 100, "lanes": 8, "per_lane": 3, "seed": 1}
    cursor, wanted = Cursor(Walk(**data, spans=4)), Cursor(Walk(**data | {"lanes": 2}))
    for step in range(20):
        assert [cursor.ids(step, 0, lane) for lane in range(8)] == [wanted.ids(step, 0, lane // 4) for lane in range(8)]
    assert Segment.from_json(cursor.segments[0].to_json()) == cursor.segments[0]
    assert "spans" not in wanted.segments[0].to_json()["walk"], "versions before this one read it"
    with pytest.raises(DataError, match="it must divide the 8 lanes"):
        Cursor(Walk(**data, spans=3))
    for spans in (0, 9, True):
        row = cursor.segments[0].to_json()
        row["walk"]["spans"] = spans
        with pytest.raises(ValueError, match="no cursor walks so"):
            Segment.from_json(row)


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "behind"),
    [({}, 0), ({}, 1), ({"gen_batch": 64, "filter_groups": True}, 0)],
    ids=["grpo", "stale", "dapo"],
)
def test_lanes_in_any_order_have_the_same_digest_where_groups_span_them(folders, more, behind):
    ppo = settings(algorithm="grpo", group=16, kl=Kl(where="loss", coef=0.01), **more)
    found = []
    for order in (tuple(range(8)), (3, 1, 0, 2, 7, 5, 6, 4)):
        trainer, run = job(folders["qwen2"], ppo=ppo, lanes=8, carried=(order,), staleness=Staleness(steps=behind))
        assert trainer.groups == Groups(size=16, part=4)
        reports = [dict(trainer.step(number).metrics) for number in range(2)]
        found.append((run.digest(), reports, sorted(run.ledger)))
    assert found[0] == found[1]


@pytest.mark.long
def test_episodes_of_a_group_that_spans_lanes_are_compared_whole(tmp_path):
    path = tiny.write(tmp_path, hidden=32, layers=2, words=WORDS)
    ppo = Ppo(
        algorithm="grpo", group=8, batch=16, mini_batch=16, micro_tokens=80, lr=4e-3, kl=Kl(where="off"), filter_groups=True
    )  # fmt: skip
    found = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        trainer, run = turned(path, ppo=ppo, lanes=4, carried=(order,))
        assert trainer.groups == Groups(size=8, part=4)
        reports = [dict(trainer.step(number).metrics) for number in range(2)]
        for lane in (0, 2):
            prompts = [{name.partition(".")[0] for name in run.buffer.ids[one]} for one in (lane, lane + 1)]
            assert prompts[0] == prompts[1]
        found.append((run.digest(), reports, sorted(run.ledger)))
    assert found[0] == found[1]


STEPS, LANES = 4, 8
SPAN = {
    "grpo": {"algorithm": "grpo", "group": 16, "kl": {"where": "loss", "coef": 0.01}},
    "dapo": {
        "algorithm": "grpo", "group": 16, "scale_rewards": "batch", "filter_groups": True, "gen_batch": 64,
        "clip_high": 0.28, "kl": {"where": "off"},
    },
    "rloo": {"algorithm": "rloo", "group": 16, "kl": {"where": "reward", "coef": 0.01}},
}  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "strategy", "worlds"),
    [
        ("grpo", "replicated", (1, 3)),
        pytest.param("grpo", "replicated", (1, 2, 4), marks=pytest.mark.slow),
        pytest.param("dapo", "replicated", (1, 2, 3, 4), marks=pytest.mark.slow),
        pytest.param("rloo", "fsdp", (1, 2, 3, 4), marks=pytest.mark.slow),
        pytest.param("dapo", "fsdp", (1, 3), marks=pytest.mark.slow),
    ],
)
def test_groups_that_span_lanes_have_the_same_bits_on_any_number_of_workers_and_through_a_kill(
    tmp_path: Path, tmp_path_factory, name: str, strategy: str, worlds: tuple[int, ...]
):
    conf = small(tmp_path_factory.mktemp("model"))
    ppo = {"batch": 32, "mini_batch": 16, "micro_tokens": 40, "epochs": 1, "lr": 4e-3, **SPAN[name]}
    conf = {**conf, "ppo": ppo, "model": {**conf["model"], "strategy": strategy}}
    found = []
    for world in worlds:
        members = [f"n{i}" for i in range(world)]
        how: dict[str, Any] = {"steps": STEPS, "lanes": LANES, "program": "ppo_ends", "conf": conf}
        with Nodes(tmp_path / str(world), copies=min(1, world - 1), **how) as gang:
            ending(gang)
            gang.plan(*members)
            if world > 2:
                gang.until_sealed(1)
                strike(gang, "n1", "advantage", after_ms=1)
                gang.until_sealed(2)
                strike(gang, "n2", "update", after_ms=3)
            gang.until_done(within_s=300.0)
            steps, used = read(gang.run_dir), audit(gang.run_dir)
            assert not steps.findings, steps.findings
            assert used.ok, used.sentence
            drawn = ppo.get("gen_batch", ppo["batch"])
            assert (used.steps, used.samples) == (STEPS, STEPS * drawn // 16)
            found.append(dict(steps.steps))
    assert all(one == found[0] for one in found)
    assert len(set(found[0].values())) == STEPS + 1, "each step has trained"
