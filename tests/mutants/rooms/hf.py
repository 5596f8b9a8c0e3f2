"""Mutants of fds/hf, and of the layers of sparse attention."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "reserved-rows-are-repeated",
        "fds/hf/_positions.py",
        "first, rows = table.weight[:reserved], table.weight[reserved:]",
        "first, rows = table.weight[:reserved], table.weight",
        "a longer table of RoBERTa repeats the rows before the first position",
        "tests/hf/test_stand_ins.py",
    ),
    Mutant(
        "cached-keys-of-another-layout",
        "fds/hf/_sparse_models.py",
        "if not layouts.is_cropped or masks",
        "if masks",
        "generation with a cache mixes layouts of several lengths",
        "tests/hf/test_stand_ins.py",
    ),
    Mutant(
        "every-rank-has-the-first-heads",
        "fds/nn/parallel/sparse_attention.py",
        "first = 0 if region is None else region.axis.index * heads",
        "first = 0",
        "ranks of a tensor axis compute their heads by the layout of the first rank's",
        "tests/nn/test_sparse_self_attention.py",
    ),
)
