"""Quantization outside of compression, as records."""

import pytest

from fds.config.field import NotYet, keys
from fds.config.keys.model import QuantizeTrainingConfig, WeightQuantizationPlacedConfig
from fds.config.record import walk
from fds.errors import ConfigError

EIGENVALUE = {
    "eigenvalue": {
        "enabled": True,
        "verbose": True,
        "max_iter": 50,
        "tol": 1e-2,
        "stability": 0,
        "gas_boundary_resolution": 1,
        "layer_name": "bert.encoder.layer",
        "layer_num": 12,
    }
}
PLACED = {
    "quantized_initialization": {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False},
    "post_init_quant": {"self_attn.q_proj": {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}},
}


@pytest.mark.parametrize(
    ("record", "example"), [(QuantizeTrainingConfig, EIGENVALUE), (WeightQuantizationPlacedConfig, PLACED)]
)
def test_a_whole_section_comes_back_as_it_went_in(record, example):
    assert record.from_dict(example).to_dict() == example


def test_curvature_is_measured_by_a_call_and_refused_by_none():
    every = walk(QuantizeTrainingConfig.from_dict(EIGENVALUE))
    assert not [path for path, _, known, _ in every if isinstance(known.meaning, NotYet)]


def test_weights_that_are_placed_quantized_ask_by_their_objects_and_empty_ones_for_nothing():
    known = keys(WeightQuantizationPlacedConfig)
    for name in PLACED:
        meaning = known[name][1].meaning
        assert isinstance(meaning, NotYet) and {} in meaning.nothing
    assert not isinstance(known["enabled"][1].meaning, NotYet)  # on unless said otherwise


@pytest.mark.parametrize(
    ("record", "wrong", "where"),
    [
        (QuantizeTrainingConfig, {"enabled": True}, "enabled"),
        (QuantizeTrainingConfig, {"eigenvalue": {"max_iter": 0}}, "eigenvalue.max_iter"),
        (QuantizeTrainingConfig, {"eigenvalue": {"layer": "h"}}, "eigenvalue.layer"),
        (WeightQuantizationPlacedConfig, {"q_type": "ternary"}, "q_type"),
        (WeightQuantizationPlacedConfig, {"post_init_quant": ["q_proj"]}, "post_init_quant"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(record, wrong, where):
    with pytest.raises(ConfigError) as refused:
        record.from_dict(wrong)
    assert refused.value.where == where
