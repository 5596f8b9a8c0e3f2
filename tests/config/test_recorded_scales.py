"""Loss scales of float16 trainings by a JSON against those of DeepSpeed 0.19.6: tests/golden/float16_scales.py."""

import json
from pathlib import Path

import pytest

import fds
from tests.peers.float16 import by_fds

CASES = json.loads((Path(__file__).parents[1] / "golden" / "float16_scales.json").read_text())["cases"]


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: "{ranks}-{gradient_accumulation_steps}-{stage}".format(
        **case, **case["json"], **case["json"]["zero_optimization"]
    ),
)
def test_the_loss_scale_is_deepspeeds_at_every_step(case):
    first, *others = fds.simulate(lambda: by_fds(case), case["ranks"])
    assert first == list(map(tuple, case["steps"])) and others == [first] * (case["ranks"] - 1)


def test_the_recorded_cases_overflow_and_accumulate():
    assert {case["ranks"] for case in CASES} == {1, 2}
    assert {case["json"]["zero_optimization"]["stage"] for case in CASES} == {1, 2, 3}
    assert sum(any(skipped for _, skipped in case["steps"]) for case in CASES) > len(CASES) // 3
    assert len({case["json"]["gradient_accumulation_steps"] for case in CASES}) > 5
