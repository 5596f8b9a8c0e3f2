"""Generation between updates, as a record."""

import pytest

from fds.config.keys.model import HybridEngineConfig
from fds.errors import ConfigError

EXAMPLE = {
    "enabled": True,
    "max_out_tokens": 512,
    "inference_tp_size": 1,
    "release_inference_cache": False,
    "pin_parameters": True,
    "tp_gather_partition_size": 8,
}


def test_a_whole_section_comes_back_as_it_went_in():
    assert HybridEngineConfig.from_dict(EXAMPLE).to_dict() == EXAMPLE


@pytest.mark.parametrize(
    ("wrong", "where"),
    [({"enabled": None}, "enabled"), ({"max_out_tokens": 0}, "max_out_tokens"), ({"max_tokens": 8}, "max_tokens")],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        HybridEngineConfig.from_dict(wrong)
    assert refused.value.where == where


@pytest.mark.parametrize("other", [{"release_inference_cache": True}, {"inference_tp_size": 2}])
def test_a_graph_is_of_one_rank_and_of_memory_that_stays(other):
    with pytest.raises(ConfigError) as refused:
        HybridEngineConfig.from_dict({**EXAMPLE, "enable_cuda_graph": True, **other})
    assert refused.value.where == f"enable_cuda_graph, {next(iter(other))}"
    assert HybridEngineConfig.from_dict({**EXAMPLE, **other}).enable_cuda_graph is False
