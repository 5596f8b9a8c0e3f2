"""Block-sparse attention: which blocks of the attention matrix are computed. Its keys depend on the mode.

Source: DeepSpeed 0.19.6, for which mode reads which key, and for defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs

from fds.config.contradiction import contradiction
from fds.config.field import AUTO, key, keys
from fds.config.meaning import NotYet, PartOf
from fds.config.record import Config

_OF_ALL = frozenset({"mode", "block", "different_layout_per_head"})
_TWO_SIDED = frozenset({"attention", "horizontal_global_attention"})
_INDICES = frozenset({"global_block_indices", "global_block_end_indices"})
READS = {
    "dense": _OF_ALL,
    "fixed": _OF_ALL | _TWO_SIDED | {"num_local_blocks", "num_global_blocks", "num_different_global_patterns"},
    "variable": _OF_ALL | _TWO_SIDED | _INDICES | {"num_random_blocks", "local_window_blocks"},
    "bigbird": _OF_ALL | {"num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"},
    "bslongformer": _OF_ALL | _INDICES | {"num_sliding_window_blocks"},
}
_MODE = PartOf("mode")


@attrs.frozen
class SparseAttentionConfig(Config):
    """`sparse_attention`: a pattern of blocks. The group enables it, since the mode is `fixed` by default.

    Keys of other modes must have their defaults, as in the example of DeepSpeed's documentation, which lists them all.
    """

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = key(
        "fixed",
        "kind of pattern; dense computes every block, as attention without this section does",
        NotYet("block-sparse attention", nothing=("dense",)),
    )
    block: int = key(16, "side of a square block of the attention matrix", _MODE, unit="tokens", over=0)
    different_layout_per_head: bool = key(False, "lay out every head anew, not all as the first", _MODE)
    num_local_blocks: int = key(4, "side of the local windows (fixed)", _MODE, unit="blocks", over=0)
    num_global_blocks: int = key(
        1,
        "blocks that see all and are seen by all: of each window (fixed), or the first ones (bigbird)",
        _MODE,
        unit="blocks",
        over=0,
    )
    attention: Literal["bidirectional", "unidirectional"] = key(
        "bidirectional", "whether tokens see later ones (fixed, variable)", _MODE
    )
    horizontal_global_attention: bool = key(
        False, "global blocks also see all others, where attention is bidirectional (fixed, variable)", _MODE
    )
    num_different_global_patterns: int = key(
        1, "choices of the global blocks in a window that heads take in turn (fixed)", _MODE, documented=4, over=0
    )
    num_random_blocks: int = key(
        0, "random blocks in each row of blocks (variable, bigbird)", _MODE, unit="blocks", low=0
    )
    local_window_blocks: tuple[int, ...] = key(
        (4,), "sides of the local windows, in order; the last one repeats (variable)", _MODE, unit="blocks"
    )
    global_block_indices: tuple[int, ...] = key(
        (0,), "blocks that see all and are seen by all, or where ranges of them start (variable, bslongformer)", _MODE
    )
    global_block_end_indices: tuple[int, ...] | None = key(
        None, "where these ranges end, exclusive; null: a block each (variable, bslongformer)", _MODE
    )
    num_sliding_window_blocks: int = key(
        3, "width of the band around the diagonal (bigbird, bslongformer)", _MODE, unit="blocks", over=0
    )

    def check(self) -> None:
        """Raise `ConfigError` for a value of another mode's key, and for an impossible pattern."""
        if self.mode == AUTO:
            return
        if foreign := [name for name in keys(type(self)) if self._is_foreign(name)]:
            want = f"mode {self.mode!r} reads {', '.join(sorted(READS[self.mode] - {'mode'}))}"
            raise contradiction(self, "a key of another mode", "mode", *foreign, want=want)
        for names, want in self._impossible():
            if READS[self.mode].issuperset(names) and AUTO not in (self[name] for name in names):
                raise contradiction(self, "the pattern is impossible", *names, want=want)

    def _is_foreign(self, name: str) -> bool:
        known = keys(type(self))[name][1]
        harmless = (AUTO, known.default, known.documented)
        return name in self.given and name not in READS[self.mode] and getattr(self, name) not in harmless

    def _impossible(self) -> Iterator[tuple[list[str], str]]:
        """Yield (keys, what they must be) of conditions that are not met; they apply to modes that read the keys."""
        local, wide, patterns = (
            _number(self[f"num_{of}"]) for of in ("local_blocks", "global_blocks", "different_global_patterns")
        )
        if local % wide:
            yield ["num_local_blocks", "num_global_blocks"], "a multiple of num_global_blocks"
        usual = keys(type(self))["num_different_global_patterns"][1].of(self.defaults)
        if patterns not in (1, usual):  # documented as 4, beside one layout
            if self.different_layout_per_head is False:
                yield (
                    ["different_layout_per_head", "num_different_global_patterns"],
                    "a layout per head, or one pattern",
                )
            if patterns > local // wide:
                yield (
                    ["num_local_blocks", "num_global_blocks", "num_different_global_patterns"],
                    "at most num_local_blocks / num_global_blocks patterns",
                )
        if self.attention == "unidirectional" and self.horizontal_global_attention is True:
            yield ["attention", "horizontal_global_attention"], "bidirectional attention, or no horizontal blocks"
        starts, ends = self.global_block_indices, self.global_block_end_indices
        if isinstance(starts, tuple) and isinstance(ends, tuple) and not _ranges(starts, ends):
            yield ["global_block_indices", "global_block_end_indices"], "as many ends as starts, each after its start"


def _number(value: int | str) -> int:
    """Return the number, or 1 for "auto", which meets every condition."""
    return value if isinstance(value, int) else 1


def _ranges(starts: tuple[int, ...], ends: tuple[int, ...]) -> bool:
    return len(starts) == len(ends) and all(start < end for start, end in zip(starts, ends, strict=True))
