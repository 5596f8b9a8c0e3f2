"""Our curves against values recorded from DeepSpeed 0.19.6; tests/golden/generate.py says how."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fds import schedules
from tests.scripts import loaded

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "lr_schedules.json").read_text())["cases"]
WARMUP = {"warmup_num_steps": "warmup_steps", "warmup_min_lr": "start", "warmup_type": "kind"}
CYCLE = {
    "cycle_first_step_size": "first_steps",
    "cycle_second_step_size": "second_steps",
    "cycle_first_stair_count": "first_stairs",
    "cycle_second_stair_count": "second_stairs",
    "decay_step_size": "decay_steps",
}
OURS: dict[str, tuple[Callable, dict[str, str]]] = {  # our factory, and our name for each argument
    "WarmupLR": (schedules.warmup, WARMUP | {"warmup_max_lr": "peak"}),
    "WarmupDecayLR": (schedules.warmup_decay, WARMUP | {"warmup_max_lr": "peak", "total_num_steps": "total_steps"}),
    "WarmupCosineLR": (
        schedules.warmup_cosine,
        WARMUP
        | {"total_num_steps": "total_steps", "warmup_min_ratio": "start_ratio", "cos_min_ratio": "end_ratio"}
        | {"group_lr": "peak"},
    ),
    "OneCycle": (
        schedules.one_cycle,
        CYCLE | {"cycle_min_lr": "min_lr", "cycle_max_lr": "max_lr", "decay_lr_rate": "decay_rate"},
    ),
    "LRRangeTest": (
        schedules.lr_range_test,
        {
            "lr_range_test_min_lr": "start",
            "lr_range_test_step_size": "steps",
            "lr_range_test_step_rate": "rate",
            "lr_range_test_staircase": "staircase",
        },
    ),
}
MOMENTUM = (
    schedules.one_cycle_momentum,
    CYCLE | {"cycle_min_mom": "min_momentum", "cycle_max_mom": "max_momentum", "decay_mom_rate": "decay_rate"},
)


def build(factory, names: dict, case: dict):
    theirs = case["arguments"] | {"group_lr": case["group_lr"]}
    if "warmup_num_steps" in WARMUP.keys() & names.keys():  # as the JSON is read: a logarithm, of at least 2 updates
        theirs = {"warmup_type": "log", **theirs, "warmup_num_steps": max(2, theirs.get("warmup_num_steps", 1000))}
    return factory(**{names[name]: value for name, value in theirs.items() if name in names})


def show(case: dict) -> str:
    return f"{case['class']}-{'-'.join(str(value) for value in case['arguments'].values())}"


def follows(curve, golden: list[float], first_t: int) -> None:
    for t, expected in enumerate(golden, first_t):
        assert math.isclose(curve(t), expected, rel_tol=1e-12), (curve, t)
        on_device = curve(torch.tensor(t))
        assert (on_device.dtype, on_device.shape) == (torch.float64, ())
        assert math.isclose(on_device.item(), expected, rel_tol=1e-12), (curve, t)


@pytest.mark.parametrize("case", CASES, ids=show)
def test_the_learning_rate_is_deepspeeds_at_the_same_t(case):
    factory, names = OURS[case["class"]]
    follows(build(factory, names, case), case["lr"], first_t=-1)


@pytest.mark.parametrize("case", [case for case in CASES if "beta1" in case], ids=show)
def test_the_momentum_is_deepspeeds_at_the_same_t(case):
    momentum = build(*MOMENTUM, case)
    follows(momentum, case["beta1"][1:], first_t=0)
    low, high = case["arguments"].get("cycle_min_mom", 0.8), case["arguments"].get("cycle_max_mom", 0.9)
    assert case["beta1"][0] == low and momentum(-1) == high  # its constructor contradicts its formula; ours does not


@pytest.mark.peers
def test_the_golden_values_are_what_deepspeed_says_now(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    generate = loaded(GOLDEN / "generate.py")
    assert generate.lr_cases() == CASES
    assert generate.loss_scale_cases() == json.loads((GOLDEN / "loss_scale.json").read_text())["cases"]
