"""Mutants of fds/transports: whose error is kept, what arrives at whom."""

from tests.mutants.mutant import Mutant

LAW = "tests/laws/test_law_12_coded.py"
ROWS = "tests/laws/test_law_12_rows.py"
MUTANTS = (
    Mutant(
        "the-error-of-sums-is-forgotten",
        "fds/transports/_code.py",
        "return self.code.spread(axis, own, whole, kept)",
        "return self.code.spread(axis, own, whole, None)",
        "at stage 0 what the second message loses is lost for good",
        LAW,
    ),
    Mutant(
        "a-rank-codes-its-own",
        "fds/transports/_code.py",
        "            if r == index:\n                into.copy_(own)",
        "            if r != r:\n                into.copy_(own)",
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
        "fds/kernels/quantized.py",
        "scale.masked_fill_(~torch.isfinite(scale), torch.nan)",
        "scale.masked_fill_(~torch.isfinite(scale), 1.0)",
        "an overflow arrives as a number, and no rank skips the step",
        "tests/transports/test_codes.py",
    ),
    Mutant(
        "a-row-is-what-its-sum-says",
        "fds/transports/_rows.py",
        "return x.view(_BITS[x.dtype.itemsize]).any(-1)",
        "return x.sum(-1) != 0",
        "a row whose numbers cancel is never sent",
        ROWS,
    ),
    Mutant(
        "rows-without-a-place-are-dropped",
        "fds/transports/_rows.py",
        "values.masked_fill_(place[-1] > len(at), math.nan)",
        "pass",
        "more rows than were promised are lost in silence",
        ROWS,
    ),
    Mutant(
        "what-stays-is-counted",
        "fds/transports/_rows.py",
        "counts[axis.index] = 0  # of what stays here",
        "counts[axis.index - 1] = 0",
        "what goes to one rank has no room",
        ROWS,
    ),
    Mutant(
        "replicas-send-what-one-rank-has",
        "fds/transports/_rows.py",
        '{"reduce": 1, "combine": self.bucket.num_ranks}.get(leg, self.ranks)',
        '{"reduce": 1, "combine": 1}.get(leg, 1)',
        "sums of several ranks have no room",
        ROWS,
    ),
    Mutant(
        "slices-cut-rows",
        "fds/step/structure.py",
        "trained, kind, whole, unit, most))",
        "trained, kind, whole, 1, most))",
        "an embedding is never sent by rows",
        ROWS,
    ),
    Mutant(
        "errors-of-all-transports",
        "fds/step/sharding/buckets.py",
        "if self.kept is not None and way.keeps else None",
        "if self.kept is not None else None",
        "a transport that keeps nothing is given errors",
        ROWS,
    ),
)
