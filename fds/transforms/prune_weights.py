"""Prune single weights, or blocks of them.

Fills:  view, memory, after      State:  slot `pruned_weights` (or `name`): masks, 32 weights in a word of 8 bytes
Law:    the hand-written loop whose weights are multiplied by masks, made of weights or scores when the schedule says so
Cost:   a quarter of a byte a weight on every rank; a pass over the weights each microbatch; where a mask may be made
        a selection of the largest, and a message of a mask's size to other ranks, of the weights' size along a tensor
        axis and for the scope "global"; "topk" does so in each microbatch
Source: Zhu and Gupta 2017, arXiv:1710.01878; 2:4: Mishra et al. 2021, arXiv:2104.08378; "topk": Sanh et al. 2020,
        arXiv:2005.07683; "snip_momentum": Lee et al. 2019, arXiv:1810.02340
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.compression import Cut, masks
from fds.compression.masks import Block, Curve
from fds.compression.pieces import Piece, counts
from fds.compression.schedule import Schedule, chosen, is_chosen, patterns_of
from fds.compression.scores import SUFFIXES, dropped, summed
from fds.compression.together import Together
from fds.errors import FLAG, ComposeError, FdsError, Rule, StateError, is_number, slot_name
from fds.layout import Leaf
from fds.step import Call, Memory, Step, fill, transform

Method = Literal["l1", "topk", "snip_momentum"]
Scope = Literal["local", "global"]


@attrs.frozen(eq=False, repr=False)
class PrunedWeights:
    """The view: weights times their masks; and the rule of the slot of masks."""

    patterns: tuple[str, ...]
    excluded: tuple[str, ...]
    method: Method
    block: Block
    schedule: Schedule
    slot: str
    together: Together | None  # what makes the masks, where that is not the view
    draws: ClassVar = False

    def __repr__(self) -> str:
        others = ", all together" * (self.together is not None)
        return f"masks of {tree.named(self.patterns)} by {self.method}{others}: {self.schedule}"

    def init(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
        """Return masks of weights that all stay, by name, (rows, words). Raises `StateError` for no weights."""
        weights = chosen(shapes, self.patterns, self.excluded, "prune_weights")
        for name, shape in weights.items():
            if not self.block.fits(shape):
                raise StateError(
                    "a weight is not made of blocks",
                    where=name,
                    got=f"{shape}, block={self.block}",
                    want="a multiple of the block, rows and numbers of a row; or excluded=... with this one",
                )
            if self.method != "l1" and shapes.get(self.scores_of(name)) != shape:
                raise StateError(
                    "a weight has no scores",
                    where=name,
                    got=f"{self.scores_of(name)}: {shapes.get(self.scores_of(name))}",
                    want=f"a parameter of this name, {shape}",
                    hint="fds.compression.with_scores(module, ...) makes them",
                )
        if self.method == "topk":
            return {}  # each mask follows from its scores
        sizes = {name: (shape[0], -(-math.prod(shape[1:]) // masks.BITS)) for name, shape in weights.items()}
        return {name: torch.full(size, masks.ALL, dtype=torch.int64, device=device) for name, size in sizes.items()}

    def scores_of(self, name: str) -> str:
        """Return the name of the scores of a weight."""
        return name + SUFFIXES["weights"]

    def prunes(self, leaf: Leaf, shapes: Mapping[str, tuple[int, ...]] | None = None) -> bool:
        """Say whether a parameter is one of the weights, whatever the shapes of others are."""
        return len(leaf.shape) > 1 and is_chosen(leaf.name, self.patterns, self.excluded)

    def reads(self, leaf: Leaf, call: Call) -> Sequence[str]:
        """Return the name of what makes the mask of a parameter: its scores, or itself, as no other view changed it."""
        return [leaf.name if self.method == "l1" else self.scores_of(leaf.name)] if self.prunes(leaf) else []

    def __call__(self, x: Tensor, leaf: Leaf, call: Call, read: Mapping[str, Tensor]) -> Tensor:
        """Return a weight times its mask, and what is none of the weights as it is."""
        sums = self.method == "snip_momentum"
        if not (self.prunes(leaf) and x.is_floating_point()) or self.schedule.is_idle(call, self.slot):
            return x
        if tuple(x.shape) != leaf.shape:
            raise ComposeError(
                "prune_weights: a state holds a weight in another shape than its own",
                where=leaf.name,
                got=f"{leaf.shape} for {tuple(x.shape)}: another view encodes it",
                want="excluded=... with this one",
            )
        if self.together is not None:
            self.together.check(call)
        (scores,) = read.values()
        piece = Piece.of(leaf.name, leaf.shape, call)
        if self.method == "l1":
            return x * self.mask(piece, scores, call)
        mine = scores if scores.shape == x.shape else piece.cut(scores)  # those that no plan of an axis knows are whole
        if sums:  # what is masked already has no part in the loss
            mask = self.mask(piece, mine, call).to(x.dtype)
            return x * (mask * (1 + (summed(mine) - mine.detach())).to(x.dtype))
        kept = masks.num_kept(self.schedule.density, self.block.count(piece.shape))
        stay = self.block.mask(piece.whole(mine), kept).view(piece.shape)
        gate = masks.straight_through(piece.cut(stay), mine).to(x.dtype)
        return x * torch.where(call.step >= self.schedule.offset, gate, 1)

    def removed(self, params: Mapping[str, Tensor], call: Call) -> list[Cut]:
        """Return what of parameters, whole ones by name, an evaluation computes nothing with: scores."""
        weights = [n for n, x in params.items() if x.dim() > 1 and is_chosen(n, self.patterns, self.excluded)]
        return [dropped(self.scores_of(name), params) for name in weights if self.method != "l1"]

    def mask(self, piece: Piece, scores: Tensor, call: Call) -> Tensor:
        """Return this rank's piece of the mask of a weight in this call, 0 and 1; note the mask where it is looked at.

        `scores` are of the piece.
        """
        mask = masks.unpack(call.slots[self.slot][piece.name], math.prod(piece.shape[1:]))
        if self.together is None and call.is_due(self.slot):
            mask = self.look(piece, scores, mask.bool(), call)
            if counts(call):
                call.note(self.slot, piece.name, masks.pack(mask))
        return piece.cut(self.schedule.in_use(mask, call.step).view(piece.shape))

    def look(self, piece: Piece, scores: Tensor, old: Tensor, call: Call) -> Tensor:
        """Return the mask of a weight in a call in which it is looked at, bool (rows, numbers of a row)."""
        count = 0 if self.block.keep else self.block.count(piece.shape)
        kept = self.schedule.num_kept(call.step, count)
        final = masks.num_kept(self.schedule.density, count) * self.block.of * self.block.across
        if self.block.keep:
            final = math.prod(piece.shape) // self.block.of * self.block.keep

        def make() -> Tensor:
            whole = piece.whole(scores)
            return self.block.mask(whole.abs() if self.method == "l1" else whole, kept)

        return self.schedule.current(call.step, old, final, make)


@transform(
    several=True,
    method=Rule(get_args(Method).__contains__, ": there is no such method", ", ".join(map(repr, get_args(Method)))),
    scope=Rule(get_args(Scope).__contains__, ": there is no such scope", ", ".join(map(repr, get_args(Scope)))),
    least=Rule(lambda x: is_number(x) and 0 <= x <= 1, " is a share of what stays of each weight", "0 <= least <= 1"),
    initial=FLAG,
    name=slot_name("pruned_more"),
)
def prune_weights(
    *patterns: str,
    method: Method = "l1",
    scope: Scope = "local",
    density: float | None = None,
    least: float = 0.0,
    block: str | None = None,
    offset: int = 0,
    end: int | None = None,
    stride: int = 1,
    curve: Curve = "cubic",
    initial: bool = False,
    excluded: Sequence[str] = (),
    name: str = "pruned_weights",
):
    """Multiply weights that the loss sees by masks: where these are 0, so are the weights and their gradients.

    A mask keeps the ceil(density n) largest scores of the n numbers of a weight; of equal ones the first in memory. It
    is made when `offset` updates are applied and stays, or is made again each `stride` updates until `end`, with
    densities that fall from 1 to `density`. The numbers under it stay in the state as they are, and follow the
    optimizer's weight decay and momentum alone. `fds.bake` writes the weights that the loss saw.

    Where skipped steps put updates behind calls, a mask may be made later: see `docs/compression.md`.

    Args:
        patterns: of names of parameters (`*` crosses dots); of these, the ones of two or more dims.
        method: what scores are: "l1" the magnitudes of the numbers; "topk" parameters, which are trained as if their
            gradient were that of the mask, and make it in each microbatch from `offset` on; "snip_momentum" decaying
            sums of |weight * gradient|. Of the last two a weight's are the parameter `<name>_scores`, which
            `fds.compression.with_scores` makes; those that are sums have the optimizer `fds.compression.sensitivity`.
        scope: what is compared: "local" the numbers of each weight; "global" those of all weights that patterns choose,
            by one threshold for all of them, after an update, for the next call. Not of "topk", nor of "2:4".
        density: the share of numbers, or of blocks, that stays: 0 < density <= 1. None where `block` is such as "2:4".
        least: of the scope "global", the share of each weight's numbers, or blocks, that stays in any case.
        block: "4x1": 4 rows of a column stay or go together, by the sum of their scores; "2:4": of each 4 numbers of a
            row the 2 largest stay; None: single numbers. A row is what makes one output, of a convolution too.
        offset: updates before masks are in use.
        end: updates after which masks stay as they are; None: `offset`. Not of "topk".
        stride: updates from one mask to the next.
        curve: of densities, "cubic" or "exponential": `fds.compression.masks.density_at` has the formulas.
        initial: take the mask of the weights as they are in the first call, in use from `offset` on. Of "l1".
        excluded: patterns of names that are left alone.
        name: of the slot; another one where this stands twice.

    Where ranks have parts of a weight (a tensor axis), they send each other its scores in the calls that may make a
    mask; of "topk" in each microbatch. So do ranks with slices for the scope "global", a bucket at a time. That scope
    is a `ComposeError` in the first call where ranks have weights of their own (pipelines, experts, `local_updates`),
    and in a graph of the whole step.

    Raises `ComposeError` for anything else; `StateError` at init for patterns that match no weight, for weights without
    scores, and for weights that are not made of blocks.
    """
    names, out = patterns_of(patterns, "prune_weights"), patterns_of(excluded, "prune_weights", "excluded")
    try:
        kind = Block.parse(block)
    except FdsError as error:
        raise ComposeError(f"prune_weights: {error.what}", where="block", got=error.got, want=error.want) from None
    share = kind.keep / kind.of if kind.keep and density is None else density
    if (share is None) or (kind.keep and (density is not None or end not in (None, offset))):
        raise ComposeError(
            "prune_weights takes the share that stays",
            where="density",
            got=f"density={density!r}, block={block!r}, end={end!r}",
            want='0 < density <= 1; or block="2:4", which has a density and no end',
        )
    schedule = Schedule.of(share, offset, end, stride, curve, initial=initial, method=method, where="prune_weights")
    if scope == "global" and (method == "topk" or kind.keep or initial or not schedule.end):
        raise ComposeError(
            "prune_weights: weights are compared with each other after an update",
            where="scope",
            got=f"{scope=}, {method=}, {block=}, {initial=}, {offset=}, {end=}",
            want='method="l1" or "snip_momentum", no "2:4", initial=False, and an offset or an end above 0',
        )
    if least and (scope == "local" or least > share):
        raise ComposeError(
            "prune_weights: least is a share of each weight, of those that are compared with each other",
            where="least",
            got=f"{least=}, {scope=}, density={share!r}",
            want='scope="global", and at most density',
        )
    together = None
    if scope == "global":
        together = Together(name, "" if method == "l1" else SUFFIXES["weights"], kind, schedule, float(least))
    view = PrunedWeights(names, out, method, kind, schedule, name, together)

    def apply(step: Step) -> Step:
        rule = schedule.rule if together is None else {}
        return fill(
            step,
            view=view,
            **({} if together is None else {"after": together}),
            memory=Memory(name, view.init, "named", **rule),
            instead=f"prune_weights(..., name={name + '_2'!r})",
            hint="give one of them another name",
        )

    return apply
