"""Data efficiency, as records."""

import pytest

from fds.config.field import NotYet
from fds.config.keys.data import DataEfficiencyConfig, DynamicBatchingConfig, KeptTokensConfig, RandomLtdConfig
from fds.config.record import walk
from fds.errors import ConfigError

RARITY = {
    "index_to_sample_path": "/path/to/index_to_sample",
    "index_to_metric_path": "/path/to/index_to_metric",
    "difficulty_type": "percentile",
    "clustering_type": "schedule_based",
    "min_difficulty": 1,
    "max_difficulty": 100,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 110000, "difficulty_step": 1, "root_degree": 2},
}
LTD = {
    "enabled": True,
    "total_layer_num": 24,
    "random_ltd_layer_num": 22,
    "random_ltd_layer_id": list(range(1, 23)),
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "seq_batch_dim",
    "random_ltd_schedule": {
        "min_value": 128,
        "max_value": 2048,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 200000, "seq_per_step": 16},
    },
}
EXAMPLE = {
    "enabled": True,
    "seed": 1234,
    "data_routing": {"enabled": True, "random_ltd": LTD},
    "data_sampling": {
        "enabled": True,
        "num_epochs": 1,
        "num_workers": 0,
        "curriculum_learning": {
            "enabled": True,
            "data_cluster_path": "/path/to/data_clusters",
            "curriculum_metrics": {"vocabularyrarity": RARITY},
        },
    },
}


def test_the_documented_example_comes_back_as_it_went_in():
    config = DataEfficiencyConfig.from_dict(EXAMPLE)
    assert config.to_dict() == EXAMPLE
    metric = config["data_sampling.curriculum_learning.curriculum_metrics"]["vocabularyrarity"]
    assert metric["schedule_config.root_degree"] == 2


def test_nothing_of_the_documented_example_is_refused():
    asked = [
        path
        for path, value, known, _ in walk(DataEfficiencyConfig.from_dict(EXAMPLE))
        if isinstance(known.meaning, NotYet) and value not in known.meaning.nothing
    ]
    assert asked == []


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"seed": 0.5}, "seed"),
        ({"data_sampling": {"num_epoch": 1}}, "data_sampling.num_epoch"),
        (
            {"data_sampling": {"dynamic_batching": {"lr_scaling_method": "cubic"}}},
            "data_sampling.dynamic_batching.lr_scaling_method",
        ),
        (
            {"data_sampling": {"curriculum_learning": {"curriculum_metrics": ["seqlen"]}}},
            "data_sampling.curriculum_learning.curriculum_metrics",
        ),
        (
            {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"a": {"difficulty": 1}}}}},
            "data_sampling.curriculum_learning.curriculum_metrics.a.difficulty",
        ),
        (
            {"data_routing": {"random_ltd": {"random_ltd_layer_id": [1, "2"]}}},
            "data_routing.random_ltd.random_ltd_layer_id",
        ),
        (
            {"data_routing": {"random_ltd": {"random_ltd_schedule": {"schedule_config": {"seq_per_step": 0}}}}},
            "data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step",
        ),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        DataEfficiencyConfig.from_dict(wrong)
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("record", "data", "where"),
    [
        (RandomLtdConfig, {**LTD, "random_ltd_layer_num": 21}, "random_ltd_layer_num, random_ltd_layer_id"),
        (RandomLtdConfig, {**LTD, "total_layer_num": 12}, "random_ltd_layer_num, total_layer_num"),
        (RandomLtdConfig, {**LTD, "random_ltd_layer_id": None}, "enabled, random_ltd_layer_id"),
        (KeptTokensConfig, {"min_value": 128, "max_value": 64}, "min_value, max_value"),
        (DynamicBatchingConfig, {"enabled": True}, "enabled, max_tokens"),
        (DynamicBatchingConfig, {"min_batch_size": 4, "max_batch_size": 2}, "min_batch_size, max_batch_size"),
    ],
)
def test_contradictions_name_all_keys_of_them(record, data, where):
    with pytest.raises(ConfigError) as refused:
        record.from_dict(data)
    assert refused.value.where == where


def test_a_curriculum_without_a_measure_is_refused_where_it_is_on():
    curriculum = {"curriculum_learning": {"enabled": True}}
    with pytest.raises(ConfigError, match="without the keys that it needs"):
        DataEfficiencyConfig.from_dict({"data_sampling": curriculum})
    curriculum["curriculum_learning"]["enabled"] = False
    assert DataEfficiencyConfig.from_dict({"data_sampling": curriculum}).to_dict() == {"data_sampling": curriculum}


def test_two_records_do_not_share_their_groups_by_name():
    one, two = DataEfficiencyConfig(), DataEfficiencyConfig()
    path = "data_sampling.curriculum_learning.curriculum_metrics"
    assert one[path] == {} and one[path] is not two[path]
