"""What a job will need, before anything starts: memory by role, the largest pass, bytes on the wire, phase budgets.

The idea: each figure is one line of arithmetic, printed as such. They are the formulas of what the code does (flat rows, two
versions of a shard, one all-to-all and one all-gather an update), not of what trainers usually do, so that a figure that is
wrong points at the line that is.

Letters: P parameters of a role, T those of them that are trained, W workers. No torch: the configuration, and arithmetic.

Long because it is one list of formulas: what memory, disk and network each part of a job takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from elasticrl.config.relations import OUR_TRAINER
from elasticrl.config.training import Ppo
from elasticrl.ppo import flow, shapes, sizes
from elasticrl.ppo.staleness import rows_at_once
from elasticrl.runtime.lanes import Deal, Fold, Node

if TYPE_CHECKING:
    from elasticrl.config import Tree
    from elasticrl.ppo.shapes import Shape
    from elasticrl.ppo.sizes import Sizes

WIDE = 4  # bytes of a float32: what is trained
VERSIONS = 2  # of a shard: the newest and the one being made
ADAM = 3  # rows of a shard: the parameters and two moments
VAULT_FILES = 3  # of each writer: two sealed versions and the one being written
SAVED_FILES = 1  # and one that a save reads for longer than that
HEADROOM = 0.9  # of a device's memory that a plan should fill: the rest is the allocator's and the libraries'
PASSES = 3  # a backward pass is two forward passes' work


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What one worker's device does in a second, for budgets alone: guesses, to be read as orders of magnitude."""

    flops: float
    bytes: float


RATES: Mapping[str, Rate] = {"cpu": Rate(flops=2e10, bytes=5e9), "cuda": Rate(flops=1e14, bytes=1e12)}

NETWORK = 1e9  # bytes a second between two nodes, as guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure. Example: Line(role="actor", what="weights", bytes=403456, formula="4 B x P 100,864")"""

    role: str
    what: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A phase's expected seconds, and the budget that follows. `cap_s` is what the configuration allows it."""

    phase: str
    seconds: float
    suggested_s: float
    cap_s: float
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All of it, for the worker that needs most."""

    workers: int
    device: str
    memory: tuple[Line, ...]  # that stays for the whole step
    transient: tuple[Line, ...]  # of which only the greatest counts
    host: tuple[Line, ...]  # in the host's memory: the vault, the weights on their way to an engine, what is offloaded
    wire: tuple[Line, ...]  # bytes that a worker sends in a step
    budgets: tuple[Budget, ...]
    micro_tokens: int | None  # None: passes are not reckoned
    largest_micro_tokens: int | None  # None: none fits, or the device's memory is not known
    memory_limit: int | None
    notes: tuple[str, ...] = field(default=())

    @property
    def fixed(self) -> int:
        """Bytes that stay."""
        return sum(line.bytes for line in self.memory)

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return self.fixed + max((line.bytes for line in self.transient), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One model in one role. A worker has `count` parameters, of which `trained` are; `strategy` None: frozen. A team has cut
    what its shape says into so many `cuts`.
    """

    name: str
    shape: Shape
    count: int
    trained: int
    head: bool = True  # an output embedding
    strategy: str | None = None
    cuts: int = 1
    offload: bool = False  # it waits in the host's memory while it is idle, and its optimizer stays there


def read(tree: Tree, *, workers: int | None = None, memory_bytes: int | None = None) -> Estimate:
    """From a configuration and its models' config.json."""
    if tree.model.path is None:
        raise shapes.ShapeError(
            "model.path is not set: name a folder in Hugging Face's layout (model.path=FOLDER), or say how many parameters a "
            "program of your own trains (--parameters 7B)."
        )
    names = {"actor": tree.model.path, "critic": tree.model.critic_path or tree.model.path}
    names["ref"] = tree.model.ref_path or tree.model.path
    if tree.reward.model is not None:
        names["reward"] = tree.reward.model
    return of(
        tree,
        {role: shapes.read(folder) for role, folder in names.items()},
        workers=workers,
        memory_bytes=memory_bytes,
    )


def of(
    tree: Tree, models: Mapping[str, Shape], *, workers: int | None = None, memory_bytes: int | None = None
) -> Estimate:
    """`models` has a shape for each role; `workers` of the gang, else the most that may train together."""
    _check_divides(tree, models["actor"])
    world = _carriers(tree, workers) * tree.model.cp
    roles = _roles(tree, models)
    engine, file, unsaid = _engine(tree, models["actor"], memory_bytes)
    stays = [line for role in roles for line in _stays(tree, role, world)]
    fixed = (*(line for line in stays if not _comes(roles, line)), *engine)
    others = (
        *(line for line in stays if _comes(roles, line)),
        *(line for role in roles for line in _rooted(role, world)),
        *_cache(tree, models["actor"], "torch"),
    )
    largest = None
    if memory_bytes is not None:
        room = HEADROOM * memory_bytes - sum(line.bytes for line in fixed)
        passes = _sizes(tree)
        most = tree.ppo.mini_batch // tree.lanes.count * passes.sample  # more than an update of a lane has no use
        fits = (size for size in range(most, 0, -passes.sample) if size >= passes.unit * passes.sample)
        largest = next(
            (size for size in fits if max(line.bytes for line in (*_passing(tree, roles, size), *others)) <= room), None
        )
    device = tree.node.device if tree.node.device in RATES else "cuda"
    found = Estimate(
        workers=world * tree.model.tp,
        device=device,
        memory=fixed,
        transient=(*_passing(tree, roles, tree.ppo.micro_tokens), *others),
        host=(
            *_vault(tree, roles, world),
            *file,
            *_begun(tree, roles[0], world),
            *(line for role in roles for line in _waits(tree, role, world)),
        ),
        wire=tuple(_wire(tree, roles, world)),
        budgets=tuple(_budgets(tree, roles, world, RATES[device])),
        micro_tokens=tree.ppo.micro_tokens,
        largest_micro_tokens=largest,
        memory_limit=memory_bytes,
        notes=(*unsaid, *_notes(tree)),
    )
    return _noted(found)


_TOO = (
    "All parameters are taken as trained, with AdamW. What passes need (activations; under fsdp the layers that are gathered) "
    "and models that are not trained come on top."
)


def counted(tree: Tree, count: int, *, workers: int | None = None, memory_bytes: int | None = None) -> Estimate:
    """For a script's own model, of which no more is known than how many parameters it trains: what stays, and an update."""
    if tree.job.program == OUR_TRAINER:
        raise shapes.ShapeError(
            f"--parameters is for a program of your own, and job.program is {OUR_TRAINER}: give it its model "
            "(model.path=FOLDER, or its name on the hub, of which config.json alone is read), so that all roles are reckoned."
        )
    world = _carriers(tree, workers) * tree.model.cp
    # Of a script's step this is known: each lane has one backward pass in an update. So has KTO's with a sample in each lane.
    update = Ppo(algorithm="kto", batch=tree.lanes.count, mini_batch=tree.lanes.count)
    tree = tree.model_copy(update={"ppo": update})
    own = _cut(count, tree.model.tp)
    role = Role(name="model", shape=shapes.UNKNOWN, count=own, trained=own, strategy=tree.model.strategy)
    found = Estimate(
        workers=world * tree.model.tp,
        device=tree.node.device if tree.node.device in RATES else "cuda",
        memory=tuple(_stays(tree, role, world)),
        transient=(),
        host=tuple(_vault(tree, [role], world)),
        wire=tuple(_wire(tree, [role], world)),
        budgets=(),
        micro_tokens=None,
        largest_micro_tokens=None,
        memory_limit=memory_bytes,
        notes=(_TOO, *_notes(tree)),
    )
    if memory_bytes is None:
        return found
    room = int(HEADROOM * memory_bytes) - found.fixed
    note = (
        f"{room:,} B of {memory_bytes:,} B are left for that, with {1 - HEADROOM:.0%} for allocator and libraries."
        if room > 0
        else f"what stays, {found.fixed:,} B, is over {HEADROOM:.0%} of {memory_bytes:,} B: "
        "use more workers, strategy: fsdp, or a smaller model."
    )
    return replace(found, notes=(*found.notes, note))


def _roles(tree: Tree, models: Mapping[str, Shape]) -> list[Role]:
    """The models that a worker has, or of those that a team shares its part."""
    ppo, model, actor = tree.ppo, tree.model, models["actor"]
    cuts = model.tp
    own = _cut(actor.count, cuts)
    adapters = actor.adapters(model.lora.rank, model.lora.targets, cuts=cuts) if model.lora.rank else 0
    trained = adapters or own
    value = actor.hidden + 1 if model.value_head == "tied" else 0
    place = tree.placement
    found = [
        Role(
            name="actor",
            shape=actor,
            count=own + adapters + value,
            trained=trained + value,
            cuts=cuts,
            strategy=place.actor.strategy or model.strategy,
            offload=_offloaded(tree, place.actor.offload),
        )
    ]
    if ppo.algorithm == "ppo" and not value:
        critic = models["critic"]
        count = _cut(critic.scorer, cuts)
        found.append(
            Role(
                name="critic",
                shape=critic,
                count=count,
                trained=count,
                head=False,
                cuts=cuts,
                strategy=place.critic.strategy or model.strategy,
                offload=_offloaded(tree, place.critic.offload),
            )
        )
    adapted = model.lora.rank and model.ref_path is None
    if "ref" in flow.of(ppo, tied=bool(value)) and not adapted and place.ref.where == "train":
        ref, offload = models["ref"], _offloaded(tree, place.ref.offload)
        found.append(Role(name="ref", shape=ref, count=_cut(ref.count, cuts), trained=0, cuts=cuts, offload=offload))
    if tree.reward.model is not None and "reward" in flow.of(ppo) and place.reward.where == "train":
        scorer, offload = models["reward"], _offloaded(tree, place.reward.offload)
        found.append(Role(name="reward", shape=scorer, count=scorer.reward, trained=0, head=False, offload=offload))
    return found


def _carriers(tree: Tree, workers: int | None) -> int:
    """What lanes are dealt to, of so many workers, else of the most that may train: as many workers, or teams."""
    most = (workers or tree.membership.max_nodes * tree.node.workers) // tree.model.team
    return max(1, min(most, tree.lanes.count))


def _check_divides(tree: Tree, actor: Shape) -> None:
    """ShapeError where a team could not share the model."""
    tp, cp = tree.model.tp, tree.model.cp
    counts = (
        ("num_attention_heads", actor.heads, tp * cp, "model.tp x model.cp" if cp > 1 else "model.tp"),
        ("num_key_value_heads", actor.kv_heads, tp, "model.tp"),
        ("the number of experts", actor.experts, tp, "model.tp"),
    )
    for what, count, size, keys in counts:
        if count % size:
            raise shapes.ShapeError(f"{keys} is {size}, and does not divide {what}, which is {count}: set another one.")


def _cut(count: int, cuts: int) -> int:
    """What one member of a team has of so many parameters."""
    return -(-count // cuts)


def _notes(tree: Tree) -> tuple[str, ...]:
    """What the table does not say."""
    tp, cp = tree.model.tp, tree.model.cp
    said, part = [], tree.ppo.part(tree.lanes.count)
    if tree.job.program == OUR_TRAINER and part < tree.ppo.group:
        said.append(
            f"A group of {tree.ppo.group} samples lies in {tree.ppo.group // part} lanes, {part} in each (ppo.group, "
            "lanes.count): the workers tell each other their scores."
        )
    if tp > 1:
        said.append(
            f"A model is cut up between {tp} workers (model.tp): P and T are one worker's (of a reward model all), W counts "
            "models. What each has whole, such as norms and routers, comes on top. Seconds are those of one worker that has it "
            "all, so upper bounds. The collectives inside of a layer are not in the bytes."
        )
    if cp > 1:
        said.append(
            f"{cp} members share tokens (model.cp): activations of layers, head and logits are a member's. "
            "Seconds are those of one worker that computes all, so upper bounds. The exchanges around attention are not in the "
            "bytes."
        )
    if tree.node.device == "cpu" and tree.model.strategy == "replicated":
        # With 20 million parameters on two workers: 0.88 GB before the first step and 1.0 GB in it, of which 0.52 GB stay.
        said.append(
            "On CPUs all that stays is in use before the first step begins: it is allocated while the state is restored. "
            "Python, torch and their threads take about 0.4 GB more in each process."
        )
    if tree.agent.load_ahead:
        spares = max(tree.node.workers, tree.agent.spares)
        said.append(
            f"Each of a node's {spares} spare processes holds what the program loads before it needs its rank "
            "(agent.load_ahead), in the host's memory. That is not in the table."
        )
    return tuple(said)


def _offloaded(tree: Tree, offload: str) -> bool:
    """On CPUs everything is in the host's memory as it is."""
    return offload == "cpu" and tree.node.device != "cpu"


# ---- memory


def _stays(tree: Tree, role: Role, world: int) -> list[Line]:
    """What a role holds on each worker for the whole step, each with the formula that it comes from."""

    def line(what: str, size: float, formula: str) -> Line:
        return Line(role=role.name, what=what, bytes=int(size), formula=formula)

    p, t, w = role.count, role.trained, world
    if role.strategy is None:
        narrow = tree.model.dtype == "bfloat16"
        # What a reference keeps wide all the same.
        wide = _cut(role.shape.count - role.shape.matrices, role.cuts) if role.name == "ref" else 0
        size = 2 * p + (WIDE - 2) * wide if narrow else WIDE * p
        each = size / p
        placement = {"ref": tree.placement.ref, "reward": tree.placement.reward}[role.name]
        if placement.strategy == "fsdp":
            part = p / w + role.shape.ends + role.shape.layer
            return [
                line(
                    "weights",
                    each * part,
                    f"{each:.3g} B x (P {p:,} / W {w} + what is around the layers and one layer)",
                )
            ]
        return [
            line(
                "weights",
                size,
                f"{each:.3g} B x P {p:,} ({'frozen, whole on each worker' if role.cuts == 1 else 'frozen'})",
            )
        ]
    optimizer = [] if role.offload else [_optimizer(role, world)]
    own = int(not role.offload)  # the gradient that the optimizer reads lies where it does
    rows, arrivals = _rows(tree, role, world)
    if role.strategy == "replicated":
        parts = own + (arrivals if w > 1 else 0)
        grads = WIDE * t * rows + WIDE * t / w * parts
        return [
            line("weights", WIDE * p, f"4 B x P {p:,}"),
            line("gradients", grads, f"4 B x T {t:,} x {rows} partial sums + 4 B x T / W {w} x {parts}"),
            *optimizer,
        ]
    if role.strategy == "fsdp":
        unit = _cut(role.shape.ends + 2 * role.shape.layer, role.cuts)
        of_layers, of_these = (f" + the root and two layers {unit:,}", f" + {unit:,}") if unit else ("", "")
        return [
            line("weights", WIDE * (p / w + unit), f"4 B x (P {p:,} / W {w}{of_layers})"),
            line("gradients", WIDE * (t / w * (own + rows) + unit), f"4 B x (T / W x {own + rows}{of_these})"),
            *optimizer,
        ]
    stage = tree.model.zero_stage
    split = {1: (1, 1), 2: (1, w), 3: (w, w)}[stage]
    weights = line("weights", WIDE * p / split[0], f"4 B x P {p:,} / {split[0]} (ZeRO {stage})")
    if role.offload:
        return [weights, line("gradients", WIDE * t / split[1], f"4 B x T {t:,} / {split[1]}")]
    return [
        weights,
        line("gradients", WIDE * (t / split[1] + t / w), f"4 B x (T {t:,} / {split[1]} + T / W {w})"),
        _masters(role, w),
        *optimizer,
    ]


def _optimizer(role: Role, world: int) -> Line:
    states = VERSIONS * ADAM * WIDE * role.trained / world
    formula = f"{VERSIONS} versions x {ADAM} rows x 4 B x T {role.trained:,} / W {world}"
    return Line(role=role.name, what="optimizer", bytes=int(states), formula=formula)


def _masters(role: Role, world: int) -> Line:
    return Line(role=role.name, what="masters", bytes=int(WIDE * role.trained / world), formula=f"4 B x T / W {world}")


def _comes(roles: list[Role], line: Line) -> bool:
    """Whether this is on the device in its own stage alone. All that is trained is there in an update, offloaded or not."""
    return any(role.name == line.role and role.offload and role.strategy is None for role in roles)


def _waits(tree: Tree, role: Role, world: int) -> list[Line]:
    """What of a role the host keeps: its optimizer with the gradient that it reads, and the weights while they are idle."""
    if not role.offload:
        return []
    found = []
    if role.strategy is not None:
        gradient = int(WIDE * role.trained / world)
        found += [
            _optimizer(role, world),
            Line(role=role.name, what="gradient", bytes=gradient, formula=f"4 B x T {role.trained:,} / W {world}"),
        ]
    if role.strategy == "deepspeed":  # which keeps its weights on the device
        return [*found, _masters(role, world)]
    [weights] = [line for line in _stays(tree, role, world) if line.what == "weights"]
    return [*found, replace(weights, what="weights, idle")]


def _rows(tree: Tree, role: Role, world: int) -> tuple[int, int]:
    """(rows of gradients that the worker with most lanes keeps at once, subtrees that arrive at each worker)."""
    if role.strategy == "fsdp":
        parts = _parts(tree)
        fold, most = Fold[None](tree.lanes.count * parts * tree.model.cp, lambda _a, _b: None), 1
        lanes = fold.leaves // tree.model.cp
        for leaf in (member * lanes + lane for lane in range(lanes) for member in range(tree.model.cp)):
            fold.put(Node(leaf, leaf + 1), None)
            most = max(most, len(fold.parts))
        return most, 0
    deal = _leaves(tree, world)
    most = 1
    for mine in deal.carried:
        fold = Fold[None](deal.lanes, lambda _a, _b: None)
        for leaf in mine:
            node, _ = fold.take(leaf)  # its sibling's row is the one that it is added to
            most = max(most, len(fold.parts) + 1)
            fold.put(node, None)
    return most, sum(len(deal.subtrees(rank)) for rank in range(world))


def _passing(tree: Tree, roles: list[Role], micro: int) -> list[Line]:
    """What a backward pass of so many tokens keeps, role by role: never two at a time. Its samples may be nearly all answer."""
    size = 2 if tree.model.dtype == "bfloat16" else WIDE
    rows, passes = tree.ppo.mini_batch // tree.lanes.count, _sizes(tree)
    tokens, answers = min(micro, rows * passes.sample), min(micro, rows * passes.answer)
    found = []
    for role in roles:
        if role.strategy is None:
            continue
        kept = role.shape.saved(
            tokens, answers if role.head else 0, checkpointing=tree.model.gradient_checkpointing, sharers=tree.model.cp,
            cuts=tree.model.tp,
        )  # fmt: skip
        # Beside the logits that are kept: their gradient, and three of their size while the entropy is made. In float32. A
        # member of a team has its columns, at its places. By parts no logits are kept.
        mine = role.shape.logits(-(-answers // tree.model.cp)) // tree.model.tp
        parts = role.head and tree.model.team == 1 and 0 < sizes.most_logits(tree.ppo) < mine
        if parts:
            kept, mine = kept - mine, sizes.most_logits(tree.ppo)
        more = 4 * mine if role.head else 0
        logits = f" + 4 B x 4 x logits {mine:,}" if role.head else ""
        narrow = _narrowed(tree, role, head=role.head and not parts)
        copies = f" + 2 B x weights {narrow:,}, as narrowed for products" if narrow else ""
        found.append(
            Line(
                role=role.name,
                what="activations",
                bytes=size * kept + WIDE * more + 2 * narrow,
                formula=f"{size} B x {kept:,} numbers of {tokens:,} tokens (micro_tokens){logits}{copies}",
            )
        )
    return found


def _narrowed(tree: Tree, role: Role, *, head: bool) -> int:
    """Weights of which a pass in bfloat16 makes copies that its backward pass reads. With checkpointing one layer at a time has
    them.
    """
    if tree.model.dtype != "bfloat16":
        return 0
    shape = role.shape
    layers = (1 if tree.model.gradient_checkpointing else shape.layers) * sum(it.count for it in shape.linears)
    return _cut(layers + (shape.words * shape.hidden if head else 0), role.cuts)


def _rooted(role: Role, world: int) -> list[Line]:
    """What FSDP2 puts together it has twice for a moment: as it came, and where it is copied to. For layers `_stays` has room.
    As the root is put together, before a pass, no layer is there, so this counts where that is larger than two of them.
    """
    more = _cut(role.shape.ends - 2 * role.shape.layer, role.cuts)
    if role.strategy != "fsdp" or world == 1 or more <= 0:
        return []
    formula = f"4 B x (what is around the layers {_cut(role.shape.ends, role.cuts):,} - two layers)"
    return [Line(role=role.name, what="the root once more", bytes=WIDE * more, formula=formula)]


def _cache(tree: Tree, actor: Shape, engine: str) -> list[Line]:
    """Of our own engine, wherever that runs."""
    if "rollout" not in flow.of(tree.ppo) or tree.rollout.engine != engine:
        return []
    rows = max(rows_at_once(tree), 8)
    tokens = sum(sizes.asked(tree))
    cached = actor.cached // (tree.model.tp if engine == "torch" else 1)  # each member of a team has its own heads
    size = WIDE * rows * tokens * cached * (1 + 1 / actor.layers)
    formula = (
        f"4 B x {rows} rows x {tokens} tokens x {cached:,} x (1 + 1 / {actor.layers} layers: one is copied to grow)"
    )
    what = "KV cache"
    if engine == "torch" and _sharded(tree) and tree.rollout.gather:
        own = _cut(actor.count, tree.model.tp)
        size += WIDE * own
        what, formula = "KV cache and weights", f"{formula} + 4 B x P {own:,} (rollout.gather)"
    return [Line(role="rollout", what=what, bytes=int(size), formula=formula)]


def _sharded(tree: Tree) -> bool:
    """Whether FSDP cuts up what generates."""
    return (tree.placement.actor.strategy or tree.model.strategy) == "fsdp"


def _engine(tree: Tree, actor: Shape, memory_bytes: int | None) -> tuple[list[Line], list[Line], tuple[str, ...]]:
    """(what an engine beside the worker takes of its device for good, what its weights take of the host on their way, notes).

    It is one process for a node, on the device of the first worker: the one that needs most.
    """
    if "rollout" not in flow.of(tree.ppo) or tree.rollout.engine == "torch":
        return [], [], ()

    def line(what: str, size: float, formula: str) -> Line:
        return Line(role="rollout", what=what, bytes=int(size), formula=formula)

    p, wide, vllm = actor.count, _sent_wide(tree), tree.rollout.vllm
    whose = "by rank 0's node alone" if tree.rollout.nodes else "once on a node"
    file = [line("file of weights", wide * p, f"{wide} B x P {p:,}, {whose}")]
    if tree.rollout.nodes:
        return [], file, ()
    if tree.rollout.engine == "server":  # its own memory is its operator's affair
        file.append(line("checkpoint for the server", wide * p, f"{wide} B x P {p:,}, while it takes the weights"))
        return [], file, ()
    if tree.rollout.engine == "served":
        # What its process has freed it keeps for itself: the cache is nobody else's between rollouts.
        return [line("engine's weights", WIDE * p, f"4 B x P {p:,}"), *_cache(tree, actor, "served")], file, ()
    ways = vllm.tensor_parallel
    weights = line("engine's weights", wide * p / ways, f"{wide} B x P {p:,} / tensor_parallel {ways}")
    if vllm.kv_cache_bytes is not None:
        return [weights, line("KV cache", vllm.kv_cache_bytes, "rollout.vllm.kv_cache")], file, ()
    share = vllm.gpu_memory_utilization
    if memory_bytes is not None:
        formula = (
            f"gpu_memory_utilization {share:g} x {memory_bytes:,} B: its weights, its KV cache, and what it computes in"
        )
        return [line("vllm", share * memory_bytes, formula)], file, ()
    note = f"vLLM fills {share:.0%} of the device (gpu_memory_utilization), of which the weights alone are in these figures: "
    return [weights], file, (note + "give --memory, or set rollout.vllm.kv_cache.",)


def _begun(tree: Tree, actor: Role, world: int) -> list[Line]:
    """The weights that a longer period began with."""
    if "rollout" not in flow.of(tree.ppo) or tree.rollout.engine == "torch" or tree.rollout.staleness < 2:
        return []
    sent, cut = actor.trained if tree.model.lora.rank else actor.count, world if _sharded(tree) else 1
    formula = f"4 B x {sent:,} parameters that the engine gets" + (f" / W {world}" if cut > 1 else "")
    return [Line(role="rollout", what="weights of the period", bytes=WIDE * sent // cut, formula=formula)]


def _vault(tree: Tree, roles: list[Role], world: int) -> list[Line]:
    found = []
    for role in roles:
        if role.strategy is not None:
            number = SAVED_FILES + VAULT_FILES * (1 + tree.vault.copies)
            size = ADAM * WIDE * role.trained / world * number
            files = f"({VAULT_FILES} files x (own + {tree.vault.copies} copies) + {SAVED_FILES} that is saved)"
            formula = f"{ADAM} rows x 4 B x T {role.trained:,} / W {world} x {files}"
            found.append(Line(role=role.name, what="vault", bytes=int(size), formula=formula))
    return found


# ---- the wire


def updates(tree: Tree) -> int:
    """Updates of a step."""
    return tree.ppo.batch // tree.ppo.mini_batch * tree.ppo.epochs


def _parts(tree: Tree) -> int:
    """Leaves of a lane in the tree of sums."""
    return sizes.parts_of(tree.ppo, tree.lanes.count, _sizes(tree))


def _sizes(tree: Tree) -> Sizes:
    prompt, answer = tree.data.max_prompt, tree.rollout.max_tokens
    return sizes.of(tree.ppo, prompt=prompt, answer=answer, device=tree.node.device)


def _wire(tree: Tree, roles: list[Role], world: int) -> list[Line]:
    """What the worker that sends most sends to others in a step."""
    found, u = [], updates(tree)
    for role in roles:
        t = role.trained
        if role.strategy is None or (world == 1 and role.strategy != "replicated"):
            continue
        if role.strategy == "replicated":
            trees = max(len(_leaves(tree, world).subtrees(rank)) for rank in range(world))
            size = u * trees * WIDE * t * (world - 1) / world
            formula = f"{u} updates x {trees} subtrees x 4 B x T {t:,} x (W - 1) / W"
            found.append(Line(role=role.name, what="all_to_all", bytes=int(size), formula=formula))
            formula = f"{u} updates x 4 B x T {t:,} x (W - 1) / W"
            found.append(
                Line(role=role.name, what="all_gather", bytes=int(u * WIDE * t * (world - 1) / world), formula=formula)
            )
        else:
            passes = (
                -(-tree.lanes.count * tree.model.cp // world)
                * _sizes(tree).passes(tree.ppo.mini_batch // tree.lanes.count)
                * u
            )
            # ZeRO 1 reduces once an update, and neither it nor ZeRO 2 gathers for a pass.
            stage, what = (tree.model.zero_stage, "reduce") if role.strategy == "deepspeed" else (3, "all_to_all")
            times = f"{u} updates" if stage == 1 else f"{passes} passes"
            size = (u if stage == 1 else passes) * WIDE * t * (world - 1) / world
            formula = f"{times} x 4 B x T {t:,} x (W - 1) / W"
            found.append(Line(role=role.name, what=what, bytes=int(size), formula=formula))
            times = f"{passes} passes x 2 (forward, backward)" if stage == 3 else f"{u} updates"
            weights, said = WIDE * role.count, f"4 B x P {role.count:,}"
            if narrow := _narrow(tree, role):
                weights, said = weights - (WIDE - 2) * narrow, f"({said} - 2 B x matrices {narrow:,})"
            gathered = int((2 * passes if stage == 3 else u) * weights * (world - 1) / world)
            formula = f"{times} x {said} x (W - 1) / W"
            found.append(Line(role=role.name, what="all_gather", bytes=gathered, formula=formula))
        if tree.vault.copies and world > 1:
            kept = u + (1 if "reward" in flow.of(tree.ppo) else 0)
            size = kept * tree.vault.copies * ADAM * WIDE * t / world
            formula = f"{kept} states x {tree.vault.copies} copies x {ADAM} rows x 4 B x T {t:,} / W {world}"
            found.append(Line(role=role.name, what="vault copies", bytes=int(size), formula=formula))
    if nodes := _rollout_nodes(tree):
        actor = next(role for role in roles if role.name == "actor")
        size = _sent_wide(tree)
        formula = f"{nodes} rollout nodes x {size} B x P {actor.count:,}, by rank 0's worker alone"
        found.append(Line(role="actor", what="weights", bytes=nodes * size * actor.count, formula=formula))
    return found


def _narrow(tree: Tree, role: Role) -> int:
    """Weights that are sent in bfloat16 to be put together (`runtime.narrowed`)."""
    if role.strategy != "fsdp" or tree.model.dtype != "bfloat16" or tree.model.tp > 1:
        return 0
    shape = role.shape
    return shape.matrices - (0 if role.head or shape.tied else shape.words * shape.hidden)


def _rollout_nodes(tree: Tree) -> int:
    """How many engines elsewhere are fed."""
    return tree.rollout.nodes if "rollout" in flow.of(tree.ppo) else 0


def _sent_wide(tree: Tree) -> int:
    """Bytes of a weight on its way to an engine."""
    return 2 if tree.rollout.foreign and tree.model.dtype == "bfloat16" else WIDE


def _leaves(tree: Tree, world: int) -> Deal:
    """The leaves of the tree of sums, each a backward pass, as `replicated` deals them."""
    members = tree.model.cp
    return Deal.contiguous(tree.lanes.count, world // members).leaves(_parts(tree)).shared(members)


# ---- seconds


def _budgets(tree: Tree, roles: list[Role], world: int, rate: Rate) -> list[Budget]:
    """For the worker with most lanes. Budgets are learned in the run: these cap them until then."""
    ppo, times = tree.ppo, tree.timeouts
    shape = {role.name: role.shape for role in roles}
    lanes = -(-tree.lanes.count * tree.model.cp // world)
    rows = ppo.generated // tree.lanes.count
    prompt, answer = tree.data.max_prompt, tree.rollout.max_tokens
    length, samples = prompt + answer, lanes * rows
    tokens = samples * length

    def forward(name: str) -> float:
        return shape[name].flops(tokens, length) / rate.flops

    actor = shape["actor"]
    trained = [role for role in roles if role.strategy is not None]
    names = " and ".join(role.name for role in trained)
    each = max(actor.flops(rows, length) / rate.flops, WIDE * actor.count / rate.bytes)
    token = f"max(flops of {rows} rows / {rate.flops:g}, weights / {rate.bytes:g} B/s)"
    again = PASSES + tree.model.gradient_checkpointing
    moved = sum(ADAM * VERSIONS * WIDE * role.trained / world for role in trained)
    one_pass = f"forward flops of {tokens:,} tokens / {rate.flops:g}"
    wide, said = sizes.asked(tree)
    turns = 1 if tree.environment.function is None else tree.environment.turns
    of_turns = "" if turns == 1 else f"{turns} turns x "
    seconds: dict[str, tuple[float, str]] = {
        "rollout": (
            turns * (actor.flops(samples * wide, wide) / rate.flops + lanes * said * each),
            f"{of_turns}prompts' flops / {rate.flops:g} + {of_turns}{lanes} lanes x {said} tokens x {token}",
        ),
        "logprobs": (forward("actor"), one_pass),
        "ref": (forward("ref" if "ref" in shape else "actor"), one_pass),
        "update": (
            ppo.epochs * again * sum(forward(role.name) for role in trained) + updates(tree) * moved / rate.bytes,
            f"{ppo.epochs} epochs x {again} x {names}'s {one_pass} + {updates(tree)} updates x optimizer / {rate.bytes:g} B/s",
        ),
        "baseline": (2 * forward("actor"), f"2 x {one_pass}"),
        "advantage": (0.0, "a few numbers for each token"),
        "sync": (0.0, "nothing is moved: the engine has the trainer's weights"),
        "reward": (0.0, "the function's own time"),
    }
    if tree.rollout.engine == "torch" and _sharded(tree):
        took, formula = seconds["rollout"]
        often, why = (
            (lanes, f"{lanes} lanes") if tree.rollout.gather else (lanes * answer, f"{lanes} lanes x {answer} tokens")
        )
        gathered = f"{why} x 4 B x P {actor.count:,} / {NETWORK:g} B/s"
        seconds["rollout"] = (took + often * WIDE * actor.count / NETWORK, f"{formula} + {gathered}")
    if "critic" in shape:
        seconds["values"] = (forward("critic"), one_pass)
    if "reward" in shape:
        seconds["reward"] = (forward("reward"), one_pass)
    elif tree.reward.urls:
        tries = tree.reward.retries + 1
        seconds["reward"] = (tree.reward.timeout_s * tries, f"reward.timeout x {tries} tries")
    size = _sent_wide(tree)
    if tree.rollout.engine != "torch":
        formula = f"written and read: 2 x {size} B x P {actor.count:,} / {rate.bytes:g} B/s"
        seconds["sync"] = (2 * size * actor.count / rate.bytes, formula)
    if nodes := _rollout_nodes(tree):
        formula = f"{nodes} rollout nodes x {size} B x P {actor.count:,} / {NETWORK:g} B/s"
        seconds["sync"] = (nodes * size * actor.count / NETWORK, formula)
    caps = times.phase.caps()
    found = []
    for phase in flow.of(ppo, tied=tree.model.value_head == "tied").phases:
        took, formula = seconds[phase]
        suggested = max(times.floor_s, times.slack * took)
        cap = caps.get(phase) or times.default_phase_s
        found.append(Budget(phase=phase, seconds=took, suggested_s=suggested, cap_s=cap, formula=formula))
    return found


def _noted(found: Estimate) -> Estimate:
    """What an operator should do about it."""
    notes = [
        f"timeouts.phase.{budget.phase} is {budget.cap_s:g}s; {budget.suggested_s:.3g}s is suggested: raise it, or a healthy "
        "worker may be taken for a hung one."
        for budget in found.budgets
        if budget.cap_s < budget.suggested_s
    ]
    limit = found.memory_limit
    if limit is not None and found.peak > HEADROOM * limit:
        notes.append(
            f"the peak of {found.peak:,} B is over {HEADROOM:.0%} of {limit:,} B: "
            + (
                f"lower ppo.micro_tokens to {found.largest_micro_tokens}"
                if found.largest_micro_tokens
                else "no whole sample fits: use more workers, strategy: fsdp, gradient_checkpointing, or a smaller model"
            )
            + "."
        )
    elif found.micro_tokens and found.largest_micro_tokens and found.largest_micro_tokens > found.micro_tokens:
        notes.append(
            f"ppo.micro_tokens could be {found.largest_micro_tokens} in place of {found.micro_tokens}: fewer, larger passes. "
            "It is part of the shapes, so a change of it changes the bits."
        )
    return replace(found, notes=(*found.notes, *notes))
