"""Masters: parameters as a state holds them, and how a loss gets at those that it cannot read where they live."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from fds.layout import MOST_BYTES
from fds.step import foreach
from fds.step.residency.contract import Residency, read_back, waiting
from fds.step.residency.lives import home_of, resident, way_to
from fds.step.structure import Structure

Read = Callable[[], list[Tensor]]
NOWHERE: frozenset[int] = frozenset()  # of parts of which none is read


@attrs.frozen(eq=False)
class Masters:
    """The parts of parameters that a state holds; of what lives elsewhere a loss sees copies, which are read."""

    parts: list[Tensor]
    device: torch.device  # on which the loss runs
    residency: Residency
    elsewhere: frozenset[int]  # indices of the parts that live in the residency, where the loss cannot read them

    def device_of(self, i: int) -> torch.device:
        """Return the device on which the loss sees a part."""
        return self.device if i in self.elsewhere else self.parts[i].device

    def at_home(self) -> Masters:
        """Return the same, to be seen on the device on which those that live elsewhere are held."""
        home = next((self.parts[i].device for i in self.elsewhere), self.device)
        return attrs.evolve(self, device=home)

    def read(self, indices: Sequence[int]) -> Read:
        """Begin to read parts; return the function that waits, and returns copies (n,) on the device of the loss."""
        flat = [self.parts[i].view(-1) for i in indices]
        wait = waiting(self.residency, "read", self.residency.read(flat, self.device))
        return lambda: read_back(self.residency, wait(), flat, self.device)

    def seen(self, dtypes: Sequence[torch.dtype] | None) -> list[Tensor]:
        """Return the parts in these dtypes, None for their own: themselves where they are there as they are to be.

        What lives elsewhere is read some at a time, while the next ones are on their way.
        """
        if not self.elsewhere:
            return self.parts if dtypes is None else foreach.cast(self.parts, dtypes)
        wanted = [x.dtype for x in self.parts] if dtypes is None else list(dtypes)
        found = [x for i, x in enumerate(self.parts) if i not in self.elsewhere]
        here = iter(foreach.cast(found, [x for i, x in enumerate(wanted) if i not in self.elsewhere]))
        found = [x if i in self.elsewhere else next(here) for i, x in enumerate(self.parts)]

        def use(group: Sequence[int], read: list[Tensor]) -> None:
            for i, x in zip(group, read, strict=True):
                found[i] = torch.empty(self.parts[i].shape, dtype=wanted[i], device=self.device)
                found[i].view(-1).copy_(x)

        in_turn(groups(self.elsewhere, [x.nbytes for x in self.parts]), self.read, use)
        return found


def elsewhere(residency: Residency, structure: Structure, device: torch.device) -> frozenset[int]:
    """Return the indices of the parts of parameters of which a loss on a device is given copies.

    They live in the residency, elsewhere than in memory of the CPU that a loss there reads as it is.
    """
    if "params" not in residency.kinds:
        return NOWHERE
    media = (
        home_of(residency, resident(structure, "params", i), shape.numel()) for i, shape in enumerate(structure.shapes)
    )
    return frozenset(i for i, medium in enumerate(media) if way_to(medium, False, device) == "read")


def groups(indices: frozenset[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return indices in groups that are read together, each of at most `MOST_BYTES` or of one; `sizes` are of all."""
    found: list[list[int]] = []
    for i in sorted(indices):
        if not found or sum(sizes[j] for j in found[-1]) + sizes[i] > MOST_BYTES:
            found.append([])
        found[-1].append(i)
    return found


def in_turn(
    groups: Sequence[list[int]], begin: Callable[[list[int]], Read], use: Callable[[list[int], list[Tensor]], None]
) -> None:
    """Call `use` for one group after another with what was read of it, while the next one is read."""
    reading: Read | None = None
    try:
        for i, group in enumerate(groups):
            read = (reading or begin(group))()
            reading = begin(groups[i + 1]) if i + 1 < len(groups) else None
            use(group, read)
            del read  # before the one after the next is begun
    except BaseException:
        if reading is not None:  # nobody may write into this memory from here on
            with contextlib.suppress(Exception):
                reading()
        raise
