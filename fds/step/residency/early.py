"""Speculation: slices that live elsewhere are updated in backward, before the step knows its norm, or what it skips.

What the step decides is taken for granted: that which it would do with gradients of norm 0, which nothing clips and
which are finite. Once it has decided, numbers say whether that was right. If not, all that was updated ahead is updated
again, from the old values: what is written ahead is never the old state's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import ComposeError
from fds.optim import Optimizer
from fds.step.all_stations import Stations
from fds.step.gradients import Gradients
from fds.step.new_leaves import Apart, pooled
from fds.step.ranges import profiled
from fds.step.residency.chunks import is_separate
from fds.step.residency.contract import Deferred, put_off
from fds.step.residency.in_chunks import InChunks
from fds.step.residency.lives import Column
from fds.step.residency.visit import Chunk, Visit, chunks_of_leaves
from fds.step.seeds import guesses
from fds.step.totals import Decision, Totals
from fds.step.update import Setup, Update


@attrs.frozen(eq=False)
class Granted:
    """What an update in backward takes for granted: what the step decides of the optimizer's arguments."""

    scale: Tensor | None = None  # what the summed gradients are too large by, () float64; None is 1
    skip: Tensor | None = None  # whether the update is skipped, () bool; None where it cannot be


@attrs.define(eq=False)
class Early(InChunks):
    """The update of one call that begins in backward: chunks are updated as soon as their gradients are complete."""

    granted: Granted | None = None
    visit: Visit | None = None

    def __attrs_post_init__(self) -> None:
        self.step.chunks(self.setup.tensors.structure)  # on which all ranks agree
        with put_off(self.setup.residency):
            self.apart = self._leaves_apart()
        self.expects, self.tells = (self.expect,), self.tell

    def expect(self, global_totals: Totals, mine: Totals, predivide: float) -> None:
        """Take for granted what the totals of all ranks lead to, and begin visits; `mine` are this rank's."""
        assert self.store is not None
        step, setup, wide = self.step, self.setup, self.store.wide
        if isinstance(setup.residency, Deferred) and setup.residency.failed:  # there may be no memory to update
            return
        norm = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=setup.call.device)
        decides = step.skips or guesses(mine)
        decision = Decision.of(global_totals, norm, setup.scale, predivide, setup.call.device, decides=decides)
        silent = attrs.evolve(setup, call=setup.call.keeping())
        scale = Update(step, silent).mapped(Gradients([], decision.scale, decision.norm)).scale
        self.granted = Granted(scale, decision.skip)
        # float64 gradients need the digits of a scale: it is divided out before the update
        narrow = None if scale is None or wide else scale.to(torch.float32)
        rule = self.rule(narrow, decision.skip, scale if wide else None)
        self.visit = Visit(self._chunks_ahead(), rule, lambda: None)

    def tell(self, grads: Mapping[int, Tensor]) -> None:
        """Take gradients that are complete, and update what waits for nothing else."""
        if self.visit is None:  # of a call that fails
            return
        with torch.no_grad(), profiled("optimizer"):
            self.visit.tell(grads)

    def complete(self, sums: list[Tensor]) -> list[Tensor]:
        """Return all sums where they live, once they are there, and what was updated too."""
        sums = super().complete(sums)
        self._let_go()
        if self.visit is not None:
            assert self.visit.at == len(self.visit.chunks)
            self.visit.settle()
        return sums

    def close(self) -> None:
        """Wait for what is read and written, whatever comes of it."""
        super().close()
        self._let_go()
        if self.visit is not None:
            self.visit.close()

    def _let_go(self) -> None:
        """Forget the methods that backward calls: without a cycle memory is free at once."""
        self.expects, self.tells = (), None

    def mapped(self, grads: Gradients) -> Gradients:
        """Return what all maps make of gradients, and know whether the step decides otherwise, or has changed them."""
        leaves, versions = grads.leaves, list(map(tree.version_of, grads.leaves))
        grads = super().mapped(grads)
        written = versions != list(map(tree.version_of, leaves))
        changed = written or any(x is not y for x, y in zip(grads.leaves, leaves, strict=True))
        failed = torch.full((), changed, dtype=torch.bool, device=self.setup.call.device)
        granted = Granted(grads.scale, self.skip) if self.granted is None else self.granted
        for mine, other in ((granted.scale, grads.scale), (granted.skip, self.skip)):
            failed |= mine is not other if mine is None or other is None else mine != other
        self.failed = failed
        return grads

    def again(self, ahead: list[Chunk]) -> list[Chunk]:
        """Return all chunks that were updated ahead where the step has decided otherwise.

        Else those that were updated before more was added to their gradients, as ranks that take other paths do.
        """
        if self.visit is None or not self.visit.chunks:
            return []
        stale = self.visit.stale
        return ahead if bool(self.failed) else [x for x in ahead if any(piece.index in stale for piece in x.pieces)]

    def _leaves_apart(self) -> Apart:
        """Return memory for the leaves that are updated ahead: the pool's, with anything in it."""
        lives, structure = self.lives, self.setup.tensors.structure
        leaves = [*structure.pick(self.setup.tensors.parts), *self.setup.tensors.opt]
        index = [i for i in range(len(leaves)) if lives.apart and lives.apart[i]]
        old = [leaves[i] for i in index]
        tensors, buffers = pooled(lives, self.step.runtime.ahead, index, old, (structure, lives.device), leaves)
        parts = (tensors, buffers.flat, [x.reshape(-1) for x in old])
        return Apart(*(dict(zip(index, by_index, strict=True)) for by_index in parts))

    def _chunks_ahead(self) -> list[Chunk]:
        """Return the chunks that are updated ahead, in the order in which backward completes them."""
        structure, apart = self.setup.tensors.structure, self.apart
        assert apart is not None
        n = len(structure.trained)
        count = n + sum(len(want.names) for want in structure.opt.values())

        def columns(leaves: dict[int, Tensor]) -> list[Column]:
            leaves_or_none: list[Tensor | None] = [leaves.get(i) for i in range(count)]
            return [leaves_or_none[:n], *structure.align(leaves_or_none[n:]).values()]

        new, old = columns(apart.flat), columns(apart.old)
        return chunks_of_leaves(self.lives, new, old, self.step.chunks(structure), ahead=True)[::-1]


def open_update(step: Stations, setup: Setup) -> Update:
    """Return the update of a call, by where leaves live and whether they are updated in backward."""
    if step.place.speculate:
        return Early(step, setup)
    return (InChunks if setup.residency.kinds else Update)(step, setup)


def check_speculation(conditions: Sequence[Any], optimizer: Optimizer, *, in_turn: bool, communicates: bool) -> None:
    """Raise `ComposeError` for a step that has nothing to update before it has decided, or could not take it back.

    Args:
        conditions: the gradient maps.
        optimizer: of the step.
        in_turn: whether microbatches run one after another.
        communicates: whether ranks hold slices, about which an optimizer that is not elementwise asks them.
    """
    changing = next((map_ for map_ in conditions if getattr(map_, "needs", None) != "norm"), None)
    if changing is not None:
        got = getattr(changing, "__name__", None) or repr(changing)
        raise _refused("gradients are changed once all are there", got, "maps of the norm, as clip_by_global_norm")
    if not is_separate(optimizer):
        raise _refused("the optimizer updates all slices at once", repr(optimizer), "one that treats each by itself")
    if communicates and optimizer.elementwise is False:
        raise _refused("the optimizer asks other ranks", repr(optimizer), "one that treats every element by itself")
    if not in_turn:
        raise _refused("stages end their backwards at several times", "pipeline(...)", "a step without a pipeline")


def _refused(why: str, got: str, want: str) -> ComposeError:
    return ComposeError(
        f"nothing can be updated before the step has decided: {why}",
        where="station 'place', speculate",
        got=got[:200],
        want=want,
        hint="speculate=False",
    )
