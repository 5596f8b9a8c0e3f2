"""Pruned weights: the loop by hand whose weights are multiplied by masks, wherever a step runs."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.collectives.traffic import Traffic, counting
from fds.compression import masks
from fds.errors import ComposeError, StateError
from tests.bits import assert_same_bits

ROWS, MICROBATCHES, CALLS, BAD, LR = 8, 4, 9, 4, 0.1
WEIGHTS = ("0.weight", "2.weight", "4.weight")
GRADUAL = {"density": 0.3, "offset": 1, "end": 7, "stride": 2}


def layers():
    torch.manual_seed(0)
    linear = [nn.Linear(*size, dtype=torch.float64) for size in ((4, 12), (12, 8), (8, 2))]
    first, second, third = linear
    return fds.Layers([first, nn.Tanh(), second, nn.Tanh(), third], lambda out, y: (out - y).square().mean())


LOSS = layers()
PARAMS = LOSS.init(fds.random.key(0))


def batch(call, bad=None):
    g = torch.Generator().manual_seed(call)
    x, y = (torch.randn(ROWS, n, generator=g, dtype=torch.float64) for n in (4, 2))
    return x * torch.inf if call == bad else x, y


def train(step, state, calls: Iterable[int] = range(CALLS), bad=None):
    data = step.dimensions.data
    for call in calls:
        rows = batch(call, bad)
        state, _ = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
    return state


def composed(*transforms, ranks=1, **arguments):
    return fds.compose(
        *transforms,
        *[fds.accumulate(MICROBATCHES // ranks)] * (ranks != MICROBATCHES),
        fds.prune_weights("*.weight", **arguments),
        fds.skip_nonfinite(),
        fds.sgd(LR, momentum=0.9, weight_decay=0.1),
    )(LOSS)


def by_hand(due, make, calls=range(CALLS), bad=None, used_from=0):
    """Return parameters and masks of the plain loop; where `due(t, call)`, `make(t, weights)` makes a mask."""
    params = {name: x.clone() for name, x in PARAMS.items()}
    momenta = {name: torch.zeros_like(x) for name, x in params.items()}
    stay, t = {name: torch.ones_like(params[name]) for name in WEIGHTS}, 0
    for call in calls:
        if due(t, call):
            stay = {name: make(t, params[name]).to(torch.float64) for name in WEIGHTS}
        if call == bad:
            continue
        leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
        for rows in zip(*(x.chunk(MICROBATCHES) for x in batch(call)), strict=True):
            use = t >= used_from
            seen = {name: x * stay[name] if name in stay and use else x for name, x in leaves.items()}
            (LOSS(seen, rows) / MICROBATCHES).backward()
        grads: dict[str, Any] = {name: leaf.grad for name, leaf in leaves.items()}
        for name, grad in grads.items():
            momenta[name] = 0.9 * momenta[name] + grad + 0.1 * params[name]
            params[name] = params[name] - LR * momenta[name]
        t += 1
    return params, stay


def largest(t, weight, density=None):
    """Return the mask of the largest magnitudes, by a sort."""
    count = math.ceil((0.5 if density is None else density) * weight.numel())
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    mask[weight.abs().flatten().argsort(descending=True, stable=True)[:count]] = True
    return mask.view(weight.shape)


def gradual(t, weight):
    return largest(t, weight, 1 - 0.7 * (1 - (1 - (t - 1) / 6) ** 3))


def gradual_by_hand(calls=range(CALLS)):
    return by_hand(lambda t, call: 1 <= t <= 7 and (t - 1) % 2 == 0, gradual, calls)


def masks_of(state, slot="pruned_weights"):
    return {n: masks.unpack(words, PARAMS[n].shape[1]).double() for n, words in state.slots[slot].items()}


def assert_is(step, state, wanted):
    params, stay = wanted
    torch.testing.assert_close(step.params(state), params, rtol=0, atol=1e-12)
    assert_same_bits(masks_of(state), stay)


@pytest.mark.parametrize("offset", [0, 3])
def test_one_mask_is_that_of_the_weights_when_the_updates_of_the_offset_are_applied(offset):
    step = composed(density=0.5, offset=offset)
    state = train(step, step.init(PARAMS))
    assert_is(step, state, by_hand(lambda t, call: t == offset, largest, used_from=offset))
    seen = {n: x * masks_of(state)[n] if n in WEIGHTS else x for n, x in step.params(state).items()}
    torch.testing.assert_close(step.evaluate(state, batch(99))["loss"], LOSS(seen, batch(99)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_masks_are_of_weights_as_the_state_holds_them(ranks):
    coarse = fds.quantize_weights("*.weight", bits=3, rounding="stochastic")  # each microbatch draws another rounding
    want = {name: largest(0, PARAMS[name]).double() for name in WEIGHTS}

    def run():
        data = [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3)] if ranks > 1 else []
        step = composed(*data, coarse, ranks=ranks, density=0.5)
        assert_same_bits(masks_of(train(step, step.init(PARAMS), range(1))), want)

    fds.simulate(run, ranks) if ranks > 1 else run()


def test_densities_fall_to_the_last_one():
    step = composed(**GRADUAL)
    state = train(step, step.init(PARAMS))
    assert_is(step, state, gradual_by_hand())
    assert int(masks_of(state)["2.weight"].sum()) == math.ceil(0.3 * 96)


def test_a_mask_of_the_initial_weights_is_in_use_from_the_offset_on():
    step = composed(density=0.5, offset=3, initial=True)
    assert_is(step, train(step, step.init(PARAMS)), by_hand(lambda t, call: call == 0, largest, used_from=3))
    # also where the first steps are skipped: weights stay as they are
    state = train(step, step.init(PARAMS), bad=0)
    assert_is(step, state, by_hand(lambda t, call: call == 0, largest, bad=0, used_from=3))


def test_a_skipped_step_makes_no_mask():
    step = composed(density=0.5, offset=2)
    state = train(step, step.init(PARAMS), range(3), bad=2)
    assert_is(step, state, by_hand(lambda t, call: False, largest, range(3), bad=2))
    state = train(step, state, range(3, CALLS))
    assert_is(step, state, by_hand(lambda t, call: t == 2, largest, bad=2))


def test_masks_that_are_made_several_times_are_made_later_after_a_skipped_step():
    step = composed(**GRADUAL)
    state = train(step, step.init(PARAMS), range(12), bad=BAD)
    due = lambda t, call: call in (1, 3, 5, 7, 8)  # with masks of 1, 3, 4, 6 and 7 updates
    assert_is(step, state, by_hand(due, gradual, range(12), bad=BAD))


def test_a_run_that_goes_on_with_masks_makes_them_soon(tmp_path):
    plain = fds.compose(fds.sgd(LR))(LOSS)
    fds.save(tmp_path, train(plain, plain.init(PARAMS), range(70)), plain)
    step = fds.compose(fds.prune_weights("*.weight", density=0.5), fds.sgd(LR))(LOSS)
    state, _ = fds.load(tmp_path, step, PARAMS, slots="init")
    looked = train(step, state, range(70, 129))
    assert all(masks_of(looked)[name].mean() == 0.5 for name in WEIGHTS)


def test_two_of_four_numbers_of_a_row_stay():
    step = composed(block="2:4", offset=2)

    def largest_two(t, weight):
        groups = weight.abs().view(-1, 4)
        return (groups >= groups.sort(1).values[:, 2:3]).view(weight.shape)

    assert_is(step, train(step, step.init(PARAMS)), by_hand(lambda t, call: t == 2, largest_two, used_from=2))


# at stage 3 with little room the view runs whenever the loss reads a matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "on use"])
def test_ranks_make_the_masks_of_one(stage: Any):
    tight: dict[str, Any] = {"stage": 3, "bucket_bytes": 256, "prefetch": 0, "max_live_bytes": 1024}

    def on_ranks():
        sharded = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], **(tight if stage == "on use" else {"stage": stage}))
        step = composed(sharded, ranks=2, **GRADUAL)
        assert_is(step, train(step, step.init(PARAMS)), gradual_by_hand())

    fds.simulate(on_ranks, 2)


def test_stages_of_a_pipeline_prune_their_layers():
    def on_ranks():
        pipeline = fds.pipeline(plans.one_f_one_b, fds.mesh(pp=-1)["pp"], num_microbatches=MICROBATCHES)
        step = composed(pipeline, ranks=MICROBATCHES, **GRADUAL)
        assert_is(step, train(step, step.init(PARAMS)), gradual_by_hand())

    fds.simulate(on_ranks, 2)


@pytest.mark.parametrize("at", [2, 6])
def test_a_resumed_run_is_the_run(at, tmp_path):
    step = composed(fds.ema(0.9), **GRADUAL)
    whole = train(step, step.init(PARAMS))
    fds.save(tmp_path, train(step, step.init(PARAMS), range(at)), step)
    state, _ = fds.load(tmp_path, step, PARAMS)
    assert_same_bits(train(step, state, range(at, CALLS)), whole)


def test_two_prune_different_weights():
    step = fds.compose(
        fds.prune_weights("0.*", density=0.5),
        fds.prune_weights("*", density=0.25, excluded=["0.*"], name="pruned_more"),
        fds.sgd(LR),
    )(LOSS)
    slots = train(step, step.init(PARAMS), range(1)).slots
    assert {name: [*slot] for name, slot in slots.items()} == {
        "pruned_weights": ["0.weight"],
        "pruned_more": ["2.weight", "4.weight"],
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"density": 0},
        {"density": 2},
        {"density": "0.5"},
        {"density": 0.5, "block": "2:4"},
        {"block": "2:4", "end": 3},
        {"density": 0.5, "block": 4},
        {"density": 0.5, "block": "0x1"},
        {"density": 0.5, "offset": -1},
        {"density": 0.5, "offset": 1.0},
        {"density": 0.5, "offset": 3, "end": 2},
        {"density": 0.5, "end": "never"},
        {"density": 0.5, "stride": 0},
        {"density": 0.5, "curve": "linear"},
        {"density": 0.5, "initial": 1},
        {"density": 0.5, "initial": True, "end": 5},
        {"density": 0.5, "excluded": "*.bias"},
        {"density": 0.5, "excluded": [3]},
        {"density": 0.5, "name": "a.b"},
        {"density": 0.5, "sparsity": 0.5},
    ],
)
def test_arguments_that_are_none_are_refused(arguments):
    with pytest.raises(ComposeError, match="prune_weights"):
        fds.prune_weights("*", **arguments)


@pytest.mark.parametrize("patterns", [(), (3,), ("",), (["*"],)])
def test_patterns_are_texts(patterns):
    with pytest.raises(ComposeError, match="patterns"):
        fds.prune_weights(*patterns, density=0.5)


@pytest.mark.parametrize(
    ("patterns", "arguments", "words"),
    [
        (["*.wait"], {"density": 0.5}, "matches no"),
        (["*.bias"], {"density": 0.5}, "choose no weight"),
        (["*"], {"density": 0.5, "excluded": ["6.*"]}, "matches no"),
        (["*"], {"density": 0.5, "block": "5x1"}, "blocks"),
        (["*"], {"block": "2:8"}, "blocks"),
    ],
)
def test_weights_that_are_not_there_are_refused(patterns, arguments, words):
    with pytest.raises(StateError, match=words):
        fds.compose(fds.prune_weights(*patterns, **arguments), fds.sgd(LR))(LOSS).init(PARAMS)


def halves(call, rank):
    return [x.chunk(2)[rank] for x in batch(call)]


@pytest.mark.parametrize("offset", [2, 3])  # after an average, and between two
def test_ranks_with_parameters_of_their_own_take_the_masks_of_the_first(offset):
    """By hand: two ranks step apart, and in each second call take their mean."""
    local, stay, rate = [{name: x.clone() for name, x in PARAMS.items()} for _ in range(2)], {}, 0.7
    for t in range(6):
        if t == offset:
            of_ranks = [{name: largest(t, params[name]).double() for name in WEIGHTS} for params in local]
            makes = of_ranks[0]
            assert all(torch.equal(makes[name], of_ranks[1][name]) for name in WEIGHTS) == (t % 2 == 0)
        for rank, params in enumerate(local):
            stay = of_ranks[rank] if t == offset else stay
            leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
            seen = {name: x * stay[name] if name in stay else x for name, x in leaves.items()}
            LOSS(seen, halves(t, rank)).backward()
            grads: dict[str, Any] = {name: leaf.grad for name, leaf in leaves.items()}
            local[rank] = {name: params[name] - rate * grad for name, grad in grads.items()}
        stay = makes if t == offset else stay
        if t % 2:
            local = [{name: (x + local[1][name]) / 2 for name, x in local[0].items()}] * 2

    def on_ranks():
        axis = fds.mesh(dp=-1)["dp"]
        apart = fds.local_updates(axis, every=2, outer=fds.sgd(1.0))
        step = fds.compose(apart, fds.prune_weights("*", density=0.5, offset=offset), fds.sgd(rate))(LOSS)
        state = step.init(PARAMS)
        for t in range(6):
            state, _ = step(state, halves(t, axis.index))
        torch.testing.assert_close(step.params(state), local[axis.index], rtol=0, atol=1e-12)
        assert_same_bits(masks_of(state), stay)

    fds.simulate(on_ranks, 2)


def test_calls_in_which_no_mask_is_made_send_what_a_plain_step_sends():
    def on_ranks():
        sharded = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=2)
        prune = fds.prune_weights("*", density=0.5, offset=1, end=3, stride=2)

        def sent(*transforms):
            step = fds.compose(sharded, *transforms, fds.skip_nonfinite(), fds.sgd(LR))(LOSS)
            state, sizes = step.init(PARAMS), []
            for call in range(13):
                traffic = Traffic()
                with counting(traffic):
                    state = train(step, state, [call])
                sizes.append((traffic.bytes_sent, {kind: n.calls for kind, n in traffic.counts.items()}))
            return sizes[1:]  # the first call learns

        pruned, plain = sent(prune), sent()
        more = [a != b for a, b in zip(pruned, plain, strict=True)]
        assert more == [True, False, True] + [True] * 8 + [False]  # calls 1 and 3, and the 8 after the end

    fds.simulate(on_ranks, 2)


def test_integers_are_left_alone_and_codes_refused():
    params = {"w": torch.randn(4, 32), "table": torch.arange(8).view(2, 4)}
    loss_fn = lambda params, x: (x @ params["w"].T + params["table"][0]).square().mean()
    x = torch.randn(3, 32)
    step = fds.compose(fds.prune_weights("*", density=0.5), fds.sgd(LR))(loss_fn)
    state, _ = step(step.init(params), x)
    assert torch.equal(state.params["table"], params["table"])
    coded = fds.compose(
        fds.freeze("w"), fds.quantize_frozen(), fds.prune_weights("*", density=0.5), fds.skip_nonfinite(), fds.sgd(LR)
    )(lambda params, x: loss_fn(params, x) * params["scale"])
    with pytest.raises(ComposeError, match="another shape"):
        coded(coded.init(params | {"scale": torch.ones(())}), x)


@pytest.mark.parametrize("arguments", [{"density": 0.5}, {"block": "2:4"}], ids=str)
def test_weights_of_many_dims_and_empty_ones(arguments):
    step = fds.compose(fds.prune_weights("*", **arguments), fds.sgd(0.0))(lambda p, x: sum(w.sum() for w in p.values()))
    params = {"w": torch.rand(2, 2, 2, 2, 2, 4) + 1, "v": torch.rand(4, 8) + 1, "u": torch.rand(0, 8)}
    _, metrics = step(step.init(params), torch.ones(1))
    halves = [
        w.view(-1, 4).topk(2).values if "block" in arguments else w.flatten().topk(w.numel() // 2).values
        for w in params.values()
    ]
    torch.testing.assert_close(metrics["loss"], sum(w.sum() for w in halves))


def test_two_need_slots_of_their_own():
    prune = fds.prune_weights("*", density=0.5)
    with pytest.raises(ComposeError, match="another name"):
        fds.compose(prune, prune, fds.sgd(LR))(LOSS)


@pytest.mark.parametrize("arguments", [{"density": 0.5, "offset": 2, "initial": True}, GRADUAL])
def test_graphs_of_calls_that_make_masks_and_of_those_that_make_none(arguments):
    whole = fds.compile(backend="eager", whole=True)
    plain, one_graph = composed(**arguments), composed(whole, fds.donate(), **arguments)
    want = train(plain, plain.init(PARAMS), range(13), bad=BAD)
    state = train(one_graph, one_graph.init(PARAMS), range(13), bad=BAD)
    assert_same_bits(state, want)
    assert len(one_graph.runtime.captured[0].works) == 2


def test_masks_are_estimated_before_anything_is_made():
    composition = fds.compose(fds.prune_weights("*.weight", **GRADUAL), fds.quantize_weights("0.weight"), fds.sgd(LR))
    assert fds.estimate_memory(composition, LOSS).state["slots"] == sum(
        8 * len(PARAMS[name]) for name in WEIGHTS
    )  # a word for each row
