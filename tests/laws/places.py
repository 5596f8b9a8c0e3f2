"""Places: where a program runs that saves and loads, drawn; what fits a problem, and its rows of a batch there."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import strategies as st

import fds
from fds import plans
from tests.laws.problems import Problem
from tests.laws.test_law_4_sharding import batch_of, share
from tests.storage.topologies import Stages, Topology, topologies


@attrs.frozen
class Place:
    """Where a program runs: on ranks that share the optimizer, or in a pipeline where the problem has the layers."""

    sharded: Topology
    piped: Stages | None
    microbatches: int  # of each rank, outside a pipeline

    def fit(self, problem: Problem) -> Place:
        """Return this place, without a pipeline that the problem has no layers for."""
        layers = len(problem.loss) if isinstance(problem.loss, fds.Layers) else 0
        stages = 0 if self.piped is None else self.piped.places * (2 if self.piped.schedule is plans.zb_v else 1)
        return self if stages <= layers else attrs.evolve(self, piped=None)

    def transforms(self) -> list[Any]:
        """Return the transforms, on a rank."""
        if self.piped is not None:
            return self.piped.transforms()
        return [fds.accumulate(self.microbatches), self.sharded.shard()]

    def batch(self, problem: Problem, step: fds.Step) -> Any:
        """Return this rank's rows, two for each of its microbatches."""
        shard = step.shard
        index, count = (0, 1) if shard is None else (shard.data.index, shard.data.size)
        rows = 2 * self.microbatches * count if self.piped is None else 2 * self.piped.microbatches
        return share(batch_of(problem, rows), index, count)


@st.composite
def pipelines(draw) -> Stages:
    """Draw a pipeline over at most five ranks, some of them beside data ranks, or in one process."""
    schedule = draw(st.sampled_from([plans.gpipe, plans.one_f_one_b, plans.zb_h1, plans.zb_v]))
    places, data, copies = draw(st.sampled_from([(1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1), (5, 1, 1)]))
    partition = draw(st.sampled_from(["uniform", "parameters"]))
    size = draw(st.sampled_from([64, 300, 2**20]))
    alone = places > 1 and data * copies == 1 and draw(st.booleans())
    return Stages(places, schedule, data, draw(st.integers(0, 3)), copies, size, partition, alone)


PLACES = st.builds(Place, topologies(), st.none() | pipelines(), st.sampled_from([1, 1, 2, 3]))
