"""Schedules of difficulty against DeepSpeed 0.19.6's, and learning rates by tokens against sums by hand."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from fds import schedules
from fds.errors import ScheduleError
from tests.scripts import loaded

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "difficulties.json").read_text())["cases"]
SCHEDULES = loaded(GOLDEN / "generate.py").difficulty_schedules()


def values_of(runs: str) -> list[int]:
    pairs = (run.split("*") for run in runs.split())
    return [int(value) for value, count in pairs for _ in range(int(count))]


def ours(config):
    numbers, kind = config.get("schedule_config", {}), config["schedule_type"]
    if kind == "custom":
        return config["values"].__getitem__
    if kind == "fixed_discrete":
        return schedules.fixed_discrete(numbers["difficulty"], numbers["max_step"])
    sizes = [config["min_difficulty"], config["max_difficulty"], numbers["total_curriculum_step"]]
    options = {"degree": numbers["root_degree"]} if kind == "fixed_root" else {}
    return getattr(schedules, kind)(*sizes, difficulty_step=numbers["difficulty_step"], **options)


def floored(config, values):
    """Return values of 0.19.6 as 0.19.8 has them: never below the least, rounded up to a multiple."""
    if "difficulty_step" not in config.get("schedule_config", {}):
        return values
    multiple = config["schedule_config"]["difficulty_step"]
    lowest = -(-config["min_difficulty"] // multiple) * multiple
    return [min(max(value, lowest), config["max_difficulty"]) for value in values]


def test_two_thousand_random_schedules_are_deepspeeds_as_functions_and_told_of_one_step_after_the_other():
    raised = set()
    for case, (config, steps) in zip(CASES, SCHEDULES, strict=True):
        values, difficulty = values_of(case["values"]), ours(config)
        assert [difficulty(t) for t in steps] == floored(config, values), config
        stays = values_of(case.get("stays", case["values"]))
        staying = schedules.stay_at(difficulty, config["max_difficulty"])
        assert [staying(t) for t in steps] == floored(config, stays), config
        assert staying(steps[3]) == floored(config, stays)[3]  # in any order
        if floored(config, values) != values:
            raised.add(config["schedule_type"])
            assert config["min_difficulty"] % config["schedule_config"]["difficulty_step"]
    assert len(CASES) == 2000 and raised == {"fixed_linear", "fixed_root"}


def test_what_0_19_6_rounds_to_nothing_begins_at_the_first_multiple_that_is_not_below_the_least():
    linear = schedules.fixed_linear(4, 32, 12, difficulty_step=8)
    assert [linear(t) for t in range(1, 13)] == [8, 8, 8, 8, 8, 16, 16, 16, 24, 24, 24, 32]  # 0, 8, 8, ... in 0.19.6
    assert schedules.fixed_linear(4, 6, 10, difficulty_step=8)(1) == 6  # and never above the greatest


def test_a_degree_far_below_1_stays_at_the_greatest_for_good():
    power = schedules.fixed_root(2, 8, 10, degree=1e-3)
    assert [power(t) for t in (1, 9, 10, 11, 30, 10**9)] == [2, 2, 8, 8, 8, 8]
    assert power.formula.changes() == [10]


def test_the_expected_difficulties_of_deepspeeds_own_tests():
    discrete = schedules.fixed_discrete([1, 2, 3, 4, 5], [2, 4, 6, 8])
    assert [discrete(t) for t in range(1, 11)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    linear = schedules.fixed_linear(2, 10, 8, difficulty_step=2)
    assert [linear(t) for t in range(1, 11)] == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]


@pytest.mark.parametrize(
    "difficulty",
    [
        schedules.fixed_linear(8, 20, 7, difficulty_step=8),  # 20 is reached in step 11, where the line would be at 24
        schedules.fixed_root(3, 50, 13, degree=3),
        schedules.fixed_discrete([9, 2, 2, 30], [3, 5, 11]),
        schedules.stay_at(schedules.fixed_discrete([1, 12, 3, 7], [2, 5, 9]), 12),
    ],
    ids=repr,
)
def test_a_rate_by_tokens_is_asked_at_the_sum_of_the_lengths_of_all_calls_before(difficulty):
    curve = schedules.by_tokens(schedules.warmup(1.0, warmup_steps=40), difficulty, 24)
    tokens = 0
    for t in range(30):
        want = min(tokens / 24 / 40, 1.0)
        assert curve(t) == want and curve(torch.tensor(t)).item() == want
        tokens += min(difficulty(t + 1), 24)
    assert curve(-1) == 0 and schedules.by_tokens(lambda t: t, difficulty, 24)(-1) == -1
    custom = schedules.by_tokens(lambda t: t, lambda t: difficulty(t), 24, until=40)
    assert [custom(t) for t in (0, 9, 33, 99)] == [
        schedules.by_tokens(lambda t: t, difficulty, 24)(t) for t in (0, 9, 33, 99)
    ]
    assert torch.equal(curve(torch.arange(-1, 9)), torch.stack([curve(torch.tensor(t)) for t in range(-1, 9)]))


def test_a_table_of_tokens_is_exact_over_long_runs():
    total = 10**9
    at = schedules.by_tokens(lambda t: t, schedules.fixed_linear(64, 2048, total, difficulty_step=64), 2048)
    starts = [1, *(-(-k * total // 31) for k in range(1, 32)), total + 6]  # of the levels 64, 128, ..., 2048
    tokens = sum(64 * (k + 1) * (starts[k + 1] - starts[k]) for k in range(32))
    assert at(total + 5) * 2048 == tokens


@pytest.mark.parametrize("until", [None, 60])
def test_rates_by_tokens_of_layers_are_asked_by_the_sum_of_what_layers_compute(until):
    kept = schedules.fixed_linear(3, 16, 50, difficulty_step=3)
    schedule = kept if until is None else lambda t: kept(t)
    at = schedules.by_layer_tokens(lambda t: t, schedule, 16, layers=3, total=7, until=until)
    tokens = 0
    for t in range(80):
        assert at(t) == tokens / (7 * 16)
        tokens += 3 * min(kept(t), 16) + 4 * 16


def test_a_schedule_is_a_value():
    made = schedules.fixed_root(8, 64, 20, degree=2, difficulty_step=8)
    assert made == schedules.fixed_root(8, 64, 20, difficulty_step=8) and hash(made) == hash(
        pickle.loads(pickle.dumps(made))
    )
    assert repr(schedules.stay_at(made, 64)) == "stay_at(fixed_root(8, 64, 20, difficulty_step=8), 64)"
    assert (
        schedules.fixed_discrete([1, 2], [5])
        == schedules.fixed_discrete((1, 2), (5,))
        != schedules.fixed_discrete((1,), ())
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: schedules.fixed_linear(8, 4, 10), "least=8, greatest=4"),
        (lambda: schedules.fixed_linear(8, 16, 0), "total=0"),
        (lambda: schedules.fixed_linear(8, 16, 10, difficulty_step=0), "difficulty_step=0"),
        (lambda: schedules.fixed_linear(-8, 16, 10), "least=-8"),
        (lambda: schedules.fixed_linear(8.5, 16, 10), "least=8.5"),
        (lambda: schedules.fixed_linear(8, 16), "total"),
        (lambda: schedules.fixed_root(8, 16, 10, degree=0), "degree=0"),
        (lambda: schedules.fixed_root(8, 16, 10, degree=float("nan")), "degree=nan"),
        (lambda: schedules.fixed_discrete([], []), r"\(\)"),
        (lambda: schedules.fixed_discrete([1, 2.5], [4]), "2.5"),
        (lambda: schedules.fixed_discrete(3, [4]), "3"),
        (lambda: schedules.fixed_discrete([1, 2], [4, 5]), "2 difficulties"),
        (lambda: schedules.fixed_discrete([1, 2], [-1]), "2 difficulties"),
        (lambda: schedules.fixed_discrete([1, 2, 3], [5, 4]), r"\(5, 4\)"),
        (lambda: schedules.fixed_linear(8, 16, 10)(-1), "-1"),
        (lambda: schedules.fixed_linear(8, 16, 10)(1.5), "1.5"),
        (lambda: schedules.stay_at(8, 16), "8"),
        (lambda: schedules.stay_at(lambda t: 8, -1), "greatest=-1"),
        (lambda: schedules.by_tokens(0.1, schedules.fixed_linear(8, 16, 10), 16), "0.1"),
        (lambda: schedules.by_tokens(lambda t: t, schedules.fixed_linear(8, 16, 10), 0), "0"),
        (lambda: schedules.by_tokens(lambda t: t, 16, 16), "16"),
        (lambda: schedules.by_tokens(lambda t: t, lambda t: 16, 16), "until"),
        (lambda: schedules.by_tokens(lambda t: t, lambda t: t - 3, 16, until=9), r"difficulty\(1\) = -2"),
        (lambda: schedules.by_layer_tokens(lambda t: t, lambda t: 0, 16, layers=1, total=2, until=9), r"kept\(0\) = 0"),
        (lambda: schedules.by_layer_tokens(lambda t: t, lambda t: 8, 16, layers=1, total=2), "until"),
        (lambda: schedules.by_layer_tokens(lambda t: t, 8, 16, layers=1, total=2), "8"),
        (lambda: schedules.by_layer_tokens(lambda t: t, lambda t: 8, 16, layers=3, total=2), "layers=3, total=2"),
    ],
)
def test_bad_input_is_refused_with_what_was_given(make, words):
    with pytest.raises(ScheduleError, match=words):
        make()


@pytest.mark.peers
def test_the_golden_values_are_what_deepspeed_says_now(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert loaded(GOLDEN / "generate.py").difficulty_cases() == CASES
