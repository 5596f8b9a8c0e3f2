"""Mutants of fds/nn."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "layer-drops-with-one-mask",
        "fds/nn/transformer_layer.py",
        "p=p, seed=seed if p else None, offset=offset)",
        "p=p, seed=seed if p else None, offset=AFTER_ATTENTION)",
        "both dropouts after attention and feed-forward drop the same elements",
        "tests/nn/test_transformer_layer.py",
    ),
    Mutant(
        "layer-adds-the-wrong-residual",
        "fds/nn/transformer_layer.py",
        "self.output_b, u if pre else m, seed, AFTER_FEED_FORWARD)",
        "self.output_b, u, seed, AFTER_FEED_FORWARD)",
        "with post layer norm the residual is taken before the norm",
        "tests/nn/test_transformer_layer.py tests/nn/test_against_bert.py",
    ),
    Mutant(
        "layer-mask-of-the-smallest-number",
        "fds/nn/transformer_layer.py",
        "never = max(torch.finfo(mask.dtype).min, LEAST_BIAS)",
        "never = LEAST_BIAS",
        "in float16 the smallest number does not mask a key",
        "tests/nn/test_transformer_layer.py",
    ),
    Mutant(
        "vocabulary-of-equal-parts",
        "fds/nn/parallel/vocab_cross_entropy.py",
        "axis.index * each + min(axis.index, more)",
        "axis.index * held",
        "with 5 columns on 3 ranks targets are looked for in the wrong ones",
        "tests/nn/parallel/test_vocab_cross_entropy.py tests/nn/parallel/test_linear_cross_entropy.py",
    ),
    Mutant(
        "vocabulary-with-its-padding",
        "fds/nn/parallel/vocab_cross_entropy.py",
        "min(max(total - axis.index * held, 0), held)",
        "held",
        "columns of padding count",
        "tests/nn/parallel/test_vocab_cross_entropy.py",
    ),
    Mutant(
        "vocabulary-head-of-one-rank",
        "fds/nn/parallel/linear_cross_entropy.py",
        "along.start_all_reduce(dhidden).wait()",
        "pass",
        "hidden has the gradient of one rank's classes alone",
        "tests/nn/parallel/test_linear_cross_entropy.py",
    ),
)
