"""Landing: where summed gradients go as each becomes final: measured, then to memory elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.step import foreach
from fds.step.pool import Pool
from fds.step.residency.contract import Residency, check_apart, made, put_off, read_back, waiting
from fds.step.residency.lives import resident
from fds.step.structure import Structure

Tell = Callable[[Mapping[int, Tensor]], None]  # of gradients by slice, each once


@attrs.define(eq=False)
class Landing:
    """The summed gradients of one call, by slice of the optimizer, as each becomes final.

    Those that live elsewhere are written there at once, and let go when that is done, which the next one waits for;
    their norms are measured before, so that nobody reads them for it. Where `tell` is called with every slice when
    that is where it is to live, all land.
    """

    residency: Residency
    device: torch.device
    leaves: dict[int, Tensor]  # slice -> its memory, of those that live elsewhere
    late: Collection[int]  # slices to which other ranks add after backward: their sums land when that is done
    dtype: torch.dtype  # of norms
    wide: bool  # whether some are float64
    tell: Tell | None = None
    norms: dict[int, Tensor] = tree.new(dict)
    stored: set[int] = tree.new(set)  # slices of which something was written
    reading: dict[int, Callable[[], list[Tensor]]] = tree.new(dict)
    # what is written, what waits, and whether it is final
    writing: list[tuple[int, Tensor, Callable[[], Any], bool]] = tree.new(list)

    @classmethod
    def of(
        cls,
        residency: Residency,
        structure: Structure,
        elsewhere: Sequence[bool],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        late: Collection[int],
        pool: Pool,
        tell: Tell | None = None,
    ) -> Landing:
        """Return the landing of sums in these `dtypes`, of which some live `elsewhere`, in memory of a pool."""
        slices = [k for k, is_elsewhere in enumerate(elsewhere) if is_elsewhere]
        parts, shapes = [structure.trained[k] for k in slices], structure.shapes
        likes = [torch.empty((), dtype=dtypes[k], device=device).expand(shapes[structure.trained[k]]) for k in slices]
        fresh: list[Tensor] = []

        def make(j: int, x: Tensor) -> Tensor:
            fresh.append(made(residency, x, resident(structure, "gradients", parts[j])))
            return fresh[-1]

        memory = [x.to("meta") for x in likes]  # of a call that fails: sums are let go
        with put_off(residency):
            memory, _ = pool.copies(likes, (structure, device, *dtypes), make=make, copied=lambda j: False)
            if fresh:
                check_apart(residency, memory)
        wide = torch.float64 in dtypes
        leaves = dict(zip(slices, memory, strict=True))
        dtype = torch.float64 if wide or device.type == "cuda" else torch.float32
        return cls(residency, device, leaves, late, dtype, wide, tell)

    def lands(self, k: int) -> bool:
        """Say whether the sum of a slice is to land as soon as backward is done with it."""
        return (k in self.leaves or self.tell is not None) and k not in self.late

    def land(self, k: int, x: Tensor) -> Tensor:
        """Take the final sum of a slice, contiguous; return it where it lives."""
        self.put(k, x)
        if k not in self.leaves and self.tell is not None:
            self.tell({k: x})
        return self.leaves.get(k, x)

    def put(self, k: int, x: Tensor) -> None:
        """Measure and write a slice that lives elsewhere."""
        if k in self.leaves:
            self.norms[k] = foreach.norm([x], 2, dtype=self.dtype)[0]
            self.write(k, x, final=True)

    def write(self, k: int, x: Tensor, *, final: bool = False) -> None:
        """Begin to write a slice that lives elsewhere, once the last one is written; `x` may not change until then."""
        self.settle()
        self.reading.pop(k, None)
        wait = self.residency.write([x.view(-1)], [self.leaves[k].view(-1)])
        self.writing.append((k, x, waiting(self.residency, "write", wait), final))
        self.stored.add(k)

    def expect(self, k: int) -> None:
        """Begin to read what was written of a slice, if anything was."""
        if k in self.stored and k not in self.reading:
            self.settle()
            flat = [self.leaves[k].view(-1)]
            wait = waiting(self.residency, "read", self.residency.read(flat, self.device))
            self.reading[k] = lambda: read_back(self.residency, wait(), flat, self.device)

    def value(self, k: int, leaf: Tensor) -> Tensor:
        """Return a copy of what was written of a slice, in memory; `leaf` itself where it does not live elsewhere."""
        if k not in self.leaves:
            return leaf
        self.expect(k)
        (flat,) = self.reading.pop(k)()
        return flat.view(leaf.shape)

    def values(self, leaves: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the values of all leaves that are not empty, one after another."""
        return (self.value(k, x) for k, x in enumerate(leaves) if x.numel())

    def norm(self, k: int, leaf: Tensor) -> Tensor:
        """Return the norm () of a slice."""
        return self.norms[k] if k in self.leaves else foreach.norm([leaf], 2, dtype=self.dtype)[0]

    def add(self, k: int, part: Tensor) -> Tensor:
        """Return the sum of what was written of a slice that lives elsewhere and another part of it, in memory."""
        leaf = self.leaves[k]
        return self.value(k, leaf).add_(part) if k in self.stored else part.to(leaf.dtype)

    def settle(self) -> None:
        """Wait until everything is written."""
        while self.writing:
            k, _, wait, final = self.writing.pop()
            wait()
            if final and self.tell is not None:
                self.tell({k: self.leaves[k]})

    def finish(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Let those land to which other ranks have added; return all where they live, when that is written."""
        landed = [self.land(k, x) if k in self.late else x for k, x in enumerate(sums)]
        self.settle()
        self.tell = None  # what lands from here on was changed by a map
        return landed

    def close(self) -> None:
        """Wait for what is read and written, whatever comes of it: nobody may use this memory from here on."""
        waits = [*self.reading.values(), *(wait for _, _, wait, _ in self.writing)]
        self.reading.clear()
        self.writing.clear()
        for wait in waits:
            with contextlib.suppress(Exception):
                wait()
        self.tell = None  # which may lead here: without a cycle memory is free at once
