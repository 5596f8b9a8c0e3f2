"""Attention: against float64, with masks of all kinds at once, its dropout drawn again, in every way of gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fds.errors import KernelError
from fds.kernels import flash, flash_backward, language, philox
from fds.kernels.choice import only
from fds.kernels.flash import flash_attention, reference
from fds.kernels.flash_blocks import described
from fds.kernels.language import LEAST, MOST
from tests.devices import DEVICE
from tests.kernels.accuracy import DTYPES, TOLERANCE, assert_near, in_float64, random, strided
from tests.kernels.ways import (
    WAYS,
    as_handle,
    kept_bytes,
    plain,
    poisoned,
    traced,
    without_a_gradient,
    zeros_in_backward,
)

SEED = torch.tensor(2**40 + 7)
KINDS = ["triton", "reference"]
# Probabilities are rounded before they are summed, and so are their gradients; the result is rounded itself.
ROUNDINGS = 2.0


def resize(queries, keys, patch):
    for table in (flash.LAUNCH, flash_backward.OVER_QUERIES, flash_backward.OVER_KEYS):
        for rows in table.values():
            for row in rows.values():
                patch.setitem(row, "QUERIES", queries)
                patch.setitem(row, "KEYS", keys)


@pytest.fixture(autouse=True, scope="module")
def few_blocks():
    """Interpret few programs: blocks of all sizes are tested below."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            resize(64, 64, patch)
        yield patch


def made(*shape, dtype=torch.float32, seed=0):
    return random(*shape, dtype=dtype, seed=seed, requires_grad=True)


def qkv(b, h, m, n, d, dtype=torch.float32, key_heads=None):
    g = key_heads or h
    return made(b, h, m, d, dtype=dtype), made(b, g, n, d, dtype=dtype, seed=1), made(b, g, n, d, dtype=dtype, seed=2)


def padding(b, n):
    seen = random(b, n, seed=3) < 0.5
    seen[:, 0] = True
    return seen


@torch.no_grad()
def noise(
    q, k, v, dout, key_padding=None, bias=None, seed=None, documents=None, causal=False, scale=None, p=0.0, offset=0
):
    """Return the norms of what the gradients of q, k and v are rounded from.

    Those of scores are differences, which vanish where a query sees one key; what was subtracted is rounded as ever.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    probabilities, kept = flash._probabilities(q, k, key_padding, bias, seed, documents, causal, scale, p, offset)
    dp = dout @ flash._heads(v, q).mT * kept
    delta = (probabilities * dp).sum(-1, keepdim=True)
    squares = (probabilities * (dp.abs() + delta.abs()) * scale).square()  # errors of different scores are independent
    dq, dk = squares @ flash._heads(k, q).square(), squares.mT @ q.square()
    return float(dq.sum().sqrt()), float(dk.sum().sqrt()), 0.0


def compare(q, k, v, dout=None, kinds=KINDS, **options):
    """Check results and gradients of both kinds against float64, and return those of the last."""
    dout = random(*q.shape, dtype=q.dtype, seed=4) if dout is None else dout
    wide = in_float64(q, k, v)
    want = reference(*wide, **options)
    dwant = torch.autograd.grad(want, wide, dout.double())
    for kind in kinds:
        with only(kind):
            out = flash_attention(q, k, v, **options)
            gradients = torch.autograd.grad(out, (q, k, v), dout)
        assert out.dtype == q.dtype
        assert_near(out, want, factor=ROUNDINGS)
        for got, ref, least in zip(gradients, dwant, noise(*wide, dout.double(), **options), strict=True):
            assert got.dtype == q.dtype and got.shape == ref.shape
            error = float((got.double() - ref).norm())
            assert error <= ROUNDINGS * TOLERANCE[q.dtype] * max(float(ref.norm()), least)
    return out, gradients


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "d"), [(1, 42, 16), (42, 123, 40), (123, 6, 64)])
def test_it_is_the_softmax_of_products_times_the_values_and_so_are_its_gradients(m, n, d, dtype):
    compare(*qkv(1, 1, m, n, d, dtype))
    compare(*qkv(1, 1, m, n, d, dtype), causal=True)


@pytest.mark.parametrize(("m", "n", "d"), [(431, 42, 16), (6, 431, 123)])
def test_blocks_may_be_many(m, n, d):
    compare(*qkv(1, 1, m, n, d))
    compare(*qkv(1, 1, m, n, d, torch.bfloat16), causal=m > n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_masks_and_dropout_work_together(dtype):
    b, h, m, n, d = 2, 2, 40, 70, 24
    bias = random(h, 1, n, seed=5)
    options = {"key_padding": padding(b, n), "bias": bias, "scale": -0.3, "p": 0.3, "seed": SEED, "offset": 9}
    compare(*qkv(b, h, m, n, d, dtype), causal=True, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_documents_of_a_packed_row_are_as_alone(causal, dtype):
    lengths = torch.tensor([[30, 1, 70], [64, 37, 0]])  # blocks are of 64: some see no key of theirs
    documents = torch.stack([torch.tensor([5, -1, 2**40]).repeat_interleave(each) for each in lengths])
    q, k, v = qkv(2, 2, 101, 101, 16, dtype, key_heads=1)
    out, gradients = compare(q, k, v, causal=causal, documents=documents)
    dout = random(*q.shape, dtype=dtype, seed=4)
    for row, number in [(0, 5), (0, -1), (0, 2**40), (1, 5), (1, -1)]:
        alone = lambda x, row=row, number=number: x.detach()[row : row + 1, :, documents[row] == number].double()
        inputs = [alone(x).requires_grad_() for x in (q, k, v)]
        want = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
        for got, ref in zip((out, *gradients), (want, *torch.autograd.grad(want, inputs, alone(dout))), strict=True):
            error = float((alone(got) - ref.detach()).norm())
            assert error <= 2 * ROUNDINGS * TOLERANCE[dtype] * max(
                float(ref.detach().norm()), float(alone(dout).norm())
            )


def test_documents_go_with_all_other_masks():
    b, n = 2, 70
    documents = (torch.arange(n) // 13).expand(b, n).int().flip(1)
    more = {"documents": documents, "key_padding": padding(b, n), "bias": random(n, seed=5), "p": 0.3, "seed": SEED}
    compare(*qkv(b, 2, n, n, 24), causal=True, **more)


@settings(max_examples=settings().max_examples // 2)  # the interpreter takes its time
@given(
    heads=st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]),
    m=st.integers(1, 60),
    n=st.integers(1, 60),
    d=st.sampled_from([1, 6, 16, 43]),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    is_padded=st.booleans(),
    is_biased=st.booleans(),
    p=st.sampled_from([0.0, 0.0, 0.25]),
)
def test_any_shape(heads, m, n, d, dtype, causal, is_padded, is_biased, p):
    b, key_heads, group = heads
    compare(
        *qkv(b, key_heads * group, m, n, d, dtype, key_heads),
        causal=causal,
        p=p,
        seed=SEED,
        offset=1,
        key_padding=padding(b, n) if is_padded else None,
        bias=random(m, n, seed=6) if is_biased else None,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_torchs_attention_also_where_keys_are_more_or_fewer_than_queries(causal, kind):
    for m, n in [(42, 42), (20, 70), (70, 20)]:
        q, k, v = qkv(1, 1, m, n, 16)
        with only(kind):
            out = flash_attention(q, k, v, causal=causal)
            got = torch.autograd.grad(out.sum(), (q, k, v))
        want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert_near(out, want)
        for x, y in zip(got, torch.autograd.grad(want.sum(), (q, k, v)), strict=True):
            assert_near(x, y, factor=4)  # both are rounded: sums of keys that no query prefers cancel


def test_heads_of_queries_share_heads_of_keys():
    q, k, v = qkv(1, 6, 20, 35, 16, key_heads=2)
    compare(q, k, v, causal=True, p=0.2, seed=SEED)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for kind in KINDS:
        with only(kind):
            assert_near(flash_attention(q, k, v), want)


@pytest.mark.parametrize("shape", [(), (35,), (20, 35), (20, 1), (2, 20, 35), (2, 1, 1, 35), (2, 2, 20, 35)])
def test_a_bias_broadcasts(shape):
    compare(*qkv(2, 2, 20, 35, 16), bias=random(*shape, seed=6, dtype=torch.bfloat16))


def test_a_bias_is_never_expanded_in_memory():
    q, k, v = qkv(3, 2, 42, 70, 16)
    q_bytes, k_bytes = q.numel() * 4, k.numel() * 4
    for kind, lse_bytes in (("triton", 4 * 3 * 2 * 42), ("reference", 0)):
        with only(kind):
            kept = kept_bytes(
                lambda: flash_attention(q, k, v, bias=random(2, 1, 70), key_padding=padding(3, 70), p=0.1, seed=SEED)
            )
        assert kept == 2 * q_bytes + 2 * k_bytes + lse_bytes + 2 * 70 * 4 + 3 * 70 + SEED.element_size()


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_sees_no_key_gives_zeros_and_zero_gradients(kind):
    b, n = 2, 70
    seen = torch.ones(b, n, dtype=torch.bool)
    seen[0] = False
    seen[1, :40] = False  # a whole block and more; under causal also the first queries
    bias = torch.zeros(n, n).masked_fill(torch.eye(n, dtype=torch.bool), float("-inf"))
    bias[50] = float("-inf")
    for options in ({"key_padding": seen}, {"key_padding": seen, "causal": True}, {"bias": bias}):
        q, k, v = qkv(b, 1, n, n, 16)
        out, (dq, dk, dv) = compare(q, k, v, kinds=[kind], **options)
        if "bias" in options:
            assert not out[:, :, 50].any() and not dq[:, :, 50].any()
        else:
            assert not any(x[0].any() for x in (out, dq, dk, dv))
            assert not dk[1, :, :40].any() and not dv[1, :, :40].any()
            assert out[1, :, :40].any() == (not options.get("causal"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_may_mask_by_a_great_negative_number(dtype):
    q, k, v = qkv(1, 1, 5, 70, 16)
    seen = padding(1, 70)
    for value in (torch.finfo(dtype).min, float("-inf"), -1e4):
        bias = torch.zeros(1, 70, dtype=dtype).masked_fill(~seen, value)
        compare(q, k, v, bias=bias)
        for kind in KINDS:
            with only(kind):
                assert_near(flash_attention(q, k, v, bias=bias), flash_attention(q, k, v, key_padding=seen))
    with only("triton"):  # a row of nothing else is empty
        assert not flash_attention(q, k, v, bias=torch.full((70,), torch.finfo(torch.bfloat16).min)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_seen_has_no_say(kind):
    q, k, v = qkv(2, 2, 42, 70, 16)
    seen = padding(2, 70)
    outs = []
    for fill in (0.0, 1e4):
        hidden = ~seen[:, None, :, None]
        with only(kind):
            outs.append(flash_attention(q, k.masked_fill(hidden, fill), v.masked_fill(hidden, fill), key_padding=seen))
    assert torch.equal(*outs)
    with only(kind):  # nor has a later token
        out = flash_attention(q, k[:, :, :42], v[:, :, :42], causal=True)
        early = flash_attention(q[:, :, :10], k[:, :, :10], v[:, :, :10], causal=True)
    assert_near(out[:, :, :10], early)


def dropped(b, h, m, n, p, seed: int | torch.Tensor = SEED, offset=0):
    """Return what multiplies the values, (B, H, Sq, Sk): the output where the values are the identity."""
    q, k = torch.zeros(b, h, m, n), torch.zeros(b, h, n, n)
    return flash_attention(q, k, torch.eye(n).expand(b, h, n, n), p=p, seed=seed, offset=offset)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_philoxs_at_the_right_rate(kind):
    b, h, m, n, p = 2, 2, 110, 60, 0.3
    with only(kind):
        got = dropped(b, h, m, n, p, offset=7)
    want = philox.reference(SEED, 7, b * h * m, n, p).view(b, h, m, n)
    assert torch.equal(got != 0, want)
    assert abs((got != 0).float().mean() - (1 - p)) < 0.01  # 3.5 standard deviations of 26,400 draws
    assert_near(got[got != 0], torch.full_like(got[got != 0], 1 / n / (1 - p)))
    with only(kind):
        assert torch.equal(got[:1, :1, :8], dropped(1, 1, 8, n, p, offset=7))
        assert not torch.equal(got[:1, :1, :8], dropped(1, 1, 8, n, p, offset=8))
        assert not torch.equal(got[:1, :1, :8], dropped(1, 1, 8, n, p, offset=7, seed=8))


@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (16, 64), (64, 16), (128, 128)])
def test_blocks_change_nothing(queries, keys, monkeypatch):
    resize(queries, keys, monkeypatch)
    with only("triton"):
        got = dropped(1, 2, 40, 36, 0.3)
    assert torch.equal(got != 0, philox.reference(SEED, 0, 80, 36, 0.3).view(1, 2, 40, 36))
    compare(*qkv(1, 1, 32, 32, 16), kinds=["triton"], causal=True)
    compare(*qkv(1, 1, 40, 29, 16), kinds=["triton"], p=0.3, seed=SEED, key_padding=padding(1, 29), causal=True)


@pytest.mark.sweep
@pytest.mark.parametrize("kib", [LEAST, MOST])
@pytest.mark.parametrize(
    ("d", "dtype"),
    [(64, torch.float32), (128, torch.float32), (64, torch.bfloat16), (128, torch.bfloat16), (256, torch.float16)],
)
def test_every_row_of_the_launch_tables_will_do(d, dtype, kib, few_blocks, monkeypatch):
    """Those for less shared memory load by pointers, the others by descriptors where there are 16 bits."""
    if dtype == torch.float32 and kib == LEAST:
        assert all(list(rows) == [LEAST] for key, rows in flash.LAUNCH.items() if key[1] == 4)
        return  # those for the least are all that there are
    monkeypatch.setattr(language, "shared_memory", lambda device: kib)
    few_blocks.undo()
    try:
        compare(*qkv(1, 1, 33, 35, d, dtype), kinds=["triton"], causal=True)
        compare(*qkv(1, 1, 33, 35, d, dtype), kinds=["triton"], p=0.1, seed=SEED)
        compare(*qkv(1, 1, 33, 35, d, dtype), kinds=["triton"], bias=random(33, 35), causal=True)
    finally:
        resize(64, 64, few_blocks)


@pytest.mark.parametrize("name", ["flash.LAUNCH", "flash_backward.OVER_QUERIES", "flash_backward.OVER_KEYS"])
def test_16_bits_are_loaded_by_descriptors_where_shared_memory_allows_and_32_are_not(name):
    module, table = name.split(".")
    for (_, size, _), rows in getattr({"flash": flash, "flash_backward": flash_backward}[module], table).items():
        assert {kib: row["TMA"] for kib, row in rows.items()} == (
            {MOST: True, LEAST: False} if size == 2 else {LEAST: False}
        )


def test_a_descriptor_has_strides_of_16_bytes_whatever_torch_says_of_a_dimension_of_one_element():
    x = torch.empty(2, 8, 16, dtype=torch.bfloat16).as_strided((1, 2, 8, 16), (7, 128, 16, 1))
    for made in (described(x, 64, 16), described(x[:, :1].expand(3, 2, 8, 16), 64, 16)):
        assert all(y * 2 % 16 == 0 and y > 0 for y in made.strides[:-1]) and made.block_shape == [1, 1, 64, 16]


def test_a_great_bias_of_keys_is_not_taken_by_queries_that_are_not_there():
    out, gradients = compare(*qkv(1, 1, 5, 70, 16), bias=300 * random(70, seed=6), kinds=["triton"])
    assert all(x.isfinite().all() for x in (out, *gradients))


def test_it_is_the_same_every_time():
    q, k, v = qkv(1, 1, 70, 70, 16)
    with only("triton"):
        runs = [torch.autograd.grad(flash_attention(q, k, v, p=0.2, seed=3).square().sum(), (q, k, v)) for _ in "ab"]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_one_packed_tensor_are_read_in_place(dtype, monkeypatch):
    packed = made(2, 42, 3, 2, 40, dtype=dtype)
    q, k, v = packed.unbind(2)
    parts = [x.transpose(1, 2) for x in (q, k, v)]
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda *_: pytest.fail("copied"))
    with only("triton"):
        flash_attention(*parts, causal=True)
    monkeypatch.undo()
    compare(*[x.detach().requires_grad_() for x in parts], causal=True)


def test_other_strides_are_copied():
    q, k, v = (strided(x.detach()).requires_grad_() for x in qkv(2, 2, 42, 35, 12))
    seen = strided(padding(2, 35).float()).bool()
    compare(q, k, v, dout=strided(random(*q.shape)), key_padding=seen, p=0.1, seed=SEED)
    expanded = [x[:, :1].detach().expand(-1, 3, -1, -1).requires_grad_() for x in qkv(2, 1, 42, 35, 12)]
    compare(*expanded, dout=torch.ones(()).expand(2, 3, 42, 12), bias=strided(random(42, 35)))
    compare(*[x.detach().mT.requires_grad_() for x in qkv(1, 1, 6, 6, 16)])


def test_results_lie_in_memory_as_torch_compile_is_told():
    options = True, 0.5, 0.1, 2
    fake = FakeTensorMode()
    for x in (random(2, 20, 3, 4, 18)[:, :, 1, :, 1:13].transpose(1, 2), random(2, 1, 1, 16).expand(2, 4, 20, 16)):
        key = random(2, 2, 9, x.shape[3])
        inputs = (
            x,
            key,
            key.mT.contiguous().mT,
            padding(2, 9),
            random(20, 1).expand(20, 9),
            SEED,
            torch.arange(40).view(2, 20) % 3,
            torch.arange(18).view(2, 9) % 3,
        )
        with only("triton"):
            made = flash._forward(*inputs, *options)
            gradients = flash_backward.backward(torch.ones(()).expand(x.shape), *inputs, *made, *options)
        with fake:
            told = flash._forward(*map(fake.from_tensor, inputs), *options)
            of_backward = flash_backward.backward(told[0], *map(fake.from_tensor, inputs), *told, *options)
        for real, want in zip((*made, *gradients), (*told, *of_backward), strict=True):
            assert (real.shape, real.stride(), real.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_and_nothing_out(kind):
    with only(kind):
        for b, h, m, n, d in [(0, 1, 2, 3, 16), (1, 0, 2, 3, 16), (1, 1, 0, 3, 16), (1, 1, 2, 0, 16), (1, 1, 2, 3, 0)]:
            q, k, v = qkv(b, h, m, n, d)
            out = flash_attention(q, k, v)
            grads = torch.autograd.grad(out.sum(), (q, k, v))
            assert out.shape == q.shape and not out.any()
            assert [x.shape for x in grads] == [q.shape, k.shape, v.shape] and not any(x.any() for x in grads)


def test_all_of_a_result_is_written_and_nothing_else():
    q, k, v = qkv(2, 2, 42, 35, 40)
    with poisoned(), only("triton"):
        out = flash_attention(q, k, v, causal=True, key_padding=padding(2, 35))
        torch.autograd.grad(out, (q, k, v), torch.ones(out.shape))


@pytest.mark.sweep
@traced
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_gradients_agrees(kind, way):
    q, k, v = qkv(1, 2, 20, 35, 16)
    options = {"key_padding": padding(1, 35), "bias": random(20, 35), "p": 0.2, "seed": SEED, "causal": True}
    weight = random(1, 2, 20, 16, seed=8)
    loss = lambda *args: (flash_attention(*args, **options) * weight).sum()
    with only(kind):
        want = plain(loss, (q, k, v))
        for got, x in zip(WAYS[way](loss, (q, k, v)), want, strict=True):
            assert_near(got, x)


@traced
@pytest.mark.parametrize("kind", KINDS)
def test_keys_may_be_the_values_and_the_queries(kind):
    x = made(1, 1, 20, 16)
    wide = x.detach().double().requires_grad_()
    (want,) = plain(lambda x: reference(x, x, x, causal=True).square().sum(), [wide])
    with only(kind):
        for way in ("plain", "compiled"):
            (got,) = WAYS[way](lambda x: flash_attention(x, x, x, causal=True).square().sum(), (x,))
            assert_near(got, want, factor=ROUNDINGS)


def test_no_zeros_are_made_up_in_backward():
    q, k, v = qkv(1, 1, 20, 32, 16)
    with only("triton"):
        assert zeros_in_backward(flash_attention(q, k, v)) == 0
        without_a_gradient(flash_attention(q, k, v)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_handles_are_read_like_tensors(kind):
    q, k, v = qkv(1, 2, 20, 35, 16)
    bias = random(2, 20, 35)
    handles = [as_handle(x) for x in (q, k, v)]
    with only(kind):
        want = plain(lambda *args: flash_attention(*args, bias=bias).square().sum(), (q, k, v))
        out = flash_attention(*handles, bias=as_handle(bias).detach())
        got = torch.autograd.grad(out.square().sum(), handles)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_only_the_reference_has_a_second_derivative():
    q, k, v = (x.detach().double()[:, :, :4, :3].requires_grad_() for x in qkv(1, 2, 4, 4, 3))
    f = lambda *args: flash_attention(*args, causal=True, p=0.3, seed=SEED)
    assert torch.autograd.gradcheck(f, (q, k, v)) and torch.autograd.gradgradcheck(f, (q, k, v))
    q, k, v = qkv(1, 1, 4, 4, 16)
    with only("triton"):
        (dq,) = torch.autograd.grad(f(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(KernelError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", {"q": torch.zeros(2, 3, 4, 16, dtype=torch.int64)}),
        ("q", {"q": torch.zeros(3, 4, 16)}),
        ("k", {"k": torch.zeros(2, 3, 5, 16, dtype=torch.float16)}),
        ("k", {"k": torch.zeros(2, 3, 5, 8)}),
        ("k", {"k": torch.zeros(1, 3, 5, 16)}),
        ("k", {"k": torch.zeros(2, 2, 5, 16), "v": torch.zeros(2, 2, 5, 16)}),
        ("v", {"v": torch.zeros(2, 3, 4, 16)}),
        ("v", {"v": torch.zeros(2, 3, 5, 16, device="meta")}),
        ("key_padding", {"key_padding": torch.ones(2, 5)}),
        ("key_padding", {"key_padding": torch.ones(2, 4, dtype=torch.bool)}),
        ("key_padding", {"key_padding": torch.ones(2, 5, dtype=torch.bool, device="meta")}),
        ("bias", {"bias": torch.zeros(4, 4)}),
        ("bias", {"bias": torch.zeros(1, 1, 1, 1, 5)}),
        ("bias", {"bias": torch.zeros(5, dtype=torch.bool)}),
        ("bias", {"bias": torch.zeros(5, requires_grad=True)}),
        ("k", {"q": torch.zeros(2, 0, 4, 16)}),
        ("scale", {"scale": "1"}),
        ("scale", {"scale": float("nan")}),
        ("scale", {"scale": float("-inf")}),
        ("p", {"p": 1.0}),
        ("seed", {"p": 0.5}),
    ],
)
def test_bad_arguments_are_refused_by_name(name, change, kind):
    good = {"q": torch.zeros(2, 3, 4, 16), "k": torch.zeros(2, 3, 5, 16), "v": torch.zeros(2, 3, 5, 16)}
    with only(kind), pytest.raises(KernelError) as error:
        flash_attention(**{**good, **change})
    assert error.value.where == name


def test_a_refusal_says_what_to_write_instead():
    q = torch.zeros(2, 3, 4, 16)
    with pytest.raises(KernelError) as error:
        flash_attention(q[0], q, q)
    assert error.value.want == "(B, H, Sq, D)"
    with pytest.raises(KernelError) as error:
        flash_attention(q, q, q, bias=torch.ones(4, 4, dtype=torch.bool))
    assert "key_padding" in error.value.hint and "masked_fill" in error.value.hint


def test_a_head_beyond_a_block_is_refused_where_the_kernel_runs():
    for dtype, most in ((torch.bfloat16, 256), (torch.float32, 128)):
        compare(*qkv(1, 1, 3, 3, most, dtype))
        with only("triton"), pytest.raises(KernelError, match="exceeds a block") as error:
            flash_attention(*qkv(1, 1, 3, 3, most + 1, dtype))
        assert error.value.where == "q" and "attn_dropout_checkpoint=False" in error.value.hint
        compare(*qkv(1, 1, 3, 3, most + 1, dtype), kinds=["reference"])
