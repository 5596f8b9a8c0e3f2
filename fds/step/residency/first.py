"""The optimizer's slots of a first state, or of one that is loaded, where they live."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fds.layout import Segment
from fds.optim.returned import first_slots
from fds.step.residency.chunks import Piece, chunks_of, is_separate
from fds.step.residency.contract import Residency, Resident, is_held, made
from fds.step.residency.lives import put, read, resident, settled, written
from fds.step.structure import Structure

READ = {"params", "opt"}  # kinds of leaves that are read and written by chunks


def first_opt(
    residency: Residency, structure: Structure, flat: Sequence[Tensor], device: torch.device
) -> dict[str, list[Tensor | None]]:
    """Return the optimizer's slots before the first update, where they live.

    Their values are made of those of the parameters on the device, a chunk at a time.
    """
    if READ.isdisjoint(residency.kinds) or any(x.is_meta for x in flat):
        return first_slots(structure.optimizer, structure.segments, list(flat))
    found: dict[str, list[Tensor | None]] = {slot: [None] * len(flat) for slot in structure.opt}
    for chunk in chunks_of(residency, structure):
        _fill(found, residency, structure, chunk, flat, device)
    return found


def _fill(
    found: dict[str, list[Tensor | None]],
    residency: Residency,
    structure: Structure,
    chunk: list[Piece],
    flat: Sequence[Tensor],
    device: torch.device,
) -> None:
    """Make the slots of some slices, or pieces of them; what the optimizer made of them is gone when it returns."""
    params: list[Tensor] = []
    for piece in chunk:
        x, leaf = piece.cut(flat[piece.index]), resident(structure, "params", structure.trained[piece.index])
        params += read(residency, [x], device) if is_held(residency, leaf, x.numel()) else [x]
    for slot, made_here in first_slots(structure.optimizer, [piece.segments for piece in chunk], params).items():
        for piece, x in zip(chunk, made_here, strict=True):
            leaf = resident(structure, "opt", structure.trained[piece.index])
            if x is None:
                continue
            if piece.whole:
                found[slot][piece.index] = settled(residency, x, leaf)
                continue
            memory = found[slot][piece.index]
            if memory is None:
                like = torch.empty(flat[piece.index].shape, dtype=x.dtype, device="meta")
                memory = found[slot][piece.index] = made(residency, like, leaf, device)
            put(residency, x, piece.cut(memory), is_held(residency, leaf, x.numel()))


def blank_opt(
    residency: Residency, structure: Structure, flat: Sequence[Tensor], device: torch.device
) -> dict[str, list[Tensor | None]]:
    """Return the optimizer's slots for values that are to be written, where they live; padding is as in `first_opt`."""
    if "opt" not in residency.kinds or any(x.is_meta for x in flat) or not is_separate(structure.optimizer):
        return first_opt(residency, structure, flat, device)
    found: dict[str, list[Tensor | None]] = {slot: [None] * len(flat) for slot in structure.opt}
    for slot, want in structure.opt.items():
        dtypes = iter(want.dtypes)
        for i, has in enumerate(want.has):
            if has:
                x = torch.empty(flat[i].shape, dtype=next(dtypes), device="meta")
                leaf = resident(structure, "opt", structure.trained[i])
                found[slot][i] = made(residency, x, leaf, device)
    for i, (inside, x) in enumerate(zip(structure.segments, flat, strict=True)):
        if gaps := gaps_of(inside, x.numel()):
            without = [attrs.evolve(s, offset=0, start=0, length=0) for s in inside]
            padding = first_slots(structure.optimizer, [without], [torch.cat([x[at:end] for at, end in gaps])])
            for slot, (values,) in padding.items():
                leaf = found[slot][i]
                if leaf is not None and values is not None:
                    pieces = values.split_with_sizes([end - at for at, end in gaps])
                    one = resident(structure, "opt", structure.trained[i])
                    held = is_held(residency, one, leaf.numel())
                    for (at, end), piece in zip(gaps, pieces, strict=True):
                        put(residency, piece, leaf[at:end], held)
    return found


def padded(residency: Residency, structure: Structure, x: Tensor, leaf: Resident, index: int) -> Tensor:
    """Write zeros to the padding of slice `index` of a bucket where it lives, and return it.

    All of a leaf is padding that is no slice of parameters.
    """
    assert structure.layout is not None
    gaps = [(0, x.numel())]
    if leaf.names and x.shape == structure.shapes[leaf.index]:
        gaps = gaps_of(structure.layout.buckets[leaf.index].segments(index), x.numel())
    for at, end in gaps:
        written(residency, torch.zeros(end - at, dtype=x.dtype, device=x.device), x.view(-1)[at:end])
    return x


def gaps_of(inside: Sequence[Segment], length: int) -> list[tuple[int, int]]:
    """Return first and last + 1 of the elements of a slice that no parameter has."""
    gaps: list[tuple[int, int]] = []
    end = 0
    for segment in sorted((s for s in inside if s.length), key=lambda s: s.offset):
        gaps.append((end, segment.offset))
        end = segment.offset + segment.length
    return [(at, to) for at, to in [*gaps, (end, length)] if to > at]
