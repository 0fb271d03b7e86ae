"""How many tokens a forward pass has, and of which widths: constants of a job, so that its shapes are.

The idea: a pass has a budget of tokens, not of samples. What a device needs for it is known from the configuration alone,
whatever the samples' lengths, and its cost follows these. No torch: what is reckoned before a job begins needs it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticrl.config import Tree
    from elasticrl.config.training import Ppo


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the passes of a job: at most `tokens` each, of samples of at most `sample`, of which at most `answer` are generated.
    `unit` neighbouring samples stay together. `share`: these have one prompt, which goes through the model once, and all their
    answers behind it. `fine`: a device that is as quick with a short pass as with a long one.

    Example: Sizes(tokens=4096, sample=768, answer=256)
    """

    tokens: int
    sample: int
    answer: int
    unit: int = 1
    share: bool = False
    fine: bool = False

    @property
    def most(self) -> int:
        """Tokens of what is one row of a pass at most: of a sample, or of all that share a prompt."""
        return self.sample + (self.unit - 1) * self.answer * self.share

    @property
    def prompt(self) -> int:
        """Tokens of a prompt at most."""
        return self.sample - self.answer

    def width(self, length: int) -> int:
        """What rows of this length are cut to."""
        return self.cut(length, self.most)

    def cut(self, length: int, most: int) -> int:
        """A width for this length."""
        return min(max(length, 1), most) if self.fine else width_of(length, most)

    def rows(self, width: int) -> int:
        """How many samples fit into a pass of rows of this width: whole units, one at least.

        >>> Sizes(tokens=4096, sample=768, answer=256).rows(768)
        5
        >>> Sizes(tokens=4096, sample=768, answer=256, unit=4, share=True).rows(1024)
        16
        """
        return self.unit * max(self.tokens // self.places(width), 1)

    def places(self, width: int) -> int:
        """Tokens that a unit of this width takes."""
        return width if self.share else width * self.unit

    @property
    def pass_costs(self) -> int:
        """What a pass costs beside its tokens, in tokens: a shorter one leaves a GPU idle."""
        return self.tokens // (64 if self.fine else 16)

    def passes(self, samples: int) -> int:
        """How many passes so many samples need if all are as long as can be."""
        return max(-(-samples // self.rows(self.most)), 1)

    def parts(self, samples: int) -> int:
        """How many passes so many samples may be cut into: twice as many, so that long ones need not wait for company, or four
        times. A power of two, by which a lane's passes make a subtree.

        >>> [Sizes(tokens=4096, sample=768, answer=256).parts(samples) for samples in (1, 4, 16, 64)]
        [1, 2, 8, 32]
        """
        most = min((4 if self.fine else 2) * self.passes(samples), max(samples // self.unit, 1))
        return 1 << (most - 1).bit_length()


def of(ppo: Ppo, *, prompt: int, answer: int, device: str = "", share: bool = False, lanes: int = 1) -> Sizes:
    """Of samples whose prompts and answers have at most so many tokens. Of dpo a pair stays together; with `share` what a lane
    has of a group.
    """
    unit = 2 if ppo.algorithm == "dpo" else ppo.part(lanes) if share else 1
    fine = device == "cpu"
    return Sizes(tokens=ppo.micro_tokens, sample=prompt + answer, answer=answer, unit=unit, share=share, fine=fine)


def may_share(ppo: Ppo, lanes: int, *, prompt: int, answer: int, hidden: int) -> bool:
    """Whether what a lane has of a group may go through the model as one row: these samples are always in one update, and
    attending from all of them to all of them, which is what a mask over such a row costs, stays small beside the layers'
    products.
    """
    part = ppo.part(lanes)
    return (
        part > 1
        and ppo.algorithm != "ppo"  # its critic sees samples
        and not ppo.router_aux_coef  # whose loss counts each sample's tokens
        and ppo.mini_batch // lanes % part == 0
        and prompt + part * answer <= min(4 * hidden, ppo.micro_tokens)
    )


def asked(tree: Tree) -> tuple[int, int]:
    """Tokens of what an engine is asked, and of what it answers, at most. Where an environment answers, what was said so far
    stands where a prompt does, and a message has a length of its own: one shape for all turns.
    """
    prompt, answer = tree.data.max_prompt, tree.rollout.max_tokens
    if tree.environment.function is None:
        return prompt, answer
    return prompt + answer, tree.environment.turn_tokens or answer


def parts_of(ppo: Ppo, lanes: int, sizes: Sizes) -> int:
    """How many passes a lane may come to in an update: its leaves of the tree of sums. Those that it does not come to are 0."""
    return sizes.parts(ppo.mini_batch // lanes)


def width_of(length: int, most: int) -> int:
    """The next of few widths: memory is allocated and kernels are chosen by them. At most an eighth, or 7 tokens, too wide.

    >>> [width_of(length, 760) for length in (1, 17, 200, 300, 520, 750)]
    [8, 24, 208, 320, 576, 760]
    """
    step = 1 << max((length - 1).bit_length() - 4, 3)
    return min(-(-length // step) * step, most)


def most_logits(ppo: Ppo) -> int:
    """Numbers in float32 that `ppo.logits_mib` has room for; 0: however many."""
    return ppo.logits_mib * 2**20 // 4
