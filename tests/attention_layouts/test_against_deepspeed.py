"""Layouts list the blocks that DeepSpeed 0.19.6 lists, for thousands of random parameters, whole and cropped."""

import json
import random
from pathlib import Path

import pytest

from fds import attention_layouts
from fds.attention_layouts import AttentionLayout
from fds.errors import AttentionLayoutError
from tests.golden.attention_layouts import CASES, digest, longer, parameters, rows

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "attention_layouts.json").read_text())
ERRORS = {"ValueError", "NotImplementedError", "ZeroDivisionError"}


def make(case: int, blocks: int) -> AttentionLayout:
    mode, heads, _, options = parameters(case)
    if mode in ("variable", "bigbird"):
        options["key"] = random.Random(case)
    return getattr(attention_layouts, mode)(heads, blocks, **options)


def is_silent(case: int, blocks: int) -> bool:
    """Say whether DeepSpeed takes parameters without doing what they say."""
    mode, _, _, options = parameters(case)
    if mode in ("bslongformer", "local_sliding_window") and options["attention"] == "sideways":
        return True
    if mode in ("variable", "bslongformer"):
        ends = options["global_block_end_indices"] or [index + 1 for index in options["global_block_indices"]]
        return max(ends, default=0) > blocks
    return mode == "fixed" and options["num_global_blocks"] > blocks


def outcome(case: int, blocks: int, cropped: int) -> str:
    try:
        return digest(make(case, blocks).cropped(cropped).as_array())
    except AttentionLayoutError:
        return "refused"


@pytest.mark.parametrize("kind", ["hashes", "cropped"])
def test_a_layout_is_deepspeeds_and_what_it_refuses_or_ignores_is_refused(kind):
    recorded = GOLDEN[kind].split()
    assert len(recorded) == CASES
    counts = {"refused": 0, "silent": 0, "equal": 0}
    for case, want in enumerate(recorded):
        blocks = parameters(case)[2]
        length = longer(blocks) if kind == "cropped" else blocks
        ours = outcome(case, length, blocks)
        silent = is_silent(case, length)
        assert ours == ("refused" if silent or want in ERRORS else want), (case, parameters(case))
        counts["silent" if silent and want not in ERRORS else "refused" if ours == "refused" else "equal"] += 1
    assert counts["equal"] > 2000 and counts["silent"] > 30 and counts["refused"] > 200


def test_layouts_that_are_recorded_whole_are_the_same_block_for_block():
    for case, text in GOLDEN["whole"].items():
        layout = make(int(case), parameters(int(case))[2])
        assert rows(layout.as_array()) == text
        heads = [[[x == "#" for x in row] for row in head.split("\n")] for head in text.split("\n\n")]
        assert AttentionLayout.from_dense(heads) == layout
    assert len(GOLDEN["whole"]) >= 8
