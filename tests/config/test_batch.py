"""The batch triangle is resolved as DeepSpeed 0.19.6 resolves it; where it cannot be, all keys are named."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fds.config import BatchConfig, TrainingConfig, training_arguments
from fds.errors import ConfigError

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
CASES = json.loads((Path(__file__).parents[1] / "golden/config_batches.json").read_text())["cases"]


def test_every_recorded_case_comes_out_as_there():
    refused = 0
    for case in CASES:
        given = {name: case[name] for name in NAMES if case[name] is not None}
        try:
            batch = BatchConfig(**given).resolve(world_size=case["world"])
            got = [batch[name] for name in NAMES]
        except ConfigError as error:
            got, refused = "refused", refused + 1
            assert all(name in error.where for name in NAMES) or error.where in NAMES
        assert got == case["becomes"], case
    assert 0 < refused < len(CASES) and len(CASES) > 200


def test_numbers_that_do_not_multiply_name_all_keys_and_the_ranks():
    batch = BatchConfig(train_batch_size=32, train_micro_batch_size_per_gpu=3)
    with pytest.raises(ConfigError) as error:
        batch.resolve(world_size=4)
    assert error.value.where == ", ".join(NAMES)
    assert error.value.got == "train_batch_size=32, train_micro_batch_size_per_gpu=3 on 4 data ranks"
    assert not batch.is_valid(world_size=4)
    assert batch.is_valid(world_size=1) is False  # 32 is no multiple of 3 either


def test_resolving_changes_nothing_that_was_given_and_resolves_only_once():
    batch = BatchConfig(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)
    whole = batch.resolve(world_size=5)
    assert (batch.train_batch_size, whole.train_batch_size) == (None, 30)
    assert whole.resolve(world_size=5) == whole
    assert whole.to_dict() == {
        "train_batch_size": 30,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
    }


def test_auto_is_a_number_that_is_not_there():
    batch = BatchConfig(train_batch_size=8, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")
    assert batch.resolve(world_size=2).train_micro_batch_size_per_gpu == 4


TRANSFORMERS = [  # (given, rows of a device, its accumulation, ranks) and what transformers 5 and DeepSpeed make of it
    (("auto", None, None), 4, 2, 1, [8, 8, 1]),
    (("auto", None, None), 4, 2, 2, [16, 8, 1]),
    (("auto", "auto", None), 4, 2, 1, [8, 4, 2]),
    (("auto", "auto", None), 4, 2, 2, [16, 4, 2]),
    (("auto", "auto", "auto"), 4, 2, 2, [16, 4, 2]),
    (("auto", None, "auto"), 4, 2, 2, [16, 4, 2]),
    (("auto", None, 2), 4, 2, 1, [8, 4, 2]),
    (("auto", 4, None), 4, 2, 2, [16, 4, 2]),
    ((None, "auto", None), 4, 2, 2, [8, 4, 1]),
    ((None, "auto", "auto"), 4, 2, 2, [16, 4, 2]),
    ((16, "auto", "auto"), 4, 2, 2, [16, 4, 2]),
    ((16, None, None), 4, 2, 2, [16, 8, 1]),
    ((16, "auto", None), 4, 2, 1, None),
    ((12, None, None), 4, 2, 1, None),
    ((8, None, "auto"), 4, 2, 2, None),
    (("auto", 8, "auto"), 4, 2, 1, None),
    (("auto", "auto", 1), 4, 2, 1, None),
]


@pytest.mark.parametrize(("given", "rows", "steps", "ranks", "becomes"), TRANSFORMERS)
def test_the_whole_batch_is_what_transformers_makes_of_its_arguments(given, rows, steps, ranks, becomes):
    data = {name: value for name, value in zip(NAMES, given, strict=True) if value is not None}
    arguments = SimpleNamespace(per_device_train_batch_size=rows, gradient_accumulation_steps=steps)
    resolve = lambda: TrainingConfig.of(data).resolve(world_size=ranks, auto=training_arguments(arguments)).batch
    if becomes is None:
        with pytest.raises(ConfigError, match="another value"):
            resolve()
    else:
        assert [resolve()[name] for name in NAMES] == becomes


def test_auto_without_arguments_names_every_key_and_how_to_give_them():
    data = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "Lion", "params": {"lr": "auto"}},
    }
    with pytest.raises(ConfigError) as error:
        TrainingConfig.of(data).resolve()
    assert all(path in error.value.hint for path in ("train_batch_size", "gradient_clipping", "optimizer.params.lr"))
    assert "pass auto=" in error.value.hint
    assert (error.value.what, error.value.where) == ('a value is "auto", and nobody gave it', "train_batch_size")
    with pytest.raises(ConfigError, match="do not multiply"):  # whatever the value of "auto" is
        TrainingConfig.of(
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}
        ).resolve()


def test_a_scheduler_without_its_total_says_which_argument_gives_it():
    data = {"train_batch_size": 4, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    arguments = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=1)
    for auto in (None, training_arguments(arguments)):
        with pytest.raises(ConfigError) as error:
            TrainingConfig.of(data).resolve(auto=auto)
        assert error.value.what == 'a value is "auto", and nobody gave it'
        assert error.value.where == "scheduler.params.total_num_steps" and "num_training_steps=" in error.value.hint
    known = training_arguments(arguments, num_training_steps=9)
    assert TrainingConfig.of(data).resolve(auto=known).scheduler.arguments.total_num_steps == 9
