"""The layer against the same layer in plain torch, with the same masks of dropout."""

import itertools

import attrs
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.checkpoint import checkpoint

import fds
from fds.errors import KernelError
from fds.kernels.choice import only
from fds.kernels.flash import flash_attention
from fds.kernels.scaled_dot_product import attention
from fds.kernels.softmax import masked_softmax
from fds.nn import TransformerConfig, TransformerLayer, transformer_layer
from fds.nn.transformer_layer import _select_attention
from tests.bits import assert_same_bits
from tests.devices import DEVICE, rng_state
from tests.kernels.accuracy import DTYPES, assert_near, distance
from tests.nn.plain import build, drawn, gradients, inputs, padding, plain_layer

SAVING = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (~mask[:, None, None, :]).to(dtype) * torch.finfo(dtype).min


def bound(config: TransformerConfig, tokens: int, dtype: torch.dtype) -> float:
    """Say how far rounding may move a result: once for each number that a chain of the layer's sums adds."""
    return torch.finfo(dtype).eps * (4 * config.hidden_size + 2 * config.intermediate_size + 2 * tokens + 64)


def compare(layer, x, mask=None, seed=7) -> None:
    """Compare output and every gradient with the plain layer in float64."""
    config, params = layer.config, dict(layer.named_parameters())
    key = drawn(seed) if layer.training else None

    def ours(params, x):
        out = torch.func.functional_call(layer, params, (x, mask))
        return out[0] if config.return_tuple else out

    got, found = gradients(ours, params, x)
    wide_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    wide = {name: p.double() for name, p in params.items()}
    want, sought = gradients(lambda p, x: plain_layer(p, config, x, wide_mask, key), wide, x.double())
    most = bound(config, x.shape[1], x.dtype)
    assert distance(got, want) <= most
    for name in sought:
        assert found[name].dtype == params.get(name, x).dtype
        assert distance(found[name], sought[name]) <= most, name


@pytest.mark.parametrize("options", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("pre", [True, False])
def test_it_is_the_plain_layer_whatever_it_keeps(pre, options):
    settings = dict(zip(SAVING, options, strict=True))
    layer = build(torch.float64, pre_layer_norm=pre, attn_dropout_ratio=0.3, hidden_dropout_ratio=0.2, **settings)
    compare(layer, inputs(layer.config, 2, 5, torch.float64), padding(2, 5))


@pytest.mark.parametrize("ratios", [(0.0, 0.0), (0.4, 0.0), (0.0, 0.4)])
@pytest.mark.parametrize("masked", ["no", "padding", "additive", "full"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_hide_what_they_hide_in_the_plain_layer(ratios, masked, causal):
    dropout = {"attn_dropout_ratio": ratios[0], "hidden_dropout_ratio": ratios[1]}
    layer = build(torch.float64, causal=causal, activation="gelu_erf", **dropout)
    mask = {
        "no": None,
        "padding": padding(2, 5),
        "additive": additive(padding(2, 5), torch.float64),
        "full": torch.randn(1, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    }[masked]
    compare(layer, inputs(layer.config, 2, 5, torch.float64), mask)


@given(
    st.sampled_from([(1, 1), (6, 3), (10, 1), (21, 7), (42, 2), (33, 11)]),
    st.integers(1, 50),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
def test_any_size_runs(sizes, intermediate, batch, tokens, pre, checkpointed):
    layer = build(
        torch.float64,
        hidden_size=sizes[0],
        heads=sizes[1],
        intermediate_size=intermediate,
        pre_layer_norm=pre,
        attn_dropout_checkpoint=checkpointed,
        layer_norm_eps=1e-3,  # a row of one number has no variance
    )
    compare(layer, inputs(layer.config, batch, tokens, torch.float64), padding(batch, tokens))


@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_heads_may_be_larger_than_a_block(ratio):
    layer = build(hidden_size=514, heads=2, intermediate_size=3, attn_dropout_ratio=ratio)
    x = inputs(layer.config, 1, 3)
    compare(layer, x)
    with only("triton"):
        compare(layer, x)
    with only("triton"), pytest.raises(KernelError, match="the head dimension of q exceeds a block"):
        build(hidden_size=514, heads=2, attn_dropout_checkpoint=True, attn_dropout_ratio=0.1)(x)


def test_nothing_is_a_batch_too():
    layer = build()
    for shape in ((0, 5, 12), (2, 0, 12)):
        assert layer(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pre", [True, False])
def test_lower_precision_is_near(dtype, pre):
    """16-bit results are rounded some twenty times on their way."""
    layer = build(dtype, pre_layer_norm=pre, heads=2)
    x, params = inputs(layer.config, dtype=dtype), dict(layer.named_parameters())
    mask = additive(padding(2, 5), torch.float32)  # wider than the layer: its least number is beyond bfloat16
    key = drawn(3)
    got, found = gradients(lambda p, x: torch.func.functional_call(layer, p, (x, mask)), params, x)
    wide = {name: p.double() for name, p in params.items()}
    want, sought = gradients(lambda p, x: plain_layer(p, layer.config, x, mask.double(), key), wide, x.double())
    assert_near(got, want, dtype, factor=4)
    for name in sought:
        assert_near(found[name], sought[name], dtype, factor=8)


def strides(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[1], x.shape[0], 2 * x.shape[2])[..., ::2].transpose(0, 1).copy_(x)


def test_hidden_states_may_have_any_strides():
    layer = build(torch.float64)
    x = strides(inputs(layer.config, dtype=torch.float64))
    assert not x.is_contiguous()
    compare(layer, x, strides(padding(2, 5)[..., None])[..., 0])


def test_a_query_that_may_attend_to_nothing_gets_no_attention():
    for ratio, checkpointed in ((0.0, False), (0.2, False), (0.2, True)):
        layer = build(attn_dropout_ratio=ratio, hidden_dropout_ratio=0.0, attn_dropout_checkpoint=checkpointed)
        x, mask = inputs(layer.config), torch.ones(2, 5, dtype=torch.bool)
        mask[1] = False
        call = lambda p, x, layer=layer, mask=mask: torch.func.functional_call(layer, p, (x, mask))
        got, found = gradients(call, dict(layer.named_parameters()), x)
        assert all(bool(g.isfinite().all()) for g in found.values())
        wide = {name: p.double() for name, p in layer.named_parameters()}
        alone = plain_layer(wide, attrs.evolve(layer.config, attn_dropout_ratio=0.0), x.double(), mask)
        assert distance(got[1], alone[1]) < bound(layer.config, 5, torch.float32)


def test_dropout_is_off_in_eval_mode_and_draws_nothing():
    layer, plain = build(torch.float64), build(torch.float64, attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0)
    x = inputs(layer.config, dtype=torch.float64)
    before = rng_state()
    assert torch.equal(layer.eval()(x), plain(x))
    assert torch.equal(rng_state(), before)
    layer.train()(x)
    assert not torch.equal(rng_state(), before)


def test_the_config_says_in_which_mode_it_starts():
    assert not build(training=False).training
    assert build().training


def test_each_call_drops_others():
    layer, x = build(), inputs(build().config)
    assert not torch.equal(layer(x), layer(x))


def test_style_of_output():
    layer = build(return_tuple=True, attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0)
    x, mask = inputs(layer.config), padding(2, 5)
    (y,) = layer(x, mask)
    again, same = layer((x, mask))  # a pair stays one
    assert torch.equal(y, again) and same is mask
    assert layer((x, None))[1] is None
    with pytest.raises(KernelError, match="does not take a tuple of one"):
        TransformerLayer.spec(layer.config)


def refused(call) -> str:
    with pytest.raises(KernelError) as caught:
        call()
    return caught.value.where


def test_bad_input_is_refused_by_name():
    layer = build(batch_size=2)
    x, mask = inputs(layer.config), padding(2, 5)
    assert refused(lambda: layer(x[0])) == "hidden_states"
    assert refused(lambda: layer(x[..., :6])) == "hidden_states"
    assert refused(lambda: layer(x.long())) == "hidden_states"
    assert refused(lambda: layer("x")) == "hidden_states"
    assert refused(lambda: layer((x, mask), mask)) == "hidden_states"
    assert refused(lambda: layer((x,))) == "hidden_states"
    assert refused(lambda: layer(inputs(layer.config, 3))) == "batch_size"
    for wrong in (mask.long(), mask.float(), mask[:1], mask[:, :3], mask[:, None], torch.zeros(2, 2, 5, 5), "x"):
        assert refused(lambda wrong=wrong: layer(x, wrong)) == "attention_mask"
    assert refused(lambda: layer(x, mask.to("meta"))) == "attention_mask"
    assert refused(lambda: TransformerLayer({"hidden_size": 8})) == "config"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sequence_that_is_masked_out_attends_to_nothing_however_that_is_said(dtype):
    nothing = torch.tensor([True, False])[:, None].expand(2, 5)
    masks = [nothing[:, None, None]]
    masks += [torch.zeros(2, 1, 1, 5, dtype=d).masked_fill(~masks[0], torch.finfo(d).min) for d in DTYPES]
    for ratio, checkpointed in ((0.0, False), (0.2, False), (0.2, True)):
        layer = build(torch.float32, attn_dropout_ratio=ratio, attn_dropout_checkpoint=checkpointed).to(dtype)
        x = inputs(layer.config, dtype=dtype)
        torch.manual_seed(2)
        want = layer(x, nothing)
        for mask in masks:
            torch.manual_seed(2)
            torch.testing.assert_close(layer(x, mask), want)


def test_attention_is_computed_by_what_the_config_asks_for():
    by = lambda p, **settings: _select_attention(build(**settings).config, p)
    assert by(0.1) is masked_softmax
    assert by(0.1, attn_dropout_checkpoint=True) is flash_attention
    for settings in ({}, {"stochastic_mode": True}, {"attn_dropout_checkpoint": True}):
        assert by(0.0, **settings) is attention


def test_a_mask_is_a_constant():
    for ratio, checkpointed in ((0.0, False), (0.2, False), (0.2, True)):
        layer = build(attn_dropout_ratio=ratio, attn_dropout_checkpoint=checkpointed)
        mask = torch.zeros(2, 1, 1, 5, requires_grad=True)
        layer(inputs(layer.config), mask).sum().backward()
        assert mask.grad is None


# how it is called


def both(kind: str):
    """Return layer, parameters and input for a kind of kernels, dropout on."""
    layer = build(attn_dropout_ratio=0.3, hidden_dropout_ratio=0.2, intermediate_size=16, gelu_checkpoint=True)
    return layer, {name: p.detach() for name, p in layer.named_parameters()}, inputs(layer.config, 1, 6)


@pytest.mark.parametrize(
    "settings",
    [
        {"pre_layer_norm": True},
        {"pre_layer_norm": False, "activation": "gelu_erf"},
        dict.fromkeys(SAVING, True),
        {"pre_layer_norm": False, "attn_dropout_ratio": 0.0, "stochastic_mode": True} | dict.fromkeys(SAVING[:2], True),
    ],
)
def test_kernels_make_the_same_layer(settings):
    layer = build(**{"attn_dropout_ratio": 0.3, "hidden_dropout_ratio": 0.2, "intermediate_size": 16} | settings)
    with only("triton"):
        compare(layer, inputs(layer.config, 2, 6), padding(2, 6))


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_functional_gradients_are_the_same(kind):
    layer, params, x = both(kind)
    loss = lambda params: torch.func.functional_call(layer, params, (x,)).square().sum()
    with only(kind):
        torch.manual_seed(1)
        got = torch.func.grad(loss)(params)
        torch.manual_seed(1)
        _, back = torch.func.vjp(loss, params)
        assert_same_bits(back(torch.ones(()))[0], got)
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        torch.manual_seed(1)
        want = torch.autograd.grad(loss(leaves), list(leaves.values()))
    assert_same_bits(got, dict(zip(leaves, want, strict=True)))


# torch's compiler instantiates autograd functions while it traces them, of which torch warns: torch's to mend
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_checkpointed_or_compiled_layer_is_the_same(kind):
    layer, _, x = both(kind)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    calls = {"plain": layer, "checkpoint": lambda x: checkpoint(layer, x, use_reentrant=False), "compiled": compiled}
    results = {}
    with only(kind):
        for name, call in calls.items():
            torch.manual_seed(2)
            given = x.clone().requires_grad_()
            out = call(given)
            results[name] = [out.detach(), *torch.autograd.grad(out.square().sum(), [given, *layer.parameters()])]
    for name in ("checkpoint", "compiled"):
        for got, want in zip(results[name], results["plain"], strict=True):
            assert distance(got, want) <= bound(layer.config, 6, torch.float32), name
    assert_same_bits(results["checkpoint"], results["plain"])


def test_autocast_runs_products_in_the_low_dtype():
    layer = build(hidden_dropout_ratio=0.2, attn_dropout_ratio=0.0, gelu_checkpoint=True)
    x, params = inputs(layer.config), dict(layer.named_parameters())
    key = drawn(4)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = layer(x, padding(2, 5))
    out.float().square().sum().backward()
    wide = {name: p.double() for name, p in params.items()}
    assert_near(out, plain_layer(wide, layer.config, x.double(), padding(2, 5), key), torch.bfloat16, factor=2)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in params.values())


def test_it_is_a_module_for_functional():
    layer = build()
    apply, params, buffers = fds.functional(layer)
    assert not buffers and params.keys() == dict(layer.named_parameters()).keys()
    torch.manual_seed(1)
    want = layer(inputs(layer.config))
    torch.manual_seed(1)
    assert torch.equal(apply(params, inputs(layer.config)), want)


def test_a_boolean_mask_of_four_dimensions_is_that_of_two():
    layer = TransformerLayer(TransformerConfig(hidden_size=16, heads=2, adjust_init_range=False)).eval()
    x, seen = torch.randn(3, 5, 16), torch.arange(5) < torch.tensor([[5], [3], [1]])
    want = layer(x, seen)
    for mask in (seen[:, None, None, :], seen[:, None, None, :].expand(3, 1, 5, 5)):
        torch.testing.assert_close(layer(x, mask), want)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda x: x.half(), "hidden_states has another dtype than attn_qkvw"),
        (lambda x: x.to("meta"), "hidden_states is on another device than attn_qkvw"),
        (lambda x: None, "hidden_states is missing"),
    ],
)
def test_hidden_states_that_do_not_fit_the_weights_are_refused(given, words):
    layer = TransformerLayer(TransformerConfig(hidden_size=16, heads=2, adjust_init_range=False))
    with pytest.raises(KernelError, match=words):
        layer(given(torch.zeros(1, 2, 16)))


@pytest.fixture
def left_to_torch(monkeypatch):
    """Let torch's own dropout take the place of seeded masks, as on a GPU where no kernel is chosen."""
    monkeypatch.setattr(transformer_layer, "is_left_to_torch", lambda kernel, x: True)


@pytest.mark.parametrize("settings", [{}, {"attn_dropout_checkpoint": True}, {"pre_layer_norm": False, "causal": True}])
def test_torchs_own_dropout_is_an_average_of_nothing_dropped(left_to_torch, settings):
    layer = build(torch.float64, attn_dropout_ratio=0.3, hidden_dropout_ratio=0.2, initializer_range=0.01, **settings)
    x, mask = inputs(layer.config, 2, 5, torch.float64), padding(2, 5)
    torch.manual_seed(1)
    first, other = layer(x, mask), layer(x, mask)
    torch.manual_seed(1)
    assert_same_bits(layer(x, mask), first)  # the masks are those of torch's generator
    assert not torch.equal(other, first)
    with torch.no_grad():
        z = layer._feed_forward(x)
        drawn = torch.stack([layer._add(z, layer.output_b, x, None, 2) for _ in range(4000)]) - x
        expected = z + layer.output_b
        standard_error = 0.5 * expected.abs() / 4000**0.5  # the variance is p / (1 - p) times the square
        assert ((drawn.mean(0) - expected).abs() / standard_error).max() < 6
        assert abs((drawn == 0).double().mean() - 0.2) < 0.01


def test_torchs_own_dropout_is_recomputed_alike_and_off_in_eval_mode(left_to_torch):
    layer = build(torch.float64, attn_dropout_ratio=0.3, hidden_dropout_ratio=0.2)
    x = inputs(layer.config, 2, 5, torch.float64)
    results = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(3)
        out = call(x)
        results.append((out, torch.autograd.grad(out.sum(), list(layer.parameters()))))
    assert_same_bits(results[1], results[0])
    layer.eval()
    compare(layer, inputs(layer.config, 2, 5, torch.float64), padding(2, 5))
