"""Attention over a sequence axis is that of one rank: `fds.kernels.attention` of the whole sequence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fds
from fds import kernels
from fds.collectives.traffic import counted
from fds.errors import KernelError, MeshError
from fds.nn.parallel.zigzag import in_order, in_zigzag
from tests import ranks

B, D, S = 2, 8, 24
METHODS = ("ulysses", "ring")
# An element is a sum of at most S products of two sums of D products, of numbers of size 1 with tails to 4
BOUND = {torch.float64: 2**-52 * S * D * 16, torch.float32: 2**-23 * S * D * 16, torch.bfloat16: 2**-8 * S}


def drawn(heads: int, groups: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return q, k and v, the gradient of the result, and a key padding that hides all early keys of row 1."""
    g = torch.Generator().manual_seed(heads * 100 + groups)
    *qkv, dout = (torch.randn(B, h, S, D, generator=g, dtype=torch.float64) for h in (heads, groups, groups, heads))
    padding = torch.rand(B, S, generator=g) > 0.3
    padding[1, : S // 2] = False
    return [x.to(dtype) for x in qkv], dout.to(dtype), padding


def alone(qkv: list[Tensor], dout: Tensor, **more: Any) -> list[Tensor]:
    """Return what one rank computes: the result, dq, dk and dv."""
    qkv = [x.double().requires_grad_() for x in qkv]
    out = kernels.attention(*qkv, **more)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout.double())]


def part(x: Tensor, layout: str, dim: int) -> Tensor:
    """Return this rank's part of a whole sequence."""
    axis = fds.mesh(sp=-1)["sp"]
    return fds.nn.zigzag(x, axis, dim) if layout == "zigzag" else x.chunk(axis.size, dim)[axis.index]


def of_a_rank(heads: int, groups: int, dtype: torch.dtype, padded: bool, layout: str, more: dict[str, Any]) -> Any:
    """Return what a rank computes of its part: the result, dq, dk and dv."""
    qkv, dout, padding = drawn(heads, groups, dtype)
    own = [part(x, layout, 2).requires_grad_() for x in qkv]
    padding = part(padding, layout, 1) if padded else None
    axis = fds.mesh(sp=-1)["sp"]
    out = fds.nn.attention(*own, axis=axis, layout=layout, key_padding=padding, **more)
    return [out.detach(), *torch.autograd.grad(out, own, part(dout, layout, 2))]


def check(parts: list[Any], heads: int, groups: int, dtype: torch.dtype, padded: bool, layout: str, more: Any) -> None:
    """Assert that the parts of all ranks are what one rank computes."""
    qkv, dout, padding = drawn(heads, groups, dtype)
    wanted = alone(
        qkv, dout, key_padding=padding if padded else None, **{k: v for k, v in more.items() if k != "method"}
    )
    for i, want in enumerate(wanted):
        got = torch.cat([one[i] for one in parts], 2)
        got = in_order(got, len(parts), 2) if layout == "zigzag" else got
        assert got.dtype == dtype
        assert torch.allclose(got.double(), want, rtol=0, atol=BOUND[dtype]), ["out", "dq", "dk", "dv"][i]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "groups"), [(2, 12), (3, 4), (4, 6), (4, 1)])
def test_ranks_compute_what_one_does(size, groups, method, causal, layout):
    for padded in (False, True):
        given = 12, groups, torch.float64, padded, layout, {"method": method, "causal": causal}
        check(fds.simulate(lambda given=given: of_a_rank(*given), size), *given)


def documents_of_rows() -> Tensor:
    """Return the documents of two packed rows, (B, S) int64: of one, none ends where a rank's part does."""
    return torch.stack([(torch.arange(S) // 5) % 4, torch.arange(S) // 17 - 1])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_documents_of_packed_rows_see_themselves_alone_on_any_number_of_ranks(method, causal, layout):
    heads, groups = 6, 3
    qkv, dout, padding = drawn(heads, groups)
    visible = (documents_of_rows()[:, :, None] == documents_of_rows()[:, None])[:, None] & padding[:, None, None]
    visible = visible & torch.ones(S, S, dtype=torch.bool).tril() if causal else visible
    inputs = [x.requires_grad_() for x in qkv]
    want = F.scaled_dot_product_attention(*inputs, attn_mask=visible, enable_gqa=True)
    wanted = [want, *torch.autograd.grad(want, inputs, dout)]

    def body():
        own = [part(x.detach(), layout, 2).requires_grad_() for x in qkv]
        masks = {"documents": part(documents_of_rows(), layout, 1), "key_padding": part(padding, layout, 1)}
        axis = fds.mesh(sp=-1)["sp"]
        out = fds.nn.attention(*own, axis=axis, layout=layout, method=method, causal=causal, **masks)
        return [out, *torch.autograd.grad(out, own, part(dout, layout, 2))]

    for size in (1, 3):
        for i, parts in enumerate(zip(*fds.simulate(body, size), strict=True)):
            got = torch.cat(parts, 2)
            got = in_order(got, size, 2) if layout == "zigzag" else got
            assert torch.allclose(got, wanted[i], rtol=0, atol=BOUND[torch.float64]), ["out", "dq", "dk", "dv"][i]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_narrow_numbers_are_as_near_as_their_rounding(method, dtype):
    given = 4, 2, dtype, True, "zigzag", {"method": method, "causal": True, "scale": -0.3}
    check(fds.simulate(lambda: of_a_rank(*given), 2), *given)


@pytest.mark.parametrize("method", METHODS)
def test_real_ranks_compute_what_one_does(method):
    given = 4, 2, torch.float64, True, "zigzag", {"method": method, "causal": True}
    check(ranks.run(of_a_rank, *given), *given)


@pytest.mark.parametrize("method", METHODS)
def test_under_autocast_products_are_of_16_bits(method):
    qkv, _, _ = drawn(4, 4, torch.float32)

    def body():
        axis = fds.mesh(sp=2)["sp"]
        with torch.autocast("cpu", torch.bfloat16):
            return fds.nn.attention(*(part(x, "contiguous", 2) for x in qkv), axis=axis, method=method).dtype

    assert fds.simulate(body, 2) == [torch.bfloat16] * 2


def test_on_one_rank_it_is_the_kernel_with_all_its_arguments():
    qkv, _, padding = drawn(4, 2)
    more = {
        "causal": True,
        "key_padding": padding,
        "bias": torch.randn(S, S).double(),
        "p": 0.2,
        "seed": 3,
        "offset": 1,
    }
    want = kernels.attention(*qkv, **more)
    assert torch.equal(fds.nn.attention(*qkv, **more), want)
    assert torch.equal(fds.nn.attention(*qkv, axis=fds.mesh(sp=1)["sp"], method="ring", layout="zigzag", **more), want)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_sent_is_what_the_page_says(method):
    heads, groups, n = 8, 4, 4
    tokens = B * (S // n) * D * 8  # bytes of one head of a rank's part

    def body():
        axis = fds.mesh(sp=-1)["sp"]
        qkv, dout, _ = drawn(heads, groups)
        own = [part(x, "contiguous", 2).requires_grad_() for x in qkv]
        with counted() as forward:
            out = fds.nn.attention(*own, axis=axis, method=method)
        with counted() as backward:
            torch.autograd.grad(out, own, part(dout, "contiguous", 2))
        return [forward.bytes_sent, backward.bytes_sent]

    each = (n - 1) / n * tokens * (2 * heads + 2 * groups)
    around = (n - 1) * tokens * 2 * groups
    want = [each, each] if method == "ulysses" else [around, around + n * tokens * 2 * groups]
    assert fds.simulate(body, n) == [want] * n


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_keeps_its_share_of_what_one_keeps(method):
    heads, groups, n = 8, 4, 4

    def body():
        axis = fds.mesh(sp=-1)["sp"]
        own = [part(x, "contiguous", 2).clone().requires_grad_() for x in drawn(heads, groups)[0]]
        kept: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = fds.nn.attention(*own, axis=axis, method=method, causal=True)
        return sum(kept.values()), out  # the result lives, so that no address is used twice

    tokens = B * (S // n) * 8
    want = tokens * (D * (2 * heads + 2 * groups) + heads)  # q, k, v, out, and lse
    assert [found for found, _ in fds.simulate(body, n)] == [want] * n


@pytest.mark.parametrize("method", METHODS)
def test_a_second_derivative_is_refused_or_right(method):
    def body():
        axis = fds.mesh(sp=2)["sp"]
        qkv, _, _ = drawn(2, 2)
        own = [part(x, "contiguous", 2).requires_grad_() for x in qkv]
        out = fds.nn.attention(*own, axis=axis, method=method)
        (dq,) = torch.autograd.grad(out.square().sum(), own[:1], create_graph=True)
        with pytest.raises((KernelError, RuntimeError)):
            torch.autograd.grad(dq.sum(), own[:1])

    fds.simulate(body, 2)


REFUSED = {
    "heads that do not divide": ({}, {"heads": 3, "groups": 3}, "3 heads on 2 ranks"),
    "a bias": ({"bias": torch.zeros(S // 2, S // 2).double()}, {}, "a bias"),
    "dropout": ({"p": 0.1, "seed": 1}, {}, "p=0.1"),
    "a method": ({"method": "star"}, {}, "'star'"),
    "a layout": ({"layout": "striped"}, {}, "'striped'"),
    "an odd part in zig-zag order": ({"layout": "zigzag", "method": "ring"}, {"tokens": 11}, "11 tokens"),
    "other keys than queries": ({"method": "ring"}, {"keys": 11}, "12 queries, 11 keys"),
    "a padding of all keys": ({"key_padding": torch.ones(B, S, dtype=torch.bool)}, {}, str((B, S))),
}


@pytest.mark.parametrize(("more", "shape", "got"), REFUSED.values(), ids=REFUSED)
def test_what_ranks_cannot_compute_is_refused(more, shape, got):
    def body():
        q = torch.zeros(B, shape.get("heads", 4), shape.get("tokens", S // 2), D, dtype=torch.float64)
        k = torch.zeros(B, shape.get("groups", 4), shape.get("keys", q.shape[2]), D, dtype=torch.float64)
        with pytest.raises(KernelError) as caught:
            fds.nn.attention(q, k, k, axis=fds.mesh(sp=2)["sp"], **more)
        assert got in caught.value.got

    fds.simulate(body, 2)


def test_an_axis_of_other_ranks_is_refused():
    (axis, _) = fds.simulate(lambda: fds.mesh(sp=2)["sp"], 2)
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(MeshError):
        fds.nn.attention(q, q, q, axis=axis)
    with pytest.raises(KernelError, match="not an axis"):
        fds.nn.attention(q, q, q, axis="sp")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_zig_zag_parts_are_the_sequence_once_and_as_much_work_each(size):
    x = torch.arange(10 * size).view(1, -1, 1)

    def body():
        axis = fds.mesh(sp=-1)["sp"]
        positions = fds.nn.zigzag_positions(10 * size, axis)
        assert torch.equal(fds.nn.zigzag(x, axis).flatten(), positions)
        return positions

    parts = fds.simulate(body, size)
    together = torch.cat(parts)[None]
    assert torch.equal(in_order(together, size, 1), x[..., 0]) if size > 1 else torch.equal(together, x[..., 0])
    assert torch.equal(in_zigzag(x[..., 0], size, 1), together) if size > 1 else True
    assert len({int((one + 1).sum()) for one in parts}) == 1


def test_a_sequence_of_no_equal_chunks_is_refused():
    def body():
        with pytest.raises(fds.FdsError, match="equal chunks") as caught:
            fds.nn.zigzag_positions(10, fds.mesh(sp=2)["sp"])
        assert caught.value.want == "a multiple of 4"

    fds.simulate(body, 2)
