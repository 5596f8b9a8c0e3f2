"""Attention of long rows with masks, block after block: the values of torch's with one mask of all by all."""

import pytest
import torch
import torch.nn.functional as F

import fds
from fds.errors import KernelError
from fds.kernels import attention_blocks as blocks
from tests.memory import peak_bytes

B, H, G, S, D = 2, 4, 2, 44, 8
DTYPE = torch.float64


@pytest.fixture
def small(monkeypatch):
    """Have 44 tokens be many blocks, the last ones shorter."""
    for name, n in (("QUERIES", 7), ("KEYS", 5), ("WHOLE", 0)):
        monkeypatch.setattr(blocks, name, n)
    monkeypatch.setattr("fds.kernels.scaled_dot_product.WHOLE", 0)


def made(seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(B, n, S, D, generator=g, dtype=DTYPE) for n in (H, G, G, H))
    documents = torch.stack([torch.arange(3).repeat_interleave(torch.tensor(n)) for n in ([20, 1, 23], [9, 31, 4])])
    padding = torch.arange(S) < torch.tensor([[S], [30]])
    return q, k, v, dout, documents, padding


def by_one_mask(q, k, v, documents, padding, causal, window):
    before = torch.arange(S)[:, None] - torch.arange(S)
    seen = torch.ones(B, 1, S, S, dtype=torch.bool)
    if causal:
        seen = seen & (before >= 0)
    if window is not None:
        seen = seen & (before < window)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])[:, None]
    if padding is not None:
        seen = seen & padding[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


MASKS = {
    "documents": (True, False, True, None),
    "documents, not causal": (True, False, False, None),
    "documents and padding": (True, True, True, None),
    "a window": (False, False, True, 6),
    "a window of one": (False, False, True, 1),
    "a window longer than rows": (False, True, True, 100),
    "a window in documents": (True, True, True, 11),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_values_and_gradients_are_those_of_one_mask(mask, small):
    has_documents, has_padding, causal, window = mask
    *qkv, dout, documents, padding = made()
    masks = documents if has_documents else None, padding if has_padding else None
    qkv = [x.requires_grad_() for x in qkv]
    want = by_one_mask(*qkv, *masks, causal, window)
    got = fds.kernels.attention(
        *qkv, causal=causal, documents=masks[0], key_padding=masks[1], window=window
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for x, y in zip(torch.autograd.grad(got, qkv, dout), torch.autograd.grad(want, qkv, dout), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [6, 2**63 - 1])
def test_windows_are_computed_under_vmap_and_so_are_their_gradients(window, small):
    *qkv, _, documents, _ = made()
    qkv = [torch.stack([x, x.flip(2), 2 * x]) for x in qkv]
    several = torch.stack([documents, documents.flip(1), documents], 1)

    def loss(q, k, v, documents):
        return fds.kernels.attention(q, k, v, causal=True, documents=documents, window=window).square().sum()

    run = torch.func.grad_and_value(loss, (0, 1, 2))
    for dim, numbers in ((1, several), (None, documents)):
        got = torch.vmap(run, (0, 0, 0, dim))(*qkv, numbers)
        for i in range(3):
            want = run(*(x[i] for x in qkv), numbers if dim is None else numbers[:, i])
            for x, y in zip((*got[0], got[1]), (*want[0], want[1]), strict=True):
                torch.testing.assert_close(x[i], y, rtol=1e-10, atol=1e-12)


def turned(x):
    """Return the same numbers, whose features do not lie side by side."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("how", [{"window": 6}, {"documents": made()[4]}], ids=["window", "documents"])
def test_it_does_not_matter_how_tensors_lie(how, small):
    """A gradient of a sum is one number, expanded; torch reads features one after another, whatever strides say."""
    *qkv, dout, _, _ = made()
    one = torch.ones((), dtype=DTYPE).expand(dout.shape)
    for arrange in (turned, lambda x: x):
        q, k, v = (arrange(x).requires_grad_() for x in qkv)
        for grad in (turned(dout), one):
            masks = how.get("documents"), None, True, how.get("window")
            got, want = fds.kernels.attention(q, k, v, causal=True, **how), by_one_mask(q, k, v, *masks)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
            pairs = (torch.autograd.grad(out, [q, k, v], grad) for out in (got, want))
            for x, y in zip(*pairs, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_it_does_not_matter_how_tensors_lie_in_a_ring():
    *qkv, _, _, _ = made()
    qkv = [turned(x).requires_grad_() for x in qkv]
    want = by_one_mask(*qkv, None, None, True, None)
    want = [want, *torch.autograd.grad(want.sum(), qkv)]

    def body():
        axis = fds.mesh(sp=2)["sp"]
        cut = lambda x: x.detach().chunk(2, 2)[axis.index]
        q, k, v = (turned(cut(x)).requires_grad_() for x in qkv)
        out = fds.nn.attention(q, k, v, axis=axis, causal=True, method="ring")
        for x, y in zip([out, *torch.autograd.grad(out.sum(), [q, k, v])], want, strict=True):
            torch.testing.assert_close(x, cut(y), rtol=1e-10, atol=1e-12)

    fds.simulate(body, 2)


@pytest.mark.parametrize(
    ("how", "window"),
    [({"method": "ulysses"}, 9), ({"method": "ulysses", "layout": "zigzag"}, 9), ({"method": "ring"}, 9),
     ({"method": "ring"}, 30), ({"method": "ring", "layout": "zigzag"}, None)],
    ids=str,
)  # fmt: skip
def test_ranks_that_share_rows_have_the_blocks_of_all(how, window, small):
    *qkv, dout, documents, padding = made()
    qkv = [x.requires_grad_() for x in qkv]
    want = by_one_mask(*qkv, documents, padding, True, window)
    want = [want, *torch.autograd.grad(want, qkv, dout)]

    def body():
        axis = fds.mesh(sp=2)["sp"]
        zigzag = how.get("layout") == "zigzag"
        cut = lambda x, dim: fds.nn.zigzag(x, axis, dim) if zigzag else x.chunk(2, dim)[axis.index]
        q, k, v = (cut(x.detach(), 2).requires_grad_() for x in qkv)
        masks = {"documents": cut(documents, 1), "key_padding": cut(padding, 1)}
        out = fds.nn.attention(q, k, v, axis=axis, causal=True, window=window, **masks, **how)
        for x, y in zip([out, *torch.autograd.grad(out, [q, k, v], cut(dout, 2))], want, strict=True):
            torch.testing.assert_close(x, cut(y, 2), rtol=1e-10, atol=1e-12)

    fds.simulate(body, 2)


def test_long_rows_have_no_mask_of_all_tokens_by_all():
    n = 6144
    q = torch.randn(1, 1, n, 16, requires_grad=True)
    documents = (torch.arange(n) // 2500)[None]
    step = lambda **how: peak_bytes(lambda: fds.kernels.attention(q, q, q, causal=True, **how).sum().backward())
    assert step(documents=documents) < n * n  # bytes: a mask of booleans, of which the floats are four times as many
    assert step(window=512) < n * n


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 0, "causal": True}, "counts keys"),
        ({"window": True, "causal": True}, "counts keys"),
        ({"window": 2**63, "causal": True}, "counts keys"),
        ({"causal": "no"}, "is a flag"),
        ({"causal": None, "p": 0.5, "seed": 0}, "is a flag"),
        ({"window": 3}, "is causal"),
        ({"window": 3, "causal": True, "p": 0.5, "seed": 0}, "nor dropout"),
        ({"window": 3, "causal": True, "bias": torch.zeros(S, S)}, "neither a bias"),
    ],
    ids=str,
)
def test_a_window_that_is_not_computed_is_refused(options, words):
    q, k, v, *_ = made()
    with pytest.raises(KernelError, match=words):
        fds.kernels.attention(q, k, v, **options)


def test_a_ring_has_no_windows_of_two_chunks():
    def body():
        axis = fds.mesh(sp=2)["sp"]
        q, k, v, *_ = made()
        with pytest.raises(KernelError, match="no windows"):
            fds.nn.attention(q, k, v, axis=axis, causal=True, window=3, method="ring", layout="zigzag")

    fds.simulate(body, 2)
