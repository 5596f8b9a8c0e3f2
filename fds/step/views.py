"""The station `view`: every parameter as the loss sees it in one microbatch, and the way back of its gradient.

A view that has a method `encode(x, leaf)` says too what a state holds of a parameter that `step.init` is given: it is
called with that, before all other views. Both take `meta` tensors. One whose attribute `by_row` is true may be given
some rows of a parameter, along its first dim, and returns those of the whole: then no rank has all of it in memory.

A view that has a method `reads(leaf, call)` names other parameters (scores, steps of a grid, factors of low rank): it
is called with them too, as the loss would see them without views, and its gradient goes to all of them: of one that
ranks hold alike, the sum of what they have where they view pieces. It may name its own parameter, to look at it as no
view before has changed it.

One that has a method `check(shapes)` is called with the whole shapes of all parameters, by name, before a state is
made, and raises an `FdsError` for those that it cannot view.

One that has a method `summary(leaf, call)` says in a few words what it makes of a parameter, for `step.describe`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fds import autodiff, loss as losses, random, tree
from fds.layout import Leaf
from fds.step.call import Call
from fds.step.checks import contracts, forms
from fds.step.sharding.handles import Handle, materialize
from fds.step.sharding.viewed import Known, OnUse
from fds.step.structure import Casts

View = Callable[..., Tensor]  # (x, leaf, call), and with `reads` a dict of what it reads, by name


def check_shapes(views: Sequence[Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Have views that look at all parameters do so, given their whole shapes."""
    for view in views:
        if forms.looks_at_shapes(view):
            view.check(shapes)


def encode(encodings: Sequence[Any], x: Tensor, leaf: Leaf) -> Tensor:
    """Return what a state holds of a parameter."""
    for encoding in encodings:
        x = contracts.viewed(encoding.encode(x, leaf), encoding)
    return x


def decode(encodings: Sequence[View], x: Tensor, leaf: Leaf, call: Call) -> Tensor:
    """Return a parameter, given what a state holds of it."""
    for encoding in reversed(encodings):
        x = contracts.viewed(encoding(x, leaf, call), encoding)
    return x


def apply_views(
    views: Sequence[View],
    leaf: Leaf,
    read: Mapping[str, Tensor],
    at: Callable[[View, int], Call],
    before: Callable[[View, Tensor, Call], object] | None = None,
) -> Tensor:
    """Return what views, one after another, make of a parameter.

    Args:
        views: of the station.
        leaf: the parameter.
        read: what the loss would see without views, of it and of what they read, by name.
        at: returns the call that the i-th view is given.
        before: is called with each view and what it is given of the parameter, before it is.
    """
    x = read[leaf.name]
    for i, view in enumerate(views):
        call = at(view, i)
        if before is not None:
            before(view, x, call)
        more = [{name: read[name] for name in names} for names in _read_by(view, leaf, call)]
        x = contracts.viewed(view(x, leaf, call, *more), view)
    return x


@attrs.frozen(eq=False)
class Decode:
    """The first view of a parameter: what a state holds of it, decoded, in the dtype in which the loss sees it."""

    encodings: Sequence[View]
    gather: Casts
    draws = False

    def __call__(self, x: Tensor, leaf: Leaf, call: Call) -> Tensor:
        """Return a parameter, given what a state holds of it."""
        x = decode(self.encodings, x, leaf, call)
        return x.to(self.gather.dtype_of(leaf.name, x.dtype))


@attrs.define(eq=False)
class Back:
    """The way back from a viewed parameter: a hook of its leaf, which runs the backward of the views.

    It runs when the gradient is complete: a backward in pieces brings a part with each that uses the parameter.
    """

    run: Callable[[Tensor], None]  # the views' backward
    pieces: int = 1  # that are not over

    def __call__(self, leaf: Tensor) -> None:
        """Run it, where a gradient has come and no other part of it may."""
        if self.pieces <= 1 and (grad := leaf.grad) is not None:
            leaf.grad = None
            self.run(grad)


@attrs.frozen(eq=False)
class Cut:
    """A viewed parameter, cut off from the graph of its views: a leaf, which the loss reads, and the way back."""

    leaf: Tensor
    back: Back
    reads: bool  # whether views pass gradients on to other parameters, too

    @classmethod
    def of(cls, leaf: Tensor, run: Callable[[Tensor], None], *, reads: bool) -> Cut:
        """Make the gradient of a leaf go to `run` when it arrives."""
        back = Back(run)  # which does not hold the leaf: no cycle
        autodiff.on_gradient(leaf, back)
        return cls(leaf, back, reads)

    def end_piece(self) -> None:
        """Note that a piece of backward that uses the parameter is over."""
        self.back.pieces -= 1
        if not self.back.pieces:
            self.back(self.leaf)


@attrs.define(eq=False)
class Runs:
    """What the views of a microbatch may note: a parameter that is gathered on use is viewed each time it is read."""

    again: frozenset[str]  # parameters that another stage or rank views too, which adds what is noted to sums
    over: set[str] = tree.new(set)  # that were viewed
    made_up: bool = False  # views are given made-up values

    @contextlib.contextmanager
    def learning(self) -> Generator[None]:
        """Drop what is noted inside."""
        self.made_up = True
        try:
            yield
        finally:
            self.made_up = False

    def noting(self, call: Call, name: str) -> Call:
        """Return the call as a view of this parameter sees it."""
        if self.made_up or name in self.over:
            return call.keeping()
        return call.keeping("max") if name in self.again else call.keeping("max", "sum")

    def end(self, name: str) -> None:
        """Note that a parameter was viewed."""
        if not self.made_up:
            self.over.add(name)


@attrs.frozen(eq=False)
class Views:
    """The views of a step, one after another, and what is known of the parameters."""

    functions: tuple[View, ...]
    leaves: Mapping[str, Leaf]  # by name
    known: Known  # what they return, where parameters are gathered on use
    apart: bool  # gradients are reduced as they come: autograd would run these backwards after the whole loss's
    again: frozenset[str] | None = None  # parameters that another rank views too; None where nothing is noted

    def seen(
        self, params: Any, setting: losses.Setting, *, plain: bool, in_pieces: bool, again: Collection[str] = ()
    ) -> tuple[Any, dict[str, Cut]]:
        """Return parameters as the loss sees them, and by name those that are cut off from their views.

        Of what is gathered on use these are handles, which run the views on use and are always cut off.

        Args:
            params: the tree that is gathered; trained leaves are leaves of autograd.
            setting: of the microbatch.
            plain: whether parameters must have memory all the same.
            in_pieces: whether the loss's backward is run in pieces, so that each parameter must be cut off.
            again: names of parameters that an earlier stage views too, which counts what is noted of them.
        """
        on_use = OnUse.now(
            self.known,
            setting.devices,
            evaluating=setting.mode.evaluating,
            draws=any(map(random.draws, self.functions)),
        )
        (leaves, build), names = tree.flatten(params), tree.paths(params)
        shown: list[Tensor] = []
        cuts: dict[str, Cut] = {}
        runs = None if self.again is None else Runs(self.again.union(again))
        for name, p in zip(names, leaves, strict=True):
            read = self._read(name, setting.record)
            view = functools.partial(self._apply, self.leaves[name], read, setting, runs)
            inputs = [p, *(contracts.read_by_view(names, other, name) for other in read)]
            x, run = self._shown(inputs, view, on_use, runs, plain=plain, apart=self.apart or in_pieces)
            if run is not None:
                cuts[name] = Cut.of(x, run, reads=any(other.requires_grad for other in inputs[1:]))
            shown.append(x)
        return build(shown), cuts

    def _read(self, name: str, call: Call) -> tuple[str, ...]:
        """Return the names of other parameters that the views of one read, in the order in which they are given."""
        reads = (names for view in self.functions for names in _read_by(view, self.leaves[name], call))
        return tuple(other for other in dict.fromkeys(itertools.chain.from_iterable(reads)) if other != name)

    def _shown(
        self,
        inputs: Sequence[Tensor],
        view: Callable[..., Tensor],
        on_use: OnUse,
        runs: Runs | None,
        *,
        plain: bool,
        apart: bool,
    ) -> tuple[Tensor, Callable[[Tensor], None] | None]:
        """Return what the loss sees of a parameter; for a leaf that was cut off, what takes its gradient, too.

        The parameter is the first of `inputs`, before those that its views read.
        """
        if isinstance(inputs[0], Handle) and not plain:
            with contextlib.nullcontext() if runs is None else runs.learning():
                source = on_use(inputs, view)
            if source is not None:
                x = source.handle()
                return x, source.backward if x.requires_grad else None
        x = view(*(map(materialize, inputs) if plain else inputs))
        if not (apart and x.requires_grad):
            return x, None
        sources = [p for p in inputs if p.requires_grad]
        return x.detach().requires_grad_(), functools.partial(_backward, get_gradient_edge(x), sources)

    def _apply(
        self, leaf: Leaf, names: Sequence[str], setting: losses.Setting, runs: Runs | None, x: Tensor, *others: Tensor
    ) -> Tensor:
        """Return what the views make of a parameter, the same each time in one microbatch, given what they read."""

        def at(view: View, i: int) -> Call:
            call = setting.at(view, "view", i, leaf.name)
            return call if runs is None else runs.noting(call, leaf.name)

        dimensions = setting.record.dimensions
        read = {name: dimensions.read_by(leaf.name, name, x) for name, x in zip(names, others, strict=True)}
        x = apply_views(self.functions, leaf, {leaf.name: x, **read}, at)
        if runs is not None:
            runs.end(leaf.name)
        return x


def _read_by(view: Any, leaf: Leaf, call: Call) -> list[Sequence[str]]:
    """Return a list of what `view.reads` names; an empty one of a view that has no such method."""
    return [contracts.names_read(view.reads(leaf, call), leaf.name)] if forms.is_reading(view) else []


def _backward(edge: Any, sources: Sequence[Tensor], grad: Tensor) -> None:
    """Run the backward of views, from the edge at which their result begins to the parameter and what they read."""
    autodiff.backward_by([edge], [grad], sources)
