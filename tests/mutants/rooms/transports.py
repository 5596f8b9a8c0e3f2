"""Mutants of fds/transports: whose error is kept, what arrives at whom."""

from tests.mutants.mutant import Mutant

LAW = "tests/laws/test_law_12_coded.py"
MUTANTS = (
    Mutant(
        "the-error-of-sums-is-forgotten",
        "fds/transports/code.py",
        "work, messages = self.code.share(axis, own, kept)",
        "work, messages = self.code.share(axis, own, None)",
        "at stage 0 what the second message loses is lost for good",
        LAW,
    ),
    Mutant(
        "a-rank-codes-its-own",
        "fds/transports/code.py",
        "            if r == self.index:\n                into.copy_(self.own)",
        "            if r != r:\n                into.copy_(self.own)",
        "what a rank sends itself is what memory held",
        LAW,
    ),
    Mutant(
        "errors-of-the-second-hop-lie-elsewhere",
        "fds/transports/_hierarchical.py",
        "mine = None if errors is None else errors[local.index].view(node.size, -1)",
        "mine = None if errors is None else errors[0].view(node.size, -1)",
        "what is lost between nodes is kept of another slice",
        LAW,
    ),
    Mutant(
        "infinity-is-quantized",
        "fds/kernels/messages/quantized.py",
        "scale.masked_fill_(~torch.isfinite(scale), torch.nan)",
        "scale.masked_fill_(~torch.isfinite(scale), 1.0)",
        "an overflow arrives as a number, and no rank skips the step",
        "tests/transports/test_codes.py",
    ),
)
