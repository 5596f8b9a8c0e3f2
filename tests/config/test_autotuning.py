"""Autotuning, as records."""

import pytest

from fds.config.keys.data import AutotuningConfig
from fds.errors import ConfigError

EXAMPLE = {  # of reference/003
    "enabled": False,
    "results_dir": "autotuning_results",
    "exps_dir": "autotuning_exps",
    "overwrite": False,
    "metric": "throughput",
    "start_profile_step": 3,
    "end_profile_step": 5,
    "fast": True,
    "max_train_batch_size": None,
    "mp_size": 1,
    "num_tuning_micro_batch_sizes": 3,
    "tuner_type": "model_based",
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
    "arg_mappings": None,
}


def test_the_documented_example_comes_back_as_it_went_in():
    assert AutotuningConfig.from_dict(EXAMPLE).to_dict() == EXAMPLE


def test_the_documented_example_is_the_documented_defaults():
    assert AutotuningConfig.from_dict(EXAMPLE, defaults="docs") == AutotuningConfig(defaults="docs")


def test_deepspeed_searches_in_order_and_overwrites():
    assert AutotuningConfig().tuner_type == "gridsearch" and AutotuningConfig().overwrite


def test_options_and_what_is_known_of_the_model_are_objects():
    told = {
        "enabled": True,
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"},
        "model_info": {"num_params": 1_000_000_000, "hidden_size": 10, "num_layers": 12},
    }
    config = AutotuningConfig.from_dict(told)
    assert config.to_dict() == told and config["model_info.profile"] is False


def test_the_steps_of_the_profile_have_old_names():
    with pytest.warns(FutureWarning, match="'start_profile_step'"), pytest.warns(FutureWarning, match="'end_prof"):
        config = AutotuningConfig.from_dict({"enabled": True, "start_step": 5, "end_step": 15})
    assert config.to_dict() == {"enabled": True, "start_profile_step": 5, "end_profile_step": 15}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"fast": 1}, "fast"),
        ({"metric": "loss"}, "metric"),
        ({"tuner": "random"}, "tuner"),
        ({"arg_mappings": {"train_batch_size": 8}}, "arg_mappings"),
        ({"model_info": {"hidden_size": "10"}}, "model_info.hidden_size"),
        ({"model_info": {"layers": 12}}, "model_info.layers"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        AutotuningConfig.from_dict(wrong)
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("least", "most"),
    [
        ("start_profile_step", "end_profile_step"),
        ("min_train_batch_size", "max_train_batch_size"),
        ("min_train_micro_batch_size_per_gpu", "max_train_micro_batch_size_per_gpu"),
    ],
)
def test_a_least_value_above_the_largest_is_refused_where_it_matters(least, most):
    with pytest.raises(ConfigError) as refused:
        AutotuningConfig.from_dict({"enabled": True, least: 7, most: 6})
    assert refused.value.where == f"{least}, {most}" and f"{least}=7, {most}=6" == refused.value.got
    for fine in (
        {"enabled": True, least: 7, most: 7},
        {"enabled": False, least: 7, most: 6},
        {"enabled": True, least: "auto", most: 6},
    ):
        assert AutotuningConfig.from_dict(fine).to_dict() == fine
