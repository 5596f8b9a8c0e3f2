"""Every optimizer that torch.optim has does what torch.optim does."""

from __future__ import annotations

import pytest
import torch

from fds.optim import adagrad, adam, adamw, muon, sgd

SHAPES = [(6, 42), (123,), (), (0,), (3, 1, 5), (431,), (17, 9)]
MATRICES = [(6, 42), (42, 6), (9, 9), (1, 7), (5, 1)]
DTYPES = [torch.float32, torch.float64]
NUM_STEPS = 50

TWINS = {
    "adam": (adam, torch.optim.Adam, {}),
    "adam_l2": (adam, torch.optim.Adam, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "adam_beta_zero": (adam, torch.optim.Adam, {"betas": (0.0, 0.9)}),
    "adamw": (adamw, torch.optim.AdamW, {}),
    "adamw_decay": (adamw, torch.optim.AdamW, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "sgd": (sgd, torch.optim.SGD, {"lr": 0.1}),
    "sgd_decay": (sgd, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd_momentum": (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd_dampening": (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd_nesterov": (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_dampening_alone": (sgd, torch.optim.SGD, {"lr": 0.1, "dampening": 0.3}),
    "adagrad": (adagrad, torch.optim.Adagrad, {}),
    "adagrad_all": (
        adagrad,
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-6},
    ),
}


def torch_run(cls, arguments, params, batches, edit=lambda t, group: None, **more):
    twins = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = cls(twins, **arguments, **more)
    for t, grads in enumerate(batches):
        edit(t, optimizer.param_groups[0])
        for p, g in zip(twins, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach().reshape(-1) for p in twins], optimizer


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def assert_near(ours, theirs, *, num_roundings, scale=1.0):
    """Differ by at most `num_roundings` roundings at the magnitude `scale`, or each element's if larger."""
    for a, b in zip(ours, theirs, strict=True):
        bound = num_roundings * torch.finfo(a.dtype).eps * b.abs().clamp(min=scale)
        assert ((a - b).abs() <= bound).all(), ((a - b).abs() / bound).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TWINS)
def test_equals_torchs_fused_optimizer_bit_for_bit(name, dtype, train, draw):
    ours, twin, arguments = TWINS[name]
    params, batches = draw(SHAPES, dtype=dtype)
    after, opt = train(ours(**arguments), params, batches)
    expected, optimizer = torch_run(twin, arguments, params, batches, fused=True)
    assert_equal(after, expected)
    for slot, tensors in opt.items():
        assert_equal(tensors, [state[slot].reshape(-1) for state in optimizer.state.values()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr": "match_rms_adamw", "momentum": 0.8, "ns_steps": 3}],
)
def test_muon_equals_torchs(arguments, dtype, train, draw):
    params, batches = draw(MATRICES, dtype=dtype)
    after, opt = train(muon(lr=0.02, **arguments), params, batches)
    renamed = {{"adjust_lr": "adjust_lr_fn"}.get(name, name): value for name, value in arguments.items()}
    expected, optimizer = torch_run(torch.optim.Muon, {"lr": 0.02, **renamed}, params, batches)
    # The directions are equal; torch fuses the last multiplication and addition: three roundings a step.
    assert_near(after, expected, num_roundings=3 * NUM_STEPS)
    assert_equal(opt["momentum_buffer"], [s["momentum_buffer"].reshape(-1) for s in optimizer.state.values()])


SCHEDULED = {
    "adam": (adam, torch.optim.Adam),
    "adamw": (adamw, torch.optim.AdamW),
    "sgd": (sgd, torch.optim.SGD),
    "adagrad": (adagrad, torch.optim.Adagrad),
    "muon": (muon, torch.optim.Muon),
}
CURVES = {
    "lr": lambda t: 0.1 / (t + 2),
    "weight_decay": lambda t: 0.01 * t,
    "momentum": lambda t: 0.9 - 0.001 * t,
    "beta1": lambda t: 0.9 - 0.002 * t,
    "beta2": lambda t: 0.99 + 0.0001 * t,
}
HYPER = {
    "adam": ("lr", "weight_decay", "betas"),
    "adamw": ("lr", "weight_decay", "betas"),
    "sgd": ("lr", "weight_decay", "momentum"),
    "adagrad": ("lr", "weight_decay"),
    "muon": ("lr", "weight_decay", "momentum"),
}


@pytest.mark.parametrize("own", [False, True], ids=["lr from the step", "lr of its own"])
@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_equal_setting_the_group_by_hand(name, own, train, draw):
    ours, twin = SCHEDULED[name]
    params, batches = draw(MATRICES if name == "muon" else SHAPES)
    curves = {h: (CURVES["beta1"], CURVES["beta2"]) if h == "betas" else CURVES[h] for h in HYPER[name]}

    def by_hand(t, group):
        now = {hyper: float(curve(t)) for hyper, curve in CURVES.items()}
        group |= {h: (now["beta1"], now["beta2"]) if h == "betas" else now[h] for h in HYPER[name]}

    start = {"momentum": 0.5} if name == "sgd" else {}
    more = {} if name == "muon" else {"fused": True}
    expected, _ = torch_run(twin, start, params, batches, by_hand, **more)
    after, _ = train(ours(**curves), params, batches, edit=lambda t, _: {"lr": None} if own else {})
    if name == "muon":
        assert_near(after, expected, num_roundings=3 * NUM_STEPS)
    else:
        assert_equal(after, expected)


@pytest.mark.parametrize("factory", [adam, adamw])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_bias_correction_the_moments_are_used_as_they_are(factory, dtype, train, draw):
    params, batches = draw(SHAPES, dtype=dtype)
    after, _ = train(factory(0.01, weight_decay=0.1, bias_correction=False), params, batches)
    expected = []
    for i, p in enumerate(x.double().reshape(-1) for x in params):
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for grads in batches:
            g = grads[i].double().reshape(-1)
            if factory is adam:
                g = g + 0.1 * p
            else:
                p = p - 0.01 * 0.1 * p
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            p = p - 0.01 * m / (v.sqrt() + 1e-8)
        expected.append(p.to(dtype))
    # Per step: the roundings of p, two or three at |p| <= 4, and those of an update of at most 0.01 * 10.
    assert_near(after, expected, num_roundings=4 * NUM_STEPS)
