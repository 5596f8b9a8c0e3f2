"""Quantization of weights and activations, as records."""

import pytest

from fds.config.keys.model import ActivationQuantizationConfig, WeightBitsConfig, WeightQuantizationConfig
from fds.errors import ConfigError

ACTIVATIONS = {
    "shared_parameters": {
        "enabled": True,
        "quantization_type": "asymmetric",
        "range_calibration": "dynamic",
        "schedule_offset": 50,
    },
    "different_groups": {"aq1": {"params": {"bits": 8}, "modules": ["attention.output"]}},
}
BITS = {"start_bits": 8, "target_bits": 4, "quantization_period": 50}


def test_the_documented_example_comes_back_as_it_went_in():
    config = ActivationQuantizationConfig.from_dict(ACTIVATIONS)
    assert config.to_dict() == ACTIVATIONS and config.different_groups["aq1"]["params.bits"] == 8


def test_the_documentation_has_other_defaults_than_the_code():
    code, docs = (ActivationQuantizationConfig(defaults=e).shared_parameters for e in ("0.19.6", "docs"))
    assert (code.range_calibration, code.schedule_offset) == ("dynamic", 1000)
    assert (docs.range_calibration, docs.schedule_offset) == ("static", 0)
    weights = WeightQuantizationConfig.from_dict({"different_groups": {"a": {}}}, defaults="docs")
    assert weights.different_groups["a"].defaults == "docs"


def test_a_group_is_of_all_modules_or_of_those_that_are_named():
    groups = WeightQuantizationConfig.from_dict(
        {"different_groups": {"all": {"params": BITS}, "some": {"params": BITS, "modules": ["attention"]}}}
    ).different_groups
    assert groups["all"].modules == "*" and groups["some"].modules == ("attention",)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"shared_parameters": {"rounding": "up"}}, "shared_parameters.rounding"),
        ({"shared_parameters": {"fp16_mixed_quantize": True}}, "shared_parameters.fp16_mixed_quantize"),
        ({"shared_parameters": {"fp16_mixed_quantize": {"ratio": 0.1}}}, "shared_parameters.fp16_mixed_quantize.ratio"),
        ({"different_groups": {"wq1": {"params": {"start_bits": "8"}}}}, "different_groups.wq1.params.start_bits"),
        ({"different_groups": {"wq1": {"module": ["a"]}}}, "different_groups.wq1.module"),
        ({"different_groups": {"wq1": {"modules": [1]}}}, "different_groups.wq1.modules"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        WeightQuantizationConfig.from_dict(wrong)
    assert refused.value.where == where


def test_bits_do_not_grow():
    with pytest.raises(ConfigError) as refused:
        WeightBitsConfig(start_bits=4, target_bits=8)
    assert refused.value.where == "target_bits, start_bits"


@pytest.mark.parametrize(
    ("groups", "lacks"),
    [
        ({}, "different_groups"),
        ({"wq1": {"params": BITS}, "wq2": {"params": {"start_bits": 8}}}, "different_groups.wq2.params.target_bits"),
        ({"wq1": {}}, "different_groups.wq1.params.start_bits, different_groups.wq1.params.target_bits"),
    ],
)
def test_a_technique_that_is_on_has_groups_and_their_bits(groups, lacks):
    data = {"shared_parameters": {"enabled": True}, "different_groups": groups}
    with pytest.raises(ConfigError) as refused:
        WeightQuantizationConfig.from_dict(data)
    assert refused.value.where == f"shared_parameters.enabled, {lacks}"
    data["shared_parameters"]["enabled"] = False
    assert WeightQuantizationConfig.from_dict(data).to_dict() == data
