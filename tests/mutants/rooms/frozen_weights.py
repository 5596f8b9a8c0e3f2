"""Mutants of frozen weights in 8 bits: which numbers a scale is of, and who sees codes."""

from tests.mutants.mutant import Mutant

LAW = "tests/transforms/test_quantize_frozen.py"
FILE = "fds/transforms/freeze.py"
MUTANTS = (
    Mutant(
        "the-last-group-without-a-scale",
        FILE,
        "        numbers[..., full * GROUP :].mul_(scales[..., full:])\n",
        "",
        "numbers of a group that is not full are codes",
        LAW,
    ),
    Mutant(
        "trained-weights-in-8-bits",
        FILE,
        "not (leaf.trained or x.dtype",
        "not (x.dtype",
        "what is trained becomes codes, which nothing trains",
        LAW,
    ),
    Mutant(
        "numbers-without-precision",
        "fds/step/views.py",
        "return x.to(self.gather.dtype_of(leaf.name, x.dtype))",
        "return x",
        "the loss sees frozen weights in float32 beside others in 16 bits",
        LAW,
    ),
    Mutant(
        "views-see-codes",
        "fds/step/all_stations.py",
        "(Decode(self.encodings, self.gather), *self.views) if self.encodings",
        "(*self.views, Decode(self.encodings, self.gather)) if self.encodings",
        "a view that stands before the transform is given codes",
        LAW,
    ),
)
