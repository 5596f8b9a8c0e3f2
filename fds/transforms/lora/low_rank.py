"""Factors of low rank beside frozen weights: W + s B A, with A (r, in) and B (out, r), and s = alpha / r.

With a rank-stabilised scale s = alpha / sqrt(r). DoRA: row i of W + s B A is scaled to the length |W_i| + M_i, M (out,)
being trained; the length that it has is a constant in backward. peft trains |W_i| + M_i itself, from |W_i|.

Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; Liu et al. 2024, arXiv:2402.09353.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.errors import ComposeError, StateError
from fds.layout import Leaf
from fds.step import Call, Replicated, SplitDim

Lies = SplitDim | Replicated
PARTS = ("lora_A", "lora_B", "lora_M")


@attrs.frozen(repr=False)
class LowRank:
    """An adapter: which weights have factors, of which rank, and by what their product is multiplied.

    Attributes:
        patterns: of names of weights, as they were written: "(a|b)" is either.
        rank: r.
        alpha: of the scale.
        stabilized: whether the scale is alpha / sqrt(r).
        name: of the adapter; parts of parameters' names.
        form: whether weights are changed, "view", or what layers return, "layer".
        dropout: of what factors are given, in layers.
        dora: whether the lengths of rows are trained apart.
        transposed: names of weights that are (in, out).
    """

    patterns: tuple[str, ...]
    rank: int
    alpha: float
    stabilized: bool
    name: str
    form: str
    dropout: float
    dora: bool
    transposed: frozenset[str] = attrs.field(default=frozenset(), repr=False)
    draws: ClassVar = False

    def __repr__(self) -> str:
        return f"{self.name!r} of rank {self.rank} beside {tree.named(self.patterns)}"

    @property
    def scale(self) -> float:
        """By what the product of the factors is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.stabilized else self.rank)

    @property
    def each(self) -> list[list[str]]:
        """The patterns, each as those of which one is enough: without alternatives in brackets."""
        return [alternatives(pattern) for pattern in self.patterns]

    def chooses(self, name: str, dims: int) -> bool:
        """Say whether a parameter has factors: those of two dims that a pattern matches."""
        return dims == 2 and not is_part(name) and self._matches(name)

    def _matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for group in self.each for pattern in group)

    def parts(self, weight: str) -> list[str]:
        """Return the names of what is added beside a weight: A, B, and of DoRA M."""
        owner = weight.rpartition(".")[0]
        at = f"{owner}." if owner else ""
        return [f"{at}{part}.{self.name}.weight" for part in PARTS[: 2 + self.dora]]

    def beside(self, name: str, x: Tensor, key: Tensor) -> dict[str, Tensor]:
        """Return what is added beside a parameter: A uniform in 1 / sqrt(in), as peft draws it; B and M zeros."""
        if not (self.chooses(name, x.dim()) and x.is_floating_point()):
            return {}
        out, inner = x.shape if name not in self.transposed else x.shape[::-1]
        dtype = torch.float32 if tree.is_low(x) else x.dtype
        names, shapes = self.parts(name), [(self.rank, inner), (out, self.rank), (out,)]
        parts = {part: x.new_zeros(shape, dtype=dtype) for part, shape in zip(names, shapes, strict=False)}
        if not x.is_meta and inner:
            drawn = torch.rand(shapes[0], generator=random.generator(random.fold_in(key, names[0])), device="cpu")
            parts[names[0]].copy_(drawn.mul_(2).sub_(1).div_(math.sqrt(inner)))
        return parts

    def lie(self, lies: Mapping[str, Lies]) -> dict[str, Lies]:
        """Return how factors lie along a tensor axis: cut as their weight is; what is whole has a part of its gradient.

        Raises `ComposeError` for views of rows whose lengths no rank knows.
        """
        result: dict[str, Lies] = {}
        for weight, how in lies.items():
            if not self._matches(weight):
                continue
            names = self.parts(weight)
            if not isinstance(how, SplitDim):
                result |= dict.fromkeys(names, how)
                continue
            by_rows = (how.dim == 0) != (weight in self.transposed)
            if self.dora and self.form == "view" and not by_rows:
                raise ComposeError(
                    "lora: the length of a row is of all its numbers, and ranks have parts of it",
                    where=weight,
                    got=f"dora=True, form='view', {how}",
                    want="form='layer', or patterns of layers that are divided by their outputs",
                )
            cut = [SplitDim(1, how.parts), SplitDim(0, how.parts), SplitDim(0, how.parts)]
            for i, name in enumerate(names):
                result[name] = cut[i] if (i == 0) != by_rows else Replicated("sum")
        return result

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `StateError` for a pattern that chooses no weight."""
        for written, group in zip(self.patterns, self.each, strict=True):
            names = [n for n in shapes if any(fnmatch.fnmatchcase(n, pattern) for pattern in group) and not is_part(n)]
            if not any(len(shapes[n]) == 2 for n in names):
                raise StateError(
                    "lora: a pattern chooses no weight",
                    got=repr(written),
                    want="the name of a matrix, with * for any part of it and (a|b) for either",
                    hint=f"it matches {tree.named(names)}" if names else f"say, {tree.named([*shapes])}",
                )

    def reads(self, leaf: Leaf, call: Call) -> Sequence[str]:
        """Return the names of what is added beside a parameter."""
        return self.parts(leaf.name) if self.chooses(leaf.name, len(leaf.shape)) else []

    def __call__(self, x: Tensor, leaf: Leaf, call: Call, read: Mapping[str, Tensor]) -> Tensor:
        """Return a weight with its factors, and what has none as it is."""
        parts = [read[name].to(x.dtype) for name in self.parts(leaf.name) if name in read]
        return self.merged(x, parts, leaf.name) if parts else x

    def merged(self, x: Tensor, parts: Sequence[Tensor], name: str) -> Tensor:
        """Return a weight, given with its factors."""
        a, b, *rest = parts
        change = self.scale * (b @ a)
        is_transposed = name in self.transposed
        y = x + (change.T if is_transposed else change)
        if not rest:
            return y
        dim = 0 if is_transposed else 1
        factor = (length(x.detach(), dim) + rest[0]) / length(y.detach(), dim)
        return y * factor.unsqueeze(dim)

    def summary(self, leaf: Leaf, call: Call) -> str:
        """Return the rank of a weight's factors, in words; "" for what has none."""
        return f"rank {self.rank}" if self.reads(leaf, call) else ""


def length(x: Tensor, dim: int) -> Tensor:
    """Return the lengths of rows, which lie along `dim`; of zeros 1, which is scaled by nothing."""
    norm = x.square().sum(dim).sqrt()
    return torch.where(norm == 0, 1, norm)


def is_part(name: str) -> bool:
    """Say whether a parameter is a part of an adapter, by its name."""
    return any(part in PARTS for part in name.split("."))


def alternatives(pattern: str) -> list[str]:
    """Return patterns without brackets, of which one matches where this one does.

    >>> alternatives("*.(q|k)_proj.weight")
    ['*.q_proj.weight', '*.k_proj.weight']
    """
    start = pattern.find("(")
    end = pattern.find(")", start)
    if start < 0 or end < 0:
        return [pattern]
    words = pattern[start + 1 : end].split("|")
    return [pattern[:start] + word + rest for word in words for rest in alternatives(pattern[end + 1 :])]
