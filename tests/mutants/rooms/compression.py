"""Mutants of compression: grids of integers, weights that are rounded, and bits that follow time."""

from tests.mutants.mutant import Mutant

BAKE = "tests/compression/test_bake.py"
PRUNED = "tests/compression/test_bake_pruned.py"
GRIDS = "tests/compression/test_grids.py"
WEIGHTS = "tests/transforms/test_quantize_weights.py"

MUTANTS = (
    Mutant(
        "codes-overlap",
        "fds/compression/grids.py",
        "joined |= codes[..., place] << place * width",
        "joined |= codes[..., place] << place",
        "numbers of 4 bits lie in each other's bits",
        GRIDS,
    ),
    Mutant(
        "packed-integers-begin-at-0",
        "fds/compression/grids.py",
        "return codes.add_(self.lowest + _offset(self.bits))",
        "return codes",
        "a packed weight has no negative numbers",
        GRIDS,
    ),
    Mutant(
        "groups-that-are-cut-are-taken-for-equal",
        "fds/compression/grids.py",
        "sizes=None if alike else",
        "sizes=None if True else",
        "columns that are left of several groups have one scale",
        GRIDS,
    ),
    Mutant(
        "zeros-are-divided-by-0",
        "fds/kernels/fake_quantized.py",
        "            return torch.where(scale == 0, 1, scale), 0.0",
        "            return scale, 0.0",
        "a group of zeros is NaN",
        GRIDS,
    ),
    Mutant(
        "the-sign-of-0-is-0",
        "fds/kernels/fake_quantized.py",
        "(x >= 0).to(x.dtype).mul_(2).sub_(1)",
        "x.sign()",
        "1 bit has three values",
        GRIDS,
    ),
    Mutant(
        "clamped-numbers-have-gradients",
        "fds/kernels/fake_quantized.py",
        "    inside = clamped == rounded.q",
        "    inside = clamped == clamped",
        "a number beyond torchao's grid has a gradient",
        GRIDS,
    ),
    Mutant(
        "integers-that-are-not-what-the-loss-sees",
        "fds/compression/bake.py",
        "torch.equal(packed.numbers(), want)",
        "True",
        "a weight that is mixed with itself, or masked afterwards, is baked as integers alone",
        BAKE,
    ),
    Mutant(
        "integers-that-are-cut-are-given-up",
        "fds/compression/bake.py",
        "packed = packed.cut(keeps) if keeps else packed",
        "packed = packed",
        "weights of which rows or columns are cut become numbers again",
        PRUNED,
    ),
    Mutant(
        "zeros-of-a-mask-are-no-integers",
        "fds/compression/bake.py",
        "for mask in (None, want == 0):",
        "for mask in (None,):",
        "a weight that is masked after it was rounded stays in float",
        PRUNED,
    ),
    Mutant(
        "files-are-read-uncut",
        "fds/compression/compressed_files.py",
        "    cut_off(module, filter(None, [_cut_of(module, words) for words in cuts]))\n",
        "",
        "a file of a pruned model does not fit the module that was pruned",
        PRUNED,
    ),
    Mutant(
        "scales-of-rows-lose-their-order",
        "fds/compression/compressed_files.py",
        "scales.repeat_interleave(rows // len(scales), 0)",
        "scales.repeat(rows // len(scales), 1)",
        "rows of a weight in few groups have each other's scales",
        BAKE,
    ),
    Mutant(
        "the-period-stays",
        "fds/transforms/quantize_weights.py",
        "            period *= 2 * factor",
        "            period += period * factor",
        "eigenvalues count half, and no period is doubled twice",
        WEIGHTS,
    ),
    Mutant(
        "the-share-goes-on-falling",
        "fds/transforms/quantize_weights.py",
        "            last = torch.where(step >= t, t, last)",
        "            last = torch.where(step >= t, last, last)",
        "the share of the weight does not begin anew when a bit is dropped",
        WEIGHTS,
    ),
    Mutant(
        "evaluations-draw",
        "fds/transforms/quantize_weights.py",
        "if self.draws and call.training else None",
        "if self.draws else None",
        "an evaluation rounds at random",
        WEIGHTS,
    ),
    Mutant(
        "groups-are-those-of-the-part",
        "fds/transforms/quantize_weights.py",
        "        whole = tuple(x.shape) if cut is None else cut[0]",
        "        whole = tuple(x.shape)",
        "a rank of a tensor axis has scales of its own",
        WEIGHTS,
    ),
)
