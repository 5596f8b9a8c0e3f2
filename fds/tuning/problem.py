"""What is tuned: a loss, its parameters and a batch of all ranks; and a candidate of it as a step on a mesh."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Mesh
from fds.errors import FdsError
from fds.state import State
from fds.step import Step, compose
from fds.tuning.spaces import Candidate, Space


@attrs.frozen
class Problem:
    """A loss, what `step.init` takes, and the batch of a step of all ranks together; they pickle, as the space does."""

    space: Space
    loss: Any
    params: Any
    batch: Any
    device: str = "cpu"

    def step(self, candidate: Candidate, mesh: Mesh) -> Step:
        """Compose a candidate's step."""
        return compose(self.space.compose(mesh, **candidate.choices))(self.loss)

    def init(self, step: Step) -> State:
        """Return a state of a candidate's step."""
        with torch.device(self.device):
            return step.init(self.params, key=0)

    def share(self, candidate: Candidate, mesh: Mesh) -> Any:
        """Return the rows of the batch that this rank has: those of its place on the axis "dp". Raises `FdsError`."""
        count = candidate.axes.get("dp", 1)
        index = mesh["dp"].index if count > 1 else 0

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if x.dim() == 0 or len(x) % count:
                raise FdsError(
                    "the rows of the batch do not divide", got=str(tuple(x.shape)), want=f"a multiple of {count}"
                )
            return x.chunk(count)[index].to(self.device)

        return tree.map(cut, self.batch)
