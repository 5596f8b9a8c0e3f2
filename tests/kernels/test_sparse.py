"""Sparse attention: against torch's own with the layout as a mask, in float64, with masks of all kinds at once."""

import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fds import attention_layouts as layouts
from fds.errors import FdsError, KernelError
from fds.kernels import philox, sparse_backward, sparse_forward, sparse_lists, sparse_rows
from fds.kernels.choice import only, prefer_triton
from fds.kernels.sparse import sparse_attention
from tests.devices import DEVICE
from tests.kernels.accuracy import DTYPES, assert_near
from tests.kernels.ways import WAYS, kept_bytes, plain, traced

SEED = torch.tensor(2**40 + 7)
LAYOUT = layouts.bigbird(4, 6, block=8, num_random_blocks=2, different_layout_per_head=True)
TOKENS = 43  # of 48: the last block is partly empty


def seen(layout, shape, causal, key_padding, documents) -> Tensor:
    """Return which keys each query sees, (B, H, S, S)."""
    b, h, s, _ = shape
    listed = torch.from_numpy(layout.as_array()).repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)
    visible = listed[:, :s, :s].expand(b, h, s, s)
    visible = visible.tril() if causal else visible
    if key_padding is not None:
        visible = visible & key_padding[:, None, None]
    return visible if documents is None else visible & (documents[:, :, None] == documents[:, None, :])[:, None]


def dense(
    q,
    k,
    v,
    layout,
    causal=False,
    key_padding=None,
    bias=None,
    relative_bias=None,
    documents=None,
    scale=None,
    p=0.0,
    seed=SEED,
    offset=0,
) -> Tensor:
    """Return the same by torch, with all scores in memory."""
    b, h, s, _ = q.shape
    mask = torch.zeros(b, h, s, s, dtype=q.dtype)
    if bias is not None:
        mask = mask.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else mask + bias
    if relative_bias is not None:
        token = torch.arange(s)
        mask = mask + relative_bias[:, token - token[:, None] + s - 1]
    mask = mask.masked_fill(~seen(layout, q.shape, causal, key_padding, documents), -math.inf)
    k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    if not p:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale) + mask
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(unseen, 0.0).softmax(-1).masked_fill(unseen, 0.0)
    return weights * philox.reference(seed, offset, b * h * s, s, p).view(b, h, s, s) / (1 - p) @ v


def made(*shape, dtype=torch.float64, seed=0, grad=True) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.requires_grad_(grad)


def qkv(b=2, h=4, s=TOKENS, d=5, g=2, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (made(b, n, s, d, dtype=dtype, seed=i) for i, n in enumerate((h, g, g)))
    return q, k, v


PADDING = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(3)) > 0.3
DOCUMENTS = torch.arange(TOKENS).expand(2, -1) // torch.tensor([[9], [20]])
UNLISTED = torch.eye(6)[[0, 1, 1, 5, 0, 3]].expand(4, 6, 6) * torch.tensor([1.0, 0, 1, 1, 1, 1])[:, None]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (LAYOUT, {}),
    "causal": (LAYOUT, {"causal": True}),
    "of one head for all": (layouts.fixed(1, 6, block=8, num_local_blocks=2), {"causal": True}),
    "shared by heads": (layouts.bslongformer(4, 6, block=8, global_block_indices=[2]), {"scale": -0.4}),
    "rows that list nothing": (layouts.AttentionLayout.from_dense(UNLISTED, block=8), {"causal": True}),
    "padding": (LAYOUT, {"key_padding": PADDING}),
    "no key at all": (LAYOUT, {"key_padding": PADDING & (torch.arange(2) == 0)[:, None]}),
    "documents": (LAYOUT, {"documents": DOCUMENTS, "causal": True}),
    "a bias": (LAYOUT, {"bias": made(2, 1, TOKENS, TOKENS, seed=5)}),
    "a bias of keys": (LAYOUT, {"bias": made(4, 1, TOKENS, seed=5)}),
    "a bias of queries": (LAYOUT, {"bias": made(TOKENS, 1, seed=5)}),
    "a mask": (LAYOUT, {"bias": made(TOKENS, TOKENS, seed=6, grad=False) > -0.5}),
    "a relative bias": (LAYOUT, {"relative_bias": made(4, 2 * TOKENS - 1, seed=7)}),
    "dropout": (LAYOUT, {"p": 0.3, "seed": SEED, "offset": 2**33 + 1}),
    "everything": (
        LAYOUT,
        {
            "causal": True,
            "key_padding": PADDING,
            "documents": DOCUMENTS,
            "bias": made(4, TOKENS, TOKENS, seed=8),
            "relative_bias": made(1, 2 * TOKENS - 1, seed=9),
            "p": 0.2,
            "seed": SEED,
            "scale": 0.3,
        },
    ),
}


def leaves(args, options) -> list[Tensor]:
    return [*args, *(x for x in options.values() if isinstance(x, Tensor) and x.requires_grad)]


@pytest.mark.parametrize("gathered", [1, 2**19])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_dense_attention_with_a_mask(case, gathered, monkeypatch):
    monkeypatch.setattr(sparse_rows, "GATHERED", gathered)
    layout, options = CASES[case]
    args = qkv()
    out, want = sparse_attention(*args, layout, **options), dense(*args, layout, **options)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    dout = made(*out.shape, seed=11, grad=False)
    x = leaves(args, options)
    torch.testing.assert_close(
        torch.autograd.grad(out, x, dout), torch.autograd.grad(want, x, dout), rtol=1e-9, atol=1e-11
    )


LARGE = layouts.bigbird(4, 3, block=16, num_random_blocks=2, different_layout_per_head=True)
OF_KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (LARGE, {}),
    "blocks of 64": (layouts.AttentionLayout.from_dense(torch.eye(1).expand(4, 1, 1), block=64), {"causal": True}),
    "in parts": (layouts.fixed(1, 2, block=32, num_local_blocks=1, attention="unidirectional"), {"causal": True}),
    "rows that list nothing": (layouts.AttentionLayout.from_dense(UNLISTED[:, :3, :3], block=16), {"scale": -0.4}),
    "a mask": (LARGE, {"bias": made(TOKENS, TOKENS, seed=6, grad=False) > -0.5}),
    "everything": (
        LARGE,
        {
            "causal": True,
            "key_padding": PADDING,
            "documents": DOCUMENTS,
            "bias": made(4, TOKENS, TOKENS, grad=False),
            "relative_bias": made(4, 2 * TOKENS - 1, seed=9, grad=False),
            "p": 0.2,
            "seed": SEED,
            "scale": 0.3,
        },
    ),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in OF_KERNELS), ("everything", torch.float16), ("everything", torch.bfloat16)],
    ids=str,
)
def test_kernels_compute_what_the_reference_does(case, dtype, monkeypatch):
    for table in (sparse_forward.LAUNCH, sparse_backward.OVER_QUERIES, sparse_backward.OVER_KEYS):
        for rows in table.values():
            for row in rows.values():
                monkeypatch.setitem(row, "QUERIES", 32 if "parts" not in case else 16)
    layout, arguments = OF_KERNELS[case]
    b = 2 if (case, dtype) == ("everything", torch.float32) else 1  # the interpreter takes its time
    args = [x.to(DEVICE) for x in qkv(b, s=min(TOKENS, layout.tokens), dtype=dtype)]
    of_rows = {name: x[:b] for name, x in arguments.items() if name in ("key_padding", "documents")}
    options: dict[str, Any] = {
        name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in {**arguments, **of_rows}.items()
    }
    results = []
    for kind in ("triton", "reference"):
        with only(kind):
            out = sparse_attention(args[0], args[1], args[2], layout, **options)
            dout = made(*out.shape, seed=11, grad=False).to(DEVICE, dtype)
            results.append((out, *torch.autograd.grad(out, args, dout)))
    for x, y in zip(*results, strict=True):
        assert x.dtype == dtype and not x.isnan().any()
        assert_near(x, y, factor=2)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("name", ["bias", "relative_bias"])
def test_a_number_below_1e30_masks_in_any_bias(name, kind):
    args = [x.detach().to(DEVICE) for x in qkv(dtype=torch.float32)]
    seen = torch.arange(1 - TOKENS, TOKENS) > 9  # by distance; the last queries see nothing
    token = torch.arange(TOKENS)
    seen = seen[None] if name == "relative_bias" else seen[token - token[:, None] + TOKENS - 1]
    biases = [torch.zeros(seen.shape).masked_fill(~seen, x).to(DEVICE) for x in (torch.finfo().min, -math.inf)]
    with only(kind):
        outs = [sparse_attention(*args, LARGE, **{name: bias}) for bias in biases]
    assert torch.equal(*outs) and not outs[0][:, :, -9:].any() and outs[0][:, :, :16].any()


@pytest.mark.parametrize("name", ["bias", "relative_bias"])
def test_kernels_have_no_gradient_of_a_bias_and_leave_it_to_the_reference(name):
    args = qkv(dtype=torch.float32)
    bias = made(4, {"bias": TOKENS, "relative_bias": 2 * TOKENS - 1}[name], dtype=torch.float32)
    bias = bias if name == "relative_bias" else bias[:, None].detach().requires_grad_()
    run = lambda x: sparse_attention(*args, LARGE, **{name: x}).square().sum()
    want = torch.autograd.grad(run(bias), bias)
    with prefer_triton():
        torch.testing.assert_close(torch.autograd.grad(run(bias), bias), want)
        torch.testing.assert_close(torch.func.grad(run)(bias.detach()), want[0])
    with only("triton"), pytest.raises(KernelError, match="do not take all of this"):
        run(bias)


@settings(max_examples=settings().max_examples * 5 // 2, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 1), (6, 3)]),
    st.integers(1, 9),
    st.sampled_from([4, 16, 24]),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_any_layout_is_dense_attention_with_its_mask(b, heads, blocks, block, d, causal, seed):
    draw = torch.Generator().manual_seed(seed)
    listed = torch.rand(heads[0], blocks, blocks, generator=draw) < torch.rand((), generator=draw)
    layout = layouts.AttentionLayout.from_dense(listed, block=block)
    s = layout.tokens - seed % block
    args = qkv(b, heads[0], s, d, heads[1])
    out, want = sparse_attention(*args, layout, causal=causal), dense(*args, layout, causal=causal)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    dout = made(*out.shape, seed=1, grad=False)
    got, want = (torch.autograd.grad(y, args, dout) for y in (out, want))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_is_computed_in_float32(dtype):
    args = qkv(dtype=dtype)
    options: dict[str, Any] = {"causal": True, "key_padding": PADDING}
    out = sparse_attention(*args, LAYOUT, **options)
    assert out.dtype == dtype
    wide = [x.detach().double().requires_grad_() for x in args]
    want = dense(wide[0], wide[1], wide[2], LAYOUT, **options)
    assert_near(out, want)
    dout = made(*out.shape, dtype=dtype, seed=1, grad=False)
    got = torch.autograd.grad(out, args, dout)
    wanted = torch.autograd.grad(want, wide, dout.double())
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == dtype
        assert_near(x, y, factor=2)


def test_all_blocks_with_dropout_are_flash_attention():
    from fds.kernels import flash_attention

    args = qkv(dtype=torch.float32)
    layout, options = layouts.dense(4, 6, block=8), {"causal": True, "p": 0.4, "seed": SEED, "offset": 5}
    torch.testing.assert_close(sparse_attention(*args, layout, **options), flash_attention(*args, **options))


@traced
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_take_gradients_agree(way):
    args = (*qkv(dtype=torch.float32), made(4, 2 * TOKENS - 1, dtype=torch.float32, seed=7))
    loss = lambda q, k, v, r: sparse_attention(q, k, v, LAYOUT, relative_bias=r, p=0.1, seed=SEED).square().sum()
    torch.testing.assert_close(WAYS[way](loss, args), plain(loss, args))


@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_compiled_graph_has_the_layout_that_is_there_when_it_runs(kind):
    args, layout = qkv(s=17, dtype=torch.float32), [layouts.dense(4, 2)]
    loss = lambda q, k, v: sparse_attention(q.sin(), k, v, layout[0], causal=True).square().sum()
    with only(kind):
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(plain(compiled, args), plain(loss, args))
        layout[0] = layouts.local_sliding_window(1, 2, num_sliding_window_blocks=1)
        torch.testing.assert_close(plain(compiled, args), plain(loss, args))


def test_backward_needs_no_layout_but_its_own():
    args = qkv()
    out = sparse_attention(*args, layouts.dense(4, 6, block=8))  # of which nobody else has a reference
    sparse_rows.rows_of_layout.cache_clear()
    sparse_lists.of_layout.cache_clear()
    gc.collect()
    want = dense(*args, layouts.dense(4, 6, block=8))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), args), torch.autograd.grad(want.sum(), args))


def test_autocast_casts_as_torchs_attention_does():
    args = qkv(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse_attention(*args, LAYOUT)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out, sparse_attention(args[0].bfloat16(), args[1].bfloat16(), args[2].bfloat16(), LAYOUT)
    )


def test_memory_for_backward_is_that_of_the_tensors():
    args = qkv(1, 4, 2048, 8, dtype=torch.float32)
    layout = layouts.bigbird(4, 128)
    q, k = (x.numel() * x.element_size() for x in args[:2])
    assert kept_bytes(lambda: sparse_attention(*args, layout, causal=True)) == q + 2 * k
    rows = sparse_rows.rows_of_layout(layout, 1, 4, True, 512, args[0].device)
    indices = (rows.lists, rows.starts, rows.columns, rows.at)
    assert sum(x.numel() for x in indices) <= layout.patterns[0].nonzeros + (4 + 1) * (layout.blocks + 1)


def test_a_second_derivative_is_refused():
    args = qkv(dtype=torch.float32)
    grad = torch.autograd.grad(sparse_attention(*args, LAYOUT).square().sum(), args, create_graph=True)
    with pytest.raises(KernelError, match="second derivative"):
        grad[0].sum().backward()


def test_nothing_to_attend_to_gives_nothing():
    q, k, v = (x[:0] for x in qkv())
    assert sparse_attention(q, k, v, LAYOUT).shape == (0, 4, TOKENS, 5)


WRONG: Any = "wrong"
FLAG: Any = 1
REFUSED = {
    "no layout": lambda q, k, v: sparse_attention(q, k, v, WRONG),
    "other heads": lambda q, k, v: sparse_attention(q, k, v, layouts.dense(3, 6, block=8)),
    "a longer layout": lambda q, k, v: sparse_attention(q, k, v, layouts.dense(4, 7, block=8)),
    "a shorter layout": lambda q, k, v: sparse_attention(q, k, v, layouts.dense(4, 5, block=8)),
    "fewer keys": lambda q, k, v: sparse_attention(q, k[:, :, 1:], v[:, :, 1:], LAYOUT),
    "integers": lambda q, k, v: sparse_attention(q.long(), k, v, LAYOUT),
    "a bias of other tokens": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, bias=made(TOKENS, 7)),
    "a bias of integers": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, bias=PADDING[0].long()),
    "a relative bias of keys": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, relative_bias=made(4, TOKENS)),
    "padding of integers": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, key_padding=PADDING.long()),
    "dropout without a seed": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, p=0.1),
    "a probability of 1": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, p=1.0, seed=1),
    "dropout in odd blocks": lambda q, k, v: sparse_attention(q, k, v, layouts.dense(4, 15, block=3), p=0.1, seed=1),
    "a flag of words": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, causal=WRONG),
    "a flag of numbers": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, causal=FLAG),
    "an offset of words": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, p=0.1, seed=1, offset=WRONG),
    "an offset before the first": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, p=0.1, seed=1, offset=-1),
    "a scale of infinity": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, scale=math.inf),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(call):
    with pytest.raises(FdsError):
        call(*qkv())


def test_the_length_that_a_layout_needs_is_named():
    with pytest.raises(KernelError) as error:
        sparse_attention(*qkv(), layouts.dense(4, 128, block=8))
    assert error.value.hint == "layout.cropped(6)"
