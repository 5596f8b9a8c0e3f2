"""Magnitude pruning, as a filler: the plain loop with `kthvalue`, on one rank and on several, stopped and skipped."""

import pytest
import torch
from torch import nn

import fds
from fds import plans
from tests.fillers.magnitude_pruning import magnitude_pruning
from tests.fillers.regression import BAD, MICROBATCHES, batch, loss_fn, train

CALLS, LR, EVERY = 9, 0.1, 2
G = torch.Generator().manual_seed(0)
PARAMS = {
    "first": torch.randn(3, 7, generator=G, dtype=torch.float64),
    "bias": 0.01 * torch.randn(7, generator=G, dtype=torch.float64),
    "last": torch.randn(7, 2, generator=G, dtype=torch.float64),
}


def sparsity(t):
    return 0.8 * (1 - (1 - t / 8).clamp_min(0) ** 3)


def composed(axis=None, *shared):
    return fds.compose(
        fds.accumulate(MICROBATCHES // (1 if axis is None else axis.size)),
        *shared,
        magnitude_pruning(sparsity, EVERY, axis),
        fds.skip_nonfinite(),
        fds.sgd(LR, momentum=0.9),
    )(loss_fn)


@pytest.fixture(scope="module")
def by_hand():
    params = {name: x.clone() for name, x in PARAMS.items()}
    momenta = {name: torch.zeros_like(x) for name, x in params.items()}
    masks = {name: torch.ones_like(params[name], dtype=torch.bool) for name in ("first", "last")}
    updates = 0
    for call in range(CALLS):
        if call == BAD:  # skipped, though it is one in which the mask would be made anew
            continue
        leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
        for rows in zip(*(x.chunk(MICROBATCHES) for x in batch(call)), strict=True):
            (loss_fn(leaves, rows) / MICROBATCHES).backward()
        for name, leaf in leaves.items():
            momenta[name] = 0.9 * momenta[name] + leaf.grad
            params[name] = params[name] - LR * momenta[name]
        updates += 1
        if (call + 1) % EVERY == 0:
            magnitudes = torch.cat([params[name].abs().flatten() for name in masks])
            count = int(len(magnitudes) * float(sparsity(torch.tensor(updates, dtype=torch.float64))))
            masks = {name: params[name].abs() > magnitudes.kthvalue(count).values for name in masks}
        params |= {name: params[name] * mask for name, mask in masks.items()}
    assert sum(int((params[name] == 0).sum()) for name in masks) == 27
    return params


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    assert all(torch.equal(got[name] == 0, x == 0) for name, x in want.items())


def test_the_loop_written_by_hand(by_hand):
    step = composed()
    state = train(step, step.init(PARAMS), range(CALLS))
    close(step.params(state), by_hand)
    assert torch.equal(state.opt["mask"]["first"] == 0, by_hand["first"] == 0)


def test_slices_that_are_copied_count_alike(by_hand):
    def body():
        mesh = fds.mesh(node=2, gpu=2)
        shared = fds.shard_optimizer(mesh["gpu"], stage=3, replicate=mesh["node"])
        step = composed(mesh["node", "gpu"], shared)
        return step.params(train(step, step.init(PARAMS), range(CALLS)))

    close(fds.simulate(body, 4)[0], by_hand)


@pytest.mark.parametrize("stage", range(4))
def test_ranks_agree_on_one_threshold(stage, by_hand):
    def body():
        axis = fds.mesh(dp=2)["dp"]
        step = composed(axis, fds.shard_optimizer(axis, stage=stage))
        return step.params(train(step, step.init(PARAMS), range(CALLS)))

    for params in fds.simulate(body, 2):
        close(params, by_hand)


def test_weights_that_stages_of_a_pipeline_tie_count_once():
    linear = lambda spec, *args: spec(*args, dtype=torch.float64)
    tied = lambda: linear(fds.TiedLayerSpec, "tied", nn.Linear, 5, 5)
    ends = [linear(fds.LayerSpec, nn.Linear, *size) for size in ((3, 5), (5, 2))]
    layers = fds.Layers([ends[0], tied(), nn.Tanh(), tied(), ends[1]], nn.MSELoss())

    def pruned(axis, *transforms):
        step = fds.compose(*transforms, magnitude_pruning(lambda t: 0.5, EVERY, axis), fds.sgd(LR))(layers)
        state = step.init(layers.init, key=0)
        for call in range(2):
            state, _ = step(state, batch(call))
        return step.params(state)

    def body():
        axis = fds.mesh(pp=2)["pp"]
        return pruned(axis, fds.pipeline(plans.one_f_one_b, axis, num_microbatches=MICROBATCHES))

    close(fds.simulate(body, 2)[0], pruned(None, fds.accumulate(MICROBATCHES)))


def test_ranks_that_could_not_agree_are_refused():
    def body():
        shared = fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=2)
        step = fds.compose(shared, magnitude_pruning(sparsity, EVERY), fds.sgd(LR))(loss_fn)
        with pytest.raises(fds.FdsError, match="needs the axis of all ranks"):
            step(step.init(PARAMS), batch(0))

    fds.simulate(body, 2)


def test_a_run_that_was_stopped_goes_on_on_other_ranks(by_hand, tmp_path):
    step = composed()
    fds.save(tmp_path, train(step, step.init(PARAMS), range(5)), step)

    def second():
        axis = fds.mesh(dp=2)["dp"]
        step = composed(axis, fds.shard_optimizer(axis, stage=3))
        state, _ = fds.load(tmp_path, step, PARAMS)
        return step.params(train(step, state, range(5, CALLS)))

    close(fds.simulate(second, 2)[0], by_hand)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_narrow_copies_of_parameters_are_of_the_masked_ones(stage):
    """A loss in bfloat16 is shown zeros where the masters are zero."""
    params = {name: x.float() for name, x in PARAMS.items()}
    low = fds.precision(torch.bfloat16)

    def seen(params, batch):
        loss = loss_fn(params, [x.to(params["first"].dtype) for x in batch])
        return loss, {"zeros": sum((params[name] == 0).sum() for name in ("first", "last"))}

    def body():
        axis = fds.mesh(dp=2)["dp"]
        step = fds.compose(
            low, fds.shard_optimizer(axis, stage=stage), magnitude_pruning(lambda t: 0.6, 1, axis), fds.adam(0.01)
        )(seen)
        state = step.init(params)
        for call in range(2):
            state, metrics = step(state, [x.float().chunk(2)[axis.index] for x in batch(call)])
        return metrics["zeros"]

    assert int(fds.simulate(body, 2)[0]) in (21, 42)  # 0.6 of 35; of two ranks, where integers are summed
