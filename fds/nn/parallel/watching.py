"""How calls of a copy of a module run, whose parts compute with pieces: the first ones are watched.

A first call shows what no plan says: functions that draw, which then draw for the whole in all later calls; parameters
whose gradients a plan takes for others than they are (see `uses`); and how features lie. A plan says how a matrix is
divided, and the code between a column and its row has to go on as it says: a projection of several parts is taken apart
part by part, what several columns return is one row's by parts, and how many heads there are is for shapes alone. What
goes against that is right on one rank and another number on all of several. Watching takes 1 us for every function of
torch.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds.errors import FdsError, LossError
from fds.nn.parallel.heads import DrawsOfAll, is_drawn_for_all
from fds.nn.parallel.mistakes import ERRORS, Failed, Planned
from fds.nn.parallel.region import Region, ranges
from fds.nn.parallel.tokens import OF_ELEMENTS
from fds.nn.parallel.uses import Edges, Side, Use, check_uses, edges_of, metadata_of, nearest, nodes_behind

_CATS = {torch.cat, torch.concat, torch.concatenate, torch.hstack}
_SPLITS = {Tensor.view, Tensor.reshape, Tensor.unflatten, torch.reshape, torch.unflatten}
_ARITHMETIC = {
    "add", "sub", "mul", "div", "true_divide", "floor_divide", "pow", "rsub", "rdiv", "rpow", "full", "tensor",
}  # fmt: skip


class Divided(int):
    """An attribute that `heads` divides: this rank's number, which is for shapes and for nothing that is computed."""

    name: str
    region: Region

    def refuse(self, *_: Any) -> NoReturn:
        """Raise `LossError`."""
        raise LossError(
            "a number is computed from an attribute that 'heads' divides, and would be another one than on one rank",
            where=f"tensor_parallel: {self.name}",
            got=f"arithmetic with {int(self)}, this rank's",
            want="for numbers an attribute of its own, that heads does not name",
        )

    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __float__ = refuse  # pyright: ignore[reportAssignmentType]

    def __rfloordiv__(self, other: Any) -> Any:
        """Divide; the width of what entered, which is whole, by this rank's heads is not the width of a head."""
        is_whole = other == self.region.width and other not in self.region.widths and not isinstance(other, Divided)
        return self.refuse() if is_whole else int(other) // int(self)


def check_arithmetic(func: Any, args: Sequence[Any]) -> None:
    """Raise `LossError` for a function of torch that computes with an attribute that is divided."""
    name = getattr(func, "__name__", "").strip("_")
    if name in _ARITHMETIC or name.removeprefix("r") in _ARITHMETIC:
        for x in args:
            if isinstance(x, Divided):
                x.refuse()


def look_at(func: Any, args: Sequence[Any], out: Any, region: Region, edges: Edges) -> None:
    """Note what is put together of features, and look at how they are taken apart. Raises `LossError`."""
    if func in _CATS and isinstance(out, Tensor) and out.grad_fn is not None:
        widths = [x.shape[-1] for x in args[0]]
        if len(widths) > 1 and sum(widths) == out.shape[-1]:
            wholes = [sum(region.pieces_in_graph(x)) for x in args[0]]
            metadata_of(out.grad_fn)["features"] = (out.shape, widths, wholes)
    elif func in _SPLITS and isinstance(args[0], Tensor) and args[0].grad_fn is not None:
        _check_split(args[0], out.shape, region, edges)


def _check_split(x: Tensor, shape: torch.Size, region: Region, edges: Edges) -> None:
    """Raise `LossError` where what a column returned in parts is taken apart head by head."""
    parts, before = metadata_of(x.grad_fn).get("pieces", ()), x.dim() - 1
    if len(parts) < 2 or shape[:before] != x.shape[:before] or math.prod(shape[before:]) != x.shape[-1]:
        return
    count, width = shape[before], math.prod(shape[before + 1 :])
    borders = itertools.accumulate(ranges(part, region.axis)[region.axis.index][1] for part in parts)
    is_by_heads = count in region.counts and count != len(parts)
    if count > 1 and (is_by_heads or any(border % width for border in borders)):
        raise LossError(
            "a projection that is laid out head by head is divided as if it were by parts",
            where=f"tensor_parallel: {nearest(edges, x.grad_fn)}",
            got=f"column(parts={parts}), of which {count} pieces of {width} features are taken apart",
            want=f"fds.nn.column(unit={width}): what stays together on a rank",
        )


def check_row(x: Tensor, cut: tuple[int, ...], name: str, region: Region) -> None:
    """Raise `LossError` for a row of the whole, or of what several columns return where a plan takes that for one's."""
    index, size = region.axis.index, region.axis.size
    ends = list(itertools.accumulate(ranges(part, region.axis)[index][1] for part in cut))
    if x.shape[-1] == sum(cut) != ends[-1] and not region.pieces_in_graph(x):
        raise LossError(
            "a row is given the whole of its input, and takes this rank's piece of it",
            where=f"tensor_parallel: {name}",
            got=f"{x.shape[-1]} features",
            want=f"{ends[-1]} of them, which a 'column' before it returns",
            hint="'column' for the layer that makes its input; of two that are swapped, 'column' is the first",
        )
    for node, _ in nodes_behind(x.grad_fn, stops=lambda node: _mixes(node) or region.passes_between(node)):
        shape, widths, wholes = metadata_of(node).get("features", ((), (), ()))
        if shape == x.shape and not set(ends).issuperset(itertools.accumulate(widths)):
            lengths = tuple(whole or n * size for whole, n in zip(wholes, widths, strict=True))
            raise LossError(
                "a row is given what several columns return, side by side, and takes it for what one returns",
                where=f"tensor_parallel: {name}",
                got=f"features {' + '.join(map(str, widths))} of this rank",
                want=f"fds.nn.row(parts={lengths})",
            )


def _mixes(node: Any) -> bool:
    """Say whether a node of the graph is of a product of matrices, or of attention: its features are other ones."""
    return "mm" in (name := node.name().lower()) or "attention" in name


_OURS, _TORCH = os.path.dirname(__file__), os.path.dirname(torch.__file__)
_ATTENTION = {F.scaled_dot_product_attention, F.multi_head_attention_forward, torch._native_multi_head_attention}


@attrs.define(eq=False)
class Observations:
    """What calls of the copies of a module have shown."""

    watched: set[bool] = attrs.field(factory=set[bool])  # with gradients, and without
    draws: bool = False


@attrs.frozen(eq=False)
class Calls:
    """How a copy of a module runs."""

    region: Region
    observations: Observations
    uses: list[Use]
    planned: Planned
    counts: list[tuple[nn.Module, str, str]]  # modules of attention, an attribute that is divided, and its name
    pending: Edges  # what a loss is checked for that takes what these return
    run: str | None  # of blocks, if it is given parts of sequences
    after: tuple[int, ...] | None  # what `inside` is where it ends, None for anything
    side: Side | None  # what it returns, None for either

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the copy; nothing of the call is left in the region."""
        region, observations = self.region, self.observations
        region.begin()
        region.run = self.run
        try:
            recorded = torch.is_grad_enabled()
            if recorded not in observations.watched and not torch.compiler.is_compiling():
                edges = edges_of(self.uses)
                watch = Watch(self, edges)
                try:
                    with watch:
                        out = forward(*args, **kwargs)
                except ERRORS as error:
                    mistake = (
                        None if isinstance(error, FdsError) else self.planned.explain(error, watch.failed, args, kwargs)
                    )
                    if mistake is None:
                        raise
                    raise mistake from error
                finally:
                    watch.failed = None  # which leads to the error, and by its frames to here: a cycle
                check_uses(edges, out, self.side)
                if self.after is None and recorded:
                    self.pending.update(edges)
                observations.watched.add(recorded)
            elif observations.draws and not torch.compiler.is_compiling():
                with DrawsOfAll(region):
                    out = forward(*args, **kwargs)
            else:
                out = forward(*args, **kwargs)
            if self.after is not None and region.inside != self.after:
                raise LossError(
                    "a layer ends with a piece of features, and the next one does not know it",
                    where=f"tensor_parallel over {region.axis.name!r}",
                    got=f"pieces of {region.inside}",
                    want="a column and its row in one layer, or each a layer by itself",
                )
            return out
        finally:
            region.drawing = False
            region.reset()


class Watch(DrawsOfAll):
    """Draw for the whole, and look at what every function of torch is given."""

    def __init__(self, calls: Calls, edges: Edges):
        super().__init__(calls.region)
        self.observations, self.counts, self.edges = calls.observations, calls.counts, edges
        self.failed: Failed | None = None
        self.uses = {id(x): use for use in calls.uses if (x := use.parameters.get(use.key)) is not None}

    def __enter__(self) -> Self:
        self.region.look = self._check_row
        for module, key, name in self.counts:
            count = Divided(getattr(module, key))
            count.name, count.region = name, self.region
            setattr(module, key, count)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.region.look = None
        for module, key, _ in self.counts:
            setattr(module, key, int(getattr(module, key)))
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if is_drawn_for_all(func):
            self.observations.draws = True  # also of what drops nothing yet
        values = [*args, *(kwargs or {}).values()]
        if func in OF_ELEMENTS:
            self._check_whole(func, next((x for x in values if isinstance(x, Tensor)), None))
        if func in _ATTENTION and not (func is F.scaled_dot_product_attention and _is_ours()):
            self._check_attention()
        for x in values:
            use = self.uses.get(id(x))
            if use is not None and getattr(func, "__name__", "") != "__get__":
                self._check_use(use, func)
        check_arithmetic(func, values)
        try:
            out = super().__torch_function__(func, types, args, kwargs)
        except ERRORS as error:
            self.failed = Failed(error, func, args, kwargs or {})
            raise
        with torch._C.DisableTorchFunction():  # private; as in `DrawsOfAll`
            look_at(func, values, out, self.region, self.edges)
        return out

    def _check_row(self, x: Tensor, weight: Tensor, cut: tuple[int, ...]) -> None:
        use = self.uses.get(id(weight))
        name = nearest(self.edges, weight.grad_fn) if use is None else use.name
        with torch._C.DisableTorchFunction():  # private; as in `DrawsOfAll`
            check_row(x, cut, name, self.region)

    def _check_whole(self, func: Any, x: Tensor | None) -> None:
        region = self.region
        with torch._C.DisableTorchFunction():  # private; as in `DrawsOfAll`
            if x is None or region.piece(x, run=region.run) is None:
                return
            raise LossError(
                "a function draws for a piece of an activation, and would draw something else than one rank",
                where=f"tensor_parallel over {region.axis.name!r}",
                got=f"{getattr(func, '__name__', func)} of shape {tuple(x.shape)}",
                want="nn.Dropout, F.dropout, or dropout_p of F.scaled_dot_product_attention",
            )

    def _check_attention(self) -> None:
        region = self.region
        if region.run is not None and region.heads is None and not region.inside:
            raise LossError(
                "attention sees this rank's tokens alone, in a block that is given a part of the sequence",
                where=f"tensor_parallel over {region.axis.name!r}",
                got="attention that the plan leaves whole, inside of 'sequence'",
                want="'heads' for the module of attention, with its projections 'column' and 'row'",
                hint="or no 'sequence' for the block",
            )

    def _check_use(self, use: Use, func: Any) -> None:
        if use.lies == "piece" and not use.by_hand and not _is_ours():
            raise LossError(
                "a function is given a parameter of which every rank has a piece, and takes it for the whole",
                where=f"tensor_parallel: {use.name}",
                got=getattr(func, "__name__", str(func)),
                want="the module that holds it, called",
                hint="or leave it out of the plan",
            )


def watch(module: nn.Module, calls: Calls) -> None:
    """Have a copy of a module run so."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return calls(forward, *args, **kwargs)

    module.forward = run


def _is_ours() -> bool:
    """Say whether a function of torch is called by a layer of this folder."""
    frame: Any = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)
