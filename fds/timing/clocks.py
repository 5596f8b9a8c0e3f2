"""What watches a call of a step: its turn, its parts, its waits for messages, and the layers that it is in."""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import attrs
import torch
from torch import nn

from fds import tree
from fds.collectives.links import Collective, Work
from fds.collectives.traffic import Traffic
from fds.errors import FdsError, did_you_mean, is_a, is_int
from fds.loss.module_copies import roots
from fds.profiling.modules import ModuleHooks, tensors_of
from fds.state import State
from fds.step.ranges import Clock, profiled

T = TypeVar("T")
WAIT = "wait"
OTHER = "other"  # what is in no range: measures, gradient maps, the host between kernels
PARTS = ("gather", "forward", "backward", "reduce", "optimizer", "offload", WAIT, OTHER)
SAME = "="  # a mark at which no range begins or ends


class InTurn:
    """What is called around each call of a step, and watches those whose number divides by `every`.

    Attributes:
        every: calls from one that is watched to the next; None watches none.
    """

    every: int | None
    _usage: ClassVar[tuple[str, str]]  # the function that makes one, and how it is called

    @contextlib.contextmanager
    def __call__(self, state: State) -> Iterator[None]:
        """Watch the call of the step in the block, if it is its turn: its number divides by `every`.

        `state` is what the step is given. Raises `FdsError` for anything else. A call that raises is not counted.
        """
        where, want = self._usage
        if not is_a(state, State):
            raise FdsError("not a state", where=where, got=type(state).__name__, want=want)
        number = int(state.calls) + 1
        if self.every is None or number % self.every:
            yield
            return
        with self._watch(state.step.device, number):
            yield

    def _watch(self, device: torch.device, number: int) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError


def check_every(every: object, where: str) -> None:
    """Raise `FdsError` for what is neither a number of calls nor None."""
    if every is not None and not is_int(every, 1):
        raise FdsError("not a number of calls", where=f"{where}, every", got=repr(every), want="1 or more, or None")


@attrs.frozen(eq=False)
class WatchedWork:
    """A collective whose `wait` runs in a block."""

    work: Work
    around: Callable[[], contextlib.AbstractContextManager[object]]

    def wait(self) -> None:
        """Wait for the result."""
        with self.around():
            self.work.wait()

    def done(self) -> bool:
        """Return whether `wait` is known to return at once."""
        return self.work.done()


class Waits(Traffic):
    """Have every wait for a collective be a range, named `wait/all_reduce (sum) of (8,) float32 on axis 'dp'`."""

    def watched(self, collective: Collective, work: Work) -> Work:
        """Return work whose `wait` is a range."""
        return WatchedWork(work, lambda: profiled(f"{WAIT}/{collective}"))


def intervals(marks: Sequence[tuple[str, T]]) -> Iterator[tuple[str, T, T]]:
    """Yield the part that is innermost between one mark and the next, and both."""
    inside: list[str] = []
    for (name, at), (_, until) in itertools.pairwise(marks):
        if name == SAME:
            pass
        elif name:
            inside.append(name.split("/")[0].removesuffix("_weight"))
        else:
            inside.pop()
        yield inside[-1], at, until


def milliseconds(start: object, end: object) -> float:
    """Return the time between two marks of a clock."""
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e3
    return start.elapsed_time(end)  # pyright: ignore[reportAttributeAccessIssue]  (both are events)


class Position(NamedTuple):
    """The innermost layer that runs, or whose forward backward reverses; empty outside of all."""

    layer: str
    reversed: bool


_OUTSIDE = Position("", reversed=False)


@attrs.define(eq=False)
class LayerClock(Clock):
    """A clock that also notes in which layer a call is.

    Attributes:
        borders: index of a mark -> where the call is from there on.
        running: per module that runs: where the call was before, None for a module that is no layer.
    """

    borders: dict[int, Position] = tree.new(dict)
    running: list[Position | None] = tree.new(list)
    now_in: Position = _OUTSIDE

    def mark(self, name: str) -> None:
        """Note that a range begins or ends; forward and backward begin outside of all layers."""
        if name.startswith(("forward", "backward")) and not self.running:
            self.move(_OUTSIDE)
        super().mark(name)

    def move(self, to: Position) -> None:
        """Note where the call is from here on."""
        if to != self.now_in and (now := self.now()) is not None:
            self.now_in = to
            self.borders[len(self.marks)] = to
            self.marks.append((SAME, now))


@attrs.define(eq=False)
class Layers(ModuleHooks):
    """The layers of the call in the block of a `with`, which a clock is told of.

    Backward runs nodes of the graph from the last to the first. So it enters or leaves a layer at a node which that
    layer was given or returned.

    Attributes:
        clock: that is told.
        patterns: of names of layers; None for the outermost ones.
    """

    clock: LayerClock = attrs.field(kw_only=True)
    patterns: Sequence[str] | None = attrs.field(kw_only=True)
    _thread: int | None = None  # that of the call, while it runs

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._thread = None
        super().__exit__(*error)

    def check(self) -> None:
        """Raise `FdsError` for a pattern that matches no module of those that ran; where none did, nothing is known."""
        names = [name for name in self.names.values() if name]
        for pattern in self.patterns or ():
            if names and not fnmatch.filter(names, pattern):
                hint = did_you_mean(pattern, names)
                raise FdsError("no layer has such a name", where="timed, layers", got=repr(pattern), hint=hint)

    def _is_followed(self, module: nn.Module) -> bool:
        return self._is_here() and (module in self.names or module in roots)

    def _enter(self, name: str, tensors: Any) -> None:
        chosen = name != "" and all(before is None for before in self.clock.running)
        if self.patterns is not None:
            chosen = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)
        self.clock.running.append(self.clock.now_in if chosen else None)
        if chosen:
            self._hook(tensors)  # what it writes over has another node afterwards
            self._go(Position(name, reversed=False))

    def _leave(self, name: str, tensors: Any) -> None:
        if self.clock.running and (before := self.clock.running.pop()) is not None:
            self._hook(tensors)
            self._go(before)

    def _go(self, to: Position) -> None:
        self.begin(to.layer)
        self.clock.move(to)

    def _hook(self, tensors: Any) -> None:
        """Have backward say when it comes to the nodes of these tensors."""
        for node in {x.grad_fn for x in tensors_of(tensors) if x.grad_fn is not None}:
            to = Position(self.owner(node), reversed=True)
            node.register_prehook(lambda _, to=to: self.clock.move(to) if self._is_here() else None)

    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread
