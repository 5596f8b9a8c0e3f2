"""Evaluation: the same parameters for many batches, no gradients, metrics shared over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fds import loss as losses, random, tree
from fds.errors import LossError
from fds.state import State
from fds.step.batch import Split
from fds.step.check import usable
from fds.step.handles import materialize
from fds.step.parameters import open_parameters
from fds.step.reduce import same_metrics
from fds.step.totals import Totals, agree


def evaluator(step: Any, state: State) -> Callable[..., dict[str, Tensor]]:
    """Return a function of the batch; see `Step.evaluator`. Parameters are gathered once, at stage 3 when used."""
    usable(state, "evaluate")
    structure, parts = step.structure_of(state.params)
    waits = step.order("evaluate", structure) is not None
    kept = None if waits else open_parameters(step.gather, structure, parts, step.pool, train=False, order=None)

    def evaluate(batch: Any, *, outputs: bool = False) -> dict[str, Tensor]:
        state.check("evaluate")
        (whole_batch,) = step.microbatches(batch, Split())
        seen: list = []
        (setting,) = step.settings(state, 1, evaluating=True, seen=seen)
        order, totals, shard = step.order("evaluate", structure), Totals(), step.reduce.shard
        params = kept or open_parameters(step.gather, structure, parts, step.pool, train=False, order=order)
        try:
            with random.scope(setting.devices), torch.no_grad():
                outcome = step.run_loss(step.eval_loss, params.tree, whole_batch, state.buffers, setting)
                totals.add(outcome, losses.name(step.eval_loss))
                shown = tree.map(_plain, seen)
            if order is not None:
                order.finish()
        finally:
            params.close()
            if order is not None:
                order.joins.clear()
        if outputs and not seen:
            raise LossError(
                "this loss shows no outputs", where=losses.name(step.eval_loss), got="outputs=True",
                want="Layers, or a loss that calls what fds.functional returned",
                hint="return what you want to see as a metric",
            )  # fmt: skip
        if shard is not None:
            same_metrics(totals, shard.data, "evaluate", step.asked)
            totals, _, _ = agree(totals, None, {}, shard.data, calls=int(state.calls))
        return {**totals.means(), "step": state.step.clone(), **({"outputs": shown[0]} if outputs else {})}

    return evaluate


def _plain(x: Any) -> Any:
    """Return what can still be read when the parameters are gone."""
    return materialize(x) if isinstance(x, Tensor) else x
