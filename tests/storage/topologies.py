"""Runs on some ranks, at some stage, in buckets of some size; and what all ranks hold, by the plain state's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from hypothesis import strategies as st
from torch import Tensor

import fds
from fds import plans, tree
from fds.layout import Sharded
from fds.step import Whole
from tests.laws.problems import OPTIMIZERS, TRANSFORMS, Problem, make


@attrs.frozen
class Topology:
    """How many ranks share the state, and how."""

    ranks: int
    stage: int
    bucket_bytes: int = 2**20
    replicas: int = 1  # of which every slice has so many copies
    persist_below: int = 0

    def shard(self) -> Any:
        """Return the transform, on a rank."""
        mesh = fds.mesh(copies=self.replicas, dp=-1)
        copies = mesh["copies"] if self.replicas > 1 else None
        more = {"persist_below": self.persist_below} if self.stage == 3 else {}
        return fds.shard_optimizer(
            mesh["dp"], stage=self.stage, replicate=copies, bucket_bytes=self.bucket_bytes, **more
        )

    def run(self, body) -> list[Any]:
        """Return what `body()` returns on every rank."""
        return fds.simulate(body, self.ranks)


@attrs.frozen
class Stages:
    """How many places a pipeline has, and how many ranks share each of them, and how; or one process plays all."""

    places: int
    schedule: Any = plans.one_f_one_b
    data: int = 1
    stage: int = 1
    replicas: int = 1
    bucket_bytes: int = 300
    partition: Any = "parameters"
    alone: bool = False
    microbatches: int = 4  # of all ranks at a place together

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 if self.alone else self.places * self.data * self.replicas

    def transforms(self) -> list[Any]:
        """Return the transforms, on a rank."""
        each = self.microbatches // (self.data * self.replicas)
        if self.alone:
            return [fds.pipeline(self.schedule, self.places, num_microbatches=each, partition=self.partition)]
        mesh = fds.mesh(copies=self.replicas, pp=self.places, dp=self.data)
        cut = fds.pipeline(self.schedule, mesh["pp"], num_microbatches=each, partition=self.partition)
        if self.data * self.replicas == 1:
            return [cut]
        copies = mesh["copies"] if self.replicas > 1 else None
        sizes = {"bucket_bytes": self.bucket_bytes}
        return [cut, fds.shard_optimizer(mesh["dp"], stage=self.stage, replicate=copies, **sizes)]

    def run(self, body) -> list[Any]:
        """Return what `body()` returns on every rank."""
        return fds.simulate(body, self.ranks)


@st.composite
def topologies(draw) -> Topology:
    ranks = draw(st.integers(1, 5))
    replicas = 2 if ranks == 4 and draw(st.booleans()) else 1
    size = draw(st.sampled_from([64, 300, 2**20]))  # less than a parameter, than a layer, more than all
    return Topology(ranks, draw(st.integers(0, 3)), size, replicas, draw(st.sampled_from([0, 8])))


def compose(problem: Problem, optimizer: str, names: list[str], topology: Topology | None, *more: Any) -> fds.Step:
    """Compose by the names of tests/laws/problems, sharded on the ranks that run."""
    sharded = [] if topology is None else [topology.shard()]
    return make([n for n in names if n in TRANSFORMS], OPTIMIZERS[optimizer](), problem, *more, *sharded)


def train(step: fds.Step, state: fds.State, problem: Problem, calls: int) -> fds.State:
    """Return the state after so many calls, each rank with the problem's rows in an order of its own."""
    shard = step.shard
    shift = 0 if shard is None else shard.data.index
    for _ in range(calls):
        rolled = tree.map(lambda x: roll(x, shift), problem.batch)
        state, _ = step(state, rolled)
    return state


def roll(x: Any, shift: int) -> Any:
    return x if isinstance(x, Whole) or not isinstance(x, Tensor) or not x.dim() else x.roll(shift, 0)


def plain(state: fds.State, step: fds.Step) -> dict[str, Tensor]:
    """Gather all leaves of the plain state, by key path; collective, and not through fds.storage."""
    if not isinstance(state.params, Sharded):
        return {name: x.clone() for name, x in tree.paths(state).items()}
    layout, axis = state.params.layout, step.shard.axis

    def whole(slices: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for bucket in layout.buckets:
            if bucket.name in slices:
                flat = slices[bucket.name].new_empty(bucket.numel)
                axis.start_all_gather(flat, slices[bucket.name]).wait()
                found |= dict(zip((leaf.name for leaf in bucket.leaves), bucket.views(flat), strict=True))
        return found

    def user_tree(sharded: Any) -> Any:
        found = whole(sharded.buckets) if isinstance(sharded, Sharded) else None
        return sharded if found is None else layout.build([found[name] for name in layout.names])

    return tree.paths(
        attrs.evolve(
            state,
            params=user_tree(state.params),
            opt={slot: whole(slices) for slot, slices in state.opt.items()},
            slots={name: user_tree(slot) for name, slot in state.slots.items()},
        )
    )


def saved(dir: Path, make_step, problem: Problem, topology: Topology, calls: int) -> tuple[list, dict[str, Tensor]]:
    """Train and save on the ranks of a topology; return every rank's state, and the plain one."""

    def body():
        step = make_step(topology)
        state = train(step, step.init(problem.params, key=3), problem, calls)
        folder = fds.save(dir, state, step, extra={"rank": fds.mesh(dp=-1).rank})
        return state, plain(state, step), folder

    states, gathered, folders = zip(*topology.run(body), strict=True)
    assert len(set(folders)) == 1
    return list(states), gathered[0]
