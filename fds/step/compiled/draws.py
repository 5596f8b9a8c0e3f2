"""Random numbers of recorded work: drawn before the graph runs, as the work itself drew them, and given to it.

A graph cannot seed torch's generators. So what the recorded work did with them is written down: the seeds that it set,
each with how it follows from the key of a state, the scopes that it entered, and what it drew, as far as that does not
depend on values. Before every run of the graph the same is done again, and the numbers are inputs of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  (torch has no public one)

from fds import random, tree
from fds.step.checks import capture, one_graph

_aten = torch.ops.aten
_NAMES = ("uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "bernoulli_", "log_normal_")
_FILL = {getattr(_aten, name) for name in _NAMES}
_MAKE = {_aten.rand, _aten.randn, _aten.randint, _aten.randperm}
_LIKE = {_aten.rand_like, _aten.randn_like, _aten.randint_like}


@attrs.frozen
class Seed:
    """Seed the generators from here on."""

    fold: random.Fold


@attrs.frozen
class Enter:
    """Remember where the generators are."""


@attrs.frozen
class Leave:
    """Set them to where they were."""


@attrs.frozen(eq=False)
class Draw:
    """Draw one tensor."""

    make: Callable[[], Tensor]


Event = Seed | Enter | Leave | Draw


@attrs.frozen(eq=False)
class Draws:
    """What recorded work does with torch's generators of these devices."""

    devices: list[torch.device]
    events: Sequence[Event]

    def made(self, key: Tensor, calls: Tensor) -> list[Tensor]:
        """Return what a call with this key and number draws; the generators stay as they are."""
        if not self.events:
            return []
        base, number, known = random.words(key), int(calls), dict[int, random.Words]()
        found: list[Tensor] = []
        left: list[list[Tensor]] = []
        with random.scope(self.devices):
            generators = random.default_generators(self.devices)
            for event in self.events:
                match event:
                    case Seed(fold):
                        random.reseed(fold.seed(base, number, known), self.devices)
                    case Enter():
                        left.append([g.get_state() for g in generators])
                    case Leave():
                        for g, state in zip(generators, left.pop(), strict=True):
                            g.set_state(state)
                    case Draw(make):
                        found.append(make())
        return found


@attrs.define(eq=False)
class Drawing:
    """What seeds generators, and draws, while work is recorded: `fds.random.seeding_by` one of these."""

    devices: list[torch.device]
    events: list[Event] = tree.new(list)
    made: list[Tensor] = tree.new(list)
    expected: list[Tensor] | None = None  # the states of the generators; None before the first seed
    fold: random.Fold | None = None  # the last seed

    def reseed(self, seed: int, devices: Iterable[torch.device]) -> None:
        """Seed the generators. Raises `ComposeError` for a seed that does not follow from the state's key."""
        if not isinstance(seed, random.TracedSeed):
            raise capture.untraced()
        self._check()
        for g in random.default_generators(self.devices):
            g.manual_seed(seed)
        if self.events and isinstance(self.events[-1], Seed):  # nothing was drawn from that
            self.events.pop()
        self.events.append(Seed(seed.fold))
        self.expected, self.fold = self._states(), seed.fold

    @contextlib.contextmanager
    def scope(self, devices: Iterable[torch.device]) -> Generator[None]:
        """Restore the generators on leaving."""
        self._check()
        states, expected, fold = self._states(), self.expected, self.fold
        self.events.append(Enter())
        try:
            yield
            self._check()
        finally:
            for g, state in zip(random.default_generators(self.devices), states, strict=True):
                g.set_state(state)
            self.expected, self.fold = expected, fold
            if isinstance(self.events[-1], Seed):
                self.events.pop()
            if isinstance(self.events[-1], Enter):
                self.events.pop()
            else:
                self.events.append(Leave())

    def draw(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Draw by an operator of `aten`, and return what enters the graph.

        Raises `LossError` for one whose draws depend on values, and where no seed of the step's was set.
        """
        kind, generator = op.overloadpacket, kwargs.get("generator")
        others = args if kind in _MAKE else args[1:]
        if (
            generator is not None
            or kind not in _FILL | _MAKE | _LIKE | {_aten.native_dropout}
            or any(isinstance(x, Tensor) for x in (*others, *kwargs.values()))
        ):
            raise one_graph.drawn_by_values(str(op))
        if kind is _aten.native_dropout:
            return self._dropout(*args)
        if kind in _MAKE:
            return self._add(partial(op, *args, **kwargs))
        like = partial(torch.empty_strided, args[0].shape, args[0].stride(), dtype=args[0].dtype, device=args[0].device)
        found = self._add(lambda: op(like(), *others, **kwargs))
        return args[0].copy_(found) if kind in _FILL else found

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> Any:
        """Do what `native_dropout` does: its mask depends on no value of what it is multiplied with."""
        if train is False:
            return x, torch.ones_like(x, dtype=torch.bool)
        like = partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
        mask = self._add(lambda: _aten.native_dropout(like(), p, True)[1])
        return (x * mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask

    def _add(self, make: Callable[[], Tensor]) -> Tensor:
        self._check()
        if self.expected is None:
            raise one_graph.unseeded()
        with _disable_current_modes():
            found = make()
        self.events.append(Draw(make))
        self.made.append(found)
        self.expected = self._states()
        return found

    def _states(self) -> list[Tensor]:
        return [g.get_state() for g in random.default_generators(self.devices)]

    def _check(self) -> None:
        """Raise `LossError` where the generators are not where the events left them."""
        if self.expected is None:
            return
        with _disable_current_modes():
            known = all(map(torch.equal, self._states(), self.expected))
        if not known:
            raise one_graph.drawn_otherwise(str(self.fold))

    def finished(self) -> Draws:
        """Return what is done before every run of the graph."""
        self._check()
        if not self.made:
            return Draws(self.devices, [])
        if isinstance(self.events[-1], Seed):
            self.events.pop()
        return Draws(self.devices, self.events)
