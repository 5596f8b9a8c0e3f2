"""Summed gradients that live elsewhere: no bit changes, and backward holds two buckets of them."""

from typing import ClassVar

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

import fds
from fds.step import Gradients, fill, global_norm, transform
from tests.bits import assert_same_bits, snapshot
from tests.laws import problems as held
from tests.laws.mapped import Mapped, mapped
from tests.laws.places import PLACES, Place
from tests.laws.test_law_11_residency import bad, same_run
from tests.memory import peak_bytes
from tests.storage.topologies import Topology

ALL = ("gradients", "opt", "params", "slots")


@attrs.frozen
class Centered:
    """A gradient map that reads all leaves at once, and draws."""

    draws: ClassVar = True
    takes_slices: ClassVar = True

    def __call__(self, grads, call):
        """Write a fraction of the norm of all leaves into them, from the last leaf on, and noise."""
        grads = attrs.evolve(grads.measured(), norm=None)
        for leaf in grads.leaves[::-1]:
            leaf.add_(1e-3 * torch.rand_like(leaf))
        return Gradients([leaf * 2 for leaf in grads.leaves], grads.scale)


@transform
def centered():
    return lambda step: fill(step, condition=Centered())


MAPS = st.lists(
    st.sampled_from([lambda: fds.clip_by_value(1e-3), lambda: fds.clip_by_global_norm(0.1), centered]), max_size=3
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples * 3 // 8)
@given(PLACES, MAPS, st.sampled_from([torch.float32, torch.float64]), st.integers(1, 3), st.booleans(), st.data())
def test_gradient_maps_change_no_bit(tmp_path, place, maps, dtype, size, donated, data):
    """At any stage, in pipelines, whatever a map needs of the gradients, with batches that are not finite."""
    problem = held.layers(data.draw(st.integers(0, 99)), dtype, 0.3, False)
    place = place.fit(problem)
    names = {make: i for i, make in enumerate(maps)}  # each once

    def body():
        parts = [*place.transforms(), *(make() for make in names), fds.skip_nonfinite(), fds.adamw(0.01)]
        placing = [mapped(Mapped(tmp_path, ALL, size)), *[fds.donate()] * donated]
        plain, placed = fds.compose(*parts)(problem.loss), fds.compose(*placing, *parts)(problem.loss)
        batch = place.batch(problem, plain)
        same_run(plain, placed, problem, [batch, bad(batch), batch], donated=donated)

    (place.sharded if place.piped is None else place.piped).run(body)


class Late(Mapped):
    """Write no sooner than somebody waits, and have read before: as a disk may that does both at once."""

    def read(self, old, device):
        copies = [x.to(device, copy=True) for x in old]
        return lambda: copies

    def write(self, worked, new):
        return lambda: [x.copy_(y) for x, y in zip(new, worked, strict=True)]


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize(
    "parts", [[], [lambda: fds.clip_by_value(1e-3)], [centered]], ids=["float64", "one at a time", "all at once"]
)
def test_what_becomes_of_gradients_is_written_before_it_is_read(tmp_path, parts, stage):
    problem = held.layers(7, torch.float64, 0.0, False)

    def body():
        shard = [] if stage is None else [Topology(2, stage, 64).shard()]
        some = [*shard, *(make() for make in parts), fds.static_loss_scale(3.0), fds.sgd(0.1, momentum=0.9)]
        late = mapped(Late(tmp_path, ALL))
        plain, placed = fds.compose(*some)(problem.loss), fds.compose(late, *some)(problem.loss)
        a, b = plain.init(problem.params), placed.init(problem.params)
        for _ in range(2):
            (a, _), (b, _) = plain(a, problem.batch), placed(b, problem.batch)
            assert_same_bits(b, a)

    body() if stage is None else fds.simulate(body, 2)


@pytest.mark.parametrize("stage", range(4))
def test_some_slices_elsewhere_with_microbatches_at_every_stage(tmp_path, stage):
    place, problem = Place(Topology(2, stage, 64), None, 3), held.layers(7, torch.float32, 0.0, False)

    def body():
        parts = [*place.transforms(), fds.precision(torch.float16), fds.loss_scale(2.0**10), fds.adamw(0.01)]
        residency = Mapped(tmp_path, ("gradients", "opt"), some=lambda leaf: leaf.index % 2 == 0)
        plain, placed = fds.compose(*parts)(problem.loss), fds.compose(mapped(residency), *parts)(problem.loss)
        batch = place.batch(problem, plain)
        same_run(plain, placed, problem, [batch, batch, bad(batch), batch])
        slices = len(plain.structure(problem.params).opt["exp_avg"])
        return [kind for kind, _ in residency.made].count("gradients"), (slices + 1) // 2

    for made, want in place.sharded.run(body):
        assert made == want  # once, for all four calls


def test_a_norm_after_a_map_that_writes_is_that_of_what_it_wrote(tmp_path):
    problem, parts = held.layers(7, torch.float32, 0.0, False), [fds.clip_by_value(1e-3), fds.clip_by_global_norm(1e-3)]
    plain = fds.compose(*parts, fds.sgd(0.1))(problem.loss)
    placed = fds.compose(mapped(Mapped(tmp_path, ALL)), *parts, fds.sgd(0.1))(problem.loss)
    same_run(plain, placed, problem, [problem.batch] * 2)


def test_a_norm_that_overflows_float32_is_that_of_the_plain_step(tmp_path):
    loss = lambda params, batch: sum((p * batch).sum() for p in params)
    params = [torch.ones(8), torch.ones(5, 8)]
    parts = [fds.clip_by_global_norm(1.0), fds.sgd(0.1)]
    plain, placed = fds.compose(*parts)(loss), fds.compose(mapped(Mapped(tmp_path, ALL)), *parts)(loss)
    batch = torch.full((8,), 3e25)
    (a, said), (b, told) = plain(plain.init(params), batch), placed(placed.init(params), batch)
    assert_same_bits((b, told), (a, said))
    assert said["grad_norm"] == global_norm([batch.clone(), batch.expand(5, 8).clone()]) and said["grad_norm"] > 1e26


class Failing(Mapped):
    """Fail at the n-th read or write after it was armed."""

    fails = ("", 0)

    def check(self, what):
        name, rest = self.fails
        self.fails = (name, rest - (name == what))
        if name == what and rest == 0:
            raise OSError("the disk is full")


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize("fails", [("write", 0), ("write", 2), ("read", 0), ("loss", 0)])
def test_an_error_in_backward_leaves_the_state_as_it_was(tmp_path, fails, stage):
    problem = held.layers(7, torch.float32, 0.0, False)

    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, armed):
            ctx.armed = armed
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.armed[0]:
                raise OSError("the disk is full")
            return grad, None

    def body():
        armed, residency = [False], Failing(tmp_path, ("gradients",))
        loss = lambda params, batch: problem.loss(fds.tree.map(lambda p: Raising.apply(p, armed), params), batch)
        shard = [] if stage is None else [Topology(2, stage, 64).shard()]
        parts = [*shard, fds.accumulate(2), fds.skip_nonfinite(), fds.adamw(0.01)]
        plain = fds.compose(*parts)(loss)
        step = fds.compose(mapped(residency), fds.donate(), *parts)(loss)
        state, _ = step(step.init(problem.params), problem.batch)
        before = snapshot(state)
        armed[0], residency.fails = fails[0] == "loss", fails
        if not (stage is None and fails[0] == "read"):  # nothing is read in backward without microbatches elsewhere
            with pytest.raises(OSError, match="the disk is full"):
                step(state, problem.batch)
        armed[0], residency.fails = False, ("", 0)
        assert_same_bits(state, before)
        want, _ = plain(before, problem.batch)
        assert_same_bits(step(state, problem.batch)[0], want)

    body() if stage is None else fds.simulate(body, 2)


def many(*parts):
    """Return a step of 24 layers, each a bucket, its first state, a batch, and the bytes of a bucket."""
    layers = fds.Layers([nn.Linear(64, 64, bias=False) for _ in range(24)], nn.MSELoss())
    step = fds.compose(fds.donate(), *parts, fds.clip_by_global_norm(1.0), fds.sgd(0.1))(layers)
    return step, step.init(layers.init), (torch.randn(2, 64), torch.randn(2, 64)), 64 * 64 * 4


def test_a_step_on_one_rank_holds_two_gradients_of_24(tmp_path):
    def peak(*parts):
        step, state, batch, size = many(*parts)
        states = [state]
        call = lambda: states.append(step(states.pop(), batch)[0])
        call()
        return peak_bytes(call) / size

    assert peak() > 24
    assert peak(mapped(Mapped(tmp_path, ("gradients",)))) < 3.5  # one that comes, one that is written, and activations


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sharded_step_holds_two_buckets_of_24(tmp_path, stage):
    """Whatever the microbatches at stages 2 and 3."""

    def most(*parts):
        def body():
            shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, bucket_bytes=64 * 64 * 4)
            step, state, batch, size = many(*parts, shard, fds.accumulate(1 if stage == 1 else 2))
            for _ in range(2):
                state, _ = step(state, batch)
            flat = [x for some in step.runtime.pool.scratch.values() for x in some]  # all that were held at once
            return sum(one.base.nbytes for one in flat) / size

        return max(fds.simulate(body, 2))

    whole = 3 if stage == 3 else 24  # the gathered parameters
    assert most() >= whole + 12 and most(mapped(Mapped(tmp_path, ("gradients",)))) <= whole + (4 if stage == 1 else 3)


def test_describe_says_where_they_live_and_what_is_in_memory(tmp_path):
    step, state, _, size = many(mapped(Mapped(tmp_path, ("gradients",))))
    told = step.describe(state)
    assert told.lives == {"gradients": "files"}
    assert (told.num_bytes["gradients"], told.num_bytes["buckets"]) == (24 * size, 3 * size)
    assert told.num_bytes["chunks"] == 3 * size
