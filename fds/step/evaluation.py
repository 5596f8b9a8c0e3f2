"""Evaluation: the same parameters for many batches, no gradients, metrics shared over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fds import loss as losses, random
from fds.errors import LossError
from fds.state import State
from fds.step.batch import Split
from fds.step.check import usable
from fds.step.parameters import open_parameters
from fds.step.totals import Totals, agree


def evaluator(step: Any, state: State) -> Callable[..., dict[str, Tensor]]:
    """Return a function of the batch; see `Step.evaluator`. Parameters are gathered once, at stage 3 when used."""
    usable(state, "evaluate")
    structure, parts = step.structure_of(state.params)
    open_ = lambda: open_parameters(step.gather, structure, parts, step.pool, train=False, order=step.order("evaluate"))
    kept = None if step.order("evaluate") is not None else open_()

    def evaluate(batch: Any, *, outputs: bool = False) -> dict[str, Tensor]:
        state.check("evaluate")
        (whole_batch,) = step.microbatches(batch, Split())
        seen: list = []
        (setting,) = step.settings(state, 1, evaluating=True, seen=seen)
        params = kept or open_()
        with random.scope(setting.devices), torch.no_grad():
            outcome = step.run_loss(step.eval_loss, params.tree, whole_batch, state.buffers, setting)
        params.close()
        totals, shard = Totals(), step.reduce.shard
        totals.add(outcome, losses.name(step.eval_loss))
        if outputs and not seen:
            raise LossError(
                "this loss shows no outputs", where=losses.name(step.eval_loss), got="outputs=True",
                want="Layers, or a loss that calls what fds.functional returned",
                hint="return what you want to see as a metric",
            )  # fmt: skip
        if shard is not None:
            totals, _, _ = agree(totals, None, {}, shard.data)
        return {**totals.means(), "step": state.step.clone(), **({"outputs": seen[0]} if outputs else {})}

    return evaluate
