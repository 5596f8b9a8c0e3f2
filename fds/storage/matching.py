"""Match the leaves of a source with those of a state: which are read, and which are initialised."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs

from fds.errors import StorageError, StorageWarning, did_you_mean
from fds.storage.disk.files import refusal
from fds.storage.format.manifest import SavedLeaf
from fds.storage.ranks.leaf_parts import nearest_version, split_version
from fds.storage.source import Source

SLOT_KINDS = ("opt", "slots")  # the state of optimizers and transforms
SLOTS = ("init", "drop")


@attrs.frozen
class MatchOptions:
    """Which leaves of a source must match the state, and which are read."""

    # "init" initialises slots that the source lacks, "drop" ignores slots that the state lacks
    slots: tuple[str, ...] = ()
    # whether any other difference is an error; if not, leaves are initialised or ignored, with a warning
    strict: bool = True
    params_only: bool = False  # read parameters and buffers; other leaves are those of `step.init`
    without_optimizer: bool = False  # initialise the optimizer's state
    without_schedule: bool = False  # count updates from 0 again
    # the source was not written by fds: it may lack key, counters and buffers, and dtypes may differ
    foreign: bool = False

    def read(self, name: str) -> bool:
        """Return whether a leaf of the state is to be read."""
        kind = _kind(name)
        if self.params_only:
            return kind in ("params", "buffers")
        return not ((self.without_optimizer and kind == "opt") or (self.without_schedule and name == "step"))

    def may_lack(self, name: str) -> bool:
        """Return whether the source may lack a leaf of the state, without a warning."""
        return ("init" in self.slots and _is_slot(name)) or (self.foreign and _kind(name) != "params")

    def may_have(self, name: str) -> bool:
        """Return whether the source may have a leaf that the state lacks, without a warning."""
        is_dropped = ("drop" in self.slots and _is_slot(name)) or (self.foreign and _kind(name) == "buffers")
        return is_dropped or not self.read(name)


def check_slots(slots: Any) -> tuple[str, ...]:
    """Return the argument `slots` of `load` as a tuple. Raises `StorageError`."""
    values = (slots,) if isinstance(slots, str) else tuple(slots) if isinstance(slots, Iterable) else (slots,)
    if any(value not in SLOTS for value in values):
        raise refusal("unknown value of slots", "slots", repr(slots)[:60], "'init', 'drop' or both: ('init', 'drop')")
    return values


def match(
    source: Source, want: Mapping[str, SavedLeaf], options: MatchOptions, partial: Collection[str] = ()
) -> dict[str, str]:
    """Return the name in the source of each leaf of the state that is to be read.

    Of leaves in `partial` slots the source may have another number of terms.

    Raises `StorageError` for the first leaf that does not match, parameters before others, and for one whose numbers
    are in other units, unless such are to be initialised; if not strict, warns of all of them with a `StorageWarning`
    instead.
    """
    have, void = source.leaves, [name for name in source.void if name in want and options.read(name)]
    if void and options.strict and "init" not in options.slots:
        raise StorageError(
            f"this save has {void[0]} in other units: what messages have lost",
            where=source.where,
            got=source.void[void[0]],
            want="of the mean gradient, or of how far a rank went, as from format 4 on",
            hint='slots="init" begins with nothing kept: what the messages of about one call have lost is lost',
        )
    have = {name: leaf for name, leaf in have.items() if name not in void}
    sources = {name: _source_name(name, have, want, options) for name in want if options.read(name)}
    names = {name: source_name for name, source_name in sources.items() if source_name is not None}
    if "init" in options.slots:
        names = _without_partial_slots(names, source.leaves, want)
    alike = (lambda a, b: a.shape == b.shape) if options.foreign else (lambda a, b: str(a) == str(b))
    mismatched = [
        name
        for name, source_name in names.items()
        if not alike(have[source_name], want[name]) and not _are_terms(have[source_name], want[name], name, partial)
    ]
    missing = [n for n in want if options.read(n) and n not in names and not options.may_lack(n)]
    taken = {source.aliases.get(name, name) for name in names.values()}
    unexpected = [
        n
        for n in have
        if source.aliases.get(n, n) not in taken and not options.may_have(n) and split_version(n)[0] not in want
    ]
    if options.strict:
        _check_matched(source, want, mismatched, missing, unexpected, is_foreign=options.foreign)
        if options.foreign and not options.params_only:
            _warn_of_slots(source, {name: leaf for name, leaf in want.items() if options.read(name)}, names)
    elif mismatched or missing or unexpected:
        warnings.warn(StorageWarning(source.where, missing, unexpected, mismatched), stacklevel=5)
    return {name: source_name for name, source_name in names.items() if name not in mismatched}


def _are_terms(have: SavedLeaf, want: SavedLeaf, name: str, partial: Collection[str]) -> bool:
    """Say whether two leaves are the terms of sums of the same shape, however many."""
    if _kind(name) != "slots" or name.split(".")[1] not in partial:
        return False
    return have.dtype == want.dtype and have.shape[1:] == want.shape[1:] and len(have.shape) == len(want.shape)


def _without_partial_slots(
    names: dict[str, str], have: Mapping[str, SavedLeaf], want: Mapping[str, SavedLeaf]
) -> dict[str, str]:
    """Return `names` without the optimizer slots of parameters for which not all slots match."""
    slots, theirs = (_slots_of(leaves) for leaves in (want, have))
    odd = {param for param, param_slots in slots.items() if param_slots != theirs.get(param)}
    return {
        name: source_name
        for name, source_name in names.items()
        if _kind(name) != "opt" or name.split(".", 2)[-1] not in odd
    }


def _slots_of(leaves: Iterable[str]) -> dict[str, set[str]]:
    by_param: dict[str, set[str]] = {}
    for name in leaves:
        if _kind(name) == "opt":
            by_param.setdefault(name.split(".", 2)[-1], set()).add(name.split(".", 2)[1])
    return by_param


def _warn_of_slots(source: Source, want: Mapping[str, SavedLeaf], names: Mapping[str, str]) -> None:
    missing = [name for name in want if _is_slot(name) and name not in names]
    unexpected = [name for name in source.leaves if _is_slot(name) and name not in names.values()]
    if missing or unexpected:
        warnings.warn(StorageWarning(source.where, missing, unexpected, []), stacklevel=6)


def _source_name(
    name: str, have: Mapping[str, SavedLeaf], want: Mapping[str, SavedLeaf], options: MatchOptions
) -> str | None:
    """Return the name of a leaf in the source, in which buffers may be among the parameters, as in a state dict.

    Of versions of a leaf the source may have another number. Where the optimizer begins anew all ranks begin alike.
    """
    if split_version(name)[1]:
        anew = options.params_only or options.without_optimizer
        name = split_version(name)[0] if anew else nearest_version(name, have)
    kind, _, rest = name.partition(".")
    if name not in have and kind == "buffers" and f"params.{rest}" not in want:
        name = f"params.{rest}"
    return name if name in have else None


def _check_matched(
    source: Source,
    want: Mapping[str, SavedLeaf],
    differ: list[str],
    lacking: list[str],
    beyond: list[str],
    *,
    is_foreign: bool,
) -> None:
    have = source.leaves
    odd = sorted([*differ, *lacking, *beyond], key=lambda name: _kind(name) != "params")
    if not odd:
        return
    name, hints = odd[0], []
    if _kind(name) == "params":
        what = "this is a save of another model" if name in differ else "this save has other parameters"
    else:
        what = "this save is of another composition" if _is_slot(name) else "leaves differ"
    if name in lacking and beyond and not _is_slot(name):
        hints.append(did_you_mean(name, beyond))
    if len(odd) > 1:
        hints.append(f"{len(odd)} leaves differ in all")
    if is_foreign and not _is_slot(name):
        hints.append("strict=False initialises parameters that the save lacks, and ignores those that the step lacks")
    if _is_slot(name) and name not in differ:
        ways = {"init": "initialises what the save lacks", "drop": "ignores what the step lacks"}
        needed = [way for way, leaves in zip(ways, (lacking, beyond), strict=True) if any(map(_is_slot, leaves))]
        hints.append(f"slots={tuple(needed) if needed[1:] else needed[0]!r}: " + ", ".join(ways[w] for w in needed))
    if source.composition:
        by = ", ".join(source.composition)
        hints.append(f"it was saved by compose({by})" if have[next(iter(have))].chunks else f"it was written by {by}")
    raise StorageError(
        f"{what}: {name}",
        where=source.where,
        got=f"{have[name]} in the save" if name in have else "nothing in the save",
        want=f"{want[name]}, as this step has it" if name in want else "nothing, as this step has it",
        hint="\n".join(filter(None, hints)),
    )


def _is_slot(name: str) -> bool:
    return _kind(name) in SLOT_KINDS


def _kind(name: str) -> str:
    return name.partition(".")[0]
