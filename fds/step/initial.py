"""The first state: from a tree of parameters or a recipe to this rank's part of them."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from fds import loss as losses, random, tree
from fds.collectives import Axis, fingerprint
from fds.errors import FdsError, StateError
from fds.layout import Leaf
from fds.state import State
from fds.step.added import with_added
from fds.step.all_stations import Stations
from fds.step.checks import state_check as check
from fds.step.checks.agreement import same_composition
from fds.step.checks.state_check import check_finite, check_own
from fds.step.memory import first_slots
from fds.step.placements import SplitDim
from fds.step.residency.chunks import first_opt
from fds.step.residency.contract import Residency, check_apart, deferred, hear, is_held, put_off, text_of
from fds.step.residency.lives import resident, settled
from fds.step.structure import Structure, contiguous_copy, frozen_names
from fds.step.views import check_shapes, encode


def initial(step: Stations, params: Any, key: int | Tensor) -> State:
    """Return the first state of a step, agreed between the ranks that share it; see `Step.init`."""
    params = with_added(step.added, params, random.fold_in(random.key(key), "params"))
    return beginning(step, *_placed(step, params, random.key(key), step.everyone))


def with_parameters(step: Stations, state: State, params: Any) -> State:
    """Return a state with other parameters, whole ones or a slot of the optimizer's; see `Step.with_params`."""
    check.usable(state, "with_params")
    structure, parts = step.held_by(state)
    trained = [structure.part_names[i] for i in structure.trained]
    if tree.is_dict(params) and list(params) == trained and (structure.sharded or trained != list(structure.names)):
        opt = step.place.residency
        new = [x.to(state.step.device) if opt.kinds else contiguous_copy(x) for x in params.values()]
        local_params = structure.put(
            parts, [x.view(structure.shapes[i]) for i, x in zip(structure.trained, new, strict=True)]
        )
    else:
        here = tree.map(lambda x: x.to(state.step.device) if isinstance(x, Tensor) and not x.is_meta else x, params)
        local_params = _placed(step, here, state.key, step.everyone)[0]
    other = step.structure_of(local_params)[0]
    if other is not structure and type(params) is OrderedDict:  # as module.state_dict() returns
        return with_parameters(step, state, dict(cast("dict[str, Tensor]", params)))
    if other is not structure:
        both = other.leaves, structure.leaves
        got, want = ({n: f"{leaf.shape} {leaf.dtype}" for n, leaf in leaves.items()} for leaves in both)
        name = next((name for name in [*want, *got] if got.get(name) != want.get(name)), "params")
        raise StateError(
            "these parameters are not those of this state",
            where=name,
            got=got.get(name, "another tree" if name == "params" else "nothing"),
            want=want.get(name, "the tree of step.params(state)" if name == "params" else "nothing"),
            hint="what step.params(state) returned, with other values",
        )
    return attrs.evolve(state, params=local_params)


def _placed(step: Stations, params: Any, key: Tensor, everyone: Axis | None) -> tuple[Any, Tensor, torch.device]:
    """Return the parameters as this rank holds them, the key that all ranks have, and the device of the step.

    `everyone` is the axis to agree over, None for a rank that asks for its own part.
    """
    if everyone is not None:
        same_composition(step)
        key = torch.tensor(everyone.exchange(tree.values_of(key), "init")[0], dtype=torch.int64, device="cpu")
    error, is_source = None, everyone is None or not everyone.index
    try:
        shapes, params = _read(step, params, random.fold_in(key, "params"), is_source=is_source)
    except FdsError as caught:
        shapes, error = {}, caught
    if everyone is not None:
        _agree(shapes, error, everyone)
    if error is not None:
        raise error
    structure, leaves = _structure(step, shapes)
    recipe = isinstance(params, losses.Recipe)
    alone = everyone is None
    peers = None if alone else step.dimensions.peers
    made = (
        _from_recipe(params, random.fold_in(key, "params"), step.dimensions.holds)
        if recipe
        else _from_tree(params, everyone, step.dimensions.holds)
    )

    failed: list[Exception] = []

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, x in _all_of(made, shapes, _made_here(step, shapes, params, alone), failed):
            _of_rank_0(x, everyone if not recipe or name in params.built else peers)
            if step.dimensions.holds(name):
                x = encode(step.encodings, x, leaves[name])
                if (piece := step.dimensions.cut(name, x)) is not x:
                    x = contiguous_copy(piece)
                if not alone:
                    step.dimensions.share(name, x)
                yield name, x

    devices: list[torch.device] = []  # on which the step runs, wherever leaves live

    def settle(part: int, x: Tensor) -> Tensor:
        devices.append(x.device)
        try:
            return settled(step.place.residency, x, resident(structure, "params", part))
        except Exception as error:
            failed.append(error)
            return x.to("meta")

    parts = structure.hold(values(), step.dimensions.slice, settle)
    _check_made(failed, everyone)
    device = devices[0] if devices else device_of(parts, shapes, everyone)
    return parts, key, device


def beginning(step: Stations, params: Any, key: int | Tensor, device: torch.device, *, alone: bool = False) -> State:
    """Return the state of a step that begins with these parameters, as this rank holds them: everything else is fresh.

    Where ranks share the step and it is not `alone`, they get the module buffers of the first one at their place.
    """
    structure, parts = step.structure_of(params)
    peers = None if alone else step.dimensions.peers
    flat, key = [x.view(-1) for x in structure.pick(parts)], random.key(key)
    residency = deferred(step.place.residency, None if alone else step.everyone)
    buffers = {
        name: _of_rank_0(contiguous_copy(step.dimensions.cut(name, b.to(device))), peers)
        for name, b in losses.initial_buffers(step.loss).items()
        if step.dimensions.holds(name)
    }
    slots = first_slots(
        step.memory, params, structure.trained_shapes, whole_shapes(step, structure), device, key, step.dimensions
    )
    opt: dict[str, list[Tensor | None]] = {}
    with put_off(residency):
        with random.seeded(key, "optimizer", *step.dimensions.coordinates):
            opt = first_opt(residency, structure, flat, device)
        if residency.kinds:
            leaves = [_settled(step, residency, structure, at, x, device) for at, x in tree.paths(slots).items()]
            slots = tree.flatten(slots)[1](leaves)
    hear(residency)
    state = State(
        step=torch.zeros((), dtype=torch.int64, device=device),
        calls=torch.zeros((), dtype=torch.int64, device="cpu"),
        params=params,
        opt=structure.name_slots(opt),
        buffers=buffers,
        slots=slots,
        key=key,
    )
    if residency.kinds:
        leaves = {at: x for at, x in tree.paths(state).items() if not x.is_meta}
        check_apart(
            residency, [x for at, x in leaves.items() if is_held(residency, step.resident(structure, at), x.numel())]
        )
    return state


def _settled(
    step: Stations, residency: Residency, structure: Structure, path: str, x: Tensor, device: torch.device
) -> Tensor:
    """Return a new leaf of a slot where it lives; one of those that follow an update in pieces else on the device."""
    leaf = step.resident(structure, f"slots.{path}")
    if leaf is None or x.is_meta:
        return x
    leaf_there = settled(residency, x, leaf, device)
    return x.to(device) if leaf_there is x and not leaf.in_place else leaf_there


def traced(step: Stations, params: Any) -> State:
    """Return the state that `initial` would make, on `meta`; see `Step.structure`."""
    losses.initial_buffers(step.loss)  # builds modules that are not built yet: not on meta
    check.parameters(params)
    with torch.device("meta"):
        if isinstance(params, losses.Recipe):
            params = params.trace()
        elif callable(params):
            params = params(random.key(0))
        params = tree.map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, params)
        params = with_added(step.added, params)
        return tree.map(
            lambda x: x.to("meta"), beginning(step, *_placed(step, params, random.key(0), None), alone=True)
        )


def encoded_leaves(step: Stations, params: Any) -> dict[str, Leaf]:
    """Return by name the parameters that a state holds in another form, as `step.init` is given them."""
    if not step.encodings:
        return {}
    with torch.device("meta"):
        shapes = params.trace() if isinstance(params, losses.Recipe) else params
        shapes = with_added(step.added, shapes(random.key(0)) if callable(shapes) else shapes)
    meta = {name: x.to("meta") for name, x in tree.paths(shapes).items()}
    leaves = _structure(step, shapes)[1]
    here = {n: x for n, x in meta.items() if n in leaves}
    return {n: leaves[n] for n, x in here.items() if encode(step.encodings, x, leaves[n]) is not x}


def at_first(step: Stations, state: State) -> dict[str, dict[str, Any]]:
    """Return slots and buffers as they are in the first state with such parameters, on `meta`."""
    buffers = losses.initial_buffers(step.loss)  # builds modules that are not built yet: not on meta
    structure, meta = step.structure_of(state.params)[0], torch.device("meta")
    shapes = whole_shapes(step, structure)
    with meta, random.seeded(state.key, "slots"):
        params = tree.map(lambda x: x.to(meta), state.params)
        slots = first_slots(step.memory, params, structure.trained_shapes, shapes, meta, state.key, step.dimensions)
        buffers = {name: b for name, b in buffers.items() if step.dimensions.holds(name)}
        buffers = {name: step.dimensions.cut(name, b.to("meta")) for name, b in buffers.items()}
        return {"slots": slots, "buffers": buffers}


def whole_shapes(step: Stations, structure: Structure) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of all parameters, also of those that other ranks hold, alike on every rank."""
    return step.dimensions.shapes({name: structure.leaves[name].shape for name in structure.names})


def device_of(params: Any, shapes: Any, everyone: Axis | None) -> torch.device:
    """Return the device of the first leaf, else the one of the other ranks', or where leaves would be made.

    Raises `StateError` for a tree without tensors.
    """
    for leaf in tree.leaves(params):
        return leaf.device
    if everyone is not None and everyone.device.type != "cpu":
        return everyone.device
    for leaf in tree.leaves(shapes):
        return torch.get_default_device() if leaf.is_meta else leaf.device
    raise StateError("there are no parameters", got=repr(shapes)[:60], want="a pytree of tensors")


def _made_here(step: Stations, shapes: Any, params: Any, alone: bool) -> list[str]:
    """Return the names of the parameters that this rank makes or receives, in order."""
    names = params.built if isinstance(params, losses.Recipe) else () if alone else tree.paths(shapes)
    return [name for name in tree.paths(shapes) if name in names or step.dimensions.holds(name)]


def _all_of(
    made: Iterator[tuple[str, Tensor]], shapes: Any, names: list[str], failed: list[Exception]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what is made; where that fails, zeros for the rest, since other ranks wait for them."""
    want = tree.paths(shapes)
    for name in names:
        x = None
        if not failed:
            try:
                at, x = next(made)
                assert at == name, (at, name)
            except Exception as error:
                failed.append(error)
        yield name, torch.zeros(want[name].shape, dtype=want[name].dtype) if failed or x is None else x


def _check_made(failed: list[Exception], everyone: Axis | None) -> None:
    """Raise the error of making the parameters; on the other ranks `StateError`."""
    errors = [] if everyone is None else everyone.exchange(str(failed[0]) if failed else None, "init")
    if failed:
        raise failed[0]
    for rank, theirs in enumerate(errors):
        if theirs is not None:
            raise StateError("another rank could not make its parameters", where=f"rank {rank}", got=theirs)


def _from_recipe(recipe: losses.Recipe, key: Tensor, holds: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter that this rank holds or that was given built, one layer at a time in memory."""
    for piece in recipe.pieces(key, holds):
        for name, x in piece.items():
            if name in recipe.built or holds(name):
                check_finite(name, x)
                yield name, contiguous_copy(x)
            del x
        del piece  # before the next one is made


def _from_tree(params: Any, everyone: Axis | None, holds: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of every leaf; of those without values, which rank 0 has, memory on the axis' device."""
    for name, x in tree.paths(params).items():
        if x.is_meta and everyone is not None and everyone.index:
            yield name, torch.empty(x.shape, dtype=x.dtype, device=everyone.device)
        elif everyone is not None or holds(name):
            yield name, contiguous_copy(x)


def _of_rank_0(x: Tensor, data: Axis | None) -> Tensor:
    """Return a contiguous tensor with the values of rank 0, written in place: modules that were built have their own.

    Complex numbers are sent as pairs, booleans as bytes.
    """
    if data is not None and x.numel():
        flat = torch.view_as_real(x) if x.is_complex() else x.view(torch.uint8) if x.dtype is torch.bool else x
        data.start_broadcast(flat.view(-1), 0).wait()
    return x


def _read(step: Stations, params: Any, key: Tensor, *, is_source: bool) -> tuple[Any, Any]:
    """Return the shapes of the parameters, and what makes them: a recipe or a tree. Raises `StateError`.

    Values of a tree are looked at on the rank that is their source.
    """
    check.parameters(params)
    if callable(params) and not isinstance(params, losses.Recipe):
        params = params(key)
    recipe = isinstance(params, losses.Recipe)
    if not recipe and is_source:
        check_own(params)
    shapes = params.trace() if recipe else params
    if isinstance(step.loss, losses.Layers):
        step.loss.check(shapes)
    structure, _ = _structure(step, shapes)
    names = step.dimensions.names(structure.names)
    tree.match(step.gather.float32, names, what="precision(keep_float32=...)")
    tree.match(step.place.patterns, names, what="offload")
    if tuple(step.place.residency.kinds) == ("slots",) and not step.followers:
        warnings.warn(
            f"{text_of(step.place.residency)}: there are no averages that could live elsewhere, as fds.ema(...) keeps",
            stacklevel=2,
        )
    still = frozen_names(step.frozen, names)
    floats = [name for name, x in tree.paths(shapes).items() if tree.is_float(x)]
    assert step.optimizer is not None
    whole = {name: tuple(x.shape) for name, x in tree.paths(shapes).items()}
    step.optimizer.bound(whole).check([name for name in floats if name not in still])
    check_shapes(step.view, whole)
    if step.shard is not None and step.shard.gathers_on_use:
        assert structure.layout is not None
        step.gather.room(structure.layout, step.shard, step.gather.passing(structure.layout, step.shard))
    return shapes, params


def _structure(step: Stations, shapes: Any) -> tuple[Structure, dict[str, Leaf]]:
    """Return the structure of what a state holds, and the leaves of whole parameters that are given, by name."""
    params = step.dimensions.part_of(shapes)
    structure, _ = step.structure_of(params)
    if not step.encodings:
        return structure, structure.leaves
    whole = {name: x for name, x in tree.paths(shapes).items() if name in structure.leaves}
    leaves = {name: attrs.evolve(structure.leaves[name], shape=tuple(x.shape)) for name, x in whole.items()}
    encoded = [_held(step, x.to("meta"), leaves[name]) for name, x in whole.items()]
    return step.structure_of(tree.flatten(params)[1](encoded))[0], leaves


def _held(step: Stations, x: Tensor, leaf: Leaf) -> Tensor:
    """Return what a rank holds of a parameter. Raises `StateError` where it would have parts of what is encoded."""
    y = encode(step.encodings, x, leaf)
    for axis, placement in step.dimensions.differing if y is not x else ():
        lies = placement.lies(leaf.name)
        if not isinstance(lies, SplitDim) or (y.shape == x.shape and y.dtype == x.dtype):
            continue
        last = lies.dim == y.dim() - 1
        fits = lies.parts_of(y.shape[-1]) in lies.encoded if last else y.shape[:-1] == x.shape[:-1]
        if not fits or not all(getattr(view, "by_row", False) for view in step.encodings):
            raise StateError(
                "ranks of an axis would hold parts of numbers that are encoded together",
                where=leaf.name,
                got=f"{', '.join(map(str, lies.parts or x.shape[lies.dim : lies.dim + 1]))} along dim {lies.dim}, over "
                f"{axis.size} ranks of {axis.name!r}: {', '.join(map(str, step.encodings))}",
                want="parts of which each rank has whole groups",
                hint="fewer ranks along the axis, a plan that leaves the parameter whole, or no encoding of it",
            )
    return step.dimensions.cut(leaf.name, y)


def _agree(shapes: Any, error: FdsError | None, data: Axis) -> None:
    """Raise `StateError` on every rank where one refused its parameters, or has others than rank 0."""
    lines = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tree.paths(shapes).items()]
    answers = data.exchange([fingerprint("\n".join(lines)), None if error is None else str(error)], "init")
    if error is not None:
        return
    for rank, (_, refused) in enumerate(answers):
        if refused is not None:
            raise StateError("another rank refuses its parameters", where=f"rank {rank} of {data.name}", got=refused)
    if len({their_print for their_print, _ in answers}) > 1:
        all_lines = data.exchange(lines, "init")
        rank = next(r for r, (their_print, _) in enumerate(answers) if their_print != answers[0][0])
        pairs = itertools.zip_longest(all_lines[rank], all_lines[0], fillvalue="nothing")
        got, want = next(pair for pair in pairs if pair[0] != pair[1])
        raise StateError(
            "ranks were given different parameters",
            where=f"rank {rank} of {data.name}",
            got=got,
            want=f"{want}, as on rank 0",
        )
