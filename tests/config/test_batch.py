"""The batch triangle is resolved as DeepSpeed 0.19.6 resolves it; where it cannot be, all keys are named."""

import json
from pathlib import Path

import pytest

from fds.config import BatchConfig
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
    assert whole.to_dict() == {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 2,
                               "gradient_accumulation_steps": 3}  # fmt: skip


def test_auto_is_a_number_that_is_not_there():
    batch = BatchConfig(train_batch_size=8, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")
    assert batch.resolve(world_size=2).train_micro_batch_size_per_gpu == 4
