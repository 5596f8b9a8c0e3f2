"""Mutants of what rounds the inputs of modules, and of products in float8."""

from tests.mutants.mutant import Mutant

TESTS = "tests/transforms/test_quantize_activations.py"

MUTANTS = (
    Mutant(
        "float8-with-scales-of-any-number",
        "fds/compression/float8.py",
        "scale = scale.log2().floor().exp2()",
        "pass",
        "scales of rows are no powers of two",
        "tests/transforms/test_float8.py -k torchao",
    ),
    Mutant(
        "float8-of-gradients-in-e4m3",
        "fds/compression/float8.py",
        "E5M2 if ctx.recipe",
        "E4M3 if ctx.recipe",
        "gradients of the recipe for tensors have the wrong format",
        "tests/transforms/test_float8.py -k torchao",
    ),
    Mutant(
        "float8-that-is-hidden",
        "fds/transforms/float8.py",
        'is not nn.Linear.forward or "forward" in vars(module)',
        "is not nn.Linear.forward",
        "what rounds the input of a layer is lost where float8 comes after it",
        "tests/transforms/test_float8.py -k before_are",
    ),
    Mutant(
        "activations-on-a-grid-with-its-end",
        "fds/compression/activations.py",
        "clamp(-half, half - 1)",
        "clamp(-half, half)",
        "a symmetric grid has one number more than its bits can say",
        f"{TESTS} -k by_hand",
    ),
    Mutant(
        "activations-of-a-constant",
        "fds/compression/activations.py",
        "zero = torch.where(flat, least, (least / step).round() * step)",
        "zero = (least / step).round() * step",
        "constants are rounded to whole numbers",
        f"{TESTS} -k constants",
    ),
    Mutant(
        "activations-with-the-range-of-the-call",
        "fds/compression/activations.py",
        "used = torch.where((range_ == 0).all(), most(self.seen(x, range_)), range_)",
        "used = self.seen(x, range_)",
        "static ranges are seen and never used",
        f"{TESTS} -k by_hand",
    ),
    Mutant(
        "activations-of-infinity",
        "fds/transforms/quantize_activations.py",
        "torch.where(new.isfinite().all(), after, old)",
        "after",
        "a range that saw infinity, or nothing, is lost",
        f"{TESTS} -k waits_for_finite",
    ),
    Mutant(
        "submodules-of-evaluations",
        "fds/loss/submodules.py",
        "in_evaluation: ClassVar = True",
        "in_evaluation: ClassVar = False",
        "evaluations of a step that follows its state cannot be run",
        f"{TESTS} -k by_hand",
    ),
    Mutant(
        "submodules-of-a-fused-layer",
        "fds/loss/submodules.py",
        "owner.activation_relu_or_gelu = 0",
        "pass",
        "torch's encoder computes evaluations with weights of layers that it does not call",
        f"{TESTS} -k fuse",
    ),
    Mutant(
        "ranges-of-pieces",
        "fds/transforms/quantize_activations.py",
        "(lambda ends: largest(ends, region.axis))",
        "(lambda ends: ends)",
        "each rank of a tensor axis has a grid of its own in front of a row",
        f"{TESTS} -k tensor_axis",
    ),
)
