"""`check_ranks`: whether ranks hold the same bits of whatever several of them hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import xxhash
from torch import Tensor

from fds import tree
from fds.collectives import Axis, fingerprint
from fds.debugging.statistics import unraveled
from fds.errors import FdsError, StateError, checked_call, is_a
from fds.state import State
from fds.step import Step
from fds.step.checks.state_check import usable
from fds.storage.differing import BITS
from fds.storage.format.boxes import held, index_of, whole
from fds.storage.format.tensors import as_bytes
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
        text = f"{self.name}: {_ranks(self.ranks)} not as {_ranks(self.others)}"
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
    found = rank_differences(state, step)
    if found:
        more = [f"... and {len(found) - _SHOWN} more leaves: {tree.named([one.name for one in found[_SHOWN:]])}"]
        raise StateError(
            "ranks hold other bits of what must be equal",
            where=f"{found[0].name} on {_ranks(found[0].ranks)}",
            got="\n".join([*map(str, found[:_SHOWN]), *(more if len(found) > _SHOWN else [])]),
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
    held, leaves = dict[str, tuple[str, LeafPart]](), list[str]()

    def look() -> Any:
        usable(state, _DOING)
        step.check(state)
        parts = parts_of(state, ranks)
        held.update({_key(name, one): (name, one) for name, one in parts.items() if one.tensor.numel()})
        leaves.extend(f"{name} {one.leaf()}" for name, one in parts.items())
        return [ranks.place, fingerprint(sorted(leaves)), {key: _digest(one.tensor) for key, (_, one) in held.items()}]

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
    for theirs in _exchange(everyone, lambda: {key: held[key][0] for key in differing if key in held}):
        names |= theirs
    found = []
    for n, key in enumerate(differing):
        odd, most = _sides(digests[key])
        theirs, others = (tuple(everyone.ranks[i] for i in side) for side in (odd, most))
        one = RankDifference(names[key], theirs, others)
        if n < _SHOWN:
            part = held[key][1] if key in held else None
            one = attrs.evolve(one, **_first(everyone, part, odd[0], most[0]))
        found.append(one)
    return found


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
    missing, more = [one for one in want if one not in leaves[i]], [one for one in leaves[i] if one not in want]
    return StateError(
        "ranks hold other leaves",
        where=f"{_DOING}, rank {everyone.ranks[i]}",
        got=f"{', '.join(more[:_SHOWN]) or 'nothing'} instead of others, {len(leaves[i])} leaves",
        want=f"{', '.join(missing[:_SHOWN]) or 'no others'}, {len(want)} leaves, as rank {everyone.ranks[firsts[i]]}",
    )


def _key(name: str, one: LeafPart) -> str:
    """Return what is equal for the same elements of the same leaf, short enough to be sent for each."""
    return fingerprint((name, one.start, one.tensor.numel(), one.ranges, one.term))


def _digest(x: Tensor) -> str:
    """Return 64 bits of all elements of a tensor."""
    found, flat = xxhash.xxh3_64(), x.detach().reshape(-1)
    for i in range(0, len(flat), _STEP):
        found.update(as_bytes(flat[i : i + _STEP].cpu()).numpy())  # pyright: ignore[reportArgumentType]  (a buffer)
    return found.hexdigest()


def _digests(flat: Tensor | None, cuts: Sequence[slice]) -> list[str] | None:
    return None if flat is None else [_digest(flat[cut]) for cut in cuts]


def _sides(by_rank: Mapping[int, str]) -> tuple[list[int], list[int]]:
    """Return which ranks differ from most, and most."""
    groups: dict[str, list[int]] = {}
    for i, digest in sorted(by_rank.items()):
        groups.setdefault(digest, []).append(i)
    most = max(groups.values(), key=lambda group: (len(group), -group[0]))
    return [i for i in sorted(by_rank) if i not in most], most


def _first(everyone: Axis, part: LeafPart | None, odd: int, most: int) -> dict[str, Any]:
    """Return index and values of the first element that differs between two ranks; all ranks call this."""
    flat = None if part is None else part.tensor.detach().reshape(-1)
    numel = next(n for n in _exchange(everyone, lambda: None if flat is None else len(flat)) if n is not None)
    start, end = 0, numel
    while end - start > _FEW:
        width = -(-(end - start) // _FEW)
        cuts = [slice(i, min(i + width, end)) for i in range(start, end, width)]
        sent = _exchange(everyone, functools.partial(_digests, flat, cuts))
        at = next(i for i, (a, b) in enumerate(zip(sent[odd], sent[most], strict=True)) if a != b)
        start, end = cuts[at].start, cuts[at].stop
    sent = _exchange(everyone, lambda: None if part is None else _elements_of(part, start, end))
    (bits, values, indices), (other_bits, others, _) = sent[odd], sent[most]
    at = next(i for i, (a, b) in enumerate(zip(bits, other_bits, strict=True)) if a != b)
    value, expected = values[at], others[at]
    if value == expected:  # NaN and NaN, of other bits
        value, expected = f"{value} (bits {bits[at]:#x})", f"{expected} (bits {other_bits[at]:#x})"
    return {"index": tuple(indices[at]), "value": value, "expected": expected}


def _elements_of(part: LeafPart, start: int, end: int) -> list[Any]:
    """Return the bits, the values and the indices in the whole leaf of some elements, as JSON."""
    few = part.tensor.detach().reshape(-1)[start:end].cpu()
    ranges = tuple((one,) for one in whole(part.shape)) if part.ranges is None else part.ranges
    indices = [index_of(ranges, unraveled(part.start + i, held(ranges))) for i in range(start, end)]
    values = few.double() if few.is_floating_point() else few  # some numbers of 8 bits have no list
    return [as_bytes(few).view(BITS[few.itemsize]).tolist(), [repr(x) for x in values.tolist()], indices]


def _ranks(ranks: Sequence[int]) -> str:
    many = len(ranks) > 1
    return f"rank{'s' * many} {', '.join(map(str, ranks[:16]))}{', ...' * (len(ranks) > 16)}"
