"""What a configuration holds on every rank, by formula, before there is a model.

Source: DESIGN.md, "Where bytes live"; `step.describe(state)` says it exactly, for a model.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fds.config.keys.groups import Groups
from fds.config.translate.function_call import Call
from fds.layout import MOST_BYTES

_SLOTS = {"adamw": 2, "adam": 2, "lamb": 2, "lion": 1, "adagrad": 1}  # of the size of the parameters, float32


@attrs.frozen
class Held:
    """What a rank holds of something: bytes per parameter of its stage.

    Attributes:
        what: in words.
        per_parameter: bytes.
        most: bytes that it never exceeds, however many parameters there are; None where it grows with them.
    """

    what: str
    per_parameter: float
    most: int | None = None

    def num_bytes(self, num_parameters: int) -> int:
        """Return the bytes for a stage of so many parameters."""
        whole = round(self.per_parameter * num_parameters)
        return whole if self.most is None else min(whole, self.most)

    def formula(self) -> str:
        """Return the bytes for P parameters, in words."""
        return f"{self.per_parameter:g} P" + ("" if self.most is None else f", at most {self.most:,}")


def held(config: Groups, calls: tuple[Call, ...], axes: Mapping[str, int]) -> tuple[Held, ...]:
    """Return what every rank holds, between steps and within one."""
    made = {call.path: call for call in calls}
    shard, precision = made["shard_optimizer"], made.get("precision")
    stage, ranks, bucket = shard.argument("stage"), axes["dp"], shard.argument("bucket_bytes") or MOST_BYTES
    shared = ranks if stage else 1
    compute = summed = sent = 4
    if precision is not None:
        accumulate = precision.argument("accumulate")
        compute, summed = precision.args[0].itemsize, accumulate.itemsize
        sent = (precision.argument("reduce") or accumulate).itemsize
    alone = ranks * axes.get("replicate", 1) == 1
    out = [Held(f"master weights and optimizer state{_among(shared)}", (4 + 4 * _num_slots(config)) / shared)]
    if alone or stage == 0:
        out += [Held("16-bit parameters", compute)] if compute < 4 else []
    elif stage < 3:
        out += [Held("whole parameters", compute)]
    else:
        live = (2 + shard.argument("prefetch")) * (bucket * compute // 4)
        out += [Held("parameters that are whole at once, beside small ones", compute, live)]
    reduces_slices = stage > 1 and not alone
    out += [Held(f"sums of gradients{_among(ranks if reduces_slices else 1)}",
                 summed / (ranks if reduces_slices else 1))]
    if reduces_slices:
        out += [Held("two buckets of gradients", sent, 2 * bucket * sent // 4)]
    return tuple(out)


def _among(ranks: int) -> str:
    return f", among {ranks} ranks" if ranks > 1 else ""


def _num_slots(config: Groups) -> int:
    if config.optimizer is None or config.optimizer.kind is None:
        return 2
    if config.optimizer.kind == "SGD":
        return 1 if config.optimizer.arguments.momentum else 0
    return _SLOTS.get(config.optimizer.kind, 2)
