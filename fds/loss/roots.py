"""Which modules that run are copies of which module of a loss: what tells whose layers they are."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import nn


class Root(NamedTuple):
    """Of which call of `functional` a copy is, and what stands before its names in the tree of parameters."""

    number: int
    prefix: str


roots: weakref.WeakKeyDictionary[nn.Module, Root] = weakref.WeakKeyDictionary()
