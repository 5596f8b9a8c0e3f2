"""Layer drop, as a filler: the plain loop that skips the same layers, wherever and however often a step runs."""

import math

import pytest
import torch
from torch import nn

import fds
from fds import plans
from tests.fillers.layer_drop import layer_drop

BLOCKS, MICROBATCHES, ROWS, CALLS, LR, THETA, GAMMA = (1, 2, 3), 4, 8, 5, 0.1, 0.3, 0.5
passed: list[int] = []  # the layers that ran, in their order


class Named(nn.Linear):
    def __init__(self, index, *size):
        super().__init__(*size, dtype=torch.float64)
        self.index = index

    def forward(self, x):
        passed.append(self.index)
        return super().forward(x)


class Block(Named):
    def forward(self, x):
        return x + torch.tanh(super().forward(x))


def mean_square(out, y):
    return (out - y).square().mean()


LAYERS = fds.Layers(
    [fds.LayerSpec(Named, 0, 3, 4), *(fds.LayerSpec(Block, i, 4, 4) for i in BLOCKS), fds.LayerSpec(Named, 4, 4, 2)],
    mean_square,
)
DROP = layer_drop(BLOCKS, THETA, GAMMA)


def batch(call):
    g = torch.Generator().manual_seed(call)
    return [torch.randn(ROWS, n, generator=g, dtype=torch.float64) for n in (3, 2)]


def train(*transforms, state=None, calls=range(CALLS), layers=LAYERS):
    step = fds.compose(*transforms, fds.sgd(LR))(layers)
    state, data = state or step.init(layers.init, key=3), step.dimensions.data
    for call in calls:
        rows = batch(call)
        state, _ = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
    return step, state


def on_ranks(stage, *transforms, **arguments):
    """Return whole parameters after a training of two ranks."""

    def body():
        shared = fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=stage)
        step, state = train(*transforms, DROP, fds.accumulate(MICROBATCHES // 2), shared, **arguments)
        return step.params(state)

    return fds.simulate(body, 2)[0]


@pytest.fixture(scope="module")
def plain():
    """Return the parameters of one rank, and the layers that each microbatch of each call passed."""
    passed.clear()
    step, state = train(DROP, fds.accumulate(MICROBATCHES))
    runs = [[]]
    for index in passed:
        runs[-1].append(index)
        if index == 4:
            runs.append([])
    # in its first call a step may run its loss once more to learn its shapes
    return step.params(state), runs[:-1][-CALLS * MICROBATCHES :]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_the_loop_written_by_hand_that_skips_the_same_layers(plain):
    params, runs = plain
    assert len({tuple(run) for run in runs}) > 3  # microbatches draw apart
    step = fds.compose(fds.sgd(LR))(LAYERS)
    by_hand = {name: x.clone().requires_grad_() for name, x in step.init(LAYERS.init, key=3).params.items()}
    linear = lambda i, x: x @ by_hand[f"{i}.weight"].T + by_hand[f"{i}.bias"]
    for call in range(CALLS):
        falling = (1 - THETA) * math.exp(-GAMMA * call) + THETA
        for m, (x, y) in enumerate(zip(*(x.chunk(MICROBATCHES) for x in batch(call)), strict=True)):
            x = linear(0, x)
            for i in runs[call * MICROBATCHES + m][1:-1]:
                x = x + torch.tanh(linear(i, x)) / (1 - i / 3 * (1 - falling))
            (mean_square(linear(4, x), y) / MICROBATCHES).backward()
        with torch.no_grad():
            for x in by_hand.values():
                if x.grad is not None:
                    x -= LR * x.grad
                x.grad = None
    close(params, {name: x.detach() for name, x in by_hand.items()})


def test_layers_are_kept_as_often_as_the_formula_says():
    passed.clear()
    train(DROP, fds.accumulate(8), calls=range(60))
    for i in BLOCKS:
        keep = [1 - i / 3 * (1 - ((1 - THETA) * math.exp(-GAMMA * call) + THETA)) for call in range(60)]
        deviation = math.sqrt(8 * sum(p * (1 - p) for p in keep))
        assert abs(passed.count(i) - 8 * sum(keep)) < 4 * deviation + 2
    passed.clear()
    step = fds.compose(DROP, fds.sgd(LR))(LAYERS)
    step.evaluate(step.init(LAYERS.init, key=3), batch(0))
    assert passed[-5:] == [0, 1, 2, 3, 4]  # an evaluation passes all


def test_recomputed_layers_skip_the_same(plain):
    step, state = train(DROP, fds.checkpoint_activations(), fds.accumulate(MICROBATCHES))
    close(step.params(state), plain[0])


@pytest.mark.parametrize("stage", range(4))
def test_ranks_skip_what_one_rank_skips(plain, stage):
    close(on_ranks(stage), plain[0])


def test_stages_of_a_pipeline_skip_what_one_rank_skips(plain):
    def body():
        axis = fds.mesh(pp=2)["pp"]
        step, state = train(DROP, fds.pipeline(plans.one_f_one_b, axis, num_microbatches=MICROBATCHES))
        return step.params(state)

    close(fds.simulate(body, 2)[0], plain[0])


def test_a_run_that_was_stopped_skips_what_it_would_have(plain, tmp_path):
    def first():
        shared = fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=3)
        step, state = train(DROP, fds.accumulate(MICROBATCHES // 2), shared, calls=range(2))
        fds.save(tmp_path, state, step)

    fds.simulate(first, 2)
    state, _ = fds.load(tmp_path, fds.compose(DROP, fds.accumulate(MICROBATCHES), fds.sgd(LR))(LAYERS), LAYERS.init)
    step, state = train(DROP, fds.accumulate(MICROBATCHES), state=state, calls=range(2, CALLS))
    close(step.params(state), plain[0])


def test_joined_layers_are_dropped_one_by_one_or_refused(plain):
    with pytest.raises(fds.FdsError, match="layer_drop drops single layers"):
        train(DROP, fds.checkpoint_activations(every=2), fds.accumulate(MICROBATCHES))
    train(fds.checkpoint_activations(every=2), DROP, fds.accumulate(MICROBATCHES))
