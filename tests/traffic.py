"""Count the messages of some purposes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs

from fds.collectives import Axis
from fds.collectives.links import Collective
from fds.collectives.traffic import Traffic, counting

# what small messages are for; others carry buckets, activations, fragments, or are a loss's or an optimizer's own
SMALL = {"scalars", "weights", "notes", "buffers", "norm", "step", "batch", "offload", "what lives elsewhere"}


@attrs.define(eq=False)
class _Chosen(Traffic):
    purposes: tuple[str, ...] = ()

    def add(self, collective: Collective, axis: Axis) -> None:
        if collective.what in self.purposes:
            super().add(collective, axis)


@contextlib.contextmanager
def counted_for(*purposes: str) -> Iterator[Traffic]:
    """Count the collectives that this rank starts in the block for these purposes, such as "gather"."""
    traffic = _Chosen(purposes=purposes)
    with counting(traffic):
        yield traffic
