"""What a kernel refuses, and by which words."""

import pytest
import torch

from fds.errors import KernelError
from fds.kernels import arguments
from tests.devices import DEVICE

X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "where", "got", "want"),
    [
        (lambda: arguments.floating(x=X, y=X.int()), "y", "torch.int32", "float32"),
        (lambda: arguments.floating(x=3), "x", "int", "float32"),
        (lambda: arguments.floating(x=X, y=X.to("meta")), "y", "meta", str(DEVICE)),
        (lambda: arguments.same_dtype(x=X, y=None, z=X.double()), "z", "torch.float64", "torch.float32"),
        (lambda: arguments.shape((2, None), x=X, y=X[0]), "y", "(3,)", "(2, any)"),
        (lambda: arguments.shape((2, 4), x=X), "x", "(2, 3)", "(2, 4)"),
        (lambda: arguments.alike(x=X, y=X.half()), "y", "torch.float16", "torch.float32"),
        (lambda: arguments.alike(x=X, y=X.t()), "y", "(3, 2)", "(2, 3)"),
        (lambda: arguments.has_rows(x=X, y=X[0, 0]), "y", "()", "(..., N)"),
        (lambda: arguments.ratio("p", 1.0), "p", "1.0", "[0, 1)"),
        (lambda: arguments.ratio("p", float("nan")), "p", "nan", "[0, 1)"),
        (lambda: arguments.ratio("p", "0.1"), "p", "'0.1'", "[0, 1)"),
        (lambda: arguments.ratio("p", False), "p", "False", "[0, 1)"),
    ],
)
def test_a_bad_argument_is_named_with_what_it_is_and_what_it_should_be(call, where, got, want):
    with pytest.raises(KernelError) as caught:
        call()
    assert caught.value.where == where and got in caught.value.got and want in caught.value.want


def test_what_fits_and_what_is_absent_passes():
    arguments.floating(x=X, y=None, z=X.double())
    arguments.same_dtype(x=None, y=X, z=X)
    arguments.shape((2, None), x=X, y=None)
    arguments.alike(x=X, y=None, z=X.clone(), again=X)
    arguments.has_rows(x=X, y=None)
    arguments.ratio("p", 0)
    arguments.ratio("p", 0.999)


def test_casts_happen_under_autocast_alone():
    leaf = X.clone().requires_grad_()
    assert arguments.under_autocast(torch.bfloat16, leaf) is leaf
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert arguments.under_autocast(torch.float32, leaf) is leaf
        assert arguments.under_autocast(torch.float32, None) is None
        cast = arguments.under_autocast(torch.bfloat16, leaf)
        assert cast.dtype == torch.bfloat16
        cast.sum().backward()
        assert torch.equal(leaf.grad, X)
