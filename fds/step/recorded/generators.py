"""Random numbers of recorded work: in every replay they follow from its own key and calls, as in the work itself.

A graph can neither seed a generator nor set it to an earlier state. So while work is recorded it is written down how
every seed that it sets follows from the key of the state.

- Captured kernels read seed and offset of a generator's state from device memory, which a replay fills from what that
  state has on the host. To set a seed cannot be captured, to switch the default generator to another state can. So
  where the work seeds the generator, it is switched to the next of a list of states, which every replay seeds before.
- What a compiled graph would draw is drawn before it runs, and is an input of it.

Source: torch, aten/src/ATen/cuda/CUDAGeneratorImpl.h, "Note [CUDA Graph-safe RNG states]".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import compress
from typing import Any, Literal

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  (torch has no public one)

from fds import random, tree
from fds.step.recorded import refusals
from fds.step.recorded.refusals import Refusal

_aten = torch.ops.aten
_NAMES = ("uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "bernoulli_", "log_normal_")
_FILL = {getattr(_aten, name) for name in _NAMES}
_MAKE = {_aten.rand, _aten.randn, _aten.randint, _aten.randperm}
_LIKE = {_aten.rand_like, _aten.randn_like, _aten.randint_like}


def _fold_of(seed: int) -> random.Fold:
    """Return how a seed follows from the state's key. Raises `ComposeError` for one that does not."""
    if not isinstance(seed, random.TracedSeed):
        raise refusals.SEED.error("fds.random.seeded or reseed, by a key of its own")
    return seed.fold


def _seeds_of(key: Tensor, calls: Tensor) -> Callable[[random.Fold], int]:
    """Return the function that gives the seed of a fold in a call with this key and number."""
    base, number, words = random.words(key), int(calls), dict[int, random.Words]()
    return lambda fold: fold.seed(base, number, words)


@attrs.define(eq=False)
class _Expected:
    """The states of generators after the last seed and the last draw that were seen."""

    generators: list[torch.Generator]
    refusal: Refusal
    got: str
    states: list[Tensor] | None = None  # None before the first seed
    fold: random.Fold | None = None  # of the last seed

    def update(self, fold: random.Fold | None) -> None:
        self.states, self.fold = [g.get_state() for g in self.generators], fold

    def check(self) -> None:
        """Raise `LossError` where something that was not seen has moved a generator."""
        if self.states is None:
            return
        with _disable_current_modes():
            moved = not all(torch.equal(g.get_state(), x) for g, x in zip(self.generators, self.states, strict=True))
        if moved:
            raise self.refusal.error(self.got, where=f"seeded by ({self.fold})")

    @contextlib.contextmanager
    def scope(self) -> Generator[None]:
        """Restore the generators on leaving, and what is expected of them."""
        before, states, fold = [g.get_state() for g in self.generators], self.states, self.fold
        try:
            yield
        finally:
            for g, state in zip(self.generators, before, strict=True):
                g.set_state(state)
            self.states, self.fold = states, fold


@attrs.define(eq=False)
class Seeding:
    """What seeds generators while work for a CUDA graph is rehearsed or captured, and before every replay.

    The generator of the CPU is seeded too, as it is where nothing is captured, and refused where it is drawn from.
    """

    default: torch.Generator  # of the device
    outside: torch.Generator | None = None  # the state for what is drawn outside of all scopes
    states: list[torch.Generator] = tree.new(list)
    folds: list[random.Fold] = tree.new(list)  # how their seeds follow from the key
    wanted: list[random.Fold] | None = None  # the folds of the rehearsal, which makes the states; None in it
    drawn: list[bool] = tree.new(list)  # by state, and then of `outside`: whether the rehearsal drew from it
    host: _Expected = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.outside = self.outside or self.default.clone_state()
        got = "torch's generator of the CPU, drawn from"
        self.host = _Expected([torch.default_generator], refusals.HOST_DRAW, got)

    @property
    def all_states(self) -> list[torch.Generator]:
        """The states that a graph draws from."""
        return [*filter(None, [self.outside]), *self.states]

    def capturing(self) -> Seeding:
        """Return one for the same run, captured: all states are there before it begins."""
        assert self.outside is not None
        drawn = [*map(bool, (state.get_offset() for state in self.states))]
        drawn.append(self.outside.get_offset() != self.default.get_offset())
        states = [state.clone_state() for state in self.states]
        return Seeding(self.default, self.outside.clone_state(), states, wanted=self.folds, drawn=drawn)

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Seed generators this way inside, and leave them as they were."""
        before = self.default.graphsafe_get_state()
        assert self.outside is not None
        with random.scope([]), random.seeding_by(self):
            self.default.graphsafe_set_state(self.outside)
            try:
                yield
                if self.wanted is not None and len(self.folds) < len(self.wanted):
                    raise refusals.OTHER_PATH.error("no more", want=str(self.wanted[len(self.folds)]))
            finally:
                self.default.graphsafe_set_state(before)

    def reseed(self, seed: int, devices: Iterable[torch.device]) -> None:
        """Switch the default generator to the next state. Raises `ComposeError` for seeds that no replay could set."""
        fold, i = _fold_of(seed), len(self.folds)
        self.host.check()
        if self.wanted is None:
            self.states.append(self.default.clone_state().manual_seed(seed))
        elif self.wanted[i : i + 1] != [fold]:
            want = ", ".join(map(str, self.wanted[i : i + 1])) or "no more"
            raise refusals.OTHER_PATH.error(str(fold), want=want)
        self.folds.append(fold)
        self.default.graphsafe_set_state(self.states[i])
        torch.default_generator.manual_seed(seed)
        self.host.update(fold)

    @contextlib.contextmanager
    def scope(self, devices: Iterable[torch.device]) -> Generator[None]:
        """Go on after it with the current state, whatever it was switched to inside.

        What is drawn from it inside would have to be drawn again after it. In a capture no state can be set back, so
        the rehearsal raises `ComposeError`.
        """
        before, offset = self.default.graphsafe_get_state(), self.default.get_offset() if self.wanted is None else None
        with self.host.scope():
            yield
            self.host.check()
            self.default.graphsafe_set_state(before)
            if offset is not None and self.default.get_offset() != offset:
                got = "random numbers drawn inside of fds.random.scope, from a seed that was set before it"
                raise refusals.DRAW_IN_SCOPE.error(got)

    def seed(self, key: Tensor, calls: Tensor) -> None:
        """Seed every state for the next replay, from a state's key and calls."""
        seed_of = _seeds_of(key, calls)
        for state, fold in zip(self.states, self.folds, strict=True):
            state.manual_seed(seed_of(fold))
        if self.outside is not None:
            self.outside.manual_seed(self.default.initial_seed())
            self.outside.set_offset(self.default.get_offset())

    def forget_unused(self) -> None:
        """After the first replay: leave out the states that nothing is drawn from."""
        if self.drawn:
            *drawn, outside = self.drawn
            used = [drew or bool(state.get_offset()) for drew, state in zip(drawn, self.states, strict=True)]
            self.states, self.folds = list(compress(self.states, used)), list(compress(self.folds, used))
            if self.outside is not None and not outside and self.outside.get_offset() == self.default.get_offset():
                self.outside = None
            self.drawn = []


@attrs.define(eq=False)
class Drawing:
    """What seeds generators, and draws, while work is recorded as one graph, and before every run of the graph.

    An event sets a seed, remembers where the generators are, sets them to what was remembered last, or draws a tensor.
    """

    devices: list[torch.device]
    expected: _Expected = attrs.field(init=False)
    events: list[random.Fold | Literal["enter", "leave"] | Callable[[], Tensor]] = tree.new(list)
    tensors: list[Tensor] = tree.new(list)  # that were drawn while the work was recorded

    def __attrs_post_init__(self) -> None:
        got = "torch's default generators in another state"
        self.expected = _Expected(random.default_generators(self.devices), refusals.HIDDEN_DRAW, got)

    def reseed(self, seed: int, devices: Iterable[torch.device]) -> None:
        """Seed the generators. Raises `ComposeError` for a seed that does not follow from the state's key."""
        fold = _fold_of(seed)
        self.expected.check()
        for g in self.expected.generators:
            g.manual_seed(seed)
        self._forget_unused_seed()
        self.events.append(fold)
        self.expected.update(fold)

    @contextlib.contextmanager
    def scope(self, devices: Iterable[torch.device]) -> Generator[None]:
        """Restore the generators on leaving."""
        self.expected.check()
        self.events.append("enter")
        try:
            with self.expected.scope():
                yield
                self.expected.check()
        finally:
            self._forget_unused_seed()
            if self.events[-1] == "enter":
                self.events.pop()
            else:
                self.events.append("leave")

    def draw(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw by an operator of `aten`, and return what enters the graph.

        Raises `LossError` for one whose draws depend on values, and where no seed of the step's was set.
        """
        kind = op.overloadpacket
        others = args if kind in _MAKE else args[1:]
        if (
            kwargs.get("generator") is not None
            or kind not in _FILL | _MAKE | _LIKE | {_aten.native_dropout}
            or any(isinstance(x, Tensor) for x in (*others, *kwargs.values()))
        ):
            raise refusals.DRAW_BY_VALUES.error(str(op))
        if kind in _MAKE:
            return self._add(partial(op, *args, **kwargs))
        x = args[0]
        like = partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
        if kind is _aten.native_dropout:  # whose mask depends on no value of what it is multiplied with
            p, train = others
            if train is False:
                return x, torch.ones_like(x, dtype=torch.bool)
            mask = self._add(lambda: op(like(), p, True)[1])
            return (x * mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask
        drawn = self._add(lambda: op(like(), *others, **kwargs))
        return x.copy_(drawn) if kind in _FILL else drawn

    def _add(self, make: Callable[[], Tensor]) -> Tensor:
        self.expected.check()
        if self.expected.states is None:
            raise refusals.UNSEEDED_DRAW.error("a filler that draws, and says that it does not (draws = False)")
        with _disable_current_modes():
            tensor = make()
        self.events.append(make)
        self.tensors.append(tensor)
        self.expected.update(self.expected.fold)
        return tensor

    def _forget_unused_seed(self) -> None:
        if self.events and isinstance(self.events[-1], random.Fold):  # nothing was drawn from it
            self.events.pop()

    def finish(self) -> list[Tensor]:
        """Return what was drawn, and keep what is to be done before every run of the graph."""
        self.expected.check()
        self._forget_unused_seed()
        tensors, self.tensors = self.tensors, []
        if not tensors:
            self.events.clear()
        return tensors

    def again(self, key: Tensor, calls: Tensor) -> list[Tensor]:
        """Return what a call with this key and number draws; the generators stay as they are."""
        if not self.events:
            return []
        seed_of, tensors, scopes = _seeds_of(key, calls), list[Tensor](), list[list[Tensor]]()
        generators = self.expected.generators
        with random.scope(self.devices):
            for event in self.events:
                if isinstance(event, random.Fold):
                    random.reseed(seed_of(event), self.devices)
                elif event == "enter":
                    scopes.append([g.get_state() for g in generators])
                elif event == "leave":
                    for g, state in zip(generators, scopes.pop(), strict=True):
                        g.set_state(state)
                else:
                    tensors.append(event())
        return tensors
