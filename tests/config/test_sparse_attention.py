"""Block-sparse attention: as a record, as a rule, and of a model that is initialized."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import attention_layouts
from fds.config.field import Elsewhere, keys
from fds.config.keys.model import READS, SparseAttentionConfig
from fds.errors import ConfigError
from fds.nn import SparseSelfAttention

EXAMPLE = {  # of reference/003: the keys of all modes, in one section
    "mode": "fixed",
    "block": 16,
    "different_layout_per_head": True,
    "num_local_blocks": 4,
    "num_global_blocks": 1,
    "attention": "bidirectional",
    "horizontal_global_attention": False,
    "num_different_global_patterns": 4,
    "num_random_blocks": 0,
    "local_window_blocks": [4],
    "global_block_indices": [0],
    "global_block_end_indices": None,
    "num_sliding_window_blocks": 3,
}
CHANGED = {  # a value of each key that is not its default, and that any mode may have which reads the key
    "block": 32,
    "different_layout_per_head": True,
    "num_local_blocks": 8,
    "num_global_blocks": 2,
    "attention": "unidirectional",
    "horizontal_global_attention": True,
    "num_different_global_patterns": 2,
    "num_random_blocks": 1,
    "local_window_blocks": [2, 4],
    "global_block_indices": [1],
    "global_block_end_indices": [2],
    "num_sliding_window_blocks": 5,
}


@pytest.mark.parametrize("mode", READS)
def test_the_documented_example_comes_back_as_it_went_in_whatever_its_mode(mode):
    example = {**EXAMPLE, "mode": mode}
    assert SparseAttentionConfig.from_dict(example).to_dict() == example


def test_an_empty_section_asks_for_the_fixed_pattern():
    config = SparseAttentionConfig.from_dict({})
    assert config.mode == "fixed" and config(4, 7) == attention_layouts.fixed(4, 7)
    assert isinstance(keys(SparseAttentionConfig)["mode"][1].meaning, Elsewhere)


RULES = {
    "dense": ({"block": 32}, lambda: attention_layouts.dense(4, 9, block=32)),
    "fixed": (
        {"different_layout_per_head": True, "num_different_global_patterns": 2, "attention": "unidirectional"},
        lambda: attention_layouts.fixed(
            4, 9, different_layout_per_head=True, num_different_global_patterns=2, attention="unidirectional"
        ),
    ),
    "variable": (
        {"local_window_blocks": [1, 3], "global_block_indices": [2], "global_block_end_indices": [4]},
        lambda: attention_layouts.variable(
            4, 9, local_window_blocks=[1, 3], global_block_indices=[2], global_block_end_indices=[4]
        ),
    ),
    "bigbird": ({}, lambda: attention_layouts.bigbird(4, 9, num_random_blocks=0)),  # as JSON has it, not the class
    "bslongformer": (
        {"num_sliding_window_blocks": 5, "global_block_indices": [3]},
        lambda: attention_layouts.bslongformer(4, 9, num_sliding_window_blocks=5, global_block_indices=[3]),
    ),
    "local_sliding_window": ({}, lambda: attention_layouts.local_sliding_window(4, 9)),
}


@pytest.mark.parametrize("mode", READS)
def test_a_section_is_a_rule_of_its_pattern(mode):
    section, want = RULES[mode]
    for edition in ("0.19.6", "docs"):
        config = SparseAttentionConfig.from_dict({"mode": mode, **section}, defaults=edition)
        assert config(4, 9) == want() and config.block == want().block
    wide = SparseAttentionConfig(mode="local_sliding_window", attention="bidirectional")
    assert wide(4, 9) == attention_layouts.local_sliding_window(4, 9, attention="bidirectional")


def test_random_blocks_follow_from_a_key():
    config = SparseAttentionConfig(mode="bigbird", num_random_blocks=2)
    assert config(2, 30) == config(2, 30, key=0) != config(2, 30, key=1)


class Own(nn.Module):
    """A model that has sparse attention, or some of torch's."""

    def __init__(self, rule):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.attend = F.scaled_dot_product_attention if rule is None else SparseSelfAttention(rule)

    def forward(self, x):
        return self.attend(*self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)).square().mean()


def initialized(model, section):
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "sparse_attention": section}
    step, state, _, _ = fds.initialize(model, config=config)
    return step(state, torch.ones(2, 64, 8))[1]["loss"]


def test_a_model_of_its_own_has_the_section_and_one_without_is_refused():
    section = {"mode": "bslongformer", "num_sliding_window_blocks": 1}
    rule = SparseAttentionConfig.from_dict(section)
    assert initialized(Own(rule), section).isfinite()
    for refused in (Own(None), fds.Layers([nn.Linear(8, 8)], F.mse_loss)):
        with pytest.raises(ConfigError, match="SparseSelfAttention") as error:
            initialized(refused, section)
        assert error.value.where == "sparse_attention"
    assert initialized(Own(None), {"mode": "dense"}).isfinite()


def test_the_documented_defaults_do_not_contradict_each_other():
    config = SparseAttentionConfig(num_local_blocks=2, different_layout_per_head=False, defaults="docs")
    assert (config.num_different_global_patterns, SparseAttentionConfig().num_different_global_patterns) == (4, 1)


@pytest.mark.parametrize("mode", READS)
@pytest.mark.parametrize("name", CHANGED)
def test_a_key_is_for_the_modes_that_read_it(mode, name):
    given = {"mode": mode, name: CHANGED[name]}
    if name == "num_different_global_patterns":
        given["different_layout_per_head"] = True
    if name == "global_block_end_indices":
        given["global_block_indices"] = [0]
    if name in READS[mode]:
        assert SparseAttentionConfig.from_dict(given).to_dict() == given
    else:
        with pytest.raises(ConfigError) as refused:
            SparseAttentionConfig.from_dict(given)
        assert refused.value.where == f"mode, {name}"


def test_a_mode_that_is_not_known_yet_reads_every_key():
    assert SparseAttentionConfig.from_dict({**CHANGED, "mode": "auto"}).to_dict() == {**CHANGED, "mode": "auto"}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"num_local_blocks": 4, "num_global_blocks": 3}, "num_local_blocks, num_global_blocks"),
        ({"num_different_global_patterns": 2}, "different_layout_per_head, num_different_global_patterns"),
        (
            {"num_different_global_patterns": 3, "num_global_blocks": 2, "different_layout_per_head": True},
            "num_local_blocks, num_global_blocks, num_different_global_patterns",
        ),
        (
            {"attention": "unidirectional", "horizontal_global_attention": True},
            "attention, horizontal_global_attention",
        ),
        ({"mode": "variable", "global_block_end_indices": [1, 2]}, "global_block_indices, global_block_end_indices"),
        (
            {"mode": "bslongformer", "global_block_indices": [2], "global_block_end_indices": [2]},
            "global_block_indices, global_block_end_indices",
        ),
    ],
)
def test_a_pattern_that_cannot_be_laid_out_is_refused_with_all_keys_of_it(wrong, where):
    with pytest.raises(ConfigError) as refused:
        SparseAttentionConfig.from_dict(wrong)
    assert refused.value.where == where
    unknown = {**wrong, where.split(", ")[0]: "auto"}
    assert SparseAttentionConfig.from_dict(unknown).to_dict() == unknown


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"mode": "sliding"}, "mode"),
        ({"block": 0}, "block"),
        ({"block": "16"}, "block"),
        ({"local_window_blocks": 4}, "local_window_blocks"),
        ({"blocks": 16}, "blocks"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(wrong, where):
    with pytest.raises(ConfigError) as refused:
        SparseAttentionConfig.from_dict(wrong)
    assert refused.value.where == where
