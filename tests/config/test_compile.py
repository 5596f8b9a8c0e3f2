"""Compiled and captured steps, as records."""

import pytest

from fds.config.keys.step import CapturingConfig, CompileConfig
from fds.errors import ConfigError

EXAMPLE = {"deepcompile": True, "passes": ["z3"], "offload_activation": True, "double_buffer": False}


def test_a_whole_section_comes_back_as_it_went_in():
    assert CompileConfig.from_dict(EXAMPLE).to_dict() == EXAMPLE
    assert CapturingConfig.from_dict({"vocabulary_size": 50257}).to_dict() == {"vocabulary_size": 50257}


@pytest.mark.parametrize(
    ("record", "wrong", "where"),
    [
        (CompileConfig, {"deepcompile": "true"}, "deepcompile"),
        (CompileConfig, {"passes": ["z2"]}, "passes"),
        (CompileConfig, {"free_activation_threshold": -1}, "free_activation_threshold"),
        (CapturingConfig, {"vocabulary_size": 0}, "vocabulary_size"),
        (CapturingConfig, {"graph_harvesting": {}}, "graph_harvesting"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(record, wrong, where):
    with pytest.raises(ConfigError) as refused:
        record.from_dict(wrong)
    assert refused.value.where == where


@pytest.mark.parametrize("other", ["offload_opt_states", "offload_parameters"])
def test_two_passes_do_not_share_the_memory_of_the_host(other):
    with pytest.raises(ConfigError) as refused:
        CompileConfig.from_dict({**EXAMPLE, other: True})
    assert refused.value.where == f"offload_activation, {other}"
    assert CompileConfig.from_dict({**EXAMPLE, other: "auto"})[other] == "auto"
