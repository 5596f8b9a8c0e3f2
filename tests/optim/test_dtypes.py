"""Every optimizer in every dtype and at every small size is what it is in float64, to rounding."""

from __future__ import annotations

import pytest
import torch

from fds.optim import adagrad, adam, adamw, by_name, lamb, lion, muon, sgd

OPTIMIZERS = {
    "adam": adam(0.1, weight_decay=0.1),
    "adamw": adamw(0.1),
    "formula": adamw(0.1, weight_decay=lambda t: 0.1 * t),
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9),
    "nesterov": sgd(0.1, momentum=0.9, nesterov=True),
    "dampening": sgd(0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "adagrad": adagrad(0.1),
    "lamb": lamb(0.1),
    "lion": lion(0.01),
    "by_name": by_name({"p0": sgd(0.1), "*": adamw(0.1)}),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STEPS = 3
# An update rounds a parameter below 2, or its step, at most four times, each by at most eps: half a unit at 1 to 2.
TOLERANCE = 4 * STEPS


def drawn(shape, dtype):
    """Return numbers of (0.5, 1.5) that the dtype holds: what is small beside eps would say nothing about it."""
    return (torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[0])) + 0.5).to(dtype)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_float64_to_rounding_at_every_size(optimizer, dtype, train):
    params = [drawn((n,), dtype) for n in range(1, 71)]
    batches = [[drawn((n + 100 * t,), dtype)[:n] for n in range(1, 71)] for t in range(STEPS)]
    wide = lambda tensors: [x.double() for x in tensors]
    low, _ = train(optimizer, params, batches)
    exact, _ = train(optimizer, wide(params), [wide(grads) for grads in batches])
    worst = max(float((a.double() - b).abs().max()) for a, b in zip(low, exact, strict=True))
    assert worst <= TOLERANCE * torch.finfo(dtype).eps
    assert all(not torch.equal(p, q) for p, q in zip(params, low, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_muon_moves_by_a_matrix_of_bfloat16_whatever_the_dtype(dtype, train):
    params = [drawn((n, 3), dtype) for n in range(1, 24)]
    low, _ = train(muon(0.1), params, [params])
    exact, _ = train(muon(0.1), [p.double() for p in params], [[p.double() for p in params]])
    eps = torch.finfo(torch.bfloat16).eps  # of the direction, whose elements are below 2, after 15 products
    worst = max(float((a.double() - b).abs().max()) for a, b in zip(low, exact, strict=True))
    assert worst <= 0.1 * 15 * 2 * eps + TOLERANCE * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_parameters_of_two_dtypes_are_updated_as_each_would_be_alone(dtypes, train):
    params = [drawn((n,), dtypes[n % 2]) for n in range(1, 40)]
    for optimizer in OPTIMIZERS.values():
        both, _ = train(optimizer, params, [params])
        for i, p in enumerate(params):
            if optimizer is not OPTIMIZERS["by_name"]:
                assert torch.equal(both[i], train(optimizer, [p], [[p]])[0][0])
