"""The first state: from a tree of parameters or a recipe to what a rank holds of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fds import loss as losses, random, tree
from fds.collectives import Axis
from fds.errors import StateError
from fds.state import State
from fds.step import check
from fds.step.structure import check_finite, check_own, contiguous_copy


def initial(step: Any, params: Any, key: int | Tensor) -> State:
    """Return the first state of a step, agreed between the ranks that share it; see `Step.init`."""
    return _initial(step, params, random.key(key), None if step.reduce.shard is None else step.reduce.shard.data)


def _initial(step: Any, params: Any, key: Tensor, data: Axis | None) -> State:
    """Return the first state; `data` is the axis to agree over, None for a rank that asks for its own part."""
    if data is not None:
        key = torch.tensor(data.exchange(key.tolist())[0], dtype=torch.int64, device="cpu")
    check.parameters(params)
    if callable(params) and not isinstance(params, losses.Recipe):
        params = params(random.fold_in(key, "params"))
    if isinstance(params, losses.Recipe):
        shapes, leaves = params.trace(), _from_recipe(params, random.fold_in(key, "params"))
    else:
        check_own(params)
        shapes, leaves = params, _from_rank_0(params, data)
    if isinstance(step.loss, losses.Layers):
        step.loss.check(shapes)
    structure, _ = step.structure_of(shapes)
    tree.match(step.gather.float32, structure.names, what="precision(keep_float32=...)")
    if data is not None:
        _same_everywhere(shapes, data)
    if step.reduce.shard is not None and step.reduce.shard.stage == 3:
        assert structure.layout is not None
        step.gather.room(structure.layout)
    held = structure.hold(leaves, 0 if step.reduce.shard is None else step.reduce.shard.axis.index)
    device, parts = device_of(held), tree.leaves(held)
    flat = [x.view(-1) for x in structure.pick(parts)]
    return State(
        step=torch.zeros((), dtype=torch.int64, device=device),
        calls=torch.zeros((), dtype=torch.int64, device="cpu"),
        params=held,
        opt=structure.name_slots(step.optimizer.init(structure.segments, params=flat)),
        buffers={name: b.detach().to(device).clone() for name, b in losses.initial_buffers(step.loss).items()},
        slots={name: make(held, device) for name, make in step.slots.items()},
        key=key,
    )


def traced(step: Any, params: Any) -> State:
    """Return the state that `initial` would make, on `meta`; see `Step.structure`."""
    losses.initial_buffers(step.loss)  # builds what is not built yet, so not on meta
    check.parameters(params)
    with torch.device("meta"):
        if isinstance(params, losses.Recipe):
            params = params.trace()
        elif callable(params):
            params = params(random.key(0))
        params = tree.map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, params)
        return tree.map(lambda x: x.to("meta"), _initial(step, params, random.key(0), None))


def device_of(params: Any) -> torch.device:
    """Return the device of the first leaf. Raises `StateError` for a tree without tensors."""
    for leaf in tree.leaves(params):
        return leaf.device
    raise StateError("there are no parameters", got=repr(params)[:60], want="a pytree of tensors")


def _from_recipe(recipe: losses.Recipe, key: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, one layer at a time in memory; equal keys make equal ones on every rank."""
    for piece in recipe.pieces(key):
        for name, x in piece.items():
            check_finite(name, x)
            yield name, contiguous_copy(x)
            del x
        del piece  # before the next one is made


def _from_rank_0(params: Any, data: Axis | None) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of every leaf, with the values of rank 0."""
    for name, x in tree.paths(params).items():
        x = contiguous_copy(x)
        if data is not None and x.numel():
            data.start_broadcast(x.view(-1), 0).wait()
        yield name, x


def _same_everywhere(shapes: Any, data: Axis) -> None:
    """Raise `StateError` on every rank where ranks were given parameters of other names, shapes or dtypes."""
    lines = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tree.paths(shapes).items()]
    found = data.exchange(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest())
    if len(set(found)) > 1:
        other = next(r for r in range(len(found)) if found[r] != found[0])
        raise StateError(
            "ranks were given different parameters", where=f"rank {other} of {data.name}",
            got=f"{len(lines)} leaves on this rank", want="the same names, shapes and dtypes as on rank 0",
        )  # fmt: skip

