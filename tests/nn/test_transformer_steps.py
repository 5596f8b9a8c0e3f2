"""Layers in a stack: under checkpoints, stages of a pipeline and sharded parameters, dropout on."""

import functools

import pytest
import torch
import torch.nn.functional as F

import fds
from fds import plans, tree
from fds.nn import TransformerConfig, TransformerLayer
from tests.bits import assert_rounding, assert_same_bits
from tests.nn.plain import padding

CONFIG = TransformerConfig(
    hidden_size=8, heads=2, num_hidden_layers=4, attn_dropout_ratio=0.2, hidden_dropout_ratio=0.1, initializer_range=0.3
)
STEPS, ROWS, TOKENS = 2, 8, 5
SAVING = {"normalize_invertible": True, "gelu_checkpoint": True, "attn_dropout_checkpoint": True}


def wide(config: TransformerConfig) -> TransformerLayer:
    return TransformerLayer(config).double()


def first(pair):
    return pair[0] if isinstance(pair, tuple) else pair


@functools.lru_cache
def stack(masked: bool = True, pre: bool = True, saving: bool = False) -> fds.Layers:
    """Return four layers in float64, so that rounding is no excuse."""
    settings = {
        f: getattr(CONFIG, f)
        for f in (
            "hidden_size",
            "heads",
            "num_hidden_layers",
            "attn_dropout_ratio",
            "hidden_dropout_ratio",
            "initializer_range",
        )
    }
    config = TransformerConfig(**settings, pre_layer_norm=pre, **SAVING if saving else {})
    return fds.Layers([*[fds.LayerSpec(wide, config)] * 4, first], F.mse_loss)


def batch(i: int, masked: str = "padding"):
    generator = torch.Generator().manual_seed(i)
    x, y = torch.randn(2, ROWS, TOKENS, CONFIG.hidden_size, dtype=torch.float64, generator=generator)
    mask = padding(ROWS, TOKENS)
    if masked == "additive":
        mask = (~mask[:, None, None]).double() * -1e9
    return (x, mask) if masked != "no" else x, y


def train(loss, *transforms, masked="padding", rows=slice(None)):
    step = fds.compose(*transforms, fds.sgd(0.1))(loss)
    state = step.init(loss.init, key=3)
    for i in range(STEPS):
        state, metrics = step(state, tree.map(lambda x: x[rows], batch(i, masked)))
    return step.params(state), metrics


def rounds_like(got, want) -> None:
    """Each update adds up this many numbers of at most 1 (rows and tokens, sums inside a layer, of four layers)."""
    assert_rounding(got, want, additions=STEPS * 4 * (ROWS * TOKENS + 8 * CONFIG.hidden_size + 4 * TOKENS))


MASKS = ["no", "padding", "additive"]


@pytest.mark.sweep
@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("masked", MASKS)
def test_checkpointed_activations_are_the_identity_bit_for_bit(masked, saving):
    loss = stack(saving=saving)
    want = train(loss, masked=masked)
    assert_same_bits(train(loss, fds.checkpoint_activations(), masked=masked), want)
    assert_same_bits(train(loss, fds.checkpoint_activations(every=2, policy="matmuls"), masked=masked), want)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", [plans.one_f_one_b, plans.zb_h1])
@pytest.mark.parametrize("masked", MASKS)
def test_a_pipeline_is_accumulation(schedule, masked):
    loss = stack(pre=False, saving=masked == "padding")
    want, plain = train(loss, fds.accumulate(4), masked=masked)

    def run():
        pp = fds.mesh(pp=-1)["pp"]
        return train(loss, fds.pipeline(schedule, pp, num_microbatches=4), masked=masked)

    for got, metrics in fds.simulate(run, 2):
        rounds_like(got, want)
        rounds_like(metrics["loss"], plain["loss"])


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("saving", [False, True])
def test_sharded_parameters_are_accumulation_over_all_ranks(stage, saving):
    loss = stack(saving=saving)
    want, _ = train(loss, fds.accumulate(4))

    def run():
        dp = fds.mesh(dp=-1)["dp"]
        rows = slice(dp.index * ROWS // 2, (dp.index + 1) * ROWS // 2)
        transforms = [fds.shard_optimizer(dp, stage=stage, bucket_bytes=2048), fds.accumulate(2)]
        if stage == 3:
            transforms.append(fds.checkpoint_activations())
        return train(loss, *transforms, rows=rows)

    for got, _ in fds.simulate(run, 2):
        rounds_like(got, want)


def test_stage_3_runs_the_kernels_on_handles():
    loss = fds.Layers([*[TransformerLayer.spec(CONFIG)] * 2, first], F.mse_loss)
    halves = lambda i: tree.map(lambda x: x.float() if x.is_floating_point() else x, batch(i))

    def run(*transforms, rows=slice(0, 2)):
        step = fds.compose(*transforms, fds.sgd(0.1))(loss)
        state, _ = step(step.init(loss.init, key=3), tree.map(lambda x: x[rows], halves(0)))
        return step.params(state)

    def on_ranks():
        dp = fds.mesh(dp=-1)["dp"]
        return run(fds.shard_optimizer(dp, stage=3, bucket_bytes=1024), rows=slice(dp.index, dp.index + 1))

    with fds.kernels.choice.only("triton"):
        want = run(fds.accumulate(2))
        for got in fds.simulate(on_ranks, 2):
            rounds_like(got, want)


def test_a_stack_learns():
    mse = lambda y, target: F.mse_loss(y.float(), target)  # torch 2.11 takes no two dtypes
    loss = fds.Layers([*[TransformerLayer.spec(CONFIG)] * 2, first], mse)
    step = fds.compose(fds.precision(torch.bfloat16), fds.clip_by_global_norm(1.0), fds.adamw(lr=3e-3))(loss)
    state = step.init(loss.init, key=0)
    x = torch.randn(16, TOKENS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    given = (x, padding(16, TOKENS)), x.flip(-1)
    before = float(step.evaluate(state, given)["loss"])
    for _ in range(60):
        state, metrics = step(state, given)
    assert metrics["loss"].isfinite()
    assert float(step.evaluate(state, given)["loss"]) < 0.8 * before


def test_evaluation_drops_nothing():
    loss = stack()
    step = fds.compose(fds.sgd(0.1))(loss)
    state = step.init(loss.init, key=0)
    one, two = (step.evaluate(state, batch(0))["loss"] for _ in range(2))
    assert torch.equal(one, two)
