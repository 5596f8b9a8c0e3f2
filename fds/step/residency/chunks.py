"""Chunks: which slices an update visits together, on all ranks alike; and by them the optimizer's first slots."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.collectives import Axis
from fds.errors import ComposeError
from fds.layout import Segment
from fds.optim import Optimizer
from fds.optim.returned import first_slots
from fds.step.residency.contract import Residency, Resident, broken, is_held, made, text_of
from fds.step.residency.lives import AT_ONCE, put, read, resident, settled, written
from fds.step.structure import Structure

Chunk = list[tuple[int, int, int]]  # of slices, or pieces of them: index, first element, last element + 1
CUT = 64  # elements: what vector instructions compute at once, or several times that


@attrs.frozen(eq=False)
class Piece:
    """A slice that an update visits, or a piece of one: its elements `start` to `end`.

    Attributes:
        index: of the slice, in `structure.segments`.
        start: its first element there.
        end: its last element there + 1.
        whole: whether it is all of the slice.
        segments: of the parameters in it.
    """

    index: int
    start: int
    end: int
    whole: bool
    segments: list[Segment]

    @classmethod
    def of(cls, structure: Structure, index: int, start: int, end: int) -> Piece:
        """Return some elements of a slice."""
        inside, size = structure.segments[index], structure.shapes[structure.trained[index]].numel()
        if (start, end) == (0, size):
            return cls(index, start, end, True, inside)
        return cls(index, start, end, False, [_within(segment, start, end) for segment in inside])

    def cut(self, x: Tensor) -> Tensor:
        """Return the elements of a contiguous leaf of the slice: of a whole slice the leaf as it is, else (n,)."""
        return x if self.whole else x.view(-1)[self.start : self.end]


def _within(segment: Segment, start: int, end: int) -> Segment:
    """Return what of a segment lies in the elements `start` to `end` of its slice."""
    first, last = max(segment.offset, start), min(segment.offset + segment.length, end)
    if last <= first:
        return attrs.evolve(segment, offset=0, length=0, start=0)
    return attrs.evolve(
        segment, offset=first - start, length=last - first, start=segment.start + first - segment.offset
    )


def chunks_of(residency: Residency, structure: Structure) -> list[list[Piece]]:
    """Return the chunks of a residency; one of all slices for an optimizer that does not treat each by itself.

    Raises `ComposeError` where an element is missing, or there twice, or a slice is cut elsewhere than at multiples of
    64 elements.
    """
    return _held(structure, _planned(residency, structure.largest))


def _held(structure: Structure, planned: list[Chunk]) -> list[list[Piece]]:
    """Return what this rank holds of chunks that are planned for the ranks with the largest slices."""
    sizes = [structure.shapes[i].numel() for i in structure.trained]
    kept = [[x for x in chunk if x[1] < sizes[x[0]] or x[1] == 0] for chunk in planned]
    return [[Piece.of(structure, i, start, min(end, sizes[i])) for i, start, end in chunk] for chunk in kept if chunk]


def _planned(residency: Residency, structure: Structure) -> list[Chunk]:
    sizes = [structure.shapes[i].numel() for i in structure.trained]
    if not is_separate(structure.optimizer):
        return [[(i, 0, n) for i, n in enumerate(sizes)]] if sizes else []
    returned = residency.chunks(structure)
    try:
        chunks = [[_piece_of(x, sizes) for x in chunk] for chunk in returned]
    except (TypeError, ValueError, IndexError):
        chunks = []
    if not _covers(chunks, sizes):
        want = f"lists of indices, in all each of 0 to {len(sizes) - 1} once" if sizes else "no chunks"
        raise broken(
            residency,
            "chunks",
            repr(returned)[:200],
            f"{want}, or its pieces (index, start, end) cut at multiples of {CUT}",
        )
    whole = [not (inside and structure.optimizer.is_elementwise(inside[0].name)) for inside in structure.segments]
    kept = [
        [(i, 0, sizes[i]) if whole[i] else (i, start, end) for i, start, end in chunk if not (whole[i] and start)]
        for chunk in chunks
    ]
    return [chunk for chunk in kept if chunk]


def _covers(chunks: list[Chunk], sizes: list[int]) -> bool:
    """Say whether every element of slices of these sizes is visited once, those of a slice in a row."""
    ends: dict[int, int] = {}
    for index, start, end in (x for chunk in chunks for x in chunk):
        if not 0 <= index < len(sizes) or start != ends.get(index, 0) or (end % CUT and end != sizes[index]):
            return False
        if end <= start and (sizes[index] or index in ends):
            return False
        ends[index] = end
    return [ends.get(i) for i in range(len(sizes))] == sizes


def _piece_of(x: Any, sizes: list[int]) -> tuple[int, int, int]:
    """Return index, first and last + 1 element of a slice or a piece. Raises what is raised for anything else."""
    if not isinstance(x, tuple | list):
        index = operator.index(x)
        return index, 0, sizes[index]
    index, start, end = (operator.index(n) for n in x)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return index, start, end


def agreed_chunks(residency: Residency, structure: Structure, everyone: Axis | None, place: int) -> list[list[Piece]]:
    """Return the chunks, alike on all ranks at the same `place`. Raises `ComposeError` on all ranks of `everyone`."""
    mine, failed = list[Chunk](), None
    try:
        mine = _planned(residency, structure.largest)
    except Exception as error:
        failed = error
    replies = []
    if everyone is not None and residency.kinds:
        pieces = [[[*x] for x in chunk] for chunk in mine]
        replies = everyone.exchange([place, pieces, None if failed is None else str(failed)], "step")
    if failed is not None:
        raise failed
    first: dict[int, list[Any]] = {}
    for rank, (at, theirs, error) in enumerate(replies):
        if error is not None or theirs != first.setdefault(at, theirs):
            raise ComposeError(
                "ranks that hold slices of the same parameters visit them in the same chunks",
                where=f"station 'place', chunks of {text_of(residency)}, rank {rank}",
                got=error or str(theirs)[:200],
                want=str(first.get(at, "chunks"))[:200],
            )
    return _held(structure, mine)


def is_separate(optimizer: Optimizer) -> bool:
    """Say whether an optimizer may be given some slices at a time."""
    return optimizer.separate and not optimizer.draws


def may_leave(structure: Structure, communicates: bool, indices: list[int]) -> list[bool]:
    """Say of every slice whether it is one of `indices` and may be updated on another device than the step runs on.

    Generators, and other ranks, are those of the device; slices that are not separate are updated in one place.
    """
    names = [inside[0].name if inside else "" for inside in structure.segments]
    optimizer = structure.optimizer
    if optimizer.draws or not (optimizer.separate or len(indices) == len(names)):
        return [False] * len(names)
    alone = [not communicates or bool(name and optimizer.is_elementwise(name)) for name in names]
    return [i in indices and may for i, may in enumerate(alone)]


def with_frozen(structure: Structure, chunks: Sequence[list[Piece]]) -> list[list[Piece]]:
    """Return chunks of all parts of the parameters, by their indices: those of an update, then the frozen parts."""
    with_all = [[attrs.evolve(x, index=structure.trained[x.index]) for x in chunk] for chunk in chunks]
    for i in sorted(set(range(len(structure.part_names))) - set(structure.trained)):
        n = structure.shapes[i].numel()
        ends = [(start, min(start + AT_ONCE, n)) for start in range(0, max(n, 1), AT_ONCE)]
        with_all += [[Piece(i, start, end, len(ends) == 1, [])] for start, end in ends]
    return with_all


def chunk_bytes(sizes: Sequence[int], lengths: Sequence[int], chunks: Sequence[list[Piece]]) -> int:
    """Return the bytes of copies that an update has at most: of the chunk that it updates, and those beside it.

    `sizes` are the bytes of every slice that are copied, `lengths` its elements.
    """
    copied = [sum(sizes[x.index] * (x.end - x.start) // max(1, lengths[x.index]) for x in chunk) for chunk in chunks]
    return max((sum(copied[i : i + 3]) for i in range(len(copied))), default=0)


READ = {"params", "opt"}  # kinds of leaves that are read and written by chunks


def first_opt(
    residency: Residency, structure: Structure, flat: Sequence[Tensor], device: torch.device
) -> dict[str, list[Tensor | None]]:
    """Return the optimizer's slots before the first update, where they live.

    Their values are made of those of the parameters on the device, a chunk at a time.
    """
    if READ.isdisjoint(residency.kinds) or any(x.is_meta for x in flat):
        return first_slots(structure.optimizer, structure.segments, list(flat))
    opt: dict[str, list[Tensor | None]] = {slot: [None] * len(flat) for slot in structure.opt}
    for chunk in chunks_of(residency, structure):
        _fill(opt, residency, structure, chunk, flat, device)
    return opt


def _fill(
    opt: dict[str, list[Tensor | None]],
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
                opt[slot][piece.index] = settled(residency, x, leaf)
                continue
            memory = opt[slot][piece.index]
            if memory is None:
                like = torch.empty(flat[piece.index].shape, dtype=x.dtype, device="meta")
                memory = opt[slot][piece.index] = made(residency, like, leaf, device)
            put(residency, x, piece.cut(memory), is_held(residency, leaf, x.numel()))


def blank_opt(
    residency: Residency, structure: Structure, flat: Sequence[Tensor], device: torch.device
) -> dict[str, list[Tensor | None]]:
    """Return the optimizer's slots for values that are to be written, where they live; padding is as in `first_opt`."""
    if "opt" not in residency.kinds or any(x.is_meta for x in flat) or not is_separate(structure.optimizer):
        return first_opt(residency, structure, flat, device)
    opt: dict[str, list[Tensor | None]] = {slot: [None] * len(flat) for slot in structure.opt}
    for slot, want in structure.opt.items():
        dtypes = iter(want.dtypes)
        for i, has in enumerate(want.has):
            if has:
                x = torch.empty(flat[i].shape, dtype=next(dtypes), device="meta")
                leaf = resident(structure, "opt", structure.trained[i])
                opt[slot][i] = made(residency, x, leaf, device)
    for i, (inside, x) in enumerate(zip(structure.segments, flat, strict=True)):
        if gaps := gaps_of(inside, x.numel()):
            without = [attrs.evolve(s, offset=0, start=0, length=0) for s in inside]
            padding = first_slots(structure.optimizer, [without], [torch.cat([x[at:end] for at, end in gaps])])
            for slot, (values,) in padding.items():
                leaf = opt[slot][i]
                if leaf is not None and values is not None:
                    pieces = values.split_with_sizes([end - at for at, end in gaps])
                    home = resident(structure, "opt", structure.trained[i])
                    is_elsewhere = is_held(residency, home, leaf.numel())
                    for (at, end), piece in zip(gaps, pieces, strict=True):
                        put(residency, piece, leaf[at:end], is_elsewhere)
    return opt


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
