"""How calls of a copy of a module run, whose parts compute with pieces: the first ones are watched.

A first call shows what no plan says: functions that draw, which then draw for the whole in all later calls; and
parameters that are used where their gradients would be wrong, or of which something whole is made that meets pieces,
which the graph of autograd shows where they are summed. Watching takes 1 us for every function of torch.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fds.errors import LossError
from fds.nn.parallel.dropout import DrawsOfAll, is_drawn_for_all
from fds.nn.parallel.region import Region

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

    watched: bool = False
    draws: bool = False


@attrs.frozen(eq=False)
class Use:
    """A parameter of a copy: where the copy holds it, its name, and how ranks hold it: "piece", "same" or "sum"."""

    held: Mapping[str, Tensor | None]
    key: str
    name: str
    lies: str
    in_parts: bool


@attrs.frozen(eq=False)
class Calls:
    """How a copy of a module runs."""

    region: Region
    known: Known
    uses: list[Use]
    run: str | None  # of blocks, if it is given parts of sequences
    after: tuple[int, ...] | None  # what `inside` is where it ends, None for anything

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the copy; nothing of the call is left in the region."""
        region, known = self.region, self.known
        region.begin()
        region.run = self.run
        try:
            if not known.watched and not torch.compiler.is_compiling():
                with Watch(self):
                    out = forward(*args, **kwargs)
                known.watched = True
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

    def __init__(self, calls: Calls):
        super().__init__(calls.region)
        self.known = calls.known
        held = [(x, use) for use in calls.uses if (x := use.held.get(use.key)) is not None]
        self.uses = {id(x): use for x, use in held}
        self.edges = {tuple(get_gradient_edge(x))[:2]: use for x, use in held if x.requires_grad}

    def __enter__(self) -> Watch:
        self.region.look = self._check_terms
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.region.look = None
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
        return super().__torch_function__(func, types, args, kwargs)

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

    def _check_terms(self, x: Tensor) -> None:
        """Look at what one rank's term of a sum is made of, back to where it entered: of nothing that is whole."""
        waiting, seen = deque([(x.grad_fn, x.output_nr)]), set[Any]()  # nearest first
        while waiting:
            node, number = waiting.popleft()
            use = self.edges.get((node, number))
            if use is not None and use.lies == "same":
                raise LossError(
                    "a parameter makes something whole that meets pieces, and its gradient would be that of one rank's",
                    where=f"tensor_parallel: {use.name}",
                    got="gradients that the plan takes to be the same on all ranks",
                    want="'column' for its layer, or fds.nn.replicated(grads='sum') if all that it makes meets pieces",
                )
            if node is None or node in seen or use is not None or _passes_between_ranks(node):
                continue
            seen.add(node)
            waiting += node.next_functions

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
        region = self.region
        if use.lies == "piece":
            if not _is_ours():
                raise LossError(
                    "a function is given a parameter of which every rank has a piece, and takes it for the whole",
                    where=f"tensor_parallel: {use.name}",
                    got=getattr(func, "__name__", str(func)),
                    want="the module that holds it, called",
                    hint="or leave it out of the plan",
                )
        elif use.lies == "same" and region.inside:
            raise LossError(
                "a parameter is used beside pieces of features, and its gradient would be that of one rank's pieces",
                where=f"tensor_parallel: {use.name}",
                got="gradients that the plan takes to be the same on all ranks",
                want="fds.nn.replicated(grads='sum') for the module that holds it",
                hint="or, if it is for what all ranks have whole, use it before the column",
            )
        elif use.lies == "sum" and not region.inside and region.run is None and not use.in_parts:
            raise LossError(
                "a parameter is used for what all ranks have whole, and its gradient would be counted by each",
                where=f"tensor_parallel: {use.name}",
                got="replicated(grads='sum')",
                want="replicated(), or no entry in the plan",
            )


def watch(module: nn.Module, calls: Calls) -> None:
    """Have a copy of a module run so."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return calls(forward, *args, **kwargs)

    module.forward = run


def _passes_between_ranks(node: Any) -> bool:
    """Say whether a node of autograd is that of a function that sums or puts together what ranks have."""
    function = getattr(type(node), "_forward_cls", None)  # private; of a `torch.autograd.Function`
    return getattr(function, "__module__", "").startswith(("fds.nn.parallel.", "fds.collectives."))


def _is_ours() -> bool:
    """Say whether a function of torch is called by a layer of this folder."""
    frame: Any = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)
