"""Linear layers in float8: the bits of torchao, and the step of a model that is made of such layers."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.compression import float8
from fds.errors import ComposeError
from tests.bits import assert_same_bits
from tests.golden import float8 as golden

ANSWERS = json.loads((Path(golden.__file__).parent / "float8.json").read_text())["cases"]
ROWS, S, WIDTH, MICROBATCHES, CALLS = 8, 3, 16, 4, 3
INNER = ["*.a", "*.b"]


@pytest.mark.parametrize("case", golden.CASES, ids=str)
def test_what_torchao_computes_by_emulation(case):
    """Bit for bit where sums are exact; elsewhere another CPU may add float32 numbers in another order."""
    (answer,) = [x for x in ANSWERS if {name: x[name] for name in case} == case]
    x, weight, grad = golden.made(case)
    y = float8.linear(x.requires_grad_(), weight.requires_grad_(), case["recipe"])
    dx, dw = torch.autograd.grad(y, [x, weight], grad)
    for got, want in ((y, answer["y"]), (dx, answer["dx"]), (dw, answer["dw"])):
        told = torch.tensor(want, dtype=got.dtype).view_as(got)
        if case["adds_exactly"]:
            assert_same_bits(got, told)
        torch.testing.assert_close(got, told)


class EightBits(nn.Linear):
    """What stands for a layer in a model written by hand."""

    recipe = "tensorwise"

    def forward(self, x):
        return float8.linear(x, self.weight, self.recipe) + self.bias.to(x.dtype)


class ByRows(EightBits):
    recipe = "rowwise"


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.b = kind(WIDTH, 2 * WIDTH), kind(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def parts(kind):
    torch.manual_seed(0)
    return [nn.Linear(3, WIDTH), Block(kind), Block(kind), nn.Linear(WIDTH, 2)]


def squared(out, y):
    return (out.float() - y).square().mean()


def batch(call):
    g = torch.Generator().manual_seed(call)
    return [torch.randn(ROWS, S, n, generator=g) for n in (3, 2)]


def train(*transforms, kind=nn.Linear, loss=None, params=None):
    """Return what a step has after some calls, and what an evaluation then says."""
    loss = fds.Layers(parts(kind), squared) if loss is None else loss
    step = fds.compose(*transforms, fds.sgd(0.5))(loss)
    state, data = step.init(params or loss.init, key=3), step.dimensions.data
    share = lambda rows: rows if data is None else [x.chunk(data.size)[data.index] for x in rows]
    for call in range(CALLS):
        state, _ = step(state, share(batch(call)))
    return step.params(state), step.evaluate(state, share(batch(9)))["loss"]


@pytest.fixture(scope="module", params=[EightBits, ByRows])
def by_hand(request):
    return request.param.recipe, train(fds.accumulate(MICROBATCHES), kind=request.param)


def test_the_step_of_a_model_of_such_layers(by_hand):
    recipe, want = by_hand
    eight = fds.float8(INNER, recipe)
    assert_same_bits(train(fds.accumulate(MICROBATCHES), eight), want)
    assert_same_bits(train(fds.accumulate(MICROBATCHES), eight, fds.checkpoint_activations()), want)
    apply, params, _ = fds.functional(nn.Sequential(*parts(nn.Linear)))
    loss = lambda params, batch: squared(apply(params, batch[0]), batch[1])
    assert_same_bits(train(fds.accumulate(MICROBATCHES), eight, loss=loss, params=params), want)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, of its own code
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the same
def test_compiled_layers(by_hand):
    recipe, want = by_hand
    compiled = fds.compile(backend="eager")
    assert_same_bits(train(compiled, fds.accumulate(MICROBATCHES), fds.float8(INNER, recipe)), want)


@pytest.mark.parametrize("stage", range(4))
def test_ranks(by_hand, stage):
    recipe, want = by_hand

    def body(kind, *more):
        small = {"max_live_bytes": 8192, "bucket_bytes": 2048} if stage == 3 else {}
        shared = fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=stage, **small)
        return train(fds.accumulate(MICROBATCHES // 2), shared, *more, kind=kind)

    kind = EightBits if recipe == "tensorwise" else ByRows
    got = fds.simulate(lambda: body(nn.Linear, fds.float8(INNER, recipe)), 2)
    assert_same_bits(got, fds.simulate(lambda: body(kind), 2))
    torch.testing.assert_close(got[0][0], want[0], rtol=0, atol=2e-3)  # a sum in another order may cross to the next q


def test_stages_of_a_pipeline(by_hand):
    recipe, _ = by_hand
    kind = EightBits if recipe == "tensorwise" else ByRows

    def body(kind, *more):
        axis = fds.mesh(pp=2)["pp"]
        return train(fds.pipeline(plans.zb_h1, axis, num_microbatches=MICROBATCHES), *more, kind=kind)

    assert_same_bits(
        fds.simulate(lambda: body(nn.Linear, fds.float8(INNER, recipe)), 2), fds.simulate(lambda: body(kind), 2)
    )


@pytest.mark.parametrize("low", [fds.precision, fds.autocast])
def test_with_16_bits_around(by_hand, low):
    recipe, _ = by_hand
    kind = EightBits if recipe == "tensorwise" else ByRows
    eight = fds.float8(INNER, recipe)
    assert_same_bits(train(low(torch.bfloat16), eight), train(low(torch.bfloat16), kind=kind))


def test_inputs_that_are_quantized_before_are():
    quantize = fds.quantize_activations(INNER, bits=3)
    got = train(fds.float8(INNER), quantize)
    assert (got[1] - train(fds.float8(INNER))[1]).abs() > 1e-4
    with pytest.raises(ComposeError, match="computed in another way"):
        train(quantize, fds.float8(INNER))


def test_gradients_by_torch_func():
    x, weight = torch.randn(6, 16), torch.randn(8, 16, requires_grad=True)
    f = lambda weight, x: float8.linear(x, weight, "rowwise").square().sum()
    (want,) = torch.autograd.grad(f(weight, x), weight)
    assert_same_bits(torch.func.grad(f)(weight.detach(), x), want)
    each = torch.func.vmap(torch.func.grad(f), (None, 0))(weight.detach(), x[:, None])
    rows = [torch.func.grad(f)(weight.detach(), row[None]) for row in x]
    torch.testing.assert_close(each, torch.stack(rows))


@pytest.mark.parametrize("recipe", float8.RECIPES)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(32, 64, 16), (5, 20, 7), (1, 3, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_product_is_the_emulations_to_rounding(recipe, fast, m, k, n, dtype):
    """By torch's CPU kernel of the same name; none of these ran on a GPU."""
    left = float8.cast(torch.randn(m, k), float8.E4M3, recipe, -1)
    right = float8.cast(torch.randn(n, k).t(), float8.E4M3, recipe, 0)
    got, want = (f(left, right, dtype, fast=fast) for f in (float8.multiplied, float8.product))
    low = dtype is torch.bfloat16 or (fast and recipe == "rowwise")
    eps = torch.finfo(torch.bfloat16 if low else torch.float32).eps
    torch.testing.assert_close(got, want, rtol=2 * eps, atol=k * 20 * torch.finfo(torch.float32).eps)


def test_nothing_and_what_is_not_finite():
    weight = torch.randn(8, 16)
    assert float8.linear(torch.zeros(0, 16), weight, "rowwise").shape == (0, 8)
    for recipe in float8.RECIPES:
        assert_same_bits(float8.linear(torch.zeros(2, 16), weight, recipe), torch.zeros(2, 8))
        for number in (torch.nan, torch.inf):
            assert not float8.linear(torch.full((2, 16), number), weight, recipe).isfinite().any()


def test_ranks_that_have_parts_of_matrices_are_refused():
    def body(axis, *more):
        loss = fds.Layers(parts(nn.Linear), squared)
        step = fds.compose(*more, fds.float8(INNER), fds.sgd(0.5))(loss)
        step(step.init(loss.init), batch(0))

    divided = lambda: fds.tensor_parallel(fds.mesh(tp=2)["tp"], {"*.a": "column", "*.b": "row"})
    with pytest.raises(ComposeError, match="whole matrices"):
        fds.simulate(lambda: body("tp", divided()), 2)
    with pytest.raises(ComposeError, match="whole matrices"):
        fds.simulate(lambda: body("sp", fds.context_parallel(fds.mesh(sp=2)["sp"])), 2)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([],), "names modules"),
        ((7,), "names modules"),
        (("nothing",), "matches no module"),
        (("*",), "in the place of nn.Linear"),
        (("*.a", "columnwise"), "no such recipe"),
    ],
    ids=str,
)
def test_what_is_refused(arguments, match):
    with pytest.raises(ComposeError, match=match):
        fds.compose(fds.float8(*arguments), fds.sgd(0.1))(fds.Layers(parts(nn.Linear), squared))


def test_modules_that_are_no_plain_linear_layers_or_matched_twice_are_refused():
    with pytest.raises(ComposeError, match="computed in another way"):
        fds.compose(fds.float8("*.a"), fds.sgd(0.1))(fds.Layers(parts(EightBits), squared))
    with pytest.raises(ComposeError, match=r"it has 1\.a"):
        fds.compose(fds.float8("1"), fds.sgd(0.1))(fds.Layers(parts(nn.Linear), squared))
    with pytest.raises(ComposeError, match="each module matched once"):
        fds.compose(fds.float8("*.a"), fds.float8("1.a"), fds.sgd(0.1))(fds.Layers(parts(nn.Linear), squared))
    kept = fds.precision(torch.bfloat16, keep_float32=("1.a.*",))
    with pytest.raises(ComposeError, match="computed in another way"):
        train(kept, fds.float8("1.a"))
