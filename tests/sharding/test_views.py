"""Views at stage 3: what a view makes of a parameter exists while it is used, and trains as the plain step does."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans, tree
from fds.errors import ComposeError, LossError
from tests import ranks
from tests.bits import assert_rounding, assert_same_bits
from tests.sharding.models import data_axis, mine

WIDTH = 8
ROWS = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


def parameters(layers=4):
    g = torch.Generator().manual_seed(1)
    part = lambda: {"w": torch.randn(WIDTH, WIDTH, generator=g) / 2, "b": torch.zeros(WIDTH)}
    packed = torch.randint(0, 16, (WIDTH * WIDTH // 2,), generator=g).to(torch.uint8) * 16
    return {
        "layers": [part() for _ in range(layers)],
        "base": packed,
        "never": torch.ones(WIDTH, WIDTH),
        "frozen": torch.randn(WIDTH, WIDTH, generator=g) / 2,
    }


def loss_fn(params, x):
    """The first layer is used twice, `never` not at all."""
    x = F.linear(x, params["frozen"])
    if params["base"].is_floating_point():
        x = x + x @ params["base"]
    for layer in (*params["layers"], params["layers"][0]):
        x = x + torch.tanh(F.linear(x, layer["w"], layer["b"]))
    return x.square().mean()


def drop_connect(x, leaf, call):
    if len(leaf.shape) < 2 or not call.training:
        return x
    return x * (torch.rand(x.shape, device=x.device) >= 0.3) / 0.7


def fake_quantization(x, leaf, call):
    if not leaf.dtype.is_floating_point:
        return x
    scale = x.detach().abs().amax() / 7 + 1e-6
    return x + ((x / scale).round() * scale - x).detach()


def weight_normalization(x, leaf, call):
    return x / x.norm(dim=1, keepdim=True) if len(leaf.shape) == 2 else x


def unpacked(x, leaf, call):
    """Two numbers of 4 bits in each byte: another shape and dtype than the parameter's."""
    if leaf.name != "base":
        return x
    return (torch.stack([x & 15, x >> 4], 1).view(WIDTH, WIDTH).float() - 8) / 16


def transposed(x, leaf, call):
    return x.t() if len(leaf.shape) == 2 else x


def in_turns(x, leaf, call):
    """The parameter itself in every second call."""
    return x if call.calls % 2 else 2 * x


VIEWS = {
    **{
        v.__name__: (v,)
        for v in (drop_connect, fake_quantization, weight_normalization, unpacked, transposed, in_turns)
        if v is not in_turns
    },
    "several": (drop_connect, weight_normalization, fake_quantization),
}


@fds.step.transform
def views(*functions):
    def apply(step):
        for function in functions:
            step = fds.step.fill(step, view=function)
        return step

    return apply


def trained(functions, stage, *more, microbatches=2, steps=3):
    """Return whole parameters, metrics and an evaluation; stage None is the plain step over all ranks' rows."""

    def run():
        axis = data_axis()
        sharding = () if stage is None else (fds.shard_optimizer(axis, stage=stage, bucket_bytes=300),)
        n = microbatches * (2 if stage is None else 1)
        step = fds.compose(
            *sharding, fds.accumulate(n), views(*functions), fds.freeze("frozen"), *more, fds.sgd(0.1, momentum=0.9)
        )(loss_fn)
        state, told = step.init(parameters(), key=1), []
        for _ in range(steps):
            state, metrics = step(state, mine(ROWS, axis))
            told.append(metrics)
        return step.params(state), told, step.evaluate(state, mine(ROWS, axis))

    return run() if stage is None else fds.simulate(run, 2)[1]


@pytest.mark.parametrize("name", VIEWS)
def test_stage_3_trains_through_views_as_the_plain_step_to_the_bit(name):
    got, want = (trained(VIEWS[name], stage, microbatches=1) for stage in (3, None))
    assert_same_bits(got[0], want[0])
    assert_rounding(got[1:], want[1:], additions=64)


@pytest.mark.parametrize("extra", [fds.checkpoint_activations, fds.precision, fds.donate])
def test_views_and_other_transforms(extra):
    assert_same_bits(trained(VIEWS["several"], 3, extra())[0], trained(VIEWS["several"], 2, extra())[0])


def test_a_view_may_begin_and_end_with_time():
    assert_same_bits(trained((in_turns,), 3)[0], trained((in_turns,), 2)[0])


def counting(counts):
    def view(x, leaf, call):
        if not leaf.trained or len(leaf.shape) < 2:
            return x
        seen = x * x
        seen.register_hook(lambda grad: counts.append(leaf.name)) if call.training else None
        return seen

    return view


def test_the_backward_of_a_view_runs_once_a_microbatch():
    counts = []
    want = trained((counting([]),), 2)[0]
    assert_same_bits(trained((counting(counts),), 3)[0], want)
    used = [f"layers.{i}.w" for i in range(4)]
    assert {name: counts.count(name) for name in set(counts)} == dict.fromkeys(used, 2 * 2 * 3)  # ranks, microbatches


def layers():
    tied = lambda: fds.TiedLayerSpec("w", nn.Linear, WIDTH, WIDTH)
    between = [torch.tanh, fds.LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh]
    return fds.Layers([tied(), *between, tied()], nn.MSELoss())


@pytest.mark.parametrize("schedule", [plans.one_f_one_b, plans.zb_h1])
def test_views_at_stage_3_inside_a_pipeline(schedule):
    batch = ROWS, torch.ones_like(ROWS)

    def run(*more, axis=None):
        counts, loss = [], layers()
        step = fds.compose(*more, views(drop_connect, counting(counts)), fds.sgd(0.5))(loss)
        state = step.init(loss.init, key=1)
        for _ in range(2):
            state, _ = step(state, batch if axis is None else mine(batch, axis))
        return step.params(state), counts

    def staged():
        mesh = fds.mesh(pp=2, dp=2)
        pipeline = fds.pipeline(schedule, mesh["pp"], num_microbatches=2)
        return run(pipeline, fds.shard_optimizer(mesh["dp"], stage=3, bucket_bytes=300), axis=mesh["dp"])

    want, _ = run(fds.accumulate(4))
    found = fds.simulate(staged, 4)
    for got, _ in found:
        assert_rounding(got, want, additions=4096)
    counts = [name for _, names in found for name in names]
    assert counts.count("4.weight") + counts.count("2.weight") == 2 * 2 * 2  # data ranks, microbatches, steps
    assert counts.count("w.weight") == 2 * (2 * 2 * 2)  # on both stages


def step_twice(view, loss=lambda p, x: (x @ p["w"]).square().mean()):
    axis = data_axis()
    step = fds.compose(fds.shard_optimizer(axis, stage=3), views(view), fds.sgd(0.1))(loss)
    state = step.init({"w": torch.ones(8, 8)})
    for _ in range(2):
        state, _ = step(state, mine(ROWS, axis))
    return step.params(state)


def stepped(*args):
    return fds.simulate(lambda: step_twice(*args), 2)[0]


def grows(x, leaf, call):
    return x if call.calls == 0 else x.repeat(2, 1)


def writes(x, leaf, call):
    x.detach().mul_(2)
    return x


def writes_unseen(x, leaf, call):
    x.data.mul_(2)
    return x


def fails(x, leaf, call):
    raise ValueError("no such scale")


def test_what_stage_3_cannot_follow_is_refused():
    with pytest.raises(ComposeError, match="another kind of tensor") as caught:
        stepped(grows)
    assert caught.value.where == "station 'view', w"
    for view in (writes, writes_unseen):
        with pytest.raises(LossError, match="a view writes over the parameter"):
            stepped(view)
    with pytest.raises(ValueError, match="no such scale"):
        stepped(fails)


def test_a_viewed_parameter_may_first_be_read_in_inference_mode():
    def over_largest(mode):
        def loss(p, x):
            with mode():
                largest = float(p["w"].abs().max())
            return (x @ p["w"]).square().mean() / largest

        return stepped(lambda x, leaf, call: x * 2, loss)  # the number becomes a tensor too

    assert_same_bits(over_largest(torch.inference_mode), over_largest(torch.no_grad))


def test_what_has_no_handle_is_made_at_once():
    sparse = lambda x, leaf, call: x.to_sparse()
    want = stepped(lambda x, leaf, call: x, lambda p, x: (p["w"] @ x.T).square().mean())
    got = stepped(sparse, lambda p, x: torch.sparse.mm(p["w"], x.T).square().mean())
    assert_rounding(got, want, additions=256)


def compiled_and_not():
    compiled = lambda f: torch.compile(f, backend="eager")
    half, loss = lambda x: x / 2, lambda p, x: torch.tanh(x @ p["w"]).square().mean()
    want = step_twice(lambda x, leaf, call: half(x), loss)
    inner = compiled(half)
    assert_same_bits(step_twice(lambda x, leaf, call: half(x), compiled(loss)), want)
    assert_same_bits(step_twice(lambda x, leaf, call: inner(x), loss), want)


def test_compiled_losses_and_views_on_two_ranks():
    ranks.run(compiled_and_not)


def test_a_viewed_parameter_that_is_read_after_its_step_says_what_is_wrong():
    kept = []

    def loss(p, x):
        kept.append(p["w"])
        return (x @ p["w"]).square().mean()

    stepped(lambda x, leaf, call: 2 * x, loss)
    with pytest.raises(LossError, match="read after its step"):
        kept[0] + 1
    assert tree.is_float(kept[0])


def test_what_a_view_keeps_for_backward_goes_when_layers_are_recomputed():
    layers = fds.Layers([nn.Linear(31, 31) for _ in range(3)], nn.MSELoss())

    @fds.step.transform
    def bent():
        view = lambda x, leaf, call: x.tanh() if leaf.name.endswith("weight") else x
        return lambda step: fds.step.fill(step, view=view)

    def alive():
        shard = fds.shard_optimizer(data_axis(), stage=3)
        step = fds.compose(shard, bent(), fds.checkpoint_activations(), fds.sgd(0.1))(layers)
        state, counts = step.init(layers.init), []
        for _ in range(3):
            state, _ = step(state, (torch.ones(2, 31), torch.ones(2, 31)))
            gc.collect()
            counts.append(sum(type(x) is torch.Tensor and x.shape == (31, 31) for x in gc.get_objects()))
        return counts

    for first, *_, last in fds.simulate(alive, 2):
        assert last <= first
