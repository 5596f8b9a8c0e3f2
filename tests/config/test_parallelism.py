"""Tensor, sequence and expert parallelism, as records."""

import pytest

from fds.config.keys.zero import ExpertParallelConfig, ParallelSizesConfig, TensorParallelConfig
from fds.errors import ConfigError

TENSORS = {
    "autotp_size": 4,
    "preset_model": "llama",
    "tp_overlap_comm": True,
    "tp": {"tp_size": 4, "tp_grain_size": 64},
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row"},
            {"patterns": [".*\\.gate_up_proj\\.weight$"], "shape": [[4096, 1024], -1], "partition_dim": 0},
        ],
    },
}
EXPERTS = {
    "enabled": True,
    "autoep_size": 4,
    "preset_model": "mixtral",
    "score_func": "softmax",
    "top_k": 2,
    "num_expert_groups": 8,
    "num_limited_groups": 4,
    "routed_scaling_factor": "auto",
    "expert_w3": None,
}
SIZES = {"data_parallel_size": 4, "sequence_parallel_size": 2, "use_data_before_expert_parallelism": True}


@pytest.mark.parametrize(
    ("record", "example"),
    [(TensorParallelConfig, TENSORS), (ExpertParallelConfig, EXPERTS), (ParallelSizesConfig, SIZES)],
)
def test_a_whole_section_comes_back_as_it_went_in(record, example):
    assert record.from_dict(example).to_dict() == example


@pytest.mark.parametrize(("size", "enabled"), [(0, False), (1, False), (2, True), ("auto", True)])
def test_one_rank_is_no_parallelism(size, enabled):
    assert TensorParallelConfig.from_dict({"autotp_size": size}).enabled is enabled


def test_the_second_names_of_keys_are_taken_with_a_warning():
    with pytest.warns(FutureWarning) as warned:
        config = TensorParallelConfig.from_dict({"tensor_parallel": {"tp_size": 1}, "replace_with_kernel_inject": True})
    assert [str(w.message).split("'")[3] for w in warned] == ["tp", "kernel_inject"]
    assert config.to_dict() == {"tp": {"tp_size": 1}, "kernel_inject": True}


@pytest.mark.parametrize(
    ("record", "wrong", "where"),
    [
        (TensorParallelConfig, {"autotp_size": -1}, "autotp_size"),
        (TensorParallelConfig, {"tp": {"size": 2}}, "tp.size"),
        (TensorParallelConfig, {"partition_config": {"strict": True}}, "partition_config.strict"),
        (
            TensorParallelConfig,
            {"partition_config": {"layer_specs": [{}, {"partition_type": "diagonal"}]}},
            "partition_config.layer_specs.1.partition_type",
        ),
        (
            TensorParallelConfig,
            {"partition_config": {"layer_specs": [{"pattern": ["a"]}]}},
            "partition_config.layer_specs.0.pattern",
        ),
        (ExpertParallelConfig, {"top_k": "two"}, "top_k"),
        (ExpertParallelConfig, {"score_apply": "both"}, "score_apply"),
        (ExpertParallelConfig, {"ep_size": 2}, "ep_size"),
        (ParallelSizesConfig, {"sequence_parallel_size": 0}, "sequence_parallel_size"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(record, wrong, where):
    with pytest.raises(ConfigError) as refused:
        record.from_dict(wrong)
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("record", "changes", "where"),
    [
        (TensorParallelConfig, {**TENSORS, "autotp_size": 2}, "autotp_size, tp.tp_size"),
        (TensorParallelConfig, {"tp": {"tp_size": 2}}, "autotp_size, tp.tp_size"),
        (ExpertParallelConfig, {**EXPERTS, "num_limited_groups": 9}, "num_limited_groups, num_expert_groups"),
    ],
)
def test_contradictions_name_all_keys_of_them(record, changes, where):
    with pytest.raises(ConfigError) as refused:
        record.from_dict(changes)
    assert refused.value.where == where


def test_what_is_not_known_yet_contradicts_nothing():
    assert TensorParallelConfig.from_dict({**TENSORS, "autotp_size": "auto"}).autotp_size == "auto"
    rules = TensorParallelConfig.from_dict({"partition_config": {"layer_specs": "auto"}})
    assert rules["partition_config.layer_specs"] == "auto"
