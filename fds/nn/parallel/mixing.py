"""Functions that mix tokens are refused where a rank has a part of them: those of torch, in a first call of the loss.

The tensors of the batch have tokens along dim 1, and what is made of them is followed: where it has tokens, and whether
it is a sum over this rank's. Refused is what a rank computes of its part alone and one rank would not: functions along
the tokens, products of tokens with each other, slices that shift them, numbers that count from the part's first token,
and sums over the part that are more than a summand of the loss. docs/sequence.md lists what this cannot see.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fds import tree
from fds.collectives import Axis
from fds.errors import LossError, is_int, outside
from fds.nn.parallel.along import LINEAR, PRODUCTS, Call, Lies, is_end, items, shares

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
        self.lies, self.wrong = WeakTensorKeyDictionary(), dict[str, bool]()
        for x in tensors:
            if x.shape[1] in self.lengths:
                self.lies[x] = Lies("tokens", 1 - x.dim())

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
        given = [(x, self.lies[x]) for x in tensors if x in self.lies]
        if not made:
            return
        if not given:
            lies = self._numbered(name, args, kwargs, made[0])
            if lies is not None and not _is_exempt():
                self.lies[made[0]] = lies._replace(line=line())
            return
        call = Call(name, args, kwargs, given, made[0])
        effect = call.effect()
        if (effect or call.meets()) and _is_exempt():
            return
        if effect == "mixes":
            self._raise_mixing(call)
        reduced = [lies for _, lies in given if lies.kind == "reduced"]
        if reduced:
            self._check_reduced(call, reduced[0])
        lies = next((lies for _, lies in given if lies.kind == "positions"), None)
        if lies is not None and call.meets() and self._is_wrong(lies):
            self._raise_positions(call, lies)
        if effect == "ends" or (name == "detach" and reduced):
            return
        for x in made:
            found = self._made(call, effect, x)
            if found is not None:
                self.lies[x] = found

    def mark(self, out: Tensor, dim: int) -> None:
        """Note that something has tokens of this rank along a dim, counted from the end."""
        self.lies[out] = Lies("tokens", dim)

    def _made(self, call: Call, effect: str, out: Tensor) -> Lies | None:
        """Return how something lies that a function made."""
        for kind in ("reduced", "positions", "tokens"):
            for x, lies in call.given:
                if lies.kind != kind:
                    continue
                if effect == "reduces" or kind == "reduced":
                    return Lies("reduced", 0, lies.line or line()) if out.dim() else None
                dim = next(iter(call.letters.values()), None) or _dim_in(out, x, lies.dim, call.name, self.long)
                if dim is None or (kind == "positions" and (lies := _moved(call, x, lies)) is None):
                    return None
                return lies._replace(dim=dim)
        return None

    def _numbered(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Lies | None:
        """Return the positions that something whole is of if it is as long as a part: `arange`, a slice of a table."""
        if name == "arange" and out.shape[0] in self.lengths and not kwargs.keys() & {"start", "end", "step"}:
            numbers = [*args, 1][: max(len(args), 3)] if len(args) > 1 else [0, *args, 1]
            return Lies("positions", -1, first=numbers[0]) if is_int(numbers[0]) and numbers[2] == 1 else None
        if name == "narrow" and len(args) == 4 and args[3] in self.lengths and is_int(args[2]):
            return Lies("positions", args[1] % args[0].dim() - args[0].dim(), first=args[2])
        if name != "getitem" or not isinstance(args[0], Tensor):
            return None
        for dim, item in items(args[0], args[1]):
            if isinstance(item, slice) and item.step in (None, 1) and all(map(is_end, (item.start, item.stop))):
                first, last, _ = item.indices(args[0].shape[dim])
                if last - first in self.lengths and args[0].shape[dim] > last - first and out.dim() >= -dim:
                    return Lies("positions", dim, first=first)
        return None

    def _is_wrong(self, lies: Lies) -> bool:
        """Ask all ranks, in the same call, whether their positions begin with the same number."""
        if lies.line not in self.wrong:
            self.wrong[lies.line] = len(set(self.axis.exchange(lies.first, "first positions"))) == 1
        return self.wrong[lies.line]

    def _check_reduced(self, call: Call, lies: Lies) -> None:
        """Raise `LossError` for a sum over this rank's tokens that is more than a summand of the loss."""
        kinds = [lies.kind for _, lies in call.given]
        meets = "tokens" in kinds and call.out.is_floating_point()
        power = call.out.requires_grad and (
            (call.name not in LINEAR and not call.is_view())
            or (kinds.count("reduced") > 1 and call.name in {"mul", *PRODUCTS})
        )
        if (meets or power) and not _is_exempt():
            self._raise(
                "a sum or mean over this rank's tokens is taken for that of whole rows",
                f"{call} of what was summed over tokens at {lies.line}",
                "sums that are added up to the loss, as fds.Mean(total, weight)",
            )

    def _raise_positions(self, call: Call, lies: Lies) -> None:
        self._raise(
            "positions begin with the same number on every rank, for tokens of different places in the row",
            f"{call} of positions from {lies.line}",
            "positions in the batch, cut as tokens are: torch.arange(S).chunk(N)[rank], or fds.nn.zigzag_positions",
            "model(..., position_ids=...)" if "called in" in lies.line else "",
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


def _moved(call: Call, x: Tensor, lies: Lies) -> Lies | None:
    """Return positions to which something is added; None where that cannot be told."""
    others = [y for y in call.args if y is not x]
    if call.name not in ("add", "sub", "radd", "rsub") or x.is_floating_point() or not others:
        return lies
    if not is_int(others[0]):
        return None
    return lies._replace(first=lies.first + (others[0] if "add" in call.name else -others[0]))


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
