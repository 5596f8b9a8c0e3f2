"""Functions that mix tokens are refused where a rank has a part of them: those of torch, in a first call of the loss.

The tensors of the batch have tokens along dim 1, and what is made of them is followed: where it has tokens, and whether
it is a sum over this rank's. Refused is what a rank computes of its part alone and one rank would not: functions along
the tokens, products of tokens with each other, slices that shift them, numbers that count from the part's first token,
and sums over the part that are more than a summand of the loss. docs/sequence.md lists what this cannot see.

Functions are known by name, whichever way they are called: torch.softmax, F.softmax and x.softmax are one.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fds import tree
from fds.collectives import Axis
from fds.errors import LossError, is_int, outside

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


class Role(NamedTuple):
    """How a tensor depends on the tokens of this rank."""

    kind: str  # it has "tokens", or what was "reduced" over them, or "positions" that count from a first one
    dim: int  # of tokens or positions, from the end; 0 of what is reduced
    line: str = ""  # which made it
    first: int = 0  # of positions


class Call:
    """A call of a function of torch that is given something of tokens."""

    def __init__(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[tuple[Tensor, Role]], out: Tensor
    ):
        self.name, self.args, self.kwargs, self.inputs, self.out = name, args, kwargs, inputs, out
        self.letters: dict[str, int] = {}  # of tokens in an einsum: where they lie in the result, from its end

    def __str__(self) -> str:
        name = {"getitem": "x[...]", "rmatmul": "matmul"}.get(self.name, self.name)
        shapes = [
            f"{tuple(x.shape)} ({role.kind}{f' along dim {x.dim() + role.dim}' * bool(role.dim)})"
            for x, role in self.inputs
        ]
        return f"{name} of {', '.join(shapes)}"

    def is_view(self) -> bool:
        """Whether the result lies in the memory of what is given first."""
        return shares(self.out, self.inputs[0][0])

    def meets(self) -> bool:
        """Whether numbers of tokens are computed with positions, or sums, that lie along them."""
        dims = {role.dim for _, role in self.inputs if role.kind == "tokens"}
        others = {role.dim for _, role in self.inputs if role.kind == "positions"}
        return bool(dims & others) and self.out.is_floating_point() and self.name != "getitem"

    def effect(self) -> str:
        """Return what the function does along the tokens: "mixes", "reduces", "ends", or nothing."""
        effects = {self._of(x, role.dim) for x, role in self.inputs if role.kind == "tokens"}
        effects |= {"mixes"} if self._makes_pairs() else set()
        return next((effect for effect in ("mixes", "reduces", "ends") if effect in effects), "")

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
            return "reduces" if dim == self._contracted_dim(x) else ""
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

    def _contracted_dim(self, x: Tensor) -> int:
        """Return over which dim of an operand a product is summed; 0 for none."""
        first, second = self._operands()
        return -1 if x is first or self.name == "linear" else -min(x.dim(), 2) if x is second else 0

    def _makes_pairs(self) -> bool:
        """Whether the result has tokens along two dims."""
        tokens = [(x, role.dim) for x, role in self.inputs if role.kind == "tokens"]
        if self.name == "einsum":
            return len(self.letters) > 1
        if self.name in PRODUCTS:
            first, second = self._operands()
            of_first, of_second = ({d for x, d in tokens if x is operand} for operand in (first, second))
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


_SHIFTS = {"getitem", "select", "pad", "roll", "flip", "diff", "cat", "concat", "concatenate"}
_EXEMPT = ("fds.nn.", "fds.kernels.", "fds.collectives.", "transformers.masking_utils")  # masks are of attention


class _Now(threading.local):
    allowed: bool = False


_now = _Now()


class allow_mixing:
    """Let functions mix this rank's tokens inside, where a part of a row is meant to stand for itself.

    `fds.context_parallel` refuses what a rank computes of its tokens and one rank would compute of all: a mean of them,
    a convolution, positions by `torch.arange`. `with fds.nn.allow_mixing():` says that it is right: a window that ends
    where parts do, a metric of each rank.
    """

    def __enter__(self) -> None:
        self.before, _now.allowed = _now.allowed, True

    def __exit__(self, *error: object) -> None:
        _now.allowed = self.before


class Watch:
    """Follow what has tokens through a call of the loss."""

    def __init__(self, axis: Axis, rows: set[int], lengths: set[int], tensors: Sequence[Tensor]):
        self.axis, self.lengths = axis, lengths - {1}
        self.long = self.lengths.union(n * b for n in self.lengths for b in rows)  # flattened with the rows too
        self.roles, self.wrong = WeakTensorKeyDictionary(), dict[str, bool]()
        for x in tensors:
            if x.shape[1] in self.lengths:
                self.roles[x] = Role("tokens", 1 - x.dim())

    def look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Follow what a function returned. Raises `LossError` for one that mixes tokens."""
        try:
            self._look(func, args, kwargs, out)
        except (AttributeError, IndexError, KeyError, TypeError):  # a call is written as none here knows it
            return

    def _look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        name = getattr(func, "__name__", "").strip("_")
        made = [x for x in tree.leaves(out) if isinstance(x, Tensor)]
        tensors = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        inputs = [(x, self.roles[x]) for x in tensors if x in self.roles]
        if not made:
            return
        if not inputs:
            role = self._find_positions(name, args, kwargs, made[0])
            if role is not None and not _is_exempt():
                self.roles[made[0]] = role._replace(line=line())
            return
        call = Call(name, args, kwargs, inputs, made[0])
        effect = call.effect()
        if (effect or call.meets()) and _is_exempt():
            return
        if effect == "mixes":
            self._raise_mixing(call)
        reduced = [role for _, role in inputs if role.kind == "reduced"]
        if reduced:
            self._check_reduced(call, reduced[0])
        role = next((role for _, role in inputs if role.kind == "positions"), None)
        if role is not None and call.meets() and self._is_wrong(role):
            self._raise_positions(call, role)
        if effect == "ends" or (name == "detach" and reduced):
            return
        for x in made:
            role = self._follow(call, effect, x)
            if role is not None:
                self.roles[x] = role

    def mark(self, out: Tensor, dim: int) -> None:
        """Note that something has tokens of this rank along a dim, counted from the end."""
        self.roles[out] = Role("tokens", dim)

    def follow(self, x: Tensor, out: Tensor) -> None:
        """Note that something has the tokens of another tensor along the same dim, counted from the front."""
        role = self.roles.get(x)
        if role is not None and role.kind == "tokens":
            self.mark(out, role.dim + x.dim() - out.dim())

    def _follow(self, call: Call, effect: str, out: Tensor) -> Role | None:
        """Return the role of something that a function made."""
        for kind in ("reduced", "positions", "tokens"):
            for x, role in call.inputs:
                if role.kind != kind:
                    continue
                if effect == "reduces" or kind == "reduced":
                    return Role("reduced", 0, role.line or line()) if out.dim() else None
                dim = next(iter(call.letters.values()), None) or _dim_in(out, x, role.dim, call.name, self.long)
                if dim is None or (kind == "positions" and (role := _move(call, x, role)) is None):
                    return None
                return role._replace(dim=dim)
        return None

    def _find_positions(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Role | None:
        """Return the positions that something whole is of if it is as long as a part: `arange`, a slice of a table."""
        if name == "arange" and out.shape[0] in self.lengths and not kwargs.keys() & {"start", "end", "step"}:
            numbers = [*args, 1][: max(len(args), 3)] if len(args) > 1 else [0, *args, 1]
            return Role("positions", -1, first=numbers[0]) if is_int(numbers[0]) and numbers[2] == 1 else None
        if name == "narrow" and len(args) == 4 and args[3] in self.lengths and is_int(args[2]):
            return Role("positions", args[1] % args[0].dim() - args[0].dim(), first=args[2])
        if name != "getitem" or not isinstance(args[0], Tensor):
            return None
        for dim, item in items(args[0], args[1]):
            if isinstance(item, slice) and item.step in (None, 1) and all(map(is_end, (item.start, item.stop))):
                first, last, _ = item.indices(args[0].shape[dim])
                if last - first in self.lengths and args[0].shape[dim] > last - first and out.dim() >= -dim:
                    return Role("positions", dim, first=first)
        return None

    def _is_wrong(self, role: Role) -> bool:
        """Ask all ranks, in the same call, whether their positions begin with the same number."""
        if role.line not in self.wrong:
            self.wrong[role.line] = len(set(self.axis.exchange(role.first, "first positions"))) == 1
        return self.wrong[role.line]

    def _check_reduced(self, call: Call, role: Role) -> None:
        """Raise `LossError` for a sum over this rank's tokens that is more than a summand of the loss."""
        kinds = [role.kind for _, role in call.inputs]
        meets = "tokens" in kinds and call.out.is_floating_point()
        power = call.out.requires_grad and (
            (call.name not in LINEAR and not call.is_view())
            or (kinds.count("reduced") > 1 and call.name in {"mul", *PRODUCTS})
        )
        if (meets or power) and not _is_exempt():
            self._raise(
                "a sum or mean over this rank's tokens is taken for that of whole rows",
                f"{call} of what was summed over tokens at {role.line}",
                "sums that are added up to the loss, as fds.Mean(total, weight)",
            )

    def _raise_positions(self, call: Call, role: Role) -> None:
        self._raise(
            "positions begin with the same number on every rank, for tokens of different places in the row",
            f"{call} of positions from {role.line}",
            "positions in the batch, cut as tokens are: torch.arange(S).chunk(N)[rank], or fds.nn.zigzag_positions",
            "model(..., position_ids=...)" if "called in" in role.line else "",
        )

    def _raise_mixing(self, call: Call) -> None:
        where, hint = line(), ""
        want = "what treats every token by itself"
        if call.name in PRODUCTS or "softmax" in call.name:
            want, hint = (
                "fds.nn.attention(..., axis=axis), which sees all ranks' tokens",
                "model.set_attn_implementation: docs/from-deepspeed.md",
            )
        elif call.name in _SHIFTS:
            want, hint = (
                "rows that are shifted before they are cut into parts, as targets are",
                "no labels= for the model",
            )
        self._raise(
            "a function mixes this rank's tokens, of rows that have more",
            str(call),
            want,
            hint * ("called in" in where),
        )

    def _raise(self, what: str, got: str, want: str, hint: str = "") -> None:
        where = f"{line()}: context_parallel over {self.axis.name!r}, {self.axis.size} ranks"
        hint += f"{', or ' if hint else ''}with fds.nn.allow_mixing(): where a part is meant to stand for itself"
        raise LossError(what, where=where, got=got, want=want, hint=hint)


def _move(call: Call, x: Tensor, role: Role) -> Role | None:
    """Return positions to which something is added; None where that cannot be told."""
    others = [y for y in call.args if y is not x]
    if call.name not in ("add", "sub", "radd", "rsub") or x.is_floating_point() or not others:
        return role
    if not is_int(others[0]):
        return None
    return role._replace(first=role.first + (others[0] if "add" in call.name else -others[0]))


def _dim_in(out: Tensor, x: Tensor, dim: int, name: str, long: set[int]) -> int | None:
    """Return the dim of x's tokens in what a function made of it, None if there is none."""
    dims = [d for d in range(-out.dim(), 0) if out.shape[d] in long]
    if shares(out, x):
        dims = [d for d in dims if out.stride(d) == x.stride(dim)]
    same = dim + x.dim() - out.dim()  # counted from the front
    if out.dim() < x.dim() or name in ("embedding", "one_hot", "getitem"):
        return same if same in dims else next(iter(dims), None) if len(dims) == 1 else None
    return dim if dim in dims else next(iter(dims), None) if len(dims) == 1 else None


def _is_exempt() -> bool:
    """Say whether the function was called by a layer of fds, by what makes masks, or where mixing is allowed."""
    if _now.allowed:
        return True
    frame: Any = sys._getframe(1)
    module = frame.f_globals.get("__name__", "")
    while frame is not None and (module.startswith("torch.") or module in _LOOKING):
        frame = frame.f_back
        module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.startswith(_EXEMPT)


_LOOKING = (__name__, "fds.nn.parallel.tokens")


def line() -> str:
    """Return the user's line; of a model of transformers its own, too."""
    line, user = outside(), outside("transformers")
    return line if line == user else f"{line}, called in {user}"
