"""Law 10: a plan does all work once, prints and parses back, and holds in a run what the simulator says it holds."""

import weakref
from collections import Counter

import attrs
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import fds
from fds import plans
from fds.errors import PlanError
from fds.plans import Op, Plan
from tests.pipeline import pipelined, schedules
from tests.plans import cases


@given(schedules(6, 6))
def test_every_stage_does_every_microbatch_once(drawn):
    plan = drawn.plan
    done = Counter(
        (a.stage, op, a.microbatch)
        for row in plan.rows
        for a in row
        for op in ((Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if a.op is Op.BACKWARD else (a.op,))
    )
    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    every = {(s, op, i) for s in range(plan.num_stages) for op in ops for i in range(plan.num_microbatches)}
    assert done == dict.fromkeys(every, 1)
    assert plans.validate(plan) is plan
    assert plans.validate(plans.assign_buffers(plans.overlap(plans.communicate(plan))))


@given(schedules(6, 6))
def test_a_plan_is_what_it_prints(drawn):
    for plan in cases.passes(drawn.plan).values():
        assert Plan.parse(str(plan)) == plan


@given(schedules(6, 6), st.data())
def test_the_stated_bound_is_the_smallest_one(drawn, data):
    peaks = list(plans.simulate(drawn.plan).peak_live)
    assert peaks == cases.peaks(drawn.plan, "W")
    plans.validate(drawn.plan, memory_bound=peaks)
    rank = data.draw(st.integers(0, len(peaks) - 1))
    peaks[rank] -= 1
    with pytest.raises(PlanError, match="memory bound"):
        plans.validate(drawn.plan, memory_bound=peaks)


class Graph:
    """Stands for the graph of one forward: it lives as long as anything that the graph keeps."""


class Watch:
    """Which graphs there are on each rank, as autograd lets go of them."""

    def __init__(self, placement):
        self.placement = placement
        self.alive = {rank: weakref.WeakSet() for rank in placement.values()}
        self.peaks = dict.fromkeys(self.alive, 0)

    def __deepcopy__(self, memo):
        return self  # a loss copies its layers

    def enter(self, stage):
        """Return the hooks of a forward's graph."""
        rank, graph = self.placement[stage], Graph()
        self.alive[rank].add(graph)
        self.peaks[rank] = max(self.peaks[rank], len(self.alive[rank]))
        return saved_tensors_hooks(lambda x: (x.detach(), graph), lambda kept: kept[0])


class Watched(nn.Linear):
    """A linear layer, whose input is kept for W and whose weight for B."""

    def __init__(self, watch, stage):
        super().__init__(4, 4)
        self.watch, self.stage = watch, stage

    def forward(self, x):
        with self.watch.enter(self.stage):
            return super().forward(x)


def run_watched(drawn, axis):
    """Train once; return the peaks of graphs that were alive on each rank, and the recording."""
    plan = drawn.plan
    watch = Watch(plan.placement)
    layers = [part for s in range(plan.num_stages) for part in (fds.LayerSpec(Watched, watch, s), torch.tanh)]
    partition = [2 * s for s in range(plan.num_stages + 1)]
    step = fds.compose(pipelined(drawn, axis, partition), fds.sgd(0.1))(fds.Layers(layers, nn.MSELoss()))
    state = step.init(step.loss.init, key=0)
    x = torch.ones(plan.num_microbatches, 4)
    with plans.record() as recording:
        step(state, (x, x))
    assert not any(watch.alive.values())  # all graphs are gone
    return watch.peaks, recording.json()


@given(schedules(4, 6))
def test_ranks_hold_as_many_graphs_as_the_simulator_says(drawn):
    """Between its forward and the end of W: counted is what autograd keeps, not what the plan says."""
    want = plans.simulate(drawn.plan).peak_live
    results = fds.simulate(lambda: run_watched(drawn, fds.mesh(pp=-1)["pp"]), drawn.plan.num_ranks)
    assert tuple(peaks[rank] for rank, (peaks, _) in enumerate(results)) == want
    told = plans.joined(recording for _, recording in results)
    assert told.peak_live == want
    done = tuple(tuple(attrs.evolve(event.action, buffer=None) for event in row) for row in told.rows)
    assert done == drawn.plan.rows


@given(schedules(4, 6))
def test_one_process_holds_for_every_rank_as_many_graphs_as_the_simulator_says(drawn):
    peaks, _ = run_watched(drawn, None)
    assert tuple(peaks[rank] for rank in sorted(peaks)) == plans.simulate(drawn.plan).peak_live
