"""A layout and a `BlockMask` of FlexAttention say the same of each token."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from fds.attention_layouts import bigbird, dense, fixed, from_block_mask, local_sliding_window, to_block_mask
from fds.errors import AttentionLayoutError

LAYOUTS = {
    "shared": bigbird(3, 21, num_random_blocks=2, block=4),
    "per head": fixed(3, 24, num_different_global_patterns=3, different_layout_per_head=True, block=4),
    "dense": dense(3, 16, block=4),
    "a window": local_sliding_window(3, 19, num_sliding_window_blocks=9, block=4),
}


def visible(layout, causal):
    seen = layout.as_array().repeat(layout.block, 1).repeat(layout.block, 2)
    return np.tril(seen) if causal else seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_block_mask_sees_what_the_layout_lists(layout, causal):
    mask = to_block_mask(layout, size=16, causal=causal)
    want = visible(layout, causal)
    seen = create_mask(mask.mask_mod, 1, 3, layout.tokens, layout.tokens, device="cpu")[0]
    assert (seen.numpy() == want).all()
    # blocks: full ones are all seen, and what is in no block is not seen
    n = -(-layout.tokens // 16)
    padded = np.pad(want, ((0, 0), (0, 16 * n - layout.tokens), (0, 16 * n - layout.tokens)))
    shares = padded.reshape(3, n, 16, n, 16).mean((2, 4))
    for h in range(3):
        i = h if mask.kv_num_blocks.shape[1] > 1 else 0
        for row in range(n):
            partial = mask.kv_indices[0, i, row, : mask.kv_num_blocks[0, i, row]].tolist()
            assert mask.full_kv_indices is not None and mask.full_kv_num_blocks is not None
            full = mask.full_kv_indices[0, i, row, : mask.full_kv_num_blocks[0, i, row]].tolist()
            assert full == np.flatnonzero(shares[h, row] == 1).tolist()
            assert partial == np.flatnonzero((shares[h, row] > 0) & (shares[h, row] < 1)).tolist()
    back = from_block_mask(mask, block=4, causal=causal)
    assert (back.as_array() == (layout.causal() if causal else layout).as_array()[: back.num_heads]).all()


def test_a_mask_of_flex_attention_becomes_a_layout():
    window = lambda b, h, q, kv: ((q // 8 - kv // 8).abs() <= 1) & (q >= kv)
    mask = create_block_mask(window, 1, 1, 100, 100, device="cpu", BLOCK_SIZE=32)
    layout = from_block_mask(mask, block=8, causal=True)
    assert layout == local_sliding_window(1, 13, block=8)
    with pytest.raises(AttentionLayoutError) as error:
        from_block_mask(mask, block=8)
    assert error.value.where == "head 0, block (0, 0)" and error.value.got.splitlines()[:2] == ["#.......", "##......"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_layout_in_flex_attention_computes_what_dense_attention_with_its_mask_does():
    from torch.nn.attention.flex_attention import flex_attention

    layout = LAYOUTS["per head"]
    q, k, v = torch.randn(3, 1, 3, layout.tokens, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    out = flex_attention(q, k, v, block_mask=to_block_mask(layout, size=16))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.tensor(visible(layout, False)))
    torch.testing.assert_close(out, want)


NO_LAYOUT: Any = None
NO_FLAG: Any = 1
REFUSED = {
    "no layout": lambda: to_block_mask(NO_LAYOUT),
    "a device of words": lambda: to_block_mask(dense(1, 4), device="nowhere"),
    "a flag of numbers": lambda: to_block_mask(dense(1, 4), causal=NO_FLAG),
    "no mask": lambda: from_block_mask(NO_LAYOUT),
    "another flag of numbers": lambda: from_block_mask(to_block_mask(dense(1, 4)), causal=NO_FLAG),
    "blocks that do not fit": lambda: to_block_mask(dense(1, 4, block=48)),
    "finer blocks that do not fit": lambda: from_block_mask(to_block_mask(dense(1, 4), size=16), block=12),
    "several batch entries": lambda: from_block_mask(
        create_block_mask(lambda b, h, q, kv: q >= 0, 2, 1, 128, 128, device="cpu")
    ),
    "keys that are not the queries": lambda: from_block_mask(
        create_block_mask(lambda b, h, q, kv: q >= 0, 1, 1, 128, 256, device="cpu")
    ),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(make):
    with pytest.raises(AttentionLayoutError):
        make()
