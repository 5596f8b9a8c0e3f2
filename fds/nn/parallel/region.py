"""The region of a model in which ranks of a tensor axis each compute a part, and how activations get in and out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from fds.collectives import Axis, all_gather, reduce_scatter
from fds.errors import LossError
from fds.loss import current_mode
from fds.nn.parallel import mappings, overlapped


@attrs.define(eq=False)
class Region:
    """What the parallel layers of one copy of a module share.

    Attributes:
        axis: the ranks that compute together.
        chunks: into how many pieces messages are cut that travel beside products; 0 for none beside them.
        dim: of an activation, along which the sequence lies: -2 of (..., sequence, features).
        inside: the whole width of the activation that is cut along its features now, 0 where it is not.
        heads: what a module of attention that runs was given, else None: inside, tensors of four dims are cut along
            the third last.
    """

    axis: Axis
    chunks: int = 0
    dim: int = -2
    inside: int = 0
    heads: list[Tensor] | None = None
    _given: tuple[Tensor, int, Tensor] | None = None  # the last input, its version, and as what it got in
    _lengths: dict[str, int] = attrs.field(factory=dict)  # outside of a step

    @property
    def lengths(self) -> MutableMapping[str, int]:
        """How long sequences of this microbatch are, by what is known of them."""
        known = current_mode().lengths
        return self._lengths if known is None else known

    def enter(self, x: Tensor, *, sequence: bool) -> Tensor:
        """Return an activation for parts of a product; several products of one activation let it in once."""
        entered = self._known(x)
        if entered is None:
            entered = self.gathered(x) if sequence else mappings.copied(x, self.axis)
            self._given = x, x._version, entered
        return entered

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, sequence: bool) -> Tensor:
        """Return a product of an activation that enters for it alone, beside its message."""
        if self._known(x) is not None:
            return F.linear(self.enter(x, sequence=sequence), weight, bias)
        if not sequence:
            return overlapped.copied_linear(x, [weight], [bias], self.axis)[0]
        options = {"dim": x.dim() + self.dim, "chunks": self.chunks}
        return self._unpadded(overlapped.gathered_linear(x, [weight], [bias], self.axis, **options)[0])

    def rows(self, x: Tensor, weight: Tensor, *, sequence: bool) -> Tensor:
        """Return the sum of the ranks' products, beside its message where that is cut; see `leave`."""
        if not self.chunks:
            return self.leave(F.linear(x, weight), sequence=sequence)
        self._given, self.inside = None, 0
        if not sequence:
            return overlapped.linear_summed(x, weight, self.axis, self.chunks)
        self.lengths.setdefault("sequence", x.shape[self.dim])
        x = self._padded(x, self.dim)
        return overlapped.linear_scattered(x, weight, self.axis, dim=x.dim() + self.dim, chunks=self.chunks)

    def _known(self, x: Tensor) -> Tensor | None:
        """Return as what an activation was let in, None where it was not.

        Raises `LossError` for what attention made of what it was given.
        """
        if self._given is not None:
            given, version, entered = self._given
            if x is entered or (x is given and version == x._version):
                return entered
        if self.heads is not None and not any(x is one for one in self.heads):
            raise LossError(
                "a projection of attention is given something else than the attention was",
                where=f"tensor_parallel over {self.axis.name!r}",
                got=f"shape {tuple(x.shape)}, computed inside of a module that the plan calls 'heads'",
                want="queries, keys and values that are projections of the module's arguments",
                hint="a norm before them belongs outside of that module",
            )
        return None

    def leave(self, x: Tensor, *, sequence: bool, dim: int | None = None) -> Tensor:
        """Return the sum of the ranks' terms: whole, or this rank's part of the sequence, which lies along `dim`."""
        self._given, self.inside = None, 0
        if not sequence:
            return mappings.summed(x, self.axis)
        dim = self.dim if dim is None else dim
        self.lengths.setdefault("sequence", x.shape[dim])  # where sequences begin as parts
        return reduce_scatter(self._padded(x, dim), self.axis, dim)

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's part of a sequence that all have whole; one that does not divide is padded with zeros."""
        self.lengths["sequence"] = x.shape[self.dim]
        return mappings.cut(self._padded(x, self.dim), self.axis, self.dim)

    def joined(self, x: Tensor) -> Tensor:
        """Return the whole sequence, with which all go on alike, given the ranks' parts."""
        return self._unpadded(mappings.joined(x, self.axis, self.dim))

    def gathered(self, x: Tensor) -> Tensor:
        """Return the whole sequence for parts of a product, given the ranks' parts."""
        return self._unpadded(all_gather(x, self.axis, self.dim))

    def length(self, part: int) -> int:
        """Return how long a sequence is of which this rank has `part` elements, padding included."""
        whole = part * self.axis.size
        known = self.lengths.get("sequence", whole)
        return known if whole - self.axis.size < known <= whole else whole

    def reset(self) -> None:
        """Forget what a call before left behind."""
        self._given, self.inside, self.heads = None, 0, None

    @contextlib.contextmanager
    def in_attention(self, given: list[Tensor]) -> Iterator[None]:
        """Mark what runs inside as attention over this rank's heads, of these arguments."""
        before, self.heads = self.heads, given
        try:
            yield
        finally:
            self.heads = before

    def _padded(self, x: Tensor, dim: int) -> Tensor:
        missing = -x.shape[dim] % self.axis.size
        return x if not missing else F.pad(x, (*(0, 0) * (-dim - 1), 0, missing))

    def _unpadded(self, x: Tensor) -> Tensor:
        return x.narrow(self.dim, 0, self.length(x.shape[self.dim] // self.axis.size))


def ranges(length: int, axis: Axis) -> list[tuple[int, int]]:
    """Return the first index and the length of every rank's piece of a dim: the first ones are longer by one."""
    each, more = divmod(length, axis.size)
    return [(i * each + min(i, more), each + (i < more)) for i in range(axis.size)]


def joined_features(x: Tensor, axis: Axis, length: int) -> Tensor:
    """Return the pieces of the last dim, `length` as a whole, one after another on every rank."""
    sizes = [n for _, n in ranges(length, axis)]
    if sizes[0] == sizes[-1]:
        return mappings.joined(x, axis, -1)
    whole = mappings.joined(F.pad(x, (0, sizes[0] - x.shape[-1])), axis, -1)
    parts = whole.split(sizes[0], -1)
    return torch.cat([part.narrow(-1, 0, n) for part, n in zip(parts, sizes, strict=True)], -1)
