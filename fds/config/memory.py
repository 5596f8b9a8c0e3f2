"""What a configuration has each rank hold, between steps and within one: formulas in the number of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from fds.config.function_call import FunctionCall
from fds.config.keys import Groups
from fds.layout import MOST_BYTES

_WHERE = {"device": "", "host": ", on the host", "disk": ", on a disk"}
_NUM_SLOTS = {"adamw": 2, "adam": 2, "lamb": 2, "lion": 1, "adagrad": 1}  # float32 tensors of the parameters' size


@attrs.frozen
class RankMemory:
    """The memory of one kind of tensors on a rank.

    Attributes:
        what: the kind, in words.
        per_parameter: bytes per parameter of the rank's pipeline stage, and of its pieces along a tensor axis.
        most: upper bound in bytes, or None.
    """

    what: str
    per_parameter: float
    most: int | None = None

    def num_bytes(self, num_parameters: int) -> int:
        """Return the bytes for a stage with this number of parameters."""
        whole = round(self.per_parameter * num_parameters)
        return whole if self.most is None else min(whole, self.most)

    def formula(self) -> str:
        """Return the bytes for P parameters as text."""
        return f"{self.per_parameter:g} P" + ("" if self.most is None else f", at most {self.most:,}")


def rank_memory(config: Groups, calls: tuple[FunctionCall, ...], axes: Mapping[str, int]) -> tuple[RankMemory, ...]:
    """Return the memory of every rank, between steps and within one."""
    by_path = {call.path: call for call in calls}
    shard, precision = by_path["shard_optimizer"], by_path.get("precision")
    stage, bucket = shard.argument("stage"), shard.argument("bucket_bytes") or MOST_BYTES
    in_node = axes["dp"] * axes.get("sp", 1)
    ranks = in_node * axes.get("node", 1)
    num_shards = ranks if stage else 1
    compute = accumulated = reduced = 4  # bytes per element
    if precision is not None:
        accumulate = precision.argument("accumulate")
        compute, accumulated = precision.args[0].itemsize, accumulate.itemsize
        reduced = (precision.argument("reduce") or accumulate).itemsize
    alone = ranks * axes.get("replicate", 1) == 1
    out = list(_state(by_path.get("offload"), _num_slots(config), num_shards))
    if alone or stage == 0:
        out += [RankMemory("16-bit parameters", compute)] if compute < 4 else []
    elif stage < 3:
        out += [RankMemory("whole parameters", compute)]
    else:
        live = (2 + shard.argument("prefetch")) * (bucket * compute // 4)
        out += [RankMemory("parameters that are whole at once, beside small ones", compute, live)]
        if shard.argument("secondary") is not None:
            out += [RankMemory(f"second slices of parameters{_among(in_node)}", compute / in_node)]
    reduces_slices = stage > 1 and not alone
    num_sums = ranks if reduces_slices else 1
    for place, share in _shares(by_path.get("offload"), "gradients").items():
        out += [RankMemory(f"sums of gradients{_among(num_sums)}{place}", share * accumulated / num_sums)]
    if reduces_slices:
        out += [RankMemory("two buckets of gradients", reduced, 2 * bucket * reduced // 4)]
    return tuple(out)


def _state(offload: FunctionCall | None, num_slots: int, num_shards: int) -> Iterator[RankMemory]:
    """Yield the memory of the state: of each place in which some of it lives, the one of the device first."""
    places: dict[str, dict[str, float]] = {"": {}}
    for what, argument, size in (("master weights", "masters", 4), ("optimizer state", "moments", 4 * num_slots)):
        for place, share in _shares(offload, argument).items():
            places.setdefault(place, {})[what] = share * size / num_shards
    for place, sizes in places.items():
        if sizes:
            yield RankMemory(f"{' and '.join(sizes)}{_among(num_shards)}{place}", sum(sizes.values()))


def _shares(offload: FunctionCall | None, argument: str) -> dict[str, float]:
    """Return the places of a kind of leaves, in words, and the part of them that lives there."""
    where = _WHERE[_name(None if offload is None else offload.argument(argument))]
    part = 0.0 if offload is None else float(offload.argument("ratio"))
    return {where: part, "": 1 - part} if where and part < 1 else {where: 1.0}


def _name(where: str | FunctionCall | None) -> str:
    return where.path if isinstance(where, FunctionCall) else where or "device"


def _among(ranks: int) -> str:
    return f", among {ranks} ranks" if ranks > 1 else ""


def _num_slots(config: Groups) -> int:
    if config.optimizer is None or config.optimizer.kind is None:
        return 2
    if config.optimizer.kind == "SGD":
        return 1 if config.optimizer.arguments.momentum else 0
    return _NUM_SLOTS.get(config.optimizer.kind, 2)
