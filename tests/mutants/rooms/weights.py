"""Mutants of whole weights that are handed out: what is gathered, in which order, what a consumer leaves; rows."""

from tests.mutants.mutant import Mutant

STREAM, PLAN, NAMES = "fds/step/weights/stream.py", "fds/step/weights/plan.py", "fds/step/weights/names.py"
TESTS = "tests/sharding/test_weights.py"
PRODUCTS, ROWS = "fds/transforms/batch_invariant/products.py", "tests/transforms/test_batch_invariant.py"

MUTANTS = (
    Mutant(
        "one-that-is-let-go-of-leaves-others-waiting",
        STREAM,
        'stream.end("it was let go of")',
        "pass",
        "ranks wait for one whose consumer has left its loop",
        "tests/sharding/test_weights_on_real_ranks.py",
    ),
    Mutant(
        "the-next-call-ends-nothing",
        "fds/step/checks/agreement.py",
        "    step.runtime.end_all()\n",
        "",
        "a rank that keeps what it does not read waits for others in the next step, as they for it",
        "tests/sharding/test_weights_on_real_ranks.py",
    ),
    Mutant(
        "memory-that-a-consumer-has",
        STREAM,
        "b.base.numel() >= num_bytes and b.is_alone()",
        "b.base.numel() >= num_bytes",
        "what a consumer keeps is written over by what comes later",
        TESTS,
    ),
    Mutant(
        "groups-of-any-size",
        PLAN,
        "if kinds and size + num_bytes > options.bucket_bytes // 2:",
        "if False:",
        "all of a bucket is gathered at once, whatever bucket_bytes says",
        TESTS,
    ),
    Mutant(
        "weights-of-a-view-as-they-are-held",
        STREAM,
        "if self.options.view and arrived:",
        "if False:",
        "a view hands out what the state holds",
        TESTS,
    ),
    Mutant(
        "the-last-pattern-counts",
        NAMES,
        "next((p for p in rules if",
        "next((p for p in reversed([*rules]) if",
        "a dict of names follows the last pattern that matches",
        TESTS,
    ),
    Mutant(
        "tied-weights-of-every-stage",
        PLAN,
        "if n not in seen}",
        "}",
        "weights that two stages hold are gathered and handed out twice",
        TESTS,
    ),
    Mutant(
        "a-part-for-the-whole",
        STREAM,
        "        if self.over:\n            raise StateError(",
        "        if self.over:\n            raise StopIteration\n        if False:\n            raise StateError(",
        "a consumer whose weights were ended by another call takes what it has for all of them",
        TESTS,
    ),
    Mutant(
        "a-tile-as-large-as-the-batch",
        PRODUCTS,
        "left = _padded(a, _up(m, ROWS), inner)",
        "return a @ b",
        "a library is given as many rows as there are, and computes them by other kernels",
        ROWS,
    ),
    Mutant(
        "sums-in-the-order-of-the-library",
        PRODUCTS,
        "    size = 1 << (n - 1).bit_length()",
        "    return x.sum(-1)\n    size = 1 << (n - 1).bit_length()",
        "sums over padded rows are added in another order",
        ROWS,
    ),
    Mutant(
        "the-ends-of-tensors-by-other-code",
        "fds/transforms/batch_invariant/operators.py",
        "    size = max(1, -(-numel // BLOCK)) * BLOCK\n",
        "    return function(*args, **kwargs)\n    size = max(1, -(-numel // BLOCK)) * BLOCK\n",
        "the last elements of a tensor are computed by other code than the same ones among more",
        ROWS,
    ),
)
