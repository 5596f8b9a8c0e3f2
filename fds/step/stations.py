"""The stations' own small records: what each is when nobody fills it, what it promises; and the caches of a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.collectives.traffic import Expected
from fds.errors import ComposeError
from fds.layout import Layout, Segment
from fds.optim import Optimizer
from fds.step.call import Call
from fds.step.checks import contracts
from fds.step.pool import Pool
from fds.step.residency.chunks import Piece
from fds.step.residency.contract import OnDevice, Residency, text_of
from fds.step.residency.lives import Lives
from fds.step.sharding.order import LearnedOrder
from fds.step.sharding.viewed import Known
from fds.step.structure import Structure

P = ParamSpec("P")
S = TypeVar("S", bound="HasKernels")
R = TypeVar("R")


class Kernels(Protocol):
    """The station `kernels`: which kernels run in a step, in its evaluation, its first state and its description."""

    def __call__(self) -> contextlib.AbstractContextManager[object]:
        """Return a scope that is open once."""
        ...


class HasKernels(Protocol):
    """A record with the station `kernels`."""

    @property
    def kernels(self) -> Kernels | None:
        """Which kernels run; None where no transform chooses."""
        ...


def chosen_kernels(step: HasKernels) -> contextlib.AbstractContextManager[object]:
    """Return the scope of a step's kernels, which does nothing where no transform chooses."""
    if step.kernels is None:
        return contextlib.nullcontext()
    return contracts.context(step.kernels(), step.kernels, "kernels")


def with_chosen_kernels(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method of a step run in the scope of its kernels."""

    @functools.wraps(method)
    def run(step: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if step.kernels is None:
            return method(step, *args, **kwargs)
        with chosen_kernels(step):
            return method(step, *args, **kwargs)

    return run


@attrs.frozen(repr=False)
class Place:
    """The station `place`: where leaves live, and whether the caller gives the old state up.

    `patterns` are those of names by which a residency tells leaves apart; each matches a parameter. `speculate` says
    whether slices of which leaves live elsewhere are updated in backward, before the step has decided.
    """

    donate: bool = False
    residency: Residency = OnDevice()
    patterns: tuple[str, ...] = ()
    speculate: bool = False

    def __repr__(self) -> str:
        where = f"{', '.join(self.residency.kinds)} in {text_of(self.residency)}" if self.residency.kinds else ""
        words = ["the old state is given up" * self.donate, where, "updated in backward" * self.speculate]
        return "; ".join(filter(None, words)) or "on the device"


class Scale(Protocol):
    """The station `scale`: what the loss is multiplied by, read from the slots."""

    def scale(self, slots: dict[str, Any], device: torch.device) -> Tensor:
        """Return the scale of this step, () float64 on the device."""
        ...

    def metrics(self, slots: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return what a step reports of it."""
        ...


@attrs.frozen
class Composing:
    """Where a composition is while its transforms are applied, and who filled what: what its errors show."""

    position: int = 0  # of the transform whose turn it is
    owners: Mapping[str, int] = tree.new(dict)  # station, or field of one, -> position of who filled it


class After(Protocol):
    """An entry of the station `after`: what follows an accepted update.

    One whose slot is a tree like the parameters, and that treats every element by itself, may say so by attributes
    `elementwise = True` and `draws = False`. Where leaves live elsewhere it is then called a chunk at a time, on the
    device or on the host, with lists of flat leaves of the slot and of the parameters, or of pieces of them, in the
    place of the trees.
    """

    @property
    def slot(self) -> str:
        """The name of the slot that it writes."""
        ...

    def __call__(self, slot: Any, params: Any, skip: Tensor | None, call: Call) -> Any:
        """Return the new slot; `slot` may be written over, and where `skip` is true nothing may change."""
        ...


def follow_in_pieces(after: Sequence[After]) -> set[str]:
    """Return the slots that are written by those alone who may be given pieces of them."""
    whole = {filler.slot for filler in after if not getattr(filler, "elementwise", False) or random.draws(filler)}
    return {filler.slot for filler in after} - whole


Slots = dict[str, list[Tensor | None]]  # of an optimizer's state: one tensor per slice


class Synchronize(Protocol):
    """An entry of the station `after` that writes parameters: how ranks along an axis of role "local" agree on them.

    It says so by an attribute `writes = "params"`, and is called before all others, which follow what was agreed on.

    What it remembers lies in the state beside the optimizer's own, `state.opt`, a slice for each that is trained.
    """

    def init(self, segments: Sequence[Sequence[Segment]], *, params: list[Tensor]) -> Slots:
        """Return the slots of a first state, as `Optimizer.init` does."""
        ...

    def owns(self, slot: str) -> bool:
        """Say by its name whether a slot is one of these."""
        ...

    def agrees(self, slot: str) -> bool:
        """Say whether a slot is one of these, and the same on all ranks along the axis."""
        ...

    def __call__(
        self, structure: Structure, params: list[Tensor], opt: Slots, *, skip: Tensor | None, call: Call
    ) -> None:
        """Write into the trained slices, 1-D, and into the slots; where `skip` is true nothing may change."""
        ...

    def bytes_sent(self, structure: Structure) -> tuple[float, float]:
        """Return the most bytes that this rank sends in one call, and the mean over many calls."""
        ...

    def messages(self, structure: Structure) -> Iterable[Expected]:
        """Return the messages of the call in which it sends most, for `describe`."""
        ...


def remembering(optimizer: Optimizer | None, synchronize: Synchronize | None) -> Optimizer | None:
    """Return the optimizer with the slots of a filler beside its own, if there is one, which its update leaves alone.

    Its `init` raises `ComposeError` where both have a slot of one name.
    """
    if optimizer is None or synchronize is None:
        return optimizer

    def init(segments: Sequence[Sequence[Segment]], *, params: list[Tensor]) -> Slots:
        slots = optimizer.init(segments, params=params)
        if both := list(filter(synchronize.owns, slots)):
            raise ComposeError(
                "an optimizer has a slot that ranks need to synchronize",
                where="station 'optimizer'",
                got=f"{optimizer}: {', '.join(both)}",
                want="slots of other names",
            )
        return {**slots, **synchronize.init(segments, params=params)}

    def update(grads: list[Tensor], opt: Slots, params: list[Tensor], **now: Any) -> tuple[list[Tensor], Slots]:
        more = {slot: opt.pop(slot) for slot in [*opt] if synchronize.owns(slot)}
        params, slots = optimizer.update(grads, opt, params, **now)
        return params, {**slots, **more}

    def bind(shapes: Mapping[str, tuple[int, ...]]) -> Optimizer:
        bound = remembering(optimizer.bound(shapes), synchronize)
        assert bound is not None
        return bound

    bound = attrs.evolve(optimizer, init=init, update=update)
    return bound if optimizer.bind is None else attrs.evolve(bound, bind=bind)


@attrs.define(eq=False)
class Runtime:
    """The private part of a step: nothing of a run lives here, and with an empty one every number is the same.

    A step that was rewritten by `attrs.evolve` begins with an empty one.
    """

    pool: Pool = attrs.field(factory=Pool)
    gradients: Pool = attrs.field(factory=Pool)  # of those that live elsewhere
    ahead: Pool = attrs.field(factory=Pool)  # of leaves that are updated before the step has decided
    structures: dict[Any, Structure] = tree.new(dict)  # by kind of tree: see `Step.structure_of`
    # the last call's key of `structures`, and its value
    recent: list[tuple[Any, Structure | None]] = attrs.field(factory=lambda: [(None, None)])
    fresh: dict[Structure, dict[str, Any]] = tree.new(dict)  # slots and buffers of a first state, on meta
    chunks: dict[Structure, list[list[Piece]]] = tree.new(dict)  # in which an update visits the slices
    elsewhere: dict[tuple[Structure, torch.device], frozenset[int]] = tree.new(dict)  # masters that a loss reads
    lives: dict[tuple[Structure, torch.device], Lives] = tree.new(dict)  # where the leaves are that it writes
    memories: dict[tuple[str, Layout | None], LearnedOrder] = tree.new(dict)  # the order in which ranks met
    viewed: Known = tree.new(dict)  # at stage 3: the shapes of what views return
    forwards: dict[int, Any] = tree.new(dict)  # plans of evaluations, by their number of microbatches
    asked: dict[str, list[str]] = tree.new(dict)  # what the ranks have agreed on
    # of what this rank has begun with all ranks, what ends it: called before they do anything else together
    under_way: list[Callable[[], None]] = tree.new(list)
    captured: list[Any] = attrs.field(
        factory=lambda: [None], repr=False
    )  # what the station `run` has captured, in one place

    def end_all(self) -> None:
        """End what this rank has left unfinished of what all ranks do together: each takes itself off the list."""
        while self.under_way:
            self.under_way[0]()
