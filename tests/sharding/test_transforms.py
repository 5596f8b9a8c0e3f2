"""Every optimizer and transform on slices of many parameters, against the plain step of all rows in float64."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import fds
from tests.bits import assert_same_bits
from tests.sharding.models import data_axis, largest_difference, mine

D = torch.float64


def fall(t):
    return 0.05 / (t + 1)


# Those that divide do so by at least 1e-2, so what a gradient loses is multiplied by at most 100 lr a step.
OPTIMIZERS = {
    "sgd": lambda: fds.sgd(fall, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: fds.adamw(fall, eps=1e-2),
    "adam": lambda: fds.adam(0.01, eps=1e-2, weight_decay=0.1),
    "lamb": lambda: fds.lamb(0.01, eps=1e-2, weight_decay=0.1),
    "lion": lambda: fds.lion(0.01, weight_decay=0.1),
    "adagrad": lambda: fds.adagrad(0.01, eps=1e-2),
    "muon and adamw": lambda: fds.by_name(
        {"*.bias": fds.adamw(0.01, eps=1e-2), "*norm*": fds.sgd(0.1), "*": fds.muon(fall)}
    ),
    "groups": lambda: fds.by_name(
        {"0.*": fds.lamb(fall, eps=1e-2), "*.bias": fds.sgd(fall, momentum=0.5), "*": fds.adagrad(0.01, eps=1e-2)}
    ),
}
MORE = {
    "value, then norm": lambda: [fds.clip_by_value(0.05), fds.clip_by_global_norm(0.1)],
    "norm, then value": lambda: [fds.clip_by_global_norm(0.1), fds.clip_by_value(0.02)],
    "ema": lambda: [fds.ema(0.9), fds.ema(0.5, name="fast")],
    "donate": lambda: [fds.donate(), fds.ema(0.9)],
    "freeze": lambda: [fds.freeze("0.weight", "norm.*")],
    "scale": lambda: [fds.static_loss_scale(2.0**6), fds.clip_by_global_norm(0.1)],
    "skip": lambda: [fds.skip_nonfinite()],
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(5, 12))
        self.norm = nn.LayerNorm(12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 7)

    def forward(self, x):
        x = getattr(self, "0")(x)
        for block in self.blocks:
            x = x + torch.tanh(block(self.norm(x)))
        return self.head(x)


with torch.random.fork_rng():
    torch.manual_seed(0)
    APPLY, PARAMS, _ = fds.functional(Net().to(D))


def token_loss(params, batch):
    """Weigh by what is not ignored, and tell a float and an integer metric."""
    logits, kept = APPLY(params, batch["x"]), batch["y"] >= 0
    total = F.cross_entropy(logits, batch["y"], ignore_index=-1, reduction="sum")
    hits = (logits.argmax(-1) == batch["y"]) & kept
    return fds.Mean(total, kept.sum()), {"accuracy": hits.sum() / kept.sum(), "tokens": kept.sum(), "calls": 1}


def batch_of(rows, kept):
    """Return rows of which the first ones ignore more than the last ones."""
    g = torch.Generator().manual_seed(rows)
    y = torch.randint(0, 7, (rows,), generator=g)
    ignored = torch.rand(rows, generator=g) * torch.linspace(1.5, 0.5, rows) > kept
    ignored[::2] = False
    return {"x": torch.randn(rows, 5, generator=g, dtype=D), "y": y.masked_fill(ignored, -1)}


@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(MORE)),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([100, 1500, 2**20]),
    st.sampled_from([1.0, 4.0]),
)
def test_every_optimizer_and_transform_is_the_plain_one(optimizer, more, ranks, n, stage, size, predivide):
    if more == "freeze" and optimizer in ("muon and adamw", "groups"):
        return  # by_name refuses a pattern that matches nothing
    make = lambda *t: fds.compose(*MORE[more](), *t, OPTIMIZERS[optimizer]())(token_loss)
    batches = [batch_of(2 * ranks * n, kept) for kept in (0.7, 0.9, 0.5)]
    plain = make(fds.accumulate(ranks * n))
    state = plain.init(PARAMS)
    for batch in batches:
        state, metrics = plain(state, batch)
    averages = {k: v for k, v in state.slots.items() if k in ("ema", "fast")}

    def run():
        axis = data_axis()
        sharding = fds.shard_optimizer(axis, stage=stage, bucket_bytes=size, predivide=predivide)
        step = make(fds.accumulate(n), sharding)
        state = step.init(PARAMS)
        for batch in batches:
            state, told = step(state, mine(batch, axis))
        mean = {k: step.params(attrs.evolve(state, params=state.slots[k])) for k in averages}
        return step.params(state), mean, told

    results = fds.simulate(run, ranks)
    for got, mean, told in results:
        assert_same_bits((got, mean, told), results[0])
        # 2**12 additions of size 1, lr / eps = 5 and 3 steps; muon's 16-bit matrices round one way or the other
        bound = 2**-7 if "muon" in optimizer else torch.finfo(D).eps * 2**12 * 5 * 3
        assert largest_difference(got, state.params) <= bound
        assert largest_difference(mean, averages) <= bound
        assert told.keys() == metrics.keys()
        for name, x in told.items():
            assert x.dtype == metrics[name].dtype
            assert abs(float(x) - float(metrics[name])) <= (bound if x.dtype == D else 1e-6) * 100


@pytest.mark.parametrize("stage", range(4))
def test_muon_on_many_ranks_is_muon_on_one_to_the_bit(stage):
    """Its matrices are whole on one rank, and two gradients are added in either order alike."""
    loss = lambda p, b: F.mse_loss(torch.tanh(b @ p["a"]) @ p["b"], b[:, :3])
    params = {"a": torch.randn(5, 8), "b": torch.randn(8, 3), "c": torch.randn(4, 4)}
    batch = torch.randn(4, 5)
    plain = fds.compose(fds.accumulate(2), fds.muon(0.1))(loss)
    state = plain.init(params)
    for _ in range(3):
        state, _ = plain(state, batch)

    def run():
        axis = data_axis()
        step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=64), fds.muon(0.1))(loss)
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, mine(batch, axis))
        return step.params(state)

    for got in fds.simulate(run, 2):
        assert_same_bits(got, state.params)


@pytest.mark.parametrize("stage", range(4))
def test_ranks_may_have_batches_of_other_sizes(stage):
    batch = batch_of(9, 0.7)
    plain = fds.compose(fds.clip_by_global_norm(0.1), fds.adamw(0.01, eps=1e-2))(token_loss)
    state, metrics = plain(plain.init(PARAMS), batch)

    def run():
        axis = data_axis()
        rows = [slice(0, 1), slice(1, 6), slice(6, 9)][axis.index]
        step = fds.compose(
            fds.shard_optimizer(axis, stage=stage, bucket_bytes=900),
            fds.clip_by_global_norm(0.1),
            fds.adamw(0.01, eps=1e-2),
        )(token_loss)
        state, told = step(step.init(PARAMS), {k: x[rows] for k, x in batch.items()})
        return step.params(state), told

    for got, told in fds.simulate(run, 3):
        assert largest_difference(got, state.params) < 1e-12
        assert abs(float(told["loss"] - metrics["loss"])) < 1e-12 and int(told["tokens"]) == int(metrics["tokens"])
        assert float(told["accuracy"]) == pytest.approx(float(metrics["accuracy"]))
        assert int(told["calls"]) == 3


@pytest.mark.parametrize("stage", range(4))
def test_module_statistics_are_averages_over_ranks(stage):
    torch.manual_seed(0)
    apply, params, buffers = fds.functional(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))

    def loss_fn(params, batch, buffers):
        out, new = apply.with_buffers(params, buffers, batch)
        return out.square().mean(), {}, new

    batch, num = torch.randn(24, 5), 2

    def run():
        axis = data_axis()
        step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=64), fds.accumulate(num), fds.sgd(0.1))(
            fds.with_buffers(loss_fn, buffers)
        )
        state, found = step.init(params), []
        for _ in range(2):
            own = dict(state.buffers)
            whole = step.params(state)
            for part in mine(batch, axis).chunk(num):
                own = apply.with_buffers(whole, own, part)[1]
            state, _ = step(state, mine(batch, axis))
            found.append((own, state.buffers))
        return found

    results = fds.simulate(run, 3)
    for i in range(2):
        for name in buffers:
            each = [own[name] for own, _ in (r[i] for r in results)]
            for _, shared in (r[i] for r in results):
                if name.endswith("num_batches_tracked"):
                    assert int(shared[name]) == num * (i + 1)
                else:
                    torch.testing.assert_close(shared[name], torch.stack(each).mean(0), rtol=1e-6, atol=1e-7)
                assert_same_bits(shared, results[0][i][1])


def two(f, params, *more, **sharding):
    """Step once on two ranks, whose batches are ones and twos; return parameters, metrics and buffers of both."""

    def run():
        axis = data_axis()
        step = fds.compose(fds.shard_optimizer(axis, **sharding), *more)(f)
        state, told = step(step.init(params), torch.full((2,), 1.0 + axis.index))
        return step.params(state), told, state.buffers

    return fds.simulate(run, 2)


def test_metrics_may_come_in_another_order_on_each_rank():
    def f(p, b):
        metrics = {"a": torch.tensor(1.0), "b": torch.tensor(100.0)}
        return p["w"].sum() * b.mean(), metrics if b[0] == 1 else dict(reversed(metrics.items()))

    for _, told, _ in two(f, {"w": torch.ones(4)}, fds.sgd(0.1)):
        assert (float(told["a"]), float(told["b"])) == (1.0, 100.0)


def test_metrics_of_other_names_are_refused():
    f = lambda p, b: (p["w"].sum() * b.mean(), {"a" if b[0] == 1 else "z": torch.tensor(1.0)})
    with pytest.raises(fds.FdsError, match=r"different metrics|metrics change"):
        two(f, {"w": torch.ones(4)}, fds.sgd(0.1))


@pytest.mark.parametrize("how", ["evaluate", "a later step"])
def test_metrics_of_other_names_are_refused_ever_after(how):
    f = lambda p, b: (p["w"].sum() * b.mean(), {"z" if b[0] == 2 else "a": torch.tensor(1.0)})

    def run():
        axis = data_axis()
        step = fds.compose(fds.shard_optimizer(axis), fds.sgd(0.1))(f)
        state, _ = step(step.init({"w": torch.ones(4)}), torch.ones(2))
        batch = torch.full((2,), 1.0 + axis.index)
        return step.evaluate(state, batch) if how == "evaluate" else step(state, batch)

    with pytest.raises(fds.FdsError, match=r"different metrics|metrics change"):
        fds.simulate(run, 2)


def test_a_metric_that_is_an_int_on_one_rank_alone_is_the_same_on_all():
    f = lambda p, b: (p["w"].sum() * b.mean(), {"accuracy": 0 if b[0] == 1 else 0.5})
    try:
        one, other = (told for _, told, _ in two(f, {"w": torch.ones(4)}, fds.sgd(0.1)))
    except fds.FdsError:
        return
    assert_same_bits(one, other)


def test_a_loss_that_depends_on_nothing_is_refused_each_time():
    def run():
        step = fds.compose(fds.shard_optimizer(data_axis()), fds.sgd(0.1))(lambda p, b: b.mean().requires_grad_())
        state = step.init({"w": torch.ones(4)})
        for _ in range(2):
            with pytest.raises(fds.FdsError, match="depend"):
                step(state, torch.ones(2))

    fds.simulate(run, 2)


def test_a_weight_that_is_a_python_float_keeps_its_digits():
    f = lambda p, b: fds.Mean(p["w"].sum() * b.mean(), 0.3)
    got = two(f, {"w": torch.ones(4, dtype=D)}, fds.sgd(1.0))[0][0]["w"]
    torch.testing.assert_close(got, torch.full((4,), 1 - 1.5 / 0.3, dtype=D), rtol=1e-14, atol=0)


def test_complex_buffers_keep_their_imaginary_part():
    f = fds.with_buffers(lambda p, b, f: (p["w"].sum() * b.mean(), {}, f), {"turns": torch.tensor([1 + 2j])})
    for _, _, buffers in two(f, {"w": torch.ones(4)}, fds.sgd(1.0)):
        assert buffers["turns"].tolist() == [1 + 2j]


@pytest.mark.parametrize("value", [2**60 + 1, -(2**60) + 1])
def test_large_integers_keep_their_digits(value):
    f = fds.with_buffers(
        lambda p, b, f: (p["w"].sum() * b.mean(), {"n": torch.tensor(2**54 + 1)}, f), {"seed": torch.tensor(value)}
    )
    for _, told, buffers in two(f, {"w": torch.ones(4)}, fds.sgd(1.0)):
        assert int(buffers["seed"]) == value
        assert int(told["n"]) == 2 * (2**54 + 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_averages_of_16_bit_parameters_come_back_in_float32(stage):
    f = lambda p, b: p["w"].float().sum() * b.mean()
    make = lambda *t: fds.compose(*t, fds.ema(0.9), fds.sgd(1.0))(f)
    read = lambda step, state: step.params(attrs.evolve(state, params=state.slots["ema"]))["w"]
    params = {"w": torch.randn(40).bfloat16()}
    plain = make()
    want = read(plain, plain(plain.init(params), torch.ones(2))[0])
    assert want.dtype is torch.float32

    def run():
        step = make(fds.shard_optimizer(data_axis(), stage=stage))
        return read(step, step(step.init(params), torch.ones(2))[0])

    assert_same_bits(fds.simulate(run, 2)[0], want)


PATHS = [[0, 1, 2], [0, 1, 2], [3, 1, 0], [2, 3, 1]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_may_take_other_paths_through_the_parameters(stage):
    params = {str(i): torch.randn(40, generator=torch.Generator().manual_seed(i)) for i in range(4)}

    def f(p, b):
        x = b["x"].mean()
        for i in b["path"][0].tolist():
            x = torch.tanh(x * p[str(i)]).sum()
        return x

    full = {"x": torch.arange(4.0) + 1, "path": torch.tensor(PATHS)}
    plain = fds.compose(fds.accumulate(4), fds.sgd(0.1))(f)
    state = plain.init(params)
    for _ in range(3):
        state, _ = plain(state, full)

    def run():
        mesh = fds.mesh(replicate=2, shard=2)
        sharding = fds.shard_optimizer(mesh["shard"], replicate=mesh["replicate"], stage=stage, bucket_bytes=128)
        step = fds.compose(sharding, fds.sgd(0.1))(f)
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, mine(full, mesh["replicate", "shard"]))
        return step.params(state)

    for got in fds.simulate(run, 4):
        assert largest_difference(got, state.params) < 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_that_use_layers_in_another_order_add_up_the_same_ones(stage):
    params = {str(i): torch.full((40,), 0.1 * (i + 1)) for i in range(2)}

    def f(p, b):
        x = b.mean()
        for i in [0, 1] if b[0] < 3 else [1, 0]:
            x = torch.tanh(x * p[str(i)]).mean()
        return x

    full = torch.arange(4.0) + 1
    plain = fds.compose(fds.accumulate(4), fds.sgd(1.0))(f)
    want = plain(plain.init(params), full)[0].params

    def run():
        mesh = fds.mesh(replicate=2, shard=2)
        sharding = fds.shard_optimizer(mesh["shard"], replicate=mesh["replicate"], stage=stage, bucket_bytes=128)
        step = fds.compose(sharding, fds.sgd(1.0))(f)
        state, _ = step(step.init(params), mine(full, mesh["replicate", "shard"]))
        return step.params(state)

    for got in fds.simulate(run, 4):
        assert largest_difference(got, want) < 1e-6


def test_with_room_for_all_parameters_stage_3_gives_the_loss_plain_tensors():
    def run(bound):
        kinds = []

        def loss(params, x):
            kinds.append({type(p) for p in params.values()})
            return torch.tanh(x @ params["a"]).matmul(params["b"] * params["c"]).square().mean()

        sharding = fds.shard_optimizer(data_axis(), stage=3, bucket_bytes=256, max_live_bytes=bound)
        step = fds.compose(sharding, fds.accumulate(2), fds.adamw(0.1))(loss)
        state = step.init({"a": torch.eye(8), "b": torch.ones(8, 8), "c": torch.ones(8, 8)})
        for i in range(3):
            state, _ = step(state, torch.arange(32.0).view(4, 8) / (i + 1 + step.everyone.index))
        bytes_held = step.describe(state).num_bytes["whole"]
        return step.params(state), set.union(*kinds), bytes_held, step.evaluate(state, torch.ones(2, 8))["loss"]

    (exact, tight, held, loss), (got, plain, whole, same) = (
        fds.simulate(lambda bound=bound: run(bound), 2)[1] for bound in (767, 768)
    )
    assert tight == {fds.step.sharding.handles.Handle} and plain == {torch.Tensor}
    assert held <= 767 and whole == 768
    assert_same_bits((exact, loss), (got, same))


@pytest.mark.parametrize("stage", range(4))
def test_parameters_that_are_kept_in_float32_are_at_every_stage(stage):
    torch.manual_seed(0)
    loss = fds.Layers([nn.Linear(5, 12), nn.LayerNorm(12), nn.Linear(12, 3)], nn.MSELoss())
    batch = torch.randn(6, 5), torch.randn(6, 3)
    kept = fds.precision(keep_float32="1.*")
    plain = fds.compose(kept, fds.accumulate(2), fds.sgd(0.1))(loss)
    state = plain.init(loss.init, key=0)
    for _ in range(2):  # a norm begins with numbers that are exact in 16 bit
        state, _ = plain(state, batch)

    def run():
        axis = data_axis()
        sharded = fds.shard_optimizer(axis, stage=stage, bucket_bytes=64)
        step = fds.compose(kept, sharded, fds.sgd(0.1))(loss)
        state = step.init(loss.init, key=0)
        for _ in range(2):
            state, _ = step(state, tuple(x.chunk(2)[axis.index] for x in batch))
        return step.params(state)

    for got in fds.simulate(run, 2):
        assert largest_difference(got, state.params) < 1e-6


def test_a_parameter_stays_whole_below_a_size_and_not_at_it():
    params = {"below": torch.zeros(7), "at": torch.zeros(8)}

    def run():
        sharded = fds.shard_optimizer(data_axis(), stage=3, persist_below=8)
        step = fds.compose(sharded, fds.sgd(0.1))(lambda params, batch: params["at"].sum())
        return [[leaf.name for leaf in bucket.leaves] for bucket in step.init(params).params.layout.buckets]

    assert fds.simulate(run, 2) == [[["below"], ["at"]]] * 2
