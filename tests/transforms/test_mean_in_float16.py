"""A mean over a million tokens in float16: what is scaled is of the size of the mean, not of the total."""

import pytest
import torch

import fds

TOKENS = 2**20
SETTINGS = {
    "loss_scale": (fds.precision(torch.float16), fds.loss_scale()),
    "all in float16": (fds.precision(torch.float16, accumulate=torch.float16), fds.loss_scale()),
    "static": (fds.precision(torch.float16), fds.static_loss_scale(128)),
    "without a scale": (fds.precision(torch.float16), fds.skip_nonfinite()),
    "autocast": (fds.autocast(torch.float16), fds.loss_scale()),
}


def criterion(scores, kept):
    """The sum over the tokens that are kept, as a `Mean`; and as the mean itself in its metrics."""
    scores, kept = scores.float().squeeze(1), kept.float()
    return fds.Mean((scores * kept).sum(), kept.sum())


def batch(tokens: int, kept: float):
    """Return tokens whose gradient by the weight is about 0.5, and which of them count."""
    draw = torch.Generator().manual_seed(3)
    return torch.rand(tokens, 1, generator=draw), torch.rand(tokens, generator=draw) < kept


def loss(params, batch):
    inputs, kept = batch
    return criterion(torch.nn.functional.linear(inputs, params["w"]), kept)


def update(metrics, before, after) -> float:
    assert not bool(metrics["skipped"]) and torch.isfinite(metrics["loss"])
    return float((before - after)[0, 0])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_no_step_is_skipped_at_a_million_tokens(name, n):
    step = fds.compose(*SETTINGS[name], fds.accumulate(n), fds.sgd(1.0))(loss)
    inputs, kept = batch(TOKENS // n * n, 0.9)
    state = step.init({"w": torch.zeros(1, 1)})
    new, metrics = step(state, (inputs, kept))
    want = float((inputs[:, 0].half().double() * kept).sum() / kept.sum())
    assert update(metrics, state.params["w"], new.params["w"]) == pytest.approx(want, rel=2**-9)
    assert float(metrics.get("loss_scale", 2.0**16)) in (2.0**16, 128.0)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["loss_scale", "all in float16", "autocast"])
def test_ranks_may_have_very_different_weights(name, stage):
    """The one has a million tokens, the other 16 of them, or none at all."""

    def run(few):
        axis = fds.mesh(dp=2)["dp"]
        sharding = fds.shard_optimizer(axis, stage=stage)
        step = fds.compose(*SETTINGS[name], fds.accumulate(2), sharding, fds.sgd(1.0))(loss)
        state = step.init({"w": torch.zeros(1, 1)})
        before = step.params(state)["w"]
        inputs, kept = batch(TOKENS, 0.9)
        kept = kept if axis.index else kept & (torch.arange(TOKENS) % (TOKENS // 2) < few)
        new, metrics = step(state, (inputs, kept))
        return update(metrics, before, step.params(new)["w"]), (inputs[:, 0].half().double() * kept).sum(), kept.sum()

    for few in (8, 0):
        (got, total, weight), (other, more, most) = fds.simulate(lambda few=few: run(few), 2)
        assert got == other == pytest.approx(float((total + more) / (weight + most)), rel=2**-9)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_first_microbatch_may_weigh_nothing(name, ranks):
    def run():
        axis = fds.mesh(dp=ranks)["dp"]
        step = fds.compose(*SETTINGS[name], fds.accumulate(2), fds.shard_optimizer(axis), fds.sgd(1.0))(loss)
        state = step.init({"w": torch.zeros(1, 1)})
        before = step.params(state)["w"]
        inputs, kept = batch(TOKENS // ranks, 0.9)
        kept = kept & (torch.arange(len(kept)) >= len(kept) // 2)
        new, metrics = step(state, (inputs, kept))
        want = (inputs[:, 0].half().double() * kept).sum() / kept.sum()
        return update(metrics, before, step.params(new)["w"]), pytest.approx(float(want), rel=2**-9)

    for got, want in fds.simulate(run, ranks):
        assert got == want


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_stages_of_a_pipeline_divide_alike(ranks):
    """Only the last stage sees weights; the others divide by what it says."""

    def run():
        mesh = fds.mesh(pp=min(ranks, 2), dp=-1)
        layers = fds.Layers([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], criterion)
        axis = mesh["pp"] if ranks > 1 else 2
        step = fds.compose(
            fds.pipeline(fds.plans.one_f_one_b, axis, num_microbatches=4),
            fds.precision(torch.float16),
            fds.loss_scale(),
            fds.shard_optimizer(mesh["dp"], stage=2),
            fds.clip_by_global_norm(1.0),
            fds.sgd(1.0),
        )(layers)
        params = {
            "0.weight": torch.ones(1, 1),
            "0.bias": torch.zeros(1),
            "1.weight": torch.ones(1, 1),
            "1.bias": torch.zeros(1),
        }
        state = step.init(params)
        inputs, kept = batch(TOKENS // mesh["dp"].size, 0.9 / (1 + mesh["dp"].index))
        new, metrics = step(state, (inputs, kept))
        after = step.params(new)
        assert not bool(metrics["skipped"])
        return {name: float(params[name].sum() - x.sum()) for name, x in after.items()}, float(metrics["grad_norm"])

    (moves, norm), *others = fds.simulate(run, ranks)
    assert others == [(moves, norm)] * (ranks - 1)
    assert norm == pytest.approx((2 * 1.0 + 2 * 0.5**2) ** 0.5, rel=1e-2)
    assert moves == pytest.approx(dict(zip(moves, [0.5 / norm, 1 / norm] * 2, strict=True)), rel=1e-2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sums_over_ranks_in_float16_are_divided_before(stage):
    """Four ranks with a gradient of 40,000 each, which float16 holds once."""

    def run(predivide):
        sharding = fds.shard_optimizer(fds.mesh(dp=4)["dp"], stage=stage, predivide=predivide)
        step = fds.compose(
            fds.precision(torch.float32, reduce=torch.float16), fds.skip_nonfinite(), sharding, fds.sgd(1.0)
        )(lambda p, b: (p["w"] * b).sum())
        state, metrics = step(step.init({"w": torch.zeros(2)}), torch.full((2,), 40000.0))
        return bool(metrics["skipped"]), step.params(state)["w"].tolist(), float(metrics["grad_norm"])

    for got in fds.simulate(lambda: run(None), 4):
        assert got == (False, [-40000.0] * 2, pytest.approx(40000 * 2**0.5))
    assert fds.simulate(lambda: run(1.0), 4)[0][0], "as it was asked for"


def test_a_scalar_asks_no_other_rank_and_a_mean_sends_two_numbers():
    def run(weighted):
        mesh = fds.mesh(dp=2)
        sharding = fds.shard_optimizer(mesh["dp"], stage=2)
        step = fds.compose(fds.precision(torch.float16), fds.loss_scale(), sharding, fds.sgd(1.0))(
            lambda p, b: fds.Mean((p["w"] * b).sum(), b.sum()) if weighted else (p["w"] * b).sum()
        )
        state, _ = step(step.init({"w": torch.zeros(2)}), torch.ones(2))
        with fds.collectives.counted() as traffic:
            step(state, torch.ones(2))
        ops = lambda what: sum(count.calls for (op, _), count in traffic.counts.items() if (op == "exchange") == what)
        return ops(True), ops(False), traffic.bytes_sent

    (scalar, _), (mean, _) = (fds.simulate(lambda w=w: run(w), 2) for w in (False, True))
    exchanges, messages, size = scalar
    assert mean == (exchanges, messages + 1, size + 16)


def test_a_mean_where_ranks_agreed_on_scalars_is_refused():
    def run():
        kinds = iter([False, True])
        step = fds.compose(fds.loss_scale(), fds.shard_optimizer(fds.mesh(dp=2)["dp"]), fds.sgd(1.0))(
            lambda p, b: fds.Mean((p["w"] * b).sum(), 2.0) if next(kinds) else (p["w"] * b).sum()
        )
        state, _ = step(step.init({"w": torch.zeros(2)}), torch.ones(2))
        with pytest.raises(fds.errors.LossError, match="scalar in earlier calls"):
            step(state, torch.ones(2))

    fds.simulate(run, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_whose_criterion_fails_in_the_first_call_leaves_no_other_waiting(stage):
    def run():
        mesh, fails = fds.mesh(pp=2, dp=2), iter([True, *[False] * 9])

        def failing(out, targets):
            if mesh["dp"].index and next(fails):
                raise ValueError("no")
            return fds.Mean(out.float().sum(), targets.sum())

        layers = fds.Layers([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)], failing)
        step = fds.compose(
            fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=2),
            fds.precision(torch.float16),
            fds.loss_scale(),
            fds.shard_optimizer(mesh["dp"], stage=stage),
            fds.sgd(0.1),
        )(layers)
        state, batch = step.init(layers.init, key=0), (torch.ones(4, 3), torch.ones(4))
        with pytest.raises(fds.errors.RankError, match="stage of the pipeline failed"):
            step(state, batch)
        return float(step(state, batch)[1]["loss"])

    assert len(set(fds.simulate(run, 4))) == 1


def of_weights(weights, dtype, *transforms, stages=None):
    """Step once on microbatches of these weights, by mean gradients of 1; the total is summed in `dtype`."""
    loss = lambda p, b: fds.Mean(p["w"].sum().to(dtype) * (w := weights[int(b[0])]), w)
    if stages is not None:
        first, inner = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
        loss = fds.Layers([first, inner], lambda x, at: fds.Mean(x.sum().to(dtype) * (w := weights[int(at[0])]), w))
    cut = fds.accumulate(len(weights)) if stages is None else stages
    step = fds.compose(fds.precision(torch.float16), cut, *transforms, fds.sgd(1.0))(loss)
    rows = torch.arange(len(weights))
    params = {"w": torch.zeros(1)} if stages is None else {f"{i}.weight": torch.ones(1, 1) for i in range(2)}
    state = step.init(params)
    new, metrics = step(state, rows if stages is None else (torch.ones(len(weights), 1), rows))
    moves = {name: float((params[name] - x).sum()) for name, x in step.params(new).items()}
    return moves, bool(metrics["skipped"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["none", "loss_scale"])
@pytest.mark.parametrize(
    "weights", [[2.0**25], [2.0**15, 2.0**15], [1e-6], [2.0**-4, 1.0], [1.0, 1e-6], [2.0**-9, 2.0**-4, 1.0]], ids=str
)
def test_weights_of_any_size_give_the_mean(weights, name, dtype):
    moves, skipped = of_weights(weights, dtype, *([fds.loss_scale(initial=2.0**8)] if name == "loss_scale" else []))
    assert not skipped and moves["w"] == pytest.approx(1.0, rel=2**-9 if dtype is torch.float32 else 0.07)


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_weights_that_grow_out_of_float16_skip_a_step_that_has_no_loss_scale(ranks):
    """One whose first microbatch weighs a millionth of a millionth of the next: parameters never become infinite."""

    def run():
        cut = (
            None
            if ranks is None
            else fds.pipeline(fds.plans.one_f_one_b, fds.mesh(pp=2)["pp"] if ranks == 2 else 2, num_microbatches=2)
        )
        return of_weights([1e-3, 1e9], torch.float32, stages=cut)

    for moves, skipped in fds.simulate(run, ranks or 1):
        assert skipped and set(moves.values()) == {0.0}


class Casting(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


@pytest.mark.parametrize("stages", ["one process", "first in float16", "last in float16"])
def test_float16_parameters_of_any_stage_of_a_pipeline_are_divided_as_without_one(stages):
    """Eight microbatches of two ranks with a gradient of 20,000 each, of which float16 holds three."""
    dtypes = [torch.float16, torch.float32][:: -1 if stages == "last in float16" else 1]

    def run(pipelined):
        mesh = fds.mesh(pp=1 if stages == "one process" or not pipelined else 2, dp=-1)
        layers = fds.Layers(
            [fds.LayerSpec(Casting, 1, 1, bias=False, dtype=d) for d in dtypes], lambda x, y: (x.float() * 20000).mean()
        )
        axis = mesh["pp"] if mesh["pp"].size > 1 else 2
        cut = fds.pipeline(fds.plans.one_f_one_b, axis, num_microbatches=8) if pipelined else fds.accumulate(8)
        step = fds.compose(cut, fds.shard_optimizer(mesh["dp"], stage=2), fds.skip_nonfinite(), fds.sgd(0.0))(layers)
        params = {f"{i}.weight": torch.ones(1, 1, dtype=d) for i, d in enumerate(dtypes)}
        _, metrics = step(step.init(params), (torch.ones(8, 1, dtype=dtypes[0]), torch.ones(8)))
        return bool(metrics["skipped"]), float(metrics["grad_norm"])

    plain = fds.simulate(lambda: run(False), 2)[0]
    assert plain == (False, pytest.approx(20000 * 2**0.5, rel=1e-3))
    assert set(fds.simulate(lambda: run(True), 2 if stages == "one process" else 4)) == {plain}
