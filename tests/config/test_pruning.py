"""Pruning, as records."""

import pytest

from fds.config.keys.model import HeadPruningConfig, RowPruningConfig, SparsePruningConfig
from fds.errors import ConfigError

HALF = {"params": {"dense_ratio": 0.5}}
SPARSE = {
    "shared_parameters": {
        "enabled": True,
        "schedule_offset": 30,
        "schedule_offset_end": 90,
        "schedule_offset_stride": 15,
        "method": "snip_momentum",
        "block_pattern": "4x1",
        "dense_ratio": 0.4,
        "excluded_modules": ["classifier", "pooler"],
    },
    "different_groups": {},
}
ROWS = {
    "shared_parameters": {"enabled": True, "schedule_offset": 20, "method": "topk"},
    "different_groups": {
        "rp1": {**HALF, "modules": ["intermediate.dense"], "related_modules": [["layer.\\w+.output.dense"]]}
    },
}
HEADS = {
    "shared_parameters": {"enabled": True, "schedule_offset": 10, "method": "topk", "num_heads": 12},
    "different_groups": {
        "rp1": {
            **HALF,
            "modules": ["attention.output.dense"],
            "related_modules": [["self.query", "self.key", "self.value"]],
        }
    },
}
KINDS = [(SparsePruningConfig, SPARSE), (RowPruningConfig, ROWS), (HeadPruningConfig, HEADS)]


@pytest.mark.parametrize(("record", "example"), KINDS)
def test_the_documented_examples_come_back_as_they_went_in(record, example):
    assert record.from_dict(example).to_dict() == example


@pytest.mark.parametrize(("record", "_"), KINDS)
def test_pruning_begins_at_once_in_the_documentation_only(record, _):
    assert record()["shared_parameters.schedule_offset"] == 1000
    assert record(defaults="docs")["shared_parameters.schedule_offset"] == 0


@pytest.mark.parametrize(
    ("record", "wrong", "where"),
    [
        (RowPruningConfig, {"shared_parameters": {"method": "snip_momentum"}}, "shared_parameters.method"),
        (RowPruningConfig, {"shared_parameters": {"num_heads": 12}}, "shared_parameters.num_heads"),
        (
            RowPruningConfig,
            {"different_groups": {"a": {"params": {"dense_ratio": 2}}}},
            "different_groups.a.params.dense_ratio",
        ),
        (HeadPruningConfig, {"shared_parameters": {"num_heads": 0}}, "shared_parameters.num_heads"),
        (
            SparsePruningConfig,
            {"shared_parameters": {"excluded_modules": "pooler"}},
            "shared_parameters.excluded_modules",
        ),
        (SparsePruningConfig, {"shared_parameters": {"dense_ratio": 0}}, "shared_parameters.dense_ratio"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(record, wrong, where):
    with pytest.raises(ConfigError) as refused:
        record.from_dict(wrong)
    assert refused.value.where == where


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_only_snip_momentum_does_without_groups_and_has_an_end(method):
    shared = {**SPARSE["shared_parameters"], "method": method}
    with pytest.raises(ConfigError) as refused:
        SparsePruningConfig.from_dict({**SPARSE, "shared_parameters": shared})
    assert refused.value.where == "shared_parameters.enabled, different_groups"
    shared["schedule_offset_end"] = 10
    pruned = SparsePruningConfig.from_dict({"shared_parameters": shared, "different_groups": {"a": HALF}})
    assert pruned["shared_parameters.schedule_offset_end"] == 10
    shared["method"] = "snip_momentum"
    with pytest.raises(ConfigError, match="lower bound is above the upper"):
        SparsePruningConfig.from_dict({**SPARSE, "shared_parameters": shared})


def test_a_group_without_its_share_is_refused():
    with pytest.raises(ConfigError) as refused:
        RowPruningConfig.from_dict({**ROWS, "different_groups": {"a": HALF, "b": {"modules": ["c"]}}})
    assert refused.value.where == "shared_parameters.enabled, different_groups.b.params.dense_ratio"


def test_heads_are_pruned_only_where_their_number_is_said():
    shared = {k: v for k, v in HEADS["shared_parameters"].items() if k != "num_heads"}
    with pytest.raises(ConfigError, match="num_heads=None"):
        HeadPruningConfig.from_dict({**HEADS, "shared_parameters": shared})
    assert HeadPruningConfig.from_dict({**HEADS, "shared_parameters": {**shared, "num_heads": "auto"}}).different_groups
