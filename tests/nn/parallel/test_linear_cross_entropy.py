"""The loss of a head on several ranks: what one rank finds for all rows, with two small messages and one large one."""

import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds.collectives import counted
from fds.errors import FdsError, KernelError
from fds.kernels import linear_cross_entropy
from tests import ranks
from tests.bits import assert_same_bits
from tests.kernels.accuracy import DTYPES, assert_near
from tests.kernels.ways import WAYS, kept_bytes, plain, traced
from tests.memory import peak_bytes
from tests.nn.parallel import vocabularies
from tests.nn.parallel.vocabularies import IGNORED, LAYOUTS, joined, on_ranks, part

ALL = {"label_smoothing": 0.1, "z_loss": 0.01}


def made(*shape, h, v, dtype=torch.float64, seed=0):
    """Return hidden (..., h), weight (v, h), targets (...), the second of which is ignored, and a bias (v,)."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((*shape, h), (v, h), (v,)))
    targets = torch.randint(v, shape, generator=g)
    targets.view(-1)[1:2] = IGNORED
    return hidden.to(dtype), weight.to(dtype), targets, bias.to(dtype)


def alone(hidden, weight, targets, bias, **options):
    """Return what one rank finds: the loss and the gradients of hidden, weight and bias, in float64."""
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    loss = linear_cross_entropy(*leaves[:2], targets, *leaves[2:], **options)
    return [loss.detach(), *torch.autograd.grad(loss * 1.7, leaves)]


def together(hidden, weight, targets, bias, size, layout, sequence_dim=None, autocast=False, **options):
    """Return what so many ranks find."""
    v = len(weight)

    def job(axis):
        own = hidden if sequence_dim is None else hidden.chunk(size, sequence_dim)[axis.index]
        leaves = [own.clone().requires_grad_()]
        leaves += [part(x, axis, layout, 0) for x in (weight, bias) if x is not None]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = fds.nn.linear_cross_entropy(
                *leaves[:2], targets, *leaves[2:], axis=axis, num_classes=vocabularies.num_classes(layout, v),
                sequence_dim=sequence_dim, **options,
            )  # fmt: skip
        return loss.detach(), *torch.autograd.grad(loss * 1.7, leaves)

    found = on_ranks(size, job)
    loss, dhidden, *_ = found[0]
    if sequence_dim is None:
        assert all(torch.equal(one[1].nan_to_num(9e9), dhidden.nan_to_num(9e9)) for one in found)
    else:
        dhidden = torch.cat([one[1] for one in found], sequence_dim)
    return [loss, dhidden, *(joined([one[i] for one in found], v, 0) for i in range(2, len(found[0])))]


def compare(hidden, weight, targets, bias, *args, **options):
    one_rank = {k: x for k, x in options.items() if k != "sequence_dim"}
    want = alone(hidden, weight, targets, bias, **one_rank)
    for got, wanted in zip(together(hidden, weight, targets, bias, *args, **options), want, strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-12, atol=1e-12)


@given(
    size=st.integers(2, 4),
    layout=st.sampled_from(LAYOUTS),
    n=st.integers(0, 7),
    h=st.integers(1, 5),
    v=st.integers(1, 13),
    smoothing=st.sampled_from([0.0, 0.2, 1.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["mean", "sum"]),
    chunk=st.sampled_from([None, 1, 2, 3, 20]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_ranks_find_what_one_rank_does(
    size, layout, n, h, v, smoothing, z_loss, reduction, chunk, with_bias, seed
):  # fmt: skip
    hidden, weight, targets, bias = made(n, h=h, v=v, seed=seed)
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction, "chunk_tokens": chunk}
    compare(hidden, weight, targets, bias if with_bias else None, size, layout, **options)


@pytest.mark.parametrize(("sequence_dim", "shape"), [(0, (6,)), (1, (3, 6)), (0, (6, 3)), (-2, (1, 6))])
def test_hidden_may_be_a_part_of_the_sequence(sequence_dim, shape):
    for size, layout in ((2, "padded"), (3, "split")):
        compare(*made(*shape, h=4, v=11), size, layout, sequence_dim=sequence_dim, chunk_tokens=5, **ALL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_low_precision_rounds_logits_and_gradients_and_no_sum(dtype):
    inputs = made(20, h=16, v=123, dtype=dtype)
    loss, *gradients = together(*inputs, 3, "split", chunk_tokens=8, **ALL)
    want, *wanted = alone(*inputs, chunk_tokens=8, **ALL)
    assert loss.dtype == torch.float32 and all(x.dtype == dtype for x in gradients)
    assert_near(loss + 1, want + 1, dtype)
    for got, expected in zip(gradients, wanted, strict=True):
        assert_near(got, expected, factor=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_all_tokens_ignored_nothing_is_lost(layout):
    hidden, weight, targets, bias = made(5, h=3, v=7)
    found = together(hidden, weight, torch.full_like(targets, IGNORED), bias, 2, layout, **ALL)
    assert not any(x.any() for x in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_on_one_rank_is_what_it_would_be_on_one_alone(bad):
    hidden, weight, targets, bias = made(5, h=3, v=8)
    hidden = hidden.abs()
    bias[6] = bad
    compare(hidden, weight, targets.clamp(min=0) % 4, bias, 2, "split", chunk_tokens=2)
    targets[3] = 8  # no class
    compare(hidden, weight, targets, bias, 2, "split", chunk_tokens=2)


def test_on_an_axis_of_one_rank_it_is_the_kernels_function_to_the_bit():
    hidden, weight, targets, bias = made(5, h=3, v=8, dtype=torch.float32)
    for copies, told in ((1, None), (1, 8), (2, 8)):
        own = [x.clone().requires_grad_() for x in (hidden, weight.repeat(copies, 1), bias.repeat(copies))]
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        options = {"axis": vocabularies.axis(1), "num_classes": told}
        loss = fds.nn.linear_cross_entropy(own[0], own[1], targets, own[2], sequence_dim=0, **options, **ALL)
        want = linear_cross_entropy(*leaves[:2], targets, leaves[2], **ALL)
        assert_same_bits([loss], [want])
        gradients = torch.autograd.grad(loss, own)
        for got, expected in zip(gradients, torch.autograd.grad(want, leaves), strict=True):
            assert_same_bits([got[: len(expected)]], [expected])
            assert not got[len(expected) :].any()


# Messages and memory


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize(("options", "num_numbers"), [({}, 3), ({"label_smoothing": 0.1}, 4)])
def test_ranks_send_a_few_numbers_for_a_token_and_the_gradient_of_hidden(size, by_sequence, options, num_numbers):
    n, h, v = 48, 6, 400
    hidden, weight, targets, _ = made(n, h=h, v=v, dtype=torch.bfloat16)

    def job(axis, wants=True):
        own = (hidden.chunk(size)[axis.index] if by_sequence else hidden).clone().requires_grad_(wants)
        of_ranks = {"axis": axis, "num_classes": v, "sequence_dim": 0 if by_sequence else None}
        with counted() as traffic:
            loss = fds.nn.linear_cross_entropy(
                own, part(weight, axis, "split", 0), targets, chunk_tokens=16, **of_ranks, **options
            )
            in_forward = traffic.bytes_sent
            loss.backward()
        assert traffic.bytes_sent == in_forward
        return loss.detach(), traffic.counts, own.grad is not None

    messages = 3 * (size - 1) * 4 * num_numbers * 16
    pieces = (size - 1) * n // size * h * 2
    for _, counts, _ in on_ranks(size, job):
        gathers = counts["all_gather", "tp"]
        assert gathers.calls == 3 + by_sequence and gathers.bytes_sent == messages + by_sequence * pieces
        if by_sequence:
            assert counts["reduce_scatter", "tp"].bytes_sent == pieces and len(counts) == 2
        else:
            assert counts["all_reduce", "tp"].bytes_sent == (size - 1) * n * h * 2 and len(counts) == 2
    for _, counts, has_gradient in on_ranks(size, lambda axis: job(axis, wants=False)):
        assert counts.keys() == {("all_gather", "tp")} and not has_gradient


def test_a_chunk_of_logits_is_held_and_gradients_are_kept():
    n, h, v, chunk = 256, 4, 2000, 16
    hidden, weight, targets, _ = made(n, h=h, v=v, dtype=torch.float32)

    def leaves(axis):
        return hidden.clone().requires_grad_(), part(weight, axis, "split", 0)

    def job(axis):
        loss = lambda h, w: fds.nn.linear_cross_entropy(h, w, targets, axis=axis, num_classes=v, chunk_tokens=chunk)
        kept = kept_bytes(lambda h, w: loss(h, w) * 2, *leaves(axis))
        return torch.zeros(()), kept

    for _, kept in on_ranks(2, job):
        assert kept == n * h * 4 + v // 2 * h * 4 + 8  # and the number of tokens, by which the total is divided
    most = peak_bytes(lambda: on_ranks(2, lambda axis: [fds.nn.linear_cross_entropy(
        *leaves(axis), targets, axis=axis, num_classes=v, chunk_tokens=chunk).detach()]))  # fmt: skip
    per_rank = chunk * v // 2 * 4 * 2 + 3 * (n * h + v // 2 * h) * 4 + 64 * n  # a chunk, and a block of it
    assert most <= 2 * per_rank < 2 * n * v // 2 * 4


# Ways to take the gradient


@traced
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_gradients_gives_the_same_bits(way):
    hidden, weight, targets, bias = made(6, h=3, v=11, dtype=torch.float32)

    def job(axis):
        args = [hidden.clone().requires_grad_(), part(weight, axis, "split", 0), part(bias, axis, "split", 0)]
        options = {"axis": axis, "num_classes": 11, "chunk_tokens": 4, **ALL}
        f = lambda h, w, b: fds.nn.linear_cross_entropy(h, w, targets, b, **options)
        return f(*args).detach(), WAYS[way](f, args), plain(f, args)

    for _, got, want in on_ranks(2, job):
        assert_same_bits(list(got), list(want))


def test_under_autocast_it_is_cast_as_by_linear():
    inputs = made(6, h=3, v=11, dtype=torch.float32)
    loss, dhidden, dweight, dbias = together(*inputs, 2, "split", autocast=True, **ALL)
    hidden, weight, targets, bias = inputs
    low = together(hidden.bfloat16(), weight.bfloat16(), targets, bias.bfloat16(), 2, "split", **ALL)
    assert_same_bits([loss, dhidden.bfloat16(), dweight.bfloat16(), dbias.bfloat16()], low)


def test_there_is_no_second_derivative():
    hidden, weight, targets, _ = made(6, h=3, v=11)

    def job(axis):
        own = part(weight, axis, "split", 0)
        loss = fds.nn.linear_cross_entropy(hidden, own, targets, axis=axis)
        (dw,) = torch.autograd.grad(loss, own, create_graph=True)
        with pytest.raises(KernelError, match="no second derivative"):
            dw.sum().backward()
        return [loss.detach()]

    on_ranks(2, job)


def on_this_rank():
    hidden, weight, targets, bias = made(2, 4, h=3, v=11, dtype=torch.float32)
    axis, found = vocabularies.axis(2), []
    for layout in LAYOUTS:
        for dim in (None, 1):
            own = hidden if dim is None else hidden.chunk(2, dim)[axis.index]
            leaves = [own.clone().requires_grad_(), part(weight, axis, layout, 0), part(bias, axis, layout, 0)]
            options = {"axis": axis, "num_classes": vocabularies.num_classes(layout, 11), "sequence_dim": dim}
            loss = fds.nn.linear_cross_entropy(*leaves[:2], targets, leaves[2], chunk_tokens=3, **options, **ALL)
            found += [loss.detach(), *torch.autograd.grad(loss, leaves)]
    return found


def test_real_ranks_find_the_same_bits():
    assert_same_bits(ranks.run(on_this_rank, world_size=2), fds.simulate(on_this_rank, 2))


# Refusals

H, W, T = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
BAD = {
    "hidden": ({"hidden": H.long()}, "not a floating-point tensor"),
    "weight": ({"weight": W[:, :3]}, "another shape"),
    "weight, dtype": ({"weight": W.double()}, "another dtype"),
    "bias": ({"bias": torch.zeros(4)}, "another shape"),
    "targets": ({"targets": T[:1]}, "not one for each row of hidden"),
    "label_smoothing": ({"label_smoothing": 1.5}, "out of range"),
    "reduction": ({"reduction": "none"}, "no reduction 'none'"),
    "chunk_tokens": ({"chunk_tokens": 0}, "not a number of tokens"),
    "num_classes": ({"num_classes": 0}, "not a number of classes"),
    "sequence_dim": ({"sequence_dim": 1}, "no such dim of tokens"),
    "sequence_dim, kind": ({"sequence_dim": "1"}, "no such dim of tokens"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("where", BAD)
def test_bad_input_is_refused_by_name_before_anything_is_sent(where, size):
    given, words = BAD[where]

    def job(axis):
        with pytest.raises(FdsError, match=words) as caught, counted() as traffic:
            fds.nn.linear_cross_entropy(**({"hidden": H, "weight": W, "targets": T, "axis": axis} | given))
        assert caught.value.where == where.partition(",")[0] and not traffic.counts
        return [H]

    on_ranks(size, job)
