"""Masks of several weights that are made together, by one threshold for the blocks of all of them.

They are made where all weights are there: after an update, of its parameters, for the next call.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds import reading
from fds.compression import masks
from fds.compression.masks import Block
from fds.compression.pieces import Piece, shapes_of, wholes
from fds.compression.schedule import Schedule
from fds.errors import ComposeError
from fds.step import Call


@attrs.frozen(eq=False, repr=False)
class Together:
    """In the station `after`: the largest blocks of all weights stay, but at least a share of each weight.

    Attributes:
        slot: of the masks, by the names of the weights.
        suffix: what is added to a weight's name in that of its scores; "" where these are its magnitudes.
        block: what stays or goes together.
        schedule: when masks are made, and how many blocks of all stay.
        least: the share of the blocks of each weight that stays.
    """

    slot: str
    suffix: str
    block: Block
    schedule: Schedule
    least: float
    draws: ClassVar = False

    def __repr__(self) -> str:
        return f"masks in {self.slot} of all weights together"

    def check(self, call: Call) -> None:
        """Raise `ComposeError` where nobody has all weights, or where the host does not count calls."""
        apart = [x for x in call.dimensions.entries if x.axis is not None and x.axis.size > 1 and x.placement.owns]
        if apart or call.dimensions.local is not None:
            raise ComposeError(
                "ranks have weights of their own, and these are compared with all others",
                where='prune_weights(scope="global")',
                got=", ".join(f"{x!r:.60}" for x in apart) or "local_updates",
                want='scope="local": each weight is compared by itself',
            )
        if call.training:
            _ = call.calls  # raises in a graph, which would do the same in every call

    def __call__(self, slot: dict[str, Tensor], params: Any, skip: Tensor | None, call: Call) -> dict[str, Tensor]:
        """Return the masks for the next call, by name, (rows, words)."""
        if not self.schedule.is_look(call.calls + 1):
            return slot
        step = call.step + (1 if skip is None else ~skip)
        shapes = {name: Piece.of(name, shape, call).shape for name, shape in shapes_of(params) if name in slot}
        sizes = {name: self.block.count(shape) for name, shape in shapes.items()}
        total = sum(sizes.values())
        final = masks.num_kept(self.schedule.density, total) * self.block.of * self.block.across
        columns = {name: math.prod(shape[1:]) for name, shape in shapes.items()}
        kept = torch.stack([masks.unpack(words, columns[name]).sum() for name, words in slot.items()]).sum()
        due = self.schedule.is_due(step, kept, final)
        due = due if skip is None else due & ~skip
        if reading.is_free(due) and not due:  # on every rank alike
            return slot
        scores: dict[str, Tensor] = {}
        for source, x in wholes(params, {name + self.suffix for name in slot}, call):
            scores[source.removesuffix(self.suffix)] = self.block.scores(x if self.suffix else x.abs())
        flat = torch.cat([self.kept_first(scores[name]).flatten() for name in slot])
        stay = masks.largest(flat, self.schedule.num_kept(step, total)).split([sizes[name] for name in slot])
        made = {
            name: masks.pack(self.block.numbers(x.view(scores[name].shape))) for name, x in zip(slot, stay, strict=True)
        }
        return {name: torch.where(due, made[name], old) for name, old in slot.items()}

    def kept_first(self, scores: Tensor) -> Tensor:
        """Return the scores of a weight's blocks, of which the largest are infinite: as many as stay in any case."""
        stays = masks.largest(scores, masks.num_kept(self.least, scores.numel()))
        return scores.masked_fill(stays, math.inf)
