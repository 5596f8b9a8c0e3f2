"""Layouts combine as sets of blocks do, take the memory of what they list, and print."""

import copy
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fds import random
from fds.attention_layouts import (
    AttentionLayout,
    Pattern,
    bigbird,
    bslongformer,
    dense,
    documents,
    draw_png,
    draw_text,
    fixed,
    local_sliding_window,
    pattern as records,
    per_head,
    variable,
)
from fds.errors import AttentionLayoutError

arrays = st.integers(1, 9).flatmap(
    lambda n: st.lists(
        st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n), min_size=3, max_size=3
    )
)


@given(arrays, st.randoms(use_true_random=False), st.sampled_from([2, 2**20]))
def test_layouts_combine_as_sets_of_blocks(array, draw, chunk):
    a = np.array(array)
    b = np.array([[[draw.random() < 0.5 for _ in row] for row in head] for head in array])
    n = a.shape[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "CHUNK", chunk)
        x, y = AttentionLayout.from_dense(a), AttentionLayout.from_dense(b)
        assert (x.as_array() == a).all() and x.nonzeros == a.sum() and x.density == a.mean()
        assert ((x | y).as_array() == a | b).all()
        assert ((x & y).as_array() == a & b).all()
        assert (x.causal().as_array() == np.tril(a)).all()
        assert (x.cropped(1 + n // 2).as_array() == a[:, : 1 + n // 2, : 1 + n // 2]).all()
        assert (per_head([x, y]).as_array() == np.concatenate([a, b])).all()
        assert (x.of_head(2).transposed().as_array() == a[2].T).all()
        assert [list(x.of_head(1).row(r)) for r in range(n)] == [list(np.flatnonzero(row)) for row in a[1]]
        assert (x == y) == bool((a == b).all()) and x == copy.deepcopy(x) and hash(x) == hash(x | x)


def test_heads_of_one_pattern_share_it():
    layout = fixed(12, 16, num_different_global_patterns=4, different_layout_per_head=True)
    assert layout.heads == (0, 1, 2, 3) * 3 and len(layout.patterns) == 4
    assert per_head([dense(1, 8)] * 5) == dense(5, 8) and len(per_head([dense(1, 8)] * 5).patterns) == 1


@pytest.mark.parametrize("mode", [bigbird, variable])
def test_random_blocks_follow_from_the_key_alone(mode):
    blocks, num, options = 40, 5, {"different_layout_per_head": True}
    rest = mode(4, blocks, num_random_blocks=0)
    first = mode(4, blocks, num_random_blocks=num, key=7, **options)
    torch.manual_seed(1)
    assert first == mode(4, blocks, num_random_blocks=num, key=random.key(7), **options)
    assert first != mode(4, blocks, num_random_blocks=num, key=8, **options)
    assert len(first.patterns) == 4 and first & rest == rest
    assert len(mode(4, blocks, num_random_blocks=num, key=7).patterns) == 1
    # columns of the rest of the layout are drawn as often as others, so no count is exact but in an empty rest
    assert (first.as_array().sum(-1) <= rest.as_array().sum(-1) + num).all()


def test_random_blocks_of_a_row_are_uniform_among_sets_of_so_many():
    rows, n, num = 6000, 5, 2
    from fds.attention_layouts.patterns import _drawn

    (drawn,) = _drawn(1, np.full(rows, n), num, 3)
    columns = drawn.columns.reshape(rows, num)
    assert (columns[:, 0] < columns[:, 1]).all() and columns.min() == 0 and columns.max() == n - 1
    counts = np.bincount(columns[:, 0] * n + columns[:, 1], minlength=n * n)
    counts = counts[counts > 0]
    assert len(counts) == 10
    assert ((counts - rows / 10) ** 2 / (rows / 10)).sum() < 27.9  # chi-square of 9 degrees of freedom at 0.001


def test_documents_of_packed_rows_see_themselves():
    numbers = np.array([[3, 3, 3, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 5, 5, 5, 5]])
    same = (numbers[:, :, None] == numbers[:, None, :]).any(0)
    same = np.pad(same, ((0, 1), (0, 1)))
    want = same.reshape(5, 2, 5, 2).any((1, 3))
    assert (documents(numbers, block=2).as_array()[0] == want).all()


@pytest.mark.parametrize("make", [bigbird, bslongformer, local_sliding_window, variable])
def test_a_million_tokens_take_the_memory_of_what_is_listed(make):
    tracemalloc.start()
    layout = make(12, 2**16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert layout.tokens == 2**20 and len(layout.patterns) == 1
    assert layout.nbytes < 4 * layout.nonzeros // 12 + 8 * 2**16 + 64 and peak < 100e6


def test_documents_of_a_million_tokens_take_the_memory_of_what_is_listed():
    numbers = np.arange(2**20, dtype=np.int32) // np.array([[1000], [700]], dtype=np.int32)
    tracemalloc.start()
    layout = documents(numbers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < layout.nbytes + 20e6 < 100e6


def test_a_layout_prints_as_a_grid_and_large_ones_by_tenths():
    layout = per_head([local_sliding_window(2, 4), dense(1, 4)]).cropped(3)
    assert str(layout) == "\n".join(
        [
            "heads 0-1: 5 of 9 blocks",
            " 0 #..",
            " 1 ##.",
            " 2 .##",
            "head 2: 9 of 9 blocks",
            " 0 ###",
            " 1 ###",
            " 2 ###",
        ]
    )
    assert draw_text(local_sliding_window(1, 6), width=3).splitlines()[1:] == [" 0 8..", " 2 38.", " 4 .38"]
    assert max(map(len, str(bslongformer(1, 1000)).splitlines())) < 80


def test_a_png_shows_each_pattern(tmp_path):
    draw_png(
        fixed(4, 40, num_different_global_patterns=4, different_layout_per_head=True), tmp_path / "a.png", title="f"
    )
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(AttentionLayoutError, match="cannot be written"):
        draw_png(dense(1, 2), tmp_path / "missing" / "a.png")


NOTHING: Any = None
RAGGED: Any = [[[1, 0], [1]]]
FRACTION: Any = 4.0
LETTER: Any = "a"
REFUSED = {
    "no heads": lambda: dense(0, 4),
    "a block of nothing": lambda: dense(1, 4, block=0),
    "a fraction": lambda: fixed(1, FRACTION),
    "a window that does not divide": lambda: fixed(1, 4, num_local_blocks=3, num_global_blocks=2),
    "patterns of one layout": lambda: fixed(2, 8, num_different_global_patterns=2),
    "too many patterns": lambda: fixed(9, 8, num_different_global_patterns=5, different_layout_per_head=True),
    "rows that see what follows": lambda: fixed(1, 8, attention="unidirectional", horizontal_global_attention=True),
    "no windows": lambda: variable(1, 4, local_window_blocks=[]),
    "an empty window": lambda: variable(1, 4, local_window_blocks=[2, 0]),
    "a global block before the first": lambda: bslongformer(1, 4, global_block_indices=[-1]),
    "an empty range": lambda: bslongformer(1, 4, global_block_indices=[2], global_block_end_indices=[2]),
    "ranges without ends": lambda: variable(1, 4, global_block_indices=[0, 2], global_block_end_indices=[1]),
    "more random blocks than there are": lambda: bigbird(1, 4, num_random_blocks=5),
    "random blocks of row 0": lambda: bigbird(1, 4, num_random_blocks=2, attention="unidirectional"),
    "a window wider than a row": lambda: local_sliding_window(1, 2),
    "an unknown attention": lambda: local_sliding_window(1, 8, attention="causal"),
    "a key that is none": lambda: bigbird(1, 8, key=LETTER),
    "fractions of documents": lambda: documents([0.5, 1.0]),
    "a document in two places": lambda: documents([0, 1, 0]),
    "documents of several lengths": lambda: documents([[0, 1], [0]]),
    "a flag of words": lambda: bigbird(2, 8, different_layout_per_head=LETTER),
    "a flag of numbers": lambda: fixed(2, 8, horizontal_global_attention=FRACTION),
    "another flag of words": lambda: variable(2, 8, different_layout_per_head=LETTER),
    "an array of words": lambda: AttentionLayout.from_dense([[["a", ""], ["b", "c"]]]),
    "an array of several lengths": lambda: AttentionLayout.from_dense(RAGGED),
    "a column beyond the last": lambda: Pattern([0, 1], [5]),
    "a column twice": lambda: Pattern([0, 2, 2], [1, 1]),
    "columns that descend": lambda: Pattern([0, 2, 2], [1, 0]),
    "starts that descend": lambda: Pattern([0, 2, 1, 2], [0, 1]),
    "columns of no row": lambda: Pattern([0, 1], [0, 0]),
    "no rows": lambda: Pattern([0], []),
    "words": lambda: Pattern(LETTER, LETTER),
    "a layout of no heads": lambda: AttentionLayout.of([], 16),
    "a layout of no patterns": lambda: AttentionLayout.of([NOTHING], 16),
    "a head without a pattern": lambda: AttentionLayout(dense(1, 4).patterns, (1,)),
    "patterns of other blocks": lambda: AttentionLayout((*dense(1, 4).patterns, *dense(1, 5).patterns), (0, 1)),
    "a layout of blocks of nothing": lambda: AttentionLayout(dense(1, 4).patterns, (0,), 0),
    "an array that is not square": lambda: AttentionLayout.from_dense(np.ones((1, 2, 3))),
    "more blocks than there are": lambda: dense(1, 4).cropped(5),
    "other blocks": lambda: dense(1, 4) | dense(1, 5),
    "other heads": lambda: dense(1, 4) & dense(2, 4),
    "other tokens": lambda: per_head([dense(1, 4), dense(1, 4, block=32)]),
    "nothing": lambda: per_head([]),
    "a picture of nothing": lambda: draw_text(NOTHING),
    "a picture of no width": lambda: draw_text(dense(1, 4), width=0),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(make):
    from fds.errors import FdsError

    with pytest.raises(FdsError):
        make()


def test_a_block_beyond_the_last_is_drawn():
    with pytest.raises(AttentionLayoutError) as error:
        bslongformer(1, 6, global_block_indices=[0, 9])
    assert error.value.where == "global_block_indices[1]" and "######   ^  block 9 of 0 to 5" in str(error.value)
