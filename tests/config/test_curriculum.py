"""The legacy curriculum and the schedules of difficulty, as records."""

import pytest

from fds.config.keys.data import CurriculumConfig, CurriculumScheduleConfig
from fds.errors import ConfigError

EXAMPLE = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 1024,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 40000, "difficulty_step": 8},
}


def test_the_documented_example_comes_back_as_it_went_in():
    config = CurriculumConfig.from_dict(EXAMPLE)
    assert config.to_dict() == EXAMPLE and config["schedule_config.total_curriculum_step"] == 40000


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"enabled": "yes"}, "enabled"),
        ({"min_difficulty": 0}, "min_difficulty"),
        ({"schedule_type": "fixed_cube"}, "schedule_type"),
        ({"total_curriculum_step": 10}, "total_curriculum_step"),
        ({"schedule_config": {"total_curriculum_step": "10"}}, "schedule_config.total_curriculum_step"),
        ({"schedule_config": {"total_curriculum_steps": 10}}, "schedule_config.total_curriculum_steps"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        CurriculumConfig.from_dict(wrong)
    assert refused.value.where == where


def test_lengths_that_would_shrink_are_refused():
    with pytest.raises(ConfigError) as refused:
        CurriculumConfig.from_dict({**EXAMPLE, "min_difficulty": 2048})
    assert refused.value.where == "min_difficulty, max_difficulty"
    assert CurriculumConfig.from_dict({**EXAMPLE, "min_difficulty": "auto"}).min_difficulty == "auto"


@pytest.mark.parametrize(
    ("type_", "lacks"),
    [
        ("fixed_linear", []),
        ("fixed_root", ["schedule_config.root_degree"]),
        ("fixed_discrete", ["schedule_config.difficulty", "schedule_config.max_step"]),
        ("custom", []),
        (None, ["schedule_type"]),
    ],
)
def test_each_schedule_has_the_numbers_that_it_needs_where_the_curriculum_is_on(type_, lacks):
    data = {**EXAMPLE, "schedule_type": type_}
    assert CurriculumConfig.from_dict({**data, "enabled": False}).schedule_type == type_
    if not lacks:
        assert CurriculumConfig.from_dict(data).schedule_type == type_
        return
    with pytest.raises(ConfigError) as refused:
        CurriculumConfig.from_dict(data)
    assert refused.value.where == ", ".join(["enabled", *lacks])


@pytest.mark.parametrize(
    ("ends", "where"),
    [([10, 20], None), ([10], "difficulty, max_step"), ([10, 20, 30], "difficulty, max_step"), ([20, 10], "max_step")],
)
def test_stretches_of_steps_have_ends_in_order_but_for_the_last(ends, where):
    data = {"difficulty": [1, 2, 3], "max_step": ends}
    if where is None:
        assert CurriculumScheduleConfig.from_dict(data).to_dict() == data
        return
    with pytest.raises(ConfigError) as refused:
        CurriculumScheduleConfig.from_dict(data)
    assert refused.value.where == where
