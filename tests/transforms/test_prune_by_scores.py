"""Weights pruned by scores that are trained or summed: the loop by hand, wherever a step runs."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.compression import masks, sensitivity, with_scores
from fds.errors import ComposeError, FdsError, OptimizerError, StateError
from tests.bits import assert_same_bits
from tests.transforms.test_prune_weights import BAD, CALLS, LR, MICROBATCHES, batch, layers, train

LAYERS = layers()
NAMES = ("0.weight", "2.weight", "4.weight")


def scored(zeros=False):
    """Return the layers with scores beside their weights."""
    made = [
        with_scores(x, "weight", zeros=zeros, key=i) if isinstance(x, nn.Linear) else x for i, x in enumerate(parts())
    ]
    return fds.Layers(made, lambda out, y: (out - y).square().mean())


def parts():
    torch.manual_seed(0)
    first, second, third = (nn.Linear(*size, dtype=torch.float64) for size in ((4, 12), (12, 8), (8, 2)))
    return [first, nn.Tanh(), second, nn.Tanh(), third]


def learning(*transforms, ranks=1, **arguments):
    step = fds.compose(
        *transforms,
        *[fds.accumulate(MICROBATCHES // ranks)] * (ranks != MICROBATCHES),
        fds.prune_weights("*", method="topk", density=0.4, **{"offset": 2, **arguments}),
        fds.skip_nonfinite(),
        fds.sgd(LR, momentum=0.9),
    )(scored())
    return step, step.init(step.loss.init)


def summing(*transforms, ranks=1):
    step = fds.compose(
        *transforms,
        *[fds.accumulate(MICROBATCHES // ranks)] * (ranks != MICROBATCHES),
        fds.prune_weights(
            "*", method="snip_momentum", density=0.25, block="4x1", offset=1, end=7, stride=2, excluded=["4.*"]
        ),
        fds.clip_by_global_norm(0.5),
        fds.skip_nonfinite(),
        fds.by_name({"*_scores": sensitivity(), "*": fds.sgd(LR, momentum=0.9)}),
    )(scored(zeros=True))
    return step, step.init(step.loss.init)


def keeps(scores, density, block=(1, 1)):
    """Return the mask of the largest sums of blocks of scores, by a sort."""
    (down, across), (r, c) = block, scores.shape
    sums = scores.view(r // down, down, c // across, across).sum((1, 3))
    flat = torch.zeros(sums.numel(), dtype=torch.float64)
    flat[sums.flatten().argsort(descending=True, stable=True)[: math.ceil(density * sums.numel())]] = 1
    return flat.view(sums.shape).repeat_interleave(down, 0).repeat_interleave(across, 1)


@pytest.fixture(scope="module")
def learned_by_hand():
    """Return parameters after the loop by hand, in which a mask is an autograd function."""

    class Top(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):
            return keeps(scores, 0.4)

        @staticmethod
        def backward(ctx, grad):
            return grad

    loss = scored()
    params = loss.init(fds.random.key(0))
    momenta, t = {name: torch.zeros_like(x) for name, x in params.items()}, 0
    for call in range(CALLS):
        if call == BAD:
            continue
        leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
        for rows in zip(*(x.chunk(MICROBATCHES) for x in batch(call)), strict=True):
            pruned = {n: leaves[n] * Top.apply(leaves[f"{n}_scores"]) for n in NAMES} if t >= 2 else {}
            (loss({**leaves, **pruned}, rows) / MICROBATCHES).backward()
        for name, leaf in leaves.items():
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            momenta[name] = 0.9 * momenta[name] + grad
            params[name] = params[name] - LR * momenta[name]
        t += 1
    return params


@pytest.fixture(scope="module")
def summed_by_hand():
    """Return parameters and scores after the loop by hand that multiplies weights by masks of sums of |w g|."""
    loss = scored(zeros=True)
    params = loss.init(fds.random.key(0))
    weights = {name: x for name, x in params.items() if not name.endswith("_scores")}
    momenta = {name: torch.zeros_like(x) for name, x in weights.items()}
    scores, t = {name: torch.zeros_like(params[name]) for name in NAMES[:2]}, 0
    stay = {name: torch.ones_like(x) for name, x in scores.items()}
    for call in range(CALLS):
        if call == BAD:
            continue
        if call in (1, 3, 5, 7, 8):  # in which masks are looked at, after 1, 3, 4, 6 and 7 updates
            density = 1 - 0.75 * (1 - (1 - min(max(t - 1, 0), 6) / 6) ** 3)
            stay = {name: keeps(x, density, (4, 1)) for name, x in scores.items()}
        leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
        seen = {name: x * stay[name] if name in stay else x for name, x in leaves.items()}
        for rows in zip(*(x.chunk(MICROBATCHES) for x in batch(call)), strict=True):
            (loss({**params, **seen}, rows) / MICROBATCHES).backward(retain_graph=True)
        grads: dict[str, Any] = {name: leaf.grad for name, leaf in leaves.items()}
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        for name, unclipped in grads.items():
            grad = unclipped * (0.5 / (norm + 1e-6)).clamp(max=1)
            if name in scores:
                scores[name] = 0.9 * scores[name] + (weights[name] * grad).abs()
            momenta[name] = 0.9 * momenta[name] + grad
            weights[name] = weights[name] - LR * momenta[name]
        t += 1
    return {**weights, **{f"{name}_scores": x for name, x in scores.items()}}, stay


def assert_learned(step, state, wanted):
    torch.testing.assert_close(step.params(state), wanted, rtol=0, atol=1e-11)


def assert_summed(step, state, wanted):
    params, stay = wanted
    got = step.params(state)
    torch.testing.assert_close({name: got[name] for name in params}, params, rtol=0, atol=1e-7)  # of FAINT, squared
    for name, words in state.slots["pruned_weights"].items():
        assert torch.equal(masks.unpack(words, stay[name].shape[1]).double(), stay[name])


def test_learned_scores_make_the_mask_of_each_call(learned_by_hand):
    step, state = learning()
    assert_learned(step, train(step, state, bad=BAD), learned_by_hand)


def test_sums_of_weights_times_gradients_make_masks_as_densities_fall(summed_by_hand):
    step, state = summing()
    assert_summed(step, train(step, state, bad=BAD), summed_by_hand)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_have_the_scores_of_one(stage, learned_by_hand, summed_by_hand):
    def on_ranks():
        for make, check, wanted in (
            (learning, assert_learned, learned_by_hand),
            (summing, assert_summed, summed_by_hand),
        ):
            step, state = make(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage), ranks=2)
            check(step, train(step, state, bad=BAD), wanted)

    fds.simulate(on_ranks, 2)


def test_stages_of_a_pipeline_have_the_scores_of_their_layers(learned_by_hand):
    def on_ranks():
        pipeline = fds.pipeline(plans.one_f_one_b, fds.mesh(pp=-1)["pp"], num_microbatches=MICROBATCHES)
        step, state = learning(pipeline, ranks=MICROBATCHES)
        assert_learned(step, train(step, state, bad=BAD), learned_by_hand)

    fds.simulate(on_ranks, 2)


@pytest.mark.parametrize("make", [learning, summing])
def test_a_resumed_run_is_the_run(make, tmp_path):
    step, state = make()
    whole = train(step, state)
    fds.save(tmp_path, train(step, state, range(4)), step)
    state, _ = fds.load(tmp_path, step, step.loss.init)
    assert_same_bits(train(step, state, range(4, CALLS)), whole)


def test_scores_are_drawn_as_deepspeed_draws_them_and_a_module_ignores_them():
    module = nn.Sequential(nn.Linear(4, 8), nn.Conv1d(2, 4, 3))
    more = with_scores(module, "*", of="rows")
    shapes = {name: tuple(x.shape) for name, x in more.named_parameters()}
    assert shapes["0.weight_row_scores"] == (8, 1) and shapes["1.weight_row_scores"] == (4, 1)
    heads = with_scores(dict(module.named_parameters()), "0.weight", of="heads", num_heads=4)
    assert heads["0.weight_head_scores"].shape == (1, 4)
    scores = with_scores(nn.Linear(64, 64), "weight").weight_scores
    bound = 1 / 8  # as init.kaiming_uniform_(scores, a=sqrt(5))
    assert scores.abs().max() <= bound and scores.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not with_scores(module, "*", zeros=True).get_parameter("0.weight_scores").any()
    x = torch.randn(3, 4)
    assert torch.equal(more[0](x), module[0](x)) and not hasattr(module[0], "weight_row_scores")


@pytest.mark.parametrize(
    ("patterns", "arguments"),
    [
        ((), {}),
        ((3,), {}),
        (("*.wait",), {}),
        (("bias",), {}),
        (("weight",), {"of": "columns"}),
        (("weight",), {"of": "heads"}),
        (("weight",), {"num_heads": 2}),
        (("weight",), {"zeros": 1}),
        (("weight",), {"key": "a"}),
    ],
)
def test_scores_of_nothing_are_refused(patterns, arguments):
    with pytest.raises(FdsError):
        with_scores(nn.Linear(4, 4), *patterns, **arguments)


def test_scores_are_made_once_and_of_tensors():
    with pytest.raises(FdsError, match="already"):
        with_scores(with_scores(nn.Linear(4, 4), "weight"), "weight")
    with pytest.raises(FdsError, match="module"):
        with_scores([torch.ones(2, 2)], "*")


@pytest.mark.parametrize("momentum", [1, -0.1, "0.9"])
def test_a_momentum_is_below_1(momentum):
    with pytest.raises(OptimizerError, match="momentum"):
        sensitivity(momentum)


@pytest.mark.parametrize("compute", [torch.float16, torch.float32])
def test_gradients_of_scores_are_not_added_up_in_float16(compute):
    params = {"w": torch.randn(8, 8), "w_scores": torch.zeros(8, 8)}
    step = fds.compose(
        fds.precision(compute, accumulate=torch.float16, keep_float32="*_scores"),
        fds.loss_scale(),
        fds.prune_weights("w", method="snip_momentum", density=0.5),
        fds.by_name({"*_scores": sensitivity(), "*": fds.sgd(LR)}),
    )(lambda p, x: (x @ p["w"]).float().square().mean())
    with pytest.raises(OptimizerError, match="float16") as error:
        step(step.init(params), torch.randn(4, 8))
    assert "w_scores" in error.value.where


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "l2"},
        {"method": "topk", "end": 3},
        {"method": "topk", "initial": True},
        {"method": "snip_momentum", "initial": True},
    ],
)
def test_methods_take_what_they_use(arguments):
    with pytest.raises(ComposeError, match="prune_weights"):
        fds.prune_weights("*", density=0.5, **arguments)


def test_weights_without_scores_are_refused():
    prune = fds.prune_weights("*", method="topk", density=0.5)
    with pytest.raises(StateError, match="no scores") as error:
        fds.compose(prune, fds.sgd(LR))(LAYERS).init(LAYERS.init)
    assert "with_scores" in error.value.hint


@pytest.mark.parametrize("size", [0.3, 2.0**26])
def test_sums_of_any_size_change_no_bit_of_what_the_loss_sees(size):
    params = {"w": torch.randn(8, 8), "w_scores": torch.full((8, 8), size)}
    step = fds.compose(fds.prune_weights("w", method="snip_momentum", density=1.0, offset=100), fds.sgd(0.0))(
        lambda p, x: (x @ p["w"]).square().mean()
    )
    state, x = step.init(params), torch.randn(4, 8)
    assert step(state, x)[1]["loss"] == (x @ params["w"]).square().mean()
