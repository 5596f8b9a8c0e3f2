"""Agreement: the ranks that share a step must have composed the same one."""

from __future__ import annotations

import dis
import functools
import itertools
import numbers
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis, fingerprint
from fds.errors import BatchError, ComposeError
from fds.step.all_stations import Stations
from fds.step.batch import checksums, kind_of, place
from fds.step.topology import Place

_PARTS = 2  # of a batch, at most, of which a rank may need one alone: inputs and targets
_DEEPEST = 32  # levels of values inside values that are compared
_FEW = 256  # elements of a tensor whose values are compared
_FILLING = frozenset({"setdefault", "update", "append", "extend", "insert", "add", "pop", "clear"})
_SHOWN = 120  # characters of a difference that are shown


def same_composition(step: Stations) -> None:
    """Raise `ComposeError`, on every rank, where the ranks that share a step have composed different ones.

    The ranks compare once, in the first call that they make of a step together. What is compared is what the
    transforms and optimizers were given; the loss and what it captures are each rank's own. What this rank has left
    unfinished of a call before, it finishes first.
    """
    axis: Axis | None = step.everyone
    if axis is None:
        return
    step.runtime.end_all()
    if "composition" in step.runtime.asked:
        return
    named = [(_without_addresses(part.text), spelled(part.arguments)) for part in step.composition]
    pipeline = step.composing.owners.get("execute")
    if pipeline is not None:  # its arguments may be measured on each rank: what has come of them is compared
        plan = step.execute.agreement()
        named[pipeline] = plan, plan
    fingerprints = axis.exchange(fingerprint(named), "composition")
    if len(set(fingerprints)) > 1:
        raise _different(axis, axis.exchange(named, "composition"), pipeline)
    step.runtime.asked["composition"] = []


def same_batch(step: Stations, batch: Any, what: str = "step") -> None:
    """Raise `BatchError`, on every rank, where ranks that share rows are given what does not fit together.

    Along a tensor axis or a pipeline that is anything but one batch, along a sequence axis parts of different shapes.
    Ranks compare before anything else is done, in one small message: a collective of another shape ends the process.
    Elements on a GPU are waited for in the first call alone.
    """
    axis, shares = step.dimensions.everyone, step.dimensions.shares
    if axis is None or not step.dimensions.shares_rows:
        return
    asked, key = step.runtime.asked, f"batch of {what}"
    parts = step.execute.parts(batch)
    sums = torch.zeros(_PARTS, 2, dtype=torch.int64, device="cpu")  # 0: there is no such part here
    for i, part in enumerate(parts):
        if part is not None or not step.execute.together:
            sums[i] = torch.tensor(checksums(part, waits=key not in asked), device="cpu") + 1
    everyones = sums.new_empty(axis.size, *sums.shape)
    axis.used_for("batch").start_all_gather(everyones.view(-1), sums.view(-1)).wait()
    pair = _apart(tree.values_of(everyones), shares)
    if pair is not None:
        leaves = [{path: kind_of(x) for path, x in tree.paths(part).items()} for part in parts]
        raise _different_batches(axis, shares, axis.exchange(leaves, "batch"), *pair)
    asked.setdefault(key, [])


def _apart(sums: list[list[list[int]]], shares: Sequence[tuple[Place, Place]]) -> tuple[int, int, int] | None:
    """Return two ranks whose batches do not fit together, and which part of those."""
    for i in range(_PARTS):
        first: dict[tuple[Place, ...], tuple[int, int]] = {}  # by share of the rows: a rank, and its checksum
        for rank, (theirs, (rows, tokens)) in enumerate(zip(sums, shares, strict=True)):
            kinds, values = theirs[i]
            for share, checksum in (((rows,), kinds), ((rows, tokens), values)):
                before, same = first.setdefault(share, (rank, checksum)) if checksum else (rank, checksum)
                if same != checksum:
                    return before, rank, i
    return None


def _different_batches(
    axis: Axis,
    shares: Sequence[tuple[Place, Place]],
    leaves: list[list[dict[str, str]]],
    first: int,
    other: int,
    part: int,
) -> BatchError:
    """Return the error for two ranks whose batches have these leaves: of every rank, by part and path."""
    want, got = leaves[first][part], leaves[other][part]
    paths = [path for path in {**want, **got} if want.get(path) != got.get(path)]
    path = paths[0] if paths else next(iter(got), "")
    named = ["inputs", "targets"][part] if len(leaves[first]) > 1 else ""
    cut = shares[first][1] != shares[other][1]
    return BatchError(
        "ranks along a sequence axis were given parts of different shapes"
        if cut
        else "ranks that compute one loss together were given different batches",
        where=f"{place('.'.join(filter(None, (named, path))))}, rank {axis.ranks[other]}",
        got=f"{got.get(path, 'nothing')}{'' if paths else ' with other values'}",
        want=f"{want.get(path, 'nothing')}, as on rank {axis.ranks[first]}",
        hint="ranks along a sequence axis pass equal parts of the same rows: pad what does not divide into them"
        if cut
        else "take rows by the coordinate on the data axis, not by the global rank",
    )


def _different(axis: Axis, compositions: list[list[list[str]]], pipeline: int | None) -> ComposeError:
    """Return the error for the first transform in which a rank differs from the first rank."""
    rank = next(i for i, theirs in enumerate(compositions) if theirs != compositions[0])
    pairs = list(itertools.zip_longest(compositions[rank], compositions[0], fillvalue=["nothing", "nothing"]))
    position = next(i for i, (theirs, first) in enumerate(pairs) if theirs != first)
    (text, all_), (want, all_wanted) = pairs[position]
    if text == want:
        text, want = _around_difference(all_, all_wanted)
    return ComposeError(
        "the ranks have composed different steps",
        where=f"rank {rank} of {axis.name}",
        got=text,
        want=f"{want}, as rank 0",
        hint="costs are measured on one rank: fds.plans.measure(layers, batch, axis=...)"
        if position == pipeline
        else "a function that is to differ between ranks takes the axis, and looks at axis.index when it is called",
    )


def _around_difference(*texts: str) -> list[str]:
    """Return the parts of two texts from a little before their first difference on."""
    first = next((i for i, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), 0)
    begin = max(first - _SHOWN // 2, 0)
    return [("..." if begin else "") + text[begin : begin + _SHOWN] for text in texts]


def spelled(value: Any, inside: tuple[int, ...] = ()) -> str:
    """Return a text that is the same for two values if they mean the same on two ranks.

    Of a function it has the name, defaults, constants and captured numbers; of an axis name and size. It has no
    addresses, no paths and no index of a device, which differ between ranks that do the same.

    >>> spelled({"lr": 0.1, "betas": (0.9, 0.99)})
    "{'lr': 0.1, 'betas': (0.9, 0.99)}"
    """
    again = functools.partial(spelled, inside=(*inside, id(value)))
    if value is None or isinstance(value, numbers.Number | bytes | torch.dtype):
        return repr(value)
    if isinstance(value, str):
        return _without_addresses(repr(value))
    if len(inside) > _DEEPEST or id(value) in inside:
        return _class_name(value)
    if isinstance(value, Axis):
        return f"mesh[{value.name!r}] of {value.size}"
    if isinstance(value, torch.device):
        return repr(value.type)
    if isinstance(value, Tensor):
        few = value.numel() <= _FEW and value.device.type == "cpu"
        return f"{_class_name(value)}({tuple(value.shape)}, {value.dtype}, {tree.values_of(value) if few else '...'})"
    if tree.is_mapping(value):
        return "{" + ", ".join(f"{again(k)}: {again(v)}" for k, v in value.items()) + "}"
    if tree.is_sequence(value):
        return "(" + ", ".join(map(again, value)) + ("," if len(value) == 1 else "") + ")"
    if tree.is_set(value):
        return "{" + ", ".join(sorted(map(again, value))) + "}"
    if isinstance(value, functools.partial):
        return f"partial({again(value.func)}, {again(value.args)}, {again(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{again(value.__func__)} of {again(value.__self__)}"
    if isinstance(value, types.FunctionType):
        parts = [part for part in _function_parts(value) if part]
        return f"{value.__module__}.{value.__qualname__}{again(parts) if parts else ''}"
    if attrs.has(tree.class_of(value)):
        arguments = {f.name: getattr(value, f.name) for f in attrs.fields(tree.class_of(value)) if f.init}
        return f"{_class_name(value)}({again(arguments)})"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    plain = {name: x for name, x in getattr(value, "__dict__", {}).items() if isinstance(x, numbers.Number)}
    return f"{_class_name(value)}({again(plain)})"


def _function_parts(function: types.FunctionType) -> tuple[Any, ...]:
    """Return constants, defaults and captured values of a function."""
    code = function.__code__
    captured: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            captured[name] = cell.cell_contents
        except ValueError:
            pass  # the variable has no value yet
    # What a function writes to (a cache, a counter) each rank has filled by itself, and so may what holds other things.
    filled, assigned = _writes(code)
    captured = {name: x for name, x in captured.items() if name not in assigned and not _may_differ(x, filled)}
    return _constants(code), function.__defaults__, function.__kwdefaults__, captured


def _constants(code: types.CodeType) -> tuple[numbers.Number, ...]:
    """Return the numbers in a function and in those that are written inside it."""
    inner = (x for const in code.co_consts if isinstance(const, types.CodeType) for x in _constants(const))
    return (*(const for const in code.co_consts if isinstance(const, numbers.Number)), *inner)


@functools.lru_cache(maxsize=1024)  # disassembling was a quarter of `init` and of two steps of a small model on ranks
def _writes(code: types.CodeType) -> tuple[bool, frozenset[str]]:
    """Return whether a function writes into containers, and which captured names it assigns; inner functions too."""
    steps = list(dis.get_instructions(code))
    filled = any(step.opname == "STORE_SUBSCR" for step in steps) or not _FILLING.isdisjoint(code.co_names)
    assigned = frozenset(step.argval for step in steps if step.opname == "STORE_DEREF")
    for inner in (const for const in code.co_consts if isinstance(const, types.CodeType)):
        more, names = _writes(inner)
        filled, assigned = filled or more, assigned | names
    return filled, assigned


_FILLABLE: Any = (dict, list, set)


def _may_differ(container: Any, filled: bool) -> bool:
    """Say whether ranks may hold other things in a container that a function captures."""
    if not isinstance(container, _FILLABLE):
        return False
    values: Iterable[Any] = container.values() if tree.is_dict(container) else container
    kinds = str | numbers.Number | types.FunctionType
    return filled or not all(x is None or isinstance(x, kinds) or attrs.has(tree.class_of(x)) for x in values)


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
