"""What a step keeps between calls beside its stations: caches, and what its ranks have agreed on."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from fds import tree
from fds.layout import Layout
from fds.step.pool import Pool
from fds.step.residency.chunks import Piece
from fds.step.residency.lives import Lives
from fds.step.sharding.order import LearnedOrder
from fds.step.sharding.viewed import Known
from fds.step.structure import Structure


@attrs.define(eq=False)
class Runtime:
    """The private part of a step: nothing of a run lives here, and with an empty one every number is the same.

    A step that was rewritten by `attrs.evolve` begins with an empty one.
    """

    pool: Pool = attrs.field(factory=Pool)
    gradients: Pool = attrs.field(factory=Pool)  # of those that live elsewhere
    ahead: Pool = attrs.field(factory=Pool)  # of leaves that are updated before the step has decided
    structures: dict[Any, Structure] = tree.new(dict)  # by kind of tree: see `Step.structure_of`
    # the last call's key of `structures`, and its value
    recent: list[tuple[Any, Structure | None]] = attrs.field(factory=lambda: [(None, None)])
    fresh: dict[Structure, dict[str, Any]] = tree.new(dict)  # slots and buffers of a first state, on meta
    chunks: dict[Structure, list[list[Piece]]] = tree.new(dict)  # in which an update visits the slices
    elsewhere: dict[tuple[Structure, torch.device], frozenset[int]] = tree.new(dict)  # masters that a loss reads
    lives: dict[tuple[Structure, torch.device], Lives] = tree.new(dict)  # where the leaves are that it writes
    memories: dict[tuple[str, Layout | None], LearnedOrder] = tree.new(dict)  # the order in which ranks met
    viewed: Known = tree.new(dict)  # at stage 3: the shapes of what views return
    forwards: dict[int, Any] = tree.new(dict)  # plans of evaluations, by their number of microbatches
    asked: dict[str, list[str]] = tree.new(dict)  # what the ranks have agreed on
    captured: list[Any] = attrs.field(
        factory=lambda: [None], repr=False
    )  # what the station `run` has captured, in one place
