"""Cross-entropy: against float64 and torch, for rows that start anywhere in memory, in every way of gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from fds.errors import KernelError
from fds.kernels import logit_rows, token_loss
from fds.kernels.choice import only
from fds.kernels.token_loss import cross_entropy, reference
from tests.devices import DEVICE
from tests.kernels.accuracy import AWKWARD, DTYPES, TOLERANCE, assert_near, in_float64, random, strided
from tests.kernels.ways import WAYS, kept_bytes, plain, poisoned, traced, without_a_gradient, zeros_in_backward

IGNORED = -100


def made(*shape, dtype=torch.float32, seed=0):
    """Return logits (..., V) and targets (...), the second of which is ignored."""
    logits = (3 * random(*shape, seed=seed)).to(dtype).requires_grad_()
    targets = torch.randint(shape[-1], shape[:-1], generator=torch.Generator().manual_seed(seed))
    targets.view(-1)[1:2] = IGNORED
    return logits, targets


def compare(logits, targets, **options):
    """Check losses and gradients of both kinds against float64. Losses are float32 whatever logits are."""
    (logits64,) = in_float64(logits)
    with only("reference"):
        want = cross_entropy(logits64, targets, **options)
    (dwant,) = torch.autograd.grad(weighted(want), logits64)
    for kind in ("triton", "reference"):
        with only(kind):
            loss = cross_entropy(logits, targets, **options)
            (got,) = torch.autograd.grad(weighted(loss), logits)
        assert loss.dtype == torch.float32 and got.dtype == logits.dtype
        assert_near_one(loss, want)
        # of the target's probability 1 is taken, so the gradient is rounded by the size of that too
        error, taken = (got.double() - dwant).norm(), dloss(targets, **options).norm()
        assert error <= TOLERANCE[logits.dtype] * dwant.norm() + TOLERANCE[torch.float32] * taken


def assert_near_one(loss, want):
    """Compare logarithms, which are rounded as what they are taken of: sums of one or more."""
    assert_near(loss + 1, want + 1)


def dloss(targets, reduction="mean", **_):
    """Return the gradient of each token's loss."""
    one = torch.ones(targets.shape)
    return {"mean": one / token_loss.num_tokens(targets, IGNORED), "sum": one, "none": 2 * one}[reduction]


def weighted(loss):
    return (loss * torch.linspace(1, 2, loss.numel()).view(loss.shape)).sum()


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 1.0, "z_loss": 1.0}], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_loss_and_so_is_its_gradient(dtype, options):
    for num_classes in AWKWARD[1:]:
        compare(*made(5, num_classes, dtype=dtype), reduction="none", **options)
    compare(*made(5, 4096, dtype=dtype), reduction="mean", **options)  # rows that start on vectors
    compare(*made(2, 3, 42, dtype=dtype), reduction="sum", **options)


@given(
    n=st.integers(1, 4),
    num_classes=st.integers(2, 60),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    smoothing=st.sampled_from([0.0, 0.2]),
    z_loss=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(token_loss.REDUCTIONS),
)
def test_any_shape(n, num_classes, dtype, smoothing, z_loss, reduction, seed):
    logits, targets = made(n, num_classes, dtype=dtype, seed=seed)
    compare(logits, targets, label_smoothing=smoothing, z_loss=z_loss, reduction=reduction)


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_it_is_torchs_where_there_is_no_z_loss(kind):
    logits, targets = made(6, 42)
    for options in ({}, {"label_smoothing": 0.1}, {"ignore_index": int(targets[0])}):
        targets = targets if not options.get("ignore_index") else targets.clamp(min=0)
        for reduction in token_loss.REDUCTIONS:
            want = F.cross_entropy(logits, targets, reduction=reduction, **options)
            with only(kind):
                got = cross_entropy(logits, targets, reduction=reduction, **options)
            assert_near(got, want)
            grads = [torch.autograd.grad(weighted(loss), logits)[0] for loss in (got, want)]
            assert_near(*grads)


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_one_class_is_certain(kind):
    logits, targets = made(3, 1)
    with only(kind):
        loss = cross_entropy(logits, targets)
        assert loss.abs() < TOLERANCE[torch.float32] and not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_ignored_tokens_count_for_nothing(kind):
    logits, targets = made(6, 42)
    rest = [0, 2, 3, 4, 5]
    with only(kind):
        loss = cross_entropy(logits, targets, label_smoothing=0.1, z_loss=0.1)
        assert_near(loss, cross_entropy(logits[rest], targets[rest], label_smoothing=0.1, z_loss=0.1))
        (dx,) = torch.autograd.grad(loss, logits)
        assert not dx[1].any() and dx[rest].any(-1).all()
        assert cross_entropy(logits, targets, reduction="none")[1] == 0


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_the_mean_over_no_token_is_zero_and_its_gradient_too(kind):
    logits, targets = made(3, 42)
    for x, t in [(logits, torch.full_like(targets, IGNORED)), (logits[:0], targets[:0])]:
        with only(kind):
            loss = cross_entropy(x, t)
            assert loss == 0 and not torch.autograd.grad(loss, logits)[0].any()
            assert cross_entropy(x, t, reduction="none").shape == t.shape


@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("outside", [42, -1, -101, 2**40])
def test_a_target_that_is_no_class_makes_its_token_nan_and_no_other(kind, outside):
    logits, targets = made(4, 42)
    targets[2] = outside
    with only(kind):
        loss = cross_entropy(logits, targets, label_smoothing=0.1, reduction="none")
        (dx,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().tolist() == [False, False, True, False]
    assert dx[2].isnan().all() and dx[[0, 1, 3]].isfinite().all()


def test_an_ignored_token_may_have_any_logits():
    logits, targets = made(3, 42)
    spoiled = logits.detach().index_fill(0, torch.tensor([1]), float("nan")).requires_grad_()
    with only("triton"):
        loss = cross_entropy(spoiled, targets)
        assert_near(loss, cross_entropy(logits, targets))
        assert torch.autograd.grad(loss, spoiled)[0].isfinite().all()


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_large_logits_do_not_overflow_and_impossible_classes_are_not_chosen(kind):
    logits, targets = made(3, 42)
    for x in (logits * 1e4, logits - 1e5, logits.masked_fill(torch.arange(42) == (targets[0] + 1) % 42, float("-inf"))):
        with only(kind):
            loss, want = cross_entropy(x[:1], targets[:1]), F.cross_entropy(x[:1].double(), targets[:1])
            assert_near_one(loss, want)
            assert_near(torch.autograd.grad(loss, x)[0], torch.autograd.grad(want, x)[0])


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, of what a GPU rounds to minus infinity
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_classes_that_are_masked_by_the_least_number_are_not_chosen(dtype):
    least = torch.finfo(dtype).min
    logits, targets = made(3, 5000, dtype=dtype)
    masked = logits.detach().index_fill(1, torch.arange(4000, 5000), least)
    targets.clamp_(0, 3999)
    masked[2] = least  # no class is likelier than another
    with only("triton"):
        loss = cross_entropy(masked, targets, reduction="none")
    assert_near(loss, F.cross_entropy(masked.double(), targets, reduction="none"))


def test_logits_and_targets_may_lie_anyhow_in_memory():
    logits, targets = made(5, 43)
    compare(strided(logits.detach()).requires_grad_(), strided(targets), reduction="none")
    wide, _ = made(5, 64)
    compare(wide.detach()[:, :43].requires_grad_(), targets, reduction="none")  # such rows are not copied
    compare(wide.detach()[:, 3:46].requires_grad_(), targets, reduction="none")
    compare(wide.detach()[:, 3:9].requires_grad_(), targets.clamp(max=5), reduction="none")
    compare(random(43, 5).mT.requires_grad_(), targets, reduction="none")
    shifted, following = made(2, 6, 43)
    with only("triton"):
        got = cross_entropy(shifted[:, :-1], following[:, 1:])
    assert_near(got, F.cross_entropy(shifted[:, :-1].reshape(-1, 43), following[:, 1:].reshape(-1)))


def test_rows_that_lie_apart_are_read_where_they_lie():
    wide = random(5, 64)
    for rows, is_copied in ((wide[:, :43], False), (wide, False), (wide[:, :16], True), (wide.mT, True)):
        assert (token_loss._rows(rows).data_ptr() != rows.data_ptr()) is is_copied


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_is_written_and_nothing_around_is_read_or_written(dtype):
    for num_classes in (5, 16, 43):
        for shift in range(9):
            around = torch.full((shift + 4 * num_classes + 20,), float("nan"), dtype=dtype)
            logits = around[shift : shift + 3 * num_classes].view(3, num_classes)
            logits.copy_(random(3, num_classes))
            targets, given = torch.tensor([0, num_classes - 1, IGNORED]), (0.1, 0.01, IGNORED)
            loss, norms = torch.full((3,), float("nan")), torch.full((3, 2), float("nan"))
            want = reference(logits, targets, label_smoothing=0.1, z_loss=0.01)
            dwant = torch.func.grad(lambda x: reference(x, targets, label_smoothing=0.1, z_loss=0.01).sum())(logits)  # noqa: B023
            before = around.clone()
            with only("triton"):
                token_loss.launch_forward(logits, targets, loss, norms, *given)
                token_loss.launch_backward(torch.ones(1).expand(3), logits, targets, norms, logits, *given)
            for _ in range(2 if shift in (0, 3) else 1):  # second, what does both at once
                assert_near(loss, want)
                assert_near(logits, dwant)
                assert around[:shift].isnan().all() and around[shift + 3 * num_classes :].isnan().all()
                around.copy_(before)
                logit_rows.launch_with_gradient(logits, targets, loss.fill_(float("nan")), *given)
    with only("triton"), poisoned():
        x, t = made(3, 123, dtype=dtype)
        cross_entropy(x, t).backward()


def test_norms_that_have_no_gradient_cost_no_zeros():
    logits, targets = made(6, 42)
    with only("triton"):
        assert zeros_in_backward(cross_entropy(logits, targets)) == 0
        logits.grad = None
        (without_a_gradient(cross_entropy(logits, targets)) + 2 * logits.sum()).backward()
    assert (logits.grad == 2).all()


def test_losses_do_not_depend_on_blocks(monkeypatch):
    logits, targets = made(3, 1234)
    monkeypatch.setattr(token_loss, "LAUNCH", {"BLOCK": 512, "per_thread": 16})
    compare(logits, targets, label_smoothing=0.1, reduction="none")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_classes", "width"), [(9001, 9024), (9001, 9001), (16384, 16384), (600, 640)])
def test_loss_and_gradient_at_once_are_those_of_two_kernels(num_classes, width, dtype):
    logits = (3 * random(4, width)).to(dtype)[:, :num_classes]
    targets = torch.tensor([0, IGNORED, num_classes - 1, num_classes])
    loss, norms, both = torch.empty(4), torch.empty(4, 2), torch.empty(4)
    for options in ((0.0, 0.0, IGNORED), (0.1, 0.01, IGNORED)):
        overwritten, gradient = (torch.empty(4, width, dtype=dtype)[:, :num_classes].copy_(logits) for _ in range(2))
        token_loss.launch_forward(logits, targets, loss, norms, *options)
        token_loss.launch_backward(torch.ones(1).expand(4), logits, targets, norms, gradient, *options)
        logit_rows.launch_with_gradient(overwritten, targets, both, *options)
        assert both[3].isnan() and overwritten[3].isnan().all()
        assert_near(both[:3], loss[:3])
        assert_near(overwritten[:3], gradient[:3])


def test_backward_keeps_logits_targets_and_a_number_per_token():
    for dtype in DTYPES:
        logits, targets = made(6, 1000, dtype=dtype)
        with only("triton"):
            most = logits.numel() * logits.element_size() + 8 * 6 + 8 * 6 + 16  # and what the mean keeps
            assert kept_bytes(lambda x=logits, t=targets: cross_entropy(x, t)) <= most


@pytest.mark.sweep
@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_of_taking_gradients_agrees(way, kind):
    logits, targets = made(2, 3, 42)
    for reduction in ("mean", "none"):
        loss = lambda x, r=reduction: weighted(cross_entropy(x, targets, z_loss=0.1, reduction=r))
        with only(kind):
            for got, want in zip(way(loss, [logits]), plain(loss, [logits]), strict=True):
                assert torch.equal(got, want)


def test_only_references_have_a_second_derivative():
    x, targets = random(3, 7, dtype=torch.float64, requires_grad=True), torch.tensor([0, IGNORED, 6])
    f = lambda x: cross_entropy(x, targets, label_smoothing=0.1, z_loss=0.1)
    assert torch.autograd.gradcheck(f, x) and torch.autograd.gradgradcheck(f, x)
    x32 = random(3, 7, requires_grad=True)
    with only("triton"):
        (dx,) = torch.autograd.grad(f(x32), x32, create_graph=True)
        with pytest.raises(KernelError, match="no second derivative"):
            dx.sum().backward()


def test_autocast_changes_nothing():
    logits, targets = made(6, 42, dtype=torch.bfloat16)
    for kind in ("triton", "reference"):
        with only(kind):
            want = cross_entropy(logits, targets)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                assert torch.equal(cross_entropy(logits, targets), want)


X, T = random(3, 4), torch.tensor([0, 1, 2])
BAD = {
    "logits": (lambda: cross_entropy(X.long(), T), "not a floating-point tensor"),
    "logits, of no class": (lambda: cross_entropy(X[:, :0], T), "no classes"),
    "targets": (lambda: cross_entropy(X, T.int()), "class indices"),
    "targets, as probabilities": (lambda: cross_entropy(X, X), "class indices"),
    "targets, too few": (lambda: cross_entropy(X, T[:2]), "one for each row of logits"),
    "targets, elsewhere": (lambda: cross_entropy(X, T.to("meta")), "another device"),
    "label_smoothing": (lambda: cross_entropy(X, T, label_smoothing=1.5), "out of range"),
    "z_loss": (lambda: cross_entropy(X, T, z_loss=-1), "not a factor"),
    "ignore_index": (lambda: cross_entropy(X, T, ignore_index=0.5), "not a class"),
    "reduction": (lambda: cross_entropy(X, T, reduction="max"), "no such reduction"),
}


@pytest.mark.parametrize("where", BAD)
def test_bad_input_is_refused_by_name(where):
    call, words = BAD[where]
    for kind in ("triton", "reference"):
        with only(kind), pytest.raises(KernelError, match=words) as caught:
            call()
        assert caught.value.where == where.partition(",")[0]
