"""Every log event elasticrl can write, declared once: its level, its fields, and what it means to an operator.

`docs/EVENTS.md` is generated from this table, and an event that is not in it is itself logged as a `bug`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Level = Literal["info", "warning", "error"]
#: What a line says besides its event, level and time: whose it is.
NAMES: Final = {
    "job": "the job's name",
    "run": "eight letters that tell one run of a job from another run of the same name. All nodes log the same letters, "
    "whatever restarts, until the store loses the job",
    "node": "the node that logged the line",
    "member": "node/incarnation: which life of the node it was; only daemons log it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One event.

    Example: Declared(name="plan.adopted", fields={"generation": "its number"}, meaning="this node follows a new plan")
    """

    name: str
    meaning: str
    level: Level = "info"
    fields: dict[str, str] = field(default_factory=dict)


EVENTS: tuple[Declared, ...] = (
    Declared(
        name="daemon.started",
        meaning="The daemon is up and about to join.",
        fields={
            "member": "node/incarnation",
            "pid": "of the daemon",
            "adopted": "running workers were taken over",
            "version": "of elasticrl",
        },
    ),
    Declared(
        name="daemon.stopped",
        meaning="The daemon ends.",
        fields={
            "code": "exit code",
            "reason": "why",
            "workers": "kept (a restart, or a fault of the daemon's own) or ended (a stop)",
            "left": "what goes on without it, by its process ids, and what ends that",
        },
    ),
    Declared(
        name="daemon.reloaded",
        meaning="SIGHUP: the configuration was read again.",
        fields={"changed": "keys taken over", "ignored": "keys that need a restart"},
    ),
    Declared(
        name="reload.refused",
        meaning="SIGHUP: the new configuration is wrong; the daemon goes on under the old one.",
        level="error",
        fields={"reason": "what is wrong and what to do"},
    ),
    Declared(
        name="daemon.refused",
        meaning="The daemon will not start; the reason says what to do.",
        level="error",
        fields={"reason": "what is wrong and what to do"},
    ),
    Declared(
        name="daemon.left",
        meaning="What a daemon that will not start leaves running, as it holds what no checkpoint has.",
        fields={"left": "what, and how to end it"},
    ),
    Declared(
        name="plan.adopted",
        meaning="This node follows a new plan.",
        fields={
            "generation": "its number",
            "phase": "train, hold, probe or stop",
            "members": "seated nodes",
            "world": "training ranks",
            "resume": "newest committed step when it was written",
            "rung": "of the recovery ladder; start if this is no recovery",
            "causes": "why it was made: kinds of `elasticrl.contract.cause.Why`",
            "nodes": "that these causes are about",
            "reason": "the sentence that status shows",
        },
    ),
    Declared(
        name="checkpoint.committed",
        meaning="There is a newer disk checkpoint: the job will never go back behind its step.",
        fields={"step": "", "generation": "that committed it", "manifest": "its name"},
    ),
    Declared(name="leader.elected", meaning="This node leads from now on.", fields={"member": "this member"}),
    Declared(name="leader.resigned", meaning="This node does not lead any more.", fields={"member": "this member"}),
    Declared(
        name="node.state",
        meaning="What this node is doing has changed.",
        fields={"reason": "the sentence that status shows"},
    ),
    Declared(
        name="workers.changed",
        meaning="What this node's workers are doing has changed.",
        fields={
            "work": "none, joining, training, ...",
            "generation": "",
            "born": "generation that launched them",
            "step": "sealed",
        },
    ),
    Declared(
        name="worker.exited",
        meaning="A worker process has ended without being told to.",
        level="warning",
        fields={
            "generation": "",
            "slot": "",
            "step": "newest sealed",
            "cause": "signal, exit code or exception",
            "own": "its own doing",
            "core": "where the kernel puts core dumps, if this end may have left one",
            "said": "the last line of its output, if there is one",
        },
    ),
    Declared(
        name="logs.refused",
        meaning="The log folder takes no new file: what workers print lies in the file that they wrote to before.",
        level="warning",
        fields={"why": "the folder, and what the system says"},
    ),
    Declared(
        name="milestone.read",
        meaning="How far a script is by its own log, now and then (job.level supervised).",
        fields={
            "generation": "",
            "said": "in words",
            "unit": "what is counted: step, epoch, sample",
            "count": "",
            "of": "how many there will be; 0: not said",
        },
    ),
    Declared(
        name="worker.stalled",
        meaning="A worker has made no progress for longer than its phase's budget.",
        level="warning",
        fields={
            "slot": "",
            "phase": "",
            "for_s": "",
            "budget_s": "",
            "waiting": "in a collective: a victim",
            "stopped": "by a signal",
            "silent": "all that is known is that a script's log tells of no progress",
        },
    ),
    Declared(
        name="verdict.found",
        meaning="What broke the gang, or is not in order: who, what, why, how sure, what to do.",
        level="warning",
        fields={
            "fault": "the class, as `policy` names it",
            "ranks": "at fault",
            "nodes": "at fault",
            "cause": "the sentence",
            "confidence": "low, medium or high",
            "remedy": "what to do",
            "because": "the facts that it rests on",
            "generation": "the gang that broke, where this came to be known after the plan",
        },
    ),
    Declared(
        name="policy.capped",
        meaning="A node is proven unfit and policy says to keep it out, and a cap forbids it: it stays until a person acts.",
        level="warning",
        fields={
            "generation": "",
            "fault": "the class",
            "nodes": "at fault",
            "reason": "who stays, and which cap it is",
        },
    ),
    Declared(
        name="straggler.found",
        meaning="A rank has been slower than its gang in each of the last reports; nothing is done about it.",
        level="warning",
        fields={"rank": "", "node_slow": "where it runs", "reason": "in which phase, and by how much"},
    ),
    Declared(
        name="fallback.measured",
        meaning="The gang goes on over gloo in place of NCCL, and has made its first steps so.",
        level="warning",
        fields={"generation": "", "reason": "how long a step takes, and took before"},
    ),
    Declared(
        name="scene.taken",
        meaning="Workers that had stalled were asked where they are, before anything is done to them.",
        fields={"generation": "", "said": "where each is", "took_s": ""},
    ),
    Declared(
        name="probe.done",
        meaning="This node has tested the way to its partners while the gang is held.",
        fields={"generation": "", "pairs": "tested", "said": "what was found", "took_s": ""},
    ),
    Declared(
        name="environment.warning",
        meaning="A variable in the workers' environment is wrong, unknown, or outdated.",
        level="warning",
        fields={"name": "", "value": "", "remedy": ""},
    ),
    Declared(
        name="environment.profile",
        meaning="comm.profile has set these in the workers' environment.",
        fields={"profile": "", "added": "name=value of each"},
    ),
    Declared(
        name="versions.differ",
        meaning="A node's workers run another Python or elasticrl than others. They train; another torch or NCCL is a verdict.",
        level="warning",
        fields={"said": "which node, and what", "remedy": ""},
    ),
    Declared(
        name="transport.sockets",
        meaning="NCCL has chosen sockets on a node with active InfiniBand or RoCE ports: the job is slow, and nothing fails.",
        level="warning",
        fields={"said": "which ports", "remedy": ""},
    ),
    Declared(
        name="machine.starved",
        meaning="Any process here is slow now: too many want to run, the host gives time to others, the disk is busy.",
        level="warning",
        fields={"said": "the checks and their figures; `elasticrl doctor` says what to do about each"},
    ),
    Declared(
        name="cards.unseen",
        meaning="There are GPUs here that cannot be asked how they are: one that breaks is known by what its worker says.",
        level="warning",
        fields={"said": "why, and what to do"},
    ),
    Declared(
        name="probe.taken",
        meaning="Somebody has the port at which this node is probed: no probe reaches it, and it passes for unreachable then.",
        level="warning",
        fields={"address": "node.probe_port; see who has it (ss -tulpn), or set 0, which takes any"},
    ),
    Declared(
        name="machine.unseen",
        meaning="What this machine is short of cannot be looked at: nothing here is known of it.",
        level="warning",
        fields={"said": "why"},
    ),
    Declared(
        name="kernel_log.unreadable",
        meaning="The kernel's log cannot be read: what it says of GPUs, memory and disks is not heard here.",
        fields={"said": "what to do"},
    ),
    Declared(
        name="machine.recovered", meaning="The machine is not short of anything any more.", fields={"said": "empty"}
    ),
    Declared(
        name="incident.saved",
        meaning="A fault is over; its story is kept: elasticrl incidents.",
        fields={"id": "", "fault": "the class", "cause": "", "cost_s": "without a sealed step", "path": "the file"},
    ),
    Declared(
        name="incident.lost",
        meaning="The story of a fault could not be written down.",
        level="warning",
        fields={"id": "", "error": ""},
    ),
    Declared(
        name="trace.lost",
        meaning="The event trace cannot be written: a full disk, mostly. Nothing but `elasticrl replay` misses it.",
        level="warning",
        fields={"folder": "where", "error": "what happened"},
    ),
    Declared(
        name="trace.back",
        meaning="The event trace is written again.",
        fields={"folder": "where", "after_s": "how long it was not"},
    ),
    Declared(
        name="incarnation.unsaved",
        meaning="Which life this is cannot be written down: until it is, a restart of the daemon may not adopt its workers.",
        level="warning",
        fields={"error": "what happened"},
    ),
    Declared(
        name="log.lost",
        meaning="Log lines cannot be written where they go: a full disk, mostly. `elasticrl events` has them, this one too.",
        level="warning",
        fields={"error": "what happened"},
    ),
    Declared(
        name="log.back",
        meaning="Log lines are written again.",
        fields={"dropped": "how many were not"},
    ),
    Declared(
        name="recovery.done",
        meaning="The first step of a new generation is sealed.",
        fields={
            "generation": "",
            "rung": "",
            "total_s": "of all stages: from the fault, or the last sign of life before it, to the sealed step",
            "stages": "seconds by stage: detect, decide, reform, restore, first_step",
            "lost": "steps that had been sealed, and are made again; not there if that is not known",
        },
    ),
    Declared(
        name="neighbour.suspected",
        meaning="A neighbour's beats have stopped.",
        level="warning",
        fields={"neighbour": "the node"},
    ),
    Declared(
        name="neighbour.cleared", meaning="A suspected neighbour is heard again.", fields={"neighbour": "the node"}
    ),
    Declared(
        name="store.failed",
        meaning="The store did not do what was asked; it is asked again.",
        level="warning",
        fields={"action": "what was asked", "error": "what happened"},
    ),
    Declared(
        name="store.warning",
        meaning="Something about the store that an operator should know, such as a server version that can lose data.",
        level="warning",
        fields={"text": ""},
    ),
    Declared(
        name="store.lost",
        meaning="The store does not answer; training goes on under the present plan.",
        level="warning",
        fields={"endpoint": "", "reason": ""},
    ),
    Declared(
        name="store.back",
        meaning="The store answers again.",
        fields={"endpoint": "", "after_s": "how long it was away"},
    ),
    Declared(name="store.resumed", meaning="A watch goes on where it was.", fields={"endpoint": "", "tries": ""}),
    Declared(
        name="store.relist",
        meaning="A watch cannot go on where it was; everything is read again.",
        fields={"reason": ""},
    ),
    Declared(
        name="store.no_auth",
        meaning="A username is configured, but this etcd does not use authentication.",
        level="warning",
        fields={"username": ""},
    ),
    Declared(
        name="store.unreadable",
        meaning="A value in the store cannot be read; what was known before stays.",
        level="error",
        fields={"text": "where, what, and what to do"},
    ),
    Declared(
        name="store.started",
        meaning="An embedded etcd runs on this node.",
        fields={"endpoint": "", "adopted": "it was running already"},
    ),
    Declared(
        name="store.adopted",
        meaning="The store had lost the job, and an operator has it go on from its newest good checkpoint.",
        fields={"step": "", "manifest": "", "place": "where the checkpoints are"},
    ),
    Declared(
        name="agent.started",
        meaning="The agent process of this node runs.",
        fields={"pid": "", "adopted": "it was running already"},
    ),
    Declared(
        name="agent.lost",
        meaning="The agent has gone, and its workers with it.",
        level="warning",
        fields={"reason": ""},
    ),
    Declared(
        name="agent.killed",
        meaning="The agent was told to end and did not, so it was killed, and its workers with it.",
        level="warning",
        fields={"pid": "", "after_s": "how long it was waited for"},
    ),
    Declared(
        name="agent.failed",
        meaning="The agent could not be started, or ended as it started; it is tried again, ever more rarely.",
        level="warning",
        fields={"error": "what happened"},
    ),
    Declared(
        name="vault.changed",
        meaning="This node's vault has come or gone. Training goes on without it, but nothing is copied until it is back.",
        fields={"state": "up or away", "reason": "started, adopted, or what happened", "pid": "of the vault"},
    ),
    Declared(
        name="rollouts.changed",
        meaning="Which rollout nodes have an engine that is up, as this training node's workers are told.",
        fields={"engines": "where each is asked, by node"},
    ),
    Declared(
        name="rollout.changed",
        meaning="This rollout node's engine has come or gone. Its samples are asked of the others meanwhile.",
        fields={
            "up": "it has generated, and answers",
            "address": "where",
            "pid": "of the engine",
            "reason": "why it is not up",
        },
    ),
    Declared(
        name="rollout.keeper",
        meaning="The process that sees to this rollout node's engine has ended; another is started.",
        level="warning",
        fields={"code": "its exit code", "log": "its log"},
    ),
    Declared(
        name="vault.refused",
        meaning="The vault cannot do what a plan asks of it: copies are missing until the next plan.",
        level="warning",
        fields={"generation": "of the plan", "reason": "what is wrong"},
    ),
    Declared(
        name="control.asked",
        meaning="An operator asked for something.",
        fields={
            "verb": "",
            "target": "the node it concerns, if one",
            "uid": "of the asking process",
            "pid": "of the asking process",
        },
    ),
    Declared(
        name="web.changed",
        meaning="The status page of this node is served from now on, or cannot be. Training does not notice either.",
        fields={"state": "open or away", "reason": "where, or what happened"},
    ),
    Declared(
        name="metrics.refused",
        meaning="This node's metrics cannot be served until its daemon starts again. Training does not notice.",
        level="warning",
        fields={"reason": "where, what happened, and what to do"},
    ),
    Declared(
        name="beats.refused",
        meaning="A datagram on the beat port was not signed by a member of this job, or cannot be read.",
        level="warning",
        fields={
            "sender": "address",
            "problem": "",
            "more": "of this sender's since the last such line, a minute ago or more",
        },
    ),
    Declared(
        name="ppo.guarantee",
        meaning="What this run's faults and resizes cannot change. In the log of rank 0, once, where it begins.",
        fields={
            "step": "that it begins with",
            "holds": "bits: the same bits; close: the same samples, close in floats; ledger: each sample exactly once, while "
            "its text may be another",
            "reason": "the sentence",
        },
    ),
    Declared(
        name="ppo.step",
        meaning="A step of the trainer is sealed. In the log of rank 0, beside its line for people.",
        fields={
            "step": "its number",
            "generation": "that made it",
            "world": "its workers",
            "made": "when, in seconds since 1970: before it was sealed",
            "metrics": "reward, kl and the others, of the whole batch",
            "seconds": "by phase, of this worker",
            "usual": "the medians of the last steps, by phase",
        },
    ),
    Declared(
        name="ppo.spike",
        meaning="The norm of an update's gradient, or a loss of it, was far above those before (ppo.spike). Told when its step "
        "is sealed.",
        level="warning",
        fields={
            "step": "its number",
            "update": "of that step",
            "name": "what jumped: actor_norm, value_loss and their like",
            "value": "what it was",
            "usual": "the mean of those before",
            "spread": "their standard deviation",
            "skipped": "whether the update was left out",
        },
    ),
    Declared(
        name="ppo.evaluate",
        meaning="The policy has answered the held-out prompts (evaluate.every). Told when the step before it is sealed.",
        fields={
            "step": "how many steps have made the weights, as a checkpoint's",
            "metrics": "score, length, ended and pass@k, over all prompts, and reward/NAME of each of several rewards",
            "samples": "a few answers: prompt, answer, score, parts (what each of several rewards said)",
        },
    ),
    Declared(
        name="ppo.comm",
        meaning="What the collectives of a step cost this worker. Bytes are those it had for others.",
        fields={
            "step": "its number",
            "costs": "times, bytes and seconds waited, by kind of collective",
            "waits_s": "all of these waits",
            "sync_s": "weights to the rollout engine",
            "timeouts": "collectives that ran into their timeout",
            "usual": "the medians of the last steps, by figure",
        },
    ),
    Declared(
        name="ppo.advice",
        meaning="A rule of thumb found that the job could train faster.",
        fields={"step": "when", "rule": "its name", "numbers": "what it is about", "text": "what to do"},
    ),
    Declared(
        name="bug",
        meaning="Something that must not happen has happened: please report it.",
        level="error",
        fields={"exception": ""},
    ),
)

BY_NAME: dict[str, Declared] = {declared.name: declared for declared in EVENTS}


def names(environment: Mapping[str, str]) -> dict[str, str]:
    """A worker's, from the environment that its agent gave it.

    >>> names({"ELASTICRL_JOB": "ppo-7b", "ELASTICRL_NODE": "n03", "ELASTICRL_RUN": "5d0c9e1f", "RANK": "2"})
    {'job': 'ppo-7b', 'run': '5d0c9e1f', 'node': 'n03'}
    """
    found = {name: environment.get(f"ELASTICRL_{name.upper()}", "") for name in ("job", "run", "node")}
    return {name: value for name, value in found.items() if value}


def document() -> str:
    """`docs/EVENTS.md`, from the table."""
    lines = [
        "# Events",
        "",
        "Every line that elasticrl logs is one of these. Under systemd and in files a line is one JSON object. It has `event`,",
        "`level`, `at` (the time, UTC), the four names below, and the event's own fields. On a terminal it is coloured text.",
        "The trainer's events, `ppo.*`, are in the workers' logs, as a line for people. With `telemetry.format: json` (which",
        "`elasticrl run` sets) a JSON object follows each of them, with `ts` in place of `at`.",
        "",
        *(f"- `{name}`: {text}" for name, text in NAMES.items()),
        "",
        "A daemon learns `run` and `member` from the store. Lines that it logs before that have neither. A job that is stopped",
        "and started again is the same run. A job whose store was lost or made anew is another run, with `--adopt` or without.",
        "An agent has a log of its own, with sentences, each with job and node. A worker finds these names in its",
        "environment: `ELASTICRL_JOB`, `ELASTICRL_RUN`, `ELASTICRL_NODE`.",
        "",
        "This page is generated: `python -m elasticrl.telemetry.events > docs/EVENTS.md`.",
        "",
    ]
    for declared in EVENTS:
        lines += [f"## {declared.name}", "", f"*{declared.level}.* {declared.meaning}", ""]
        lines += [f"- `{name}`{': ' + text if text else ''}" for name, text in declared.fields.items()]
        lines += [""] if declared.fields else []
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(document(), end="")
