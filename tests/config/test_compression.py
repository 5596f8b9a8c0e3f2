"""The section of compression, and layer reduction, as records."""

import pytest

from fds.config.field import NotYet
from fds.config.keys.model import CompressionConfig, LayerReductionConfig
from fds.config.record import walk
from fds.errors import ConfigError

EXAMPLE = {
    "layer_reduction": {
        "enabled": True,
        "keep_number_layer": 5,
        "module_name_prefix": "bert.encoder.layer",
        "teacher_layer": [2, 4, 6, 8, 10],
        "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
    },
    "weight_quantization": {
        "shared_parameters": {
            "enabled": True,
            "quantizer_kernel": False,
            "schedule_offset": 0,
            "quantize_groups": 1,
            "quantize_verbose": False,
            "quantization_type": "symmetric",
            "rounding": "nearest",
            "quantize_weight_in_forward": False,
            "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
        },
        "different_groups": {
            "wq1": {
                "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 50},
                "modules": ["attention.self", "intermediate"],
            },
            "wq2": {
                "params": {"start_bits": 4, "target_bits": 4, "quantization_period": 50},
                "modules": ["attention.output"],
            },
        },
    },
    "channel_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, "method": "topk"},
        "different_groups": {
            "cp1": {
                "params": {"dense_ratio": 0.5},
                "modules": ["layer....conv1"],
                "related_modules": [["layer....conv2", "layer....bn1"]],
            }
        },
    },
}


def test_the_documented_examples_come_back_as_they_went_in():
    assert CompressionConfig.from_dict(EXAMPLE).to_dict() == EXAMPLE


def test_a_technique_that_is_not_there_asks_by_its_own_switch():
    asked = [
        path
        for path, value, known, _ in walk(CompressionConfig.from_dict(EXAMPLE))
        if isinstance(known.meaning, NotYet) and value not in known.meaning.nothing
    ]
    assert asked == []


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"layer_reductions": {}}, "layer_reductions"),
        ({"layer_reduction": {"keep_number_layer": 2.5}}, "layer_reduction.keep_number_layer"),
        ({"layer_reduction": {"other_module_name": "bert.pooler"}}, "layer_reduction.other_module_name"),
        (
            {"row_pruning": {"different_groups": {"rp1": {"params": {"dense": 0.5}}}}},
            "row_pruning.different_groups.rp1.params.dense",
        ),
        (
            {"head_pruning": {"different_groups": {"rp1": {"related_modules": ["self.query"]}}}},
            "head_pruning.different_groups.rp1.related_modules",
        ),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        CompressionConfig.from_dict(wrong)
    assert refused.value.where == where


def test_a_student_has_as_many_layers_as_it_gets():
    with pytest.raises(ConfigError) as refused:
        LayerReductionConfig(keep_number_layer=5, teacher_layer=(2, 4))
    assert refused.value.where == "keep_number_layer, teacher_layer"
    assert refused.value.got == "keep_number_layer=5, teacher_layer=(2, 4)"
    assert LayerReductionConfig(keep_number_layer=2, teacher_layer=(2, 4)).teacher_layer == (2, 4)
