"""Compression: quantization grids, pruning masks, and models that become smaller. Mathematics and values alone."""

from typing import TYPE_CHECKING

from fds.lazy import lazily

if TYPE_CHECKING:
    from fds.compression import masks as masks
    from fds.compression._semi_structured import semi_structured
    from fds.compression._shrink import Cut, shrink
    from fds.compression.activations import ActivationGrid
    from fds.compression.bake import Baked, Entry, Speed
    from fds.compression.compressed_files import read_baked
    from fds.compression.grids import Packed, pack
    from fds.compression.scores import sensitivity, with_scores

__getattr__, __dir__ = lazily(
    __name__,
    {
        "fds.compression.activations": "ActivationGrid",
        "fds.compression.bake": "Baked Entry Speed",
        "fds.compression.compressed_files": "read_baked",
        "fds.compression.grids": "Packed pack",
        "fds.compression.scores": "sensitivity with_scores",
        "fds.compression._shrink": "Cut shrink",
        "fds.compression._semi_structured": "semi_structured",
    },
    submodules="masks",
)

__all__ = [
    "ActivationGrid",
    "Baked",
    "Cut",
    "Entry",
    "Packed",
    "Speed",
    "pack",
    "read_baked",
    "semi_structured",
    "sensitivity",
    "shrink",
    "with_scores",
]
