"""The masked softmax: against float64, with masks of all kinds, its dropout drawn again, in every way of gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from fds.errors import KernelError
from fds.kernels import philox, softmax
from fds.kernels.choice import only
from fds.kernels.softmax import masked_softmax, reference
from tests.kernels.accuracy import DTYPES, assert_near, in_float64, random, strided
from tests.kernels.ways import WAYS, kept_bytes, plain, poisoned, traced, without_a_gradient, zeros_in_backward

SEED = torch.tensor(2**40 + 7)
# The result is rounded; the gradient is of probabilities rounded once, and rounded itself.
ROUNDINGS = 2.0


def masks(shape):
    """Return masks of all kinds that broadcast to (..., Sq, Sk); the first column takes part, so no row is empty."""
    b, queries, columns = shape[0], *shape[-2:]
    lead = (b, *[1] * (len(shape) - 3)) if len(shape) > 2 else ()
    padding = random(*lead, 1, columns, seed=3) < 0.5
    pairs = random(*lead, queries, columns, seed=4) < 0.5
    padding[..., 0] = pairs[..., 0] = True
    return {
        "none": None,
        "padding": padding,
        "pairs": pairs,
        "query": (random(queries, 1, seed=5) > -9),
        "bias": random(queries, columns, seed=6),
        "very negative": torch.where(padding, 0.0, -1e4),
        "minus infinity": torch.where(pairs, 0.5, float("-inf")),
        "whole": random(*shape, seed=7),
    }


def compare(scores, mask=None, dy=None, **options):
    """Check results and gradients of both kinds against float64."""
    dy = random(*scores.shape, dtype=scores.dtype, seed=1) if dy is None else dy
    scores64, dy64 = in_float64(scores, dy)
    y64 = reference(scores64, mask, **options)
    (want,) = torch.autograd.grad(y64, scores64, dy64)
    for kind in ("triton", "reference"):
        with only(kind):
            y = masked_softmax(scores, mask, **options)
            (got,) = torch.autograd.grad(y, scores, dy)
        assert y.dtype == got.dtype == scores.dtype
        assert_near(y, y64, factor=ROUNDINGS)
        assert_near(got, want, factor=ROUNDINGS)


def made(*shape, dtype=torch.float32, seed=0):
    return random(*shape, dtype=dtype, seed=seed, requires_grad=True)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", masks((1, 1, 1)))
def test_it_is_softmax_of_the_sum_and_so_is_its_gradient(name, dtype):
    for shape in [(2, 1, 5, 123), (6, 431), (1, 1, 1, 1)]:
        compare(made(*shape, dtype=dtype), masks(shape)[name], scale=0.3)
    compare(made(2, 3, 6, 42, dtype=dtype), masks((2, 3, 6, 42))[name], scale=0.3, p=0.3, seed=SEED, offset=5)
    compare(made(2, 3, 6, 42, dtype=dtype), masks((2, 3, 6, 42))[name], causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_may_be_longer_than_a_block(dtype):
    compare(made(3, 8191, dtype=dtype), scale=2.0)
    compare(made(2, 1, 2, 9001, dtype=dtype), masks((2, 1, 2, 9001))["minus infinity"], scale=0.3, p=0.5, seed=SEED)


@given(
    lead=st.lists(st.integers(1, 2), max_size=3),
    queries=st.integers(1, 6),
    columns=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(sorted(masks((1, 1, 1)))),
    causal=st.booleans(),
    p=st.sampled_from([0.0, 0.25]),
)
def test_any_shape(lead, queries, columns, dtype, name, causal, p):
    shape = (*lead, queries, columns)
    compare(made(*shape, dtype=dtype), masks(shape)[name], causal=causal, p=p, seed=SEED, offset=1)


def test_it_is_torchs_softmax_and_attentions_probabilities():
    x = made(2, 3, 6, 42)
    assert_near(masked_softmax(x), x.softmax(-1))
    q, k = random(2, 3, 6, 16), random(2, 3, 42, 16, seed=1)
    pairs = masks((2, 3, 6, 42))["pairs"]
    for options, torchs in [({"mask": pairs}, {"attn_mask": pairs}), ({"causal": True}, {"is_causal": True})]:
        want = F.scaled_dot_product_attention(q, k, torch.eye(42).expand(2, 3, 42, 42), **torchs)
        for kind in ("triton", "reference"):
            with only(kind):
                assert_near(masked_softmax(q @ k.mT, scale=0.25, **options), want)


def test_under_causality_every_query_sees_all_columns_up_to_its_own():
    for queries, columns in ((42, 42), (33, 123), (123, 42)):  # beyond the first sixteen, by whose multiples it reads
        compare(made(queries, columns), causal=True)


def test_five_dims_whose_mask_repeats_in_the_middle():
    mask = random(2, 1, 3, 1, 42, seed=2) < 0.3
    mask[..., 0] = True
    compare(made(2, 2, 3, 6, 42), mask)


def test_scores_masks_and_gradients_may_lie_anyhow_in_memory():
    shape = (2, 3, 6, 42)
    scores, dy = strided(made(*shape).detach()).requires_grad_(), strided(random(*shape, seed=1))
    for mask in (strided(masks(shape)["whole"]), strided(masks(shape)["pairs"]), masks((2, 3, 42, 6))["pairs"].mT):
        compare(scores, mask, dy)
    compare(scores, None, torch.ones(()).expand(shape), p=0.3, seed=SEED)
    around = torch.full((64 + 5 * 43 + 64,), float("nan"))
    inside = around[64:-64].view(5, 43).copy_(random(5, 43)).requires_grad_()
    compare(inside, around[64:-64].view(5, 43).detach())


def test_a_mask_may_have_another_dtype_than_scores():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        compare(made(2, 6, 42, dtype=torch.float16), random(2, 1, 42, dtype=dtype))


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_row_of_which_no_column_takes_part_is_zeros_and_its_gradient_too(kind):
    x = made(2, 6, 42)
    boolean = torch.ones(2, 6, 42, dtype=torch.bool)
    boolean[:, 1] = boolean[0, 4] = False
    for mask in (boolean, torch.zeros(2, 6, 42).masked_fill(~boolean, float("-inf"))):
        for p in (0.0, 0.5):
            with only(kind):
                y = masked_softmax(x, mask, p=p, seed=1)
                (dx,) = torch.autograd.grad(y.square().sum(), x)
            for out in (y, dx):
                assert not out[:, 1].any() and not out[0, 4].any()
                assert out[1, 4].any() and out.isfinite().all()


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_columns_that_take_no_part_may_hold_anything(kind):
    mask = masks((2, 6, 42))["pairs"]
    x = random(2, 6, 42)
    spoiled = x.masked_fill(~mask, float("nan")).requires_grad_()
    with only(kind):
        y = masked_softmax(spoiled, mask)
        assert torch.equal(y, masked_softmax(x, mask))
        assert torch.autograd.grad(y.square().sum(), spoiled)[0].isfinite().all()
        assert masked_softmax(x.index_fill(1, torch.tensor([2]), float("nan")))[:, 2].isnan().all()


def test_dropout_keeps_the_elements_that_philox_keeps_in_forward_and_backward():
    x, p = made(2, 3, 6, 42), 0.3
    keep = philox.reference(SEED, 9, 36, 42, p).view(x.shape)
    probs = x.softmax(-1)
    (dx,) = torch.autograd.grad((probs * keep / (1 - p)).square().sum(), x)
    for kind in ("triton", "reference"):
        with only(kind):
            y = masked_softmax(x, p=p, seed=SEED, offset=9)
            assert torch.equal(y != 0, keep)
            assert_near(torch.autograd.grad(y.square().sum(), x)[0], dx)
            assert torch.equal(y, masked_softmax(x, p=p, seed=int(SEED), offset=9))


def test_dropout_drops_at_its_rate_and_leaves_the_mean():
    with only("triton"):
        y = masked_softmax(torch.zeros(64, 512), p=0.2, seed=3)
    n, rate = y.numel(), (y == 0).double().mean().item()
    assert abs(rate - 0.2) < 5 * (0.2 * 0.8 / n) ** 0.5
    assert abs(y.sum(-1).mean().item() - 1) < 5 * (0.25 / n) ** 0.5


def test_neither_result_nor_mask_depends_on_blocks(monkeypatch):
    x, mask = made(3, 5, 123), masks((3, 5, 123))["pairs"]

    def run():
        y = masked_softmax(x, mask, p=0.3, seed=SEED)
        return y, torch.autograd.grad(y.square().sum(), x)[0]

    with only("triton"):
        whole = run()
        monkeypatch.setattr(softmax, "LAUNCH", {"TILE": 64, "WHOLE": 64, "CHUNK": 32, "per_thread": 1})
        chunks = run()
    for a, b in zip(whole, chunks, strict=True):
        assert torch.equal(a == 0, b == 0)
        assert_near(a, b)


def test_backward_keeps_the_probabilities_and_the_seed_and_nothing_else():
    for kind in ("triton", "reference"):
        for dtype in DTYPES:
            x = made(2, 3, 6, 42, dtype=dtype)
            whole = x.numel() * x.element_size()
            with only(kind):
                assert kept_bytes(lambda x=x: masked_softmax(x, causal=True)) == whole
                assert kept_bytes(lambda x=x: masked_softmax(x, causal=True, p=0.1, seed=SEED)) == whole + 8


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_probabilities_that_have_no_gradient_cost_no_zeros(kind):
    x = made(2, 3, 6, 42)
    with only(kind):
        assert zeros_in_backward(masked_softmax(x, p=0.3, seed=SEED)) == 0
        x.grad = None
        (without_a_gradient(masked_softmax(x, p=0.3, seed=SEED)).sum() + 2 * x.sum()).backward()
    assert (x.grad == 2).all()


def test_all_is_written_and_nothing_else(monkeypatch):
    blocks = [softmax.LAUNCH, {"TILE": 64, "WHOLE": 64, "CHUNK": 32, "per_thread": 1}]
    for launch in blocks:
        monkeypatch.setattr(softmax, "LAUNCH", launch)
        for shape, dtype in [((5, 123), torch.bfloat16), ((2, 7, 33), torch.float32)]:
            for p in (0.0, 0.4):
                x = made(*shape, dtype=dtype)
                with only("triton"), poisoned():
                    masked_softmax(x, masks(shape)["padding"], causal=True, p=p, seed=SEED).backward(x.detach())


@pytest.mark.sweep(2)
@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_every_way_of_taking_gradients_agrees(p, way, kind):
    x, mask = made(2, 6, 42), masks((2, 6, 42))["padding"]
    weights = random(2, 6, 42, seed=8)
    loss = lambda x: (masked_softmax(x, mask, causal=True, p=p, seed=SEED) * weights).sum()
    with only(kind):
        for got, want in zip(way(loss, [x]), plain(loss, [x]), strict=True):
            assert torch.equal(got, want)


def test_only_references_have_a_second_derivative():
    x = random(3, 7, dtype=torch.float64, requires_grad=True)
    mask = masks((3, 7))["pairs"]
    for p in (0.0, 0.3):
        f = lambda x, p=p: masked_softmax(x, mask, scale=0.5, p=p, seed=SEED)
        assert torch.autograd.gradcheck(f, x) and torch.autograd.gradgradcheck(f, x)
        x32 = made(3, 7)
        with only("triton"):
            for power in (1, 2):  # of 1, the first derivative depends on what is kept alone
                y = masked_softmax(x32, p=p, seed=1)[:, 0].pow(power)
                (dx,) = torch.autograd.grad(y.sum(), x32, create_graph=True)
                with pytest.raises(KernelError, match="no second derivative"):
                    dx.sum().backward()


def test_nothing_of_nothing_is_nothing():
    for shape in [(0, 3, 4), (2, 0, 4), (2, 3, 0)]:
        for kind in ("triton", "reference"):
            with only(kind):
                x = made(*shape)
                y = masked_softmax(x, p=0.5, seed=1)
                assert y.shape == shape and torch.autograd.grad(y.sum(), x)[0].shape == shape


BAD = {
    "scores": (lambda x: masked_softmax(x.long()), "not a floating-point tensor"),
    "scores, flat": (lambda x: masked_softmax(x[0]), "too few dims"),
    "mask": (lambda x: masked_softmax(x, x.long()), "not a floating-point tensor"),
    "mask, of another shape": (lambda x: masked_softmax(x, x[:2]), "does not broadcast"),
    "mask, of more dims": (lambda x: masked_softmax(x, x[None]), "does not broadcast"),
    "mask, elsewhere": (lambda x: masked_softmax(x, (x > 0).to("meta")), "another device"),
    "mask, trained": (lambda x: masked_softmax(x, x.clone().requires_grad_()), "gets no gradient"),
    "p": (lambda x: masked_softmax(x, p=1.0, seed=1), "not a probability"),
    "seed": (lambda x: masked_softmax(x, p=0.5), "needs a seed"),
}


@pytest.mark.parametrize("where", BAD)
def test_bad_input_is_refused_by_name(where):
    call, words = BAD[where]
    for kind in ("triton", "reference"):
        with only(kind), pytest.raises(KernelError, match=words) as caught:
            call(random(3, 4))
        assert caught.value.where == where.partition(",")[0]


def test_a_trained_mask_will_do_where_no_gradient_is_wanted():
    x = random(3, 4)
    with torch.no_grad():
        assert masked_softmax(x, x.clone().requires_grad_()).shape == x.shape
