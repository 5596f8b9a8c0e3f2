"""Send by way of two axes: first inside a node, then what was summed there between nodes.

    out = sum over nodes of code_outer(sum inside the node of code_inner(whole))

Between nodes a rank sends 1 / (ranks of a node) of what a flat exchange does.

Source: Wang et al. 2023 (ZeRO++, qgZ), arXiv:2306.10209, section 4.3
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fds import random
from fds.collectives import Axis, Work
from fds.errors import ComposeError
from fds.step import Leg, Pending, Relay, Transport
from fds.transports._code import Coded, add_kept


@attrs.frozen(eq=False, repr=False)
class Hierarchical(Transport):
    """Messages of two codes, inside nodes and between them, over an axis that is two of a mesh, flattened."""

    inner: Coded
    outer: Coded
    keeps: bool
    axes: tuple[Axis, Axis] | None = None  # between nodes, and inside this rank's

    @property
    def bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max(self.inner.bound, self.outer.bound)

    @property
    def draws(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.draws or self.outer.draws

    def seeded(self, key: Tensor) -> Hierarchical:
        return attrs.evolve(self, inner=self.inner.seeded(key), outer=self.outer.seeded(random.fold_in(key, "outer")))

    def on(self, axis: Axis) -> Hierarchical:
        """Return the transport along two axes. Raises `ComposeError` for one that is not two of a mesh, flattened."""
        *outer, inner = axis.name.split(",")
        if not outer:
            raise ComposeError(
                "hierarchical: messages go by way of two axes",
                got=f"axis {axis.name!r}, of {axis.size} ranks",
                want='mesh = fds.mesh(node=2, local=-1); fds.shard_optimizer(mesh["node", "local"], ...)',
            )
        pair = axis.mesh[tuple(outer)].channel("between nodes"), axis.mesh[inner].channel("inside a node")
        return attrs.evolve(self, axes=pair)

    @property
    def along(self) -> tuple[Axis, Axis]:
        """The axes between nodes and inside one. Raises `ComposeError` where nobody said which they are."""
        if self.axes is None:
            raise ComposeError(
                "hierarchical: along which axes messages go is not known",
                got='fill(step, reduce={"transport": fds.transports.hierarchical(...)})',
                want="fds.shard_optimizer(..., gradients=fds.transports.hierarchical(...))",
            )
        return self.axes

    def reduce(self, axis: Axis, whole: Tensor, out: Tensor, kept: Tensor | None) -> Work:
        """Sum inside the node the slices of ranks that have the same place in theirs, then between nodes."""
        node, local = self.along
        sorted_by_place = lambda x: x.view(node.size, local.size, -1).transpose(0, 1)  # (place, node, n)
        rows = sorted_by_place(add_kept(whole, kept)).reshape(local.size, -1)
        errors = None if kept is None else torch.zeros_like(rows)
        first = self.inner.code.exchange(local, rows, errors)

        def between_nodes() -> Work:
            sums = first.sum().view(node.size, -1)
            mine = None if errors is None else errors[local.index].view(node.size, -1)
            second = self.outer.code.exchange(node, sums, mine)
            if kept is not None and errors is not None:
                sorted_by_place(kept).copy_(errors.view(local.size, node.size, -1))
            return Pending(second.work, lambda: second.sum(out))

        return Relay(first.work, between_nodes)

    def combine(self, axis: Axis, own: Tensor, kept: Tensor | None) -> Work:
        return self.outer.combine(axis, own, kept)

    def spread(self, axis: Axis, own: Tensor, whole: Tensor, kept: Tensor | None) -> Work:
        return self._to_all(axis, own, whole, kept)

    def gather(self, axis: Axis, part: Tensor, whole: Tensor) -> Work:
        return self._to_all(axis, part, whole, None)

    def bytes_sent(self, leg: Leg, numel: int, dtype: torch.dtype, size: int) -> float:
        if leg == "combine":
            return self.outer.bytes_sent(leg, numel, dtype, size)
        return sum(self.bytes_by_axis(leg, numel, size))

    def bytes_by_axis(self, leg: Leg, numel: int, size: int) -> tuple[int, int]:
        """Return what a rank sends between nodes, and inside its own."""
        node, local = (axis.size for axis in self.along)
        n = numel // size
        if leg == "reduce":
            return (node - 1) * self.outer.code.num_bytes(n), (local - 1) * self.inner.code.num_bytes(n * node)
        message = self.outer.code.num_bytes(n)
        return (node - 1) * message, (local - 1) * node * message

    def _to_all(self, axis: Axis, own: Tensor, whole: Tensor, kept: Tensor | None) -> Work:
        node, local = self.along
        first, messages = self.outer.code.share(node, own, kept)  # of the ranks at this place in every node

        def inside() -> Work:
            everything = messages.new_empty(local.size * messages.numel())
            return Pending(local.start_all_gather(everything, messages.view(-1)), lambda: decode(everything))

        def decode(everything: Tensor) -> None:
            by_rank = everything.view(local.size, node.size, -1).transpose(0, 1).flatten(0, 1)
            self.outer.code.decode_all(by_rank, whole)

        return Relay(first, inside)

    def __repr__(self) -> str:
        return f"hierarchical({self.inner}" + (")" if self.outer is self.inner else f", {self.outer})")


def hierarchical(inner: Transport, outer: Transport | None = None) -> Hierarchical:
    """Send inside a node by `inner`, and between nodes, requantized, by `outer` (None: as inside).

    The axis of `shard_optimizer` is two of a mesh, flattened: `mesh["node", "local"]`, the last one inside a node. A
    rank sums what its neighbours have for the ranks at its place in all nodes; only these sums travel between nodes.

    Raises `ComposeError` for transports other than `cast`, `quantized`, `onebit`, `topk`, and for two of which one
    keeps what it loses (error feedback) and the other does not.
    """
    outer = inner if outer is None else outer
    for transport in (inner, outer):
        if not isinstance(transport, Coded):
            raise ComposeError(
                "hierarchical: no way to code a message",
                got=repr(transport)[:80],
                want="fds.transports.quantized(4), or cast, onebit, topk",
            )
    assert isinstance(inner, Coded) and isinstance(outer, Coded)
    if inner.keeps != outer.keeps:
        raise ComposeError(
            "hierarchical: one transport keeps what it loses, the other does not",
            got=f"hierarchical({inner}, {outer})",
            want="feedback in both, or in neither",
        )
    return Hierarchical(inner, outer, inner.keeps)
