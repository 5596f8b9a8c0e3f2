"""What a state holds: `dump_state`, all of it as text, and `check_ranks`, whether ranks hold the same bits of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import xxhash
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fds import tree
from fds.collectives import Axis, fingerprint
from fds.debugging.checking import unravel
from fds.errors import FdsError, StateError, checked_call, is_a
from fds.state import State
from fds.step import Step
from fds.step.checks.state_check import usable
from fds.step.residency.contract import is_held
from fds.storage.format.boxes import index_of, shape_at, whole
from fds.storage.format.tensors import as_bytes
from fds.storage.opening import BITS
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import LeafPart, parts_of

_DOING = "check_ranks"
_STEP = 2**21  # elements that are read together: a leaf may be on a GPU or a disk, and larger than memory
_FEW = 256  # digests, or elements, that ranks tell each other at a time to find the first difference
_SHOWN = 4  # leaves whose first difference an error tells


@attrs.frozen
class RankDifference:
    """A leaf of which ranks that hold the same elements have other bits.

    Attributes:
        name: its key path in the plain state.
        ranks: those that differ from most.
        others: those that are as most; where as many differ, those of the lowest rank.
        index: of the first element that differs between the first of either, in the whole leaf; None where that was
            not looked for.
        value: of it, on the first of `ranks`.
        expected: of it, on the first of `others`.
    """

    name: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    index: tuple[int, ...] | None = None
    value: str = ""
    expected: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: {_list_ranks(self.ranks)} not as {_list_ranks(self.others)}"
        if self.index is None:
            return text
        values = f"{self.value} on rank {self.ranks[0]}, {self.expected} on rank {self.others[0]}"
        return f"{text}; first at {list(self.index)}: {values}"


@checked_call
def check_ranks(state: State, step: Step) -> None:
    """Check that ranks hold the same bits of what several of them hold; all ranks that share the step call it.

    That are, of a plain state, all leaves; of a sharded one the counters, the key, buffers and slots, and the slices
    that replicas have too; along a pipeline what ranks of the same stage hold, and tied parameters; along a tensor axis
    what is not split. Leaves in the host's memory or on a disk are read from there. Ranks exchange 64 bits for each
    leaf, and more only of those that differ, so it costs about a pass over the state, and changes nothing.

    Args:
        state: of the step.
        step: what `compose(...)(loss)` returned.

    Raises `StateError`, on every rank, for leaves that differ: which, on which ranks, and where first, with both
    values; for ranks of which one has another tree of leaves; and for what a rank has that is no state of the step.
    """
    if differences := rank_differences(state, step):
        more = [difference.name for difference in differences[_SHOWN:]]
        lines = [*map(str, differences[:_SHOWN])]
        lines += [f"... and {len(more)} more leaves: {tree.named(more)}"] if more else []
        raise StateError(
            "ranks hold other bits of what must be equal",
            where=f"{differences[0].name} on {_list_ranks(differences[0].ranks)}",
            got="\n".join(lines),
            want="the same bits on all ranks that hold these elements",
            hint="who writes into a state, or changes it on one rank? the first call after which this fails tells",
        )


def rank_differences(state: State, step: Step) -> list[RankDifference]:
    """Return what `check_ranks` would raise: the leaves that differ, in the order of the state; empty if none does.

    All ranks that share the step call it, and get the same. Raises `StateError` as `check_ranks` does, but for leaves
    that differ.
    """
    if not is_a(step, Step):
        raise FdsError("not a step", where=_DOING, got=type(step).__name__, want="fds.check_ranks(state, step)")
    ranks = Ranks.of(step, _DOING)
    everyone = ranks.everyone
    if everyone is None:
        usable(state, _DOING)
        return []
    parts_here, leaves = dict[str, tuple[str, LeafPart]](), list[str]()  # by what is equal for the same elements

    def look() -> Any:
        usable(state, _DOING)
        step.check(state)
        for name, part in parts_of(state, ranks).items():
            leaves.append(f"{name} {part.leaf()}")
            if numel := part.tensor.numel():  # the key is short enough to be sent for each
                parts_here[fingerprint((name, part.start, numel, part.ranges, part.term))] = name, part
        digests = {key: _digest(part.tensor) for key, (_, part) in parts_here.items()}
        return [ranks.place, fingerprint(sorted(leaves)), digests]

    sent = _exchange(everyone, look)
    if len({place for place, _, _ in sent}) < len({(place, text) for place, text, _ in sent}):
        raise _other_leaves(everyone, [place for place, _, _ in sent], _exchange(everyone, lambda: leaves))
    digests: dict[str, dict[int, str]] = {}
    for i, (_, _, theirs) in enumerate(sent):
        for key, digest in theirs.items():
            digests.setdefault(key, {})[i] = digest
    differing = [key for key, by_rank in digests.items() if len({*by_rank.values()}) > 1]
    if not differing:
        return []
    names = dict[str, str]()
    for theirs in _exchange(everyone, lambda: {key: parts_here[key][0] for key in differing if key in parts_here}):
        names |= theirs
    differences = []
    for n, key in enumerate(differing):
        groups: dict[str, list[int]] = {}
        for i, digest in sorted(digests[key].items()):
            groups.setdefault(digest, []).append(i)
        most = max(groups.values(), key=lambda group: (len(group), -group[0]))
        odd = [i for i in sorted(digests[key]) if i not in most]
        theirs, others = (tuple(everyone.ranks[i] for i in side) for side in (odd, most))
        part = parts_here[key][1] if key in parts_here else None
        first = _find_first(everyone, part, odd[0], most[0]) if n < _SHOWN else {}
        differences.append(RankDifference(names[key], theirs, others, **first))
    return differences


def _exchange(everyone: Axis, make: Callable[[], Any]) -> list[Any]:
    """Return what a function returns on each rank. Raises `StateError`, on every rank, where it raises on any."""
    mine, error = None, None
    try:
        mine = make()
    except Exception as caught:  # the other ranks wait: they are told
        error = caught
    sent = everyone.exchange([mine, None if error is None else str(error)[:2000]], _DOING)
    failed = next((i for i, (_, text) in enumerate(sent) if text is not None), None)
    if failed is not None:
        raise StateError(
            "a rank has no state that could be compared",
            where=f"{_DOING}, rank {everyone.ranks[failed]}",
            got=sent[failed][1],
            want="the state of this step on every rank",
        ) from error
    return [value for value, _ in sent]


def _other_leaves(everyone: Axis, places: Sequence[int], leaves: Sequence[list[str]]) -> StateError:
    """Return the error for the first rank whose leaves are not those of the first rank at the same place."""
    firsts = [places.index(place) for place in places]
    i = next(i for i, first in enumerate(firsts) if {*leaves[i]} != {*leaves[first]})
    want = leaves[firsts[i]]
    missing, more = [leaf for leaf in want if leaf not in leaves[i]], [leaf for leaf in leaves[i] if leaf not in want]
    return StateError(
        "ranks hold other leaves",
        where=f"{_DOING}, rank {everyone.ranks[i]}",
        got=f"{', '.join(more[:_SHOWN]) or 'nothing'} instead of others, {len(leaves[i])} leaves",
        want=f"{', '.join(missing[:_SHOWN]) or 'no others'}, {len(want)} leaves, as rank {everyone.ranks[firsts[i]]}",
    )


def _digest(x: Tensor) -> str:
    digest, flat = xxhash.xxh3_64(), x.detach().reshape(-1)
    for i in range(0, len(flat), _STEP):
        digest.update(as_bytes(flat[i : i + _STEP].cpu()).numpy())  # pyright: ignore[reportArgumentType]  (a buffer)
    return digest.hexdigest()


def _find_first(everyone: Axis, part: LeafPart | None, odd: int, most: int) -> dict[str, Any]:
    """Return index and values of the first element that differs between two ranks; all ranks call this."""
    flat = None if part is None else part.tensor.detach().reshape(-1)
    numel = next(n for n in _exchange(everyone, lambda: None if flat is None else len(flat)) if n is not None)
    start, end = 0, numel
    while end - start > _FEW:
        width = -(-(end - start) // _FEW)
        cuts = [slice(i, min(i + width, end)) for i in range(start, end, width)]
        sent = _exchange(everyone, lambda cuts=cuts: None if flat is None else [_digest(flat[cut]) for cut in cuts])
        at = next(i for i, (a, b) in enumerate(zip(sent[odd], sent[most], strict=True)) if a != b)
        start, end = cuts[at].start, cuts[at].stop
    sent = _exchange(everyone, lambda: None if part is None else _read_elements(part, start, end))
    (bits, values, indices), (other_bits, others, _) = sent[odd], sent[most]
    at = next(i for i, (a, b) in enumerate(zip(bits, other_bits, strict=True)) if a != b)
    value, expected = values[at], others[at]
    if value == expected:  # NaN and NaN, of other bits
        value, expected = f"{value} (bits {bits[at]:#x})", f"{expected} (bits {other_bits[at]:#x})"
    return {"index": tuple(indices[at]), "value": value, "expected": expected}


def _read_elements(part: LeafPart, start: int, end: int) -> list[Any]:
    """Return the bits, the values and the indices in the whole leaf of some elements, as JSON."""
    few = part.tensor.detach().reshape(-1)[start:end].cpu()
    ranges = tuple((extent,) for extent in whole(part.shape)) if part.ranges is None else part.ranges
    indices = [index_of(ranges, unravel(part.start + i, shape_at(ranges))) for i in range(start, end)]
    values = few.double() if few.is_floating_point() else few  # some numbers of 8 bits have no list
    return [as_bytes(few).view(BITS[few.itemsize]).tolist(), [repr(x) for x in values.tolist()], indices]


def _list_ranks(ranks: Sequence[int]) -> str:
    many = len(ranks) > 1
    return f"rank{'s' * many} {', '.join(map(str, ranks[:16]))}{', ...' * (len(ranks) > 16)}"


@checked_call
def dump_state(state: State, step: Step) -> str:
    """Return what a step is and what its state holds on this rank, as a text to print.

    What is composed, station by station, with the bytes that it takes and sends, as `step.describe(state)` says; then
    the counters and other numbers of the state by their values, and every leaf by its key path: shape, dtype, bytes,
    where it lives, and of a slice of a bucket the parameters in it. No rank waits for another; the numbers are read,
    for which a GPU is waited for.

    Args:
        state: of the step.
        step: what `compose(...)(loss)` returned.

    Raises `FdsError` for anything else.
    """
    if not is_a(step, Step):
        raise FdsError("not a step", where="dump_state", got=type(step).__name__, want="fds.dump_state(state, step)")
    usable(state, "dump_state")
    step.check(state)
    everyone, leaves = step.everyone, tree.paths(state)
    rank = "" if everyone is None else f", rank {everyone.index} of {everyone.size}"
    few = {path: x for path, x in leaves.items() if x.numel() <= 2 and not path.startswith(("params.", "opt."))}
    values = [f"{path:<10} {', '.join(map(str, tree.values_of(x.reshape(-1))))}" for path, x in few.items()]
    total = f"{len(leaves)} leaves, {tree.num_bytes(state):,} bytes{rank}"
    structure, residency = step.structure_of(state.params)[0], step.place.residency
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("leaf", "shape", "dtype", "bytes", "lives", "of" * structure.sharded):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for path, x in leaves.items():
        leaf = step.resident(structure, path)
        where = residency.medium(leaf) if leaf is not None and is_held(residency, leaf, x.numel()) else str(x.device)
        inside = tree.named(leaf.names, 4) if structure.sharded and leaf is not None else ""
        table.add_row(path, str(tuple(x.shape)), str(x.dtype).removeprefix("torch."), f"{x.nbytes:,}", where, inside)
    console: Any = Console(width=10_000, highlight=False, markup=False, emoji=False)  # lines are not wrapped
    with console.capture() as shown:
        console.print(table)
    lines = "\n".join(line.rstrip() for line in shown.get().splitlines())
    return "\n\n".join([repr(step), str(step.describe(state)), "\n".join(values), lines, total])
