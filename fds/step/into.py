"""Whole parameters and buffers: copies of them, and back into a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fds import tree
from fds.errors import StateError
from fds.layout import Leaf
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.checks.agreement import same_composition
from fds.step.checks.state_check import overlap, usable
from fds.step.pool import Pool
from fds.step.residency.contract import deferred, hear
from fds.step.residency.lives import Masters, groups, in_turn
from fds.step.sharding.gather import Gather
from fds.step.structure import Structure, frozen_names
from fds.step.views import decode

Named = dict[str, Tensor]
Pair = tuple[str, Tensor, Tensor]  # name in the module, what is there, what it is to become


def whole_parameters(step: Stations, state: State, doing: str, *, copies: bool) -> Any:
    """Return the whole parameters in the user's structure; without `copies` they may be the state's own memory.

    They are where a state holds them, but where ranks have different ones and send them: on the device of these.
    """
    same_composition(step)
    usable(state, doing)
    structure, parts = step.held_by(state)
    residency = deferred(step.place.residency, step.everyone)
    masters = step.masters(structure, parts, state.step.device, residency)
    params = _whole(step, structure, parts, masters, copies=copies)
    hear(residency)
    if step.encodings:
        call = step.call(state, training=False)
        leaves = whole_leaves(step, structure, tree.paths(params))
        whole = [decode(step.encodings, x, leaves[name], call) for name, x in tree.paths(params).items()]
        params = tree.flatten(params)[1](whole)
    return params


def whole_leaves(step: Stations, structure: Structure, whole: Mapping[str, Tensor]) -> dict[str, Leaf]:
    """Return the leaves of whole parameters as a state holds them, also of those that other ranks hold."""
    still = frozen_names(step.frozen, step.dimensions.names(structure.names))
    return {name: Leaf(name, tuple(x.shape), x.dtype, name not in still) for name, x in whole.items()}


def _whole(step: Stations, structure: Structure, parts: list[Tensor], masters: Masters, *, copies: bool) -> Any:
    """Return the whole parameters; see `whole_parameters`."""
    sent = bool(step.dimensions.differing)
    if not structure.sharded:
        whole = (masters if sent else masters.at_home()).seen(None)
        whole = [x.clone() if copies and x is part else x for x, part in zip(whole, parts, strict=True)]
        return step.dimensions.collect(structure.build_whole(whole))
    assert structure.layout is not None and step.shard is not None
    flats = Gather().in_turn(structure.layout, masters, step.shard.legs["gather"], Pool())
    slices = zip(structure.layout.buckets, parts, flats, strict=True)
    views = [bucket.views(flat if sent else flat.to(part.device)) for bucket, part, flat in slices]
    return step.dimensions.collect(structure.build_whole(structure.layout.collect(views)))


def _in_turn(step: Stations, structure: Structure, masters: Masters, use: Callable[[str, Tensor], None]) -> None:
    """Call `use` for one whole parameter after another, a bucket of which is in memory while the next one comes."""
    if structure.sharded:
        assert structure.layout is not None and step.shard is not None
        flats = Gather().in_turn(structure.layout, masters, step.shard.legs["gather"], Pool())
        for bucket, flat in zip(structure.layout.buckets, flats, strict=True):
            for leaf, x in zip(bucket.leaves, bucket.views(flat), strict=True):
                use(leaf.name, x)
        return
    home = masters.at_home()
    for i, x in enumerate(home.parts):
        if i not in home.elsewhere:
            use(structure.names[i], x)

    def each(group: Sequence[int], read: list[Tensor]) -> None:
        for i, x in zip(group, read, strict=True):
            use(structure.names[i], x.view(home.parts[i].shape))

    in_turn(groups(home.elsewhere, [x.nbytes for x in home.parts]), home.read, each)


def into(step: Stations, module: Any, state: State, prefix: str, buffers_prefix: str | None) -> Any:
    """Write parameters and buffers of a state into a module; see `Step.into`. No rank writes where one does not fit."""
    usable(state, "into")
    structure, parts = step.held_by(state)
    call = step.call(state, training=False)
    if step.dimensions.differing:  # ranks send each other what they have, all of it
        params = tree.paths(whole_parameters(step, state, "into", copies=False))
    else:
        same_composition(step)
        params = {
            leaf.name: decode(step.encodings, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), leaf, call)
            for leaf in map(structure.leaves.__getitem__, structure.names)
        }
    buffers = step.dimensions.collect(state.buffers)
    error, pairs = None, []
    try:
        pairs = _pairs(module, params, buffers, prefix, prefix if buffers_prefix is None else buffers_prefix)
        for name, there, x in pairs:
            _check_fit(name, there, x)
        _check_apart(pairs)
    except StateError as caught:
        error = caught
    errors = [] if step.everyone is None else step.everyone.exchange(None if error is None else str(error), "into")
    if error is not None:
        raise error
    for rank, theirs in enumerate(errors):
        if theirs is not None:
            raise StateError("another rank cannot write into its module", where=f"rank {rank}", got=theirs)
    coming = {id(x): there for _, there, x in pairs if x.is_meta}

    def use(name: str, x: Tensor) -> None:
        if (there := coming.get(id(params[name]))) is not None:
            there.copy_(decode(step.encodings, x, structure.leaves[name], call))

    if not step.dimensions.differing:
        residency = deferred(step.place.residency, step.everyone)
        _in_turn(step, structure, step.masters(structure, parts, state.step.device, residency), use)
        hear(residency)
    for _, there, x in pairs:
        if not x.is_meta:
            there.copy_(x)
    return module


def _pairs(module: Any, params: Named, buffers: Named, prefix: str, buffers_prefix: str) -> list[Pair]:
    """Return what is to be written where. Raises `StateError` where names do not fit."""
    if not isinstance(module, nn.Module):
        raise StateError("this is not a module", got=type(module).__name__, want="step.into(module, state)")
    wanted = dict(module.named_parameters(remove_duplicate=False))
    pairs = list(_matched(wanted, params, prefix, "parameters"))
    reached = {id(there) for _, there, _ in pairs}
    missing = [name for name, p in module.named_parameters() if id(p) not in reached]
    if missing:
        raise StateError(
            "the state lacks parameters of the module",
            where=", ".join(missing[:8]),
            got=_some(params),
            want="a module whose parameters are those of the state",
            hint="prefix= names a part of the state",
        )
    module_buffers = dict(module.named_buffers(remove_duplicate=False))
    more = list(_matched(module_buffers, buffers, buffers_prefix, "buffers"))
    elsewhere = [name for name in buffers if any(name == n or name.endswith(f".{n}") for n in module_buffers)]
    if not more and elsewhere:
        raise StateError(
            "the module's buffers are in the state under another prefix",
            where=", ".join(elsewhere[:8]),
            got=f"buffers_prefix={buffers_prefix!r}",
            want="what stands before the module's own names of them",
        )
    return [*pairs, *more]


def _matched(tensors: Mapping[str, Tensor], named: Mapping[str, Tensor], prefix: str, what: str) -> Iterator[Pair]:
    """Yield the entries under a prefix, with the tensors of a module that bear their names."""
    taken: dict[int, str] = {}
    for name, x in named.items():
        if not name.startswith(prefix):
            continue
        local = name[len(prefix) :]
        if local not in tensors:
            raise StateError(
                f"the module lacks {what} of the state",
                where=name,
                got=_some(tensors),
                want=local,
                hint="prefix= names a part of the state",
            )
        there = tensors[local]
        if id(there) in taken:
            raise StateError(
                f"{what} that the module ties are apart in the state",
                where=name,
                got=f"{taken[id(there)]} and {name}",
                want="one of them",
            )
        taken[id(there)] = name
        yield local, there, x


def _check_fit(name: str, there: Tensor, x: Tensor) -> None:
    """Raise `StateError` for a tensor of a module that cannot take a value."""
    if isinstance(there, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise StateError("a lazy module has no shapes yet", where=name, want="a module that was called once")
    if there.is_meta:
        raise StateError(
            "the module has no memory to write to",
            where=name,
            got="a tensor on meta",
            hint="module.to_empty(device=...)",
        )
    if (
        there.shape != x.shape
        or there.is_floating_point() != x.is_floating_point()
        or (not x.is_floating_point() and there.dtype != x.dtype)
    ):
        raise StateError(
            "the module's is of another kind",
            where=name,
            got=f"{there.dtype} {tuple(there.shape)}",
            want=f"{x.dtype} {tuple(x.shape)}, as in the state",
        )
    if any(step == 0 and n > 1 for n, step in zip(there.shape, there.stride(), strict=True)):
        raise StateError(
            "elements of the module's tensor share their memory",
            where=name,
            got="an expanded tensor",
            want="a tensor of its own: x.contiguous()",
        )


def _check_apart(pairs: list[Pair]) -> None:
    """Raise `StateError` where two tensors of a module share memory: the last write would win."""
    seen: dict[tuple[torch.device, int], list[tuple[str, Tensor]]] = {}
    for name, there, _ in pairs:
        if not there.numel() or there.layout is not torch.strided:
            continue
        others = seen.setdefault((there.device, there.untyped_storage().data_ptr()), [])
        for other, y in others:
            if overlap(there, y):
                raise StateError(
                    "two tensors of the module share their memory, and the state has both",
                    where=name,
                    got=f"memory of {other!r}",
                    want="one parameter under two names",
                )
        others.append((name, there))


def _some(named: Mapping[str, Any]) -> str:
    return ", ".join(list(named)[:8]) + (f", ... ({len(named)})" if len(named) > 8 else "") or "none"
