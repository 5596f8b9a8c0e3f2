"""`fds.memory_breakdown`: what was in use in which part, no other bit, and the key of a JSON."""

from unittest import mock

import pytest
import torch

import fds
from fds.errors import FdsError
from fds.step.ranges import clocked, profiled
from fds.timing import PartMemory, _memory_breakdown
from tests.bits import assert_same_bits
from tests.unit.step.problem import BATCH, make, make_params


class Allocator:
    """What torch's allocator of a GPU says: bytes now, and the most since it was reset."""

    def __init__(self):
        self.now = self.most = 100

    def hold(self, n):
        self.now += n
        self.most = max(self.most, self.now)

    def reset(self, device):
        self.most = self.now

    def patched(self):
        return mock.patch.multiple(
            "torch.cuda",
            memory_allocated=lambda device: self.now,
            memory_reserved=lambda device: 1000,
            max_memory_allocated=lambda device: self.most,
            reset_peak_memory_stats=self.reset,
        )


def test_each_part_has_its_own_peak_and_what_is_left_when_it_ends():
    allocator = Allocator()
    gauge = _memory_breakdown.Gauge(torch.device("cuda", 0))
    with allocator.patched(), clocked(gauge), gauge.range("other"):
        with profiled("forward", stage=0, microbatch=0):
            allocator.hold(50)
        with profiled("backward"):
            allocator.hold(200)
            allocator.hold(-210)
            with profiled("reduce"):
                allocator.hold(500)
                allocator.hold(-500)
            allocator.hold(5)
        with profiled("forward"):
            allocator.hold(1)
    found = gauge.parts()
    assert found.parts == {
        "forward": PartMemory(146, 1000, 150),
        "backward": PartMemory(145, 1000, 350),
        "reduce": PartMemory(140, 1000, 640),
        "other": PartMemory(146, 1000, 150),
    }
    assert list(found.parts) == ["forward", "backward", "reduce", "other"]
    assert str(found).splitlines()[0].split() == ["memory", "(MB)", "allocated", "reserved", "peak"]


@pytest.mark.parametrize("stage", [None, 3])
def test_a_step_that_is_measured_and_timed_is_bit_for_bit_the_one_that_is_not(stage):
    def run():
        shard = [] if stage is None else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)]
        step = make(*shard)
        plain = watched = step.init(make_params())
        memory, timed = fds.memory_breakdown(every=2), fds.timed()
        assert memory.metrics() == {}
        for i in range(2):
            plain, _ = step(plain, BATCH)
            with timed(watched), memory(watched):
                watched, _ = step(watched, BATCH)
            assert (memory.last is None) == (i == 0)  # the second call
        assert_same_bits(watched.params, plain.params)
        assert timed.last.parts["forward"] > 0  # two clocks are told of the same ranges
        return memory

    for memory in fds.simulate(run, 1 if stage is None else 2):
        assert {"gather", "forward", "backward", "optimizer", "other"} <= memory.last.parts.keys()
        assert memory.metrics()["memory_bytes_forward_peak"] >= memory.metrics()["memory_bytes_forward_allocated"] > 0


def test_wrong_arguments_are_refused():
    for wrong in (lambda: fds.memory_breakdown(every=0), lambda: fds.memory_breakdown(every="all")):
        with pytest.raises(FdsError) as refused:
            wrong()
        assert refused.value.where == "memory_breakdown, every"
    with pytest.raises(FdsError), fds.memory_breakdown()(None):
        pass


def test_memory_breakdown_measures_the_calls_that_are_printed():
    mesh, json_ = fds.mesh(dp=1), {"train_batch_size": 8, "memory_breakdown": True}
    of = lambda some: fds.config.TrainingConfig.of(some).memory_breakdown(mesh)
    assert of({"train_batch_size": 8}).every is None
    assert of(json_).every == 1 and of({**json_, "steps_per_print": 10}).every == 10
    none, step = of({"train_batch_size": 8}), make()
    with none(state := step.init(make_params())):
        step(state, BATCH)
    assert none.last is None
    assert "config.memory_breakdown(mesh)" in fds.config.TrainingConfig.of(json_).explain(mesh)
