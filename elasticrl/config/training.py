"""The sections that say what is trained: data, models, rewards, rollouts, and the algorithm.

They bind the trainer that comes with elasticrl (`job.program: elasticrl.ppo`); a script of one's own may ignore them.
Batch sizes are in samples of the whole job, never per worker: a world that shrinks changes nothing here.
"""

from math import gcd
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from elasticrl.config.section import (
    Amount,
    Bytes,
    Count,
    Function,
    Mapped,
    Names,
    Port,
    Portion,
    Positive,
    Seconds,
    Section,
    Share,
    Text,
    Url,
    Whole,
)
from elasticrl.config.units import MiB

_Fraction = Annotated[float, Ge(0), Lt(1)]
_Strategy = Literal["replicated", "fsdp", "deepspeed"]


class Kl(Section):
    """What holds the actor near the reference."""

    where: Literal["reward", "loss", "off"] = "reward"
    """reward: at each token of the reward; loss: as a term of the loss; off: nowhere, and no reference is loaded."""
    estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] | None = None
    """How it is estimated at each token. k1: the log ratio; k2: half its square; k3: ratio - 1 - log ratio; k1+ and k3+: that
    value with k2's gradient, which is the divergence's, for the loss. null: k1 in the reward, k3 in the loss."""
    coef: Amount = 0.05
    """A factor. More stays nearer to the reference; less learns faster and drifts."""
    target: Positive | None = None
    """Nats that an adaptive coefficient steers to. null: the coefficient stays fixed."""
    per: Literal["sample", "token"] = "sample"
    """What the target's nats are of: sample: of a whole answer, as in TRL; token: of a token of it, on average, as in verl and
    OpenRLHF."""
    horizon: Count = 10000
    """Samples over which an adaptive coefficient moves. More moves slower."""
    limit: Positive = 10.0
    """Nats. k3 is clamped to this at each token. More lets outliers pull harder."""


class Spike(Section):
    """What happens to an update whose gradient's norm or loss is far above those of the updates before."""

    does: Literal["off", "warn", "skip", "stop"] = "off"
    """off: nothing is looked at; warn: it is applied, and the step's report names it; skip: all workers leave it out, its
    samples count as used, and the ledger says so; stop: it ends the job, and nothing of it is applied."""
    sigma: Positive = 6.0
    """Standard deviations above the mean of the last window updates. Less finds more."""
    window: Annotated[int, Ge(4), Le(4096)] = 128
    """Mean and standard deviation are of so many updates. Of the spikes of a step only the first is one of them. Nothing is a
    spike until half of them were seen. More forgets slower. They are in each state that is kept."""
    in_a_row: Annotated[int, Ge(2)] = 8
    """With skip: spikes one after another in so many steps end the job. More waits longer."""


class Ppo(Section):
    """The algorithm and its optimizers."""

    algorithm: Literal[
        "ppo", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "dpo", "kto", "sft"
    ] = "ppo"
    """ppo: with a critic; grpo, rloo, opo, reinforce_plus_plus_baseline: advantages within groups of samples of one prompt;
    reinforce_plus_plus: returns, whitened over the batch; dpo, kto: from preferences, no rollout; sft: on given answers, no
    rollout. ALGORITHMS.md has their formulas."""
    batch: Count = 64
    """Samples of a step, of the whole job. More gives steadier gradients and longer steps."""
    gen_batch: Count | None = None
    """Samples generated in a step, of the whole job, of which filter_groups leaves batch at most. More fill the batch more
    often, at more rollout. null: as many as batch."""
    mini_batch: Count = 32
    """Samples of an update, of the whole job. Fewer make more updates from each batch, each further off-policy."""
    micro_tokens: Count = 4096
    """Tokens of a forward pass in a lane: as many samples as fit, by their real lengths. More is faster until memory runs out.
    Part of the shapes, so of the bits."""
    logits_mib: Whole = 256
    """Memory for the logits of a pass. Where a pass has more, log-probabilities are made part by part, and the head's products
    once more in backward: slower by about the head's forward pass, and GBs less at a vocabulary of 152,000. 0: always whole.
    Part of the bits."""
    epochs: Count = 1
    """Passes over each batch. More learn more from each sample, further off-policy."""
    group: Count = 1
    """Samples of each prompt. grpo, rloo, opo and reinforce_plus_plus_baseline compare them with each other and need 2 at
    least; more compare better, at more rollout."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What grpo divides advantages by. group: the standard deviation of the group's scores; batch: that of the batch's; none:
    nothing, as Dr.GRPO, which does not favour prompts that are almost always or almost never answered well."""
    lr: Positive = 1e-6
    """The actor's learning rate. More learns faster until it breaks."""
    critic_lr: Positive = 1e-5
    """The critic's learning rate. Usually above the actor's."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How learning rates go on after the warm-up; linear and cosine fall to 0 at job.steps."""
    warmup_steps: Whole = 0
    """Steps over which learning rates rise from 0. More starts gentler."""
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.999)
    """Adam's two decay rates. Nearer to 1 averages over more steps."""
    eps: Positive = 1e-8
    """Adam's epsilon. More damps the steps of parameters with small gradients."""
    weight_decay: Amount = 0.0
    """AdamW's decay. More pulls weights to 0."""
    max_grad_norm: Positive | None = 1.0
    """The norm that gradients are clipped to. Less tames spikes, at slower learning. null: not clipped."""
    not_finite: Literal["stop", "skip"] = "stop"
    """What an update does whose loss or gradient is NaN or infinite. stop: it ends the job, and nothing of it is applied; skip:
    all workers leave it out, its samples count as used, and the ledger and the step's metric `skipped` say so."""
    spike: Spike = Spike()
    gamma: Share = 1.0
    """The discount per token. Less looks less far ahead."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """GAE's lambda. Less trusts the critic more: less variance, more bias."""
    whiten: bool = True
    """true scales advantages over the whole batch to mean 0, variance 1; false keeps the reward's scale. Of ppo and the two
    reinforce_plus_plus; grpo and rloo are not whitened."""
    loss_mode: Literal["vanilla", "gspo", "geo_mean", "cispo", "sapo"] = "vanilla"
    """The policy's loss. vanilla: PPO's clip of each token's ratio; gspo: of the whole sample's; geo_mean: GMPO, which
    clips each token's before it takes the whole sample's; cispo: the clipped ratio as a constant weight, so that no token loses
    its gradient; sapo: a soft gate (tau_pos, tau_neg) in place of a clip."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How the actor's loss is averaged over an update. token-mean: over all tokens; the others: over samples, of which each
    counts as the mean of its tokens, as their sum, or (norm) as their sum over rollout.max_tokens, as Dr.GRPO."""
    clip_low: Annotated[float, Gt(0), Le(1)] = 0.2
    """The ratio is clipped at 1 - this. Less moves the policy less for one update. gspo: 0.0003, as its ratio is a sample's."""
    clip_high: Positive = 0.2
    """The ratio is clipped at 1 + this. More than clip_low explores more, as DAPO's 0.28. gspo: 0.0004; cispo: 4."""
    tau_pos: Positive = 1.0
    """sapo's temperature where the advantage is positive. More fades sooner as the ratio leaves 1."""
    tau_neg: Positive = 1.05
    """sapo's temperature where it is not. More fades sooner."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """A factor: the loss of a negative advantage is bounded at this many times it. Less is more cautious. null: off."""
    log_ratio_limit: Positive = 20.0
    """The log of the ratio is clamped to this either way, so that one token cannot overflow. Less biases outliers."""
    importance_limit: Positive | None = None
    """The most that a token's weight may be, which is trainer's over rollout's probability. Less corrects less, at less
    variance. null: no correction."""
    importance_floor: Amount = 0.0
    """The least that it may be. More corrects less, at less variance."""
    importance_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """What happens to a weight beyond that: truncate cuts it off there; mask leaves the token out (token_mask with 0.5 and 5 is
    IcePop). sequence takes one weight for all of an answer, its tokens' product."""
    value_clip: Positive | None = 0.2
    """New values are kept within this of the old in the loss. Less is steadier and slower. null: off."""
    value_coef: Positive = 0.5
    """The weight of the value loss where actor and critic share a model (model.value_head: tied)."""
    entropy_coef: Amount = 0.0
    """The weight of the entropy bonus. More keeps answers more varied."""
    calculate_entropy: bool = True
    """true: the step's metric `entropy` is there without a bonus too; false: it is not made where no loss needs it, which saves
    a look at all logits of an update. Changes no bit."""
    router_aux_coef: Amount = 0.0
    """The weight of a mixture's auxiliary loss: how unevenly the tokens of a pass use its experts. More spreads tokens more
    evenly. Models are trained with about 0.001. 0: off."""
    missing_eos_penalty: Amount = 0.0
    """Taken from the score of a sample that did not end by itself. More teaches to end in time."""
    filter_groups: bool = False
    """true leaves groups whose scores are all alike out of the updates, and out of the counts that losses are divided by, as
    DAPO does. gen_batch draws others in their place."""
    mask_truncated: bool = False
    """true leaves samples that did not end by themselves out of the updates, and out of those counts. Their scores still count
    in their groups."""
    overlong_buffer: Whole = 0
    """DAPO's overlong shaping: the last so many tokens of rollout.max_tokens cost a rising part of overlong_penalty. More warns
    earlier. 0: off."""
    overlong_penalty: Amount = 1.0
    """What an answer of rollout.max_tokens loses with an overlong_buffer. More teaches to be brief."""
    preference_loss: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    """dpo's loss. sigmoid: DPO's; hinge: flat beyond a margin; ipo: a squared distance from a margin, of means over tokens;
    simpo: of mean log-probabilities, without a reference."""
    preference_beta: Positive = 0.1
    """dpo's and kto's beta. More stays nearer to the reference. simpo: 2 and more."""
    simpo_gamma: Amount = 0.5
    """simpo's margin: how much better the chosen answer must be. More pulls further."""
    desirable_weight: Positive = 1.0
    """kto's weight of good answers. Weight x number should be about the same for good and bad ones."""
    undesirable_weight: Positive = 1.0
    """kto's weight of bad answers. More avoids them harder."""
    kl: Kl = Kl()

    @property
    def generated(self) -> int:
        """Samples generated in a step."""
        return self.gen_batch or self.batch

    def part(self, lanes: int) -> int:
        """Samples of a group in one lane: the whole group where it fits, else the largest part that groups and lanes are made
        of.

        >>> Ppo(batch=512, group=16).part(32), Ppo(batch=512, group=16).part(512), Ppo(batch=768, group=16).part(64)
        (16, 1, 4)
        """
        return gcd(self.group, self.batch // lanes)


class Lora(Section):
    """Training small adapters instead of all weights."""

    rank: Whole = 0
    """The adapters' rank; needs elasticrl[lora]. More learns more, at more memory. 0: no adapters, all weights are trained."""
    alpha: Positive = 16.0
    """The adapters' scale is this over the rank. More lets them weigh more."""
    dropout: _Fraction = 0.0
    """The share of their inputs dropped. More regularises."""
    targets: tuple[Text, ...] = ()
    """Names of the modules that get adapters. None: every linear layer."""


class Model(Section):
    """The models of all roles, and how they are sharded unless placement says otherwise."""

    path: Text | None = None
    """The actor: a folder, or a name on the Hugging Face hub."""
    critic_path: Text | None = None
    """The critic's start. null: model.path with a fresh value head. A trained reward model starts better."""
    ref_path: Text | None = None
    """The reference. null: the actor as it was at the start."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type to compute in. bfloat16 is faster and half the memory, at less precision; master weights stay float32."""
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    """The attention implementation. Faster ones need their hardware; a change of it changes the bits. flash_attention_2 knows
    bfloat16 alone, so it wants dtype: bfloat16, and rollout.engine: vllm where answers are generated."""
    gradient_checkpointing: bool = False
    """true computes activations again in backward: less memory, about a third more work."""
    value_head: Literal["separate", "tied"] = "separate"
    """separate: the critic is a model of its own; tied: a head on the actor, at half the memory, with the two losses
    pulling at one body."""
    strategy: _Strategy = "replicated"
    """replicated: parameters on each worker, optimizer sharded; fsdp: all sharded, less memory and more traffic; deepspeed:
    ZeRO, close in floats but not exact: every sample is used exactly once, sums are taken in DeepSpeed's order."""
    zero_stage: Annotated[int, Ge(1), Le(3)] = 2
    """deepspeed's ZeRO stage. Higher shards more: less memory, more traffic."""
    tp: Count = 1
    """Workers of a node that share one copy of the model (tensor parallel; experts are dealt to them whole: expert parallel).
    More fit a larger model, at a collective in each layer. Bits depend on it as on lanes.count."""
    cp: Count = 1
    """Workers, or groups of tp of them, of a node that share the tokens of a sequence (context parallel). Longer sequences fit,
    at two exchanges in each layer. Bits depend on it as on lanes.count."""
    lora: Lora = Lora()

    @property
    def team(self) -> int:
        """Workers of a node that carry lanes together."""
        return self.tp * self.cp


class TrainedPlacement(Section):
    """How a trained role is sharded. It lives on every training node."""

    strategy: _Strategy | None = None
    """How it is sharded, as model.strategy. null: as model.strategy says."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: the optimizer lives in host memory, and the weights wait there while the role is idle. Frees GPU memory, costs
    copying and slower updates."""


class FrozenPlacement(Section):
    """Where a role that only computes lives, and how it is sharded."""

    strategy: Literal["replicated", "fsdp"] = "replicated"
    """replicated: whole on each worker; fsdp: its layers sharded over them, less memory and more traffic. Same bits."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: the weights wait in host memory while the role is idle. Frees GPU memory, costs copying."""
    where: Literal["train", "rollout"] = "train"
    """train: on every training node, beside the others. rollout: on the nodes with node.role rollout, whose engines answer for
    it; trainers keep no copy."""


class Placement(Section):
    """Where each role lives."""

    actor: TrainedPlacement = TrainedPlacement()
    critic: TrainedPlacement = TrainedPlacement()
    ref: FrozenPlacement = FrozenPlacement()
    reward: FrozenPlacement = FrozenPlacement()


class Reward(Section):
    """What scores a sample: exactly one of function, model and url; or several parts, with or without a model beside them."""

    function: Function | None = None
    """A Python function as module:function, called with a batch of samples in the worker."""
    model: Text | None = None
    """A reward model: a folder, or a name on the Hugging Face hub."""
    url: Url | None = None
    """An HTTP endpoint that takes a batch of samples as JSON. Its answers are recorded, so that a replay uses the same."""
    parts: Mapped = Names()
    """Several rewards, each a name with its function (module:function) or its endpoint (http://...). A score is the sum of
    theirs, each times its weight. With model that is a part too, called model. Endpoints are asked at once. Each part's mean is
    among a step's metrics (reward/NAME)."""
    weights: Mapped = Names()
    """The weight of each part, by its name. A part that is not named weighs 1."""
    timeout_s: Seconds = 10.0
    """Seconds for one request to the endpoint. More suits a slow scorer; less notices a dead one sooner."""
    retries: Whole = 3
    """Further requests after one that took all its time. What fails at once (503, nobody there) is asked again, within the
    phase's budget, however often."""
    at_once: Count = 4
    """Requests that a worker has under way at the endpoint; each asks for one lane's answers. More is faster where the endpoint
    serves several at once; 1 asks one after the other."""

    @property
    def asked(self) -> bool:
        """Something scores."""
        return bool(self.function or self.model or self.url or self.parts)

    @property
    def urls(self) -> tuple[str, ...]:
        """All endpoints."""
        return (
            *([self.url] if self.url else ()),
            *(it for it in self.parts.values() if it.startswith(("http://", "https://"))),
        )


class Environment(Section):
    """What answers the policy's messages, where a sample has several turns: tools, a game, a user."""

    function: Function | None = None
    """A Python class, or a function without arguments, as module:name, that makes the environment of one sample. Its replies
    are recorded before they are used, so that a replay uses the same. null: a sample is one answer."""
    turns: Count = 8
    """Messages of a sample at most. More allows longer episodes; the tokens of all turns together are rollout.max_tokens."""
    turn_tokens: Count | None = None
    """Tokens of one message at most. Fewer leave room for later turns. null: as many as there is room for."""
    timeout_s: Seconds = 30.0
    """Seconds for one call. More suits slow tools; less notices a dead one sooner."""
    retries: Whole = 3
    """Further tries after a call that failed by its connection, its time or its server, which is never a reward. More ride out
    longer outages."""
    trouble: Literal["mask", "hold"] = "mask"
    """What becomes of a sample whose call failed in all its tries. mask: nothing of it is trained on, and it is counted
    (`lost`). hold: it is tried until the rollout's budget is over, and then its worker fails."""
    may_lose: Portion = 0.25
    """The share of a step's samples that may be lost. More rides out longer outages, on fewer samples. If more are lost, the
    workers fail, and the turn is asked again."""
    at_once: Count = 16
    """Calls that a worker has under way. More is faster where the tools serve several at once."""


class Vllm(Section):
    """What is passed on to vLLM."""

    gpu_memory_utilization: Share = 0.5
    """The share of GPU memory for the engine. More holds more samples at once; what trains beside it needs the rest."""
    kv_cache_bytes: Bytes | None = None
    """Bytes of the KV cache, in place of the share; on CPUs the share means host memory. null: by the share."""
    tensor_parallel: Count = 1
    """Workers that one engine spans. More fits larger models, at more traffic for each token."""
    max_num_seqs: Count = 256
    """Sequences generated at once. More is faster until the cache is full."""
    chunked_prefill: bool = True
    """true mixes prompts and generation in one batch: steadier, a little slower for short prompts."""
    prefix_caching: bool = True
    """true keeps prompts' caches between samples of one group; needs memory."""
    batch_invariant: bool = False
    """true gives the same bits whatever else is in the batch, slower, on hardware that can; false leaves it to vLLM."""


class Server(Section):
    """A server of your own that generates: vLLM's or SGLang's, one on each machine that generates."""

    url: Text = "http://127.0.0.1:8000"
    """Where it listens, on this machine. vLLM needs VLLM_SERVER_DEV_MODE=1 in its environment. If it wants
    a key, set ROLLOUT_SERVER_TOKEN in agent.env."""
    weights: Text | None = None
    """A folder in memory that the server can read, for weights on their way to it: the whole model. Set it where the server
    runs as another user or in a container. null: beside the engine's socket, for a server of the same user."""
    at_once: Count = 64
    """Samples that it is asked for at a time. More is faster. Keep it below the server's own limit (vLLM's --max-num-seqs): a
    question that only shows that the server lives would wait in its queue."""
    answer_s: Seconds = 1800.0
    """Seconds for one answer, waiting in the server's queue included. More suits long answers."""


class Rollout(Section):
    """How samples are generated."""

    engine: Literal["torch", "served", "vllm", "server"] = "torch"
    """torch: plain and exact, in the worker; served: the same in a process of its own that outlives trainer restarts; vllm:
    vLLM in such a process, faster on GPUs; server: a vLLM or SGLang that you start yourself, at rollout.server.url. The
    process runs beside the worker, or with rollout.nodes on the rollout nodes."""
    python: Text | None = None
    """The interpreter that runs the process, for a vLLM in an environment of its own. null: the worker's."""
    dir: Text | None = None
    """A directory in memory for the process's socket and weights; job and node are appended. null: beside the vault."""
    idle_s: Seconds = 600.0
    """Seconds without a word from a trainer, after which the process ends by itself. More spares it a start after a longer
    outage; less frees its memory sooner."""
    starts: Count = 3
    """Starts of the process in a row that come to nothing, before its worker fails. More tries longer."""
    nodes: Whole = 0
    """Nodes with node.role rollout that are expected, beyond those that train. They may come and go: any number of them, one
    at least, does the work. 0: every training node generates for itself."""
    port: Port = 0
    """The TCP port on which a rollout node's engine is asked. 0: any free one, published under the node's lease. Fix it to
    open a firewall."""
    wait_s: Seconds = 600.0
    """Seconds that a trainer waits while no rollout node generates for it, before it fails. More rides out a longer absence
    of all of them."""
    max_tokens: Count = 256
    """Tokens of an answer at most. More allows longer answers, at more memory and time."""
    temperature: Positive = 1.0
    """Sampling temperature. More varies more. What is trained is the distribution that is sampled from, so with anything but 1
    not the model's own."""
    top_p: Share = 1.0
    """The share of probability sampled from. Less cuts off unlikely tokens, and biases the ratio."""
    top_k: Whole = 0
    """Sample from so many likeliest tokens. 0: from all. Fewer bias the ratio."""
    gather: bool = True
    """Where engine torch generates in workers whose strategy is fsdp: true keeps the actor's weights whole on each of them
    meanwhile; false gathers them anew for each token, which takes less memory and far longer."""
    staleness: Whole = 0
    """Steps that samples may be older than the weights they train. 0: each step waits for samples of its own weights. k: the
    engine gets the weights every k steps, and what it generates by them trains the k steps that come next. So generation and
    training run at once where the engine is a process of its own, and which weights generated a sample depends on its step
    alone. With 1 a fault in an update costs all of the step's updates; with more it does not, and each worker keeps a copy of
    the actor's weights."""
    stale_share: Share = 1.0
    """The share of each batch that is generated ahead, with staleness 1; the rest waits for the step's own weights. Less is
    nearer to them, and gains less."""
    sync_transport: Literal["auto", "ipc", "nccl", "gloo", "tcp"] = "auto"
    """How weights reach the engine. ipc: through shared memory, beside the trainer. To rollout nodes: nccl or gloo, a group
    with all engines (unsigned, as the gang's own traffic; gloo where nccl does not work); tcp, to each engine by itself
    (signed), which also stays where no group holds; auto: what a probe finds quickest."""
    sync_bucket_bytes: Bytes = 256 * MiB
    """Bytes of weights moved at once. More is faster; less needs less memory on either side."""
    sync_timeout_s: Seconds = 30.0
    """Seconds for one weight sync, before the engine counts as failed. More for larger models and slower links."""
    start_timeout_s: Seconds = 300.0
    """Seconds for an engine to start and generate. More for larger models."""
    health_every_s: Seconds = 10.0
    """Seconds between health checks of an idle engine, each a real generation. Less finds a dead one sooner."""
    health_timeout_s: Seconds = 5.0
    """Seconds between two signs of life of an engine that was asked for something, before it is killed and started again.
    More forgives a busy machine."""
    vllm: Vllm = Vllm()
    server: Server = Server()

    @property
    def foreign(self) -> bool:
        """An engine that is not ours generates: it rounds as it likes, and batches what comes."""
        return self.engine in ("vllm", "server")

    @property
    def evaluates(self) -> bool:
        """The engine answers held-out prompts too. Beside `torch` and `served` the worker does, which has the same code."""
        return self.foreign or (self.engine != "torch" and self.nodes > 0)


class Evaluate(Section):
    """Held-out prompts that the policy answers now and then. What they score is reported, and never trained on."""

    every: Whole = 0
    """Steps between evaluations; one more is made after job.steps. Less sees more, at the time that they take. 0: none is
    made."""
    at_start: bool = False
    """true evaluates the weights that the job begins with too."""
    prompts: Text | None = None
    """A file or folder of prompts, or with data.format datasets a name; read as the section data says (format, prompt,
    chat_template, max_prompt)."""
    split: Text = "test"
    """Which split of a dataset; only with data.format datasets."""
    limit: Whole = 0
    """The first so many prompts of it. Fewer take less time, and say less. 0: all."""
    samples: Count = 1
    """Answers to each prompt. With n of them pass@1 to pass@n are reported; more tell them better, at more time."""
    temperature: Amount | None = None
    """Sampling temperature; 0 takes the likeliest token. null: 0 with one answer, rollout.temperature with several."""
    top_p: Share = 1.0
    """The share of probability sampled from. Less cuts off unlikely tokens."""
    top_k: Whole = 0
    """Sample from so many likeliest tokens. 0: from all."""
    max_tokens: Count | None = None
    """Tokens of an answer at most. null: rollout.max_tokens, and never more than that."""
    threshold: float = 1.0
    """The score at which an answer passes. More demands more."""
    shown: Whole = 4
    """Prompts whose first answer is in the report, with its score. More show more, in longer logs."""


class Curriculum(Section):
    """How the mix of prompts changes as the job goes on. CURRICULUM.md has an example."""

    field: Text | None = None
    """The field of a record that says its level: how difficult it is, or where it comes from. A text or a whole number. null:
    all prompts are one row."""
    stages: Mapped = Names()
    """From which step on which levels are mixed, each with its weight: {0: "easy 1", 200: "easy 1, hard 3"}. Of every four
    prompts from step 200 on, one is easy and three are hard. A level with weight 0, or without one, waits."""

    @property
    def levels(self) -> tuple[str, ...]:
        """All that are named, in order."""
        return tuple(sorted({name for text in self.stages.values() for name in mix_of(text)}))

    @property
    def weights(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage, in order: its first step, then what each level weighs."""
        stages = [(int(step), mix_of(text)) for step, text in self.stages.items()]
        return tuple(sorted((step, *(mix.get(name, 0) for name in self.levels)) for step, mix in stages))


def mix_of(text: str) -> dict[str, int]:
    """What a stage says, or ValueError.

    >>> mix_of("easy 1, very hard 3")
    {'easy': 1, 'very hard': 3}
    """
    found = dict[str, int]()
    for part in text.split(","):
        said, _, weight = part.strip().rpartition(" ")
        name = said.strip()
        if not name or name in found or not weight.isascii() or not weight.isdigit():
            raise ValueError(f"{part.strip()!r} is no level with its weight")
        found[name] = int(weight)
    return found


class Data(Section):
    """Where prompts come from."""

    path: Text | None = None
    """A file, a folder, or with format datasets a name that the package datasets loads."""
    format: Literal["jsonl", "parquet", "datasets"] = "jsonl"
    """What is at the path: JSON lines, Parquet files, or what the package datasets loads. The last two need elasticrl[data]."""
    split: Text = "train"
    """Which split of a dataset; only with format datasets."""
    prompt: Text = "prompt"
    """The field that holds the prompt: a text, or a list of chat messages."""
    chosen: Text = "chosen"
    """The field of the better answer, for dpo."""
    rejected: Text = "rejected"
    """The field of the worse answer, for dpo."""
    completion: Text = "completion"
    """The field of the answer, for kto and sft."""
    label: Text = "label"
    """The field that says whether the answer was good, for kto."""
    chat_template: bool = True
    """true puts prompts into the tokenizer's chat template; false takes them as they are. A template that prints the day is
    told 1 January 2026, always: prompts that change overnight would be other data."""
    template_arguments: Mapped = Names()
    """What the chat template is told beside the messages, such as enable_thinking, for prompts and for an environment's
    replies. A text that is JSON is read as such: "false" is false."""
    max_prompt: Count = 512
    """Tokens of a prompt at most; longer ones are left out, and counted. More keeps more of the data, at more memory."""
    shuffle: bool = True
    """true draws each epoch in a new order, from job.seed; false takes the file's order."""
    curriculum: Curriculum = Curriculum()
    workers: Whole = 0
    """Processes that tokenize while the file is read, when a worker starts on a node that has not kept the tokens yet. 0: the
    worker does it itself. More start sooner with much data, at memory and a second for each process."""
    prefetch: Count = 2
    """Chunks of records that each of them has in hand at once. More hides slow reading, at memory."""
