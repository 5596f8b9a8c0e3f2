"""How calls of a copy of a module run, whose parts compute with pieces: the first ones are watched.

A first call shows what no plan says: functions that draw, which then draw for the whole in all later calls; parameters
whose gradients a plan takes for others than they are (see `uses`); and features that lie otherwise than it says (see
`features`). Watching takes 1 us for every function of torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds.errors import FdsError, LossError
from fds.nn.parallel.dropout import DrawsOfAll, is_drawn_for_all
from fds.nn.parallel.features import Divided, check_arithmetic, check_row, look_at
from fds.nn.parallel.mistakes import ERRORS, Failed, Planned
from fds.nn.parallel.region import Region
from fds.nn.parallel.uses import Edges, Side, Use, check_uses, edges_of, nearest

_OURS, _TORCH = os.path.dirname(__file__), os.path.dirname(torch.__file__)
_RANDOM = {  # functions that draw as many numbers as what they are given has elements
    F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.rrelu, F.gumbel_softmax,
    F.rrelu_, torch.feature_dropout, torch.feature_dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_alpha_dropout, torch.feature_alpha_dropout_, torch.bernoulli, torch.rand_like, torch.randn_like,
    torch.randint_like, torch.normal, torch.multinomial, torch.poisson, torch.binomial, torch.rrelu, torch.rrelu_,
    torch._standard_gamma, torch._sample_dirichlet, Tensor.multinomial, Tensor.bernoulli, Tensor.bernoulli_,
    Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.random_, Tensor.log_normal_, Tensor.cauchy_,
    Tensor.geometric_, torch.native_dropout,
}  # fmt: skip
_ATTENTION = {F.scaled_dot_product_attention, F.multi_head_attention_forward, torch._native_multi_head_attention}


@attrs.define(eq=False)
class Known:
    """What calls of the copies of a module have shown."""

    watched: set[bool] = attrs.field(factory=set[bool])  # with gradients, and without
    draws: bool = False


@attrs.frozen(eq=False)
class Calls:
    """How a copy of a module runs."""

    region: Region
    known: Known
    uses: list[Use]
    planned: Planned
    counts: list[tuple[nn.Module, str, str]]  # modules of attention, an attribute that is divided, and its name
    pending: Edges  # what a loss is checked for that takes what these return
    run: str | None  # of blocks, if it is given parts of sequences
    after: tuple[int, ...] | None  # what `inside` is where it ends, None for anything
    side: Side | None  # what it returns, None for either

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the copy; nothing of the call is left in the region."""
        region, known = self.region, self.known
        region.begin()
        region.run = self.run
        try:
            recorded = torch.is_grad_enabled()
            if recorded not in known.watched and not torch.compiler.is_compiling():
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
                known.watched.add(recorded)
            elif known.draws and not torch.compiler.is_compiling():
                region.draws = region.drawing = True
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
        self.known, self.counts, self.edges = calls.known, calls.counts, edges
        self.failed: Failed | None = None
        self.uses = {id(x): use for use in calls.uses if (x := use.held.get(use.key)) is not None}

    def __enter__(self) -> Watch:
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
            self.known.draws = self.region.draws = self.region.drawing = True
        given = [*args, *(kwargs or {}).values()]
        if func in _RANDOM:
            self._check_whole(func, next((x for x in given if isinstance(x, Tensor)), None))
        if (
            func in _ATTENTION
            and self._is_given_parts()
            and not (func is F.scaled_dot_product_attention and _is_ours())
        ):
            self._raise_for_parts()
        for x in given:
            use = self.uses.get(id(x))
            if use is not None and getattr(func, "__name__", "") != "__get__":
                self._check_use(use, func)
        check_arithmetic(func, given)
        try:
            out = super().__torch_function__(func, types, args, kwargs)
        except ERRORS as error:
            self.failed = Failed(error, func, args, kwargs or {})
            raise
        with torch._C.DisableTorchFunction():  # private; as in `DrawsOfAll`
            look_at(func, given, out, self.region, self.edges)
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

    def _is_given_parts(self) -> bool:
        region = self.region
        return region.run is not None and region.heads is None and not region.inside

    def _raise_for_parts(self) -> None:
        raise LossError(
            "attention sees this rank's tokens alone, in a block that is given a part of the sequence",
            where=f"tensor_parallel over {self.region.axis.name!r}",
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
