"""Records: made from keywords or dicts, read by attribute or item, frozen, refused with the JSON path."""

from __future__ import annotations

import json
import pickle

import attrs
import pytest

from fds.config import BatchConfig, Config, FP16Config, OptimizerConfig, TrainingConfig, ZeroConfig
from fds.config.field import key
from fds.errors import ConfigError


@attrs.frozen
class Verbose(Config):
    """A record of somebody's own."""

    verbose: bool = key(False, "say more")
    name: str | None = key(None, "its name", old=("title",))


def refused(make, *args, **kwargs) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        make(*args, **kwargs)
    return error.value


def test_a_record_of_ones_own_does_what_deepspeeds_base_class_did():
    config = Verbose(verbose=True)
    assert config.verbose is config["verbose"] is True
    assert config == Verbose.from_dict({"verbose": True})
    assert config.is_valid() and config.resolve() == config


def test_a_record_is_frozen_equal_by_value_and_pickled():
    config = ZeroConfig(stage=2)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.stage = 3
    assert pickle.loads(pickle.dumps(config)) == config == ZeroConfig(stage=2) != ZeroConfig(stage=1)
    assert config.with_keys(stage=1).to_dict() == {"stage": 1}


def test_a_record_prints_what_it_was_given_as_the_call_that_makes_it():
    config = TrainingConfig.of({"train_batch_size": 4, "zero_optimization": {"stage": 3}})
    assert repr(config) == "TrainingConfig.from_dict({'train_batch_size': 4, 'zero_optimization': {'stage': 3}})"
    assert repr(config.zero_optimization) == "ZeroConfig.from_dict({'stage': 3})"
    assert eval(repr(config)) == config


def test_items_are_paths():
    config = TrainingConfig.of({"train_batch_size": 4, "zero_optimization": {"stage": 3}})
    assert config["zero_optimization"]["stage"] == config["zero_optimization.stage"] == 3
    assert config["train_batch_size"] == config.batch.train_batch_size == 4
    with pytest.raises(KeyError, match="zero_optimization"):
        config["zero_optimisation"]


def test_only_what_was_given_is_written_again_unless_all_is_asked_for():
    data = {"fp16": {"enabled": True, "loss_scale": 0}, "train_batch_size": 4, "comms_logger": {}}
    config = TrainingConfig.of(data)
    assert config.to_dict() == data
    full = config.to_dict(full=True)
    assert full["fp16"]["initial_scale_power"] == 16 and full["gradient_clipping"] == 1.0
    assert json.loads(json.dumps(full)) == full
    assert TrainingConfig.of(full) == config


@pytest.mark.parametrize(
    ("data", "where", "hint"),
    [
        ({"graidient_clipping": 1.0}, "graidient_clipping", "gradient_clipping"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge", "stage"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"pin": True}}},
            "zero_optimization.offload_param.pin",
            "pin_memory",
        ),
        ({"optimizer": {"type": "adamw", "params": {"beta": [0.9, 0.99]}}}, "optimizer.params.beta", "betas"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
            "scheduler.params.warmup_steps",
            "warmup_num_steps",
        ),
        (
            {"compression_training": {"weight_quantization": {"different_groups": {"g": {"modul": []}}}}},
            "compression_training.weight_quantization.different_groups.g.modul",
            "modules",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_known_one(data, where, hint):
    error = refused(TrainingConfig.of, data)
    assert error.where == where
    option = "" if ".params." in where else ' Or leave it out with a warning: unknown="warn"'
    assert error.hint == f"did you mean {hint!r}?{option}"


@pytest.mark.parametrize(
    ("data", "where", "want"),
    [
        ({"train_batch_size": "8"}, "train_batch_size", "an integer or null"),
        ({"train_batch_size": 8.5}, "train_batch_size", "an integer or null"),
        ({"train_batch_size": True}, "train_batch_size", "an integer or null"),
        ({"train_batch_size": 0}, "train_batch_size", "more than 0"),
        ({"train_batch_size": 10**400}, "train_batch_size", "at most 63 bits"),
        ({"gradient_clipping": 10**5000}, "gradient_clipping", "at most 63 bits"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled", "true or false"),
        ({"fp16": True}, "fp16", "{...}: FP16Config"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "0 or 1 or 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "0 or 1 or 2 or 3"),
        ({"zero_optimization": {"stage": None}}, "zero_optimization.stage", "0 or 1 or 2 or 3"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
            "optimizer.params.betas",
            "a list of 2 x a number",
        ),
        ({"optimizer": {"type": "Adam", "params": []}}, "optimizer.params", "an object"),
        ({"communication_data_type": "fp8"}, "communication_data_type", "'fp32' or 'fp16' or 'bf16' or null"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping", "a number"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping", "a number"),
        ({"fp16": None}, "fp16", "an object"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_what_would_do(data, where, want):
    error = refused(TrainingConfig.of, data)
    assert (error.where, error.want) == (where, want)


def test_a_whole_number_may_be_written_as_people_write_large_ones():
    assert ZeroConfig(reduce_bucket_size=5e8).reduce_bucket_size == 500_000_000
    assert type(ZeroConfig(reduce_bucket_size=5e8).reduce_bucket_size) is int
    assert FP16Config(loss_scale=0).loss_scale == 0


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled, bf16.enabled"),
        ({"amp": {"enabled": True}, "zero_optimization": {"stage": 1}}, "amp.enabled, zero_optimization.stage"),
        ({"amp": {"enabled": True}, "torch_autocast": {"enabled": True}}, "amp.enabled, torch_autocast.enabled"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window, fp16.loss_scale"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device, zero_optimization.offload_param.nvme_path",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.stage, zero_optimization.offload_param.device",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
            "zero_optimization.stage, zero_optimization.offload_optimizer.device",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "zero_optimization.stage, zero_optimization.offload_optimizer.ratio",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 1}},
            "optimizer.type, zero_optimization.stage",
        ),
        (
            {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
            "gradient_allreduce_op, zero_optimization.stage",
        ),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm"),
        (
            {"scheduler": {"type": "OneCycle", "params": {}}},
            "scheduler.params.cycle_min_lr, scheduler.params.cycle_max_lr",
        ),
    ],
)
def test_contradictions_name_every_key_involved(data, where):
    assert refused(TrainingConfig.of, data).where == where


def test_auto_contradicts_nothing():
    TrainingConfig.of(
        {
            "fp16": {"enabled": "auto"},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": "auto", "stage3_max_live_parameters": 5},
        }
    )


def test_an_old_spelling_is_taken_and_said_and_both_at_once_refused():
    with pytest.warns(FutureWarning, match="'title' is an old spelling: write 'name'"):
        assert Verbose.from_dict({"title": "a"}).to_dict() == {"name": "a"}
    with pytest.warns(FutureWarning, match="old spelling"):
        assert "title" in refused(Verbose.from_dict, {"title": "a", "name": "b"}).got


def test_there_are_two_editions_of_the_defaults():
    error = refused(BatchConfig, defaults="0.17")
    assert (error.where, error.want) == ("defaults", "'0.19.6' or 'docs'")


def test_what_is_no_object_is_refused():
    assert refused(TrainingConfig.from_dict, [1]).want == "{...}: TrainingConfig"
    assert refused(TrainingConfig.from_dict, {1: 2}).what == "a key is a string"


def test_a_record_keeps_its_own_copy_of_what_it_was_made_of():
    params = {"lr": 0.1}
    config = OptimizerConfig(type="SGD", params=params)
    params["lr"] = 7
    assert config.params == {"lr": 0.1}
