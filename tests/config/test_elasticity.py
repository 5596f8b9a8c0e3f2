"""Elasticity, as a record."""

import pytest

from fds.config.keys.data import ElasticityConfig
from fds.errors import ConfigError

ON = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
EXAMPLE = {
    **ON,
    "min_gpus": 1,
    "max_gpus": 10000,
    "min_time": 20,
    "prefer_larger_batch": True,
    "ignore_non_elastic_batch_info": False,
    "version": 0.2,
    "num_gpus_per_node": 8,
    "model_parallel_size": 2,
}


def test_the_documented_example_comes_back_as_it_went_in():
    assert ElasticityConfig.from_dict(EXAMPLE).to_dict() == EXAMPLE


def test_the_documented_name_of_the_preference_is_an_old_spelling():
    with pytest.warns(FutureWarning, match="'prefer_larger_batch'"):
        config = ElasticityConfig.from_dict({**ON, "prefer_large_batch": False})
    assert config.to_dict() == {**ON, "prefer_larger_batch": False}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"enabled": 1}, "enabled"),
        ({"micro_batch_sizes": 4}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [2, "4"]}, "micro_batch_sizes"),
        ({"min_gpu": 1}, "min_gpu"),
        ({"min_gpus": 0}, "min_gpus"),
        ({"version": 0.3}, "version"),
        ({"min_time": -1}, "min_time"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        ElasticityConfig.from_dict(wrong)
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"micro_batch_sizes": [2, 2001]}, "max_train_batch_size, micro_batch_sizes"),
        ({"micro_batch_sizes": []}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [2, 0]}, "micro_batch_sizes"),
        ({"min_gpus": 9, "max_gpus": 8}, "min_gpus, max_gpus"),
        ({"version": 0.15}, "version"),
        ({"version": 0.1, "num_gpus_per_node": 8, "model_parallel_size": 2}, "version, model_parallel_size"),
        ({"num_gpus_per_node": 8, "model_parallel_size": 3}, "num_gpus_per_node, model_parallel_size"),
    ],
)
def test_an_enabled_search_that_finds_nothing_is_refused_with_all_keys_of_it(changes, where):
    with pytest.raises(ConfigError) as refused:
        ElasticityConfig.from_dict({**ON, **changes})
    assert refused.value.where == where
    assert ElasticityConfig.from_dict({**ON, **changes, "enabled": False}).to_dict()["enabled"] is False


def test_an_enabled_search_says_its_sizes_itself():
    with pytest.raises(ConfigError) as refused:
        ElasticityConfig(enabled=True)
    assert refused.value.where == "enabled, max_train_batch_size, micro_batch_sizes"
    with pytest.raises(ConfigError) as refused:
        ElasticityConfig(enabled=True, micro_batch_sizes=(2,))
    assert refused.value.where == "enabled, max_train_batch_size"


def test_what_is_not_known_yet_contradicts_nothing():
    unknown = {**ON, "micro_batch_sizes": "auto", "min_gpus": "auto", "model_parallel_size": "auto", "version": "auto"}
    assert ElasticityConfig.from_dict(unknown).to_dict() == unknown
