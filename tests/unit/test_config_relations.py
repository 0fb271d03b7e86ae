"""One case to each row of RELATIONS: what breaks exactly it, and that the remedy it names mends it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from annotated_types import Le

from elasticrl.config import Loaded, read
from elasticrl.config.ports import PORTS
from elasticrl.config.relations import RELATIONS
from elasticrl.config.section import leaves
from elasticrl.config.tree import Tree

BASE = """\
job: {name: demo}
store: {embedded: true}
model: {path: m}
data: {path: d}
reward: {function: a:b}
"""
CLUSTER = ["store.embedded=false", "store.endpoints=[a:1, b:1, c:1]"]
ENV = "ELASTICRL__"


class Case(NamedTuple):
    key: str
    rule: str  # a part of it
    broken: Sequence[str]
    values: str
    mended: Sequence[str]  # what the remedy says
    said: str  # a part of the remedy


CASES = [
    Case(
        "store.endpoints",
        "all begin with https://, or none",
        ["store.embedded=false", "store.endpoints=[https://a:1, b:1, 'http://c:1']"],
        "b:1, http://c:1 would be spoken to in clear",
        ["store.endpoints=[https://a:1, https://b:1, https://c:1]"],
        "Write https:// before each.",
    ),
    Case(
        "store.username",
        "should be sent encrypted",
        [
            "store.embedded=false",
            "store.endpoints=['[::1]:1', '127.0.0.1:1', etcd-1:1]",
            "store.username=u",
            ENV + "STORE__PASSWORD=x",
        ],
        "etcd-1:1 would be told both in clear",
        ["store.tls.ca=/ca.pem"],
        "or set store.tls.ca",
    ),
    Case(
        "membership.lease_ttl",
        "2 x keepalive + store.retry",
        ["membership.lease_ttl=10s", "membership.keepalive=4s", "store.retry=2s"],
        "10s is not over 2 x 4s + 2s",
        ["membership.lease_ttl=12s"],
        "Raise lease_ttl to 12s or lower keepalive to 3s.",
    ),
    Case(
        "membership.lease_ttl",
        "whole seconds",
        ["membership.lease_ttl=10.5s"],
        "10.5s is not",
        ["membership.lease_ttl=11s"],
        "Write 11s.",
    ),
    Case(
        "membership.suspect",
        "2 x beat",
        ["membership.beat=400ms"],
        "800ms is not over 2 x 400ms",
        ["membership.suspect=960ms"],
        "Raise suspect to 960ms or lower beat to 300ms.",
    ),
    Case(
        "membership.doubt",
        "under suspect",
        ["membership.doubt=800ms"],
        "800ms is not under 800ms",
        ["membership.doubt=600ms"],
        "Lower doubt to 600ms.",
    ),
    Case(
        "membership.suspect",
        "under lease_ttl",
        ["membership.suspect=10s"],
        "10s is not under 10s",
        ["membership.suspect=7.5s"],
        "Lower suspect to 7.5s.",
    ),
    Case(
        "membership.min_nodes",
        "not exceed max_nodes",
        ["membership.min_nodes=3", "membership.max_nodes=2", "vault.copies=1"],
        "3 is over 2",
        ["membership.min_nodes=2"],
        "Lower min_nodes to 2 or raise max_nodes to 3.",
    ),
    Case(
        "store.endpoints",
        "name an etcd member",
        ["store.embedded=false"],
        "there is neither",
        ["store.endpoints=[host:2379]"],
        "endpoints: [host:2379, ...]",
    ),
    Case(
        "store.embedded",
        "false where store.endpoints",
        ["store.endpoints=[a:1]"],
        "it is true beside 1 endpoints",
        ["store.embedded=false"],
        "embedded: false",
    ),
    Case(
        "store.endpoints",
        "single one",
        [*CLUSTER, "store.client=etcd3"],
        "there are 3",
        ["store.client=grpc"],
        "client: grpc",
    ),
    Case(
        "store.try_timeout",
        "store.timeout",
        ["store.try_timeout=6s"],
        "6s is over 5s",
        ["store.timeout=24s"],
        "Raise timeout to 24s.",
    ),
    Case(
        "store.username",
        "come with a password",
        ["store.username=u"],
        "there is none",
        ["store.password_file=/p"],
        "Set password_file",
    ),
    Case(
        "store.password",
        "beside password_file",
        ["store.username=u", "store.password_file=/p", ENV + "STORE__PASSWORD=x"],
        "both are set",
        ["store.password_file=null"],
        "Remove one",
    ),
    Case(
        "store.username",
        "given with a password",
        [ENV + "STORE__PASSWORD=x"],
        "it is null",
        ["store.username=u"],
        "Set username",
    ),
    Case(
        "web.token",
        "beside token_file",
        ["web.token_file=/t", ENV + "WEB__TOKEN=x"],
        "both are set",
        ["web.token_file=null"],
        "Remove one",
    ),
    Case(
        "web.address",
        "loopback address where there is no token",
        ["web.port=8470", "web.address=0.0.0.0"],
        "0.0.0.0 is not",
        ["web.token_file=/t"],
        "Set token_file",
    ),
    Case(
        "store.tls.cert", "come with its key", ["store.tls.key=k"], "cert is null", ["store.tls.cert=c"], "Set cert too"
    ),
    Case(
        "membership.lease_ttl",
        "store.ping + store.ping_timeout",
        [*CLUSTER, "membership.lease_ttl=8s", "membership.keepalive=3s"],
        "8s is not over 5s + 3s",
        ["membership.lease_ttl=10s"],
        "Raise lease_ttl to 10s",
    ),
    Case(
        "recovery.start",
        "no longer than restart and reload",
        ["recovery.start=4m"],
        "4m is over 2m",
        ["recovery.start=4m", "recovery.restart=4m"],
        "restart and reload to 4m or more",
    ),
    Case(
        "recovery.reform",
        "rise from rung to rung",
        ["recovery.restart=10m"],
        "10s, 20s, 10m, 5m",
        ["recovery.reload=10m"],
        "Give a later rung more time",
    ),
    Case(
        "timeouts.collective",
        "longest phase + confirm + dump",
        ["timeouts.phase.ref=10m"],
        "10m is not over ref's 10m + 1s + 10s",
        ["timeouts.collective=730s"],
        "Raise collective to 730s",
    ),
    Case(
        "timeouts.floor",
        "any phase's cap",
        ["timeouts.phase.advantage=1s"],
        "2s is over 1s",
        ["timeouts.floor=1s"],
        "Lower floor to 1s",
    ),
    Case(
        "health.quarantine",
        "quarantine_max",
        ["health.quarantine=2h"],
        "2h is over 1h",
        ["health.quarantine_max=16h"],
        "Raise quarantine_max to 16h.",
    ),
    Case(
        "lanes.count",
        "largest world",
        ["node.workers=2"],
        "8 lanes are fewer than 16 workers",
        ["membership.max_nodes=4"],
        "Raise lanes.count to 16 before the job starts, or lower max_nodes to 4.",
    ),
    Case(
        "model.tp",
        "below job.level exact",
        ["job.program=train.py", "job.level=supervised", "node.workers=2", "model.tp=2"],
        "it is 2, at job.level supervised",
        ["model.tp=1"],
        "Leave tp and cp out, or set job.level: exact.",
    ),
    Case(
        "model.tp",
        "with the strategy deepspeed",
        ["job.program=train.py", "node.workers=2", "model.tp=2", "model.strategy=deepspeed"],
        "it is 2, and model.strategy is deepspeed",
        ["model.strategy=fsdp"],
        "Set model.strategy: fsdp, or tp: 1.",
    ),
    Case(
        "model.tp",
        "in teams yet",
        ["node.workers=2", "model.tp=2", "placement.actor.offload=cpu"],
        "it is 2, with placement.actor.offload: cpu",
        ["placement.actor.offload=none"],
        "or leave placement.actor.offload at its default",
    ),
    Case(
        "model.tp",
        "x model.cp must divide node.workers",
        ["job.program=train.py", "node.workers=6", "model.tp=2", "model.cp=2", "lanes.count=64"],
        "6 workers of a node are no teams of 4",
        ["node.workers=8"],
        "Set node.workers: 8, or another tp or cp.",
    ),
    Case(
        "model.cp",
        "whose tokens cannot be shared",
        ["node.workers=2", "model.cp=2", "model.value_head=tied"],
        "it is 2, with model.value_head: tied",
        ["model.value_head=separate"],
        "Set cp: 1, or attention: sdpa and value_head: separate.",
    ),
    Case(
        "lanes.exact",
        "deepspeed",
        ["placement.critic.strategy=deepspeed"],
        "it is require, and deepspeed shards critic",
        ["lanes.exact=warn"],
        "Set exact: warn",
    ),
    Case(
        "lanes.exact",
        "without batch_invariant",
        ["rollout.engine=vllm", "node.device=cuda"],
        "it is require, and rollout.vllm.batch_invariant is false with node.device: cuda",
        ["rollout.vllm.batch_invariant=true"],
        "Set exact: warn, rollout.vllm.batch_invariant: true",
    ),
    Case(
        "audit.lanes",
        "has no effect with teams",
        ["audit.lanes=1/10", "model.tp=2", "node.workers=2"],
        "it is 1/10, and workers are in teams of 2",
        ["audit.lanes=1/200"],
        "Leave audit.lanes out",
    ),
    Case(
        "model.zero_stage",
        "has no effect",
        ["model.zero_stage=3"],
        "it is 3, and no trained role is sharded by deepspeed",
        ["placement.actor.strategy=deepspeed", "lanes.exact=warn"],
        "Set model.strategy: deepspeed",
    ),
    Case(
        "vault.copies",
        "min_nodes - 1",
        ["vault.copies=2", "membership.min_nodes=2"],
        "2 is over 2 - 1",
        ["membership.min_nodes=3"],
        "Raise min_nodes to 3 or lower copies to 1.",
    ),
    Case(
        "vault.copies",
        "at least 1 with several nodes",
        ["membership.min_nodes=2"],
        "0 copies with at least 2 nodes",
        ["vault.copies=1"],
        "Set copies: 1",
    ),
    Case(
        "checkpoint.shared",
        "true where checkpoint.dir is a URL",
        ["checkpoint.shared=false", "checkpoint.dir=s3://runs/ppo", "membership.grow=always"],
        "false with s3://runs/ppo",
        ["checkpoint.shared=true"],
        "Set shared: true",
    ),
    Case(
        "checkpoint.shared",
        "go with grow: always",
        ["checkpoint.shared=false", "membership.max_nodes=2"],
        "false with grow: useful and up to 2 nodes",
        ["membership.grow=always"],
        "Set membership.grow: always",
    ),
    Case(
        "checkpoint.every",
        "multiple of vault.every",
        ["vault.every=3"],
        "100 is not a multiple of 3",
        ["checkpoint.every=102"],
        "Write every: 102",
    ),
    Case(
        "checkpoint.keep_every",
        "multiple of checkpoint.every",
        ["checkpoint.keep_every=250"],
        "250 is not a multiple of 100",
        ["checkpoint.keep_every=300"],
        "Write keep_every: 300.",
    ),
    Case(
        "vault.timeout",
        "phase update",
        ["timeouts.phase.update=20s"],
        "20s is not under 20s",
        ["vault.timeout=15s"],
        "Lower vault.timeout to 15s",
    ),
    Case(
        "comm.backend",
        "nccl on CPUs",
        ["comm.backend=nccl", "node.device=cpu"],
        "it is nccl, and node.device is cpu",
        ["comm.backend=gloo"],
        "Set backend: gloo",
    ),
    Case("health.sample", "5s or more", ["health.sample=1s"], "it is 1s", ["health.sample=5s"], "Set sample: 10s"),
    Case(
        "policy.fabric",
        "comm.fallback is none",
        ["policy.fabric=fallback"],
        "it is fallback, and comm.fallback is none",
        ["comm.fallback=gloo"],
        "Set comm.fallback: gloo",
    ),
    *(
        Case(
            one, f"differ from {other}", [f"{one}=9000", f"{other}=9000"], "both are 9000", [f"{one}=0"], "set one to 0"
        )
        for one, other in (
            ("node.beat_port", "node.probe_port"),
            ("node.probe_port", "vault.port"),
            ("node.probe_port", "telemetry.metrics_port"),
            ("node.probe_port", "web.port"),
            ("node.probe_port", "rollout.port"),
            ("vault.port", "rollout.port"),
            ("rollout.port", "telemetry.metrics_port"),
            ("rollout.port", "web.port"),
            ("vault.port", "telemetry.metrics_port"),
            ("vault.port", "web.port"),
            ("telemetry.metrics_port", "web.port"),
        )
    ),
    Case("model.path", "must be given", ["model.path=null"], "it is null", ["model.path=m"], "as path under model"),
    Case("data.path", "must be given", ["data.path=null"], "it is null", ["data.path=d"], "as path under data"),
    Case(
        "reward.function",
        "only scorer",
        ["reward.model=m"],
        "set are function and model",
        ["reward.function=null"],
        "exactly one of function, model and url",
    ),
    Case(
        "ppo.batch",
        "lanes.count",
        ["lanes.count=10", "ppo.mini_batch=10", "ppo.batch=25"],
        "25 samples do not divide into 10 lanes",
        ["ppo.batch=30"],
        "Write batch: 30.",
    ),
    Case(
        "ppo.mini_batch",
        "lanes.count",
        ["ppo.mini_batch=4"],
        "4 samples do not divide into 8 lanes",
        ["ppo.mini_batch=8"],
        "Write mini_batch: 8.",
    ),
    Case(
        "ppo.batch",
        "divisible by mini_batch",
        ["ppo.batch=48"],
        "48 is not a multiple of 32",
        ["ppo.batch=64"],
        "Write batch: 64 or mini_batch: 16.",
    ),
    Case(
        "ppo.micro_tokens",
        "hold the longest sample",
        ["ppo.algorithm=dpo", "ppo.micro_tokens=1000"],
        "1000 is under 1536",
        ["ppo.micro_tokens=1536"],
        "Write micro_tokens: 1536, or lower data.max_prompt or rollout.max_tokens.",
    ),
    Case(
        "data.curriculum.stages",
        "must begin with step 0",
        ["data.curriculum.field=level"],
        "the first steps are none",
        ['data.curriculum.stages={"0": "easy 1", "20": "easy 1, hard 3"}'],
        "Write field: level and stages:",
    ),
    Case(
        "data.curriculum.field",
        "null for dpo",
        ["data.curriculum.field=level", 'data.curriculum.stages={"0": "easy 1"}', "ppo.algorithm=sft"],
        "it is level, with sft",
        ["ppo.algorithm=ppo"],
        "Remove curriculum",
    ),
    Case(
        "ppo.group",
        "at least 2 for an algorithm",
        ["ppo.algorithm=rloo"],
        "it is 1, with rloo",
        ["ppo.group=8"],
        "Write group: 8.",
    ),
    Case(
        "ppo.scale_rewards",
        "must be group but for grpo",
        ["ppo.algorithm=rloo", "ppo.group=8", "ppo.scale_rewards=none"],
        "it is none, with rloo",
        ["ppo.algorithm=grpo", "ppo.kl.where=loss"],
        "Remove it, or set algorithm: grpo.",
    ),
    Case(
        "ppo.preference_loss",
        "sigmoid but for dpo",
        ["ppo.preference_loss=ipo"],
        "it is ipo, with ppo",
        ["ppo.algorithm=dpo"],
        "Remove it, or set algorithm: dpo.",
    ),
    Case(
        "ppo.gen_batch",
        "over batch",
        ["ppo.gen_batch=64", "ppo.filter_groups=true", "ppo.algorithm=grpo", "ppo.group=8", "ppo.kl.where=loss"],
        "it is 64, with 8 lanes, each with 8 of a group of 8, and a batch of 64",
        ["ppo.gen_batch=128"],
        "Write gen_batch: 128, or remove it.",
    ),
    Case(
        "ppo.gen_batch",
        "without filter_groups",
        ["ppo.gen_batch=128"],
        "filter_groups is false",
        ["ppo.filter_groups=true", "ppo.algorithm=grpo", "ppo.group=8", "ppo.kl.where=loss"],
        "Set filter_groups: true",
    ),
    Case(
        "ppo.filter_groups",
        "compares no samples of one prompt",
        ["ppo.filter_groups=true"],
        "it is true, with ppo",
        ["ppo.algorithm=grpo", "ppo.group=8", "ppo.kl.where=loss"],
        "Remove it, or set algorithm: grpo and group: 8.",
    ),
    Case(
        "ppo.dual_clip",
        "null but for vanilla and gspo",
        ["ppo.dual_clip=3", "ppo.loss_mode=sapo"],
        "it is 3, with sapo",
        ["ppo.loss_mode=vanilla"],
        "Remove it, or set loss_mode: vanilla.",
    ),
    Case(
        "ppo.clip_low",
        "far smaller with gspo",
        ["ppo.loss_mode=gspo"],
        "it is 0.2",
        ["ppo.clip_low=0.0003"],
        "Write clip_low: 0.0003 and clip_high: 0.0004.",
    ),
    Case(
        "ppo.overlong_buffer",
        "must not exceed rollout.max_tokens",
        ["ppo.overlong_buffer=512"],
        "512 is over 256",
        ["ppo.overlong_buffer=64"],
        "Write overlong_buffer: 64.",
    ),
    Case(
        "ppo.kl.estimator",
        "no gradient to send straight through",
        ["ppo.kl.estimator=k3+"],
        "it is k3+",
        ["ppo.kl.where=loss"],
        "Write estimator: k3, or where: loss.",
    ),
    Case(
        "ppo.kl.estimator",
        "k1's gradient is 0 in the mean",
        ["ppo.kl.estimator=k1", "ppo.kl.where=loss"],
        "it is k1",
        ["ppo.kl.estimator=k1+"],
        "Write estimator: k1+",
    ),
    Case(
        "ppo.kl.where",
        "loss with grpo",
        ["ppo.algorithm=grpo", "ppo.group=8"],
        "it is reward",
        ["ppo.kl.where=loss"],
        "Write where: loss (or off).",
    ),
    Case(
        "model.attention",
        "flash_attention_2",
        ["model.attention=flash_attention_2"],
        "model.dtype is float32, and engine torch generates in float32",
        ["model.attention=sdpa"],
        "Set attention: sdpa",
    ),
    Case(
        "ppo.group",
        "a step has whole groups",
        ["ppo.group=24"],
        "64 is not a multiple of 24",
        ["ppo.batch=96"],
        "Write batch: 96.",
    ),
    Case(
        "ppo.schedule",
        "constant while job.steps is 0",
        ["ppo.schedule=cosine"],
        "it is cosine",
        ["job.steps=10"],
        "Set job.steps",
    ),
    Case(
        "rollout.sync_timeout",
        "phase sync",
        ["rollout.sync_timeout=1m"],
        "1m is not under 1m",
        ["timeouts.phase.sync=72s"],
        "Raise timeouts.phase.sync to 72s or lower sync_timeout to 45s.",
    ),
    Case(
        "reward.timeout",
        "timeout x (retries + 1)",
        ["reward.function=null", "reward.url=http://h/x", "reward.retries=5"],
        "10s x 6 is not under 1m",
        ["timeouts.phase.reward=72s"],
        "Raise timeouts.phase.reward to 72s or lower timeout to 7.5s.",
    ),
    Case(
        "node.role",
        "unless rollout.nodes expects",
        ["node.role=rollout"],
        "it is rollout, and rollout.nodes is 0",
        ["rollout.nodes=1", "rollout.engine=served"],
        "Set rollout.nodes: 1 on all nodes",
    ),
    Case(
        "rollout.server.url",
        "must be http on this machine's loopback",
        ["rollout.engine=server", "rollout.server.url=http://10.0.0.3:8000", "lanes.exact=warn"],
        "it is http://10.0.0.3:8000",
        ["rollout.server.url=http://127.0.0.1:8000"],
        "run a rollout node",
    ),
    Case(
        "rollout.temperature",
        "must be 1 with a server",
        ["rollout.engine=server", "rollout.temperature=0.7", "lanes.exact=warn"],
        "it is 0.7",
        ["rollout.temperature=1"],
        "Set temperature: 1",
    ),
    Case(
        "evaluate.every",
        "without evaluate.prompts",
        ["evaluate.every=10"],
        "it is 10, and prompts is null",
        ["evaluate.prompts=held-out.jsonl"],
        "as prompts under evaluate, or set every: 0",
    ),
    Case(
        "evaluate.at_start",
        "must be false with evaluate.every: 0",
        ["evaluate.at_start=true"],
        "it is true",
        ["evaluate.at_start=false"],
        "Set every, or remove at_start.",
    ),
    Case(
        "evaluate.every",
        "what an evaluation cannot do",
        [
            "evaluate.every=10",
            "evaluate.prompts=h",
            "rollout.engine=served",
            "model.value_head=tied",
            "model.strategy=fsdp",
        ],
        "it is 10, with value_head: tied under fsdp",
        ["rollout.nodes=2"],
        "an algorithm that has a reward, and value_head: separate",
    ),
    Case(
        "evaluate.every",
        "must be a multiple of rollout.staleness",
        [
            "evaluate.every=10",
            "evaluate.prompts=h",
            "rollout.engine=vllm",
            "rollout.staleness=4",
            "ppo.importance_limit=2.0",
        ],
        "it is 10, and staleness is 4",
        ["evaluate.every=12"],
        "Write every: 12.",
    ),
    Case(
        "evaluate.max_tokens",
        "the longest answer that rewards are made for",
        ["evaluate.max_tokens=512"],
        "512 is over 256",
        ["evaluate.max_tokens=256"],
        "Lower it to 256",
    ),
    Case(
        "evaluate.samples",
        "where all answers to a prompt are the same",
        ["evaluate.samples=4", "evaluate.temperature=0"],
        "it is 4",
        ["evaluate.temperature=1"],
        "Set samples: 1, or temperature: 1.",
    ),
    Case(
        "checkpoint.keep_best",
        "as nothing has a score",
        ["checkpoint.keep_best=true"],
        "it is true",
        ["evaluate.every=100", "evaluate.prompts=h"],
        "Set evaluate.every and evaluate.prompts",
    ),
    Case(
        "checkpoint.keep_best",
        "only what is saved and evaluated",
        ["checkpoint.keep_best=true", "evaluate.every=30", "evaluate.prompts=h"],
        "checkpoint.every is 100, and evaluate.every 30",
        ["evaluate.every=100"],
        "Write evaluate.every: 100.",
    ),
    Case(
        "reward.parts",
        "must each be a word with",
        ["reward.function=null", "reward.parts={a: x:y, b: /tmp/z}"],
        "not so are b: /tmp/z",
        ["reward.parts={a: x:y, b: 'http://h/z'}"],
        "Write each as correct: rewards:correct",
    ),
    Case(
        "reward.weights",
        "must each be a number",
        ["reward.function=null", "reward.parts={a: x:y}", "reward.weights={a: much, model: 2}"],
        "not so are a: much, model: 2",
        ["reward.weights={a: 1, model: 2}", "reward.model=m"],
        "Write each as correct: 1.0",
    ),
    Case(
        "environment.function",
        "which generate nothing that an environment could answer",
        ["environment.function=tools:Search", "ppo.algorithm=sft", "reward.function=null"],
        "it is tools:Search, with algorithm: sft",
        ["ppo.algorithm=reinforce_plus_plus"],
        "Set an algorithm that generates, such as grpo",
    ),
    Case(
        "environment.function",
        "nothing is generated ahead",
        ["environment.function=tools:Search", "rollout.staleness=2", "ppo.importance_limit=2.0"],
        "it is tools:Search, and staleness is 2",
        ["rollout.staleness=0"],
        "Set staleness: 0.",
    ),
    Case(
        "environment.function",
        "no more episodes are played than are trained on",
        [
            "environment.function=tools:Search",
            "ppo.algorithm=grpo",
            "ppo.group=2",
            "ppo.filter_groups=true",
            "ppo.gen_batch=128",
            "ppo.kl.where=loss",
        ],
        "it is tools:Search, and gen_batch is 128",
        ["ppo.gen_batch=null"],
        "Remove gen_batch",
    ),
    Case(
        "environment.function",
        "before the next message goes out",
        ["environment.function=tools:Search", "vault.every=2"],
        "it is tools:Search, and every is 2",
        ["vault.every=1"],
        "Set every: 1.",
    ),
    Case(
        "environment.turn_tokens",
        "which all turns have together",
        ["environment.function=tools:Search", "environment.turn_tokens=300"],
        "300 is over 256",
        ["environment.turn_tokens=64"],
        "Write turn_tokens: 256, or raise max_tokens.",
    ),
    Case(
        "ppo.importance_limit",
        "weights of a step before",
        ["rollout.staleness=1"],
        "it is null, so those samples are weighed as if they were the present weights' own",
        ["ppo.importance_limit=2.0"],
        "importance_limit: 2",
    ),
    Case(
        "ppo.importance_mode",
        "there is no correction then",
        ["ppo.importance_mode=token_mask", "ppo.importance_floor=0.5"],
        "it is token_mask, with importance_floor 0.5 and importance_limit null",
        ["ppo.importance_limit=5.0"],
        "Set importance_limit",
    ),
    Case(
        "ppo.importance_floor",
        "no weight lies between them",
        ["ppo.importance_mode=sequence_mask", "ppo.importance_floor=2.0", "ppo.importance_limit=2.0"],
        "2 is not below 2",
        ["ppo.importance_floor=0.5"],
        "Lower importance_floor",
    ),
    Case(
        "rollout.stale_share",
        "must be 1 unless rollout.staleness is 1",
        ["rollout.stale_share=0.5", "rollout.staleness=2", "ppo.importance_limit=2.0"],
        "it is 0.5, and staleness is 2",
        ["rollout.staleness=1"],
        "Set staleness: 1, or remove stale_share.",
    ),
    Case(
        "rollout.stale_share",
        "one group of each lane's samples",
        [
            "rollout.staleness=1",
            "rollout.stale_share=0.5",
            "ppo.importance_limit=2.0",
            "ppo.group=8",
            "ppo.algorithm=grpo",
            "ppo.kl.where=loss",
        ],
        "it is 0.5, and a batch of 64 has 1 groups of 8 in each of 8 lanes",
        ["ppo.batch=128"],
        "Remove stale_share, or write a larger batch.",
    ),
    Case(
        "rollout.staleness",
        "must be 0 or 1 with strategy deepspeed",
        [
            "rollout.staleness=2",
            "rollout.engine=served",
            "ppo.importance_limit=2.0",
            "model.strategy=deepspeed",
            "lanes.exact=warn",
        ],
        "it is 2",
        ["rollout.staleness=1"],
        "Set staleness: 1, or strategy: fsdp.",
    ),
    Case(
        "ppo.batch",
        "for kto, whose baseline",
        ["ppo.algorithm=kto", "ppo.batch=8", "ppo.mini_batch=8"],
        "8 samples are one for each of 8 lanes",
        ["ppo.batch=16"],
        "Write batch: 16.",
    ),
    Case(
        "rollout.engine",
        "torch generates in the worker",
        ["rollout.nodes=2"],
        "it is torch, with 2 rollout nodes",
        ["rollout.engine=served"],
        "Set engine: served",
    ),
    Case(
        "rollout.engine",
        "with a tied value head under fsdp",
        ["model.value_head=tied", "placement.actor.strategy=fsdp"],
        "it is torch, with value_head: tied, and fsdp shards the actor",
        ["rollout.engine=served"],
        "Set engine: served",
    ),
    Case(
        "rollout.sync_transport",
        "auto or ipc beside the workers",
        ["rollout.sync_transport=nccl"],
        "it is nccl, with 0 rollout nodes",
        ["rollout.sync_transport=auto"],
        "Set sync_transport: auto",
    ),
    Case(
        "placement.ref.where",
        "must be train without rollout nodes",
        ["placement.ref.where=rollout"],
        "ref would live where no node is",
        ["placement.ref.where=rollout", "rollout.nodes=2", "rollout.engine=served"],
        "Set rollout.nodes, or where: train",
    ),
    Case(
        "placement.reward.where",
        "unless reward.model names a model",
        ["placement.reward.where=rollout", "rollout.nodes=2", "rollout.engine=served"],
        "there is no reward.model",
        ["placement.reward.where=train"],
        "Set where: train",
    ),
    Case(
        "placement.ref.strategy",
        "at its default for a role on rollout nodes",
        ["placement.ref.where=rollout", "placement.ref.offload=cpu", "rollout.nodes=2", "rollout.engine=served"],
        "ref is to live on rollout nodes",
        ["placement.ref.offload=none"],
        "Remove strategy and offload",
    ),
    Case(
        "node.run_dir",
        "the daemon's socket",
        [f"node.run_dir=/{'r' * 85}", "node.name=n00"],
        f"/{'r' * 85}/demo/n00/control.sock has 108",
        [f"node.run_dir=/{'r' * 84}", "node.name=n00"],
        "Name a folder of at most 85 bytes, or shorten job.name or node.name.",
    ),
    Case(
        "vault.dir",
        "the vault's socket",
        [f"vault.dir=/{'v' * 85}", "node.name=n00"],
        f"/{'v' * 85}/demo/n00/control.sock has 108",
        [f"vault.dir=/{'v' * 84}", "node.name=n00"],
        "Name a folder of at most 85 bytes, or shorten job.name or node.name.",
    ),
    Case(
        "rollout.dir",
        "a rollout engine's socket",
        [f"vault.dir=/{'v' * 79}", "node.name=n00", "rollout.engine=served"],
        f"/{'v' * 79}/demo/n00.engine/engine.sock has 108",
        [f"vault.dir=/{'v' * 78}", "node.name=n00"],
        "Name a shorter folder",
    ),
    Case(
        "job.level",
        "exact for the program elasticrl.ppo",
        ["job.level=told"],
        "it is told",
        ["job.level=exact"],
        "Set level: exact",
    ),
    Case(
        "job.steps",
        "must be 0 below job.level exact",
        ["job.program=t.py", "job.level=supervised", "job.steps=7"],
        "it is 7",
        ["job.steps=0"],
        "job.args",
    ),
    Case(
        "vault.copies",
        "must be 0 below job.level kept, where no state",
        ["job.program=t.py", "job.level=told", "vault.copies=1", "membership.min_nodes=2"],
        "it is 1",
        ["vault.copies=0"],
        "Remove it.",
    ),
    Case(
        "comm.backend",
        "must be auto below job.level exact",
        ["job.program=t.py", "job.level=told", "comm.backend=gloo"],
        "it is gloo",
        ["comm.backend=auto"],
        "Remove it.",
    ),
    Case(
        "comm.fallback",
        "must be none below job.level exact",
        ["job.program=t.py", "job.level=supervised", "comm.fallback=gloo"],
        "it is gloo",
        ["comm.fallback=none"],
        "Set fallback: none.",
    ),
    Case(
        "timeouts.quiet",
        "must be 0 at job.level exact",
        ["job.program=t.py", "timeouts.quiet=60s"],
        "it is 1m",
        ["timeouts.quiet=0s"],
        "Remove it",
    ),
    Case(
        "agent.progress",
        "must be null above job.level supervised",
        ["job.program=t.py", "job.level=told", "agent.progress='update (\\d+)'"],
        "it is update (\\d+) at job.level told",
        ["agent.progress=null"],
        "Remove it",
    ),
    Case(
        "agent.progress",
        "must have a group for the step",
        ["job.program=t.py", "job.level=supervised", "agent.progress=update"],
        "it has no group for the step",
        ["agent.progress='update (\\d+)'"],
        "Put the step into parentheses",
    ),
    Case(
        "membership.fixed",
        "must not be true with a min_nodes between",
        [
            "job.program=t.py",
            "job.level=supervised",
            "membership.fixed=true",
            "membership.min_nodes=2",
            "membership.max_nodes=4",
        ],
        "min_nodes is 2, max_nodes 4",
        ["membership.min_nodes=4"],
        "or set it to 4",
    ),
]


def judged(folder: Path, settings: Sequence[str]) -> Loaded:
    file = folder / "c.yaml"
    file.write_text(BASE)
    environ = dict(one.split("=", 1) for one in settings if one.startswith(ENV))
    return read(file, [one for one in settings if not one.startswith(ENV)], environ)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.key} {case.rule}")
def test_a_relation_alone_is_found_and_its_remedy_mends_it(case: Case, tmp_path: Path) -> None:
    found = judged(tmp_path, case.broken).findings
    assert [finding.key for finding in found] == [case.key], "\n".join(map(str, found))
    [finding] = found
    assert case.rule in finding.rule
    assert finding.values.split(";")[0] == case.values
    assert case.said in finding.remedy
    assert judged(tmp_path, [*case.broken, *case.mended]).findings == ()


def test_every_relation_has_a_case(tmp_path: Path) -> None:
    found = {(one.key, one.rule) for case in CASES for one in judged(tmp_path, case.broken).findings}
    assert sorted((relation.keys[0], relation.rule) for relation in RELATIONS) == sorted(found)
    assert len(CASES) == len(RELATIONS)


@pytest.mark.parametrize("how", [["model.tp=2"], ["model.cp=2"]])
def test_lanes_are_counted_against_teams(tmp_path: Path, how: list[str]) -> None:
    (found,) = judged(tmp_path, ["job.program=train.py", "node.workers=8", *how]).findings
    assert found.key == "lanes.count"
    assert found.values.startswith("8 lanes are fewer than 32 teams of workers")
    assert found.remedy == "Raise lanes.count to 32 before the job starts, or lower max_nodes to 2."


@pytest.mark.parametrize("how", ["model.strategy=fsdp", "placement.actor.strategy=fsdp", "model.lora.rank=4"])
@pytest.mark.parametrize("team", ["model.tp=2", "model.cp=2"])
def test_the_trainer_shards_what_teams_share_and_knows_their_adapters(tmp_path: Path, team: str, how: str) -> None:
    assert judged(tmp_path, ["node.workers=2", "membership.max_nodes=8", team, how]).findings == ()


IMPORTANCE = "ppo.importance_limit=2"
OUTSIDE = [
    ["rollout.engine=served"],
    ["rollout.engine=served", "rollout.staleness=1"],
    ["rollout.engine=vllm", "rollout.nodes=1"],
    ["rollout.engine=server", "lanes.exact=warn"],
    ["rollout.staleness=2"],
    ["reward.function=null", "reward.url=http://127.0.0.1:9/score"],
]


@pytest.mark.parametrize("how", OUTSIDE, ids=lambda how: how[-1])
@pytest.mark.parametrize("team", ["model.tp=2", "model.cp=2"])
def test_one_member_of_a_team_may_ask_engines_and_endpoints(tmp_path: Path, team: str, how: list[str]) -> None:
    assert judged(tmp_path, ["node.workers=2", "membership.max_nodes=8", IMPORTANCE, team, *how]).findings == ()


def test_a_team_keeps_no_weights_of_a_longer_period_for_an_engine(tmp_path: Path) -> None:
    conf = ["node.workers=2", "membership.max_nodes=8", "model.tp=2", "rollout.engine=served", "rollout.staleness=2"]
    (found,) = judged(tmp_path, [*conf, IMPORTANCE]).findings
    assert "with rollout.staleness: 2;" in found.values


@pytest.mark.parametrize("team", ["model.tp=2", "model.cp=2"])
def test_what_a_team_shares_never_waits_on_the_host(tmp_path: Path, team: str) -> None:
    conf = ["node.workers=2", "membership.max_nodes=8", team]
    (found,) = judged(tmp_path, [*conf, "placement.ref.offload=cpu"]).findings
    assert "with placement.ref.offload: cpu;" in found.values
    assert found.level == "error"
    whole = ["reward.function=null", "reward.model=judge", "placement.reward.offload=cpu"]
    assert judged(tmp_path, [*conf, *whole]).findings == (), "a reward model is whole, and one for all generations"


def test_the_base_breaks_nothing(tmp_path: Path) -> None:
    assert judged(tmp_path, ()).findings == ()


def test_only_a_rule_that_must_hold_refuses(tmp_path: Path) -> None:
    assert {relation.level: relation.rule.split()[0] for relation in RELATIONS} == {
        "error": "must",
        "warning": "should",
    }
    for case in CASES:
        loaded = judged(tmp_path, case.broken)
        assert (loaded.tree is None) == (loaded.findings[0].level == "error")


def test_every_port_is_kept_apart_and_a_datagrams_from_no_streams(tmp_path: Path) -> None:
    assert {one.key for one in PORTS} == {leaf.key for leaf in leaves(Tree).values() if Le(65535) in leaf.metadata}
    assert judged(tmp_path, ["node.beat_port=9000", "vault.port=9000"]).findings == ()


def test_relations_name_known_keys() -> None:
    assert {key for relation in RELATIONS for key in relation.keys} <= set(leaves(Tree))


def test_another_program_is_not_held_to_the_trainers_keys(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("job: {name: demo, program: train.py}\nstore: {embedded: true}\nlanes: {count: 9}\n")
    assert read(file, (), {}).findings == ()


def test_a_lease_no_longer_than_the_stores_retry_gets_a_remedy_too(tmp_path: Path) -> None:
    [finding] = judged(tmp_path, ["store.retry=20s"]).findings
    assert finding.remedy == "Raise lease_ttl to 34s."


def test_a_doubtful_value_is_not_blamed_for_a_relation(tmp_path: Path) -> None:
    found = judged(tmp_path, ["membership.keepalive=4", "membership.lease_ttl=6s"]).findings
    assert [finding.key for finding in found] == ["membership.keepalive"]


@pytest.mark.parametrize(
    ("stages", "values"),
    [
        ({"0": "easy 1, hard"}, "'hard' is no level with its weight"),
        ({"0": "easy 1, easy 2"}, "'easy 2' is no level with its weight"),
        ({"0": "easy 1, easy  3"}, "'easy  3' is no level with its weight"),
        ({"0": ""}, "'' is no level with its weight"),
        ({"0": "easy 900, hard 101"}, "the weights of a stage sum up to 1001"),
        ({"0": "easy 0"}, "the weights of a stage sum up to 0"),
        ({"5": "easy 1"}, "the first steps are 5"),
        ({"0": "easy 1", "00": "easy 2"}, "the first steps are 0, 00"),
        ({"soon": "easy 1"}, "invalid literal"),
    ],
)
def test_stages_of_a_curriculum_that_are_none_are_said_to_be_so(tmp_path: Path, stages: dict[str, str], values: str):
    written = ", ".join(f'"{step}": "{text}"' for step, text in stages.items())
    found = judged(tmp_path, ["data.curriculum.field=level", f"data.curriculum.stages={{{written}}}"]).findings
    assert [values in one.values for one in found] == [True], found
