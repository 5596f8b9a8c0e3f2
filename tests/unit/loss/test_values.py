"""What a loss returns: read once, and refused at once."""

import contextlib

import attrs
import pytest
import torch

import fds
from fds.errors import LossError
from fds.loss import read
from tests.bits import assert_same_bits, snapshot

PARAMS = {"w": torch.tensor([1.0, 2.0])}
BATCH = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])


def value(params, batch):
    return (batch @ params["w"]).mean()


def run(returns, *transforms, batch=BATCH):
    step = fds.compose(*transforms, fds.sgd(0.1))(returns)
    return step(step.init(PARAMS), batch)


def counted(*returns):
    """A loss that returns one of these after another."""
    turns = iter(returns)
    return lambda p, b: next(turns)(p, b)


def test_a_scalar_is_a_mean_of_weight_one():
    a, b = run(value), run(lambda p, batch: fds.Mean(value(p, batch), 1))
    assert_same_bits(a, b)


def test_a_mean_divides_the_total_by_the_weight():
    _, metrics = run(lambda p, batch: fds.Mean((batch @ p["w"]).sum(), len(batch)))
    assert_same_bits(metrics["loss"], value(PARAMS, BATCH))


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor(3.0), torch.tensor(3.0, requires_grad=True)])
def test_a_weight_is_any_number_and_has_no_gradient(weight):
    state, metrics = run(lambda p, batch: fds.Mean(value(p, batch) * 3, weight))
    torch.testing.assert_close(metrics["loss"], value(PARAMS, BATCH))
    torch.testing.assert_close(state.params, run(value)[0].params)


def test_microbatches_of_different_weight_combine_exactly():
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])

    def loss(p, batch):
        x, m = batch
        return fds.Mean(((x @ p["w"]) * m).sum(), m.sum())

    _, whole = run(loss, batch=(BATCH, mask))
    _, parts = run(loss, fds.accumulate(2), batch=(BATCH, mask))
    assert_same_bits(parts["loss"], whole["loss"])


def test_float_metrics_are_averaged_by_the_weights_and_integers_are_summed():
    parts = [
        lambda p, b: (
            fds.Mean(value(p, b), 1),
            {"f": torch.tensor(4.0), "n": torch.tensor(1), "on": torch.tensor(True)},
        ),
        lambda p, b: (
            fds.Mean(value(p, b), 3),
            {"f": torch.tensor(8.0), "n": torch.tensor(2), "on": torch.tensor(True)},
        ),
    ]
    _, metrics = run(counted(*parts), fds.accumulate(2))
    assert metrics["f"] == 7.0
    assert (metrics["n"].item(), metrics["n"].dtype) == (3, torch.int64)
    assert (metrics["on"].item(), metrics["on"].dtype) == (2, torch.int64)


def test_metrics_may_be_python_numbers():
    _, metrics = run(lambda p, b: (value(p, b), {"f": 0.5, "n": 2, "on": True}), fds.accumulate(4))
    assert {k: metrics[k].item() for k in ("f", "n", "on")} == {"f": 0.5, "n": 8, "on": 4}
    assert all(isinstance(x, torch.Tensor) and x.dim() == 0 for x in metrics.values())


def test_metrics_have_no_graph():
    _, metrics = run(lambda p, b: (value(p, b), {"w": p["w"].sum()}))
    assert not metrics["w"].requires_grad


@pytest.mark.parametrize(
    ("returns", "word"),
    [
        (lambda p, b: b @ p["w"], "scalar"),
        (lambda p, b: (b @ p["w"]).sum(0, keepdim=True), "scalar"),
        (lambda p, b: value(p, b).long(), "floating"),
        (lambda p, b: value(p, b).detach(), "depend"),
        (lambda p, b: torch.tensor(1.0), "depend"),
        (lambda p, b: 1.0, "tensor"),
        (lambda p, b: None, "tensor"),
        (lambda p, b: (value(p, b),), "scalar and a dict"),
        (lambda p, b: (value(p, b), {}, {}), "scalar and a dict"),
        (lambda p, b: (value(p, b), [1]), "scalar and a dict"),
        (lambda p, b: (value(p, b), None), "scalar and a dict"),
        (lambda p, b: (value(p, b), {"m": b}), "metric"),
        (lambda p, b: (value(p, b), {"m": "text"}), "metric"),
        (lambda p, b: (value(p, b), {"m": None}), "metric"),
        (lambda p, b: (value(p, b), {"m": torch.tensor(1j)}), "metric"),
        (lambda p, b: (value(p, b), {"loss": 1.0}), "reserved"),
        (lambda p, b: (value(p, b), {"lr": 1.0}), "reserved"),
        (lambda p, b: (value(p, b), {3: 1.0}), "reserved"),
        (lambda p, b: fds.Mean(b @ p["w"], 1), "scalar"),
        (lambda p, b: fds.Mean(value(p, b), torch.ones(2)), "weight"),
        (lambda p, b: fds.Mean(value(p, b), None), "weight"),
        (lambda p, b: fds.Mean(value(p, b), "3"), "weight"),
    ],
)
def test_what_a_loss_must_not_return_is_refused_and_the_state_stays(returns, word):
    step = fds.compose(fds.donate(), fds.sgd(0.1))(returns)
    state = step.init(PARAMS)
    before = snapshot(state)
    with pytest.raises(LossError, match=word):
        step(state, BATCH)
    assert_same_bits(state, before)
    state.check("be used again")


def test_a_refusal_names_the_loss_and_the_metric():
    def my_loss(p, b):
        return value(p, b), {"accuracy": b}

    with pytest.raises(LossError) as caught:
        run(my_loss)
    assert caught.value.where == "my_loss, metrics['accuracy']"
    assert "(4, 2)" in caught.value.got


@pytest.mark.parametrize("metrics", [({"a": 1.0}, {"b": 1.0}), ({"a": 1.0}, {}), ({}, {"a": 1.0})])
def test_microbatches_that_return_different_metrics_are_refused(metrics):
    losses = [lambda p, b, m=m: (value(p, b), m) for m in metrics]
    with pytest.raises(LossError, match="different metrics"):
        run(counted(*losses), fds.accumulate(2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16])
def test_weights_of_few_bits_are_added_in_many(dtype):
    """A mask summed in the dtype of the computation wraps, or overflows, or stands still."""
    weight = torch.tensor({torch.float16: 60000, torch.int16: 30000}.get(dtype, 100), dtype=dtype)
    loss = lambda p, b: fds.Mean(value(p, b) * weight.double(), weight)
    _, metrics = run(loss, fds.accumulate(4))
    torch.testing.assert_close(metrics["loss"].float(), value(PARAMS, BATCH))


def test_metrics_of_few_bits_are_averaged_in_many():
    loss = lambda p, b: (fds.Mean(value(p, b) * 4096, 4096), {"m": torch.tensor(32.0, dtype=torch.float16)})
    assert run(loss)[1]["m"] == 32.0


def test_metrics_are_nobody_elses_memory():
    count = torch.tensor(3)
    _, metrics = run(lambda p, b: (value(p, b["x"]), {"n": b["n"]}), batch={"x": BATCH, "n": count})
    count.fill_(9)
    assert metrics["n"] == 3


# --- buffers ---


def counting(p, batch, buffers):
    return value(p, batch), {}, {"n": buffers["n"] + len(batch), "last": batch[-1].clone()}


START = {"n": torch.tensor(0), "last": torch.zeros(2)}


def test_microbatches_thread_their_buffers_in_order():
    state, _ = run(fds.with_buffers(counting, START), fds.accumulate(4))
    assert_same_bits(state.buffers, {"n": torch.tensor(4), "last": BATCH[-1]})


def test_the_initial_buffers_are_copied():
    buffers = snapshot(START)
    step = fds.compose(fds.sgd(0.1))(fds.with_buffers(counting, buffers))
    state = step.init(PARAMS)
    buffers["n"].fill_(7)
    assert state.buffers["n"] == 0
    assert START["n"] == 0


def test_evaluating_leaves_the_buffers():
    step = fds.compose(fds.sgd(0.1))(fds.with_buffers(counting, START))
    state = step.init(PARAMS)
    step.evaluate(state, BATCH)
    assert_same_bits(state.buffers, START)


@pytest.mark.parametrize(
    ("returns", "word"),
    [
        (lambda p, b, bufs: value(p, b), "three"),
        (lambda p, b, bufs: (value(p, b), {}), "three"),
        (lambda p, b, bufs: (value(p, b), {}, {}), "other buffers"),
        (lambda p, b, bufs: (value(p, b), {}, {**bufs, "more": b}), "other buffers"),
        (lambda p, b, bufs: (value(p, b), {}, None), "other buffers"),
        (lambda p, b, bufs: (value(p, b), {}, {**bufs, "n": 1.0}), "buffer"),
        (lambda p, b, bufs: (value(p, b), {}, {**bufs, "n": torch.zeros(5)}), "buffer"),
        (lambda p, b, bufs: (value(p, b), {}, {**bufs, "n": torch.zeros(())}), "buffer"),
    ],
)
def test_other_buffers_than_were_given_are_refused(returns, word):
    with pytest.raises(LossError, match=word):
        run(fds.with_buffers(returns, START))


def test_a_buffer_that_grows_is_refused_with_what_to_do():
    grows = lambda p, batch, buffers: (value(p, batch), {}, {"cache": torch.cat([buffers["cache"], batch])})
    with pytest.raises(LossError, match="cache") as error:
        run(fds.with_buffers(grows, {"cache": BATCH}))
    assert "largest size" in error.value.hint


def test_a_loss_that_writes_into_its_buffers_does_not_write_into_the_state():
    def careless(p, batch, buffers):
        buffers["n"].add_(1)
        return value(p, batch), {}, buffers

    step = fds.compose(fds.sgd(0.1))(fds.with_buffers(careless, {"n": torch.tensor(0)}))
    state = step.init(PARAMS)
    with contextlib.suppress(LossError):
        step(state, BATCH)
        step.evaluate(state, BATCH)
    assert state.buffers["n"] == 0


def test_a_buffer_that_is_a_view_of_the_batch_does_not_follow_it():
    batch = BATCH.clone()
    loss = fds.with_buffers(lambda p, b, bufs: (value(p, b), {}, {"last": b[-1]}), {"last": torch.zeros(2)})
    state, _ = run(loss, batch=batch)
    batch.zero_()
    assert_same_bits(state.buffers["last"], BATCH[-1])


@pytest.mark.parametrize("more", [(), (fds.donate(),)], ids=["pure", "donated"])
def test_a_buffer_may_remember_the_parameters(more):
    loss = fds.with_buffers(lambda p, b, bufs: (value(p, b), {}, {"old": p["w"]}), {"old": torch.zeros(2)})
    state, _ = run(loss, *more)
    assert_same_bits(state.buffers["old"], PARAMS["w"])


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize(
    "more", [[], [fds.loss_scale(8.0)], [fds.clip_by_global_norm(1)], [fds.donate()]], ids=range(4)
)
def test_a_batch_that_weighs_nothing_is_a_step_that_is_skipped(weight, more):
    weights = iter([4.0, weight])
    step = fds.compose(*more, fds.ema(0.5), fds.adamw(0.1))(
        lambda p, b: (fds.Mean(value(p, b), w := next(weights)), {"share": value(p, b) / w, "n": 3})
    )
    state, _ = step(step.init(PARAMS), BATCH)
    before = snapshot(state)
    after, metrics = step(state, BATCH)
    assert bool(metrics["skipped"]) and int(metrics["step"]) == int(before.step) == 1
    assert_same_bits(attrs.evolve(after, calls=before.calls), before)
    assert all(x.isfinite() for x in metrics.values()) and metrics["loss"] == value(before.params, BATCH)
    assert (float(metrics["share"]), int(metrics["n"])) == (0.0, 3)


def test_a_microbatch_that_weighs_nothing_does_not_count_in_means():
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])

    def loss(p, batch):
        x, m = batch
        kept = m.sum()
        return fds.Mean(((x @ p["w"]) * m).sum(), kept), {"mean": ((x @ p["w"]) * m).sum() / kept}

    _, metrics = run(loss, fds.accumulate(2), batch=(BATCH, mask))
    assert metrics["mean"] == metrics["loss"] == value(PARAMS, BATCH[:2]) and not metrics["skipped"]


def test_evaluating_nothing_is_not_a_number():
    step = fds.compose(fds.sgd(0.1))(lambda p, b: fds.Mean((b @ p["w"]).sum() * 0, 0.0))
    assert step.evaluate(step.init(PARAMS), BATCH)["loss"].isnan()


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**70, 2**20_000], ids=int.bit_length)
def test_an_integer_beyond_int64_is_refused(number):
    with pytest.raises(LossError, match="beyond int64") as caught:
        run(lambda p, b: (value(p, b), {"n": number}))
    assert "metrics['n']" in caught.value.where


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
def test_the_integers_of_int64_are_metrics(number):
    _, metrics = run(lambda p, b: (value(p, b), {"n": number}))
    assert int(metrics["n"]) == number


@pytest.mark.parametrize("weight", [float("inf"), float("nan"), 2**1024, 2**20_000, True, -1], ids=range(6))
def test_a_weight_that_is_no_finite_number_is_refused(weight):
    with pytest.raises(LossError, match="weight of a Mean"):
        run(lambda p, b: fds.Mean(value(p, b), weight))


def test_a_weight_on_the_cpu_is_a_number_to_a_loss_on_another_device():
    """As a tensor it would be sent there for every use, which waits for what is queued on a GPU."""
    total = torch.zeros((), device="meta", requires_grad=True)
    outcome = read(fds.Mean(total, torch.tensor(3)), where="loss", buffers={})
    assert (outcome.weight, type(outcome.weight)) == (3.0, float)
