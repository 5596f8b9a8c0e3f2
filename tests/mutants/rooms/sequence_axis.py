"""Mutants of a sequence axis: who adds what, which rows are whose, who sees whom in a ring."""

from tests.mutants.mutant import Mutant

TRAINING, ATTENTION = "tests/sequence_axis/test_training.py", "tests/nn/parallel/test_attention.py"
MUTANTS = (
    Mutant(
        "a-sequence-adds-no-gradients",
        "fds/transforms/context_parallel.py",
        'return Replicated("sum")',
        'return Replicated("same")',
        "each rank of a sequence steps by the gradients of its own tokens",
        TRAINING,
    ),
    Mutant(
        "gradients-are-added-twice",
        "fds/step/topology.py",
        "return data.issuperset(_names(one.axis))",
        "return False",
        "ranks that are a sequence's and data ranks too are one axis in two roles",
        TRAINING,
    ),
    Mutant(
        "weights-of-a-sequence-are-not-added",
        "fds/step/topology.py",
        'PASSING: tuple[Role, ...] = ("data", "sequence")',
        'PASSING: tuple[Role, ...] = ("data",)',
        "where gradients are divided before the end, each rank of a sequence divides by its own weight",
        TRAINING,
    ),
    Mutant(
        "a-sequence-has-rows-of-its-own",
        "fds/step/topology.py",
        "            if name not in _names(self.sequence):",
        "            if name:",
        "ranks of a sequence take other rows than each other",
        TRAINING,
    ),
    Mutant(
        "parts-draw-alike",
        "fds/step/topology.py",
        "return () if self.sequence is None else (self.sequence.index,)",
        "return ()",
        "tokens on different ranks have the same dropout",
        TRAINING,
    ),
    Mutant(
        "ranks-evaluate-apart",
        "fds/step/evaluation.py",
        " or step.dimensions.sequence is not None",
        "",
        "a rank waits in attention for one that has no more batches",
        TRAINING,
    ),
    Mutant(
        "a-zigzag-sees-the-later-chunk",
        "fds/nn/parallel/ring.py",
        "(EVERY, slice(half), False) if is_earlier",
        "(EVERY, EVERY, False) if is_earlier",
        "queries see keys after them",
        ATTENTION,
    ),
    Mutant(
        "gradients-do-not-travel",
        "fds/nn/parallel/ring.py",
        "                grads += late.wait()",
        "                late.wait()",
        "keys get the gradients of the last rank that saw them alone",
        ATTENTION,
    ),
    Mutant(
        "unseen-keys-weigh",
        "fds/kernels/attentions/partial.py",
        "lse.masked_fill(_unseeing(q, key_padding, causal), -math.inf)",
        "lse",
        "a query that sees none of a rank's keys counts that rank with weight 1",
        ATTENTION,
    ),
    Mutant(
        "repeated-heads-are-too-many",
        "fds/nn/parallel/ulysses.py",
        "math.lcm(x.shape[1], n) // x.shape[1]",
        "n",
        "keys are sent n times where once is enough",
        ATTENTION,
    ),
)
