"""The region of a model in which ranks of a tensor axis each compute a part, and how activations get in and out."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from fds.collectives import Axis, all_gather, reduce_scatter
from fds.collectives.functional import copy_in, cut, is_transformed, join, sum_out
from fds.errors import LossError
from fds.loss import current_mode
from fds.nn.parallel import overlapped
from fds.nn.parallel.uses import function_of, metadata_of, nodes_behind


@attrs.define(eq=False)
class Region:
    """What the parallel layers of one copy of a module share.

    Attributes:
        axis: the ranks that compute together.
        chunks: into how many pieces messages are cut that travel beside products; 0 for none beside them.
        dim: of an activation, along which the sequence lies: -2 of (..., sequence, features).
        inside: the lengths of the parts of the activation that is cut along its features now; none where it is not.
        lead: the shape of that activation, but for its features; () where it is not known.
        widths: how many features pieces have here, of all columns that have run.
        heads: what a module of attention that runs was given, else None: inside, tensors of four dims are cut along
            the third last.
        counts: how many heads the module of attention that runs has on this rank, where a plan names them.
        opened: whether attention that runs was given the whole of what are parts of sequences, its first argument.
        before: what `inside` is where a call begins: what layers before it left.
        run: the name of the blocks one of which runs now, if it is given parts of sequences: an encoder's, a decoder's.
        draws: whether functions of the module have drawn for pieces; `drawing` while a call runs in `DrawsOfAll`.
        memory: whether attention that runs was given keys and values that are whole where queries are parts.
        split: whether a module of the user's runs whose own forward computes with pieces: no layer says what is cut.
        blocks: whether there are blocks in which activations are parts of sequences.
        lengths: how long sequences of this microbatch are, by run of blocks; known until the next call begins, since
            torch.utils.checkpoint runs what is inside of blocks again.
        look: what is called, while a call is watched, with the input of a row, its weight, and the parts it is cut by.
    """

    axis: Axis
    chunks: int = 0
    dim: int = -2
    inside: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()
    widths: set[int] = attrs.field(factory=set[int])
    heads: list[Tensor] | None = None
    counts: tuple[int, ...] = ()
    opened: bool = False
    before: tuple[int, ...] = ()
    run: str | None = None
    draws: bool = False
    drawing: bool = False
    memory: bool = False
    split: bool = False
    blocks: bool = False
    lengths: dict[str, int] = attrs.field(factory=dict)
    look: Callable[[Tensor, Tensor, tuple[int, ...]], None] | None = None
    # the last input, its version, if recorded, as what it got in
    _given: tuple[Tensor, int, bool, Tensor] | None = None
    _left: tuple[Tensor, tuple[int, ...]] | None = None  # the last input of a row, and the parts of which it is a piece

    @property
    def overlaps(self) -> bool:
        """Whether messages travel beside products; under `torch.func`, for which those have no rules, they do not."""
        return bool(self.chunks) and not is_transformed()

    def enter(self, x: Tensor, *, run: str | None) -> Tensor:
        """Return an activation for parts of a product; several products of one activation let it in once."""
        entered = self._known(x)
        if entered is None:
            entered = self.let_in(x, run=None if self._is_memory(x) else run)
            self._given = x, x._version, torch.is_grad_enabled(), entered
        return entered

    def let_in(self, x: Tensor, *, run: str | None) -> Tensor:
        """Return the whole of an activation, for pieces that it meets."""
        return copy_in(x, self.axis) if run is None else self.gather(x, run)

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, run: str | None) -> Tensor:
        """Return a product of an activation that enters for it alone, beside its message."""
        if self._known(x) is not None:
            return F.linear(self.enter(x, run=run), weight, bias)
        if run is None or self._is_memory(x):
            return overlapped.copied_linear(x, [weight], [bias], self.axis)[0]
        options = {"dim": x.dim() + self.dim, "chunks": self.chunks}
        return self._unpad(overlapped.gathered_linear(x, [weight], [bias], self.axis, **options)[0], run)

    def rows(
        self,
        x: Tensor,
        weight: Tensor,
        cut: tuple[int, ...],
        *,
        run: str | None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the sum of the ranks' products, beside its message where that is cut; see `leave`.

        Of the whole input, parts of these lengths are divided. `change` is given a product before it is sent.
        """
        self._left = x, cut
        if self.look is not None:
            self.look(x, weight, cut)
        if change is not None or not self.overlaps:
            y = F.linear(x, weight)
            return self.leave(y if change is None else change(y), run=run)
        self._close(run)
        if run is None:
            return overlapped.linear_summed(x, weight, self.axis, self.chunks)
        self.lengths.setdefault(run, x.shape[self.dim])
        x = self._pad(x, self.dim)
        return overlapped.linear_scattered(x, weight, self.axis, dim=x.dim() + self.dim, chunks=self.chunks)

    def _is_memory(self, x: Tensor) -> bool:
        """Say whether attention was given this beside parts of another sequence, whole."""
        return self.memory and bool(self.heads) and x is not self.heads[0]  # pyright: ignore[reportOptionalSubscript]

    def _known(self, x: Tensor) -> Tensor | None:
        """Return as what an activation was let in, None where it was not.

        Raises `LossError` for what attention to a sequence that all have whole made of what it was given.
        """
        if self._given is not None:
            last, version, then, entered = self._given
            # dynamo knows no version: compiled, each product lets it in by itself
            same = x is last and not torch.compiler.is_compiling() and version == x._version
            if x is entered or (same and then == torch.is_grad_enabled()):
                return entered
        if self.heads is None or not self.opened or any(x is argument for argument in self.heads):
            return None
        if not self.memory:
            return x  # what attention makes of what it was given whole, such as a norm or an adapter
        raise LossError(
            "a projection of attention is given something else than the attention was",
            where=f"tensor_parallel over {self.axis.name!r}",
            got=f"shape {tuple(x.shape)}, computed inside of attention to another sequence, of parts of one",
            want="queries, keys and values that are projections of the module's arguments",
            hint="a norm before them belongs outside of that module; or no 'sequence' for the block",
        )

    def inside_of(self, parts: tuple[int, ...], y: Tensor) -> None:
        """Note that an activation is this rank's pieces of these parts of features from now on."""
        if self.draws and not self.drawing:
            raise LossError(
                "functions that draw run again in backward, and would not draw what they drew",
                where=f"tensor_parallel over {self.axis.name!r}",
                got="F.dropout, or dropout in attention, under torch.utils.checkpoint or in an fds.tile",
                want="nn.Dropout; or fds.checkpoint_activations(), and no tiles of what draws",
            )
        self.inside, self.lead = parts, y.shape[:-1]
        self.widths.add(y.shape[-1])
        if not torch.compiler.is_compiling() and y.grad_fn is not None:
            metadata_of(y.grad_fn)["pieces"] = parts
            # torch.utils.checkpoint stops half way in here: what it runs next begins anew
            y.grad_fn.register_prehook(self._after_backward)

    def leave(self, x: Tensor, *, run: str | None, dim: int | None = None) -> Tensor:
        """Return the sum of the ranks' terms: whole, or this rank's part of the sequence, which lies along `dim`."""
        self._close(run)
        if run is None:
            return sum_out(x, self.axis)
        dim = self.dim if dim is None else dim
        self.lengths.setdefault(run, x.shape[dim])  # where sequences begin as parts
        return reduce_scatter(self._pad(x, dim), self.axis, dim)

    def _close(self, run: str | None) -> None:
        """Note that what comes is no piece of features; in a run, part of a sequence, inside of attention too."""
        self._given, self.inside, self.opened = None, (), self.opened and run is None

    def cut(self, x: Tensor, *, run: str) -> Tensor:
        """Return this rank's part of a sequence that all have whole; one that does not divide is padded with zeros.

        Raises `LossError` for what is no activation, and for lengths that cannot be told apart where they are padded.
        """
        if not x.is_floating_point() or x.dim() < -self.dim:
            raise LossError(
                "a block in parts of sequences is given something else than an activation",
                where=f"tensor_parallel over {self.axis.name!r}",
                got=f"{x.dtype} of shape {tuple(x.shape)}",
                want="(..., sequence, features), floating",
                hint="the blocks are 'sequence', not what begins with an embedding of ids",
            )
        length, size = x.shape[self.dim], self.axis.size
        expected = self.lengths.setdefault(run, length)
        if length != expected and (length % size or expected % size):
            raise LossError(
                "sequences of several lengths are cut in one microbatch, and not all divide",
                where=f"tensor_parallel over {self.axis.name!r}, {size} ranks",
                got=f"{expected} and {length}",
                want=f"multiples of {size}",
            )
        if length % size and current_mode().staged:
            raise LossError(
                "the ranks do not divide a sequence, whose length other stages of the pipeline do not know",
                where=f"tensor_parallel over {self.axis.name!r}, {size} ranks",
                got=str(length),
                want=f"a multiple of {size}",
            )
        self.lengths[run] = length
        return cut(self._pad(x, self.dim), self.axis, self.dim)

    def join(self, x: Tensor, *, run: str) -> Tensor:
        """Return the whole sequence, with which all go on alike, given the ranks' parts."""
        return self._unpad(join(x, self.axis, self.dim), run)

    def gather(self, x: Tensor, run: str) -> Tensor:
        """Return the whole sequence for parts of a product, given the ranks' parts."""
        return self._unpad(all_gather(x, self.axis, self.dim), run)

    def length(self, part: int, run: str) -> int:
        """Return how long a sequence is of which this rank has `part` elements, padding included."""
        whole = part * self.axis.size
        expected = self.lengths.get(run, whole)
        return expected if whole - self.axis.size < expected <= whole else whole

    def piece(self, x: Tensor, *, run: str | None) -> tuple[int, int, list[tuple[int, int]]] | None:
        """Return the dim along which an activation is cut, its whole length, and first index and length of our ranges.

        None for an activation that all ranks have whole. Raises `LossError` where that cannot be told.
        """
        size, index = self.axis.size, self.axis.index
        if self.split and not (self._given is not None and (x is self._given[0] or x is self._given[3])):
            raise LossError(
                "a function draws in a module that 'split' divides, and may be given a piece",
                where=f"tensor_parallel over {self.axis.name!r}",
                got=f"shape {tuple(x.shape)}",
                want="dropout of what the module is given or returns, outside of it",
            )
        if self.inside and self.heads is not None and x.dim() == 4:
            n = x.shape[-3]
            return -3, n * size, [(index * n, n)]
        inside = self._parts_of(x)
        if not inside:
            return None if run is None or self.opened else self._part(x, run)
        pieces = [ranges(part, self.axis)[index] for part in inside]
        wholes = {part for part, (_, n) in zip(inside, pieces, strict=True) if n == x.shape[-1]}
        fits = inside is not self.inside or not self.lead or self.lead == x.shape[:-1]
        if fits and x.shape[-1] == sum(n for _, n in pieces):
            return self.features(inside)
        if fits and len(wholes) == 1:
            whole = wholes.pop()
            return -1, whole, [ranges(whole, self.axis)[index]]
        local_width = sum(n for _, n in pieces)
        raise LossError(
            "dropout is given what it cannot know the whole of",
            where=f"tensor_parallel over {self.axis.name!r}, {size} ranks",
            got=f"shape {tuple(x.shape)}, made of pieces of features {inside}: {(*self.lead, local_width)}",
            want="a piece of features; or heads (batch, heads, sequence, ...), in a module that the plan calls 'heads'",
        )

    def features(self, parts: tuple[int, ...]) -> tuple[int, int, list[tuple[int, int]]]:
        """Return the same as `piece` for features of which parts of these lengths are divided."""
        pieces = [ranges(part, self.axis)[self.axis.index] for part in parts]
        starts = itertools.accumulate(parts, initial=0)
        return -1, sum(parts), [(start + first, n) for start, (first, n) in zip(starts, pieces, strict=False)]

    def _parts_of(self, x: Tensor) -> tuple[int, ...]:
        """Return the lengths of the parts of which an activation is this rank's pieces, none where it is whole.

        A column before it says no more than that it may be one: an adapter, or a gate, goes on with the whole. So it is
        asked whether it is what went into a column, or a row; then the graph, where there is one.
        """
        if self._given is not None and (x is self._given[0] or x is self._given[3]):
            return self.before
        if self._left is not None and x is self._left[0]:
            return self._left[1]
        if torch.compiler.is_compiling():  # dynamo reads no graph
            return self.inside
        if (self.inside or x.shape[-1] in self.widths) and x.grad_fn is not None:
            return self.pieces_in_graph(x)
        return self.inside

    def pieces_in_graph(self, x: Tensor) -> tuple[int, ...]:
        """Return the lengths of the parts of the column that an activation comes from, none for what is whole."""
        for node, _ in nodes_behind(x.grad_fn, stops=self.passes_between):
            if (parts := metadata_of(node).get("pieces")) is not None:
                return parts
        return ()

    @property
    def width(self) -> int:
        """How many features the activation has that went into the last column, 0 where there is none."""
        return 0 if self._given is None else self._given[0].shape[-1]

    def passes_between(self, node: Any) -> bool:
        """Say whether a node of the graph is of a function that lets in, puts together or exchanges what ranks have."""
        ranks = getattr(getattr(node, "axis", None), "ranks", None)
        return ranks == self.axis.ranks or getattr(function_of(node), "gives", None) is not None

    def _part(self, x: Tensor, run: str) -> tuple[int, int, list[tuple[int, int]]] | None:
        n = x.shape[self.dim] if x.dim() >= -self.dim else 0
        whole = self.lengths.get(run)
        if whole is not None and n != -(-whole // self.axis.size):
            if n == 1:
                return None  # for all tokens alike
            raise LossError(
                "dropout is given what is not a part of the sequence",
                where=f"tensor_parallel over {self.axis.name!r}, {self.axis.size} ranks",
                got=f"shape {tuple(x.shape)}",
                want=f"{-(-whole // self.axis.size)} tokens of {whole} along dim {self.dim}",
            )
        return self.dim, self.length(n, run), [(self.axis.index * n, n)]

    def begin(self) -> None:
        """Begin a call: of a step's microbatch, other calls may know the lengths already."""
        self.reset()
        lengths = None if torch.compiler.is_compiling() else current_mode().lengths  # dynamo reads no ContextVar
        self.lengths = {} if lengths is None else lengths

    def reset(self) -> None:
        """Forget what a call leaves behind."""
        self._given, self._left, self.inside, self.lead, self.heads = None, None, self.before, (), None
        self.memory = self.opened = self.split = False

    def _after_backward(self, grads: Any) -> None:
        self._given, self._left, self.inside, self.lead = None, None, self.before, ()

    @contextlib.contextmanager
    def in_attention(
        self, inputs: list[Tensor], counts: tuple[int, ...] = (), *, memory: bool = False, opened: bool = False
    ) -> Iterator[None]:
        """Mark what runs inside as attention over this rank's heads, of these arguments."""
        before = self.heads, self.counts, self.memory, self.opened
        self.heads, self.counts, self.memory, self.opened = inputs, counts, memory, opened
        around, _now.region = _now.region, self
        try:
            yield
        finally:
            _now.region = around
            self.heads, self.counts, self.memory, self.opened = before

    def _pad(self, x: Tensor, dim: int) -> Tensor:
        missing = -x.shape[dim] % self.axis.size
        return x if not missing else F.pad(x, (*(0, 0) * (-dim - 1), 0, missing))

    def _unpad(self, x: Tensor, run: str) -> Tensor:
        return x.narrow(self.dim, 0, self.length(x.shape[self.dim] // self.axis.size, run))


class _Now(threading.local):  # torch.compile traces no `ContextVar`
    region: Region | None = None


_now = _Now()


def heads_around() -> Region | None:
    """Return the region of which attention over some of the heads runs in this thread, None where none does."""
    return _now.region


def ranges(length: int, axis: Axis) -> list[tuple[int, int]]:
    """Return the first index and the length of every rank's piece of a dim: the first ones are longer by one."""
    each, more = divmod(length, axis.size)
    return [(i * each + min(i, more), each + (i < more)) for i in range(axis.size)]


def join_features(x: Tensor, axis: Axis, parts: tuple[int, ...]) -> Tensor:
    """Return the pieces of the last dim, which has parts of these lengths as a whole, in their order on every rank."""
    sizes = [[n for _, n in ranges(part, axis)] for part in parts]
    widths = [sum(of_parts) for of_parts in zip(*sizes, strict=True)]  # of the ranks; the first has the most
    whole = join(F.pad(x, (0, widths[0] - x.shape[-1])) if widths[-1] < widths[0] else x, axis, -1)
    if len(parts) == 1 and widths[-1] == widths[0]:
        return whole
    pieces = [
        piece.split([*of_parts, widths[0] - sum(of_parts)], -1)
        for piece, of_parts in zip(whole.split(widths[0], -1), zip(*sizes, strict=True), strict=True)
    ]
    return torch.cat([piece[part] for part in range(len(parts)) for piece in pieces], -1)
