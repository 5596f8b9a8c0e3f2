"""The schedules that people take from transformers, against their formulas in torch's LambdaLR and against its own."""

import math
import re
from pathlib import Path

import pytest
import torch

import fds
from fds import schedules

GUIDE = Path(__file__).parents[2] / "docs" / "from-pytorch.md"
PEAK = 3e-3


def sgd():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], PEAK)


def follows(ours, scheduler, num_steps):
    for t in range(num_steps):
        expected = scheduler.get_last_lr()[0]
        assert math.isclose(ours(torch.tensor(float(t), dtype=torch.float64)), expected, rel_tol=1e-12, abs_tol=1e-18)
        scheduler.optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(("warmup", "total"), [(0, 9), (1, 9), (2, 9), (7, 30), (9, 9), (9, 5)])
def test_a_warm_up_and_its_linear_end_are_those_of_transformers(warmup, total):
    rise = lambda t: t / max(1, warmup)
    fall = lambda t: max(0.0, (total - t) / max(1, total - warmup))
    for ours, factor in (
        (schedules.warmup(PEAK, warmup_steps=warmup), lambda t: rise(t) if t < warmup else 1.0),
        (
            schedules.warmup_decay(PEAK, warmup_steps=warmup, total_steps=total),
            lambda t: rise(t) if t < warmup else fall(t),
        ),
    ):
        follows(ours, torch.optim.lr_scheduler.LambdaLR(sgd(), factor), total + 5)


def test_the_first_half_of_warmup_cosine_is_theirs_too():
    curve = schedules.warmup_cosine(PEAK, warmup_steps=100, total_steps=1000)
    follows(curve, torch.optim.lr_scheduler.LambdaLR(sgd(), lambda t: t / 100), 100)


@pytest.mark.peers
def test_the_three_schedules_of_the_guide_are_those_of_transformers():
    import transformers

    block = next(
        code for code in re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S) if "W, T" in code
    )
    here = {"fds": fds, "torch": torch, "math": math, "PEAK": PEAK}
    exec(block, here)
    steps = {"num_warmup_steps": here["W"], "num_training_steps": here["T"]}
    follows(here["linear"], transformers.get_linear_schedule_with_warmup(sgd(), **steps), here["T"])
    follows(here["cosine"], transformers.get_cosine_schedule_with_warmup(sgd(), **steps), here["T"])
    follows(here["constant"], transformers.get_constant_schedule_with_warmup(sgd(), here["W"]), here["T"])
