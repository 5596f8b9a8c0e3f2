"""The legacy curriculum and the schedules of difficulty: as records, composed, and trained."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fds
from fds import schedules
from fds.config import TrainingConfig
from fds.config.function_call import difficulty_call
from fds.config.keys.data import CurriculumConfig, CurriculumScheduleConfig
from fds.errors import ConfigError, NotSupportedError
from tests.scripts import loaded

FILES = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FILES / "curriculum_losses.json").read_text())["cases"]
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


def configured(**curriculum):
    optimizer = {"type": "Adam", "params": {"lr": 0.01}}
    return TrainingConfig.of(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": optimizer,
            "curriculum_learning": {**EXAMPLE, **curriculum},
        }
    )


def composed(**curriculum):
    first, *_ = configured(**curriculum).transforms(fds.mesh(dp=1))
    return first if str(first).startswith("curriculum(") else None


LINEAR = {
    "min_difficulty": 2,
    "max_difficulty": 10,
    "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2},
}
DISCRETE = {
    "min_difficulty": 1,
    "max_difficulty": 5,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [1, 2, 3, 4, 5], "max_step": [2, 4, 6, 8]},
}
FALLING = {
    "min_difficulty": 1,
    "max_difficulty": 3,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [1, 3, 2], "max_step": [2, 5]},
}


@pytest.mark.parametrize(
    ("curriculum", "text"),
    [
        ({}, "fixed_linear(8, 1024, 40000, difficulty_step=8)"),
        (LINEAR, "fixed_linear(2, 10, 8, difficulty_step=2)"),
        (
            {"schedule_type": "fixed_root", "schedule_config": {**LINEAR["schedule_config"], "root_degree": 3}},
            "fixed_root(8, 1024, 8, degree=3, difficulty_step=2)",
        ),
        (DISCRETE, "fixed_discrete((1, 2, 3, 4, 5), (2, 4, 6, 8))"),
        (FALLING, "stay_at(fixed_discrete((1, 3, 2), (2, 5)), 3)"),
        ({**FALLING, "min_difficulty": 3}, "fixed_discrete((3,), ())"),  # DeepSpeed stays where it begins
    ],
)
def test_a_json_is_the_curriculum_that_one_would_write(curriculum, text):
    assert str(composed(**curriculum)) == f"curriculum('seqlen', {text})"
    made = f"fds.curriculum('seqlen', fds.schedules.{text.replace('(fixed', '(fds.schedules.fixed')})"
    assert made in configured(**curriculum).explain({"dp": 1})


class Model(nn.Module):
    """One that DeepSpeed would tell how long its inputs should be."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens, curriculum_seqlen=None):
        assert curriculum_seqlen is None
        return self.head(self.embed(tokens))


@pytest.mark.parametrize(
    ("curriculum", "expected"),  # the first two are those of DeepSpeed's own tests
    [
        (DISCRETE, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        (LINEAR, [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]),
        (FALLING, [1, 1, 3, 3, 3, 3, 3, 3, 3, 3]),
    ],
)
def test_the_step_cuts_the_batch_and_the_model_is_told_nothing(curriculum, expected):
    lengths, tokens = [], torch.arange(48).view(4, 12) % 7
    rows = [tokens[:, :-1], tokens[:, 1:]]

    def loss(model, batch):
        lengths.append(batch[0].shape[1])
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    step, state, *_ = fds.initialize(model := Model(), loss, config=configured(**curriculum))
    plain, other, *_ = fds.initialize(model, loss, config=configured(enabled=False))
    for length in expected:
        state, metrics = step(state, rows)
        other, wanted = plain(other, [x[:, :length] for x in rows])
        assert torch.equal(metrics["loss"], wanted["loss"])
    assert lengths[::4] == lengths[1::4] == expected  # of two microbatches each


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["schedule"])
def test_a_json_trains_as_it_did_under_deepspeed(case):
    recorded = loaded(FILES / "curriculum_losses.py")
    config = TrainingConfig.of(recorded.config(case["schedule"]))
    lengths = difficulty_call(config).build(None)
    assert [lengths(t) for t in range(1, recorded.STEPS + 1)] == case["lengths"]
    step, state, *_ = fds.initialize(recorded.Model(), config=config)
    for batch, loss in zip(recorded.batches(), case["losses"], strict=True):
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=2**-20)  # a few roundings of float32 numbers


def test_a_line_never_falls_below_the_least():
    sizes = {"total_curriculum_step": 12, "difficulty_step": 8}
    curriculum = composed(min_difficulty=4, max_difficulty=32, schedule_config=sizes)
    assert str(curriculum) == "curriculum('seqlen', fixed_linear(4, 32, 12, difficulty_step=8))"
    assert schedules.fixed_linear(4, 32, 12, difficulty_step=8)(1) == 8  # 0 in 0.19.6


def test_what_does_nothing_there_does_nothing_here():
    assert composed(enabled=False) is None and composed(curriculum_type="rarity") is None


def test_what_does_not_compose_is_refused_with_its_keys():
    custom = configured(schedule_type="custom")
    assert "fds.curriculum('seqlen', function)" in custom.explain({"dp": 1})
    with pytest.raises(NotSupportedError, match="transforms="):
        custom.transforms(fds.mesh(dp=1))
    with pytest.raises(ConfigError, match=r"curriculum_learning\.curriculum_type"):
        composed(curriculum_type=None)
    with pytest.raises(ConfigError, match="sequence_parallel_size"):
        configured().explain({"dp": 1, "sp": 2})
    with pytest.raises(ConfigError) as refused:
        configured(**{**DISCRETE, "schedule_config": {"difficulty": [1, -2], "max_step": [3]}})
    assert refused.value.where == "curriculum_learning.schedule_config.difficulty"
