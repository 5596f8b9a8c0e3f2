"""What a schedule is given and may return, whichever number of an optimizer follows it."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

import fds
from fds.errors import OptimizerError, ScheduleError
from fds.optim import adam, adamw, by_name, sgd
from fds.optim.base import at

T = torch.tensor(3)
VALUES = {
    "torch.where": lambda t: torch.where(t < 3, 0.5, 0.25),
    "an if": lambda t: 0.5 if t < 3 else 0.25,
    "a list": lambda t: [1.0, 0.5, 0.5, 0.25][int(t)],
    "math": lambda t: 2.0 ** math.floor(-(t + 1) / 2),
    "an int": lambda t: 0.25 if t == 3 else 1,
    "numpy": lambda t: numpy.float32(0.25),
    "float16": lambda t: torch.tensor(0.25, dtype=torch.float16),
    "with a graph": lambda t: t.requires_grad_() / 12,
    "a closed form": fds.schedules.warmup_decay(1.0, total_steps=4, warmup_steps=0),
}
BAD = {
    "None": (lambda t: None, "None"),
    "an index": (lambda t: [0.1, 0.2][t], "TypeError"),
    "a vector": (lambda t: t * torch.ones(1), "tensor"),
    "a boolean": (lambda t: True, "True"),
    "a text": (lambda t: "fast", "fast"),
    "booleans": (lambda t: t > 2, "tensor"),
    "a method": (lambda t: t.bit_count(), "AttributeError"),
    "complex": (lambda t: 1j, "1j"),
    "a dict": (lambda t: {0.0: 0.1}[t], "KeyError"),
    "an error of its own": (lambda t: 1 / 0, "ZeroDivisionError"),
    "a NaN": (lambda t: math.nan, "nan"),
    "a NaN of torch": (lambda t: t * math.nan, "nan"),
    "infinity": (lambda t: 1 / (t - t), "inf"),
}


@pytest.mark.parametrize("schedule", VALUES.values(), ids=VALUES)
def test_t_is_a_0d_float64_tensor_and_any_number_is_taken(schedule):
    found = at(schedule, T)
    assert float(found) == 0.25 and not getattr(found, "requires_grad", False)


def test_t_has_one_type_on_every_device_and_belongs_to_the_schedule():
    seen = []
    for device in ("cpu", "meta"):
        step = torch.zeros((), dtype=torch.int64, device=device)
        at(lambda t: (seen.append((t.device.type, t.dtype, t.shape)), t.add_(1))[1], step)
    assert seen == [(device, torch.float64, ()) for device in ("cpu", "meta")]
    assert float(at(lambda t: 0.98**t, T)) == 0.98**3


@pytest.mark.parametrize(("schedule", "word"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("where", ["lr", "beta1", "weight_decay", "momentum"])
def test_a_schedule_that_gives_no_number_is_refused_before_anything_is_written(where, schedule, word):
    optimizer = {
        "lr": lambda: sgd(schedule),
        "beta1": lambda: adam(betas=(schedule, 0.9)),
        "weight_decay": lambda: by_name({"a": sgd(0.1), "*": adamw(0.1, weight_decay=schedule)}),
        "momentum": lambda: sgd(0.1, momentum=schedule),
    }[where]()
    step = fds.compose(fds.donate(), optimizer)(lambda p, b: (p["a"] + p["b"]).sum() * b.mean())
    state = step.init({"a": torch.ones(3), "b": torch.ones(3)})
    before = fds.tree.map(torch.clone, state)
    with pytest.raises(ScheduleError) as error:
        step(state, torch.ones(2))
    assert word in error.value.got and where in error.value.where and "() float64" in error.value.hint
    assert error.value.where.endswith("t = 0")
    assert state.token.spent_at is None
    assert all(torch.equal(a, b) for a, b in zip(fds.tree.leaves(before), fds.tree.leaves(state), strict=True))


def test_what_a_schedule_raised_is_the_cause():
    with pytest.raises(ScheduleError) as error:
        at(lambda t: {}[int(t)], T)
    assert isinstance(error.value.__cause__, KeyError) and error.value.where.endswith("<lambda>, t = 3")


def test_a_number_may_be_a_0d_tensor_which_is_read_once(train, draw):
    params, batches = draw([(3, 2)], num_steps=2)
    rate = torch.tensor(0.5)
    optimizer = adamw(rate, betas=(torch.tensor(0.5), 0.75), weight_decay=torch.tensor(0.25))
    rate.zero_()
    expected, _ = train(adamw(0.5, betas=(0.5, 0.75), weight_decay=0.25), params, batches)
    assert all(torch.equal(a, b) for a, b in zip(train(optimizer, params, batches)[0], expected, strict=True))
    assert str(adamw(torch.tensor(0.5))) == "adamw(lr=0.5)"
    for bad in (torch.tensor([0.5]), torch.tensor(-1.0), torch.tensor(float("nan")), torch.tensor(True)):
        with pytest.raises(OptimizerError):
            adamw(bad)
