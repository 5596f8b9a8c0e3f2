"""The station `grads`: from a batch to summed gradients. Where nobody fills it, one microbatch after another."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import autodiff, loss as losses, random, tree
from fds.collectives import Axis
from fds.step.buckets import Bucketed
from fds.step.gradients import global_norm
from fds.step.handles import materialize
from fds.step.order import Order
from fds.step.parameters import Parameters, open_parameters
from fds.step.ranges import profiled
from fds.step.reduce import same_metrics
from fds.step.seeds import Seeds
from fds.step.structure import Structure
from fds.step.sums import InPlace
from fds.step.totals import Totals, clamped, combined, placed


@attrs.define(eq=False)
class Found:
    """What came of a batch on this rank, before ranks agree on it."""

    totals: Totals
    leaves: list[Tensor]  # summed gradients of the trained parts
    used: list[bool]  # by trained parameter: whether a gradient came for it
    buffers: dict[str, Tensor]
    predivide: float = 1.0  # what they were divided by before they were sent
    wide: bool = False  # some rank's gradients are float64
    counted: list[bool] = attrs.field(factory=list)  # by leaf: whether its norm counts here; see `Dimensions.add_up`

    def norm(self, leaves: Sequence[Tensor] | None = None) -> Tensor:
        """Return the norm () of the leaves, or of what became of them, that count here."""
        pairs = zip(self.leaves if leaves is None else leaves, self.counted, strict=True)
        norm = global_norm([x if counts else x.new_empty(0) for x, counts in pairs])
        assert self.totals.loss is not None
        return (norm.double() if self.wide else norm).to(self.totals.loss.device)

    def norm_of_all(self, leaves: Sequence[Tensor], everyone: Axis) -> Tensor:
        """Return the norm () of these leaves on all ranks, the same on each."""
        own = self.norm(leaves)
        return clamped(combined(everyone.all_reduce(placed(own, everyone))), own.dtype)


class Grads(Protocol):
    """The station `grads`: how the loss is run with a batch, forward and backward."""

    @property
    def together(self) -> bool:
        """Whether all ranks that share the step have as many batches to evaluate."""
        ...

    def agreement(self) -> str:
        """Return in what the ranks that share the step must agree."""
        ...

    def __call__(
        self, step: Any, state: Any, structure: Structure, parts: list[Tensor], batch: Any, scale: Tensor | None
    ) -> Found:
        """Return the gradients of a batch, times `scale` / divisor, summed over microbatches and data ranks."""
        ...

    def forward(
        self, step: Any, state: Any, params: Parameters, batch: Any, order: Any, *, outputs: bool
    ) -> tuple[Totals, list]:
        """Evaluate a batch without gradients; with `outputs` return also a list of what the last layer returned."""
        ...


@contextlib.contextmanager
def training(
    setting: losses.Setting, params: Parameters, sums: InPlace | Bucketed, order: Order | None
) -> Iterator[None]:
    """Run forwards and backwards inside: gradients on, generators restored; then let go of what only they need."""
    with random.scope(setting.devices), autodiff.differentiated(), torch.enable_grad():
        try:
            yield
            if order is not None:
                order.finish()
        except BaseException:
            sums.close()
            raise
        finally:
            setting.mode.release()
            params.close()
            if order is not None:
                order.joins.clear()


@attrs.frozen
class InTurn:
    """Every rank holds all parameters, and runs its microbatches one after another, forward and backward."""

    together = False

    def agreement(self) -> str:
        """Return nothing."""
        return ""

    def __call__(
        self, step: Any, state: Any, structure: Structure, parts: list[Tensor], batch: Any, scale: Tensor | None
    ) -> Found:
        """Return the gradients of a batch."""
        totals, sums, buffers = self._run(step, state, structure, parts, batch, scale)
        used = sums.used()
        leaves = sums.finish()
        same_metrics(totals, step.everyone, "step", step.runtime.asked)
        return Found(totals, leaves, used, buffers, sums.predivide)

    def _run(
        self, step: Any, state: Any, structure: Structure, parts: list[Tensor], batch: Any, scale: Tensor | None
    ) -> tuple[Totals, InPlace | Bucketed, dict[str, Tensor]]:
        """Run every microbatch forward and backward.

        What only this needs (whole or low-precision parameters, microbatches, graphs) is gone before the update.
        """
        microbatches, where = step.microbatches(state, batch), losses.name(step.loss)
        settings = step.settings(state, len(microbatches))
        order = step.order("step", structure)
        params = open_parameters(step.gather, structure, parts, step.runtime.pool, train=True, order=order)
        kinds = [x.dtype for x in params.trained]
        sums = step.reduce.sums(structure, params.trained, step.sum.dtype, step.runtime.pool, order, kinds)
        seeds = Seeds.of(step, scale, len(microbatches), kinds, order)
        totals, buffers = Totals(), state.buffers
        with training(settings[0], params, sums, order):
            for i, (microbatch, setting) in enumerate(zip(microbatches, settings, strict=True)):
                outcome = step.run_loss(step.loss, params.tree, microbatch, buffers, setting)
                buffers = outcome.buffers
                if params.trained:
                    reentrant = step.demand_graph(outcome.total)
                    backward = functools.partial(
                        autodiff.backward_into, outcome.total, seeds.seed(outcome, microbatch), reentrant=reentrant
                    )
                    with profiled("backward"):
                        sums.add(backward, last=i + 1 == len(microbatches), in_parts=reentrant)
                    del backward
                totals.add(outcome, where)
                del outcome  # and its graph
                setting.mode.release()
        totals.divisor = seeds.divisor
        return totals, sums, buffers

    def forward(
        self, step: Any, state: Any, params: Parameters, batch: Any, order: Any, *, outputs: bool
    ) -> tuple[Totals, list]:
        """Evaluate a batch in one piece."""
        (whole_batch,) = step.microbatches(state, batch, 1, evaluating=True)
        seen: list = []
        (setting,) = step.settings(state, 1, evaluating=True, seen=seen)
        totals = Totals()
        with random.scope(setting.devices), torch.no_grad():
            outcome = step.run_loss(step.eval_loss, params.tree, whole_batch, state.buffers, setting)
            totals.add(outcome, losses.name(step.eval_loss))
            shown = tree.map(_plain, seen) if outputs else []
        if order is not None:
            order.finish()
        return totals, shown


def _plain(x: Any) -> Any:
    """Return what can still be read when the parameters are gone."""
    return materialize(x).detach() if isinstance(x, Tensor) else x
