"""Slots in the making: what fillers note in a call and what they write; each slot is settled once, by its rule."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

# private: torch has no public way to pass modes by
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode  # pyright: ignore[reportPrivateUsage]

from fds import autodiff, tree
from fds.errors import ComposeError, did_you_mean
from fds.state import State
from fds.step.agreement import Agreement
from fds.step.call import Call, seeded
from fds.step.checks import contracts
from fds.step.memory import TOGETHER, Memory, Merge
from fds.step.residency.contract import Deferred, Residency
from fds.step.sharding.handles import materialize
from fds.step.totals import Decision, Put

Place = tuple[str, str]  # a slot and the key path of an entry in it, "" for a slot that is a tensor


class Draft(Protocol):
    """Slots that were written in a call, in memory of their own."""

    def after(self, skip: Tensor | None) -> Mapping[str, Any]:
        """Return them as they are after the call; where `skip`, () bool, is true they are what they were."""
        ...


@attrs.define(eq=False)
class Drafts:
    """The slots of the next state, in one call and on this rank: what was noted of them, and what was written."""

    memories: Sequence[Memory]  # those that change by a rule
    kinds: dict[Place, tuple[Merge, torch.Size, torch.dtype]]  # of what may be noted, in one order on all ranks
    device: torch.device
    late: bool  # whether gradient maps note too: then ranks share notes once more, after them
    resting: frozenset[str] = frozenset()  # slots that change by a rule, and not in this call
    merged: dict[Place, Tensor] = tree.new(dict)
    written: list[Draft] = tree.new(list)
    closed: bool = False

    @classmethod
    def of(cls, memories: Sequence[Memory], state: State, maps: Sequence[Any]) -> Drafts:
        """Return the drafts of a call with a state; `maps` are those of gradients."""
        if not memories:
            return cls((), {}, state.step.device, late=False)
        out = slots_at_rest(memories, state)
        memories = [memory for memory in memories if memory.slot not in out]
        kinds: dict[Place, tuple[Merge, torch.Size, torch.dtype]] = {
            (memory.slot, name): (memory.merge, x.shape, x.dtype)
            for memory in memories
            if memory.merge is not None
            for name, x in sorted(tree.paths(state.slots.get(memory.slot, {})).items())
        }
        return cls(memories, kinds, state.step.device, any(map(may_note, maps)), out)

    def settle(self, decision: Decision, state: State, call: Call) -> dict[str, Any]:
        """Return what the slots of a state become: each by its rule, once; on a skip most keep their bits."""
        self.closed = True
        slots, new = state.slots, dict(state.slots)
        if self.late and self.kinds:
            agreement = Agreement(call.dimensions.everyone, state.calls)
            take = self.put(agreement)
            agreement.count("notes")
            take()
        for memory in self.memories:
            new[memory.slot] = self._settled(memory, slots[memory.slot], decision, call.silent())
        for draft in self.written:
            new |= draft.after(decision.skip)
        return new

    def _settled(self, memory: Memory, old: Any, decision: Decision, call: Call) -> Any:
        rule, versions = memory.rule, list(map(tree.version_of, tree.leaves(old)))
        call = call.given_to(rule, "memory", memory.slot).deciding(decision.overflow)
        with seeded(call, [rule]):
            noted = None if memory.merge is None else self._like(memory.slot, old)
            new = contracts.remembered(rule(old, noted, call), old, memory, "memory")
        if list(map(tree.version_of, tree.leaves(old))) != versions:
            raise contracts.overwritten(memory)
        # one that learns of skips learns nothing of an empty batch
        keeps = decision.empty if memory.on_skip == "run" else decision.skip
        return new if keeps is None else tree.map(lambda x, y: torch.where(keeps, x, y), old, new)

    def note(self, slot: str, name: str, value: Any, merges: Sequence[str]) -> None:
        """Merge a value into an entry that is merged in one of these ways, unless a backward computes it again.

        Raises `ComposeError` for a value that does not fit.
        """
        self._check(slot, name, value)
        place = slot, name
        merge = self.kinds[place][0]
        if merge not in merges or autodiff.in_backward():
            return
        value = materialize(value)
        with _passing_checkpoints_by(), torch.inference_mode(False), torch.no_grad():
            old = self.merged.get(place)
            value = value.detach()
            self.merged[place] = (
                value.clone(memory_format=torch.contiguous_format) if old is None else TOGETHER[merge](old, value)
            )

    def puts(self, residency: Residency, device: torch.device) -> list[Put]:
        """Return who puts in entries when the step decides: what failed elsewhere, and notes that are there by then."""
        notes = [self.put] if self.kinds and not self.late else []
        return [functools.partial(residency.put, device), *notes] if isinstance(residency, Deferred) else notes

    def put(self, agreement: Agreement) -> Callable[[], None]:
        """Put in all entries, on every rank; return the function that takes what ranks have made of them."""
        entries = {
            place: agreement.sum(self._entry(place)) if how == "sum" else agreement.largest(self._entry(place))
            for place, (how, _, _) in self.kinds.items()
        }
        return lambda: self.merged.update((place, entry.value) for place, entry in entries.items())

    def _like(self, slot: str, tree_: Any) -> Any:
        """Return what was noted for a slot, in its structure."""
        _, build = tree.flatten(tree_)
        return build([self._entry((slot, name)) for name in tree.paths(tree_)])

    def _entry(self, place: Place) -> Tensor:
        """Return what was noted of an entry; where nothing was, the number that changes no other."""
        if place in self.merged:
            return self.merged[place]
        merge, shape, dtype = self.kinds[place]
        least = 0 if merge == "sum" else -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
        return torch.full(shape, least, dtype=dtype, device=self.device)

    def _check(self, slot: str, name: str, value: Any) -> None:
        """Raise `ComposeError` for a note outside of its call, of no entry, or of another kind than its entry."""
        where = f"call.note({slot!r}, {name!r}, ...)"
        if self.closed:
            raise contracts.unnoted(where)
        if slot in self.resting:
            raise contracts.resting(where)
        if (slot, name) not in self.kinds:
            slots = sorted({name_ for name_, _ in self.kinds})
            names = [name_ for at, name_ in self.kinds if at == slot]
            raise ComposeError(
                "a note has no entry to go to",
                where=where,
                got=repr(name if names else slot),
                want=tree.named(names or slots) or "a Memory(slot, init, lies, merge=...) in the station 'memory'",
                hint=did_you_mean(name, names) if names else did_you_mean(slot, slots),
            )
        _, shape, dtype = self.kinds[slot, name]

        def text(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
            return f"{tuple(shape)} {dtype} on {device}"

        fits = isinstance(value, Tensor) and (value.shape, value.dtype, value.device) == (shape, dtype, self.device)
        if isinstance(value, Tensor) and autodiff.is_wrapped(value):
            raise ComposeError(
                "a note inside of a transform of torch.func cannot be kept",
                where=where,
                got="a value of one sample",
                want="a note of what it returned",
            )
        if not fits:
            got = text(value.shape, value.dtype, value.device) if isinstance(value, Tensor) else repr(value)[:80]
            raise ComposeError(
                "a note is not like the entry that it goes to",
                where=where,
                got=got,
                want=text(shape, dtype, self.device),
            )


def slots_at_rest(memories: Sequence[Memory], state: State) -> frozenset[str]:
    """Return the slots of these memories that do not change in a call with a state; of one without values none."""
    if state.calls.is_meta or all(memory.when is None for memory in memories):
        return frozenset()
    calls = int(state.calls)
    return frozenset(memory.slot for memory in memories if not memory.is_due(calls))


@contextlib.contextmanager
def _passing_checkpoints_by() -> Generator[None]:
    """Pass by the modes of selective checkpointing, which count operators of layers; what records a step sees all."""
    disable: Any = _disable_current_modes
    with disable() as modes:
        others = [mode for mode in reversed(modes) if type(mode).__module__ != "torch.utils.checkpoint"]
        for mode in others:
            _push_mode(mode)
        try:
            yield
        finally:
            for mode in reversed(others):
                _pop_mode(getattr(mode, "_dispatch_key", None))


def may_note(map_: Any) -> bool:
    """Say whether a gradient map notes: it says so, since ranks then share sums once more, after it."""
    return getattr(map_, "notes", False) is True
