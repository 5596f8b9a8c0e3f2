"""What a step keeps between calls beside its stations: caches, and what its ranks have agreed on."""

from __future__ import annotations

from typing import Any

import attrs

from fds.step.pool import Pool
from fds.step.sharding.order import LearnedOrder
from fds.step.sharding.viewed import Known
from fds.step.structure import Structure


@attrs.define(eq=False)
class Runtime:
    """The private part of a step: nothing of a run lives here, and with an empty one every number is the same.

    A step that was rewritten by `attrs.evolve` begins with an empty one.
    """

    pool: Pool = attrs.field(factory=Pool)
    structures: dict[Any, Structure] = attrs.field(factory=dict)  # by kind of tree: see `Step.structure_of`
    recent: list = attrs.field(factory=lambda: [(None, None)])  # the last call's key of `structures`, and its value
    fresh: dict[Structure, dict] = attrs.field(factory=dict)  # slots and buffers of a first state, on meta
    chunks: dict[Structure, list[list[int]]] = attrs.field(factory=dict)  # in which an update visits the slices
    memories: dict[tuple, LearnedOrder] = attrs.field(factory=dict)  # the order in which ranks met
    viewed: Known = attrs.field(factory=dict)  # at stage 3: the shapes of what views return
    forwards: dict[int, Any] = attrs.field(factory=dict)  # plans of evaluations, by their number of microbatches
    asked: dict[str, list[str]] = attrs.field(factory=dict)  # what the ranks have agreed on
