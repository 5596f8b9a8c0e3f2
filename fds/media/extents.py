"""Extents: the leaves of a directory, in one file without a name."""

from __future__ import annotations

import attrs
from torch import Tensor

from fds.media.arena import Arena
from fds.media.tensors import leaf_of


@attrs.frozen(eq=False)
class Extent:
    """Where the values of a leaf on disk lie, for as long as the tensor that it was asked of lives.

    Values that were written through the tensor itself may be in the page cache of the file only, as for any file.

    Attributes:
        fd: the descriptor of the file, open for reading and writing with O_DIRECT where the file system can.
        offset: of the first byte.
        nbytes: how many.
    """

    fd: int
    offset: int
    nbytes: int


def extent_of(x: Tensor) -> Extent | None:
    """Return where the values of a contiguous tensor lie on disk; None if they lie elsewhere."""
    leaf = leaf_of(x)
    if leaf is None or not isinstance(leaf.place, Arena) or not x.is_contiguous():
        return None
    return Extent(leaf.place.file.fd, x.data_ptr() - leaf.place.file.base, x.nbytes)
