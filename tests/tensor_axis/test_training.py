"""A `tensor` axis, of which the step knows nothing but how parameters lie along it, trains as one rank does."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import pytest
import torch

import fds
from fds import tree
from fds.errors import BatchError, ComposeError, StateError
from fds.step import Dimension, Gradients, Placement, Replicated, SplitDim, fill, transform
from fds.step.batch import checksums
from tests import ranks
from tests.tensor_axis.splitting import DTYPE, Columns, Place, model, share

CALLS, EPS, LR = 3, 1e-2, 1e-2
# A gradient element is a sum of at most 2**12 products of size 1 (rows x widths x layers), each rounded; optimizers
# divide by sqrt(v) + EPS, so a parameter moves by at most LR / EPS of that error a call, which then comes back.
ROUNDING = torch.finfo(DTYPE).eps * 2**12 * LR / EPS * sum(2.0**i for i in range(CALLS))
PLACES = [
    (Place(2), "lamb"),
    (Place(2), "adamw"),
    (Place(4), "lamb"),
    (Place(2, stages=2), "lamb"),
    *((Place(2, data=2, zero=zero), "lamb") for zero in range(4)),
    (Place(2, data=2, zero=1, replicas=2), "adamw"),
    (Place(2, data=2, stages=2, zero=1), "lamb"),
    (Place(2, data=2, stages=2, zero=3), "adamw"),
    (Place(4), "muon"),
    *((Place(2, data=2, zero=zero), "muon") for zero in (0, 1, 3)),
    (Place(2, stages=2), "muon"),
]
MATRICES = ("*.up.weight", "*.down.weight", "*.wide", "*.narrow", "0.weight")
OPTIMIZERS = {
    "lamb": lambda: fds.lamb(LR, eps=EPS),
    "adamw": lambda: fds.adamw(LR, eps=EPS),
    "muon": lambda: fds.by_name({**dict.fromkeys(MATRICES, fds.muon(LR)), "*": fds.adamw(LR, eps=EPS)}),
}


def trained(place: Place, optimizer: str, *more: Any) -> dict[str, Any]:
    """Return what a rank computes: metrics of every call, an evaluation, and whole parameters and averages."""
    parts = [fds.clip_by_global_norm(0.5), fds.ema(0.9), fds.skip_nonfinite(), *more]
    step = place.step(*parts, optimizer=OPTIMIZERS[optimizer]())
    state, found = step.init(model(None).init, key=3), {}
    for call in range(CALLS):
        x, y = share(step, call)
        state, found[f"call {call}"] = step(state, (x * torch.inf, y) if call == 1 else (x, y))
    found["evaluated"] = step.evaluate(state, share(step, 9))
    found["params"] = step.params(state)
    found["averages"] = step.params(attrs.evolve(state, params=state.slots["ema"]))
    shares = step.dimensions.share_of_batch[1]  # over which buffers are averaged
    found["buffers"] = {name: x * shares for name, x in step.dimensions.collect(state.buffers).items()}
    return tree.paths(found)


@functools.cache
def plain(optimizer: str) -> dict[str, Any]:
    """Return what one rank computes."""
    return trained(Place(), optimizer)


def check_equal(found: dict[str, Any], optimizer: str, near: float = ROUNDING) -> None:
    """Assert that all that a rank computed is what one rank alone does; whole numbers exactly."""
    want = plain(optimizer)
    assert found.keys() == want.keys()
    for name, x in want.items():
        bound = near if x.is_floating_point() else 0
        assert torch.allclose(found[name].double(), x.double(), rtol=bound, atol=bound, equal_nan=True), name


@pytest.mark.parametrize(("place", "optimizer"), PLACES, ids=str)
def test_split_pairs_are_the_plain_step(place, optimizer):
    found = fds.simulate(lambda: trained(place, optimizer), place.ranks)
    for one in found:
        check_equal(one, optimizer)
        assert all(torch.equal(x, found[0][name]) for name, x in one.items() if name.startswith("params"))


@pytest.mark.parametrize(
    ("place", "optimizer"), [(Place(4), "lamb"), (Place(2, data=2, zero=2), "lamb"), (Place(2), "adamw")], ids=str
)
def test_pieces_that_live_on_a_disk_are_the_plain_step(place, optimizer, tmp_path):
    disk = fds.disk(tmp_path, buffer_bytes=4096)
    found = fds.simulate(lambda: trained(place, optimizer, fds.offload(disk, disk, disk, disk)), place.ranks)
    for one in found:
        check_equal(one, optimizer)


def test_split_pairs_on_real_ranks_are_the_plain_step():
    for found in ranks.run(trained, Place(2), "lamb"):
        check_equal(found, "lamb")


def test_the_bound_says_something():
    with pytest.raises(AssertionError):
        check_equal(plain("adamw") | {"params.0.bias": plain("adamw")["params.0.bias"] + 4 * ROUNDING}, "adamw")


@pytest.mark.parametrize("recipe", [True, False])
def test_a_rank_begins_with_its_piece(recipe):
    whole = model(None).init(fds.random.key(5))
    want = Place().step(optimizer=fds.adamw()).init(model(None).init if recipe else whole, key=3)

    def body():
        step = Place(2, data=2, zero=0).step(optimizer=fds.adamw())
        mine = whole if recipe is False and fds.mesh(all=-1).rank == 0 else tree.map(torch.zeros_like, whole)
        state = step.init(model(None).init if recipe else mine, key=3)
        return {**state.params}, step.params(state), fds.mesh(dp=2, tp=2)["tp"].index

    for params, collected, i in fds.simulate(body, 4):
        for name, x in want.params.items():
            assert torch.equal(collected[name], x)
        assert torch.equal(params["1.up.weight"], want.params["1.up.weight"].chunk(2, 0)[i])
        assert torch.equal(params["1.down.weight"], want.params["1.down.weight"].chunk(2, 1)[i])
        assert torch.equal(params["1.down.bias"], want.params["1.down.bias"])
        assert params["1.up.weight"].untyped_storage().nbytes() == params["1.up.weight"].nbytes


def test_whole_parameters_go_back_into_a_module():
    def body():
        place = Place(2, data=2, zero=1)
        step = place.step(optimizer=fds.adamw())
        state = step.init(model(None).init, key=3)
        state, _ = step(state, share(step, 0))
        pair = model(None).layers[1].build()
        step.into(pair, state, prefix="1.")
        whole = step.params(state)
        return all(torch.equal(p, whole[f"1.{name}"]) for name, p in pair.named_parameters()), pair.seen.shape

    assert fds.simulate(body, 4) == [(True, (16,))] * 4


class Noise:
    """A gradient map that draws."""

    takes_slices = True

    def __call__(self, grads, call):
        return Gradients([torch.randn_like(x) for x in grads.leaves], grads.scale)


@transform
def noise():
    return lambda step: fill(step, condition=Noise())


@pytest.mark.parametrize("place", [Place(2), Place(2, data=2, zero=1)], ids=str)
def test_draws_differ_for_pieces_and_are_equal_for_copies(place):
    def body():
        step = place.step(noise(), optimizer=fds.sgd(1.0))
        state = step.init(model(None).init, key=3)
        before = step.params(state)
        state, _ = step(state, share(step, 0))
        return {name: before[name] - x for name, x in step.params(state).items()}, state

    found = fds.simulate(body, place.ranks)
    for moved, _ in found:
        assert all(torch.equal(x, found[0][0][name]) for name, x in moved.items())
        for name, dim in (("1.up.weight", 0), ("1.down.weight", 1)):
            one, other = moved[name].chunk(2, dim)
            assert not torch.isclose(one, other).any()


def test_an_optimizer_of_whole_matrices_refuses_pieces_by_name():
    whole = attrs.evolve(fds.muon(), pieces=False)
    muon = {"*.up.weight": whole, "*": fds.adamw()}

    def body():
        Place(2).step(optimizer=fds.by_name({"0.weight": fds.muon(), "*": fds.adamw()})).init(model(None).init)
        with pytest.raises(StateError) as caught:
            Place(2).step(optimizer=fds.by_name(muon)).init(model(None).init)
        return caught.value.where, caught.value.what

    assert (
        fds.simulate(body, 2)
        == [("1.up.weight", "the optimizer needs whole parameters, and each rank has a piece of this one")] * 2
    )


def test_what_does_not_divide_is_refused_by_name():
    def body():
        with pytest.raises(StateError) as caught:
            Place(3).step(optimizer=fds.adamw()).init(model(None).init)
        return caught.value.where, caught.value.got

    assert fds.simulate(body, 3) == [("1.up.weight", "shape (16, 6), split along dim 0")] * 3


@pytest.mark.sweep
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("place", [Place(2, data=2), Place(2, stages=2)], ids=str)
def test_another_batch_along_the_axis_is_an_error_on_all_ranks(place, at):
    def body():
        step = place.step(optimizer=fds.adamw())
        state = step.init(model(None).init)
        batch = list(share(step, 0))
        if step.everyone.index == step.everyone.size - 1:
            batch[at] = batch[at] + 1
        with pytest.raises(BatchError) as caught:
            step(state, tuple(batch))
        return caught.value.hint

    assert len(set(fds.simulate(body, place.ranks))) == 1


def test_ranks_along_the_axis_evaluate_together():
    def body():
        step = Place(2, data=2).step(optimizer=fds.adamw())
        state = step.init(model(None).init)
        batches = [share(step, i) for i in range(3)]
        whole = fds.evaluate(step, state, batches)
        with pytest.raises(BatchError, match="different numbers of batches"):
            fds.evaluate(step, state, batches[: 2 + (step.everyone.index == 1)])
        return whole["loss"], whole["weight"], whole["rows"]

    step = Place().step(optimizer=fds.adamw())
    state = step.init(model(None).init)
    want = fds.evaluate(step, state, [share(step, i) for i in range(3)])
    for loss, weight, rows in fds.simulate(body, 4):
        assert torch.allclose(loss, want["loss"]) and weight == 6 and rows == want["rows"] == 24


def test_a_placement_must_know_its_axis():
    class Forgetful(Columns):
        axis = None

        def __init__(self):
            pass

    def body():
        with pytest.raises(ComposeError, match="does not know its axis"):
            Dimension(fds.mesh(tp=2)["tp"], "tensor", Forgetful())
        with pytest.raises(ComposeError, match="does not know its axis"):
            Dimension(fds.mesh(tp=2)["tp"], "tensor", Placement())

    fds.simulate(body, 2)


def test_a_placement_must_say_how_a_parameter_lies():
    class Odd(Columns):
        def lies(self, name):
            return "whole" if name == "4.bias" else super().lies(name)

    @transform
    def odd(axis):
        return lambda step: fill(step, topology=Dimension(axis, "tensor", Odd(axis)))

    def body():
        axis = fds.mesh(tp=2)["tp"]
        with pytest.raises(ComposeError) as caught:
            fds.compose(odd(axis), fds.sgd(0.1))(model(axis)).init(model(None).init)
        return caught.value.where

    assert fds.simulate(body, 2) == ["Odd.lies('4.bias')"] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: SplitDim(-1),
        lambda: SplitDim(True),
        lambda: Replicated("max"),
        lambda: Dimension(None, "tensor", Columns),
    ],
)
def test_a_placement_says_what_there_is(make):
    with pytest.raises(ComposeError):
        make()


def test_elements_on_a_gpu_are_compared_in_the_first_call_and_shapes_in_all(monkeypatch):
    on_a_gpu = lambda part, *, waits: checksums(part) if waits else 2 * checksums(part)[:1]
    monkeypatch.setattr("fds.step.checks.agreement.checksums", on_a_gpu)
    monkeypatch.setattr("fds.step.totals._same_loss", lambda computed, loss, *_: loss)  # which is NaN there
    place = Place(2, data=2)

    def body():
        step = place.step(optimizer=fds.adamw())
        state, (x, y) = step.init(model(None).init), share(step, 0)
        with pytest.raises(BatchError, match="other values"):
            step(state, (x + step.everyone.index, y))
        state, _ = step(state, (x, y))
        step(state, (x + step.everyone.index, y))
        with pytest.raises(BatchError, match="different batches"):
            step(state, (x[step.everyone.index :], y[step.everyone.index :]))

    fds.simulate(body, place.ranks)


def test_data_ranks_pass_batches_of_other_shapes():
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    apply, params, _ = fds.functional(torch.nn.Sequential(*layers))
    rows = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))

    def loss_fn(p, x):
        return fds.Mean(apply(p, x).square().sum(), x[..., 0].numel())

    def body(dp, tp):
        mesh = fds.mesh(dp=dp, tp=tp)
        divided = fds.tensor_parallel(mesh["tp"], {"0": "column", "2": "row"})
        step = fds.compose(divided, fds.shard_optimizer(mesh["dp"], stage=1), fds.sgd(0.1))(loss_fn)
        mine = rows if dp == 1 else rows[:, :3] if mesh["dp"].index else rows[:, 3:]  # of 3 tokens, and of 2
        return step.params(step(step.init(params), mine)[0])

    (want,) = fds.simulate(lambda: body(1, 1), 1)
    for got in fds.simulate(lambda: body(2, 2), 4):
        torch.testing.assert_close(got, want)


def test_a_sparse_batch_trains_as_a_dense_one():
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    apply, params, _ = fds.functional(torch.nn.Sequential(*layers))
    x = torch.eye(4, 3)

    def body():
        divided = fds.tensor_parallel(fds.mesh(tp=2)["tp"], {"0": "column", "2": "row"})
        step = fds.compose(divided, fds.sgd(0.1))(lambda p, batch: apply(p, batch).square().mean())
        return [step.params(step(step.init(params), one)[0]) for one in (x, x.to_sparse())]

    for dense, sparse in fds.simulate(body, 2):
        torch.testing.assert_close(sparse, dense)
