"""The laws that every optimizer keeps: one table, one battery."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from fds.optim import (
    Segment,
    adagrad,
    adam,
    adamw,
    by_name,
    lamb,
    lion,
    muon,
    onebit_adam,
    onebit_lamb,
    sgd,
    zero_one_adam,
)

OPTIMIZERS = {
    "adam": adam(0.01, weight_decay=0.1),
    "adamw": adamw(0.01, bias_correction=False),
    "sgd": sgd(0.1),
    "sgd_momentum": sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_dampening": sgd(0.1, momentum=0.9, dampening=0.5),
    "sgd_through_zero": sgd(0.1, momentum=lambda t: t * 0.0),
    "adagrad": adagrad(0.1, lr_decay=0.1),
    "lamb": lamb(0.1, weight_decay=0.1),
    "lion": lion(0.01, weight_decay=0.1),
    "muon": muon(0.1),
    "onebit_adam": onebit_adam(0.01, freeze_step=2, weight_decay=0.1),
    "onebit_lamb": onebit_lamb(0.01, freeze_step=2, weight_decay=0.1),
    "zero_one_adam": zero_one_adam(0.01, 3, 1, 1, 2, weight_decay=0.1),
    "by_name": by_name({"p1": adamw(lambda t: 0.1 / (t + 1)), "*": sgd(0.1, momentum=0.9)}),
}
SHAPES = [(6, 42), (9, 7), (31, 5)]
SCALE = torch.tensor(2.0**10)
every = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
in_one_slice = pytest.mark.parametrize("optimizer", list(OPTIMIZERS.values())[:-1], ids=list(OPTIMIZERS)[:-1])


def bits(tensors):
    tensors = [x for x in tensors if x is not None]
    return [x.view({4: torch.int32, 8: torch.int64}[x.element_size()]).tolist() for x in tensors]


def all_bits(params, opt):
    return bits(params), {slot: bits(tensors) for slot, tensors in opt.items()}


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_scaled_by_a_power_of_two_give_the_same_bits(optimizer, dtype, train, draw):
    params, batches = draw(SHAPES, dtype=dtype)
    scaled = train(
        optimizer, params, [[g * SCALE for g in grads] for grads in batches], edit=lambda t, _: {"grad_scale": SCALE}
    )
    assert all_bits(*scaled) == all_bits(*train(optimizer, params, batches))


@every
def test_a_skipped_update_keeps_every_bit_whatever_the_gradients_hold(optimizer, train, draw):
    params, batches = draw(SHAPES, num_steps=6)
    params[0][0] = -0.0
    bad = [[torch.full_like(g, value) for g in batches[0]] for value in (float("nan"), float("inf"))]
    # Updates 0, 1, 2 and two skipped at t = 0 and at t = 2: `step` counts what was applied.
    times, mixed = [0, 0, 1, 2, 2], [bad[0], *batches[:2], bad[1], batches[2]]
    edit = lambda i, _: {
        "step": torch.tensor(times[i]),
        "lr": None,
        "skip": torch.tensor(mixed[i] is bad[0] or mixed[i] is bad[1]),
        "grad_scale": SCALE,
    }
    scaled = [[g * SCALE for g in grads] for grads in mixed]
    assert all_bits(*train(optimizer, params, scaled, edit=edit)) == all_bits(*train(optimizer, params, batches[:3]))


@every
def test_skipping_the_very_first_update_keeps_the_initial_state(optimizer, train, draw):
    params, batches = draw(SHAPES, num_steps=1)
    before = train(optimizer, params, [])
    nan = [[torch.full_like(g, float("nan")) for g in batches[0]]]
    after = train(optimizer, params, nan, edit=lambda t, _: {"skip": torch.tensor(True)})
    assert all_bits(*after) == all_bits(*before)


@every
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_converted_before_anything_else(optimizer, low, train, draw):
    params, batches = draw(SHAPES, num_steps=5)
    edit = lambda t, _: {"grad_scale": SCALE}
    rounded = [[g.to(low) for g in grads] for grads in batches]
    converted = [[g.float() for g in grads] for grads in rounded]
    assert all_bits(*train(optimizer, params, rounded, edit=edit)) == all_bits(
        *train(optimizer, params, converted, edit=edit)
    )


@every
@pytest.mark.parametrize("skip", [False, True])
def test_out_receives_the_new_parameters(optimizer, skip, train, draw):
    params, batches = draw(SHAPES, num_steps=2)
    out = [torch.full((p.numel(),), 7.0, dtype=torch.bfloat16) for p in params]
    after, _ = train(optimizer, params, batches, edit=lambda t, _: {"out": out, "skip": torch.tensor(skip)})
    assert all(torch.equal(low, p.bfloat16()) for low, p in zip(out, after, strict=True))


@in_one_slice
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=5))
def test_parameters_that_share_a_slice_are_updated_as_if_each_had_its_own(optimizer, train, draw, shapes):
    params, batches = draw(shapes, num_steps=5, dtype=torch.float64)
    apart, _ = train(optimizer, params, batches)
    together, _ = train(optimizer, params, batches, together=True)
    for a, b in zip(apart, together, strict=True):
        # A kernel's vectors and its tail round differently: some ten roundings a step.
        assert ((a - b).abs() <= 50 * torch.finfo(a.dtype).eps * a.abs().clamp(min=1.0)).all()


@every
def test_slots_are_flat_and_follow_the_parameters(optimizer, draw, train):
    params, batches = draw(SHAPES, num_steps=1, dtype=torch.float64)
    _, opt = train(optimizer, params, batches)
    for tensors in opt.values():
        assert len(tensors) == len(params)
        for slot, p in zip(tensors, params, strict=True):
            number = optimizer.phases is not None and slot.shape == (1,) and slot.dtype == torch.float64
            assert number or slot is None or (slot.shape == (p.numel(),) and slot.dtype == p.dtype)


@every
def test_nothing_to_update_is_nothing_to_do(optimizer):
    keywords = {"lr": None, "grad_scale": None, "skip": None, "segments": [], "axes": ()}
    assert optimizer.update([], {}, [], step=torch.tensor(0), **keywords) == ([], {})


@in_one_slice
def test_slices_of_two_dtypes_are_updated_in_one_call(optimizer, train, draw):
    params, batches = draw(SHAPES, num_steps=3)
    mixed = lambda tensors: [tensors[0].double(), *tensors[1:]]
    after, _ = train(optimizer, mixed(params), [mixed(grads) for grads in batches])
    alone, _ = train(optimizer, params[1:], [grads[1:] for grads in batches])
    assert [p.dtype for p in after] == [torch.float64, torch.float32, torch.float32]
    assert bits(after[1:]) == bits(alone)


SCHEDULES = {
    "adam": lambda f: adam(f, betas=(f, f), weight_decay=f),
    "adamw": lambda f: adamw(f, betas=(0.9, f)),
    "sgd": lambda f: sgd(f, momentum=f, weight_decay=f, dampening=0.5),
    "adagrad": lambda f: adagrad(f, weight_decay=f),
    "lamb": lambda f: lamb(f, betas=(f, f), weight_decay=f),
    "lion": lambda f: lion(f, betas=(f, f), weight_decay=f),
    "muon": lambda f: muon(f, weight_decay=f, momentum=f),
    "onebit_adam": lambda f: onebit_adam(f, betas=(f, f), weight_decay=f),
    "onebit_lamb": lambda f: onebit_lamb(f, betas=(f, f), weight_decay=f),
    "zero_one_adam": lambda f: zero_one_adam(f, betas=(f, f), weight_decay=f),
    "sgd_dampening": lambda f: sgd(f, momentum=0.9, dampening=0.5),
}


def update_on_meta(optimizer, *, given_lr):
    """Update meta tensors, which have no values: what would make the host wait for a device raises."""
    meta = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device="meta")
    segments, step = [[Segment("p", (4, 3), 0, 12)]], meta((), dtype=torch.int64)
    params = [meta(12)]
    opt = optimizer.init(segments, params=params)
    assert all(x.device.type == "meta" for tensors in opt.values() for x in tensors)
    optimizer.update(
        [meta(12, dtype=torch.bfloat16)],
        opt,
        params,
        step=step,
        skip=meta((), dtype=torch.bool),
        axes=(),
        lr=optimizer.learning_rate(step) if given_lr else None,
        grad_scale=meta(()),
        segments=segments,
        out=[meta(12, dtype=torch.bfloat16)],
    )


@pytest.mark.parametrize("build", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("given_lr", [False, True])
def test_no_value_on_a_device_is_read(build, given_lr):
    update_on_meta(build(lambda t: 1 / (t + 2)), given_lr=given_lr)


@pytest.mark.parametrize("kernel", ["_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"])
def test_a_fused_kernel_gets_device_values_as_tensors(kernel, monkeypatch):
    build = {
        "_fused_adam_": adam,
        "_fused_adamw_": adamw,
        "_fused_sgd_": lambda f: sgd(f, 0.9),
        "_fused_adagrad_": adagrad,
    }
    calls = []
    monkeypatch.setattr(torch.ops.aten, kernel, lambda *lists, **options: calls.append((lists, options)))
    update_on_meta(build[kernel](lambda t: 1 / (t + 2)), given_lr=True)
    ((lists, options),) = calls
    for name in ("lr", "grad_scale", "found_inf"):
        assert options[name].dtype == torch.float32 and options[name].shape == () and options[name].is_meta
    assert not options.get("is_first_step") and all(x.is_meta for xs in lists for x in xs)


@pytest.mark.parametrize("value", [0.25, lambda t: 0.25, lambda t: 0.25 + 0 * t, lambda t: torch.tensor(0.25)])
def test_learning_rate_is_a_float64_scalar_on_the_steps_device(value):
    rate = adam(value).learning_rate(torch.tensor(3))
    assert rate.dtype == torch.float64 and rate.shape == () and rate.item() == 0.25
    if not callable(value):
        assert adam(value).learning_rate(torch.empty((), device="meta")).device.type == "meta"


@given(st.integers(0, 10**6))
def test_a_schedule_is_evaluated_at_the_number_of_updates_applied(t):
    assert sgd(lambda t: 1 / (t + 1)).learning_rate(torch.tensor(t)).item() == pytest.approx(1 / (t + 1), rel=1e-6)
    assert math.isclose(sgd(lambda t: 0.5).learning_rate(torch.tensor(t)).item(), 0.5)
