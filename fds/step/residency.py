"""Residency, of the station `place`: where leaves of a state live, and in which chunks an update visits them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.errors import ComposeError, is_a
from fds.layout import Segment
from fds.optim import Optimizer
from fds.optim.returned import first_slots, in_words
from fds.step import foreach
from fds.step.structure import Structure, contiguous_copy

READ = {"params", "opt"}  # kinds of leaves that an update reads and writes by chunks, where a residency holds them


class Residency(Protocol):
    """Where leaves live between steps, and how an update gets at them: it reads a chunk ahead and writes one back.

    What is read and written are the bits that were given, so no number depends on it. Several threads may step at once.
    """

    @property
    def kinds(self) -> Collection[str]:
        """Which leaves live here: "params" (the masters), "opt" (the optimizer's), "slots" (what follows an update)."""
        ...

    def chunks(self, structure: Structure) -> Sequence[Sequence[int]]:
        """Return which slices are visited together, by their index in `structure.segments`: each slice once.

        The order is that of the visits. Ranks that hold slices of the same parameters return the same.
        """
        ...

    def make(self, x: Tensor, kind: str) -> Tensor:
        """Return memory for a leaf like `x`, of its shape and dtype, contiguous, with anything in it.

        Nobody else may hold it, and it is given back when nobody holds it any more. An "opt" may be on any device;
        losses and averages use the others where they are, so these are on the device of `x`. Nothing is to be read
        from `x`, which may have no memory of its own.
        """
        ...

    def read(self, old: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Begin to copy flat leaves to `device`, on which they are updated.

        Return the function that waits, and returns the copies.
        """
        ...

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], Any]:
        """Begin to write what an update made of a chunk to the flat leaves of the new state.

        Return the function that waits.
        """
        ...


@attrs.frozen
class OnDevice:
    """Every leaf lives where the step runs, in memory that the update writes into: one chunk, nothing to read."""

    kinds = ()

    def chunks(self, structure: Structure) -> list[list[int]]:
        """Return all slices."""
        return [list(range(len(structure.segments)))]

    def make(self, x: Tensor, kind: str) -> Tensor:
        """Return fresh memory."""
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def read(self, old: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Return copies."""
        return lambda: [x.to(device, copy=True) for x in old]

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], Any]:
        """Write at once."""
        foreach.copy_(new, worked)
        return lambda: None


def chunks_of(residency: Residency, structure: Structure, optimizer: Optimizer) -> list[list[int]]:
    """Return the chunks of a residency; one of all slices for an optimizer that does not treat each by itself.

    Raises `ComposeError` where a slice is missing, or there twice.
    """
    everything = list(range(len(structure.segments)))
    if not _is_separate(optimizer):
        return [everything] if everything else []
    found = residency.chunks(structure)
    try:
        chunks = [[int(i) for i in chunk] for chunk in found]
    except (TypeError, ValueError):
        chunks = []
    if sorted(i for chunk in chunks for i in chunk) != everything:
        want = f"lists of indices, in all each of 0 to {len(everything) - 1} once" if everything else "no chunks"
        raise _broken(residency, "chunks", repr(found)[:200], want)
    return [chunk for chunk in chunks if chunk]


def agreed_chunks(
    residency: Residency, structure: Structure, optimizer: Optimizer, everyone: Axis | None, place: int
) -> list[list[int]]:
    """Return the chunks, alike on all ranks at the same `place`. Raises `ComposeError` on all ranks of `everyone`."""
    mine, failed = [], None
    try:
        mine = chunks_of(residency, structure, optimizer)
    except Exception as error:
        failed = error
    replies = []
    if everyone is not None and residency.kinds:
        replies = everyone.exchange([place, mine, None if failed is None else str(failed)], "step")
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
    return mine


def made(residency: Residency, x: Tensor, kind: str, device: torch.device | None = None) -> Tensor:
    """Return memory for a leaf like `x` where it lives, with anything in it; `device` is that of an `x` on `meta`.

    Raises `ComposeError` for other memory.
    """
    if kind not in residency.kinds or not x.numel():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device if device is None else device)
    like = x if device is None else torch.empty((), dtype=x.dtype, device=device).expand(x.shape)
    found = residency.make(like, kind)
    same = is_a(found, Tensor) and (found.shape, found.dtype) == (x.shape, x.dtype) and found.is_contiguous()
    if not same or found.is_meta or not (kind == "opt" or found.device == like.device):
        want = "" if kind == "opt" else f" on {like.device}"
        raise _broken(
            residency, f"make(x, {kind!r})", in_words(found), f"contiguous memory {tuple(x.shape)} {x.dtype}{want}"
        )
    return found.detach()


def check_apart(residency: Residency, made: Iterable[Tensor], held: Iterable[Tensor] = ()) -> None:
    """Raise `ComposeError` where memory that a residency made is that of another leaf, one that it made or `held`."""
    both = [(x, True) for x in made] + [(x, False) for x in held]
    places = [(str(x.device), x.data_ptr(), x.nbytes, own) for x, own in both if x.numel() and not x.is_meta]
    ends: dict[tuple[str, bool], int] = {}
    for device, start, size, own in sorted(places):
        if start < max(ends.get((device, True), 0), own * ends.get((device, False), 0)):
            raise _broken(
                residency,
                "make(x, kind)",
                "memory that another leaf has",
                "memory of its own for each leaf, which nobody else holds",
            )
        ends[device, own] = max(ends.get((device, own), 0), start + size)


def settled(residency: Residency, x: Tensor, kind: str) -> Tensor:
    """Return a new leaf in the memory where it lives; on `meta` it stays as it is."""
    return x if kind not in residency.kinds or x.is_meta or not x.numel() else made(residency, x, kind).copy_(x)


def moved(residency: Residency, x: Tensor, kind: str) -> Tensor:
    """Return a contiguous copy of a leaf in memory of its own, where it lives."""
    return settled(residency, x, kind) if kind in residency.kinds and x.numel() else contiguous_copy(x)


@attrs.frozen
class Lives:
    """Of the leaves that an update writes, in order, where each lives: parameters, the optimizer's, what follows."""

    residency: Residency
    num_params: int
    num_opt: int
    fresh: list[Tensor] = tree.new(list)  # what was made

    def kind(self, i: int) -> str:
        """Return the kind of a leaf."""
        return "params" if i < self.num_params else "opt" if i < self.num_params + self.num_opt else "slots"

    def make(self, i: int, x: Tensor) -> Tensor:
        """Return memory for the new leaf."""
        self.fresh.append(made(self.residency, x, self.kind(i)))
        return self.fresh[-1]

    def copy(self, i: int, x: Tensor) -> Tensor:
        """Return a copy of the leaf where it lives."""
        return moved(self.residency, x, self.kind(i))

    def is_copied(self, i: int) -> bool:
        """Say whether the new leaf is to hold the old values before it is updated, since nobody reads them."""
        return self.kind(i) not in READ or self.kind(i) not in self.residency.kinds


def first_opt(
    residency: Residency, optimizer: Optimizer, structure: Structure, flat: Sequence[Tensor]
) -> dict[str, list[Tensor | None]]:
    """Return the optimizer's slots before the first update, where they live.

    Their values are made on the device of the parameters, a chunk at a time.
    """
    segments = structure.segments
    if "opt" not in residency.kinds or any(x.is_meta for x in flat):
        return first_slots(optimizer, segments, list(flat))
    found: dict[str, list[Tensor | None]] = {slot: [None] * len(flat) for slot in structure.opt}
    for chunk in chunks_of(residency, structure, optimizer):
        for slot, leaves in _first_of(residency, optimizer, [segments[i] for i in chunk], [flat[i] for i in chunk]):
            for i, x in zip(chunk, leaves, strict=True):
                found[slot][i] = x
    return found


def _first_of(
    residency: Residency, optimizer: Optimizer, segments: list[list[Segment]], flat: list[Tensor]
) -> list[tuple[str, list[Tensor | None]]]:
    """Return the slots of some slices, where they live; those that the optimizer made are gone when it returns."""
    return [
        (slot, [None if x is None else settled(residency, x, "opt") for x in leaves])
        for slot, leaves in first_slots(optimizer, segments, flat).items()
    ]


def blank_opt(
    residency: Residency, optimizer: Optimizer, structure: Structure, flat: Sequence[Tensor]
) -> dict[str, list[Tensor | None]]:
    """Return the optimizer's slots for values that are to be written, where they live; padding is as in `first_opt`."""
    if "opt" not in residency.kinds or any(x.is_meta for x in flat) or not _is_separate(optimizer):
        return first_opt(residency, optimizer, structure, flat)
    found: dict[str, list[Tensor | None]] = {slot: [None] * len(flat) for slot in structure.opt}
    for slot, want in structure.opt.items():
        dtypes = iter(want.dtypes)
        for i, has in enumerate(want.has):
            if has:
                x = torch.empty(flat[i].shape, dtype=next(dtypes), device="meta")
                found[slot][i] = made(residency, x, "opt", flat[i].device)
    for i, (inside, x) in enumerate(zip(structure.segments, flat, strict=True)):
        if gaps := _gaps(inside, x.numel()):
            without = [attrs.evolve(s, offset=0, start=0, length=0) for s in inside]
            padding = first_slots(optimizer, [without], [torch.cat([x[at:end] for at, end in gaps])])
            for slot, (values,) in padding.items():
                leaf = found[slot][i]
                if leaf is not None and values is not None:
                    pieces = values.split_with_sizes([end - at for at, end in gaps])
                    for (at, end), piece in zip(gaps, pieces, strict=True):
                        leaf[at:end] = piece
    return found


def _is_separate(optimizer: Optimizer) -> bool:
    """Say whether an optimizer may be given some slices at a time."""
    return optimizer.separate and not optimizer.draws


def _gaps(inside: Sequence[Segment], length: int) -> list[tuple[int, int]]:
    """Return first and last + 1 of the elements of a slice that no parameter has."""
    gaps: list[tuple[int, int]] = []
    end = 0
    for segment in sorted((s for s in inside if s.length), key=lambda s: s.offset):
        gaps.append((end, segment.offset))
        end = segment.offset + segment.length
    return [(at, to) for at, to in [*gaps, (end, length)] if to > at]


def chunk_bytes(residency: Residency, columns: Sequence[Sequence[Tensor | None]], chunks: Sequence[list[int]]) -> int:
    """Return the bytes of copies that an update has at most: of the chunk that it updates, and those beside it.

    `columns` are those of the parameters, then of every slot of the optimizer.
    """
    read = [column for c, column in enumerate(columns) if ("opt" if c else "params") in residency.kinds]
    sizes = [sum(x.nbytes for column in read for x in (column[i] for i in chunk) if x is not None) for chunk in chunks]
    return max((sum(sizes[i : i + 3]) for i in range(len(sizes))), default=0)


def text_of(residency: Residency) -> str:
    """Return a residency as text."""
    text = repr(residency)
    return type(residency).__name__ if text.startswith("<") else text


def waiting(residency: Residency, method: str, found: Any) -> Callable[[], Any]:
    """Return what `read` or `write` returned. Raises `ComposeError` for anything but a function that waits."""
    if not callable(found):
        raise _broken(residency, method, in_words(found), "a function () that waits until it is done")
    return found


def read_back(residency: Residency, found: Any, old: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return what a residency read. Raises `ComposeError` for anything but copies on the device."""

    def is_like(x: object, y: Tensor) -> bool:
        return isinstance(x, Tensor) and (x.shape, x.dtype, x.device) == (y.shape, y.dtype, device)

    if not (tree.is_sequence(found) and len(found) == len(old) and all(map(is_like, found, old))):
        raise _broken(residency, "read", in_words(found), f"{in_words(old)}, copied to {device}")
    if any(x.data_ptr() == y.data_ptr() for x, y in zip(found, old, strict=True)):
        raise _broken(residency, "read", "memory of the old state", "copies, which the update may write over")
    return list(found)


def _broken(residency: Residency, method: str, got: str, want: str) -> ComposeError:
    return ComposeError(
        "what fills a station did not return what it must",
        where=f"station 'place', {method} of {text_of(residency)}",
        got=got[:200],
        want=want[:200],
    )
