"""`quantize_weights`: the plain step on a loss that rounds by hand, and MoQ as DeepSpeed does it, on ranks too."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.errors import CallError, ComposeError, FdsError, StateError
from fds.kernels import fake_quantize
from fds.loss import Layers
from tests.bits import assert_rounding, assert_same_bits

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "weight_grids.json").read_text())
CALLS, ROWS = 6, 8


def mean_square(out, y):
    return (out - y).square().mean()


def layers(dtype=torch.float32):
    linear = lambda *size: fds.LayerSpec(nn.Linear, *size, dtype=dtype)
    return Layers([linear(8, 16), torch.tanh, linear(16, 16), torch.tanh, linear(16, 4)], mean_square)


LAYERS = layers()
PARAMS = {name: x.clone() for name, x in fds.compose(fds.sgd(0.1))(LAYERS).init(LAYERS.init, key=1).params.items()}


def batch(call, dtype=torch.float32):
    g = torch.Generator().manual_seed(call)
    return [torch.randn(ROWS, n, generator=g).to(dtype) for n in (8, 4)]


def train(step, *, params=PARAMS, state=None, calls=range(CALLS), dtype=torch.float32):
    state = step.init(params, key=3) if state is None else state
    data = step.dimensions.data
    for call in calls:
        rows = batch(call, dtype)
        state, _ = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
    return state


class Rounded(torch.autograd.Function):
    """Symmetric integers of one weight, written by hand."""

    @staticmethod
    def forward(ctx, x, bits, groups, share):
        rows = x.reshape(groups, -1)
        half = 2 ** (bits - 1)
        scale = rows.abs().max(1, keepdim=True).values / half
        y = (rows / scale).round().clamp(-half, half - 1) * scale
        return share * x + (1 - share) * y.view(x.shape) if share else y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None, None


def by_hand(bits_of, groups, share_of=lambda t: 0.0):
    """Return a loss of weights that are rounded before it, with bits and a share by the number of its call."""
    counter = {"t": 0}

    def loss_fn(params, rows):
        seen = {
            name: Rounded.apply(x, bits_of(counter["t"]), groups(x), share_of(counter["t"])) if x.dim() > 1 else x
            for name, x in params.items()
        }
        return LAYERS(seen, rows)

    return loss_fn, counter


EXTRAS = {
    "alone": [],
    "accumulated": [fds.accumulate(2)],
    "averaged": [fds.ema(0.9), fds.skip_nonfinite()],
    "in bfloat16": [fds.precision(torch.bfloat16)],
    "offloaded": [fds.offload("host", "host")],
}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_the_plain_step_on_a_loss_that_rounds_by_hand(extra):
    """Of 4 bits in groups of 8 numbers; in bfloat16 the grid is computed in float32."""

    def hand(params, rows):
        seen = {
            name: Rounded.apply(x.float(), 4, x.numel() // 8, 0.0).to(x.dtype) if x.dim() > 1 else x
            for name, x in params.items()
        }
        return LAYERS(seen, rows)

    view = fds.quantize_weights("*.weight", bits=4, group_size=8)
    step = fds.compose(view, *extra, fds.adamw(0.05))(lambda p, rows: LAYERS(p, rows))
    plain = fds.compose(*extra, fds.adamw(0.05))(hand)
    got, want = train(step), train(plain)
    assert_same_bits(got.params, want.params)
    assert_same_bits(step.evaluate(got, batch(9))["loss"], plain.evaluate(want, batch(9))["loss"])


@pytest.mark.sweep
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_ranks_that_share_the_state(stage, rounding):
    """Law 4: with dropout's rule for numbers that are drawn."""
    double = layers(torch.float64)
    params = {name: x.double() for name, x in PARAMS.items()}
    view = fds.quantize_weights("*.weight", bits=(8, 3), groups="rows", period=2, rounding=rounding)

    def body():
        mine = fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=stage, bucket_bytes=512)
        step = fds.compose(view, mine, fds.sgd(0.1))(double)
        return step.params(train(step, params=params, dtype=torch.float64))

    plain = fds.compose(view, fds.accumulate(2), fds.sgd(0.1))(double)
    want = train(plain, params=params, dtype=torch.float64).params
    assert_rounding(fds.simulate(body, 2)[1], want, additions=4096)


def test_stages_of_a_pipeline():
    double = layers(torch.float64)
    params = {name: x.double() for name, x in PARAMS.items()}
    view = fds.quantize_weights("*.weight", bits=(6, 3), groups="rows", rounding="stochastic")

    def body():
        pipeline = fds.pipeline(plans.one_f_one_b, fds.mesh(pp=2)["pp"], num_microbatches=2)
        step = fds.compose(view, pipeline, fds.checkpoint_activations(), fds.sgd(0.1))(double)
        return step.params(train(step, params=params, dtype=torch.float64))

    plain = fds.compose(view, fds.accumulate(2), fds.sgd(0.1))(double)
    want = train(plain, params=params, dtype=torch.float64).params
    assert_rounding(fds.simulate(body, 2)[0], want, additions=4096)


@pytest.mark.parametrize("case", GOLDEN["moq"], ids=lambda case: f"{case['bits']} {case['mixing']}")
def test_bits_fall_and_weights_are_mixed_as_in_the_quantizer_of_deepspeed(case):
    weights = {"w": torch.tensor(GOLDEN["weights"])}
    start, target = case["bits"]
    period = {"period": case["period"]} if start > target else {}
    view = fds.quantize_weights(
        "w", bits=(start, target) if start > target else start, groups=2, mixing=case["mixing"], **period
    )
    step = fds.compose(view, fds.sgd(0.0))(lambda p, row: ((p["w"] * row).sum(), {"first": p["w"][0, 0].detach()}))
    state = step.init(weights)
    for call in case["calls"]:
        seen = step.evaluator(state)  # of the weights that the next call sees
        at = [seen(torch.eye(32)[i].view(2, 16))["loss"] for i in range(4)]
        torch.testing.assert_close(torch.stack(at), torch.tensor(call["numbers"]), rtol=2e-6, atol=1e-7)
        state, _ = step(state, torch.ones(2, 16))


def test_a_block_with_a_greater_eigenvalue_keeps_its_bits_for_longer():
    """The loop of MoQ written by hand: the period doubles at each drop, times 1 + floor(4 lambda) of the block."""
    eigenvalues = {"0.*": (0.3, 0.9), "2.*": (0.0,)}
    view = (
        fds.quantize_weights(
            "*.weight", bits=(8, 5), offset=2, period=3, mixing=0.2, factors={"0.*": [0.3, 0.9], "2.*": 0.0}
        )
        .apply(fds.compose(fds.sgd(0.1))(LAYERS))
        .view[0]
    )
    for block in ("0.weight", "2.weight", "4.weight"):
        lambdas = next((values for p, values in eigenvalues.items() if p[0] == block[0]), ())
        bits, period, ratio, call, drop = 8, 3, 1.0, 0, 0
        rule = view.bits_of(block)
        for t in range(60):
            step = torch.tensor(t)
            if t < 2:
                assert float(rule.kept(step)) == 1
                continue
            call += 1
            ratio = max(0.0, ratio - 0.2)
            if bits > 5 and call >= period:
                factor = 1 + math.floor(4 * lambdas[min(drop, len(lambdas) - 1)]) if lambdas else 1
                bits, period, ratio, drop = bits - 1, period * 2 * factor, 1.0, drop + 1
            assert (int(rule.at(step)), round(float(rule.kept(step)), 9)) == (bits, round(ratio, 9))


def test_eigenvalues_are_factors_as_they_are_measured():
    measured = {"0.*": fds.curvature.Eigenvalue(-3.0, 0.6, 9, True), "2.*": fds.curvature.Eigenvalue(5.0, 1.0, 3, True)}
    numbers = {"0.*": 0.6, "2.*": [1.0, 0.3]}
    measured["2.*"] = [measured["2.*"], 0.3]
    views = [
        fds.quantize_weights("*", bits=(8, 4), factors=factors).apply(fds.compose(fds.sgd(0.1))(LAYERS)).view[0]
        for factors in (measured, numbers)
    ]
    for name in ("0.weight", "2.weight", "4.weight"):
        assert views[0].bits_of(name) == views[1].bits_of(name)
    with pytest.raises(ComposeError, match="factors"):
        fds.quantize_weights("*", bits=(8, 4), factors={"*": fds.curvature.Eigenvalue(1.0, math.nan, 1, False)})


def test_a_description_says_how_many_bits_a_weight_has_now():
    falling = fds.quantize_weights("0.*", bits=(8, 6), offset=1, period=2, mixing=0.25)
    step = fds.compose(falling, fds.quantize_weights("2.weight", bits=4), fds.sgd(0.1))(LAYERS)
    state, seen = step.init(PARAMS), []
    for call in range(5):
        seen.append(step.describe(state).views)
        state = train(step, state=state, calls=[call])
    assert seen[0] == {"0.weight": "not rounded", "2.weight": "4 bits"}
    # rounding begins at update 1, a bit is dropped in its 2nd and 4th call, and mixing begins anew
    texts = ["8 bits with 75%", "7 bits with 100%", "7 bits with 75%", "6 bits with 100%"]
    assert [views["0.weight"] for views in seen[1:]] == [f"{text} of the weight itself" for text in texts]
    assert "view       4 bits: 2.weight" in str(step.describe(state))
    assert "4 bits: 2.weight" in step.describe(state)._repr_html_()


def test_the_hand_written_loop_of_moq_trains_to_the_same_bits():
    bits_of = lambda t: 8 - (t >= 1) - (t >= 3)  # of a period of 2: in calls 2 and 4
    share_of = lambda t: max(0.0, 1 - 0.5 * (t + 1 - max((0, *(n for n in (2, 4) if t + 1 >= n)))))
    view = fds.quantize_weights("*.weight", bits=(8, 6), period=2, mixing=0.5)
    loss_fn, counter = by_hand(bits_of, lambda x: 1, share_of)
    plain, step = fds.compose(fds.sgd(0.1))(loss_fn), fds.compose(view, fds.sgd(0.1))(LAYERS)
    got, want = step.init(PARAMS), plain.init(PARAMS)
    for call in range(CALLS):
        counter["t"] = call
        got, want = (
            train(step, state=got, calls=range(call, call + 1)),
            train(plain, state=want, calls=range(call, call + 1)),
        )
        assert_same_bits(got.params, want.params)


def test_a_run_that_was_stopped_is_the_run_that_was_not(tmp_path):
    view = fds.quantize_weights("*.weight", bits=(8, 4), groups="rows", rounding="stochastic", mixing=0.3)

    def body():
        step = fds.compose(view, fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=3), fds.adamw(0.05))(LAYERS)
        first = train(step, calls=range(3))
        fds.save(tmp_path, first, step)
        again, _ = fds.load(tmp_path, step, PARAMS)
        return step.params(train(step, state=again, calls=range(3, 6))), step.params(
            train(step, state=first, calls=range(3, 6))
        )

    got, want = fds.simulate(body, 2)[0]
    assert_same_bits(got, want)


def test_what_is_drawn_differs_by_call_microbatch_and_weight_and_evaluations_draw_nothing():
    seen = []

    def loss_fn(params, rows):
        seen.append(torch.cat([x.detach().flatten() for x in params.values()]))
        return sum((x * rows.mean()).sum() for x in params.values())

    params = {"a": torch.linspace(-1, 1, 64).view(8, 8), "b": torch.linspace(-1, 1, 64).view(8, 8)}
    view = fds.quantize_weights("*", bits=4, rounding="stochastic")
    step = fds.compose(view, fds.accumulate(2), fds.sgd(0.0))(loss_fn)
    state = step.init(params, key=1)
    for _ in range(2):
        state, _ = step(state, torch.ones(4, 1))
    drawn = seen[-4:]
    assert all(not a.equal(b) for i, a in enumerate(drawn) for b in drawn[:i])
    assert all(not x[:64].equal(x[64:]) for x in drawn)
    seen.clear()
    step.evaluate(state, torch.ones(4, 1))
    nearest = fake_quantize(params["a"].view(1, -1), 4).flatten()
    assert seen[-1].equal(torch.cat([nearest, nearest]))


def test_weights_may_be_rounded_apart_and_only_matrices_by_a_star():
    seen = {}

    def loss_fn(params, rows):
        seen.update(params)
        return sum(x.sum() for x in params.values()) * rows.mean()

    params = {"a": torch.randn(4, 8), "b": torch.randn(4, 8), "bias": torch.randn(8), "gain": torch.randn(8)}
    views = [fds.quantize_weights("a", "gain", bits=8), fds.quantize_weights("b*", bits=4, scheme="torchao")]
    step = fds.compose(*views, fds.sgd(0.1))(loss_fn)
    step.evaluate(step.init(params), torch.ones(1))
    assert_same_bits(seen["a"], fake_quantize(params["a"].view(1, -1), 8).view(4, 8))
    assert_same_bits(seen["b"], fake_quantize(params["b"], 4, scheme="torchao"))
    assert_same_bits(seen["gain"], fake_quantize(params["gain"].view(1, -1), 8).view(8))
    assert_same_bits(seen["bias"], params["bias"])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_tensor_axis_of_groups_that_lie_on_one_rank(rounding):
    double = torch.float64
    module = nn.Sequential(nn.Linear(8, 16, dtype=double), nn.Tanh(), nn.Linear(16, 4, dtype=double))
    view = fds.quantize_weights("*.weight", bits=4, group_size=8, rounding=rounding)

    def body(ranks):
        plan = {"0": fds.nn.column(), "2": fds.nn.row()}
        mine = fds.tensor_parallel(fds.mesh(tp=ranks)["tp"], plan)
        apply, params, _ = fds.functional(module)
        step = fds.compose(mine, view, fds.sgd(0.1))(lambda p, rows: mean_square(apply(p, rows[0]), rows[1]))
        return step.params(train(step, params=params, dtype=double))

    (want,) = fds.simulate(lambda: body(1), 1)
    got = fds.simulate(lambda: body(2), 2)
    assert_rounding(got[0], want, additions=4096)
    assert_same_bits(got[0], got[1])


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [({"groups": 1}, "group_size=64"), ({"groups": "rows"}, "group_size=8,"), ({"group_size": 16}, "group_size=8,")],
    ids=["one", "rows", "16"],
)
def test_a_tensor_axis_that_cuts_a_group_apart(arguments, hint):
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    pattern = "0.weight" if arguments == {"groups": 1} else "2.weight"

    def body():
        mine = fds.tensor_parallel(fds.mesh(tp=2)["tp"], {"0": fds.nn.column(), "2": fds.nn.row()})
        apply, params, _ = fds.functional(module)
        view = fds.quantize_weights(pattern, **arguments)
        step = fds.compose(mine, view, fds.sgd(0.1))(lambda p, rows: mean_square(apply(p, rows[0]), rows[1]))
        with pytest.raises(ComposeError, match="parts of a group") as error:
            train(step, params=params)
        assert hint in error.value.want

    fds.simulate(body, 2)


def test_what_is_packed_is_what_an_evaluation_sees():
    view = fds.quantize_weights("*.weight", bits=(6, 4), group_size=8, offset=1, period=2, mixing=0.5)
    step = fds.compose(view, fds.sgd(0.1))(LAYERS)
    state, filler = train(step), step.view[0]
    call = fds.step.Call.with_state(state, step.dimensions, training=False)
    begun = fds.step.Call.with_state(step.init(PARAMS), step.dimensions, training=False)
    for name, leaf in step.structure_of(state.params)[0].leaves.items():
        x = state.params[name]
        packed = filler.packed(x, leaf, call)
        assert (packed is None) == (x.dim() < 2)
        if packed is not None:
            assert packed.bits == 4
            assert_same_bits(packed.numbers(), filler(x, leaf, call))
            assert filler.packed(x, leaf, begun) == "rounded from update 1 on"


BAD = {
    "no pattern": ((), {}),
    "no string": ((3,), {}),
    "bits": (("*",), {"bits": 0}),
    "many bits": (("*",), {"bits": 17}),
    "rising bits": (("*",), {"bits": (4, 8)}),
    "three bits": (("*",), {"bits": (8, 6, 4)}),
    "groups": (("*",), {"groups": 0}),
    "words": (("*",), {"groups": "columns"}),
    "both": (("*",), {"groups": 2, "group_size": 4}),
    "group_size": (("*",), {"group_size": 0}),
    "symmetric": (("*",), {"symmetric": 1}),
    "scheme": (("*",), {"scheme": "gguf"}),
    "rounding": (("*",), {"rounding": "up"}),
    "offset": (("*",), {"offset": -1}),
    "period": (("*",), {"bits": (8, 4), "period": 0}),
    "a period of nothing": (("*",), {"period": 5}),
    "mixing": (("*",), {"mixing": 0.0}),
    "factors": (("*",), {"bits": (8, 4), "factors": {"*": 1.5}}),
    "no factors": (("*",), {"bits": (8, 4), "factors": {"*": []}}),
    "factors of nothing": (("*",), {"factors": {"*": 0.5}}),
    "ternary shifted": (("*",), {"bits": 2, "symmetric": False}),
    "binary drawn": (("*",), {"bits": (8, 1), "rounding": "stochastic"}),
    "torchao drawn": (("*",), {"scheme": "torchao", "rounding": "stochastic"}),
    "torchao of 9 bits": (("*",), {"scheme": "torchao", "bits": 9}),
}


@pytest.mark.parametrize(("patterns", "arguments"), BAD.values(), ids=BAD)
def test_bad_arguments(patterns, arguments):
    with pytest.raises(ComposeError):
        fds.quantize_weights(*patterns, **arguments)


def test_bad_weights_are_refused_before_anything_runs():
    init = lambda *views: fds.compose(*views, fds.sgd(0.1))(LAYERS).init(PARAMS)
    for kind, pattern, views in (
        (StateError, "matches no parameter", [fds.quantize_weights("head.*")]),
        (StateError, r"matches no parameter(?s:.*)'\[02\].*' matches 0.weight, 0.bias", [fds.quantize_weights("[02]")]),
        (StateError, r"choose no weight(?s:.*)they match 0.bias, 2.bias", [fds.quantize_weights("*.bias", bits=4)]),
        (StateError, "matches no parameter", [fds.quantize_weights("0.*", bits=(8, 4), factors={"2.*": 0.1})]),
        (ComposeError, "cannot be cut", [fds.quantize_weights("*", group_size=5)]),
        (ComposeError, "quantized twice", [fds.quantize_weights("0.*"), fds.quantize_weights("*")]),
    ):
        with pytest.raises(kind, match=pattern):
            init(*views)
    with pytest.raises(CallError):
        fds.quantize_weights("*", bit=4)
    assert issubclass(ComposeError, FdsError)
