"""What is drawn for parts of sequences: every rank draws for the whole rows, and takes what falls on its tokens.

    y_r = x_r * part_r(dropout(1, p))        noise_r = part_r(noise)

So ranks that pass parts of the same rows, in either layout, draw what one rank draws, since they draw from one seed.
What has nothing of tokens (a noise level of each row) is alike on all of them. Tokens lie along dim 1, as in batches.
It costs a tensor of the whole rows for a moment; and 1.5 us for every function of torch that a loss calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import init
from torch.overrides import TorchFunctionMode

from fds import tree
from fds.collectives import Axis
from fds.errors import LossError
from fds.loss.compiled import is_trial_run
from fds.nn.parallel.mixing import Watch, line
from fds.nn.parallel.zigzag import Layout, chunks_of, in_order

# private: what `torch.autograd.graph.saved_tensors_hooks` has entered last
_saving: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore
_WHERE = "context_parallel over {axis.name!r}, {axis.size} ranks"


class Cut(NamedTuple):
    """How a tensor is a piece of a whole: along which dim, how long that is, and first index and length of our ranges.

    The dim counts from the end. What the ranges have beyond the whole is padding.
    """

    dim: int
    whole: int
    ranges: list[tuple[int, int]]


@attrs.frozen
class Parts:
    """In the station `context`: the ranks of an axis pass parts of the same rows, laid out so."""

    axis: Axis
    layout: Layout = "contiguous"
    looked: set[tuple[int, bool]] = attrs.field(factory=set, init=False, eq=False)  # calls of layers, with grad or not

    def __repr__(self) -> str:
        return f"for whole rows, of which ranks of {self.axis.name} take their {self.layout} parts"

    def around_layer(self, layer: int, inputs: Any) -> Draws:
        """Return the mode in which a call of a layer runs, which is given these of the microbatch's tensors."""
        tensors = [x for x in tree.leaves(inputs) if isinstance(x, Tensor) and x.dim() > 1]
        shapes = [x.shape for x in tensors]
        lengths, rows = {shape[1] for shape in shapes}, {shape[0] for shape in shapes}
        lengths = lengths - {1} or lengths  # of (rows, 1, ...) all tokens of a row share something
        flat, call = lengths.union(shape[:2].numel() for shape in shapes) - rows, (layer, torch.is_grad_enabled())
        watch = None if call in self.looked else Watch(self.axis, rows, lengths, tensors)
        return Draws(self, rows, lengths, flat, call, watch)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return whole rows (B, S, ...), given the parts of all ranks."""
        whole = torch.cat(list(parts), 1)
        return whole if self.layout == "contiguous" else in_order(whole, len(parts), 1)

    def ranges(self, length: int) -> list[tuple[int, int]]:
        """Return first index and length of each range of this rank's tokens in the whole rows."""
        if self.layout == "contiguous":
            return [(self.axis.index * length, length)]
        if length % 2:
            raise LossError(
                "a rank's part in zig-zag order is two chunks",
                where=_WHERE.format(axis=self.axis),
                got=f"{length} tokens",
                want="an even number: fds.nn.zigzag(whole, axis)",
            )
        half = length // 2
        return [(chunk * half, half) for chunk in chunks_of(self.axis.index, self.axis.size)]


class _Now(threading.local):  # torch.compile traces no `ContextVar`
    draws: Draws | None = None


_now = _Now()


def now() -> Draws | None:
    """Return how calls of the loss draw that run in this thread, None where rows are whole."""
    return _now.draws


class Draws(TorchFunctionMode):
    """Inside, functions of torch draw for whole rows, of which this rank has parts of these lengths."""

    def __init__(
        self,
        parts: Parts,
        rows: set[int],
        lengths: set[int],
        flat: set[int],
        call: tuple[int, bool],
        watch: Watch | None,
    ):  # flat: tokens without rows
        super().__init__()
        self.parts, self.rows, self.lengths, self.flat = parts, rows, lengths, flat
        self.hooks, self.recorded = _saving(True), call[1]
        self.before: Draws | None = None
        self.call, self.watch = call, watch

    def __enter__(self) -> Draws:
        self.before, _now.draws = _now.draws, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _now.draws = self.before
        if error[:1] == (None,):
            self.parts.looked.add(self.call)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        other = _OTHERS.get(func)
        if other is None or (kwargs and kwargs.get("generator") is not None):  # draws from a generator are the user's
            out = func(*args, **(kwargs or {}))
        else:
            out = other(self, func, *args, **(kwargs or {}))
        if not is_dynamo_compiling() and self.watch is not None:  # 0.1 us; and code is compiled once, not again without
            self.watch.look(func, args, kwargs or {}, out)
        return out

    def cut(self, shape: Sequence[int]) -> Cut | None:
        """Return how what has this shape is cut, None for what has nothing of tokens.

        Raises `LossError` where that cannot be told, and where it would be drawn again in backward.
        """
        n = shape[1] if len(shape) > 1 else 0
        if n in self.lengths and shape[0] in self.rows and not self.lengths.intersection(shape[2:-1]):
            self._check_once()
            return Cut(1 - len(shape), n * self.parts.axis.size, self.parts.ranges(n))
        if self.flat.intersection(shape[:1]) or self.lengths.intersection(shape[1:]):
            lengths = " or ".join(map(str, sorted(self.lengths)))
            raise LossError(
                "something is drawn, and it cannot be told along which dim it has this rank's tokens",
                where=_WHERE.format(axis=self.parts.axis),
                got=f"shape {tuple(shape)}, where rows have {lengths or 'no'} tokens",
                want="(rows, tokens, ...), as in the batch; or nothing of tokens",
                hint="dropout before tokens are flattened or transposed; or a torch.Generator of this rank's own",
            )
        return None

    def _check_once(self) -> None:
        """Raise `LossError` inside of what runs again in backward, outside of this mode."""
        if torch.compiler.is_compiling() or is_trial_run():
            return
        if _saving(True) != self.hooks or torch.is_grad_enabled() != self.recorded:
            raise LossError(
                "torch.utils.checkpoint runs functions again that draw, and they would not draw what they drew",
                where=_WHERE.format(axis=self.parts.axis),
                got="a draw inside of it, of other hooks of saved tensors, or of torch.no_grad()",
                want="fds.checkpoint_activations() in the composition",
            )


class InTile(Draws):
    """Inside, a module computes some of this rank's tokens, and raises `LossError` where it would draw for them."""

    def __init__(self, draws: Draws, lengths: set[int]):
        super().__init__(draws.parts, set(), lengths, lengths, draws.call, None)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(RuntimeError, *error[1:])  # the call of the layer is not over

    def cut(self, shape: Sequence[int]) -> None:
        """Return None for what has nothing of tokens."""
        if self.lengths.intersection(shape):
            raise LossError(
                "something is drawn for a tile of this rank's tokens, and one rank would draw something else",
                where=_WHERE.format(axis=self.parts.axis),
                got=f"shape {tuple(shape)}",
                want="tiles of what draws nothing",
                hint="dropout after the module that is tiled",
            )


def drop(x: Tensor, p: float, piece: Cut | None = None, *, inplace: bool = False) -> Tensor:
    """Return dropout of an activation that is a piece, or is whole, of tokens of which this rank may have a part."""
    shape, draws = list(x.shape), now()
    if piece is not None:
        shape[piece.dim] = piece.whole
    part = None if draws is None else draws.cut(shape)
    if part is not None:
        shape[part.dim] = part.whole
    cuts = [cut for cut in (part, piece) if cut is not None]  # of a piece of a part
    with torch._C.DisableTorchFunction():  # private; a mode would take the mask for a piece
        if not cuts:
            return F.dropout(x, p, inplace=inplace)
        mask = take(F.dropout(_like(x, shape).fill_(1), p), cuts)
        return x.mul_(mask) if inplace else x * mask


def take(whole: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """Return a piece of a piece of the whole, in memory of its own."""
    for dim, length, ranges in cuts:
        padded = max(first + n for first, n in ranges) - length  # of the last parts of a sequence
        whole = F.pad(whole, (*(0, 0) * (-dim - 1), 0, padded)) if padded > 0 else whole
        pieces = [whole.narrow(dim, first, n) for first, n in ranges]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return whole.clone()


def check_alone(q: Tensor, k: Tensor) -> None:
    """Raise `LossError` for attention of this rank's tokens to this rank's tokens, where rows have more."""
    draws = now()
    if draws is not None and q.shape[-2] == k.shape[-2] and k.shape[-2] in draws.lengths:
        raise LossError(
            "attention sees this rank's tokens alone, of rows that have more",
            where=f"{line()}: " + _WHERE.format(axis=draws.parts.axis),
            got=f"queries {tuple(q.shape)}, keys {tuple(k.shape)}",
            want="fds.nn.attention(..., axis=axis)",
        )


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a new tensor whose dims lie in memory in the order of x's: torch draws in the order of memory."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return x.new_empty([shape[dim] for dim in order]).permute(back)


def _whole(x: Tensor, cut: Cut) -> Tensor:
    shape = list(x.shape)
    shape[cut.dim] = cut.whole
    return _like(x.detach(), shape)


def _dropout(
    draws: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    inplace = inplace or func is torch.dropout_
    return drop(input, p, inplace=inplace) if training and p else F.dropout(input, p, training, inplace)


def _draw_like(draws: Draws, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    cut = draws.cut(input.shape)
    if cut is None:
        return func(input, *args, **kwargs)
    return take(func(_whole(input, cut), *args, **kwargs), [cut])


def _fill(draws: Draws, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
        return _refuse(draws, func, input, *args, **kwargs)
    cut = draws.cut(input.shape)
    if cut is None:
        return func(input, *args, **kwargs)
    return input.copy_(take(func(_whole(input, cut), *args, **kwargs), [cut]))


def _initialize(draws: Draws, func: Any, tensor: Tensor, **options: Any) -> Tensor:
    return _fill(draws, lambda x: func(tensor=x, **options), tensor)


def _make(draws: Draws, func: Any, *args: Any, size: Any = None, **kwargs: Any) -> Tensor:
    """Draw a tensor of a size, which is the last argument or, of integers, all of them."""
    if size is None:
        listed = bool(args) and tree.is_sequence(args[-1])
        size, args = (args[-1], args[:-1]) if listed else (args, ())
    cut = draws.cut(size)
    if cut is None:
        return func(*args, size=tuple(size), **kwargs)
    shape = list(size)
    shape[cut.dim] = cut.whole
    return take(func(*args, size=tuple(shape), **kwargs), [cut])


def _refuse(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a function draw for what has nothing of tokens."""
    x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    size: Any = kwargs.get("size", args[-1] if args else ()) if x is None else x.shape
    shape = tuple(size) if tree.is_sequence(size) else (size,)
    if draws.cut(shape) is not None:
        raise LossError(
            "a function draws for a part of the tokens, and would draw something else than one rank",
            where=_WHERE.format(axis=draws.parts.axis),
            got=f"{getattr(func, '__name__', func)} of shape {shape}",
            want="nn.Dropout, F.dropout, torch.rand, randn, randint, rand_like, randn_like, or what fills in place",
            hint="or a generator of this rank's own, given to the function",
        )
    return func(*args, **kwargs)


def _attend(draws: Draws, func: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    _check_attention(draws, query, key, kwargs.get("dropout_p", args[2] if len(args) > 2 else 0.0))
    return func(query, key, *args, **kwargs)


def _attend_in_module(draws: Draws, func: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Look at what `nn.MultiheadAttention` calls, where tokens lie along dim 0."""
    p = kwargs.get("dropout_p", args[8] if len(args) > 8 else 0.0) if kwargs.get("training", True) else 0.0
    _check_attention(draws, query.transpose(0, -2), key.transpose(0, -2), p)
    return func(query, key, *args, **kwargs)


def _check_attention(draws: Draws, query: Tensor, key: Tensor, p: float) -> None:
    """Raise `LossError` for attention over parts of rows, and where it drops weights of such."""
    check_alone(query, key)
    if p and draws.lengths.intersection((query.shape[-2], key.shape[-2])):
        raise LossError(
            "weights of attention are dropped for a part of the tokens, and others than one rank would drop",
            where=_WHERE.format(axis=draws.parts.axis),
            got=f"dropout of {p}, queries {tuple(query.shape)}, keys {tuple(key.shape)}",
            want="none, and dropout of what attention returns",
        )


_OTHERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout, torch.dropout_), _dropout),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like), _draw_like),
    **dict.fromkeys((torch.rand, torch.randn, torch.randint), _make),
    **dict.fromkeys(
        (Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_, Tensor.normal_,
         Tensor.random_, Tensor.uniform_),
        _fill,
    ),
    **dict.fromkeys((init.normal_, init.uniform_), _initialize),
    **dict.fromkeys(
        (F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.gumbel_softmax, F.rrelu,
         torch.alpha_dropout, torch.bernoulli, torch.feature_alpha_dropout, torch.feature_dropout, torch.multinomial,
         torch.normal, torch.poisson, torch.randperm, Tensor.bernoulli, Tensor.multinomial, init.kaiming_uniform_,
         torch.binomial, torch.native_dropout, torch.rrelu, torch.rrelu_, F.rrelu_, torch.alpha_dropout_,
         torch.feature_dropout_, torch.feature_alpha_dropout_, torch._standard_gamma, torch._sample_dirichlet),
        _refuse,
    ),
    F.scaled_dot_product_attention: _attend,
    F.multi_head_attention_forward: _attend_in_module,
}  # fmt: skip
# functions that draw as many numbers as what they are given has elements
OF_ELEMENTS = {f for f, draw in _OTHERS.items() if draw in (_draw_like, _fill, _refuse)} - {torch.randperm}
OF_ELEMENTS.remove(init.kaiming_uniform_)  # whose draws are those of `uniform_`
