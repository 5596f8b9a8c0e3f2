"""How layer_norm and rms_norm are used: what they keep for backward, under transforms, with handles, and refusals."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fds.errors import KernelError
from fds.kernels import normalization_backward, only
from tests.kernels.accuracy import assert_near
from tests.kernels.normalized import KINDS, LEAVES, NORMS, example, normalized
from tests.kernels.ways import WAYS, as_handle, traced


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("returns_sum", [False, True])
def test_saving_the_output_changes_no_bit_of_it_and_holds_no_input(norm, kind, returns_sum):
    rows, columns = 32, 64
    of = example(norm, rows, columns, among="x residual weight bias", dtype=torch.bfloat16, params=torch.bfloat16)
    outs, held = {}, {}
    for invertible in (False, True):
        saved = {}
        with only(kind), saved_tensors_hooks(lambda t, saved=saved: saved.setdefault(id(t), t), lambda t: t):
            outs[invertible] = normalized(norm, of, returns_sum=returns_sum, invertible=invertible)
        held[invertible] = {t.untyped_storage().data_ptr(): t for t in saved.values()}
    tensor, row = rows * columns * 2, rows * 4  # bytes of a tensor in 16 bits, and of a float32 number for each row
    assert all(torch.equal(a, b) for a, b in zip(outs[False], outs[True], strict=True))
    addresses = {False: outs[False][-1].data_ptr() if returns_sum else None, True: outs[True][0].data_ptr()}
    for invertible, tensors in held.items():
        params = {of[name].data_ptr() for name in ("weight", "bias") if name in of}
        at_hand = {of["x"].data_ptr(), of["residual"].data_ptr()}
        took = sum(t.untyped_storage().nbytes() for at, t in tensors.items() if at not in params)
        assert not at_hand & set(tensors)  # neither x nor the residual: the sum, or y
        assert addresses[invertible] is None or addresses[invertible] in tensors
        assert took <= tensor + (1 if invertible else 2) * row
        assert took >= tensor


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_output_outlives_the_call_where_it_is_invertible(norm, kind):
    of = example(norm, 32, 64, among="x residual weight")
    with only(kind):
        y = normalized(norm, of, invertible=True)[0]
        graph = y.grad_fn
        assert graph is not None
        saved = [t for t in graph.saved_tensors if t is not None]  # pyright: ignore[reportAttributeAccessIssue]
    big = [t for t in saved if t.numel() == y.numel()]
    assert [t.data_ptr() for t in big] == [y.data_ptr()]


@pytest.mark.parametrize("norm", NORMS)
def test_a_gradient_that_nobody_asks_for_is_not_made(norm, monkeypatch):
    made, backward = [], normalization_backward.backward
    spy = lambda *args: (made.append(backward(*args)), made[-1])[1]
    monkeypatch.setattr(normalization_backward, "backward", spy)
    with only("triton"):
        for wanted in LEAVES:
            of = example(norm, 5, 42, among="x residual weight bias")
            if wanted in of:
                all_of_them = torch.autograd.grad(normalized(norm, of)[0].square().sum(), list(of.values()))
                assert [len(t) > 0 for t in made[-1][1:]] == ["weight" in of, "bias" in of]
                alone = {name: t.detach().requires_grad_(name == wanted) for name, t in of.items()}
                out = normalized(norm, alone)[0].square().sum()
                assert torch.equal(torch.autograd.grad(out, alone[wanted])[0], all_of_them[list(of).index(wanted)])
                assert [len(t) > 0 for t in made[-1][1:]] == [wanted == "weight", wanted == "bias"]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [0, 1])
def test_either_output_may_stay_unused(norm, kind, which):
    of = example(norm, 5, 42, among="x residual weight bias")
    with only(kind):
        used = lambda of: normalized(norm, of, returns_sum=True)[which].square().sum()
        grads = torch.autograd.grad(used(of), [of["x"], of["residual"]])
        under = torch.func.grad(lambda x: used(of | {"x": x}))(of["x"])
    want = 2 * (of["x"] + of["residual"]) if which else grads[1]
    assert torch.equal(grads[0], want)
    assert torch.equal(grads[1], want)
    assert torch.equal(under, want)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("invertible", [False, True])
def test_a_second_derivative_is_refused_where_only_what_is_kept_leads_to_it(norm, invertible):
    of = example(norm, 3, 8, among="x residual")
    with only("triton"):
        y = normalized(norm, of, invertible=invertible)
        (dx,) = torch.autograd.grad(y[0].sum(), of["x"], create_graph=True)
        with pytest.raises(KernelError, match="second derivative"):
            dx.square().sum().backward()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("invertible", [False, True])
def test_the_reference_has_a_second_derivative_and_the_kernel_refuses_one(norm, invertible):
    of = example(norm, 2, 5, among="x residual weight bias")
    leaves = tuple(t.detach().double().requires_grad_() for t in of.values())
    f = lambda *leaves: normalized(norm, dict(zip(of, leaves, strict=True)), returns_sum=True, invertible=invertible)
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)
    with only("triton"):
        (dx,) = torch.autograd.grad(normalized(norm, of)[0].sin().sum(), of["x"], create_graph=True)
        with pytest.raises(KernelError, match="second derivative"):
            dx.sum().backward()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments_are_refused_by_name(norm, kind):
    x, weight = torch.ones(3, 8), torch.ones(8)
    bad = {
        "x": [{"x": torch.ones(3, 8, dtype=torch.int64)}, {"x": torch.ones(())}, {"x": 1.0}],
        "weight": [{"weight": torch.ones(7)}, {"weight": torch.ones(1, 8)}, {"weight": torch.ones(8, device="meta")}],
        "residual": [{"residual": torch.ones(8)}, {"residual": x.half()}],
        "eps": [{"eps": -1.0}, {"eps": float("nan")}, {"eps": "small"}, {"eps": True}],
        "bias": [{"bias": torch.ones(7)}, {"bias": torch.ones(8, dtype=torch.bool)}] if norm == "layer_norm" else [],
    }
    with only(kind):
        for where, changes in bad.items():
            for change in changes:
                with pytest.raises(KernelError) as caught:
                    normalized(norm, {"x": x, "weight": weight} | change)
                assert caught.value.where == where
        with pytest.raises(KernelError):
            normalized(norm, {"x": x, "residual": x[:2]}, returns_sum=True)


@pytest.mark.sweep(2)
@traced
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("invertible", [False, True])
@pytest.mark.parametrize(("among", "returns_sum"), [("x residual weight bias", True), ("x weight", False)])
def test_every_way_to_take_gradients_agrees(norm, kind, invertible, among, returns_sum):
    of = example(norm, 5, 42, among=among)

    def loss(*leaves: Tensor) -> Tensor:
        y, *total = normalized(norm, dict(zip(of, leaves, strict=True)), returns_sum=returns_sum, invertible=invertible)
        return (y.sin() * total[0] if total else y.sin()).sum()

    with only(kind):
        want, *others = (way(loss, list(of.values())) for way in WAYS.values())
    for grads in others:
        for grad, wanted in zip(grads, want, strict=True):
            assert_near(grad, wanted)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("invertible", [False, True])
def test_weights_may_be_handles(norm, kind, invertible):
    of = example(norm, 5, 42, among="x residual weight bias")
    lent = {name: as_handle(t) if name in ("weight", "bias") else t for name, t in of.items()}
    with only(kind):
        want, got = (
            torch.autograd.grad(normalized(norm, it, invertible=invertible)[0].square().sum(), list(it.values()))
            for it in (of, lent)
        )
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
