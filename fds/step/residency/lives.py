"""Lives: of every leaf that an update writes, where it lives; how the update, and the loss of masters, get at it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.layout import MOST_BYTES
from fds.step import foreach
from fds.step.residency.contract import Residency, Resident, is_held, made, read_back, waiting
from fds.step.structure import Structure, contiguous_copy

Column = list[Tensor | None]  # of flat leaves
AT_ONCE = 2**24  # elements that are copied to a leaf elsewhere at a time


def resident(structure: Structure, kind: str, part: int) -> Resident:
    """Return a leaf of a kind that belongs to a part of the parameters, by the index of the part."""
    return Resident(kind, structure.inside(part), part, len(structure.part_names))


def resident_at(structure: Structure, path: str, after: Iterable[str], in_pieces: Collection[str]) -> Resident | None:
    """Return the leaf of a state at a key path, None for one that never lives elsewhere.

    Of slots those may that follow an update (`after`), some of them `in_pieces`.
    """
    kind, *words = path.split(".")
    if kind not in ("params", "opt", "slots") or (kind == "slots" and words[0] not in after):
        return None
    ends = (".".join(words[i:]) for i in range(kind != "params", len(words)))
    part = next((structure.parts[name] for name in ends if name in structure.parts), None)
    leaf = Resident(kind, (), 0, 1) if part is None else resident(structure, kind, part)
    return attrs.evolve(leaf, in_place=kind == "slots" and words[0] not in in_pieces)


def settled(residency: Residency, x: Tensor, leaf: Resident | None, device: torch.device | None = None) -> Tensor:
    """Return a new leaf in the memory where it lives; one on the device, or on `meta`, stays as it is.

    `device` is that of the step, where `x` may be on another one.
    """
    if x.is_meta or leaf is None or not is_held(residency, leaf, x.numel()):
        return x
    return written(residency, x, made(residency, x, leaf, device))


def written(residency: Residency, x: Tensor, leaf: Tensor) -> Tensor:
    """Write values to a leaf that lives in a residency, or to a piece of one, and return it."""
    waiting(residency, "write", residency.write([x.reshape(-1)], [leaf.view(-1)]))()
    return leaf


def put(residency: Residency, x: Tensor, leaf: Tensor, is_elsewhere: bool) -> None:
    """Write values to a leaf, or to a piece of one, which the residency holds or not."""
    if is_elsewhere:
        written(residency, x, leaf)
    else:
        leaf.copy_(x)


def read(residency: Residency, leaves: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies on a device of flat leaves that live in a residency."""
    return read_back(residency, waiting(residency, "read", residency.read(leaves, device))(), leaves, device)


def _carried(residency: Residency, x: Tensor, leaf: Tensor) -> Tensor:
    """Copy a leaf to another one in the same residency, a piece at a time, and return that."""
    values, memory = x.reshape(-1), leaf.view(-1)
    for i in range(0, x.numel(), AT_ONCE):
        written(residency, read(residency, [values[i : i + AT_ONCE]], leaf.device)[0], memory[i : i + AT_ONCE])
    return leaf


@attrs.frozen(eq=False)
class Lives:
    """Of the leaves that an update writes, in order, where each lives: parameters, the optimizer's, what follows.

    Attributes:
        residency: of the step. Where it holds nothing, the lists are empty.
        device: on which the step runs.
        leaves: as the residency knows them.
        media: of each, where it lives in a word, "device" for those that the residency does not hold.
        placed: of each, whether the update writes into its memory, with the old values in it.
        apart: of each, whether it is written in memory of its own before the step has decided; as `ahead` of its slice.
        ways: by columns, of the parameters and then of every slot of the optimizer, how an update gets at each leaf:
            "place", it writes into it; "read", the residency reads and writes it; "fetch", so it does, from the
            device and back; None where there is none.
        gradients: of every slice, how an update gets at its summed gradient.
        landed: of every slice, whether that lives elsewhere from when it is final.
        on_host: of every slice, whether it is updated on the CPU though the step runs elsewhere.
        ahead: of every slice, whether it is updated before the step has decided, which may take that back.
        visited: whether the update visits chunks, since it does not write into all leaves where they are.
        writes_on_host: whether some leaves are updated on the CPU though the step runs elsewhere.
        after: of every slot that follows the update chunk by chunk, the same as of an update: slices are the parts of
            the parameters, which are read in the place of gradients.
    """

    residency: Residency
    device: torch.device
    leaves: list[Resident | None]
    media: list[str]
    placed: list[bool]
    apart: list[bool]
    ways: list[list[str | None]]
    gradients: list[str]
    landed: list[bool]
    on_host: list[bool]
    ahead: list[bool]
    visited: bool
    writes_on_host: bool
    after: dict[str, Lives] = tree.new(dict)

    @classmethod
    def of(
        cls,
        residency: Residency,
        structure: Structure,
        slots: Mapping[str, Any],
        after: Iterable[str],
        in_pieces: Collection[str],
        device: torch.device,
        may_leave: Callable[[list[int]], list[bool]],
        *,
        speculate: bool,
    ) -> Lives:
        """Return where the leaves of a structure live.

        Args:
            residency: of the step.
            structure: of the parameters.
            slots: of a state.
            after: names of those that follow an update.
            in_pieces: names of those of them that may follow it a piece at a time.
            device: on which the step runs.
            may_leave: says which of all slices may be updated elsewhere, or ahead, given those that would be.
            speculate: whether slices of which leaves live elsewhere are updated ahead.
        """
        if not residency.kinds:
            return cls(
                residency=residency,
                device=device,
                leaves=[],
                media=[],
                placed=[],
                apart=[],
                ways=[],
                gradients=[],
                landed=[],
                on_host=[],
                ahead=[],
                visited=False,
                writes_on_host=False,
            )
        parts = structure.parts
        params = [resident(structure, "params", i) for i in structure.trained]
        opt = [resident(structure, "opt", parts[name]) for want in structure.opt.values() for name in want.names]
        averages = {f"slots.{name}.{path}": x for name in after for path, x in tree.paths(slots[name]).items()}
        leaves = [*params, *opt, *(resident_at(structure, path, after, in_pieces) for path in averages)]
        shapes = [structure.shapes[i] for i in structure.trained]
        shapes += [shape for want in structure.opt.values() for shape in want.shapes]
        sizes = [*(shape.numel() for shape in shapes), *(x.numel() for x in averages.values())]
        media = [home_of(residency, leaf, n) for leaf, n in zip(leaves, sizes, strict=True)]

        place = {part: i for i, part in enumerate(structure.trained)}
        slices = [place[leaf.index] for leaf in (*params, *opt)]  # of every leaf that an optimizer writes
        leaving: list[bool] = [False] * len(params)
        if residency.updates_on == "host" and device.type != "cpu":
            away = {i for i, medium in zip(slices, media, strict=False) if medium != "device"}
            leaving = may_leave(sorted(away))
        ways = [way_to(media[k], leaving[i], device) for k, i in enumerate(slices)]
        ahead: list[bool] = [False] * len(params)
        if speculate:
            ahead = may_leave(sorted({i for i, way in zip(slices, ways, strict=True) if leaving[i] or way == "read"}))
        apart = [*(ahead[i] for i in slices), *[False] * len(averages)]
        placed = [way == "place" and not is_apart for way, is_apart in zip(ways, apart, strict=False)]
        in_place = all(placed)
        following = {name: cls._after(residency, structure, slots[name], device) for name in in_pieces}
        following = {name: slot_lives for name, slot_lives in following.items() if slot_lives is not None}
        for name in dict.fromkeys(after):
            slot_lives = following.get(name)
            placed += [True] * len(tree.leaves(slots[name])) if slot_lives is None else slot_lives.placed
        columns = [list[str | None](ways[: len(params)]), *structure.align(ways[len(params) :]).values()]
        summed = [
            home_of(residency, resident(structure, "gradients", i), n)
            for i, n in zip(structure.trained, sizes, strict=False)
        ]
        gradients = [way_to(medium, leaves, device) for medium, leaves in zip(summed, leaving, strict=True)]
        landed = [medium != "device" for medium in summed]
        visited = any(leaving) or not in_place or "read" in gradients
        return cls(
            residency=residency,
            device=device,
            leaves=leaves,
            media=media,
            placed=placed,
            apart=apart,
            ways=columns,
            gradients=gradients,
            landed=landed,
            on_host=leaving,
            ahead=ahead,
            visited=visited,
            writes_on_host=any(leaving) or any(slot_lives.writes_on_host for slot_lives in following.values()),
            after=following,
        )

    @classmethod
    def _after(cls, residency: Residency, structure: Structure, slot: Any, device: torch.device) -> Lives | None:
        """Return how a slot gets at its leaves; None where it is not like the parameters, or written where they are."""
        shapes, n = {path: x.shape for path, x in tree.paths(slot).items()}, len(structure.part_names)
        if shapes != dict(zip(structure.paths, structure.shapes, strict=True)):
            return None
        leaves = [resident(structure, "slots", i) for i in range(n)]
        media = [home_of(residency, leaf, x.numel()) for leaf, x in zip(leaves, structure.shapes, strict=True)]
        params = [resident(structure, "params", i) for i in range(n)]
        masters = [home_of(residency, leaf, x.numel()) for leaf, x in zip(params, structure.shapes, strict=True)]
        leaving = [residency.updates_on == "host" and device.type != "cpu" and x != "device" for x in media]
        ways = [way_to(medium, leaves, device) for medium, leaves in zip(media, leaving, strict=True)]
        read = [way_to(medium, leaves, device) for medium, leaves in zip(masters, leaving, strict=True)]
        if {*ways, *read} <= {"place"}:
            return None
        at = dict(zip(structure.paths, ways, strict=True))
        placed = [at[path] == "place" for path in shapes]
        none = [False] * n
        on_host = any(leaving)
        return cls(
            residency=residency,
            device=device,
            leaves=[*leaves],
            media=media,
            placed=placed,
            apart=none,
            ways=[[*ways]],
            gradients=read,
            landed=none,
            on_host=leaving,
            ahead=none,
            visited=True,
            writes_on_host=on_host,
        )

    def make(self, i: int, x: Tensor) -> Tensor:
        """Return memory for the new leaf, as for one of the device."""
        is_elsewhere = self.media[i] != "device"
        return made(self.residency, x, self.leaves[i], self.device if is_elsewhere else None)

    def copy(self, i: int, x: Tensor) -> Tensor:
        """Return a contiguous copy of the leaf in memory of its own, where it lives."""
        if not self.media or self.media[i] == "device":
            return contiguous_copy(x)
        return _carried(self.residency, x, self.make(i, x))

    def is_copied(self, i: int) -> bool:
        """Say whether the new leaf is to hold the old values before it is updated, since the update writes into it."""
        return self.placed[i]


def home_of(residency: Residency, leaf: Resident | None, numel: int) -> str:
    """Return where a leaf of so many elements lives, in a word; None is one that never lives elsewhere."""
    return residency.medium(leaf) if leaf is not None and is_held(residency, leaf, numel) else "device"


def way_to(medium: str, leaves: bool, device: torch.device) -> str:
    """Return how who computes on a device gets at a leaf, of a slice that leaves it for the host, or does not."""
    on_cpu = leaves or device.type == "cpu"
    if medium == "device":
        return "fetch" if leaves else "place"
    return "place" if medium == "host" and on_cpu else "read"


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
        params = [x for i, x in enumerate(self.parts) if i not in self.elsewhere]
        here = iter(foreach.cast(params, [x for i, x in enumerate(wanted) if i not in self.elsewhere]))
        params = [x if i in self.elsewhere else next(here) for i, x in enumerate(self.parts)]

        def use(group: Sequence[int], read: list[Tensor]) -> None:
            for i, x in zip(group, read, strict=True):
                params[i] = torch.empty(self.parts[i].shape, dtype=wanted[i], device=self.device)
                params[i].view(-1).copy_(x)

        in_turn(groups(self.elsewhere, [x.nbytes for x in self.parts]), self.read, use)
        return params


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
    grouped: list[list[int]] = []
    for i in sorted(indices):
        if not grouped or sum(sizes[j] for j in grouped[-1]) + sizes[i] > MOST_BYTES:
            grouped.append([])
        grouped[-1].append(i)
    return grouped


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
