"""Weights that are compared with each other: neural_compressor's algorithm by hand, wherever a step runs."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fds
from fds import plans
from fds.compression import masks, sensitivity
from fds.errors import ComposeError
from tests.bits import assert_same_bits
from tests.transforms.test_prune_by_scores import scored
from tests.transforms.test_prune_weights import BAD, CALLS, LOSS, LR, MICROBATCHES, PARAMS, batch, layers, train

NAMES = ("0.weight", "2.weight")  # in blocks of 4 x 1
LEAST, DENSITY = 0.28, 0.3
GRADUAL = {"density": DENSITY, "offset": 1, "end": 7, "stride": 2}


def by_threshold(scores, density):
    """Return masks of 0 and 1 of blocks as neural_compressor 2.6 has them (`PytorchPatternNxM.get_masks_global`)."""
    capped: dict[str, torch.Tensor] = {}
    total = sum(x.numel() for x in scores.values())
    while True:
        rest = {name: x for name, x in scores.items() if name not in capped}
        cut = int(total * (1 - density)) - sum(int((mask == 0).sum()) for mask in capped.values())
        if not rest or cut < 1:
            return {name: capped.get(name, torch.ones_like(x)) for name, x in scores.items()}
        threshold = torch.cat([x.flatten() for x in rest.values()]).kthvalue(cut).values
        made = {name: (x > threshold).to(x.dtype) for name, x in rest.items()}
        over = {name for name, mask in made.items() if (mask == 0).sum() / mask.numel() > 1 - LEAST}
        if not over:
            return capped | made
        for name in over:
            least = rest[name].flatten().kthvalue(int((1 - LEAST) * rest[name].numel())).values
            capped[name] = (rest[name] > least).to(rest[name].dtype)


def summing(*transforms, ranks=1):
    step = fds.compose(
        *transforms,
        *[fds.accumulate(MICROBATCHES // ranks)] * (ranks != MICROBATCHES),
        fds.prune_weights(
            "*", method="snip_momentum", scope="global", least=LEAST, block="4x1", excluded=["4.*"], **GRADUAL
        ),
        fds.skip_nonfinite(),
        fds.by_name({"*_scores": sensitivity(), "*": fds.sgd(LR, momentum=0.9)}),
    )(scored(zeros=True))
    return step, step.init(step.loss.init)


@pytest.fixture(scope="module")
def by_hand():
    """Return weights and masks after the loop that multiplies weights by masks of sums of |w g|."""
    loss = scored(zeros=True)
    params = loss.init(fds.random.key(0))
    weights = {name: x for name, x in params.items() if not name.endswith("_scores")}
    momenta = {name: torch.zeros_like(x) for name, x in weights.items()}
    sums, t = {name: torch.zeros_like(params[name]) for name in NAMES}, 0
    stay = {name: torch.ones_like(x) for name, x in sums.items()}
    apart = False
    for call in range(CALLS):
        if call == BAD:  # a skipped step makes no masks for the next one
            continue
        leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
        seen = {name: x * stay[name] if name in stay else x for name, x in leaves.items()}
        for rows in zip(*(x.chunk(MICROBATCHES) for x in batch(call)), strict=True):
            (loss({**params, **seen}, rows) / MICROBATCHES).backward(retain_graph=True)
        for name, leaf in leaves.items():
            grad: Any = leaf.grad
            if name in sums:
                sums[name] = 0.9 * sums[name] + (weights[name] * grad).abs()
            momenta[name] = 0.9 * momenta[name] + grad
            weights[name] = weights[name] - LR * momenta[name]
        t += 1
        if call + 1 in (1, 3, 7, 8):  # of 1, 3, 5, 7 the third follows a skip; 8 is the first look after the end
            density = 1 - (1 - DENSITY) * (1 - (1 - min(max(t - 1, 0), 6) / 6) ** 3)
            blocks = {name: x.view(len(x) // 4, 4, -1).sum(1) for name, x in sums.items()}
            made = by_threshold(blocks, density)
            stay = {name: x.repeat_interleave(4, 0) for name, x in made.items()}
            apart |= len({float(x.mean()) for x in stay.values()}) > 1
    assert apart  # or the test would not tell one scope from the other
    return weights, stay


def assert_is(step, state, wanted):
    weights, stay = wanted
    params = step.params(state)
    for name, words in state.slots["pruned_weights"].items():
        assert torch.equal(masks.unpack(words, stay[name].shape[1]).double(), stay[name])
    torch.testing.assert_close({name: params[name] for name in weights}, weights, rtol=0, atol=1e-7)


def test_one_threshold_is_for_all_weights_and_a_share_of_each_stays(by_hand):
    step, state = summing()
    assert_is(step, train(step, state, bad=BAD), by_hand)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_make_the_masks_of_one(stage, by_hand):
    def on_ranks():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, bucket_bytes=2**9)
        step, state = summing(shard, *[fds.offload("host")] * (stage == 2), ranks=2)
        assert_is(step, train(step, state, bad=BAD), by_hand)

    fds.simulate(on_ranks, 2)


def test_a_resumed_run_is_the_run(tmp_path):
    step, state = summing()
    whole = train(step, state)
    fds.save(tmp_path, train(step, state, range(4)), step)
    state, _ = fds.load(tmp_path, step, step.loss.init)
    assert_same_bits(train(step, state, range(4, CALLS)), whole)


def test_a_mask_of_magnitudes_is_torchs():
    step = fds.compose(fds.prune_weights("*.weight", scope="global", density=0.4, offset=2), fds.sgd(LR, momentum=0.9))(
        LOSS
    )
    state = train(step, step.init(PARAMS), range(2))
    model = nn.Sequential(*layers().layers)
    model.load_state_dict(step.params(state))
    of = [(model[i], "weight") for i in (0, 2, 4)]
    prune.global_unstructured(of, prune.L1Unstructured, amount=160 - 64)  # of 48 + 96 + 16 numbers
    for name, words in train(step, state, range(2, 5)).slots["pruned_weights"].items():
        want = model.get_buffer(f"{name}_mask")
        assert torch.equal(masks.unpack(words, want.shape[1]).to(want.dtype), want)


@pytest.mark.parametrize(
    "arguments",
    [
        {"scope": "all"},
        {"method": "topk"},
        {"density": None, "block": "2:4"},
        {"initial": True},
        {"offset": 0},
        {"least": 0.6},
        {"least": -0.1},
        {"least": True},
        {"scope": "local", "least": 0.1},
    ],
)
def test_arguments_of_another_kind_of_mask_are_refused(arguments):
    with pytest.raises(ComposeError, match="prune_weights"):
        fds.prune_weights("*", **{"scope": "global", "density": 0.5, "offset": 2, **arguments})


@pytest.mark.parametrize("axis", ["pp", "local"])
def test_ranks_with_weights_of_their_own_are_refused_before_anything_is_written(axis):
    def on_ranks():
        ranks = fds.mesh(**{axis: -1})[axis]
        if axis == "pp":
            apart = fds.pipeline(plans.one_f_one_b, ranks, num_microbatches=MICROBATCHES)
        else:
            apart = fds.local_updates(ranks, every=2)
        step = fds.compose(apart, fds.prune_weights("*", scope="global", density=0.5, offset=2), fds.sgd(LR))(LOSS)
        state = step.init(LOSS.init)
        with pytest.raises(ComposeError, match="compared with all others"):
            step(state, batch(0))

    fds.simulate(on_ranks, 2)


def test_a_graph_of_the_step_is_refused():
    step = fds.compose(
        fds.compile(whole=True), fds.prune_weights("*", scope="global", density=0.5, offset=2), fds.sgd(LR)
    )(LOSS)
    with pytest.raises(ComposeError, match="host") as error:
        train(step, step.init(LOSS.init), range(3))
    assert error.value.got == "call.calls"
