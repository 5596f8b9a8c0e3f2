"""Notes: what fillers note in one call of a step, merged as it comes, and what becomes of the slots by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

# private: torch has no public way to pass modes by
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from fds import autodiff, tree
from fds.collectives import Axis
from fds.errors import ComposeError, did_you_mean
from fds.state import State
from fds.step.agreement import Agreement
from fds.step.call import Call, seeded
from fds.step.checks import contracts
from fds.step.memory import TOGETHER, Memory, Merge
from fds.step.sharding.handles import materialize

Place = tuple[str, str]  # a slot and the key path of an entry in it, "" for a slot that is a tensor


@attrs.define(eq=False)
class Notes:
    """What was noted so far in one call, on this rank."""

    memories: Sequence[Memory]  # those that follow what is noted, or every step
    kinds: dict[Place, tuple[Merge, torch.Size, torch.dtype]]  # of what may be noted, in one order on all ranks
    device: torch.device
    late: bool  # whether gradient maps note too: then ranks share sums once more, after them
    merged: dict[Place, Tensor] = tree.new(dict)
    closed: bool = False

    @classmethod
    def of(cls, memories: Sequence[Memory], state: State, maps: Sequence[Any]) -> Notes:
        """Return the empty notes of a call with a state; `maps` are those of gradients."""
        kinds: dict[Place, tuple[Merge, torch.Size, torch.dtype]] = {
            (memory.slot, name): (memory.merge, x.shape, x.dtype)
            for memory in memories
            if memory.merge is not None
            for name, x in sorted(tree.paths(state.slots.get(memory.slot, {})).items())
        }
        return cls(memories, kinds, state.step.device, any(map(may_note, maps)))

    def add(self, slot: str, name: str, value: Any, merges: Sequence[str]) -> None:
        """Merge a value into an entry that is merged in one of these ways, unless a backward computes it again.

        Raises `ComposeError` for a value that does not fit.
        """
        self._check(slot, name, value)
        place = slot, name
        merge = self.kinds[place][0]
        if merge not in merges or autodiff.in_backward():
            return
        value = materialize(value)
        # selective checkpointing, a mode, counts the operators of the layers: these are none of them
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            old = self.merged.get(place)
            value = value.detach()
            self.merged[place] = (
                value.clone(memory_format=torch.contiguous_format) if old is None else TOGETHER[merge](old, value)
            )

    def put(self, agreement: Agreement) -> Callable[[], None]:
        """Put in all entries, on every rank; return the function that takes what ranks have made of them."""
        entries = {
            place: agreement.sum(self._entry(place)) if how == "sum" else agreement.largest(self._entry(place))
            for place, (how, _, _) in self.kinds.items()
        }
        return lambda: self.merged.update((place, entry.value) for place, entry in entries.items())

    def close(self, everyone: Axis | None, calls: int) -> None:
        """Merge over ranks what is not merged yet; nothing may be noted from here on."""
        self.closed = True
        if self.late and self.kinds:
            agreement = Agreement(everyone, calls)
            take = self.put(agreement)
            agreement.count("notes")
            take()

    def like(self, slot: str, tree_: Any) -> Any:
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
        if (slot, name) not in self.kinds:
            slots = sorted({known for known, _ in self.kinds})
            names = [known for at, known in self.kinds if at == slot]
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


def may_note(one: Any) -> bool:
    """Say whether a gradient map notes: it says so, since ranks then share sums once more, after it."""
    return getattr(one, "notes", False) is True


def followed(notes: Notes, slots: Mapping[str, Any], call: Call, skip: Tensor | None) -> dict[str, Any]:
    """Return those of the slots that follow what was noted; where `skip`, () bool, is true, as a commit left them."""
    notes.close(call.dimensions.everyone, call.calls)
    call = call.silent()
    new_slots: dict[str, Any] = {}
    for memory in notes.memories:
        rule = memory.rule
        old, own = slots[memory.slot], call.given_to(rule, "memory", memory.slot)
        noted = None if memory.merge is None else notes.like(memory.slot, old)
        versions = list(map(tree.version_of, tree.leaves(old)))
        with seeded(own, [rule]):
            new = contracts.remembered(rule(old, noted, own), old, memory, "memory")
        if list(map(tree.version_of, tree.leaves(old))) != versions:
            raise contracts.overwritten(memory)
        new_slots[memory.slot] = new if skip is None else tree.map(lambda x, y: torch.where(skip, x, y), old, new)
    return new_slots
