"""`Call`: what a filler of a station may know of the call of the step that it runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random
from fds.state import State
from fds.step.topology import Dimensions


@attrs.frozen(eq=False)
class Call:
    """One call of a step, or of its evaluation, as the filler of one station sees it.

    Decisions about shapes follow `calls`, arithmetic follows `step`; random numbers come from `key`.

    Attributes:
        step: () int64 on the device, updates applied before this call.
        calls: calls made before this one, skipped ones included: a number on the host.
        device: of the state.
        training: whether this is a training step; False in an evaluation.
        dimensions: the axes that share the step, and where this rank is on them.
    """

    step: Tensor
    calls: int
    device: torch.device
    training: bool
    _state: State = attrs.field(repr=False)  # not `slots`: who holds those keeps them from being donated
    dimensions: Dimensions = attrs.field(repr=False)
    base: random.Words = attrs.field(repr=False)  # the key that `data` are folded into
    data: tuple[int | str, ...] = ()
    _following: Mapping[str, Any] | None = attrs.field(default=None, repr=False)  # the slots after an update

    @classmethod
    def with_state(cls, state: State, dimensions: Dimensions, *, training: bool) -> Call:
        """Return a call of a step with this state."""
        calls, kind = int(state.calls), "step" if training else "evaluate"
        base = random.words(state.key)
        return cls(state.step, calls, state.step.device, training, state, dimensions, base, (kind, calls))

    @property
    def slots(self) -> Mapping[str, Any]:
        """`state.slots` as they were before the call, read only; in `after` those of the new state, as far as made."""
        return MappingProxyType(self._state.slots if self._following is None else self._following)

    @property
    def key(self) -> Tensor:
        """A random key, (2,) int64 on the CPU: another one for every call, microbatch, station and filler."""
        return random.as_key(self.words)

    @property
    def words(self) -> random.Words:
        """The words of the key."""
        return random.folded(self.base, *self.data)

    def at(self, *data: int | str) -> Call:
        """Return the same call with a key of its own for `data`, integers and names."""
        return self._with(self.base, (*self.data, *data), self._following)

    def after(self, slots: Mapping[str, Any]) -> Call:
        """Return the same call after the update, with the slots of the new state: the old ones may be given up."""
        return self._with(self.base, self.data, slots)

    def of(self, key: random.Words) -> Call:
        """Return the same call with another key to fold into, such as a microbatch's."""
        return self._with(key, (), self._following)

    def _with(self, base: random.Words, data: tuple[int | str, ...], slots: Mapping[str, Any] | None) -> Call:
        """Return the same call with other values of these fields; `attrs.evolve` takes three times as long."""
        return Call(self.step, self.calls, self.device, self.training, self._state, self.dimensions, base, data, slots)


def seeded(call: Call, functions: Iterable, *data: int | str) -> contextlib.AbstractContextManager:
    """Return a scope in which these functions draw from the key of `call.at(*data)`, by torch's default generators too.

    Where none of them may draw (their attribute `draws` is False) it costs nothing.
    """
    if not any(map(random.draws, functions)):
        return _NOTHING
    return random.seeded(call.base, *call.data, *data, devices=[call.device])


_NOTHING = contextlib.nullcontext()
