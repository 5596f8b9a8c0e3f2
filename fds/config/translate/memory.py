"""The memory that a configuration needs on every rank, as formulas in the number of parameters.

`step.describe(state)` has the exact bytes of a model.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fds.config.keys.groups import Groups
from fds.config.translate.function_call import FunctionCall
from fds.layout import MOST_BYTES

_NUM_SLOTS = {"adamw": 2, "adam": 2, "lamb": 2, "lion": 1, "adagrad": 1}  # float32 tensors of the parameters' size


@attrs.frozen
class RankMemory:
    """The memory of one kind of tensors on a rank.

    Attributes:
        what: the kind, in words.
        per_parameter: bytes per parameter of the rank's pipeline stage.
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
    stage, ranks, bucket = shard.argument("stage"), axes["dp"], shard.argument("bucket_bytes") or MOST_BYTES
    num_shards = ranks if stage else 1
    compute = accumulated = reduced = 4  # bytes per element
    if precision is not None:
        accumulate = precision.argument("accumulate")
        compute, accumulated = precision.args[0].itemsize, accumulate.itemsize
        reduced = (precision.argument("reduce") or accumulate).itemsize
    alone = ranks * axes.get("replicate", 1) == 1
    out = [
        RankMemory(f"master weights and optimizer state{_among(num_shards)}", (4 + 4 * _num_slots(config)) / num_shards)
    ]
    if alone or stage == 0:
        out += [RankMemory("16-bit parameters", compute)] if compute < 4 else []
    elif stage < 3:
        out += [RankMemory("whole parameters", compute)]
    else:
        live = (2 + shard.argument("prefetch")) * (bucket * compute // 4)
        out += [RankMemory("parameters that are whole at once, beside small ones", compute, live)]
    reduces_slices = stage > 1 and not alone
    out += [
        RankMemory(
            f"sums of gradients{_among(ranks if reduces_slices else 1)}", accumulated / (ranks if reduces_slices else 1)
        )
    ]
    if reduces_slices:
        out += [RankMemory("two buckets of gradients", reduced, 2 * bucket * reduced // 4)]
    return tuple(out)


def _among(ranks: int) -> str:
    return f", among {ranks} ranks" if ranks > 1 else ""


def _num_slots(config: Groups) -> int:
    if config.optimizer is None or config.optimizer.kind is None:
        return 2
    if config.optimizer.kind == "SGD":
        return 1 if config.optimizer.arguments.momentum else 0
    return _NUM_SLOTS.get(config.optimizer.kind, 2)
