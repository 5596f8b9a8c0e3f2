"""fds beside the installed DeepSpeed: the same JSON drives both, on two gloo ranks each."""

import json
from pathlib import Path

import pytest

from tests.peers import rounding
from tests.peers.cases import BOUND, CASES, REPAIRED
from tests.peers.worker import train

GOLDEN = Path(__file__).parents[1] / "golden"
MORE_ROUNDING = ("2 bf16 float messages", "3 bf16 float messages")
MEANT = ("2 bf16 float sums", "1 bf16 float sums offloaded")  # differ because DeepSpeed does not do what the JSON says
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def fds_runs(tmp_path_factory):
    return train("fds", tmp_path_factory.mktemp("runs") / "fds.json")


@pytest.fixture(scope="module")
def deepspeed_runs(tmp_path_factory):
    return train("deepspeed", tmp_path_factory.mktemp("runs") / "deepspeed.json")


def theirs(name, deepspeed_runs):
    """Return DeepSpeed's run; where it begins with an empty update, the one without it."""
    return deepspeed_runs.get(f"{name}{REPAIRED}", deepspeed_runs[name])


def assert_same(json, one, other):
    assert rounding.beyond(json, one.losses, other.losses) <= 1
    assert rounding.beyond(json, one.norms, other.norms) <= 1


@pytest.mark.peers
@pytest.mark.parametrize("name", [name for name in CASES if name not in MORE_ROUNDING + MEANT])
def test_losses_and_norms_agree_to_rounding(name, fds_runs, deepspeed_runs):
    assert_same(CASES[name], fds_runs[name], theirs(name, deepspeed_runs))


@pytest.mark.peers
@pytest.mark.parametrize("name", CASES)
def test_every_update_has_the_same_learning_rate(name, fds_runs, deepspeed_runs):
    assert rounding.distance(fds_runs[name].lrs, deepspeed_runs[name].lrs) <= 1e-12  # a handful of operations, float64


@pytest.mark.peers
@pytest.mark.parametrize("name", MORE_ROUNDING)
def test_float_messages_are_added_unrounded_to_sums_in_bfloat16(name, fds_runs, deepspeed_runs):
    # DeepSpeed rounds what arrives, and again what it adds: half a unit more at most for every microbatch but the first
    one, other = fds_runs[name], deepspeed_runs[name]
    micro = CASES[name]["gradient_accumulation_steps"]
    assert 0 < rounding.distance(one.norms[:1], other.norms[:1]) <= (micro - 1) ** 0.5 * rounding.ULP / 2
    assert rounding.distance(one.losses, other.losses) <= rounding.ULP


@pytest.mark.peers
def test_sums_in_float32_at_stage_2_are_those_of_stage_3_and_deepspeed_has_none(fds_runs, deepspeed_runs):
    asked = CASES["2 bf16 float sums"]
    assert deepspeed_runs["2 bf16 float sums"] == deepspeed_runs["2 bf16 sums"]
    assert_same(asked, fds_runs["2 bf16 float sums"], deepspeed_runs["3 bf16 float sums"])
    assert rounding.distance(
        fds_runs["2 bf16 float sums"].norms[:1], fds_runs["2 bf16 sums"].norms[:1]
    ) > rounding.of_a_step(asked)


@pytest.mark.peers
def test_offloaded_sums_in_float32_at_stage_1_are_added_among_ranks_and_deepspeeds_are_not(fds_runs, deepspeed_runs):
    name = "1 bf16 float sums"
    assert_same(CASES[name], fds_runs[f"{name} offloaded"], deepspeed_runs[name])
    apart = rounding.distance(deepspeed_runs[f"{name} offloaded"].norms[:1], deepspeed_runs[name].norms[:1])
    assert apart > 0.1  # the gradient of half of the rows instead of all: no rounding


@pytest.mark.peers
def test_at_stage_0_in_bfloat16_deepspeed_begins_adam_with_an_empty_update(deepspeed_runs):
    apart = {
        name: rounding.beyond(CASES[name], deepspeed_runs[name].losses, deepspeed_runs[f"{name}{REPAIRED}"].losses)
        for name in CASES
        if name.startswith("0 bf16") and f"{name}{REPAIRED}" in deepspeed_runs
    }
    assert apart["0 bf16 sgd"] == 0  # heavy-ball momentum takes nothing from gradients of 0
    assert min(apart["0 bf16"], apart["0 bf16 clip warm"]) > 1


@pytest.mark.peers
def test_the_recorded_losses_are_what_deepspeed_gives_now(deepspeed_runs):
    for case in json.loads((GOLDEN / "config_losses.json").read_text())["cases"]:
        run = deepspeed_runs[case["name"]]
        assert case["json"] == CASES[case["name"]] and case["lrs"] == run.lrs
        assert rounding.beyond(case["json"], case["losses"], run.losses) <= 1, case["name"]
        assert rounding.beyond(case["json"], case["norms"], run.norms) <= 1, case["name"]


def test_each_stage_meets_clipping_with_accumulation_and_a_schedule_in_each_dtype():
    for stage in range(4):
        for dtype in ({"bf16"}, set[str]()):
            met = [
                case
                for case in CASES.values()
                if case["gradient_accumulation_steps"] > 1
                and "scheduler" in case
                and case.get("gradient_clipping", 1.0) > 0
                and dtype == {"bf16"} & case.keys()
            ]
            assert any(case["zero_optimization"]["stage"] == stage for case in met), (stage, dtype)
    assert {case["optimizer"]["type"] for case in CASES.values()} == {"AdamW", "Adam", "Adagrad", "SGD"}
    assert {case["scheduler"]["type"] for case in CASES.values() if "scheduler" in case} == {
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        "OneCycle",
        "LRRangeTest",
    }
    assert {case.get("gradient_clipping", "absent") for case in CASES.values()} == {"absent", 0.0, BOUND}
