"""Pruning during training: weights, rows, heads or channels become zero.

Source: `compression/config.py` of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from fds.config.contradiction import check_needed, check_order
from fds.config.field import key
from fds.config.keys.module_groups import SHARED, ModuleGroupConfig, check_groups, schedule_offset_key
from fds.config.meaning import NotYet, PartOf
from fds.config.record import Config

_BLOCKS = PartOf("method")
_METHOD = "how weights are ranked: l1, by size, once; topk, by scores that are learned"


def _method(default: str) -> Any:
    return key(default, _METHOD, PartOf())


@attrs.frozen
class KeptShareConfig(Config):
    """`params` of a group of pruning."""

    dense_ratio: float | None = key(None, "share that is kept", SHARED, low=0, high=1)


@attrs.frozen
class PruningGroupConfig(ModuleGroupConfig):
    """A group of pruning, of any kind."""

    params: KeptShareConfig = key(KeptShareConfig, "how much is kept")


@attrs.frozen
class SparsePruningSharedConfig(Config):
    """`shared_parameters` of sparse pruning. The keys below `method` are for snip_momentum."""

    enabled: bool = key(False, "make single weights zero", NotYet("pruning of single weights, or of blocks of them"))
    schedule_offset: int = schedule_offset_key(1000, documented=0)
    method: Literal["l1", "topk", "snip_momentum"] = key(
        "l1", f"{_METHOD}; snip_momentum, in blocks, by weight times gradient", PartOf()
    )
    block_pattern: str = key("4x1", "blocks that go as one (4x1), or how many of how many stay (2:4)", _BLOCKS)
    dense_ratio: float = key(0.1, "share of all weights that is kept at the end", _BLOCKS, over=0, high=1)
    schedule_offset_end: int | None = key(
        None,
        "calls of the step after which no more is pruned; absent: schedule_offset",
        _BLOCKS,
        unit="steps",
        low=0,
        null=False,
    )
    schedule_offset_stride: int = key(1, "steps from one pruning to the next", _BLOCKS, unit="steps", over=0)
    excluded_modules: tuple[str, ...] = key((), "modules that keep all weights, by name", _BLOCKS)

    def check(self) -> None:
        """Raise `ConfigError` if the end is before the start."""
        if self.method == "snip_momentum":
            check_order(self, "schedule_offset", "schedule_offset_end")


@attrs.frozen
class SparsePruningConfig(Config):
    """`sparse_pruning`."""

    shared_parameters: SparsePruningSharedConfig = key(SparsePruningSharedConfig, "for all groups")
    different_groups: dict[str, PruningGroupConfig] = key(dict, "groups of modules, by name", SHARED)

    def check(self) -> None:
        """Raise `ConfigError` for pruning without groups, or a group without its share, except for snip_momentum."""
        if self.shared_parameters.method != "snip_momentum":
            check_groups(self, "dense_ratio")


@attrs.frozen
class RowPruningSharedConfig(Config):
    """`shared_parameters` of row and channel pruning."""

    enabled: bool = key(False, "make whole outputs zero", NotYet("pruning of rows or channels"))
    schedule_offset: int = schedule_offset_key(1000, documented=0)
    method: Literal["l1", "topk"] = _method("l1")


@attrs.frozen
class RowPruningConfig(Config):
    """`row_pruning` and `channel_pruning`, which have the same keys."""

    shared_parameters: RowPruningSharedConfig = key(RowPruningSharedConfig, "for all groups")
    different_groups: dict[str, PruningGroupConfig] = key(dict, "groups of modules, by name", SHARED)

    def check(self) -> None:
        """Raise `ConfigError` for pruning without groups, or a group without `dense_ratio`."""
        check_groups(self, "dense_ratio")


@attrs.frozen
class HeadPruningSharedConfig(Config):
    """`shared_parameters` of head pruning."""

    enabled: bool = key(False, "make whole heads zero", NotYet("pruning of attention's heads"))
    schedule_offset: int = schedule_offset_key(1000, documented=0)
    method: Literal["l1", "topk"] = _method("topk")
    num_heads: int | None = key(None, "heads of a layer before pruning", PartOf(), unit="heads", over=0)

    def check(self) -> None:
        """Raise `ConfigError` if heads are pruned and `num_heads` is missing."""
        check_needed(self, "enabled", "num_heads")


@attrs.frozen
class HeadPruningConfig(Config):
    """`head_pruning`."""

    shared_parameters: HeadPruningSharedConfig = key(HeadPruningSharedConfig, "for all groups")
    different_groups: dict[str, PruningGroupConfig] = key(dict, "groups of modules, by name", SHARED)

    def check(self) -> None:
        """Raise `ConfigError` for pruning without groups, or a group without `dense_ratio`."""
        check_groups(self, "dense_ratio")
