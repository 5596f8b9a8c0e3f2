"""Compiled models and CUDA graphs.

Source: `compile/config.py` and `runtime/config.py` of 0.19.6.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, Self

import attrs

from fds.config.contradiction import contradiction
from fds.config.field import Edition, is_comment, key, keys
from fds.config.meaning import NotApplicable, NotYet, PartOf
from fds.config.record import Config

_DEEP = PartOf("deepcompile")
_SYNC = NotApplicable("where ranks wait is for finding faults in the compiler")


@attrs.frozen
class CompileConfig(Config):
    """`compile`: passes over the graph of a model that schedule gathers, reductions and copies to the host."""

    deepcompile: bool = key(False, "run these passes", NotYet("passes over a compiled model"))
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = key(
        None, "which passes; null: by stage", _DEEP
    )
    free_activation: bool = key(False, "free large activations as soon as they are used", _DEEP)
    free_activation_threshold: int = key(10 * 2**20, "which are large", _DEEP, unit="bytes", low=0)
    offload_activation: bool = key(False, "keep activations in the host's memory until backward", _DEEP)
    offload_activation_pin_memory: bool = key(True, "in page-locked memory", _DEEP)
    offload_opt_states: bool = key(False, "keep optimizer state in the host's memory until the update", _DEEP)
    offload_parameters: bool = key(False, "keep parameters in the host's memory until they are used", _DEEP)
    double_buffer: bool = key(True, "fill one buffer while the other is sent", _DEEP)
    symmetric_memory: bool = key(False, "gather by torch's symmetric memory", _DEEP)
    keep_int_input_tensors: bool = key(True, "keep integer inputs for later passes, not only their shapes", _DEEP)
    keep_all_input_tensors: bool = key(False, "keep all inputs", _DEEP)
    sync_before_reduce: bool = key(False, "wait before gradients are reduced", _SYNC)
    sync_after_reduce: bool = key(False, "wait after gradients are reduced", _SYNC)
    sync_before_allgather: bool = key(False, "wait before parameters are gathered", _SYNC)
    sync_after_allgather: bool = key(False, "wait after parameters are gathered", _SYNC)
    debug_log: bool = key(False, "write the graphs", NotApplicable("there are no graphs to write"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, defaults: Edition = "0.19.6") -> Self:
        """Return the record of a group of the JSON; unknown keys, of other releases, are left out with a warning."""
        if isinstance(data, Mapping):
            for name in [one for one in data if one not in keys(cls) and not is_comment(str(one))]:
                warnings.warn(f"compile.{name} is a key of another release, and is left out", UserWarning, stacklevel=6)
            data = {name: value for name, value in data.items() if name in keys(cls)}
        return super().from_dict(data, defaults=defaults)

    def check(self) -> None:
        """Raise `ConfigError` for two passes that offload to the same memory."""
        moved = [one for one in ("offload_activation", "offload_opt_states", "offload_parameters") if self[one] is True]
        if len(moved) > 1:
            raise contradiction(self, "only one of these can be kept in the host's memory", *moved, want="one of them")


@attrs.frozen
class CapturingConfig(Config):
    """Keys of the top level on CUDA graphs and shapes."""

    graph_harvesting: bool = key(
        False,
        "capture the optimizer's kernels of bf16 as one CUDA graph",
        NotApplicable("an update is one or two launches already"),
    )
    vocabulary_size: int | None = key(
        None, "rows of the embedding", NotApplicable("it is only warned of where 8 does not divide it"), over=0
    )
