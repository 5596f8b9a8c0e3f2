"""Losses of 20 steps by a JSON against those that DeepSpeed 0.19.6 gave; tests/golden/config_losses.py says how."""

import json
from pathlib import Path

import pytest

import fds
from tests.peers import rounding
from tests.peers.training import RANKS, STEPS, by_fds

CASES = json.loads((Path(__file__).parents[1] / "golden" / "config_losses.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_json_trains_as_it_did_under_deepspeed(case):
    ours, *others = fds.simulate(lambda: by_fds(case["json"]), RANKS)
    assert others == [ours] * (RANKS - 1) and len(ours.losses) == STEPS
    assert rounding.distance(ours.lrs, case["lrs"]) <= 1e-12  # float64, a handful of operations
    assert rounding.beyond(case["json"], ours.losses, case["losses"]) <= 1
    assert rounding.beyond(case["json"], ours.norms, case["norms"]) <= 1


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"zero_optimization": {"stage": 3}}, True),
        ({"gradient_clipping": 1.401}, False),
        ({"scheduler": {}}, False),
        ({"bf16": {"enabled": True}}, False),
    ],
)
def test_what_a_json_says_moves_losses_further_than_rounding_and_a_stage_does_not(changes, same):
    case = next(case for case in CASES if case["name"] == "1 clip accumulate cosine")
    run = fds.simulate(lambda: by_fds(case["json"] | changes), RANKS)[0]
    assert (rounding.beyond(case["json"], run.losses, case["losses"]) <= 1) == same


@pytest.mark.parametrize("name", ["2 bf16", "3 bf16 float sums"])
def test_in_16_bits_a_rate_that_is_larger_by_a_five_hundredth_moves_losses_further_than_rounding(name):
    case = next(case for case in CASES if case["name"] == name)
    run = fds.simulate(lambda: by_fds(larger(case["json"], "lr", "warmup_max_lr")), RANKS)[0]
    assert rounding.beyond(case["json"], run.losses, case["losses"]) > 1


def larger(json, *names):
    """Return a JSON whose numbers of these names are larger by a five hundredth."""
    return {
        name: larger(value, *names) if isinstance(value, dict) else value * 1.002 if name in names else value
        for name, value in json.items()
    }
