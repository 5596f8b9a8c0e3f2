"""Attention by whoever can: equal to the kernel with every option, and torch's where torch has all of it."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fds.errors import KernelError
from fds.kernels import prefer_triton
from fds.kernels.flash import flash_attention
from fds.kernels.scaled_dot_product import attention, merged, scaled_dot_product
from tests.devices import DEVICE
from tests.kernels.accuracy import DTYPES, assert_near, in_float64, random
from tests.kernels.on_gpu import Pretended
from tests.kernels.ways import WAYS, plain, traced

SEED = torch.tensor(11)


def qkv(b=2, h=4, m=6, n=9, d=16, dtype=torch.float32, key_heads=None):
    shapes = [(b, h, m, d), *[(b, key_heads or h, n, d)] * 2]
    return [random(*shape, dtype=dtype, seed=i, requires_grad=True) for i, shape in enumerate(shapes)]


def masks(b=2, n=9):
    seen = random(b, n, seed=4) < 0.5
    seen[0] = False  # queries that see nothing
    return {
        "nothing": {},
        "causal": {"causal": True},
        "key_padding": {"key_padding": seen},
        "bias": {"bias": random(4, 1, n, seed=5)},
        "causal padding": {"causal": True, "key_padding": seen},
        "all": {"causal": True, "key_padding": seen, "bias": random(6, n, seed=5), "scale": 0.2},
        "least": {"bias": torch.zeros(2, 1, 1, n).masked_fill(~seen[:, None, None], torch.finfo(torch.float32).min)},
        "dropout": {"p": 0.3, "seed": SEED, "offset": 2},
        "wide bias": {"bias": random(1, 1, 1, n).double()},
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", masks())
def test_it_is_flash_attention(name, dtype):
    for key_heads in (4, 2):
        args = qkv(dtype=dtype, key_heads=key_heads)
        wide = in_float64(*args)
        out, want = attention(*args, **masks()[name]), flash_attention(*wide, **masks()[name])
        dout = random(*out.shape, dtype=dtype, seed=9)
        assert out.dtype == dtype
        assert_near(out, want, factor=2)  # torch rounds probabilities too
        for got, ref in zip(
            torch.autograd.grad(out, args, dout), torch.autograd.grad(want, wide, dout.double()), strict=True
        ):
            assert_near(got, ref, factor=2)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_as_flash_attention_takes_them(causal):
    seen = random(2, 9, seed=4) < 0.5
    options = {"documents": torch.tensor([[0] * 5 + [3] * 4, [-1, 7] * 4 + [7]]), "key_padding": seen, "causal": causal}
    args = qkv(m=9, key_heads=2)
    out, want = attention(*args, **options), flash_attention(*args, **options)
    for got, ref in zip(
        (out, *torch.autograd.grad(out.sum(), args)), (want, *torch.autograd.grad(want.sum(), args)), strict=True
    ):
        assert_near(got, ref, factor=2)


def test_torch_runs_where_there_is_no_dropout(monkeypatch):
    ran = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *_, **options: ran.append(options) or q)
    for name, options in masks().items():
        ran.clear()
        attention(*qkv(), **options)
        assert bool(ran) == (name != "dropout")
        if ran:  # torch takes one of the two
            assert ran[0]["is_causal"] == (name == "causal")
            assert (ran[0]["attn_mask"] is None) == (name in ("nothing", "causal"))


def test_masks_are_merged_as_narrowly_as_they_are_given(monkeypatch):
    shapes = {"key_padding": (2, 1, 1, 9), "bias": (1, 4, 1, 9), "causal padding": (2, 1, 6, 9), "all": (2, 1, 6, 9)}
    for name, shape in shapes.items():
        options = {"causal": False, "key_padding": None, "bias": None, "documents": None, **masks()[name]}
        options.pop("scale", None)
        mask = merged(*qkv()[:2], **options)
        assert mask is not None and mask.shape == shape


@pytest.mark.sweep
@traced
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["causal padding", "bias", "dropout"])
def test_every_way_of_gradients_agrees(name, way):
    args, options = qkv(), masks()[name]
    loss = lambda *args: attention(*args, **options).square().sum()
    for got, want in zip(WAYS[way](loss, args), plain(loss, args), strict=True):
        assert_near(got, want, factor=2)


def test_torchs_formulas_have_a_second_derivative():
    args = [x.detach().double().requires_grad_() for x in qkv(1, 2, 3, 4, 3)]
    options = {"causal": True, "bias": random(4, seed=5)}
    for p in (0.0, 0.3):  # torch's, and flash_attention's reference
        with sdpa_kernel(SDPBackend.MATH):
            assert torch.autograd.gradgradcheck(lambda *args, p=p: attention(*args, **options, p=p, seed=SEED), args)


def test_a_head_of_any_width_is_taken():
    q, k, v = qkv(d=300)
    assert_near(attention(q, k, v), flash_attention(q, k, v))


def test_bad_arguments_are_refused_by_name():
    q, k, v = qkv()
    for name, options in [
        ("key_padding", {"key_padding": torch.ones(2, 9)}),
        ("documents", {"documents": torch.zeros(2, 9, dtype=torch.int64)}),  # of fewer queries than keys
        ("documents", {"documents": torch.zeros(2, 9)}),
        ("bias", {"bias": torch.zeros(9, requires_grad=True)}),
        ("p", {"p": -0.1}),
        ("p", {"p": True}),
        ("seed", {"p": 0.1}),
        ("scale", {"scale": torch.ones(())}),
    ]:
        with pytest.raises(KernelError) as error:
            attention(q, k, v, **options)
        assert error.value.where == name
    with pytest.raises(KernelError) as error:
        attention(q, k.half(), v)
    assert error.value.where == "k"


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_autocast_casts_what_comes_in_two_dtypes(p):
    q, k, v = (random(2, 2, 5, 16, seed=i) for i in range(3))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        mixed = attention(q, k, v.bfloat16(), p=p, seed=3 if p else None)
    want = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), p=p, seed=3 if p else None)
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["causal", "key_padding", "bias", "causal padding", "all", "least"])
def test_on_a_gpu_torch_takes_masks_where_the_kernel_is_not_chosen(name, dtype, monkeypatch):
    backends, its = [], scaled_dot_product.__globals__
    allow = its["sdpa_kernel"]
    monkeypatch.setitem(its, "sdpa_kernel", lambda some: backends.append(some) or allow(some))
    for key_heads in (4, 2):
        args, options = qkv(dtype=dtype, key_heads=key_heads), masks()[name]
        there, wide = [x.as_subclass(Pretended) for x in args], in_float64(*args)
        out, want = attention(*there, **options).as_subclass(torch.Tensor), flash_attention(*wide, **options)
        assert backends == [] if name == "causal" else SDPBackend.CUDNN_ATTENTION not in backends.pop()
        dout = random(*out.shape, dtype=dtype, seed=9)
        assert out.dtype == dtype
        assert_near(out, want, factor=4)  # the bias is rounded too
        found, sought = torch.autograd.grad(out, args, dout), torch.autograd.grad(want, wide, dout.double())
        for got, ref in zip(found, sought, strict=True):
            assert_near(got, ref, factor=4)


def test_on_a_gpu_the_kernel_takes_masks_where_it_is_chosen(monkeypatch):
    ran = []
    monkeypatch.setitem(attention.__globals__, "flash_attention", lambda *args, **options: ran.append("ours"))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **options: ran.append("torch's"))
    there = [x.as_subclass(Pretended) for x in qkv()]
    with prefer_triton():
        attention(*there, **masks()["bias"])
        attention(*there, causal=True)
    attention(*there, **masks()["bias"])
    assert ran == ["ours", "torch's", "torch's"]


def test_on_a_gpu_heads_of_keys_are_repeated_where_torchs_fast_kernels_do_not_share_them(monkeypatch):
    ran = []
    note = lambda q, k, v, **options: ran.append((k.shape[1], v.shape[1], options["enable_gqa"])) or q
    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    for name, dtype, d, heads in [
        ("causal", torch.bfloat16, 256, 2),
        ("causal", torch.float32, 64, 4),
        ("nothing", torch.float16, 264, 4),
        ("key_padding", torch.bfloat16, 64, 4),
    ]:
        attention(*(x.as_subclass(Pretended) for x in qkv(d=d, dtype=dtype, key_heads=2)), **masks()[name])
        assert ran.pop() == (heads, heads, heads == 2)


def test_a_scale_that_is_not_positive_moves_into_the_queries(monkeypatch):
    for scale in (-0.3, 0.0):
        args = qkv()
        wide = in_float64(*args)
        out, want = attention(*args, scale=scale), flash_attention(*wide, scale=scale)
        assert_near(out, want)
        for got, ref in zip(torch.autograd.grad(out.sum(), args), torch.autograd.grad(want.sum(), wide), strict=True):
            assert_near(got, ref, factor=2)
    given = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *_, scale, **options: given.append(scale) or q)
    for scale in (-0.3, 0.0, 2.0):
        attention(*qkv(), scale=scale)
    assert given == [0.3, 1.0, 2.0]
