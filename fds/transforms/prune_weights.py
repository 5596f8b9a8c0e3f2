"""Prune single weights, or blocks of them.

Fills:  view, memory             State:  slot `pruned_weights` (or `name`): masks, 32 weights in a word of 8 bytes
Law:    the hand-written loop whose weights are multiplied by masks, made of weights when the schedule says so
Cost:   a quarter of a byte a weight on every rank, and in each call of several a message of as much; a pass over the
        weights each microbatch; where a mask is made a selection of the largest, too
Source: Zhu and Gupta 2017, arXiv:1710.01878; 2:4: Mishra et al. 2021, arXiv:2104.08378
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.compression import masks
from fds.compression.masks import Block, Curve
from fds.compression.schedule import Schedule, patterns_of
from fds.errors import FLAG, ComposeError, FdsError, Rule, StateError
from fds.layout import Leaf
from fds.step import Call, Memory, Placement, SplitDim, Step, fill, transform

WORD = Rule(lambda x: isinstance(x, str) and x.isidentifier(), ": the name of a slot is a word", 'say, "pruned_more"')
ALL = 2**masks.BITS - 1  # a word of which every bit is set


@attrs.frozen(eq=False)
class Piece:
    """What this rank holds of a weight; `shape` is that of the whole one."""

    placement: Placement
    name: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Leaf, call: Call, together: int) -> Piece | None:
        """Return this rank's piece, None of a weight that is whole here.

        `together` is how many numbers of a row are compared with one another, 0 for more.

        Raises `ComposeError` where a mask of the piece cannot be made of the piece alone.
        """
        cut = [
            (entry.placement, lies)
            for entry in call.dimensions.entries
            if entry.axis is not None and entry.axis.size > 1 and not entry.placement.owns
            for lies in [entry.placement.lies(leaf.name)]
            if isinstance(lies, SplitDim)
        ]
        if not cut:
            return None
        placement, lies = cut[0]
        axis, shape = placement.axis, placement.shapes({leaf.name: leaf.shape})[leaf.name]
        assert axis is not None
        width = math.prod(shape[lies.dim + 1 :])
        starts = [
            first * width
            for index in range(axis.size)
            for first, _ in lies.ranges(shape[lies.dim], axis.size, index)
            if lies.dim
        ]
        if not together or len(cut) > 1 or any(start % math.lcm(masks.BITS, together) for start in starts):
            raise ComposeError(
                "prune_weights compares numbers of a weight that are on several ranks",
                where=f"{leaf.name} {shape}",
                got=f"dim {lies.dim} cut by {axis.name!r}",
                want=f'block="2:4" where ranks hold whole rows, or multiples of {masks.BITS} columns; '
                "or excluded=... with such weights",
            )
        return cls(placement, leaf.name, shape)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's piece of a mask (rows, numbers of a row), of the shape of its weight."""
        return self.placement.cut(self.name, whole.view(self.shape))

    def whole(self, piece: Tensor) -> Tensor:
        """Return the mask (rows, numbers of a row) that has this piece, and False in the place of others'."""
        count = math.prod(self.shape)
        index = self.placement.cut(self.name, torch.arange(count, device=piece.device).view(self.shape))
        flat = torch.zeros(count, dtype=torch.bool, device=piece.device)
        return masks.matrix(flat.index_copy(0, index.flatten(), piece.flatten()).view(self.shape))


@attrs.frozen(eq=False)
class PrunedWeights:
    """The view: weights times their masks; and the rule of the slot of masks."""

    patterns: tuple[str, ...]
    excluded: tuple[str, ...]
    block: Block
    schedule: Schedule
    slot: str
    draws: ClassVar = False

    def init(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
        """Return masks of weights that all stay, by name, (rows, words). Raises `StateError` for no weights."""
        out = tree.match(self.excluded, shapes, what="prune_weights")
        names = tree.match(self.patterns, shapes, what="prune_weights") - out
        weights = {name: shapes[name] for name in sorted(names) if len(shapes[name]) > 1}
        for name, shape in weights.items():
            if not self.block.fits(shape):
                raise StateError(
                    "a weight is not made of blocks",
                    where=name,
                    got=f"{shape}, block={self.block}",
                    want="a multiple of the block, rows and numbers of a row; or excluded=... with this one",
                )
        if not weights:
            raise StateError(
                "prune_weights: patterns choose no weight",
                got=tree.named([*self.patterns]),
                want="one of two or more dims: vectors, such as biases, are left alone",
            )
        sizes = {name: (shape[0], -(-math.prod(shape[1:]) // masks.BITS)) for name, shape in weights.items()}
        return {name: torch.full(size, ALL, dtype=torch.int64, device=device) for name, size in sizes.items()}

    def accept(self, slot: Any, noted: Any, call: Call) -> Any:
        """Return the masks that were made in a call, and where none was the old ones."""
        return tree.map(lambda old, new: torch.where(new >= 0, new, old), slot, noted)

    def __call__(self, x: Tensor, leaf: Leaf, call: Call) -> Tensor:
        """Return a weight times its mask, and what is none of the weights as it is."""
        if leaf.name not in call.slots[self.slot] or call.calls < self.schedule.start:
            return x
        return x * self.mask(x, leaf, call).view(x.shape)

    def mask(self, x: Tensor, leaf: Leaf, call: Call) -> Tensor:
        """Return the mask of a weight in this call, 0 and 1; note it where it is looked at."""
        if call.dimensions.local is not None:
            raise ComposeError(
                "prune_weights makes one mask, and ranks have parameters of their own",
                where=leaf.name,
                got="local_updates",
                want="prune_weights, or local_updates",
            )
        piece = Piece.of(leaf, call, self.block.of if self.block.keep else 0)
        shape = leaf.shape if piece is None else piece.shape
        mask = masks.unpack(call.slots[self.slot][leaf.name], math.prod(shape[1:]))
        mask = mask if piece is None else masks.matrix(piece.cut(mask))
        if self.schedule.is_look(call.calls):
            mask = self.look(x.detach(), mask.bool(), call)
            call.note(self.slot, leaf.name, masks.pack(mask if piece is None else piece.whole(mask)))
        if self.schedule.offset > self.schedule.start:  # it is there already
            mask = mask.bool() | (call.step < self.schedule.offset)
        return mask

    def look(self, x: Tensor, old: Tensor, call: Call) -> Tensor:
        """Return the mask of a weight in a call in which it is looked at, bool (rows, numbers of a row)."""
        count = 0 if self.block.keep else self.block.count(tuple(x.shape))
        kept = self.schedule.num_kept(call.step, count)
        final = masks.num_kept(self.schedule.density, count) * self.block.of * self.block.across
        if self.block.keep:
            final = x.numel() // self.block.of * self.block.keep
        return self.schedule.current(call.step, old, final, lambda: self.block.mask(x.abs(), kept))


@transform(several=True, initial=FLAG, name=WORD)
def prune_weights(
    *patterns: str,
    density: float | None = None,
    block: str | None = None,
    offset: int = 0,
    end: int | None = None,
    stride: int = 1,
    curve: Curve = "cubic",
    initial: bool = False,
    excluded: Sequence[str] = (),
    name: str = "pruned_weights",
):
    """Multiply weights that the loss sees by masks: the smallest become 0, and have no gradient.

    A mask keeps the ceil(density n) largest magnitudes of the n numbers of a weight; of equal ones the first in memory.
    It is made when `offset` updates are applied and stays, or is made again each `stride` updates until `end`, with
    densities that fall from 1 to `density`. The numbers under it stay in the state as they are, and follow the
    optimizer's weight decay and momentum alone. `fds.bake` writes the weights that the loss saw.

    Where skipped steps put updates behind calls, a mask may be made later: see `docs/compression.md`.

    Args:
        patterns: of names of parameters (`*` crosses dots); of these, the ones of two or more dims.
        density: the share of numbers, or of blocks, that stays: 0 < density <= 1. None where `block` is such as "2:4".
        block: "4x1": 4 rows of a column stay or go together, by the sum of their magnitudes; "2:4": of each 4 numbers
            of a row the 2 largest stay; None: single numbers. A row is what makes one output, of a convolution too.
        offset: updates before masks are in use.
        end: updates after which masks stay as they are; None: `offset`.
        stride: updates from one mask to the next.
        curve: of densities, "cubic" or "exponential": `fds.compression.masks.density_at` has the formulas.
        initial: take the mask of the weights as they are in the first call, in use from `offset` on.
        excluded: patterns of names that are left alone.
        name: of the slot; another one where this stands twice.

    Raises `ComposeError` for anything else, where ranks have parts of what is compared (a tensor axis, unless for
    "2:4"), with `local_updates`, and where a graph is made of the step; `StateError` at init for patterns that match
    no weight, and for weights that are not made of blocks.
    """
    names, out = patterns_of(patterns, "prune_weights"), patterns_of(excluded, "prune_weights", "excluded")
    try:
        kind = Block.parse(block)
    except FdsError as error:
        raise ComposeError(f"prune_weights: {error.what}", where="block", got=error.got, want=error.want) from None
    share = kind.keep / kind.of if kind.keep and density is None else density
    if not masks.is_share(share) or (kind.keep and (density is not None or end not in (None, offset))):
        raise ComposeError(
            "prune_weights takes the share that stays",
            where="density",
            got=f"density={density!r}, block={block!r}, end={end!r}",
            want='0 < density <= 1; or block="2:4", which has a density and no end',
        )
    assert share is not None
    schedule = Schedule.of(share, offset, end, stride, curve, initial=initial, where="prune_weights")
    view = PrunedWeights(names, out, kind, schedule, name)

    def apply(step: Step) -> Step:
        return fill(
            step,
            view=view,
            memory=Memory(name, view.init, "named", merge="max", accept=view.accept),
            instead=f"prune_weights(..., name={name + '_2'!r})",
            hint="give one of them another name",
        )

    return apply
