"""Block-sparse attention, as a record."""

import pytest

from fds.config.field import NotYet, keys
from fds.config.keys.model import READS, SparseAttentionConfig
from fds.errors import ConfigError

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


def test_an_empty_section_asks_for_the_fixed_pattern_and_a_dense_one_for_nothing():
    config = SparseAttentionConfig.from_dict({})
    meaning = keys(SparseAttentionConfig)["mode"][1].meaning
    assert isinstance(meaning, NotYet)
    assert config.mode not in meaning.nothing and "dense" in meaning.nothing


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
