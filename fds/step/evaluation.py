"""Evaluation: the same parameters for many batches, no gradients, metrics shared over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fds import loss as losses
from fds.errors import LossError
from fds.state import State
from fds.step.agreement import same_composition
from fds.step.check import graphless, usable
from fds.step.parameters import open_parameters
from fds.step.stations import chosen_kernels
from fds.step.totals import agree


def evaluator(step: Any, state: State) -> Callable[..., dict[str, Tensor]]:
    """Return a function of the batch; see `Step.evaluator`. Parameters are gathered once, at stage 3 when used."""
    same_composition(step)
    usable(state, "evaluate")
    structure, parts = step.structure_of(state.params)
    waits = step.order("evaluate", structure) is not None
    kept = None if waits else open_parameters(step.gather, structure, parts, step.pool, train=False, order=None)

    @graphless
    def evaluate(batch: Any, *, outputs: bool = False) -> dict[str, Tensor]:
        state.check("evaluate")
        order, everyone, shard = step.order("evaluate", structure), step.everyone, step.reduce.shard
        params = kept or open_parameters(step.gather, structure, parts, step.pool, train=False, order=order)
        try:
            with chosen_kernels(step):
                totals, shown = step.grads.forward(step, state, params, batch, order, outputs=outputs)
        finally:
            params.close()
            if order is not None:
                order.joins.clear()
        if outputs and not shown:
            raise LossError(
                "this loss shows no outputs", where=losses.name(step.eval_loss), got="outputs=True",
                want="Layers, or a loss that calls what fds.functional returned",
                hint="return what you want to see as a metric",
            )  # fmt: skip
        if everyone is not None:
            totals, _, _ = agree(totals, None, {}, everyone, shard and shard.data, calls=int(state.calls))
        return {**totals.means(), "step": state.step.clone(), **({"outputs": shown[0]} if outputs else {})}

    return evaluate
