"""What a training script is, by its text: which trainer it uses, whether it goes on from a checkpoint, what of ours it calls.

The one idea: names are enough. A script imports its trainer by name and resumes by a few well-known calls, so its syntax tree
is searched for these names. Nothing is imported and nothing is run. What the script does in other modules is not seen.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A trainer, and the lines that lead from one level to the next; None: there is no such line.

    Example: Kind(name="Lightning Trainer", resume="trainer.fit(..., ckpt_path=...)", told="...", kept="...", exact=None)
    """

    name: str
    resume: str
    told: str
    kept: str | None
    exact: str | None
    fixed: str = ""  # why it cannot train at another size


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was found. Example: Reading(kind=KINDS["SFTTrainer"], resumes=True, level="supervised")"""

    kind: Kind
    resumes: bool
    torn: bool = False  # it may resume from a checkpoint that a kill has cut short
    level: str  # that its calls of ours belong to


HF_RESUME: Final = "trainer.train(resume_from_checkpoint=elasticrl.hf.latest(args.output_dir))"
HF_TOLD: Final = "import elasticrl.hf;  trainer = {0}(..., callbacks=[elasticrl.hf.Callback()])"
HF_KEPT: Final = "import elasticrl.hf;  trainer = {0}(..., callbacks=[elasticrl.hf.Callback(keep=True)])"
HF_EXACT: Final = "import elasticrl.hf;  class Trainer(elasticrl.hf.Elastic, {0}): ...  # then use Trainer for {0}"
BEAT: Final = "import elasticrl;  elasticrl.beat(step=step)  # after each step"
KEEP: Final = (
    "kept = elasticrl.keep(model=model, optimizer=optimizer);  step = kept.restore()  # then kept.step(step) after each"
)
PASSES: Final = (
    "loader = elasticrl.hf.Passes(loader);  kept = elasticrl.keep(model=model, optimizer=optimizer, loader=loader);  "
    "step = kept.restore()  # then kept.step(step) after each"
)
PREPARE: Final = (
    "model, optimizer, loader, scheduler = elasticrl.hf.prepare(model, optimizer, loader, scheduler, epochs=epochs)  "
    "# in place of accelerator.prepare: docs/TRAINERS.md"
)
JOIN: Final = "with elasticrl.runtime.join() as run: ...  # a loop over lanes: docs/RUNTIME.md"


def _of_hf(name: str, *, exact: bool = True) -> Kind:
    return Kind(
        name=name, resume=HF_RESUME, told=HF_TOLD.format(name), kept=HF_KEPT.format(name),
        exact=HF_EXACT.format(name) if exact else None,
    )  # fmt: skip


#: By the name that a script imports: a class, or a module. The first that is found in this order says what the script is.
KINDS: Final[Mapping[str, Kind]] = {
    **{name: _of_hf(name) for name in ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer")},
    "PPOTrainer": Kind(
        name="PPOTrainer",
        resume="load your own checkpoint before you make the trainer: it cannot resume (docs/TRAINERS.md)",
        told="import elasticrl;  elasticrl.beat(step=state.global_step)  # in on_step_end of a callback of yours",
        kept="trainer.add_callback(Kept(trainer))  # the callback of docs/TRAINERS.md",
        exact=None,
    ),
    "trl": _of_hf("trainer of TRL"),
    "torchtitan": Kind(
        name="torchtitan",
        resume="config.checkpoint.enable = True",
        told=BEAT,
        kept="import elasticrl.titan;  class Trainer(elasticrl.titan.Kept, torchtitan.trainer.Trainer): ...  # then use it",
        exact=None,
        fixed="its data loader cannot resume at another size",
    ),
    "lightning": Kind(
        name="Lightning Trainer",
        resume='trainer.fit(model, ckpt_path=elasticrl.lightning.latest("checkpoints"))',
        told='import elasticrl;  trainer = Trainer(..., callbacks=[elasticrl.lightning.Callback("checkpoints/leaving.ckpt")])',
        kept="callbacks=[elasticrl.lightning.Callback(keep=True)];  data = elasticrl.lightning.DataLoader(...)  # for torch's",
        exact=None,
    ),
    "Trainer": _of_hf("transformers.Trainer"),
    "accelerate": Kind(name="Accelerate loop", resume="accelerator.load_state(newest)", told=BEAT, kept=PASSES, exact=PREPARE),
    "deepspeed": Kind(name="DeepSpeed loop", resume="engine.load_checkpoint(folder)", told=BEAT, kept=KEEP, exact=JOIN),
    "fully_shard": Kind(
        name="FSDP2 loop", resume="dcp.load(state, checkpoint_id=newest)", told=BEAT, kept=KEEP, exact=JOIN
    ),
    "FullyShardedDataParallel": Kind(
        name="FSDP loop", resume="dcp.load(state, checkpoint_id=newest)", told=BEAT, kept=KEEP, exact=JOIN
    ),
    "torch": Kind(name="loop of torch", resume="model.load_state_dict(torch.load(newest))", told=BEAT, kept=KEEP, exact=JOIN),
}  # fmt: skip
ALIASES: Final = {"pytorch_lightning": "lightning"}
UNKNOWN: Final = Kind(name="program", resume="load your newest checkpoint", told=BEAT, kept=KEEP, exact=JOIN)
#: Calls, attributes and arguments by which scripts go on from a checkpoint.
RESUMES: Final = frozenset(
    {"resume_from_checkpoint", "get_last_checkpoint", "ckpt_path", "load_state", "load_checkpoint", "load_state_dict",
     "set_state_dict", "latest", "CheckpointManager", "init_from_checkpoint"}
)  # fmt: skip
NONE: Final = "supervised"  # what calls nothing of ours
TORN: Final = "get_last_checkpoint"  # transformers': the one with the greatest number, whole or not
#: What of ours belongs to which level, the most first.
OURS: Final[Mapping[str, frozenset[str]]] = {
    "exact": frozenset({"Elastic", "join", "prepare"}),
    "kept": frozenset({"keep", "Kept"}),
    "told": frozenset({"beat", "Callback", "leaving"}),
}


def read(script: Path) -> Reading:
    """What a script is. Raises SyntaxError, ValueError and OSError."""
    tree = ast.parse(script.read_bytes(), filename=str(script))
    imported = set(_imported(tree))
    kind = next((kind for name, kind in KINDS.items() if name in imported), UNKNOWN)
    ours = set(_ours(tree))
    ours |= {"keep"} if "Callback" in ours and "keep" in set(_used(tree)) else set()
    level = next((level for level, names in OURS.items() if names & ours), NONE)
    resumes = bool(RESUMES & set(_used(tree))) or level == "exact"
    return Reading(kind=kind, resumes=resumes, torn=TORN in set(_used(tree)), level=level)


def _imported(tree: ast.AST) -> Iterator[str]:
    """First names of modules, and the names that are taken from them."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [name.name.partition(".")[0] for name in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found = [module.partition(".")[0], *(name.name for name in names)]
            case _:
                continue
        yield from (ALIASES.get(name, name) for name in found)


def _used(tree: ast.AST) -> Iterator[str]:
    """Names, attributes and the names of arguments."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name


def _ours(tree: ast.AST) -> Iterator[str]:
    """What is taken from a module of ours (`from elasticrl import beat`), or read from one (`elasticrl.runtime.join`)."""
    roots = {"elasticrl"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                roots |= {name.asname for name in names if name.asname and name.name.startswith("elasticrl")}
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "elasticrl":
                roots |= {name.asname or name.name for name in names}
                yield from (name.name for name in names)
    for node in ast.walk(tree):
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(node, ast.Attribute) and isinstance(root, ast.Name) and root.id in roots:
            yield node.attr
