"""What a function of torch does along a dim in which something has tokens: nothing, a sum over it, or a mixture.

Functions are known by name, whichever way they are called: torch.softmax, F.softmax and x.softmax are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fds import tree
from fds.errors import is_int

# Functions by the place of their argument `dim`, and its default; None stands for all dims.
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("cat", "concat", "concatenate"), (1, 0)),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "unfold"), (1, -1)),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "select", "flip"), (1, -1)),
    **dict.fromkeys(("diff", "topk", "kthvalue", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"), (2, -1)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
    "roll": (2, None),
}
_MADE_OF_ALL: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("max", "min", "amax", "amin", "argmax", "argmin", "logsumexp", "prod", "std", "var"), (1, None)),
    **dict.fromkeys(("std_mean", "var_mean", "median", "nanmedian", "mode"), (1, None)),
    **dict.fromkeys(("norm", "linalg_vector_norm", "quantile", "nanquantile"), (2, None)),
}
_SUMS: dict[str, tuple[int, int | None]] = dict.fromkeys(("sum", "mean", "nansum", "nanmean"), (1, None))
PRODUCTS = {"matmul", "rmatmul", "mm", "bmm", "mv", "dot", "linear", "addmm", "baddbmm", "einsum"}
LINEAR = {*_SUMS, *PRODUCTS, "add", "sub", "rsub", "mul", "div", "neg", "to", "type", "float", "double", "half"}
LINEAR |= {"bfloat16", "cat", "concat", "stack", "clone", "reshape", "contiguous", "where", "masked_fill", "getitem"}


class Lies(NamedTuple):
    """How a tensor depends on the tokens of this rank."""

    kind: str  # it has "tokens", or what was "reduced" over them, or "positions" that count from a first one
    dim: int  # of tokens or positions, from the end; 0 of what is reduced
    line: str = ""  # which made it
    first: int = 0  # of positions


class Call:
    """A call of a function of torch that is given something of tokens."""

    def __init__(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], given: list[tuple[Tensor, Lies]], out: Tensor
    ):
        self.name, self.args, self.kwargs, self.given, self.out = name, args, kwargs, given, out
        self.letters: dict[str, int] = {}  # of tokens in an einsum: where they lie in the result, from its end

    def __str__(self) -> str:
        name = {"getitem": "x[...]", "rmatmul": "matmul"}.get(self.name, self.name)
        lie = [
            f"{tuple(x.shape)} ({lies.kind}{f' along dim {x.dim() + lies.dim}' * bool(lies.dim)})"
            for x, lies in self.given
        ]
        return f"{name} of {', '.join(lie)}"

    def is_view(self) -> bool:
        """Whether the result lies in the memory of what is given first."""
        return shares(self.out, self.given[0][0])

    def meets(self) -> bool:
        """Whether numbers of tokens are computed with positions, or sums, that lie along them."""
        dims = {lies.dim for _, lies in self.given if lies.kind == "tokens"}
        others = {lies.dim for _, lies in self.given if lies.kind == "positions"}
        return bool(dims & others) and self.out.is_floating_point() and self.name != "getitem"

    def effect(self) -> str:
        """Return what the function does along the tokens: "mixes", "reduces", "ends", or nothing."""
        found = {self._of(x, lies.dim) for x, lies in self.given if lies.kind == "tokens"}
        found |= {"mixes"} if self._makes_pairs() else set()
        return next((effect for effect in ("mixes", "reduces", "ends") if effect in found), "")

    def _of(self, x: Tensor, dim: int) -> str:
        name, index = self.name, x.dim() + dim
        if name in _ALONG and index in self._dims(x, *_ALONG[name]):
            is_alone = "cat" in name and self.out.shape[dim] == x.shape[dim]  # beside an empty one, as caches begin
            return "" if is_alone else "mixes"
        if name in _SUMS and index in self._dims(x, *_SUMS[name]):
            return "reduces"
        if name in _MADE_OF_ALL and index in self._dims(x, *_MADE_OF_ALL[name]):
            return "mixes" if self.out.dim() else "ends"
        if name in ("getitem", "narrow"):
            return self._slices(x, dim)
        if name == "einsum":
            return self._sums_letters(x, dim)
        if name in PRODUCTS:
            return "reduces" if dim == self._contracted(x) else ""
        return "mixes" if _mixes_neighbours(name, x, dim, self.args, self.kwargs) else ""

    def _dims(self, x: Tensor, at: int, default: int | None) -> set[int]:
        """Return along which dims the function computes."""
        rest = self.args[at:] if self.name == "flip" else self.args[at : at + 1]
        value = next((self.kwargs[key] for key in ("dim", "dims", "axis") if key in self.kwargs), None)
        dims = [d for d in tree.leaves(rest if value is None else value) if is_int(d)]
        if not dims and not any(isinstance(x, Tensor) for x in rest):
            dims = range(x.dim()) if default is None else [default]
        return {d % x.dim() for d in dims}

    def _slices(self, x: Tensor, dim: int) -> str:
        if x is not self.args[0]:  # tokens that are looked up in a table
            return ""
        if self.name == "narrow":
            return "ends" if self.args[1] % x.dim() == x.dim() + dim and self.args[3] < x.shape[dim] else ""
        item = dict(items(x, self.args[1])).get(dim)
        if is_int(item):
            return "mixes"
        if isinstance(item, slice) and item != slice(None) and all(map(is_end, (item.start, item.stop))):
            whole = item.indices(x.shape[dim]) == (0, x.shape[dim], 1)
            # those who compute the loss by chunks say where each begins and ends
            chunk = (item.start is not None and item.stop is not None) or item.step not in (None, 1)
            return "" if whole else "ends" if chunk else "mixes"
        return "" if item is None or isinstance(item, slice) else "ends"

    def _operands(self) -> tuple[Any, Any]:
        first, second = self.args[-2:] if self.name in ("addmm", "baddbmm") else (*self.args[:2], None)[:2]
        return (second, first) if self.name == "rmatmul" else (first, second)

    def _contracted(self, x: Tensor) -> int:
        """Return over which dim of an operand a product is summed; 0 for none."""
        first, second = self._operands()
        return -1 if x is first or self.name == "linear" else -min(x.dim(), 2) if x is second else 0

    def _makes_pairs(self) -> bool:
        """Whether the result has tokens along two dims."""
        tokens = [(x, lies.dim) for x, lies in self.given if lies.kind == "tokens"]
        if self.name == "einsum":
            return len(self.letters) > 1
        if self.name in PRODUCTS:
            first, second = self._operands()
            of_first, of_second = ({d for x, d in tokens if x is one} for one in (first, second))
            return -2 in of_first and -1 in of_second
        return any(
            x.dim() >= -b and y.dim() >= -a and x.shape[b] == y.shape[a] == 1 and self.out.shape[a] == x.shape[a]
            and self.out.dim() >= max(-a, -b) and self.out.shape[b] == y.shape[b]
            for x, a in tokens for y, b in tokens if a != b
        )  # fmt: skip

    def _sums_letters(self, x: Tensor, dim: int) -> str:
        """Read which letters of an einsum the tokens of an operand have."""
        equation, operands = self.args[0], tree.leaves(self.args[1:])
        if not isinstance(equation, str):
            return "ends"
        left, arrow, right = equation.replace(" ", "").partition("->")
        right = right if arrow else "".join(sorted(c for c in set(left) if left.count(c) == 1 and c.isalpha()))
        letters = [_letter(term, dim) for term, y in zip(left.split(","), operands, strict=True) if y is x]
        head, _, tail = right.rpartition("...")
        if any(not letter or letter in head for letter in letters):  # what an ellipsis stands for
            return "ends"
        self.letters |= {letter: tail.index(letter) - len(tail) for letter in letters if letter in tail}
        return "" if all(letter in tail for letter in letters) else "reduces"


def _letter(term: str, dim: int) -> str:
    """Return the letter of a dim from the end; "" of one that an ellipsis stands for."""
    after = term.rpartition("...")[2]
    return after[dim] if len(after) >= -dim else ""


def _mixes_neighbours(name: str, x: Tensor, dim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Say whether a layer computes something of a token that depends on others."""
    index, kind = x.dim() + dim, re.fullmatch(r"(conv|conv_transpose|\w*pool)(\d)d(_with_indices)?", name)
    if kind is not None and "conv" in name:
        weight = kwargs["weight"] if "weight" in kwargs else args[1]
        return -dim <= int(kind[2]) + 1 and weight.shape[dim] > 1
    if kind is not None:
        return -dim <= int(kind[2])
    if name == "pad":
        widths = kwargs["pad"] if "pad" in kwargs else args[1]
        return any(widths[-2 * dim - 2 : -2 * dim])
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return index == int(args[-1] is True)
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs["normalized_shape"] if "normalized_shape" in kwargs else args[1]
        return -dim <= len(shape)
    if name == "batch_norm":
        return index != 1 and bool(kwargs["training"] if "training" in kwargs else len(args) > 5 and args[5])
    return (name == "group_norm" and index > 0) or (name in ("instance_norm", "interpolate") and index > 1)


def items(x: Tensor, index: Any) -> Iterator[tuple[int, Any]]:
    """Yield what stands for each dim in x[index], by the dim from the end; the index where a tensor chooses."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (Tensor, list)) for item in entries):
        for dim in range(-x.dim(), 0):
            yield dim, index
        return
    after = next((i for i, item in enumerate(entries) if item is Ellipsis), len(entries))
    head, tail = ([item for item in part if item is not None] for part in (entries[:after], entries[after + 1 :]))
    yield from zip(range(-x.dim(), 0), head, strict=False)
    yield from zip(range(-len(tail), 0), tail, strict=True)


def is_end(value: Any) -> bool:
    """Say whether a slice of numbers may begin or end with a value."""
    return value is None or is_int(value)


def shares(out: Tensor, x: Tensor) -> bool:
    """Say whether two tensors lie in the same memory; False where that cannot be told."""
    try:
        return out.untyped_storage()._cdata == x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # of torch.func
        return False
