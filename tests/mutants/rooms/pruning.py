"""Mutants of pruning: masks, their schedule, and smaller modules."""

from tests.mutants.mutant import Mutant

WEIGHTS = "tests/transforms/test_prune_weights.py"
SCORES = "tests/transforms/test_prune_by_scores.py"
STRUCTURES = "tests/transforms/test_prune_structures.py"
MASKS = "tests/compression/test_masks.py"

MUTANTS = (
    Mutant(
        "the-last-of-equal-scores-stay",
        "fds/compression/masks.py",
        "equal.cumsum(0) <= count - above.sum()",
        "equal.flip(0).cumsum(0).flip(0) <= count - above.sum()",
        "of equal scores others stay than those that come first",
        MASKS,
    ),
    Mutant(
        "blocks-lie-across",
        "fds/compression/masks.py",
        "return cls(int(match[1]), int(match[3]))",
        "return cls(int(match[3]), int(match[1]))",
        '"4x1" is 4 columns of a row',
        MASKS,
    ),
    Mutant(
        "masked-scores-do-not-learn",
        "fds/compression/masks.py",
        "+ (scores - scores.detach())",
        "* (1 + scores - scores.detach())",
        "the gradient of a mask does not reach scores of what is masked",
        SCORES,
    ),
    Mutant(
        "a-late-mask-is-never-made",
        "fds/compression/schedule.py",
        "return late <= LATE or late % LATER == 0",
        "return False",
        "a step that is skipped loses a mask for ever",
        WEIGHTS,
    ),
    Mutant(
        "a-mask-is-made-again-and-again",
        "fds/compression/schedule.py",
        "((step <= self.end) | (old.sum() > final))",
        "(step >= 0)",
        "a mask is that of the weights in the last look, not at the offset",
        WEIGHTS,
    ),
    Mutant(
        "looks-count-from-the-start",
        "fds/compression/schedule.py",
        "(calls - self.start) % self.stride == 0",
        "calls % self.stride == 0",
        "masks are looked at when calls are a multiple of the stride",
        WEIGHTS,
    ),
    Mutant(
        "an-initial-mask-is-in-use-at-once",
        "fds/compression/schedule.py",
        "        return mask.bool() | (step < self.offset)",
        "        return mask",
        "the offset of a mask of initial weights counts for nothing",
        WEIGHTS,
    ),
    Mutant(
        "evaluations-are-not-masked",
        "fds/transforms/prune_weights.py",
        "        if not (self.prunes(leaf) and x",
        "        if not (call.training and self.prunes(leaf) and x",
        "an evaluation sees the weights under the masks",
        WEIGHTS,
    ),
    Mutant(
        "masked-weights-are-scored",
        "fds/transforms/prune_weights.py",
        "return x * (mask * (1 + (summed(scores) - scores.detach())).to(x.dtype))",
        "return x * (mask + (summed(scores) - scores.detach()).to(x.dtype))",
        "what is masked goes on to sum up scores",
        SCORES,
    ),
    Mutant(
        "sums-that-weigh-in-norms",
        "fds/compression/scores.py",
        "FAINT = 2.0**-12",
        "FAINT = 1.0",
        "gradients of scores take part in the clip of all gradients",
        SCORES,
    ),
    Mutant(
        "what-takes-rows-sees-them",
        "fds/transforms/prune_structures.py",
        "other = None if is_vector or self.num_heads else self.related.weight_of(name)",
        "other = None",
        "what an activation makes of 0 reaches the next layer",
        STRUCTURES,
    ),
    Mutant(
        "biases-stay",
        "fds/transforms/prune_structures.py",
        'if is_vector and not self.num_heads and name.rpartition(".")[2] == "bias":',
        "if False:",
        "biases of pruned rows are not masked",
        STRUCTURES,
    ),
    Mutant(
        "related-scores-learn-too",
        "fds/transforms/prune_structures.py",
        "gate = gate.detach().repeat_interleave",
        "gate = gate.repeat_interleave",
        "scores have the gradient of what takes the rows as well",
        STRUCTURES,
    ),
    Mutant(
        "fused-heads-of-queries-alone",
        "fds/transforms/prune_structures.py",
        "rows = keep.repeat_interleave(size).repeat(times)",
        "rows = keep.repeat_interleave(size * times)",
        "rows of queries, keys and values of other heads are dropped",
        STRUCTURES,
    ),
    Mutant(
        "statistics-of-other-channels",
        "fds/compression/_shrink.py",
        '("weight", "bias", "running_mean", "running_var")',
        '("weight", "bias")',
        "a smaller batch norm keeps the statistics of all channels",
        STRUCTURES,
    ),
)
