"""Progressive layer dropping: the deeper a residual layer and the later the call, the likelier it is skipped.

Fills:  layer; of a loss that is no `Layers` also modules        State:  none
Law:    14: the hand-written loop that skips the same layers, wherever and however often a run is stopped
Cost:   forward and backward of the layers that are skipped less; three passes over what the others return
Source: Zhang and He 2020, arXiv:2010.13369, algorithm 1; the division by p: Huang et al. 2016, arXiv:1603.09382
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds import loss as losses, random, tree
from fds.errors import LossError, Rule, is_number
from fds.loss import Block
from fds.step import Call, Step, fill, transform


@attrs.frozen(eq=False)
class Dropping:
    """What is done in the place of a call of a layer. `forms` are the lengths of tuples that layers return, by name."""

    theta: float
    gamma: float
    forms: dict[str, int | None] = attrs.field(factory=dict[str, int | None], repr=False)

    def plan(self, call: Call) -> tuple[tuple[int, int], float]:
        """Return the words of a key that all microbatches and ranks have in common, and theta(t)."""
        return call.shared.at("layer_drop").words, (1 - self.theta) * math.exp(-self.gamma * call.calls) + self.theta

    def run(
        self,
        plan: tuple[tuple[int, int], float],
        call: Call | None,
        block: Block,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a layer and divide what it adds by the probability of that, or skip it."""
        words, falling = plan
        keep = 1 - block.place / block.total * (1 - falling)
        argument, x = block.first(args, kwargs)
        if not isinstance(x, Tensor):
            raise _other(block, f"{type(x).__name__} as its input", "a tensor, or a tuple that begins with one")
        runs = random.seed(words, block.name) < keep * 2**63
        if not runs and (argument is not x or not block.arguments):
            return argument  # of `Layers` one returns what the next is given, and so what it is given itself
        if not runs and block.name in self.forms:
            length = self.forms[block.name]
            return x if length is None else (x, *[None] * (length - 1))
        version = x._version
        if runs:
            copied = [x.clone() if argument is x else (x.clone(), *argument[1:])] if block.in_place else args
            out = forward(*copied, **kwargs)
        else:  # it never ran: once it shows what it returns
            with random.scope([x.device]), torch.no_grad(), _buffers_kept(forward):
                out = forward(*args, **kwargs)
        if x._version != version:
            raise _other(block, "a layer that writes over its input", "one that leaves it as it is")
        y, rest = self._parts(out, argument, x, block)
        y = x if not runs else y if keep == 1 else x + (y - x) / keep
        return y if rest is None else (y, *rest)

    def _parts(self, out: Any, argument: Any, x: Tensor, block: Block) -> tuple[Tensor, tuple[Any, ...] | None]:
        """Return the first of what a layer returned, and the rest of a tuple. Raises `LossError` for another form."""
        y, length = losses.first_of(out), len(out) if tree.is_sequence(out) else None
        rest: tuple[Any, ...] | None = None if length is None else tuple(out[1:])
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = f"{tuple(x.shape)} -> {tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__}"
            raise _other(block, got, "a layer that returns a tensor of the shape of its input")
        if argument is not x and length != len(argument):
            raise _other(
                block, f"a tuple of {len(argument)} -> {type(out).__name__}", "a layer that returns such a tuple"
            )
        if argument is x and rest and any(part is not None for part in rest):
            raise _other(block, f"a tuple of {length}", "a layer that returns what it changes, and nothing else")
        self.forms[block.name] = length
        return y, rest


@contextlib.contextmanager
def _buffers_kept(forward: Any) -> Generator[None]:
    """Let a module's forward write into copies of its buffers, such as batch statistics."""
    module = getattr(forward, "__self__", None)
    parts = list(module.modules()) if isinstance(module, nn.Module) else []
    buffers = [(part._buffers, name, x) for part in parts for name, x in part._buffers.items() if x is not None]  # pyright: ignore[reportPrivateUsage]
    for place, name, x in buffers:
        place[name] = x.clone()
    try:
        yield
    finally:
        for place, name, x in buffers:
            place[name] = x


def _other(block: Block, got: str, want: str) -> LossError:
    return LossError(
        "layer_drop skips layers that add to what they are given",
        where=f"layer {block.name!r}",
        got=got,
        want=want,
        hint="fds.layer_drop(layers=...) with the names of such layers",
    )


@transform(
    layers=losses.NAMES.or_none(),
    theta=Rule(lambda x: is_number(x) and 0 <= x <= 1, ": {name} is a probability", "a number from 0 to 1"),
    gamma=Rule(lambda x: is_number(x) and 0 <= x < math.inf, ": {name} is a rate", "a finite number, 0 or more"),
)
def layer_drop(theta: float = 0.5, gamma: float = 0.001, *, layers: str | int | Sequence[str | int] | None = None):
    """Skip each of some residual layers at random, more and more of them, and in evaluations none.

    In the call after t others, layer i of L (from 1) runs with probability p = 1 - i/L (1 - theta(t)), theta(t) =
    (1 - theta) exp(-gamma t) + theta. One that runs gives x + (layer(x) - x) / p, so that an evaluation computes the
    mean of each layer. Which ones run follows from the state's key and `calls`: they are the same in all microbatches
    of a call and on all ranks, which so gather the same parameters at stage 3, and compute as long as each other.

    Args:
        theta: of p in the end: that of the last layer.
        gamma: how fast that is reached, a rate per call.
        layers: the layers, in their order: patterns of their names in `fds.Layers`, or of paths of modules that the
            loss runs, or numbers, as `fds.random_ltd` takes them. None: the longest row of layers of one class of
            `fds.Layers`; else all modules of the one list of modules of a class, as the blocks of a transformer are.

    Raises `ComposeError` for anything else, and for names that match nothing. A call raises `LossError` for a layer
    that returns another shape than it is given, or writes over its input.
    """

    def apply(step: Step) -> Step:
        rule = Dropping(float(theta), float(gamma))  # of this rank's step: ranks learn the same at the same time
        return fill(step, **losses.at_blocks(step.loss, layers, rule, "layer_drop"))

    return apply
