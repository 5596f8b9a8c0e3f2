"""Masks of pruning: which numbers of a weight stay, which of its rows, heads or channels.

A mask is a tensor of booleans, True where a number stays. What is kept has the largest scores; of equal scores those
stay that come first in memory. A weight (rows, *rest) is taken as a matrix (rows, numbers of a row): a row makes one
output, also of a convolution.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fds.errors import FdsError, is_number

BITS = 32  # of a word of a packed mask
ALL = 2**BITS - 1  # a word of which every bit is set
Curve = Literal["cubic", "exponential"]


def num_kept(density: float, count: int) -> int:
    """Return how many of `count` numbers stay: ceil(density * count).

    >>> num_kept(0.5, 7)
    4
    """
    return math.ceil(density * count)


def largest(scores: Tensor, count: int | Tensor) -> Tensor:
    """Return where the `count` largest of all scores are, bool of their shape; `count` may be a () integer tensor.

    NaN counts as infinity.

    >>> largest(torch.tensor([1.0, 3.0, 2.0, 2.0]), 2)
    tensor([False,  True,  True, False])
    """
    flat = scores.detach().flatten().nan_to_num(math.inf, math.inf, -math.inf)
    n = flat.numel()
    if not n:
        return torch.zeros_like(scores, dtype=torch.bool)
    if isinstance(count, int) and (count >= n or count <= 0):
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    if isinstance(count, int):
        least = flat.kthvalue(n - count + 1).values  # a fifth of the time of a sort on a CPU
    else:
        least = flat.sort().values.index_select(0, (n - count).clamp(0, n - 1).view(1))  # x[i] would wait for i
    above, equal = flat > least, flat == least
    stay = above | (equal & (equal.cumsum(0) <= count - above.sum()))
    return stay.view(scores.shape)


def matrix(weight: Tensor) -> Tensor:
    """Return a weight (rows, *rest) as (rows, numbers of a row)."""
    return weight.reshape(len(weight), math.prod(weight.shape[1:]))


@attrs.frozen
class Block:
    """What stays or goes together: `of` numbers down and `across`; or, with `keep`, how many of `of` in a row stay.

    >>> Block.parse("4x1"), Block.parse("2:4")
    (Block(of=4, across=1, keep=0), Block(of=4, across=1, keep=2))
    """

    of: int = 1
    across: int = 1
    keep: int = 0

    @classmethod
    def parse(cls, text: object) -> Block:
        """Return the block that a text says: "4x1" or "2:4"; None is single numbers. Raises `FdsError` for another."""
        if text is None:
            return cls()
        match = re.fullmatch(r"([1-9]\d*)([x:])([1-9]\d*)", text) if isinstance(text, str) else None
        if match is not None and match[2] == "x":
            return cls(int(match[1]), int(match[3]))
        if match is not None and int(match[1]) < int(match[3]):
            return cls(int(match[3]), 1, int(match[1]))
        raise FdsError(
            "there is no such block",
            where="block",
            got=repr(text)[:60],
            want='"4x1": rows x columns that go together; or "2:4": of each 4 of a row 2 stay; or None',
        )

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Say whether a weight of this shape is made of such blocks."""
        columns = math.prod(shape[1:])
        return columns % self.of == 0 if self.keep else shape[0] % self.of == 0 and columns % self.across == 0

    def count(self, shape: tuple[int, ...]) -> int:
        """Return how many blocks a weight of this shape has."""
        return math.prod(shape) // (self.of * self.across)

    def scores(self, numbers: Tensor) -> Tensor:
        """Return the score of every block of a weight: the sum of those of its numbers."""
        scores = matrix(numbers)
        if self.of * self.across > 1:
            r, c = scores.shape
            scores = scores.view(r // self.of, self.of, c // self.across, self.across).sum((1, 3))
        return scores

    def mask(self, numbers: Tensor, count: int | Tensor) -> Tensor:
        """Return where numbers with these scores stay, bool (rows, numbers of a row); `count` blocks, if not `keep`."""
        scores = matrix(numbers.detach())
        if self.keep:
            groups = scores.reshape(scores.numel() // self.of, self.of)
            order = groups.argsort(dim=1, descending=True, stable=True)
            return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order[:, : self.keep], True).view_as(scores)
        return self.numbers(largest(self.scores(scores), count))

    def numbers(self, blocks: Tensor) -> Tensor:
        """Return for every number what is said of its block, (rows, numbers of a row)."""
        if self.of * self.across > 1:
            blocks = blocks.repeat_interleave(self.of, 0).repeat_interleave(self.across, 1)
        return blocks


def sparse(weight: Tensor, density: float | None = None, *, block: str | None = None) -> Tensor:
    """Return where the largest magnitudes of a weight are, bool of its shape.

    Args:
        weight: (rows, *rest).
        density: the share of numbers, or of blocks, that stays; None where `block` is such as "2:4".
        block: None, "4x1" (4 rows of a column go together, by their sum), or "2:4" (of each 4 of a row 2 stay).

    Raises `FdsError` for anything else, and for a shape that is not made of such blocks.
    """
    kind = Block.parse(block)
    if weight.dim() < 2 or not kind.fits(tuple(weight.shape)):
        raise FdsError(
            "a weight is not made of such blocks", where="sparse", got=f"{tuple(weight.shape)}, block={block!r}"
        )
    if (density is None) != bool(kind.keep) or not (density is None or is_share(density)):
        raise FdsError("sparse takes a density, but for N:M", where="density", got=repr(density), want="0 < it <= 1")
    count = 0 if density is None else num_kept(density, kind.count(tuple(weight.shape)))
    return kind.mask(weight.abs(), count).view(weight.shape)


def straight_through(mask: Tensor, scores: Tensor) -> Tensor:
    """Return a mask, 0 and 1 in the dtype of the scores, whose gradient is taken for that of the scores, (their shape).

    The straight-through estimator of Sanh et al. 2020 (arXiv:2005.07683): scores of what is masked have it too.
    """
    return mask.view(scores.shape).to(scores.dtype) + (scores - scores.detach())


def top(scores: Tensor, density: float) -> Tensor:
    """Return the mask of the ceil(density n) largest of n scores, straight through to them."""
    return straight_through(largest(scores, num_kept(density, scores.numel())), scores)


def is_share(x: Any) -> bool:
    """Say whether this is a share of what stays: above 0 and at most 1."""
    return is_number(x) and 0 < x <= 1


def row_scores(weight: Tensor) -> Tensor:
    """Return the sum of magnitudes of each row, (rows,): of a linear layer's output or a convolution's channel.

    It is of float64, in which the sum of numbers of 32 bits is the same in any order, but for its last bits.
    """
    return torch.linalg.vector_norm(matrix(weight), ord=1, dim=1, dtype=torch.float64)


def head_scores(weight: Tensor, num_heads: int) -> Tensor:
    """Return the sum of magnitudes of the columns of each head, (num_heads,), of an output projection (d, columns)."""
    return head_sums(row_scores(weight.t()), num_heads)


def head_sums(columns: Tensor, num_heads: int) -> Tensor:
    """Return the sum over the columns of each head, (num_heads,), of numbers (columns,)."""
    return columns.view(num_heads, -1).sum(1)


def density_at(t: Tensor, density: float, offset: int, end: int, curve: Curve = "cubic") -> Tensor:
    """Return the density after t updates, () float64: 1 up to `offset`, `density` from `end` on.

    In between the sparsity s = 1 - density is, with p = (t - offset) / (end - offset), s (1 - (1 - p)^3) (Zhu and Gupta
    2017, arXiv:1710.01878) where the curve is "cubic", and 1 - density^p where it is "exponential". Where `offset` is
    `end`, it is `density` from there on.
    """
    t = t.double()
    if end == offset:
        return torch.where(t >= offset, density, 1.0).double()
    p = ((t - offset) / (end - offset)).clamp(0, 1)
    between = density**p if curve == "exponential" else 1 - (1 - density) * (1 - (1 - p) ** 3)
    return torch.where(p < 1, between, density)  # at the end to the bit: what it rounds to would keep one more


def pack(mask: Tensor) -> Tensor:
    """Return a mask (rows, columns) as int64 words of 32 bits, (rows, ceil(columns / 32)); no word is negative."""
    rows, columns = mask.shape
    bits = torch.nn.functional.pad(mask, (0, -columns % BITS)).view(rows, -(-columns // BITS), BITS)
    return (bits.to(torch.int64) << torch.arange(BITS, device=mask.device)).sum(-1)


def unpack(words: Tensor, columns: int) -> Tensor:
    """Return the mask (rows, columns), uint8 of 0 and 1, that `pack` made words of."""
    low = words.contiguous().view(torch.uint8).view(*words.shape, 8)[..., :4]
    bits = (low.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=words.device)) & 1
    return bits.flatten(1)[:, :columns]
