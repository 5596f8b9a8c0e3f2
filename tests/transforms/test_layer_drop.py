"""Layer drop: the plain loop that skips the same layers, wherever and however often a step runs."""

import math

import attrs
import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.errors import ComposeError, LossError
from tests.bits import assert_same_bits

BLOCKS, MICROBATCHES, ROWS, CALLS, LR, THETA, GAMMA = (1, 2, 3), 4, 8, 8, 0.1, 0.3, 0.5
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
DROP = fds.layer_drop(THETA, GAMMA, layers=BLOCKS)


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
    assert len({tuple(run) for run in runs}) > 2  # calls draw apart, and microbatches of a call alike
    assert all(len({tuple(run) for run in runs[i : i + 4]}) == 1 for i in range(0, len(runs), 4))
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
    train(DROP, calls=range(200))
    for i in BLOCKS:
        keep = [1 - i / 3 * (1 - ((1 - THETA) * math.exp(-GAMMA * call) + THETA)) for call in range(200)]
        deviation = math.sqrt(sum(p * (1 - p) for p in keep))
        assert abs(passed.count(i) - sum(keep)) < 4 * deviation + 2
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
    with pytest.raises(fds.FdsError, match="layer_drop takes single layers"):
        train(DROP, fds.checkpoint_activations(every=2), fds.accumulate(MICROBATCHES))
    train(fds.checkpoint_activations(every=2), DROP, fds.accumulate(MICROBATCHES))


class Model(nn.Module):
    """Blocks that add to what they are given, and return it as they are told; one of them not called in a call."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.first, self.last = form, Named(0, 3, 4), Named(4, 4, 2)
        self.blocks = nn.ModuleList([Block(i, 4, 4) for i in BLOCKS])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x = x[0] if self.form == "tuple" else x
        return self.last(x)


class TupleBlock(Block):
    def forward(self, x):
        return super().forward(x), None


@pytest.mark.parametrize("form", ["tensor", "tuple"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_modules_of_a_loss_are_skipped_as_layers_are(form, checkpoint):
    model = Model(form)
    if form == "tuple":
        for block in model.blocks:
            block.__class__ = TupleBlock
    apply, params, _ = fds.functional(model)
    loss = lambda params, rows: mean_square(apply(params, rows[0]), rows[1])
    more = [fds.checkpoint_activations()] * checkpoint
    step = fds.compose(fds.layer_drop(THETA, 5.0), *more, fds.sgd(LR))(loss)
    state = step.init(params, key=3)
    for call in range(6):  # in the first call all layers run
        state = attrs.evolve(state, calls=torch.tensor(call))
        passed.clear()
        new, _ = step(state, batch(call))
        ran = passed[: passed.index(4) + 1]
        by_hand = {name: x.clone().requires_grad_() for name, x in state.params.items()}
        linear = lambda name, x, by_hand=by_hand: x @ by_hand[f"{name}.weight"].T + by_hand[f"{name}.bias"]
        x, y = batch(call)
        x = linear("first", x)
        for i in BLOCKS:
            if i in ran:
                p = 1 - i / 3 * (1 - ((1 - THETA) * math.exp(-5.0 * call) + THETA))
                x = x + torch.tanh(linear(f"blocks.{i - 1}", x)) / p
        mean_square(linear("last", x), y).backward()
        for name, x in by_hand.items():
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            close(new.params[name], state.params[name] - LR * grad)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda x: x[:, :2], "returns a tensor of the shape"),
        (lambda x: x.add_(1), "leaves it as it is"),
        (lambda x: (x, x), "nothing else"),
        (lambda x: {"x": x}, "returns a tensor"),
    ],
)
def test_layers_that_do_not_add_are_refused(layer, message):
    loss = fds.Layers([nn.Linear(3, 4).double(), layer, lambda x: x], lambda out, y: out[0].mean())
    step = fds.compose(fds.layer_drop(0.5, 9.0, layers=1), fds.sgd(LR))(loss)
    with pytest.raises(LossError, match=message):
        step(step.init(loss.init), batch(0))


@pytest.mark.parametrize(
    "arguments", [{"theta": 1.5}, {"theta": "1"}, {"gamma": -1}, {"gamma": math.inf}, {"layers": []}, {"layers": 2.0}]
)
def test_other_arguments_are_refused(arguments):
    with pytest.raises(ComposeError, match="layer_drop"):
        fds.layer_drop(**arguments)


def test_a_resumed_run_draws_what_it_would_have_though_its_layers_show_once_what_they_return():
    norm = lambda: nn.BatchNorm1d(3, dtype=torch.float64)
    blocks = nn.Sequential(*[nn.Sequential(nn.Dropout(0.5), norm(), Block(i, 3, 3)) for i in range(4)])
    apply, params, buffers = fds.functional(nn.Sequential(nn.Linear(3, 3).double(), blocks))

    def loss(params, rows, buffers):
        out, buffers = apply.with_buffers(params, buffers, rows[0])
        return out.square().mean(), {}, buffers

    step = lambda: fds.compose(fds.layer_drop(0.1, 9.0), fds.sgd(LR))(fds.with_buffers(loss, buffers))
    run, resumed = step(), step()
    states = [run.init(params, key=5)]
    for call in range(4):
        states.append(run(states[-1], batch(call))[0])
        assert_same_bits(step()(states[-2], batch(call))[0], states[-1])
    assert_same_bits(resumed(states[2], batch(2))[0], states[3])


def test_without_names_all_layers_of_the_longest_row_are_dropped():
    step = fds.compose(fds.layer_drop(theta=0.5, gamma=0.1), fds.sgd(LR))(LAYERS)
    assert "1, 2, 3" in str(step.describe())
