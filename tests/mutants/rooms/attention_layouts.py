"""Mutants of fds/attention_layouts, and of the attention over what they list."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "global-column-from-the-first-row",
        "fds/attention_layouts/patterns.py",
        "begin if is_causal else 0",
        "0",
        "rows before a global block see it where attention is unidirectional",
        "tests/attention_layouts/test_against_deepspeed.py",
    ),
    Mutant(
        "window-of-even-width",
        "fds/attention_layouts/patterns.py",
        "row, half = np.arange(blocks), window // 2",
        "row, half = np.arange(blocks), (window - 1) // 2",
        "a window of an even number of blocks is narrower than DeepSpeed's",
        "tests/attention_layouts/test_against_deepspeed.py",
    ),
    Mutant(
        "intersection-is-union",
        "fds/attention_layouts/pattern.py",
        "if least == 2 else",
        "if least == 3 else",
        "layouts combined with & list what either lists",
        "tests/attention_layouts/test_layout.py",
    ),
    Mutant(
        "diagonal-is-full",
        "fds/attention_layouts/block_masks.py",
        "np.tri(tables.shape[1], k=-1, dtype=np.bool_)",
        "np.tri(tables.shape[1], dtype=np.bool_)",
        "FlexAttention sees later tokens of a block on the diagonal",
        "tests/attention_layouts/test_block_masks.py",
    ),
    Mutant(
        "token-does-not-see-itself",
        "fds/kernels/sparse_rows.py",
        "device=scores.device).triu(1)",
        "device=scores.device).triu()",
        "a causal query does not see its own key",
        "tests/kernels/test_sparse.py",
    ),
    Mutant(
        "own-block-is-chosen-again",
        "fds/kernels/block_selection.py",
        "(columns < place[part, None] if causal",
        "(columns <= place[part, None] if causal",
        "a row's own block takes the place of one that it would choose",
        "tests/kernels/test_block_selection.py",
    ),
    Mutant(
        "tokens-see-what-their-block-chose",
        "fds/kernels/sparse_rows.py",
        "(chosen[:, :, None] != self.columns[:, None, :, None]).all(-1)",
        "(chosen[:, :, None] != self.columns[:, None, :, None]).all(-1) & False",
        "a token sees blocks that another token of its block chose",
        "tests/kernels/test_block_selection.py",
    ),
    Mutant(
        "keys-are-mixed-over-documents",
        "fds/nn/block_select_attention.py",
        "before = before * is_same[:, None, :, None]",
        "before = before * 1.0",
        "the convolution of keys adds those of another document",
        "tests/nn/test_block_select_attention.py",
    ),
)
