"""The loss scale of random configurations in float16, step by step beside the installed DeepSpeed."""

import json
from pathlib import Path

import pytest

import fds
from tests.peers.float16 import by_fds, configurations, train

GOLDEN = Path(__file__).parents[1] / "golden" / "float16_scales.json"
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.peers
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_scale_is_deepspeeds_at_every_step(ranks, tmp_path):
    cases = configurations(seed=10 + ranks, number=40)
    theirs = train(cases, ranks, tmp_path)
    ours = [fds.simulate(lambda case=case: by_fds(case), ranks)[0] for case in cases]
    apart = [case for case, one, other in zip(cases, ours, theirs, strict=True) if one != other]
    assert not apart
    assert {case["json"]["gradient_accumulation_steps"] for case in cases} == set(range(1, 9))
    assert sum(any(skipped for _, skipped in run) for run in ours) > len(cases) // 3


@pytest.mark.peers
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_recorded_scales_are_what_deepspeed_gives_now(ranks, tmp_path):
    cases = [case for case in json.loads(GOLDEN.read_text())["cases"] if case["ranks"] == ranks]
    runs = train([{"json": case["json"], "gain": case["gain"]} for case in cases], ranks, tmp_path)
    assert runs == [list(map(tuple, case["steps"])) for case in cases]
