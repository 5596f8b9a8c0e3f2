"""Round weights to integers of a few bits where the loss reads them, and train what is rounded.

Fills:  view                     State:  none
Law:    14: the hand-written loop that rounds weights before the loss, bit for bit; MoQ's loop gives the same bits
Cost:   one pass over a weight for each microbatch, and its rounded copy; more where bits follow time to 2 or 1
Source: Jacob et al. 2018, arXiv:1712.05877; Shen et al. 2020, arXiv:1909.05840, and DeepSpeed 0.19.6 (MoQ)
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import attrs
import torch
from torch import Tensor

from fds import kernels, tree
from fds.compression.grids import Groups, Packed, Scheme, numbers_per_group, pack
from fds.errors import FLAG, ComposeError, Rule, StateError, count, is_a, is_int, is_number
from fds.layout import Leaf
from fds.step import Call, Step, fill, transform

_LATEST = 2**62  # a step that no run reaches


class Measured(Protocol):
    """A lambda as `fds.curvature.top_eigenvalue` returns it."""

    @property
    def normalized(self) -> float:
        """It, in [0, 1]."""
        ...


Factors = Mapping[str, float | Measured | Sequence[float | Measured]]


@attrs.frozen
class Bits:
    """How many bits a weight has, as a function of the updates applied before a call.

    The calls that round are counted from 1, at `offset`. In call `period` a bit is dropped; until the next one is, it
    takes 2 (1 + floor(4 lambda)) times as many calls as till then, lambda being that at the drop. `change` is by how
    much the share of the unrounded weight falls with each call, from 1 before the first and at each drop.

    Attributes:
        drops: the updates applied before the calls in which a bit is dropped, in order.
    """

    start: int
    target: int
    offset: int
    change: float | None
    drops: tuple[int, ...]

    @classmethod
    def of(
        cls, start: int, target: int, offset: int, period: int, change: float | None, eigenvalues: Sequence[float]
    ) -> Bits:
        """Return it for a weight with these lambdas at its drops, the last of which holds on; none is 0."""
        drops = list[int]()
        for i in range(start - target):
            drops.append(min(offset + period - 1, _LATEST))
            factor = 1 + math.floor(4 * eigenvalues[min(i, len(eigenvalues) - 1)]) if eigenvalues else 1
            period *= 2 * factor
        return cls(start, target, offset, change, tuple(drops))

    def at(self, step: Tensor) -> int | Tensor:
        """Return the bits after so many updates: a number where they never change, else () int64."""
        return self.start - sum((step >= t).to(torch.int64) for t in self.drops)

    def kept(self, step: Tensor) -> Tensor | None:
        """Return the share of the unrounded weight, () float64; None where it is always 0."""
        is_early = step < self.offset
        if self.change is None:
            return is_early.to(torch.float64) if self.offset else None
        last = torch.full_like(step, self.offset - 1)
        for t in self.drops:
            last = torch.where(step >= t, t, last)
        share = (1 - self.change * (step - last).to(torch.float64)).clamp_(min=0)
        return torch.where(is_early, 1.0, share)


@attrs.frozen(eq=False)
class Quantized:
    """The view of some weights. `others` are those of the composition that came before."""

    patterns: tuple[str, ...]
    start: int
    target: int
    groups: Groups
    group_size: int | None
    symmetric: bool
    scheme: Scheme
    rounding: Literal["nearest", "stochastic"]
    offset: int
    period: int
    mixing: float | None
    factors: Mapping[str, tuple[float, ...]]
    others: tuple[Quantized, ...] = attrs.field(default=(), repr=False)
    pruning: tuple[Any, ...] = attrs.field(default=(), repr=False)  # views that mask weights before this one
    _bits: dict[str, Bits] = attrs.field(factory=dict[str, Bits], init=False, repr=False)

    @property
    def draws(self) -> bool:
        """Whether it rounds stochastically."""
        return self.rounding == "stochastic"

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `StateError` for patterns without a match or a weight, `ComposeError` for weights it cannot round."""
        matches = tree.match(self.patterns, shapes, what="quantize_weights")
        weights = [name for name, shape in shapes.items() if self.takes(name, len(shape))]
        if not weights:
            raise StateError(
                "quantize_weights: patterns choose no weight",
                got=tree.named([*self.patterns]),
                want="one of 2 or more dims; one of fewer by its whole name",
                hint=f"they match {tree.named(sorted(matches))}",
            )
        tree.match(self.factors, weights, what="quantize_weights(factors=...)")
        for name in weights:
            numbers_per_group(name, shapes[name], self.groups, self.group_size)
            if any(other.takes(name, len(shapes[name])) for other in self.others):
                raise ComposeError(
                    "a weight is quantized twice", where=name, got=repr(self.patterns), want="patterns that are apart"
                )

            leaf = Leaf(name, tuple(shapes[name]), torch.float32, True)
            if not self.has_zero and any(view.prunes(leaf, shapes) for view in self.pruning):
                raise ComposeError(
                    "quantize_weights: a grid without 0 would lose the zeros that pruning has made",
                    where=name,
                    got=f"bits={self.target}, symmetric={self.symmetric}",
                    want="2 bits or more of a symmetric grid, or scheme='torchao'",
                    hint="compose the other way round: quantize_weights first, pruning after it",
                )

    @property
    def has_zero(self) -> bool:
        """Whether 0 stays 0: the sign that is 1 bit has none, nor need a shifted grid of "deepspeed"."""
        return self.scheme == "torchao" or (self.symmetric and self.target > 1)

    def takes(self, name: str, dims: int) -> bool:
        """Say whether this is the view of a parameter with so many dims."""
        return dims > 0 and (
            name in self.patterns or (dims > 1 and any(fnmatch.fnmatch(name, p) for p in self.patterns))
        )

    def bits_of(self, name: str) -> Bits:
        """Return the bits of a weight, by its first factor that matches."""
        if name not in self._bits:
            factors = (values for pattern, values in self.factors.items() if fnmatch.fnmatch(name, pattern))
            self._bits[name] = Bits.of(
                self.start, self.target, self.offset, self.period, self.mixing, next(factors, ())
            )
        return self._bits[name]

    def __call__(self, x: Tensor, leaf: Leaf, call: Call) -> Tensor:
        """Return a weight rounded; an evaluation rounds to the nearest. Raises `ComposeError` for a group cut apart."""
        if not (self.takes(leaf.name, x.dim()) and x.is_floating_point()):
            return x
        group, bits = self.group(x, leaf, call), self.bits_of(leaf.name)
        rows = x.reshape(-1, group)
        now = bits.at(call.step)
        rounded = kernels.fake_quantize(
            rows,
            now,
            scheme=self.scheme,
            symmetric=self.symmetric,
            noise=self.noise(x, leaf, call).view(-1, group) if self.draws and call.training else None,
            kept=bits.kept(call.step),
            reach=(bits.target, bits.start) if isinstance(now, Tensor) else None,
        )
        return rounded.view(x.shape)

    def summary(self, leaf: Leaf, call: Call) -> str:
        """Return the bits of a weight in a call, in words; "" for what is none of these weights."""
        if not (self.takes(leaf.name, len(leaf.shape)) and leaf.dtype.is_floating_point):
            return ""
        if int(call.step) < self.offset:
            return "not rounded"
        bits = self.bits_of(leaf.name)
        kept = bits.kept(call.step)
        share = 0.0 if kept is None else float(kept)
        return f"{int(bits.at(call.step))} bits" + (f" with {share:.0%} of the weight itself" if share else "")

    def packed(self, x: Tensor, leaf: Leaf, call: Call) -> Packed | str | None:
        """Return the integers that an evaluation rounds a weight to, or why there are none; None of other weights."""
        if not (self.takes(leaf.name, x.dim()) and x.is_floating_point()):
            return None
        bits = self.bits_of(leaf.name)
        kept = bits.kept(call.step)
        if kept is not None and float(kept):
            begun = int(call.step) >= self.offset
            return f"{float(kept):.0%} of the weight is mixed in" if begun else f"rounded from update {self.offset} on"
        return pack(
            x, int(bits.at(call.step)), group=self.group(x, leaf, call), scheme=self.scheme, symmetric=self.symmetric
        )

    def group(self, x: Tensor, leaf: Leaf, call: Call) -> int:
        """Return how many numbers share a scale. Raises `ComposeError` where ranks hold parts of a group."""
        cut = call.dimensions.cells(leaf.name, x.shape)
        whole = tuple(x.shape) if cut is None else cut[0]
        group = numbers_per_group(leaf.name, whole, self.groups, self.group_size)
        if cut is None:
            return group
        unit = 0  # numbers that lie together on a rank, wherever it is
        for dim, ranges in enumerate(cut[1]):
            inner = math.prod(whole[dim + 1 :])
            if ranges != ((0, whole[dim]),):
                unit = math.gcd(unit, *(inner * at for range_ in ranges for at in range_))
        if unit % group:
            raise ComposeError(
                "ranks hold parts of a group of numbers that share a scale",
                where=leaf.name,
                got=f"groups of {group} numbers of {whole}, of which ranks hold runs of {unit} or a multiple",
                want=f"group_size={unit}, or a divisor of it"
                + (', or groups="rows"' if unit % math.prod(whole[1:]) == 0 else ""),
            )
        return group

    def noise(self, x: Tensor, leaf: Leaf, call: Call) -> Tensor:
        """Return numbers in [-1/2, 1/2) for a weight, of which each rank draws all."""
        cut = call.dimensions.cells(leaf.name, x.shape)
        dtype = x.dtype if x.dtype is torch.float64 else torch.float32
        noise = torch.empty(x.shape if cut is None else cut[0], dtype=dtype, device=x.device).uniform_(-0.5, 0.5)
        return noise if cut is None else call.dimensions.cut(leaf.name, noise).contiguous()


def _is_bits(bits: Any) -> bool:
    pair: Any = bits if tree.is_sequence(bits) else (bits, bits)
    return len(pair) == 2 and is_int(pair[1], 1) and is_int(pair[0], pair[1]) and pair[0] <= 16


def _lambdas(x: Any) -> tuple[Any, ...]:
    """Return what stands for a block: a lambda for each drop."""
    return tuple(getattr(each, "normalized", each) for each in (x if tree.is_sequence(x) and x else [x]))


def _are_factors(factors: Any) -> bool:
    """Say whether these are numbers in [0, 1], or lists of them, by pattern."""
    if not (tree.is_dict(factors) and all(isinstance(k, str) for k in factors)):
        return False
    return all(is_number(x) and 0 <= x <= 1 for values in factors.values() for x in _lambdas(values))


@transform(
    several=True,
    bits=Rule(_is_bits, " takes bits", "1 to 16, or (bits at the start, fewer in the end), say (8, 4)"),
    groups=Rule(
        lambda n: n is None or n == "rows" or is_int(n, 1), ": no such groups", 'how many, an int, or "rows", or None'
    ),
    group_size=count(": {name} counts numbers").or_none(),
    symmetric=FLAG,
    scheme=Rule(("deepspeed", "torchao").__contains__, ": no such scheme", "'deepspeed' or 'torchao'"),
    rounding=Rule(("nearest", "stochastic").__contains__, ": no such rounding", "'nearest' or 'stochastic'"),
    offset=count(": {name} counts updates", 0),
    period=count(": {name} counts updates"),
    mixing=Rule(lambda x: x is None or (is_number(x) and 0 < x <= 1), ": no such share", "a number in (0, 1], or None"),
    factors=Rule(
        lambda factors: factors is None or _are_factors(factors),
        ": factors are eigenvalues by patterns of names",
        '{"blocks.0.*": 0.7}, numbers in [0, 1], or one for each drop, [0.7, 0.5]',
    ),
)
def quantize_weights(
    *patterns: str,
    bits: int | tuple[int, int] = 8,
    groups: Groups | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    scheme: Scheme = "deepspeed",
    rounding: Literal["nearest", "stochastic"] = "nearest",
    offset: int = 0,
    period: int = 1,
    mixing: float | None = None,
    factors: Factors | None = None,
):
    """Show the loss weights that are rounded to integers of a few bits with a scale for each group of numbers.

    `fds.kernels.fake_quantize` has the formulas. The state keeps the weights as they are: gradients pass through the
    rounding, and the optimizer updates what is rounded anew. Evaluations see rounded weights too, to the nearest.

    With `bits=(start, target)` bits are dropped one by one, as MoQ does. Calls that round are counted from 1, which is
    the call after `offset` updates. The bits of call n are `start` less the number of drops at or before it. Drops are
    at p_1 = `period`, p_2 = 2 f_1 p_1, p_3 = 2 f_2 p_2, ..., f = 1 + floor(4 lambda), as DeepSpeed counts them: a
    period of 1 has the first call drop a bit. `factors` gives lambda, in [0, 1], for blocks of weights: one number, or
    one for each drop, of which the last holds on. They may be measured while a run goes on: where a drop comes
    near, compose the step anew with one more lambda, of what `fds.curvature.top_eigenvalue` returns, and go on with
    the same state. With `mixing` the loss sees r w + (1 - r) q, q being the rounded weight and r = max(0, 1 - mixing m)
    in the m-th call from the start, 1 in that of a drop, and so on from there.

    Args:
        patterns: of names of parameters (`*` crosses dots). Those of less than 2 dims only by their whole name.
        bits: 1 to 16, or those at the start and fewer in the end. 2 and 1 of "deepspeed" are ternary and binary.
        groups: how many a weight is cut into, or "rows" for one for each index of dim 0; None for 1 of "deepspeed"
            and "rows" of "torchao".
        group_size: consecutive numbers of a row in a group, in the place of `groups`, say 32 or 128 for 4 bits.
        symmetric: False shifts the grid to the smallest and the largest number of a group.
        scheme: "deepspeed", or "torchao", whose grid reaches the largest number, and of which a number beyond it has
            no gradient.
        rounding: "stochastic" rounds up or down with the probability that keeps the mean, from the key of the call; of
            "deepspeed" alone, as 3 bits or more.
        offset: updates applied before the first call that rounds.
        period: calls till the first drop.
        mixing: by how much the share of the weight itself falls with each call; None mixes nothing in.
        factors: lambda, or one for each drop, by pattern of names: numbers, or `fds.curvature.Eigenvalue`s, as
            `top_eigenvalue(..., blocks=...)` returns them. The first that matches counts, and none is 0.

    Several may stand in a composition, on weights that are apart. On a tensor axis a group lies on one rank.

    Raises `ComposeError` for other values, for groups that a weight does not divide into, where ranks hold parts of a
    group, and at init for a grid without 0 (1 bit, or a shifted one, of "deepspeed") after pruning of a weight;
    `StateError` at init for a pattern that matches nothing, and patterns that choose no weight.
    """
    start, target = bits if tree.is_sequence(bits) else (bits, bits)
    if not patterns or not all(is_a(p, str) for p in patterns):
        raise ComposeError(
            "quantize_weights takes patterns of parameter names", got=repr(patterns)[:80], want='"blocks.*.weight"'
        )
    if groups is not None and group_size is not None:
        raise ComposeError(
            "quantize_weights: groups are given twice", got=f"{groups=}, {group_size=}", want="one of them"
        )
    if (rounding == "stochastic" or not symmetric) and scheme == "deepspeed" and target < 3:
        raise ComposeError(
            "quantize_weights: 2 bits are -1, 0 and 1, and 1 bit is -1 and 1",
            got=f"{bits=}, {symmetric=}, {rounding=}",
            want="symmetric=True, rounding='nearest', or 3 bits or more",
        )
    if rounding == "stochastic" and scheme == "torchao":
        raise ComposeError(
            "quantize_weights: torchao rounds to the nearest", got=f"{rounding=}", want="scheme='deepspeed'"
        )
    if scheme == "torchao" and start > 8:
        raise ComposeError("quantize_weights: torchao has 8 bits at the most", got=f"{bits=}", want="1 to 8")
    if start == target and (factors or period > 1):
        raise ComposeError(
            "quantize_weights: no bit is ever dropped", got=f"{bits=}, {period=}", want="bits=(start, target)"
        )
    cut: Groups = groups if groups is not None else "rows" if scheme == "torchao" else 1
    values: dict[str, tuple[float, ...]] = {pattern: _lambdas(x) for pattern, x in (factors or {}).items()}

    def apply(step: Step) -> Step:
        others = tuple(view for view in step.view if isinstance(view, Quantized))
        view = Quantized(
            patterns,
            start,
            target,
            cut,
            group_size,
            symmetric,
            scheme,
            rounding,
            offset,
            period,
            mixing,
            values,
            others,
            tuple(view for view in step.view if hasattr(view, "prunes")),
        )
        return fill(step, view=view)

    return apply
