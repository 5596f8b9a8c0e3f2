"""Seeds of captured work: every scope draws from a generator state of its own, which each replay seeds anew.

A captured kernel reads seed and offset of a generator's state from device memory, which a replay fills from what the
state then has on the host. Setting a seed cannot be captured, switching the default generator to another state can. So
where the work seeds the generator, it is switched to the next of a list of states, and before every replay each state
gets the seed that follows from that call's key as the captured one followed from its own.

Source: torch, aten/src/ATen/cuda/CUDAGeneratorImpl.h, "Note [CUDA Graph-safe RNG states]".
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.step.checks import capture


@attrs.define(eq=False)
class Seeding:
    """What seeds generators in one run of the work: `fds.random.seeding_by` one of these.

    The generator of the CPU is seeded too, as it is where nothing is captured, and refused where it is drawn from.
    """

    default: torch.Generator  # of the device
    states: list[torch.Generator] = tree.new(list)  # the first is for what is drawn outside of all scopes
    folds: list[random.Fold] = tree.new(list)  # how the seeds of the others follow from the key
    wanted: list[random.Fold] | None = None  # those of an earlier run, of which the states are; None makes them
    host: Tensor | None = None  # the state of the CPU's generator, as seeding left it
    drawn: list[bool] = tree.new(list)  # by state, whether the earlier run drew from it
    rehearsing: bool = False  # whether this run is under the rules of a capture, and none

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Seed generators this way inside, and leave them as they were."""
        before = self.default.graphsafe_get_state()
        if not self.states:
            self.states.append(self.default.clone_state())
        with random.scope([]), random.seeding_by(self):
            self.default.graphsafe_set_state(self.states[0])
            try:
                yield
            finally:
                self.default.graphsafe_set_state(before)

    def reseed(self, seed: int, devices: Iterable[torch.device]) -> None:
        """Switch the default generator to the next state. Raises `ComposeError` for seeds that no replay could set."""
        if not isinstance(seed, random.TracedSeed):
            raise capture.untraced()
        self.check_host()
        self.folds.append(seed.fold)
        at = len(self.folds)
        if self.wanted is None:
            self.states.append(self.default.clone_state().manual_seed(seed))
        elif at > len(self.wanted) or self.wanted[at - 1] != seed.fold:
            raise capture.other_path(str(seed.fold), str(self.wanted[at - 1]) if at <= len(self.wanted) else "no more")
        self.default.graphsafe_set_state(self.states[at])
        torch.default_generator.manual_seed(seed)
        self.host = torch.default_generator.get_state()

    @contextlib.contextmanager
    def scope(self, devices: Iterable[torch.device]) -> Generator[None]:
        """Go on inside with the current state, and after it too, whatever it was switched to inside.

        What is drawn from it inside is drawn again after it. In a capture no state can be set, so the run before it
        raises `ComposeError` where something was drawn from it inside.
        """
        before, known, host = self.default.graphsafe_get_state(), self.host, torch.default_generator.get_state()
        place = self.default.get_state() if self.wanted is None else None
        offset = self.default.get_offset() if self.rehearsing else 0
        yield
        self.check_host()
        self.default.graphsafe_set_state(before)
        if self.rehearsing and self.default.get_offset() != offset:
            raise capture.drawn_again()
        if place is not None:
            self.default.set_state(place)
        torch.default_generator.set_state(host)
        self.host = known

    def check_host(self) -> None:
        """Raise `LossError` where the CPU's generator was drawn from since it was seeded."""
        if self.host is not None and not torch.equal(self.host, torch.default_generator.get_state()):
            raise capture.drawn_on_host(self.folds[-1])

    def repeated(self) -> Seeding:
        """Return the one for a run that is captured: all states are there before it begins."""
        first, *others = (state.get_offset() for state in self.states)
        drawn = [first != self.default.get_offset(), *map(bool, others)]
        return Seeding(self.default, [state.clone_state() for state in self.states], wanted=self.folds, drawn=drawn)

    def check_whole(self) -> None:
        """Raise `ComposeError` where fewer seeds were set than in the earlier run."""
        if self.wanted is not None and len(self.folds) < len(self.wanted):
            raise capture.other_path("no more", str(self.wanted[len(self.folds)]))

    def seeds(self) -> Seeds:
        """Return what seeds the states before every replay."""
        return Seeds(self.default, self.states[0], list(zip(self.states[1:], self.folds, strict=True)), self.drawn)


@attrs.define(eq=False)
class Seeds:
    """The states of a captured graph, and how their seeds follow from a key."""

    default: torch.Generator
    outside: torch.Generator | None
    states: list[tuple[torch.Generator, random.Fold]]
    drawn: list[bool]  # of `outside` and of the states: whether they were drawn from where nothing was captured

    def set(self, key: Tensor, calls: Tensor) -> None:
        """Seed every state for the next replay, from a state's key and calls."""
        base, number, known = random.words(key), int(calls), dict[int, random.Words]()
        for state, fold in self.states:
            state.manual_seed(fold.seed(base, number, known))
        if self.outside is not None:
            self.outside.manual_seed(self.default.initial_seed())
            self.outside.set_offset(self.default.get_offset())

    def forget_unused(self) -> None:
        """After the first replay: leave out the states that nothing is drawn from."""
        if self.drawn:
            first, *others = self.drawn
            pairs = zip(self.states, others, strict=True)
            self.states = [(state, fold) for (state, fold), drew in pairs if drew or state.get_offset()]
            if self.outside is not None and not first and self.outside.get_offset() == self.default.get_offset():
                self.outside = None
            self.drawn = []
