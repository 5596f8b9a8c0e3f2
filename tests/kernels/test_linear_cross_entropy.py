"""The loss of a linear head in chunks: equal to the two steps, in every way of gradients, and small in memory."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from fds.errors import KernelError
from fds.kernels import head_loss
from fds.kernels.choice import only
from fds.kernels.head_loss import chunk_size, linear_cross_entropy, reference, total_and_gradients
from tests.devices import DEVICE
from tests.kernels.accuracy import DTYPES, TOLERANCE, assert_near, in_float64, random
from tests.kernels.ways import WAYS, as_handle, kept_bytes, plain, traced, without_a_gradient, zeros_in_backward

IGNORED = -100
# Logits are rounded, then their gradient is, then what is made of it is, and once more when it is scaled.
ROUNDINGS = 2.0


def made(n, h, v, dtype=torch.float32, with_bias=False):
    """Return hidden (n, h), weight (v, h), targets (n,), of which the second is ignored, and a bias (v,) or None."""
    targets = torch.randint(v, (n,), generator=torch.Generator().manual_seed(0))
    targets[1:2] = IGNORED
    hidden = random(n, h, dtype=dtype, requires_grad=True)
    weight = random(v, h, dtype=dtype, seed=1, requires_grad=True)
    return hidden, weight, targets, random(v, dtype=dtype, seed=2, requires_grad=True) if with_bias else None


def compare(hidden, weight, targets, bias, *, reduction="sum", **options):
    """Check loss and gradients of both kinds against all logits at once in float64."""
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    h64, w64, b64 = in_float64(hidden, weight, bias)
    loss_options = {k: x for k, x in options.items() if k != "chunk_tokens"}
    want = reference(h64, w64, targets, b64, **loss_options).sum()
    want = want / (targets != IGNORED).sum().clamp(min=1) if reduction == "mean" else want
    grads = torch.autograd.grad(want * 1.7, [x for x in (h64, w64, b64) if x is not None])
    for kind in ("triton", "reference"):
        with only(kind):
            loss = linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction, **options)
            got = torch.autograd.grad(loss * 1.7, inputs)
        assert loss.dtype == torch.float32 and [g.dtype for g in got] == [x.dtype for x in inputs]
        # logits are rounded by their own size, which is the loss's: it is as exact as its dtype
        assert abs(loss - want) <= TOLERANCE[hidden.dtype] * (want.abs() + 1)
        for g, w in zip(got, grads, strict=True):
            assert_near(g, w, factor=ROUNDINGS)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_the_loss_of_all_logits_and_so_is_every_gradient(with_bias, dtype):
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.01}):
        compare(*made(20, 16, 123, dtype, with_bias), chunk_tokens=8, **options)
        compare(*made(6, 42, 431, dtype, with_bias), reduction="mean", **options)


@given(
    n=st.integers(1, 9),
    h=st.integers(1, 20),
    v=st.integers(2, 99),
    chunk=st.integers(1, 10),
    reduction=st.sampled_from(["mean", "sum"]),
    with_bias=st.booleans(),
)
def test_any_shape_and_any_chunk(n, h, v, chunk, reduction, with_bias):
    hidden, weight, targets, bias = made(n + 1, h, v, with_bias=with_bias)
    compare(hidden, weight, targets, bias, chunk_tokens=chunk, reduction=reduction, label_smoothing=0.1)


def test_a_weight_of_many_slices(monkeypatch):
    monkeypatch.setattr(head_loss, "SLICE_BYTES", 4 * 16 * 64)
    compare(*made(20, 16, 431, torch.bfloat16), chunk_tokens=8)


def test_inputs_may_lie_anyhow_in_memory():
    hidden, weight, targets, _ = made(12, 16, 43)
    hidden, weight = (x.detach().mT.contiguous().mT.requires_grad_() for x in (hidden, weight))
    compare(hidden, weight, targets, None, chunk_tokens=5)
    with only("triton"):
        want = linear_cross_entropy(hidden, weight, targets)
        for shape in ((3, 4), (2, 2, 3)):
            assert_near(linear_cross_entropy(hidden.reshape(*shape, 16), weight, targets.view(shape)), want)


def test_sums_of_many_chunks_are_not_rounded_to_16_bits():
    hidden, weight, targets, _ = made(256, 8, 19, torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    (want,) = torch.autograd.grad(linear_cross_entropy(*exact, targets), exact[1])
    (got,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, chunk_tokens=2), weight)
    assert_near(got, want)  # of one rounding; 128 sums in bfloat16 would be far off


class Largest(TorchDispatchMode):
    """Remember the size of the largest tensor that an operator returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outs = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        self.nbytes = max([self.nbytes, *(x.untyped_storage().nbytes() for x in outs)])
        return out


@pytest.mark.sweep
@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(dtype, by_kernels):
    n, h, v, chunk = 64, 4, 1000, 4
    hidden, weight, targets, bias = made(n, h, v, dtype, with_bias=True)
    with only("triton"), Largest() as seen:
        given = ([True, True, True], chunk, head_loss.writer(0.0, 0.0, IGNORED, by_kernels))
        total_and_gradients(hidden.detach(), weight.detach(), targets, bias.detach(), *given)
    # rows of 1000 elements take 1024; float32 is what references compute in, and products on the CPU
    assert seen.nbytes <= max(chunk * 1024 * 4, v * h * 4) < n * v * dtype.itemsize / 4


class WideProducts(TorchDispatchMode):
    """Compute the product that torch has on CUDA alone, and remember what it was added to."""

    def __init__(self):
        super().__init__()
        self.betas, self.nbytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.dtype_out:
            total, a, b, dtype = args
            assert kwargs["out"] is total and total.dtype == dtype and a.dtype == b.dtype == torch.bfloat16
            self.betas.append(kwargs.get("beta", 1))
            return total.addmm_(a.float(), b.float(), beta=self.betas[-1])
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == (19, 8):
            self.nbytes += out.nbytes
        return out


def test_where_products_of_16_bits_are_float32_each_is_added_as_it_is_made(monkeypatch):
    hidden, weight, targets, _ = made(20, 8, 19, torch.bfloat16)
    write = head_loss.writer(0.0, 0.0, IGNORED, False)
    given = (hidden.detach(), weight.detach(), targets, None, [False, True, False], 6, write)
    want = total_and_gradients(*given)[2]
    monkeypatch.setattr(head_loss, "_products_are_wide", lambda device: True)
    with WideProducts() as seen:
        got = total_and_gradients(*given)[2]
    assert_near(got, want)
    assert seen.betas == [0, 1, 1, 1] and seen.nbytes == 4 * 19 * 8  # the gradient itself, and nothing of its size


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_the_most_memory_ever_held_is_that_of_a_chunk(kind):
    n, h, v, chunk = 256, 4, 1000, 16

    def most(f):
        hidden, weight, targets, _ = made(n, h, v)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
            f(hidden, weight, targets).backward()
        changes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = peak = 0
        for change in changes:
            held += change
            peak = max(peak, held)
        return peak

    eager = most(lambda h, w, t: F.cross_entropy(F.linear(h, w), t))
    with only(kind):
        assert most(lambda h, w, t: linear_cross_entropy(h, w, t, chunk_tokens=chunk)) * 4 < eager


def test_backward_keeps_gradients_and_neither_hidden_nor_weight():
    for dtype in DTYPES:
        hidden, weight, targets, _ = made(20, 16, 123, dtype)
        loss = lambda h, w, t=targets: linear_cross_entropy(h, w, t, reduction="sum")
        assert kept_bytes(loss, hidden, weight) == 20 * 16 * hidden.element_size() + 4 * 123 * 16
        assert kept_bytes(loss, hidden, weight.detach()) == 20 * 16 * hidden.element_size()
        assert kept_bytes(loss, hidden.detach(), weight) == 4 * 123 * 16


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_only_gradients_that_are_wanted_are_computed(kind, monkeypatch):
    hidden, weight, targets, _ = made(20, 16, 123)
    with only(kind):
        both = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), [hidden, weight])
        (dhidden,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets), [hidden])
        (dweight,) = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, targets), [weight])
        assert torch.equal(dhidden, both[0]) and torch.equal(dweight, both[1])
        for name in ("logit_rows", "_add_product"):
            monkeypatch.setattr(head_loss, name, None)
        with torch.no_grad():
            assert not linear_cross_entropy(hidden, weight, targets).requires_grad


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_gradients_that_are_kept_cost_no_zeros_in_backward(kind):
    hidden, weight, targets, bias = made(20, 16, 123, with_bias=True)
    with only(kind):
        assert zeros_in_backward(linear_cross_entropy(hidden, weight, targets, bias)) == 0
        hidden.grad = None
        (without_a_gradient(linear_cross_entropy(hidden, weight, targets)) + 2 * hidden.sum()).backward()
    assert (hidden.grad == 2).all()


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_gradients_at_every_level_of_transforms_are_wanted(kind):
    hidden, weight, targets, _ = (x if x is None else x.detach() for x in made(6, 16, 43))
    two_steps = lambda h, w: F.cross_entropy(F.linear(h, w), targets)
    chunked = lambda h, w: linear_cross_entropy(h, w, targets, chunk_tokens=4)

    def outer(h, loss):
        """Take a loss that depends on h, while another transform differentiates it by the weight."""
        dweight, value = torch.func.grad_and_value(lambda w: loss(2 * h, w))(weight)
        assert_near(dweight, torch.func.grad(lambda w: two_steps(2 * hidden, w))(weight))
        return value

    with only(kind):
        got = torch.func.grad(outer)(hidden, chunked)
        assert_near(got, torch.func.grad(lambda h: two_steps(2 * h, weight))(hidden))


@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_frozen_weight_and_a_transform_may_be_compiled(kind):
    hidden, weight, targets, _ = made(6, 16, 43)
    frozen = weight.detach()
    loss = lambda h: linear_cross_entropy(h, frozen, targets)
    transformed = lambda h: torch.func.grad(loss)(h)
    with only(kind):
        (want,) = torch.autograd.grad(loss(hidden), hidden)
        torch.compiler.reset()
        (got,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden), hidden)
        assert torch.equal(got, want)
        got = torch.compile(transformed, backend="aot_eager", fullgraph=True)(hidden.detach())
        assert torch.equal(got, want)


def test_chunks_are_a_quarter_of_the_tokens_and_about_alike():
    for n in (2, 123, 1024):
        assert n / 4 <= chunk_size(n) <= (n + 1) / 2
    assert chunk_size(0) == chunk_size(1) == 1
    for n in (1025, 4096, 8191, 8192, 8300, 16384, 123456):
        size = chunk_size(n)
        assert size % 128 == 0 and 512 <= size <= 4096 and size <= max(n / 4 + 128, 1024)
        assert n % size == 0 or n % size > size / 2 - 128 * (n // size)
    assert chunk_size(8192) == 2048


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_weight_that_is_used_elsewhere_too_gets_both_gradients(kind):
    _, weight, targets, _ = made(6, 16, 123)
    tokens = targets.clamp(min=0)
    tied = lambda w: linear_cross_entropy(F.embedding(tokens, w), w, targets, chunk_tokens=4)
    two_steps = lambda w: F.cross_entropy(F.linear(F.embedding(tokens, w), w), targets)
    with only(kind):
        (got,) = torch.autograd.grad(tied(weight), weight)
    assert_near(got, torch.autograd.grad(two_steps(weight), weight)[0])


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_autocast_casts_as_for_linear(kind):
    hidden, weight, targets, bias = made(20, 16, 123, with_bias=True)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    with only(kind):
        want = linear_cross_entropy(low[0], low[1], targets, low[2])
        with torch.autocast(DEVICE.type, torch.bfloat16):
            got = linear_cross_entropy(hidden, weight, targets, bias)
        grads = torch.autograd.grad(got, [hidden, weight, bias]), torch.autograd.grad(want, low)
    assert torch.equal(got, want)
    for g, w in zip(*grads, strict=True):
        assert g.dtype == torch.float32 and torch.equal(g, w.float())
    doubles = [x.detach().double() for x in (hidden, weight)]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert linear_cross_entropy(*doubles, targets).dtype == torch.float64


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_bad_targets_and_no_targets_are_as_in_cross_entropy(kind):
    hidden, weight, targets, _ = made(6, 16, 43)
    with only(kind):
        nothing = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED))
        assert nothing == 0 and not torch.autograd.grad(nothing, weight)[0].any()
        empty = linear_cross_entropy(hidden[:0], weight, targets[:0])
        assert empty == 0 and not torch.autograd.grad(empty, weight)[0].any()
        for outside in (43, -1):
            targets[3] = outside
            bad = linear_cross_entropy(hidden, weight, targets, reduction="sum")
            (dhidden,) = torch.autograd.grad(bad, hidden)
            assert bad.isnan() and dhidden.isnan().any(-1).tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_step_takes_it_as_a_mean(kind):
    hidden, weight, targets, _ = made(6, 16, 43)

    def loss(params, batch):
        h, t = batch
        return fds.Mean(linear_cross_entropy(h, params["w"], t, reduction="sum"), (t != IGNORED).sum())

    def eager(params, batch):
        return F.cross_entropy(F.linear(batch[0], params["w"]), batch[1])

    states = []
    for f, transforms in ((loss, [fds.accumulate(3)]), (eager, [])):
        step = fds.compose(*transforms, fds.sgd(lr=0.1))(f)
        with only(kind):
            states.append(step(step.init({"w": weight.detach()}), (hidden.detach(), targets))[0])
    assert_near(states[0].params["w"], states[1].params["w"])


@pytest.mark.sweep
@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_of_taking_gradients_agrees(way, kind):
    hidden, weight, targets, bias = made(6, 16, 43, with_bias=True)
    loss = lambda h, w, b: 3 * linear_cross_entropy(h, w, targets, b, chunk_tokens=4, label_smoothing=0.1)
    with only(kind):
        for got, want in zip(way(loss, [hidden, weight, bias]), plain(loss, [hidden, weight, bias]), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_weight_that_is_gathered_on_use(kind, is_autocast):
    hidden, weight, targets, _ = made(6, 16, 43)
    held = as_handle(weight)
    results = []
    for w in (held, weight):
        with only(kind), torch.autocast(DEVICE.type, torch.bfloat16, enabled=is_autocast):
            loss = linear_cross_entropy(hidden, w, targets)
        results.append((loss, *torch.autograd.grad(loss, [hidden, w])))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_a_second_derivative_is_refused(kind):
    hidden, weight, targets, _ = made(6, 16, 43)
    with only(kind):
        (dw,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), weight, create_graph=True)
        with pytest.raises(KernelError, match="no second derivative"):
            dw.sum().backward()


H, W, T = random(3, 4), random(5, 4), torch.tensor([0, 1, 2])
BAD = {
    "hidden": (lambda: linear_cross_entropy(H.long(), W, T), "not a floating-point tensor"),
    "hidden, of no dims": (lambda: linear_cross_entropy(H.sum(), W, T), "no dims"),
    "weight": (lambda: linear_cross_entropy(H, W.half(), T), "another dtype than hidden"),
    "weight, turned": (lambda: linear_cross_entropy(H, W.mT, T), "another shape"),
    "weight, empty": (lambda: linear_cross_entropy(H, W[:0], T), "no classes"),
    "weight, elsewhere": (lambda: linear_cross_entropy(H, W.to("meta"), T), "another device"),
    "bias": (lambda: linear_cross_entropy(H, W, T, H[0]), "another shape"),
    "targets": (lambda: linear_cross_entropy(H, W, T.int()), "class indices"),
    "targets, too few": (lambda: linear_cross_entropy(H, W, T[:2]), "one for each row of hidden"),
    "label_smoothing": (lambda: linear_cross_entropy(H, W, T, label_smoothing=-0.1), "out of range"),
    "z_loss": (lambda: linear_cross_entropy(H, W, T, z_loss="1"), "not a factor"),
    "reduction": (lambda: linear_cross_entropy(H, W, T, reduction="max"), "no such reduction"),
    "reduction, none": (lambda: linear_cross_entropy(H, W, T, reduction="none"), "no reduction 'none'"),
    "chunk_tokens": (lambda: linear_cross_entropy(H, W, T, chunk_tokens=0), "not a number of tokens"),
}


@pytest.mark.parametrize("where", BAD)
def test_bad_input_is_refused_by_name(where):
    call, words = BAD[where]
    for kind in ("triton", "reference"):
        with only(kind), pytest.raises(KernelError, match=words) as caught:
            call()
        assert caught.value.where == where.partition(",")[0]
