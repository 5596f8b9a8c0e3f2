"""One call of a step: what it counts, reports, and leaves alone."""

import random as python_random

import attrs
import numpy
import pytest
import torch
from torch import nn

import fds
from fds import tree
from fds.errors import LossError, StateError
from fds.step import Split
from tests.bits import assert_same_bits, snapshot
from tests.unit.step.problem import BATCH, loss_fn, make, make_params


def test_a_step_is_the_hand_written_one():
    step = make(optimizer=fds.sgd(0.1))
    state = step.init(make_params())
    new, metrics = step(state, BATCH)
    value, grads = fds.autodiff.value_and_grad(loss_fn)(state.params, BATCH)
    assert_same_bits(metrics["loss"], value)
    for name in ("w", "b"):
        want = state.params["net"][name] - 0.1 * grads["net"][name]
        torch.testing.assert_close(new.params["net"][name], want)
    assert_same_bits(new.params["count"], state.params["count"])


def test_metrics_are_scalars_under_known_names():
    _, metrics = (step := make())(step.init(make_params()), BATCH)
    assert set(metrics) == {"loss", "step", "lr"}
    step = make(fds.loss_scale(), fds.clip_by_global_norm(1.0))
    _, metrics = step(step.init(make_params()), BATCH)
    assert set(metrics) == {"loss", "step", "lr", "grad_norm", "loss_scale", "skipped", "at_minimum_scale"}
    assert all(x.shape == () and not x.requires_grad for x in metrics.values())


def test_updates_and_calls_are_counted():
    step = make()
    state = step.init(make_params())
    for n in range(1, 4):
        state, metrics = step(state, BATCH)
        assert (state.step.item(), state.calls.item(), metrics["step"].item()) == (n, n, n)


def test_a_skipped_step_is_a_call_and_no_update():
    step = make(fds.skip_nonfinite())
    state, _ = step(step.init(make_params()), BATCH)
    new, metrics = step(state, {**BATCH, "x": BATCH["x"] * float("nan")})
    assert metrics["skipped"]
    assert (new.step.item(), new.calls.item()) == (1, 2)
    assert_same_bits((new.params, new.opt, new.key), (state.params, state.opt, state.key))


def test_the_schedule_follows_updates():
    rates = []
    step = make(fds.skip_nonfinite(), optimizer=fds.sgd(lambda t: 0.1 / (t + 1)))
    state = step.init(make_params())
    for scale in (1.0, float("inf"), 1.0):
        state, metrics = step(state, {**BATCH, "x": BATCH["x"] * scale})
        rates.append(metrics["lr"].item())
    assert rates == pytest.approx([0.1, 0.05, 0.05])


def test_random_numbers_follow_the_calls_and_the_key():
    draw = lambda p, batch: (p["w"].sum(), {"draw": torch.rand(())})
    step = make(loss=draw)
    a, first = step(step.init({"w": torch.ones(2)}), BATCH)
    _, second = step(a, BATCH)
    _, other = step(step.init({"w": torch.ones(2)}, key=1), BATCH)
    again = step(step.init({"w": torch.ones(2)}), BATCH)[1]
    assert first["draw"] == again["draw"]
    assert len({m["draw"].item() for m in (first, second, other)}) == 3


def test_microbatches_draw_different_numbers():
    seen = []
    step = make(fds.accumulate(4), loss=lambda p, b: (seen.append(torch.rand(()).item()), p["w"].sum())[1])
    step(step.init({"w": torch.ones(2)}), BATCH)
    assert len(set(seen)) == 4


def test_the_first_microbatch_draws_as_the_plain_step():
    seen = []
    loss = lambda p, b: (seen.append(torch.rand(()).item()), p["w"].sum())[1]
    for step in (make(loss=loss), make(fds.accumulate(4), loss=loss)):
        step(step.init({"w": torch.ones(2)}), BATCH)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("at", [0, 1])
def test_a_loss_that_raises_leaves_everything(at):
    calls = []

    def loss(params, batch):
        torch.rand(3)
        calls.append(0)
        if len(calls) > at:
            raise KeyError("in the loss")
        return loss_fn(params, batch)

    step = make(fds.accumulate(2), fds.donate(), loss=loss)
    state = step.init(make_params())
    before, generator = snapshot(state), torch.get_rng_state()
    with pytest.raises(KeyError, match="in the loss"):
        step(state, BATCH)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_same_bits(state, before)
    state.check("be used again")
    assert torch.is_grad_enabled()


def test_no_generator_moves():
    torch.manual_seed(3)
    before = (torch.get_rng_state(), python_random.getstate(), repr(numpy.random.get_state()))
    step = make(loss=lambda p, b: (p["w"] * torch.rand(2)).sum())
    state, _ = step(step.init({"w": torch.ones(2)}), BATCH)
    step.evaluate(state, BATCH)
    step.describe(state, BATCH)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (python_random.getstate(), repr(numpy.random.get_state())) == before[1:]


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_a_step_is_the_same_in_any_context(context):
    step = make()
    state = step.init(make_params())
    want = step(state, BATCH)
    with context():
        assert_same_bits(step(state, BATCH), want)


def test_a_step_within_a_loss_is_a_step():
    inner = make()
    frozen_state = inner.init(make_params())

    def loss(params, batch):
        draws = torch.rand(2)
        _, metrics = inner(frozen_state, batch)
        return (params["w"] * draws).sum() + metrics["loss"] + torch.rand(())

    outer = make(loss=loss)
    state = outer.init({"w": torch.ones(2)})
    assert_same_bits(outer(state, BATCH), outer(state, BATCH))


def test_what_the_loss_closes_over_gets_no_gradient():
    outside = torch.ones(2, requires_grad=True)
    step = make(loss=lambda p, b: (p["w"] * outside).sum())
    step(step.init({"w": torch.ones(2)}), BATCH)
    assert outside.grad is None


def _write_batch(params, batch):
    batch["x"].mul_(2)
    return loss_fn(params, batch)


def _write_parameters(params, batch):
    with torch.no_grad():
        params["net"]["w"].mul_(2)
    return loss_fn(params, batch)


def _write_integers(params, batch):
    params["count"].add_(1)
    return loss_fn(params, batch)


@pytest.mark.parametrize(
    ("loss", "path"),
    [(_write_batch, "batch.x"), (_write_parameters, "params.net.w"), (_write_integers, "params.count")],
)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_loss_that_writes_into_its_arguments_is_refused(loss, path, call):
    step = make(loss=loss)
    state, batch = step.init(make_params()), snapshot(BATCH)
    with pytest.raises(fds.errors.LossError, match="writes over") as caught:
        step(state, batch) if call == "step" else step.evaluate(state, batch)
    assert caught.value.where == path


class _Echo(torch.autograd.Function):
    """A product whose gradient by `w` is the memory of `x` itself, as a fast backward may return it."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(x)
        return (w * x).sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x, None


def test_a_gradient_that_is_the_batch_is_not_written_over():
    step = make(
        fds.accumulate(2), fds.clip_by_value(0.1), loss=lambda p, b: _Echo.apply(p["w"], b["x"]) + p["v"].sum() * 0
    )
    batch = {"x": torch.randn(8, 3)}
    before = snapshot(batch)
    state = step.init({"w": torch.ones(4, 3), "v": torch.ones(1)})
    first = step(state, batch)
    assert_same_bits(batch, before)
    assert_same_bits(step(state, batch), first)


def test_a_loss_without_trained_parameters_is_evaluated():
    step = make(fds.freeze("*"), fds.clip_by_global_norm(1.0))
    state = step.init(make_params())
    new, metrics = step(state, BATCH)
    assert_same_bits(new.params, state.params)
    assert metrics["grad_norm"] == 0.0
    assert new.step == 1


def test_something_that_is_no_state_is_refused():
    with pytest.raises(StateError, match="not a state"):
        make()(make_params(), BATCH)


def test_parameters_are_returned_as_copies():
    step = make()
    state = step.init(make_params())
    got = step.params(state)
    assert_same_bits(got, state.params)
    tree.map(lambda x: x.zero_(), got)
    assert state.params["net"]["w"].abs().sum() > 0


def test_leaves_are_named_by_their_key_paths():
    loss = fds.Layers([nn.Linear(3, 2)], nn.MSELoss())
    step = make(fds.ema(0.9), loss=loss)
    names = tree.paths(step.init(loss.init))
    assert {"opt.exp_avg.0.weight", "params.0.bias", "slots.ema.0.weight", "step", "calls", "key"} <= names.keys()
    assert "opt.exp_avg.net.w" in tree.paths(make().init(make_params()))


def test_a_step_is_a_value():
    plain = make()
    state = plain.init(make_params())
    halves = attrs.evolve(plain, split=Split(2))
    assert_same_bits(halves(state, BATCH), make(fds.accumulate(2))(state, BATCH))
    assert_same_bits(plain(state, BATCH), make()(state, BATCH))
    assert halves.runtime.pool is not plain.runtime.pool


# --- evaluate ---


def with_modes():
    """The same model, opaque and as Layers: dropout and batch norm show the mode."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    apply, params, buffers = fds.functional(net)

    def opaque(params, batch, buffers):
        out, new = apply.with_buffers(params, buffers, batch[0])
        return nn.functional.mse_loss(out, batch[1]), {}, new

    return net, params, {"opaque": fds.with_buffers(opaque, buffers), "layers": fds.Layers(net, nn.MSELoss())}


@pytest.mark.parametrize("kind", ["opaque", "layers"])
def test_evaluating_runs_modules_in_eval_mode_and_shows_their_output(kind):
    net, params, losses = with_modes()
    step = make(fds.accumulate(2), loss=losses[kind])
    batch = (BATCH["x"], BATCH["y"])
    state, _ = step(step.init(params), batch)
    metrics = step.evaluate(state, batch, outputs=True)
    net.load_state_dict({**state.params, **state.buffers})
    out = net.eval()(batch[0])
    torch.testing.assert_close(metrics["outputs"], out)
    torch.testing.assert_close(metrics["loss"], nn.functional.mse_loss(out, batch[1]))
    assert not metrics["outputs"].requires_grad
    assert metrics["step"] == 1
    assert "outputs" not in step.evaluate(state, batch)


@pytest.mark.parametrize("kind", ["opaque", "layers"])
def test_evaluating_does_not_end_training(kind):
    _, params, losses = with_modes()
    step = make(loss=losses[kind])
    state, batch = step.init(params), (BATCH["x"], BATCH["y"])
    first = step(state, batch)
    step.evaluate(state, batch)
    assert_same_bits(step(state, batch), first)


def test_another_function_may_be_evaluated():
    step = fds.compose(fds.sgd(0.1))(loss_fn, eval_fn=lambda p, b: (loss_fn(p, b) * 2, {"accuracy": 0.5}))
    state = step.init(make_params())
    metrics = step.evaluate(state, BATCH)
    assert_same_bits(metrics["loss"], loss_fn(state.params, BATCH) * 2)
    assert metrics["accuracy"] == 0.5
    assert "accuracy" not in step(state, BATCH)[1]


def test_an_evaluator_serves_many_batches():
    step = make()
    state = step.init(make_params())
    evaluate = step.evaluator(state)
    for rows in (2, 8):
        batch = tree.map(lambda x, n=rows: x[:n], BATCH)
        assert_same_bits(evaluate(batch), step.evaluate(state, batch))


def test_a_loss_that_shows_no_outputs_says_so():
    step = make()
    with pytest.raises(LossError, match="outputs"):
        step.evaluate(step.init(make_params()), BATCH, outputs=True)


@pytest.mark.parametrize("value", [lambda p, b: b["x"], lambda p, b: 3.0, lambda p, b: (p["net"]["w"].sum(), [1])])
def test_what_a_loss_must_not_return_eval_must_not_either(value):
    step = fds.compose(fds.sgd(0.1))(loss_fn, value)
    with pytest.raises(LossError):
        step.evaluate(step.init(make_params()), BATCH)


def test_threads_with_different_trees_get_their_own_structure():
    step = fds.compose(fds.sgd())(lambda params, batch: sum((x * batch).sum() for x in tree.leaves(params)))
    one, two = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": [torch.ones(2)]}
    (first, _), (second, _) = step.structure_of(one), step.structure_of(two)

    class Interrupted(list):  # another thread reads its tree as soon as this one has looked at what was read last
        def __getitem__(self, at):
            found = super().__getitem__(at)
            if not busy:
                busy.append(True)
                step.structure_of(one)
            return found

    busy: list = []
    step.runtime.recent = Interrupted(step.runtime.recent)
    assert step.structure_of(two)[0] is second is not first
