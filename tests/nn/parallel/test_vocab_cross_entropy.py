"""Cross-entropy of a vocabulary on several ranks: what one rank finds for all columns, in one small message."""

from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds.collectives import counted
from fds.errors import FdsError, KernelError
from fds.kernels import cross_entropy, vocabulary_parts
from tests import ranks
from tests.bits import assert_same_bits
from tests.kernels.accuracy import DTYPES, TOLERANCE, assert_near
from tests.kernels.ways import WAYS, kept_bytes, plain, traced, without_a_gradient
from tests.memory import peak_bytes
from tests.nn.parallel import vocabularies
from tests.nn.parallel.vocabularies import IGNORED, LAYOUTS, joined, on_ranks, part, weighted

ALL = {"label_smoothing": 0.1, "z_loss": 0.01}


def made(*shape, dtype=torch.float64, seed=0):
    """Return logits (..., V) and targets (...), the second of which is ignored."""
    g = torch.Generator().manual_seed(seed)
    logits, targets = (
        3 * torch.randn(shape, generator=g, dtype=torch.float64),
        torch.randint(shape[-1], shape[:-1], generator=g),
    )
    targets.view(-1)[1:2] = IGNORED
    return logits.to(dtype), targets


def alone(logits, targets, **options):
    """Return what one rank finds: loss and gradient, in float64. That of ignored tokens is 0, whatever logits are."""
    logits = logits.double().requires_grad_()
    loss = cross_entropy(logits, targets, **options)
    (dx,) = torch.autograd.grad(weighted(loss), logits)
    return loss.detach(), dx.masked_fill((targets == options.get("ignore_index", IGNORED))[..., None], 0.0)


def together(logits, targets, size, layout, autocast=False, **options):
    """Return what so many ranks find."""
    v = logits.shape[-1]

    def job(axis):
        own = part(logits, axis, layout)
        told = vocabularies.num_classes(layout, v)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = fds.nn.vocab_cross_entropy(own, targets, axis, num_classes=told, **options)
        return loss.detach(), torch.autograd.grad(weighted(loss), own)[0]

    found = on_ranks(size, job)
    return found[0][0], joined([dx for _, dx in found], v)


def compare(logits, targets, size, layout, **options):
    for got, want in zip(
        together(logits, targets, size, layout, **options), alone(logits, targets, **options), strict=True
    ):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-12, atol=1e-12)


@given(
    size=st.integers(2, 4),
    layout=st.sampled_from(LAYOUTS),
    n=st.integers(0, 5),
    v=st.integers(1, 13),
    smoothing=st.sampled_from([0.0, 0.2, 1.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    block=st.integers(1, 200),
    seed=st.integers(0, 99),
)
def test_ranks_find_what_one_rank_does(size, layout, n, v, smoothing, z_loss, reduction, block, seed):
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
    with mock.patch.dict(vocabulary_parts.BLOCK_BYTES, cpu=block):
        compare(*made(n, v, seed=seed), size, layout, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_may_have_any_dims_and_any_ignored_class(layout):
    logits, targets = made(2, 3, 11)
    compare(logits, targets, 2, layout, reduction="none", **ALL)
    compare(logits[0, 0], targets[0, 0], 2, layout, **ALL)
    targets = targets.clamp(min=0)
    compare(logits, targets, 3, layout, ignore_index=int(targets[0, 0]), **ALL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_low_precision_is_read_not_computed_in(dtype):
    logits, targets = made(9, 300, dtype=dtype)
    for layout in LAYOUTS:
        loss, dx = together(logits, targets, 3, layout, reduction="none", **ALL)
        want, dwant = alone(logits, targets, reduction="none", **ALL)
        assert loss.dtype == torch.float32 and dx.dtype == dtype
        assert_near(loss + 1, want + 1)
        assert_near(dx, dwant, factor=2)


def test_logits_of_a_thousand_lose_no_digit():
    logits, targets = made(9, 300, dtype=torch.float32)
    loss, dx = together(logits + 1000, targets, 3, "split")
    want, dwant = alone(logits + 1000, targets)
    assert_near(loss, want)
    assert (dx - dwant).norm() <= TOLERANCE[torch.float32] * dwant.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_all_tokens_ignored_nothing_is_lost_whatever_logits_are(layout):
    logits, targets = made(4, 7)
    logits[2, 3] = float("nan")
    loss, dx = together(logits, torch.full_like(targets, IGNORED), 2, layout, **ALL)
    assert loss == 0 and not dx.any()


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_on_one_rank_is_what_it_would_be_on_one_alone(bad, options):
    logits, targets = made(7, 8)
    targets[2], targets[3] = 6, 1
    logits[0, 5] = bad  # in one rank's columns
    logits[2, 6] = bad  # at a target
    logits[3, 4:] = bad  # all that one rank has
    logits[6, :4] = bad
    logits[1, 0] = bad  # of an ignored token
    logits[5] = bad  # everywhere
    compare(logits, targets, 2, "split", reduction="none", **options)


def test_a_target_that_is_no_class_is_nan_and_no_other_is():
    logits, targets = made(5, 8)
    targets[0], targets[3] = 8, -1
    for layout in LAYOUTS:
        loss, dx = together(logits, targets, 3, layout, reduction="none", **ALL)
        bad = torch.tensor([True, False, False, True, False])
        assert torch.equal(loss.isnan(), bad) and torch.equal(dx.isnan().all(1), bad)
        assert torch.equal(dx.isnan().any(1), bad)


def test_on_an_axis_of_one_rank_it_is_the_kernels_function_to_the_bit():
    logits, targets = made(5, 8, dtype=torch.float32)
    for x, told in ((logits, None), (logits, 8), (torch.cat([logits, logits], 1), 8)):
        own, want = x.clone().requires_grad_(), logits.clone().requires_grad_()
        loss = fds.nn.vocab_cross_entropy(own, targets, vocabularies.axis(1), num_classes=told, **ALL)
        expected = cross_entropy(want, targets, **ALL)
        assert_same_bits([loss], [expected])
        dx = torch.autograd.grad(loss, own)[0]
        assert_same_bits([dx[:, :8]], torch.autograd.grad(expected, want))
        assert not dx[:, 8:].any()


# Messages and memory


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("options", "num_numbers"), [({}, 3), ({"z_loss": 0.1}, 3), ({"label_smoothing": 0.1}, 4)])
def test_ranks_send_a_few_numbers_for_a_token_once(size, options, num_numbers):
    logits, targets = made(50, 400, dtype=torch.bfloat16)

    def job(told):
        axis = vocabularies.axis(size)
        own = part(logits, axis, "split")
        with counted() as traffic:
            fds.nn.vocab_cross_entropy(own, targets, axis, num_classes=told, **options).backward()
        return traffic.counts

    for counts in fds.simulate(lambda: job(400), size):
        assert counts.keys() == {("all_gather", "tp")}
        count = counts["all_gather", "tp"]
        assert count.calls == 1 and count.bytes_sent == (size - 1) * 4 * num_numbers * 50
    for counts in fds.simulate(lambda: job(None), size):
        count = counts["all_gather", "tp"]
        assert count.calls == 2 and count.bytes_sent == (size - 1) * (8 + 4 * num_numbers * 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_beside_logits_and_their_gradient_there_is_a_block(dtype):
    n, v = 64, 1000
    logits, columns = made(n, v, dtype=dtype)
    norms, factors = torch.zeros(2, n), torch.ones(3, n)
    small = 64 * n  # what is held for each token
    with mock.patch.dict(vocabulary_parts.BLOCK_BYTES, cpu=8 * v * 4):
        assert peak_bytes(lambda: vocabulary_parts.statistics(logits, columns, True)) <= 8 * v * 4 + small
        gradient = lambda: vocabulary_parts.gradient(logits, columns, norms, factors, True, v)
        assert peak_bytes(gradient) <= logits.nbytes + 8 * v * 4 + small


def test_no_softmax_is_kept():
    n, v = 64, 1000
    logits, targets = made(n, v, dtype=torch.bfloat16)

    def job(axis):
        own = part(logits, axis, "split")
        kept = kept_bytes(lambda: fds.nn.vocab_cross_entropy(own, targets, axis, num_classes=v, reduction="sum"))
        return torch.zeros(()), kept

    for _, kept in on_ranks(2, job):
        assert kept == n * v + n * (8 + 4 + 4) + n * (4 + 1)  # the last for what makes NaN and 0 of a loss


# Ways to take the gradient


@pytest.mark.sweep
@traced
@pytest.mark.parametrize("told", [11, None])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_gradients_gives_the_same_bits(way, told):
    logits, targets = made(6, 11, dtype=torch.float32)

    def job(axis):
        own = part(logits, axis, "split")
        f = lambda x: fds.nn.vocab_cross_entropy(x, targets, axis, num_classes=told, **ALL)
        return f(own).detach(), WAYS[way](f, [own])[0], plain(f, [own])[0]

    for _, got, want in on_ranks(2, job):
        assert torch.equal(got, want)


def test_under_autocast_it_reads_what_it_is_given():
    logits, targets = made(6, 11, dtype=torch.float32)
    want = together(logits, targets, 2, "split", **ALL)
    assert_same_bits(list(together(logits, targets, 2, "split", autocast=True, **ALL)), list(want))


def test_there_is_no_second_derivative():
    logits, targets = made(6, 11)

    def job(axis):
        own = part(logits, axis, "split")
        loss = fds.nn.vocab_cross_entropy(own, targets, axis)
        (dx,) = torch.autograd.grad(loss, own, create_graph=True)
        with pytest.raises(KernelError, match="no second derivative"):
            dx.sum().backward()
        return [loss.detach()]

    on_ranks(2, job)


def test_a_loss_that_nobody_differentiates_costs_no_gradient():
    logits, targets = made(6, 11)

    def job(axis):
        own = part(logits, axis, "split")
        loss = fds.nn.vocab_cross_entropy(own, targets, axis, reduction="none")
        assert torch.autograd.grad(without_a_gradient(loss).sum(), own, allow_unused=True) == (None,)
        return [loss.detach()]

    on_ranks(2, job)


def on_this_rank():
    found = []
    for layout in LAYOUTS:
        logits, targets = made(9, 11, dtype=torch.float32)
        axis = vocabularies.axis(2)
        own = part(logits, axis, layout)
        loss = fds.nn.vocab_cross_entropy(own, targets, axis, num_classes=vocabularies.num_classes(layout, 11), **ALL)
        found += [loss.detach(), torch.autograd.grad(loss, own)[0]]
    return found


def test_real_ranks_find_the_same_bits():
    assert_same_bits(ranks.run(on_this_rank, world_size=2), fds.simulate(on_this_rank, 2))


# Refusals

X, T = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
BAD = {
    "logits": ({"logits": X.long()}, "not a floating-point tensor"),
    "logits, dims": ({"logits": torch.tensor(1.0)}, "no classes"),
    "targets": ({"targets": T.int()}, "not a tensor of class indices"),
    "targets, shape": ({"targets": T[:1]}, "not one for each row of logits"),
    "label_smoothing": ({"label_smoothing": 1.5}, "out of range"),
    "z_loss": ({"z_loss": -1}, "not a factor"),
    "ignore_index": ({"ignore_index": 0.5}, "not a class"),
    "reduction": ({"reduction": "max"}, "no such reduction"),
    "num_classes": ({"num_classes": 0}, "not a number of classes"),
    "num_classes, kind": ({"num_classes": 4.0}, "not a number of classes"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("where", BAD)
def test_bad_input_is_refused_by_name_before_anything_is_sent(where, size):
    given, words = BAD[where]

    def job(axis):
        with pytest.raises(FdsError, match=words) as caught, counted() as traffic:
            fds.nn.vocab_cross_entropy(**({"logits": X, "targets": T, "axis": axis} | given))
        assert caught.value.where == where.partition(",")[0] and not traffic.counts
        return [X]

    on_ranks(size, job)


def test_too_few_columns_are_refused_by_every_rank_that_has_them():
    def job(axis):
        with pytest.raises(KernelError, match="too few columns") as caught:
            fds.nn.vocab_cross_entropy(X, T, axis, num_classes=9)
        assert caught.value.got == "4" and str(axis.index) in caught.value.where
        return [X]

    on_ranks(2, lambda axis: job(axis) if axis.index == 0 else [X])
