"""`Call`: what a filler of a station may know of the call of the step that it runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.state import State
from fds.step.checks import contracts
from fds.step.recorded import refusals
from fds.step.topology import Dimensions


class Notes(Protocol):
    """Where the notes of a call go."""

    def note(self, slot: str, name: str, value: Any, merges: Sequence[str]) -> None:
        """Note a value for an entry of a slot; where that is not merged in one of these ways, only check it."""
        ...


@attrs.frozen(eq=False)
class Call:
    """One call of a step, or of its evaluation, as the filler of one station sees it.

    Decisions about shapes follow `calls`, arithmetic follows `step`; random numbers come from `key`.

    Attributes:
        step: () int64 on the device, updates applied before this call.
        device: of the state.
        training: whether this is a training step; False in an evaluation.
        dimensions: the axes that share the step, and where this rank is on them.
    """

    step: Tensor
    _calls: int = attrs.field(alias="calls")
    device: torch.device
    training: bool
    _state: State = attrs.field(alias="state", repr=False)  # not `slots`: who holds those keeps them from being donated
    dimensions: Dimensions = attrs.field(repr=False)
    base: random.Words = attrs.field(repr=False)  # the key that `data` are folded into
    data: tuple[int | str, ...] = ()
    _following: Mapping[str, Any] | None = attrs.field(
        alias="following", default=None, repr=False
    )  # the slots after an update
    _notes: Notes | None = attrs.field(alias="notes", default=None, repr=False)  # None where nothing may be noted
    _kept: tuple[str, ...] = attrs.field(
        alias="kept", default=("max", "sum"), repr=False
    )  # how notes that are kept are merged
    _keyless: Any = attrs.field(alias="keyless", default=None, repr=False)  # the filler that says that it draws nothing
    _overflow: Tensor | None = attrs.field(alias="overflow", default=None, repr=False)  # None until it is decided
    _resting: frozenset[str] = attrs.field(alias="resting", default=frozenset(), repr=False)  # slots that do not change

    @classmethod
    def with_state(
        cls,
        state: State,
        dimensions: Dimensions,
        notes: Notes | None = None,
        resting: frozenset[str] = frozenset(),
        *,
        training: bool,
    ) -> Call:
        """Return a call of a step with this state."""
        (base, calls), kind = random.of_call(state.key, state.calls), "step" if training else "evaluate"
        return cls(
            step=state.step,
            calls=calls,
            device=state.step.device,
            training=training,
            state=state,
            dimensions=dimensions,
            base=base,
            data=(kind, calls),
            following=None,
            notes=notes,
            resting=resting,
        )

    @property
    def calls(self) -> int:
        """Calls made before this one, skipped ones included: a number on the host.

        Raises `ComposeError` where a graph is made of the step (`fds.cuda_graph`, `fds.compile(whole=True)`): there
        it would stay what it is.
        """
        if isinstance(self._calls, random.Calls):
            raise refusals.HOST_NUMBER.error("call.calls")
        return self._calls

    def is_due(self, slot: str) -> bool:
        """Say whether a slot changes in the call after so many others, by the `when` of its `Memory`.

        An evaluation says what the next call of the step would.
        """
        return slot not in self._resting

    @property
    def slots(self) -> Mapping[str, Any]:
        """`state.slots` as they were before the call, read only; in `after` those of the new state, as far as made.

        What writes into one of its dicts raises `ComposeError`, what reads an entry that a state has not `StateError`;
        lists in them are copies.
        """
        return tree.ReadOnly(self.own_slots, contracts.written_slot, contracts.NoEntryError.of)

    @property
    def own_slots(self) -> Mapping[str, Any]:
        """The same as they are in the state."""
        return self._state.slots if self._following is None else self._following

    @property
    def key(self) -> Tensor:
        """A random key, (2,) int64 on the CPU: another one for every call, microbatch, station and filler.

        Raises `ComposeError` in a filler with `draws = False`, and where a graph is made of the step, as `calls` does.
        """
        words = self.words
        if isinstance(words, random.TracedWords):
            raise refusals.HOST_NUMBER.error("call.key")
        return random.as_key(words)

    @property
    def words(self) -> random.Words:
        """The words of the key."""
        if self._keyless is not None:  # what ranks draw for a tied parameter would not be made equal again
            raise contracts.keyless(self._keyless)
        return random.folded(self.base, *self.data)

    @property
    def shared(self) -> Call:
        """The same call with a key that is the same in all microbatches, on all ranks: for what these do alike."""
        base, calls = random.of_call(self._state.key, self._state.calls)
        return self._with(base, ("step" if self.training else "evaluate", calls, "shared"), self._following)

    @property
    def overflow(self) -> Tensor:
        """Whether a gradient of this call is not finite, () bool: for the rule of a `Memory(on_skip="run")`.

        Raises `ComposeError` elsewhere, and where no step is skipped for it.
        """
        if self._overflow is None:
            raise contracts.undecided()
        return self._overflow

    def note(self, slot: str, name: str, value: Tensor) -> None:
        """Note a tensor for the entry `name` of a slot, like the entry, which the slot's `Memory` merges and accepts.

        `name` is the entry's key path in the slot, "" of a slot that is a tensor. Nothing is noted in an evaluation,
        and in a backward, which may compute a layer again.

        Raises `ComposeError` for a slot without `merge`, another name, shape, dtype or device than it has, and in what
        does not run in `batch`, `view`, `context`, `layer` or `condition` of this call.
        """
        if not self.training:
            return
        if self._notes is None:
            raise contracts.unnoted(f"call.note({slot!r}, {name!r}, ...)")
        self._notes.note(slot, name, value, self._kept)

    def keeping(self, *merges: str) -> Call:
        """Return the same call, of which only notes that are merged in these ways are kept, the others checked."""
        return self if self._notes is None or self._kept == merges else attrs.evolve(self, kept=merges)

    def counted(self, counts: bool) -> Call:
        """Return the same call, whose notes are added to sums or not, since another rank or stage adds the same."""
        return self.keeping("max", "sum") if counts else self.keeping("max")

    def deciding(self, overflow: Tensor | None) -> Call:
        """Return the same call, once it is known whether a gradient is not finite."""
        return attrs.evolve(self, overflow=overflow)

    def silent(self) -> Call:
        """Return the same call where nothing may be noted."""
        return self if self._notes is None else attrs.evolve(self, notes=None)

    def at(self, *data: int | str) -> Call:
        """Return the same call with a key of its own for `data`, integers and names."""
        return self._with(self.base, (*self.data, *data), self._following, self._keyless)

    def given_to(self, filler: Any, *data: int | str) -> Call:
        """Return `at(*data)` for a filler, without a key where that says that it draws nothing."""
        return self._with(self.base, (*self.data, *data), self._following, None if random.draws(filler) else filler)

    def after(self, slots: Mapping[str, Any]) -> Call:
        """Return the same call after the update, with the slots of the new state: the old ones may be given up."""
        return self._with(self.base, self.data, slots).silent()

    def of(self, key: random.Words) -> Call:
        """Return the same call with another key to fold into, such as a microbatch's."""
        return self._with(key, (), self._following)

    def _with(
        self, base: random.Words, data: tuple[int | str, ...], slots: Mapping[str, Any] | None, keyless: Any = None
    ) -> Call:
        """Return the same call with other values of these fields; `attrs.evolve` takes three times as long."""
        return Call(
            step=self.step,
            calls=self._calls,
            device=self.device,
            training=self.training,
            state=self._state,
            dimensions=self.dimensions,
            base=base,
            data=data,
            following=slots,
            notes=self._notes,
            kept=self._kept,
            keyless=keyless,
            resting=self._resting,
        )


def seeded(call: Call, functions: Iterable[object], *data: int | str) -> contextlib.AbstractContextManager[object]:
    """Return a scope in which these functions draw from the key of `call.at(*data)`, by torch's default generators too.

    Where none of them may draw (their attribute `draws` is False) it costs nothing.
    """
    if not any(map(random.draws, functions)):
        return _NOTHING
    return random.seeded(call.base, *call.data, *data, devices=[call.device])


_NOTHING = contextlib.nullcontext()
