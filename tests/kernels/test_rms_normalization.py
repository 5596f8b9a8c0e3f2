"""What is rms_norm's own. (tests/kernels/test_normalization.py holds it near float64.)"""

import pytest
import torch
import torch.nn.functional as F

from fds.kernels import only
from fds.kernels.normalization import Formulas, add_rms_norm, rms_norm, rms_reference as reference
from tests.kernels.accuracy import assert_near, random
from tests.kernels.on_gpu import Pretended

KINDS = ["triton", "reference"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_column_is_its_sign(kind):
    x = (random(5, 1) * 100).requires_grad_()
    with only(kind):
        y = rms_norm(x, torch.full((1,), 2.0))
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert_near(y, 2 * x.detach().sign())
    assert dx.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs_rms_norm(dtype):
    x, weight = random(6, 123, dtype=dtype), random(123, seed=1, dtype=dtype)
    want = F.rms_norm(x.double(), (123,), weight.double(), 1e-3)
    assert_near(F.rms_norm(x, (123,), weight, 1e-3), want)
    assert_near(reference(x, weight, eps=1e-3), want)
    for kind in KINDS:
        with only(kind):
            assert_near(rms_norm(x, weight, eps=1e-3), want)


def test_the_sum_is_rounded_as_an_addition_rounds_it():  # float16: the interpreter truncates to bfloat16
    x, residual, weight = random(6, 42, dtype=torch.float16), random(6, 42, dtype=torch.float16, seed=1), random(42)
    for kind in KINDS:
        with only(kind):
            y, total = add_rms_norm(x, residual, weight)
            assert torch.equal(total, x + residual)
            assert torch.equal(y, rms_norm(x + residual, weight))
            assert torch.equal(y, rms_norm(x, weight, residual=residual))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_stays_one(kind):
    x = torch.zeros(2, 42, requires_grad=True)
    with only(kind):
        y = rms_norm(x, random(42))
        (dx,) = torch.autograd.grad(y, x, random(2, 42))
    assert torch.equal(y, torch.zeros(2, 42))
    assert dx.isfinite().all()


def test_on_a_gpu_torchs_fused_function_runs_where_it_takes_the_arguments(monkeypatch):
    formulas, apply = [], Formulas.apply
    monkeypatch.setattr(Formulas, "apply", lambda *args: formulas.append(args) or apply(*args))
    x, weight = random(6, 42).as_subclass(Pretended), random(42, seed=1)
    want = F.rms_norm(random(6, 42).double(), (42,), weight.double(), 1e-3)
    assert_near(rms_norm(x, weight, eps=1e-3).as_subclass(torch.Tensor), want)
    assert torch.equal(add_rms_norm(x, x, weight)[0], rms_norm(2 * x, weight)) and not formulas
    rms_norm(x, weight.double())
    rms_norm(x, weight, invertible=True)
    rms_norm(random(6, 42), weight)  # on the CPU it is no faster
    assert len(formulas) == 3
