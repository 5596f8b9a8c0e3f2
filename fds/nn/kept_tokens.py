"""Some of the tokens of each row, gathered for a layer with what else it is given, and put back among the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import LossError
from fds.loss import Block, first_of
from fds.loss.module_copies import Watching

Order = Literal["batch_seq", "seq_batch"]
ORDERS = ("batch_seq", "seq_batch")


@attrs.frozen(eq=False)
class Tokens:
    """The tokens of a microbatch that a layer computes: `index` (B, k) of `length`, ascending in each row."""

    index: Tensor
    length: int
    order: Order
    block: Block
    first: bool  # whether the layer runs for the first time: then values may be read from a GPU

    @classmethod
    def drawn(cls, seed: int, x: Tensor, kept: int, order: Order, block: Block, *, first: bool) -> Tokens:
        """Return so many tokens for each row of an activation, any subset as likely, from a generator of its own."""
        rows, length = x.shape[:2] if order == "batch_seq" else (x.shape[1], x.shape[0])
        generator = torch.Generator(x.device).manual_seed(seed)
        numbers = torch.rand(rows, length, generator=generator, device=x.device, dtype=torch.float64)
        return cls(numbers.argsort(dim=1, stable=True)[:, :kept].sort(1).values, length, order, block, first)

    @property
    def flat(self) -> Tensor:
        """Where the tokens lie in activations whose first two dims are one, in the order of what is gathered."""
        rows = torch.arange(len(self.index), device=self.index.device)
        if self.order == "batch_seq":
            return (rows[:, None] * self.length + self.index).flatten()
        return (self.index * len(self.index) + rows[:, None]).T.flatten()

    @property
    def shape(self) -> tuple[int, int]:
        """The first two dims of an activation of these tokens."""
        rows, kept = self.index.shape
        return (rows, kept) if self.order == "batch_seq" else (kept, rows)

    def take(self, x: Tensor) -> Tensor:
        """Return these tokens of an activation."""
        return x.flatten(0, 1).index_select(0, self.flat).unflatten(0, self.shape)

    def put(self, x: Tensor, y: Any) -> Tensor:
        """Return an activation with others in the places of these tokens. Raises `LossError` for another shape."""
        want = (*self.shape, *x.shape[2:])
        if not isinstance(y, Tensor) or y.shape != want:
            got = str(tuple(y.shape)) if isinstance(y, Tensor) else type(y).__name__
            raise self._error("a layer does not return as many tokens as it is given", got, str(want))
        return x.to(y.dtype).flatten(0, 1).index_copy(0, self.flat, y.flatten(0, 1)).view(x.shape)

    def of(self, x: Any, name: str) -> Any:
        """Return what of an argument, of this name if any, belongs to these tokens.

        Raises `LossError` where that cannot be told.
        """
        if not isinstance(x, Tensor) or is_cache(name):  # of caches, which are empty in training
            return x
        if name.startswith(("encoder_", "memory", "cu_seq")):
            what = "a layer looks at other sequences, or at rows that are joined"
            raise self._error(what, f"{name}, {tuple(x.shape)}", "attention of the tokens of a row to each other")
        if self.length not in x.shape:
            return x
        ways = self._ways(x)
        if "mask" in name or "bias" in name or name == "alibi" or x.dtype == torch.bool:
            ways = {way: gather for way, gather in ways.items() if way.startswith("a mask")}
            of_rows = "padding" in name or name == "attention_mask"  # as torch and transformers call them
            both = ("a mask of rows", "a mask of all rows")
            if ways.keys() >= set(both):
                ways.pop(both[of_rows])
        elif any(word in name for word in ("position", "rotary", "cos", "sin", "freqs", "_ids")):
            ways = {way: gather for way, gather in ways.items() if way.startswith("numbers")}
        if len(ways) != 1 and len({id(gather) for gather in ways.values()}) != 1:
            got = f"{name or 'a part of a tuple'}, {tuple(x.shape)}: {' or '.join(ways) or 'tokens without rows'}"
            raise self._error(
                f"it cannot be told where an argument has the {self.length} tokens of {len(self.index)} rows",
                got,
                "(B or 1, S, ...), or a mask (B, S) or (B or 1, heads or 1, S or 1, S)",
                "by name: what has 'mask' in it is a mask, what has 'position' in it is numbers of tokens",
            )
        return next(iter(ways.values()))(x)

    def called(self, forward: Callable[..., Any], argument: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what a layer returns that computes these tokens, with all others as they are in its first argument."""
        x = first_of(argument)
        before: dict[int, Any] = {}  # id of what is gathered -> of what; both are alive as long as this runs

        def part(value: Any, name: str) -> Any:
            if type(value).__name__ == "BlockMask" or (tree.opaque(value) and not is_cache(name)):
                what = "an argument of a layer hides tensors, which cannot be gathered"
                raise self._error(what, f"{name or 'a part'}, a {type(value).__name__}", "tensors, or trees of them")
            new = self.take(value) if value is x else self.of(value, name)
            before[id(new)] = value
            return new

        def parts(value: Any, name: str) -> Any:
            if tree.is_dict(value):
                return {key: parts(inner, str(key)) for key, inner in value.items()}
            return tree.map(lambda leaf: part(leaf, name), value) if tree.is_sequence(value) else part(value, name)

        names = [name for name, _ in self.block.named(args, {})]
        new_args = [parts(value, name) for value, name in zip(args, names, strict=True)]
        new_kwargs = {name: parts(value, name) for name, value in kwargs.items()}
        out = forward(*new_args, **new_kwargs)
        if not isinstance(out, tuple | list):
            return self.put(x, out)
        first, *rest = out
        for leaf in tree.leaves(rest):
            if id(leaf) not in before and isinstance(leaf, Tensor) and self.index.shape[1] in leaf.shape[1:]:
                got, want = f"another tensor, {tuple(leaf.shape)}", "a layer that returns what it changes"
                raise self._error("a layer returns something else of the tokens that it is given", got, want)
        return type(out)([self.put(x, first), *tree.map(lambda leaf: before.get(id(leaf), leaf), rest)])

    def _ways(self, x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return in which ways an argument of this shape may have tokens, and what gathers it."""
        n, rows, shape = self.length, (1, len(self.index)), x.shape
        along = [dim for dim in range(x.dim()) if shape[dim] == n]
        ways: dict[str, Callable[[Tensor], Tensor]] = {}
        if x.dim() == 2 and shape[0] in rows and shape[1] == n:
            ways["a mask of rows"] = ways["numbers of rows"] = self._rows
        if x.dim() == 2 and along == [0, 1]:
            ways["a mask of all rows"] = self._cropped
        of_rows = shape[0] in rows or (x.dim() == 3 and shape[0] % rows[1] == 0)
        if x.dim() in (3, 4) and of_rows and shape[-1] == n and shape[-2] in (1, n):
            ways["a mask"] = self._mask
        if self.order == "batch_seq" and x.dim() > 2 and shape[0] in rows and shape[1] == n:
            ways["numbers of tokens"] = self._rows
        if self.order == "seq_batch" and x.dim() > 1 and shape[0] == n and shape[1] in rows:
            ways["numbers of tokens, before rows"] = lambda x: self._rows(x.movedim(0, 1)).movedim(0, 1)
        if x.dim() == 4 and shape[0] in rows and shape[2] == n and shape[3] != n and shape[1] != n:
            ways["numbers of tokens, by head"] = lambda x: self._along(x, 2)
        return ways

    def _rows(self, x: Tensor) -> Tensor:
        return self._along(x, 1)

    def _mask(self, x: Tensor) -> Tensor:
        x = self._along(x, x.dim() - 1)
        return self._along(x, x.dim() - 2) if x.shape[-2] == self.length else x

    def _cropped(self, x: Tensor) -> Tensor:
        """Return what is left of a mask (S, S) without rows, if that is the same whichever tokens are left."""
        kept = self.index.shape[1]
        if (self.first or x.device.type == "cpu") and not _is_of_order(x.detach()):
            raise self._error(
                "rows keep other tokens than each other, and a mask of all rows says more than their order",
                str(tuple(x.shape)),
                "a causal mask, or one with a first dim for rows: (B or 1, 1, S, S)",
            )
        return x[:kept, :kept]

    def _along(self, x: Tensor, dim: int) -> Tensor:
        """Return these tokens along a dim of what has rows, heads of rows or 1 along the first."""
        rows = len(self.index)
        x = x.expand(rows, *x.shape[1:]) if len(x) == 1 else x
        index = self.index.repeat_interleave(len(x) // rows, 0)
        sizes = [index.shape[1] if d == dim else n for d, n in enumerate(x.shape)]
        ones = [len(index) if d == 0 else index.shape[1] if d == dim else 1 for d in range(x.dim())]
        return x.gather(dim, index.view(ones).expand(sizes))

    def _error(self, what: str, got: str, want: str, hint: str = "") -> LossError:
        return LossError(f"random_ltd: {what}", where=f"layer {self.block.name!r}", got=got, want=want, hint=hint)


def is_cache(name: str) -> bool:
    """Return whether an argument of this name is a cache, or of one: empty in training, and written to by layers."""
    return "past" in name or "cache" in name


def _is_of_order(x: Tensor) -> bool:
    """Return whether a matrix has one value above the diagonal, one below it, and one on it."""
    ones = torch.ones_like(x, dtype=torch.bool)
    parts = (x[ones.triu(1)], x[ones.tril(-1)], x.diagonal())
    return all(bool((part == part[:1]).all()) for part in parts)


def _says_no_place(x: Tensor, kept: int) -> bool:
    """Return whether it is the same for tokens at any places: alike along all dims of that length, or of order."""
    if x.dim() > 1 and x.shape[-2:] == (kept, kept) and _is_of_order(x.reshape(-1, kept, kept)[0]):
        return True
    return all(bool((x == x.narrow(dim, 0, 1)).all()) for dim, n in enumerate(x.shape) if n == kept)


class Places(Watching):
    """Notices where a layer computes its tokens with as many numbers that it was not given: the functions that do.

    What is made of nothing that it was given, such as positions, or of a table, counts from the first token on.
    """

    def __init__(self, kept: int, inputs: Any):
        super().__init__()
        self.kept, self.lines = kept, list[str]()
        self.alive = _plain(inputs)  # of whose memory the addresses are
        self.inside = set(map(_memory, self.alive))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = _plain((args, kwargs or {}))
        inside = [_memory(x) in self.inside for x in inputs]
        if not any(inside):
            return out
        results = _plain(out)
        self.alive += results
        self.inside.update(map(_memory, results))
        others = [x for x, is_inside in zip(inputs, inside, strict=True) if not is_inside and self.kept in x.shape]
        if not all(_says_no_place(x, self.kept) for x in others):
            frame: Any = sys._getframe(1)
            modes = ("__torch_dispatch__", "OpOverload.__call__")  # of other modes, inside of this one
            while frame.f_code.co_qualname.endswith(modes):
                frame = frame.f_back
            self.lines.append(f"{func.overloadpacket.__name__} in {frame.f_code.co_qualname}")
        return out


def _plain(values: Any) -> list[Tensor]:
    """Return the tensors that have memory: all but parameters that are gathered on use."""
    return [x for x in tree.leaves(values) if isinstance(x, Tensor) and not getattr(type(x), "gathered_on_use", False)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
