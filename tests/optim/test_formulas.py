"""Lion and LAMB equal their formulas, and the elementwise paths equal the fused kernels."""

from __future__ import annotations

import threading

import pytest
import torch

from fds.optim import Segment, adagrad, adam, adamw, assembly, lamb, lion, sgd

SHAPES = [(6, 42), (123,), (), (0,), (3, 1, 5), (431,)]
NUM_STEPS = 50


def assert_near(ours, theirs, *, num_roundings):
    for a, b in zip(ours, theirs, strict=True):
        bound = num_roundings * torch.finfo(a.dtype).eps * b.abs().clamp(min=1.0)
        assert ((a - b).abs() <= bound).all(), ((a - b).abs() / bound).max()


def reference_lamb(
    p,
    grads,
    *,
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    min_coeff=0.01,
    max_coeff=10.0,
    bias_correction=True,
    eps_inside_sqrt=False,
):
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for n, g in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        u = m / ((v + eps).sqrt() if eps_inside_sqrt else v.sqrt() + eps) + weight_decay * p
        p_norm, u_norm = float(p.norm()), float(u.norm())
        c = min(max(p_norm / u_norm, min_coeff), max_coeff) if p_norm > 0 and u_norm > 0 else 1.0
        rate = lr * (1 - betas[1] ** n) ** 0.5 / (1 - betas[0] ** n) if bias_correction else lr
        p = p - rate * c * u
    return p


def reference_lion(p, grads, *, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
    m = torch.zeros_like(p)
    for g in grads:
        u = torch.sign(betas[0] * m + (1 - betas[0]) * g)
        p, m = p - lr * (u + weight_decay * p), betas[1] * m + (1 - betas[1]) * g
    return p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("together", [False, True], ids=["a slice each", "one slice"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"lr": 0.01, "weight_decay": 0.1},
        {"betas": (0.8, 0.9), "eps": 1e-3, "eps_inside_sqrt": True},
        {"bias_correction": False, "min_coeff": 0.1, "max_coeff": 0.5},
        {"lr": 0.01, "min_coeff": 0.0, "max_coeff": 1e9},
    ],
)
def test_lamb_is_its_formula(arguments, together, dtype, train, draw):
    params, batches = draw(SHAPES, dtype=dtype)
    params[1].zero_()  # of norm 0: its coefficient is 1
    after, _ = train(lamb(**arguments), params, batches, together=together)
    for i, (p, result) in enumerate(zip(params, after, strict=True)):
        grads = [g[i].double().reshape(-1) for g in batches]
        expected = reference_lamb(p.double().reshape(-1), grads, **arguments)
        # Per step: p is rounded once at |p| <= 4, and an update of at most 0.1 by some 30 roundings.
        assert_near([result], [expected.to(dtype)], num_roundings=8 * NUM_STEPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("arguments", [{}, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}])
def test_lion_is_its_formula(arguments, dtype, train, draw):
    params, batches = draw(SHAPES, dtype=dtype)
    after, _ = train(lion(**arguments), params, batches)
    for i, (p, result) in enumerate(zip(params, after, strict=True)):
        grads = [g[i].double().reshape(-1) for g in batches]
        expected = reference_lion(p.double().reshape(-1), grads, **arguments)
        assert_near([result], [expected.to(dtype)], num_roundings=4 * NUM_STEPS)


def test_lamb_split_over_two_ranks_takes_the_norms_of_whole_parameters(draw):
    (whole, small), batches = draw([(7, 3), (4,)], dtype=torch.float64, num_steps=5)
    barrier, posted = threading.Barrier(2), {}

    class Axis:
        def all_reduce(self, x, *, what=""):
            posted[threading.get_ident()] = x
            barrier.wait()
            total = sum(posted.values())
            barrier.wait()
            return total

    # Rank 0 holds 13 elements of the matrix, rank 1 its other 8 and the vector.
    cut = [
        [Segment("w", (7, 3), 0, 13), Segment("b", (4,), 13, 0)],
        [Segment("w", (7, 3), 0, 8), Segment("b", (4,), 8, 4)],
    ]
    flat = torch.cat([whole.reshape(-1), small])
    held = [flat[:13].clone(), flat[13:].clone()]

    def rank(r):
        optimizer = lamb(0.01, weight_decay=0.1)
        opt = optimizer.init([cut[r]], params=[held[r]])
        for t, grads in enumerate(batches):
            g = torch.cat([grads[0].reshape(-1), grads[1]])
            g = g[:13] if r == 0 else g[13:]
            optimizer.update(
                [g.clone()],
                opt,
                [held[r]],
                step=torch.tensor(t),
                lr=None,
                grad_scale=None,
                skip=None,
                segments=[cut[r]],
                axes=(Axis(),),
            )

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [
        reference_lamb(p.reshape(-1), [g[i].reshape(-1) for g in batches], lr=0.01, weight_decay=0.1)
        for i, p in enumerate((whole, small))
    ]
    assert_near([torch.cat(held)], [torch.cat(expected)], num_roundings=8 * 5)


CONSTANT = lambda value: lambda t: value
FUSED = {
    "adam": (adam, {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    "adam_uncorrected": (adam, {"betas": (0.9, 0.99), "bias_correction": False}),
    "adamw": (adamw, {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    "sgd": (sgd, {"weight_decay": 0.1}),
    "sgd_momentum": (sgd, {"momentum": 0.9, "weight_decay": 0.1}),
    "sgd_dampening": (sgd, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd_nesterov": (sgd, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adagrad": (adagrad, {"lr_decay": 0.01, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("only_lr", [True, False], ids=["lr", "all"])
@pytest.mark.parametrize("name", FUSED)
def test_tensor_hyper_parameters_give_what_the_fused_kernel_gives(name, only_lr, dtype, train, draw, monkeypatch):
    factory, arguments = FUSED[name]
    params, batches = draw(SHAPES, dtype=dtype)
    expected, _ = train(factory(2**-6, **arguments), params, batches)  # a rate that float32 holds
    # As on an accelerator: what a schedule returns stays a tensor.
    monkeypatch.setattr(assembly, "_read_on_cpu", lambda value: torch.as_tensor(value, dtype=torch.float64))
    curves = {
        key: tuple(map(CONSTANT, value))
        if key == "betas"
        else CONSTANT(value)
        if key in ("momentum", "weight_decay")
        else value
        for key, value in arguments.items()
    }
    after, _ = train(factory(2**-6, **(arguments if only_lr else curves)), params, batches)
    # Per step: three roundings of p at |p| <= 4, and an update of at most 0.2 by some 15 roundings.
    assert_near(after, expected, num_roundings=6 * NUM_STEPS)


def test_momentum_that_a_schedule_takes_through_zero_follows_the_formula(train, draw):
    params, batches = draw([(5,)], num_steps=4, dtype=torch.float64)
    after, _ = train(sgd(0.1, momentum=lambda t: 0.0 if t == 1 else 0.9), params, batches)
    p, g = params[0], [batch[0] for batch in batches]
    buffers = [g[0], g[1], 0.9 * g[1] + g[2], 0.9 * (0.9 * g[1] + g[2]) + g[3]]
    assert_near(after, [p - 0.1 * sum(buffers)], num_roundings=20)
