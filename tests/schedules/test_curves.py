"""What every curve promises, whatever its formula, and what each formula promises beyond DeepSpeed's values."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fds import schedules
from fds.errors import FdsError, ScheduleError

CURVES = [
    schedules.constant(0.3),
    schedules.warmup(1e-3, warmup_steps=7, kind="log"),
    schedules.warmup(1e-3, warmup_steps=0, start=1e-4),
    schedules.warmup(1e-3, warmup_steps=7, start=1e-4, kind="linear"),
    schedules.warmup_decay(1e-3, total_steps=20, warmup_steps=7, kind="log"),
    schedules.warmup_decay(1e-3, total_steps=5, warmup_steps=7, kind="linear"),
    schedules.warmup_cosine(3e-4, warmup_steps=5, total_steps=30),
    schedules.warmup_cosine(3e-4, warmup_steps=0, total_steps=30, start_ratio=0.5, end_ratio=0.0),
    schedules.one_cycle(1e-4, 1e-2, first_steps=7, second_steps=12, decay_steps=3, decay_rate=0.1),
    schedules.one_cycle(1e-4, 1e-2, first_steps=7, first_stairs=3, second_stairs=0),
    schedules.one_cycle_momentum(first_steps=7, second_steps=12, decay_steps=3, decay_rate=0.001),
    schedules.lr_range_test(steps=4),
    schedules.lr_range_test(1e-2, steps=4, rate=0.5, staircase=True),
]
every_curve = pytest.mark.parametrize("curve", CURVES, ids=str)

rates = st.floats(0, 10)
counts = st.integers(0, 50)
sizes = st.integers(1, 50)
kinds = st.sampled_from(["log", "linear"])
stairs = st.integers(0, 8)
halves = {
    "first_steps": sizes,
    "second_steps": st.none() | sizes,
    "first_stairs": stairs,
    "second_stairs": st.none() | stairs,
}
curves = st.one_of(
    st.builds(schedules.constant, rates),
    st.builds(schedules.warmup, rates, warmup_steps=counts, start=rates, kind=kinds),
    st.builds(schedules.warmup_decay, rates, total_steps=counts, warmup_steps=counts, start=rates, kind=kinds),
    st.builds(
        schedules.warmup_cosine,
        rates,
        warmup_steps=counts,
        total_steps=counts,
        start_ratio=st.floats(0, 1),
        end_ratio=st.floats(0, 1),
        kind=kinds,
    ),
    st.builds(schedules.one_cycle, rates, rates, **halves, decay_steps=counts, decay_rate=rates),
    st.builds(schedules.one_cycle_momentum, st.floats(0, 1), st.floats(0, 1), **halves, decay_steps=counts),
    st.builds(schedules.lr_range_test, rates, steps=sizes, rate=rates, staircase=st.booleans()),
)


class NothingLeavesTheDevice(TorchDispatchMode):
    """Refuse every operator that reads a value on the host or mixes devices (a mixed one copies, and so waits)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read on the host"
        out = func(*args, **(kwargs or {}))
        seen = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
        assert seen <= {"meta"}, f"{func} touches {seen}"
        if func in (torch.ops.aten.where.ScalarOther, torch.ops.aten.where.ScalarSelf):
            raise AssertionError("where() copies its scalar to the device")
        return out


@every_curve
def test_a_tensor_is_answered_by_a_tensor_without_waiting_for_the_device(curve):
    t = torch.tensor(3, device="meta")
    with NothingLeavesTheDevice():
        value = curve(t)
    assert (value.dtype, value.shape, value.device.type) == (torch.float64, (), "meta")


@every_curve
def test_an_integer_and_a_tensor_agree_from_before_the_start_to_past_the_end(curve):
    for t in range(-1, 80):
        assert type(curve(t)) is float
        assert curve(t) == curve(torch.tensor(t)).item() == curve(torch.tensor(t, dtype=torch.int32)).item()


@given(curves, st.integers(-1, 10**9))
def test_any_curve_is_finite_and_the_same_for_an_integer_and_a_tensor(curve, t):
    assert math.isfinite(curve(t))
    assert curve(t) == curve(torch.tensor(t)).item()


@every_curve
def test_a_tensor_of_many_t_is_answered_elementwise(curve):
    # to rounding: the vectorised logarithm and cosine differ from the scalar ones in the last bit
    t = torch.arange(-1, 60)
    each = torch.tensor([curve(int(i)) for i in t], dtype=torch.float64)
    torch.testing.assert_close(curve(t), each, rtol=1e-14, atol=1e-17)


@every_curve
def test_the_default_device_does_not_matter_to_an_integer(curve):
    with torch.device("meta"):
        value = curve(3)
    assert value == curve(3)


@every_curve
def test_a_curve_prints_as_the_call_that_makes_an_equal_curve(curve):
    again = eval(repr(curve), dict(vars(schedules)))
    assert again == curve and hash(again) == hash(curve) and again(5) == curve(5)
    assert [other for other in CURVES if other == curve] == [curve]


@every_curve
def test_a_curve_survives_copy_and_pickle(curve):
    for again in (copy.deepcopy(curve), pickle.loads(pickle.dumps(curve))):
        assert again == curve and again(5) == curve(5)


def test_arguments_at_their_defaults_are_not_printed_but_for_the_kind_and_do_not_tell_curves_apart():
    assert schedules.warmup(1e-3) == schedules.warmup(peak=0.001, warmup_steps=1000, kind="linear")
    assert repr(schedules.warmup(1e-3, warmup_steps=1000)) == "warmup(0.001, kind='linear')"
    shown = "warmup_cosine(0.0003, warmup_steps=100, total_steps=10000, kind='linear')"
    assert repr(schedules.warmup_cosine(3e-4, total_steps=10_000, warmup_steps=100)) == shown


@given(rates, rates, counts, kinds)
def test_a_warm_up_begins_exactly_at_its_start_and_ends_exactly_at_its_peak(peak, start, steps, kind):
    curve = schedules.warmup(peak, warmup_steps=steps, start=start, kind=kind)
    assert curve(-1) == start
    assert curve(0) == (start if steps else peak)
    assert curve(max(2, steps)) == curve(10**6) == peak


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40))
def test_every_stair_of_a_climb_begins_on_time(first, second, n):
    curve = schedules.one_cycle(0.0, 1.0, first_steps=first, second_steps=second, first_stairs=n)
    for b in range(first + 1):
        assert curve(b - 1) == (b * n // first) / n
    for b in range(first, first + second + 1):
        assert curve(b - 1) == ((first + second - b) * n // second) / n


@every_curve
def test_a_curve_serves_torchs_own_scheduler(curve):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, curve)
    for t in range(20):
        assert scheduler.get_last_lr() == [curve(t)]
        optimizer.step()
        scheduler.step()


REFUSED: list[tuple[Callable, tuple, dict, str]] = [
    (schedules.warmup, (1e-3,), {"warmup_steps": -1}, "warmup_steps=-1"),
    (schedules.warmup, (1e-3,), {"warmup_steps": 2.5}, "warmup_steps=2.5"),
    (schedules.warmup, (1e-3,), {"warmup_steps": None}, "warmup_steps=None"),
    (schedules.warmup, ("3e-4",), {}, "peak='3e-4'"),
    (schedules.warmup, (float("nan"),), {}, "peak=nan"),
    (schedules.warmup, (1e-3,), {"kind": "liner"}, "did you mean 'linear'?"),
    (schedules.warmup, (1e-3, 1000), {}, "too many positional arguments"),
    (schedules.warmup_decay, (1e-3,), {"total_steps": 10, "kind": "lgo"}, "did you mean 'log'?"),
    (schedules.warmup_decay, (1e-3,), {}, "warmup_decay(peak, *, total_steps, "),
    (schedules.warmup_cosine, (1e-3,), {"warmup_steps": 4}, "total_steps"),
    (schedules.warmup_cosine, (1e-3,), {"total_step": 9}, "did you mean 'total_steps'?"),
    (schedules.one_cycle, (0.1, 1.0), {"first_steps": 0}, "first_steps=0, second_steps=0"),
    (schedules.one_cycle, (0.1, 1.0), {"second_steps": -1}, "second_steps=-1"),
    (schedules.one_cycle_momentum, (), {"first_steps": 0}, "first_steps=0, second_steps=0"),
    (schedules.lr_range_test, (), {"steps": 0}, "steps=0"),
    (schedules.constant, (float("inf"),), {}, "value=inf"),
]


@pytest.mark.parametrize(("factory", "args", "kwargs", "told"), REFUSED)
def test_a_bad_argument_is_refused_and_named(factory, args, kwargs, told):
    with pytest.raises(ScheduleError) as refusal:
        factory(*args, **kwargs)
    assert isinstance(refusal.value, FdsError)
    assert told in str(refusal.value)


def test_a_cycle_without_a_descent_ends_below_its_peak_as_deepspeeds_does():
    rate = schedules.one_cycle(0.25, 1.0, first_steps=3, second_steps=0)
    assert [rate(t) for t in range(-1, 5)] == [0.25, 0.5, 0.75, 0.25, 0.25, 0.25]
