"""How long a rank of a pipeline waits for the others, found from the costs of layers."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from fds import plans, tree
from fds.step import Step
from fds.transforms.pipeline.station import Pipeline


def waiting(step: Step, batch: Any) -> float:
    """Return the seconds in which this rank waits for other stages in a call: 0 where there is no pipeline.

    It is what the plan leaves idle with the measured costs of its layers, messages aside.
    """
    run = step.execute
    if not isinstance(run, Pipeline):
        return 0.0
    pairs = [x for x in tree.leaves(batch) if isinstance(x, Tensor)]
    rows = len(pairs[0]) // run.num_microbatches
    microbatch = tree.map(lambda x: x[:rows] if isinstance(x, Tensor) else x, batch)
    costs = plans.measure(run.owned.loss, microbatch).by_stage(run.owned.boundaries)
    if step.layer:  # recomputation, which runs forward again ahead of backward
        again = [costs.at("forward", s) + costs.at("backward_input", s) for s in range(run.owned.num_stages)]
        costs = attrs.evolve(costs, backward_input=again)
    line = plans.simulate(run.plan.plan, costs)
    return line.makespan - line.busy[run.owned.index]
