"""A rule must not care where an element lies in a row, nor how many threads share the row."""

import random
from itertools import pairwise

import torch

from elasticrl.runtime.layout import UNIT
from elasticrl.runtime.optim import CHUNK, Rule, apply


def cut_anywhere(rule: Rule) -> None:
    """The same bits for a row that is cut at random units, with one to three threads; the old version stays as it was."""
    size = CHUNK + 193 * UNIT
    old = torch.rand(1 + len(rule.slots), size)
    grad = torch.randn(size)
    expected = torch.empty_like(old)
    apply(rule, old, expected, grad, scale=0.3, count=7)
    before, chance = old.clone(), random.Random(1)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        edges = sorted({0, size, *(chance.randrange(0, size, UNIT) for _ in range(9)), UNIT, size - UNIT})
        new = torch.empty_like(old)
        for lo, hi in pairwise(edges):
            apply(rule, old[:, lo:hi], new[:, lo:hi], grad[lo:hi], scale=0.3, count=7)
        assert torch.equal(new.view(torch.int32), expected.view(torch.int32)), f"{threads} threads"
    torch.set_num_threads(1)
    assert torch.equal(old, before), "the old version is still needed"
