"""Which part of a program a node of autograd's graph belongs to: nodes are numbered in the order of forward."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import attrs
import torch

# private: torch has no public function for where autograd is
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr  # pyright: ignore


@attrs.define(eq=False)
class Owners:
    """The numbers at which parts of forward begin, and their names; empty outside of all."""

    _starts: list[int] = attrs.field(factory=lambda: [0])
    _names: list[str] = attrs.field(factory=lambda: [""])  # of the nodes from there on

    def begin(self, name: str) -> None:
        """Note that the nodes from here on are those of a part."""
        number = _next_node()
        if number >= self._starts[-1]:  # else another thread's, which recomputes
            self._starts.append(number)
            self._names.append(name)

    def of(self, node: Any) -> str:
        """Return the part to which a node belongs."""
        return self._names[bisect.bisect_right(self._starts, node._sequence_nr()) - 1]
