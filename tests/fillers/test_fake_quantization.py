"""Weights of fewer and fewer bits, as a filler: the plain loop, on one rank and on several, stopped and skipped."""

import pytest
import torch

import fds
from tests.fillers.fake_quantization import fake_quantization
from tests.fillers.regression import BAD, MICROBATCHES, batch, loss_fn, train

CALLS, LR = 8, 0.2
BITS = {0: 8, 2: 4, 5: 2}
G = torch.Generator().manual_seed(0)
PARAMS = {
    "first": torch.randn(3, 5, generator=G, dtype=torch.float64),
    "bias": torch.randn(5, generator=G, dtype=torch.float64),
    "last": torch.randn(5, 2, generator=G, dtype=torch.float64),
}


def composed(ranks=1, *transforms):
    return fds.compose(
        fds.accumulate(MICROBATCHES // ranks),
        fake_quantization(BITS),
        *transforms,
        fds.skip_nonfinite(),
        fds.sgd(LR, momentum=0.9),
    )(loss_fn)


def quantized(x, b, limit):
    grid = limit / (2 ** (b - 1) - 1)
    return (x / grid).round() * grid


@pytest.fixture(scope="module")
def by_hand():
    """Return what the loop written by hand ends with: parameters, ranges, a loss of one more batch."""
    params = {name: x.clone() for name, x in PARAMS.items()}
    momenta = {name: torch.zeros_like(x) for name, x in params.items()}
    ranges = {"first": 0.0, "last": 0.0}
    updates = 0

    def seen():
        b = [bits for update, bits in BITS.items() if update <= updates][-1]
        limits = {name: max(ranges[name], float(params[name].abs().max().float())) for name in ranges}
        return {name: quantized(x, b, limits[name]) if name in limits else x for name, x in params.items()}, limits

    for call in range(CALLS):
        if call == BAD:  # skipped: neither counted nor remembered
            continue
        shown, limits = seen()
        leaves = {name: x.clone().requires_grad_() for name, x in shown.items()}
        for rows in zip(*(x.chunk(MICROBATCHES) for x in batch(call)), strict=True):
            (loss_fn(leaves, rows) / MICROBATCHES).backward()
        for name, leaf in leaves.items():  # straight through to the parameter
            momenta[name] = 0.9 * momenta[name] + leaf.grad
            params[name] = params[name] - LR * momenta[name]
        ranges, updates = limits, updates + 1
    return params, ranges, loss_fn(seen()[0], batch(100))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def compare(step, state, by_hand):
    params, ranges, loss = by_hand
    close(step.params(state), params)
    assert {name: float(x) for name, x in state.slots["ranges"].items()} == ranges
    rows, data = batch(100), step.dimensions.data
    rows = rows if data is None else [x.chunk(data.size)[data.index] for x in rows]
    close(step.evaluate(state, rows)["loss"], loss)


def test_the_loop_written_by_hand(by_hand):
    step = composed()
    compare(step, train(step, step.init(PARAMS), range(CALLS)), by_hand)


# at stage 3 with little room the view runs whenever the loss reads a matrix
LITTLE_ROOM = {"stage": 3, "bucket_bytes": 128, "prefetch": 0, "max_live_bytes": 512}


@pytest.mark.parametrize(
    "stage", [*({"stage": stage} for stage in range(4)), LITTLE_ROOM], ids=["0", "1", "2", "3", "3-handles"]
)
def test_ranks_that_share_the_step(stage, by_hand):
    def body():
        step = composed(2, fds.shard_optimizer(fds.mesh(dp=2)["dp"], **stage))
        compare(step, train(step, step.init(PARAMS), range(CALLS)), by_hand)

    fds.simulate(body, 2)


def test_a_run_that_was_stopped_goes_on_on_other_ranks(by_hand, tmp_path):
    def first():
        step = composed(2, fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=2))
        fds.save(tmp_path, train(step, step.init(PARAMS), range(5)), step)

    fds.simulate(first, 2)
    step = composed()
    state, _ = fds.load(tmp_path, step, PARAMS)
    compare(step, train(step, state, range(5, CALLS)), by_hand)
