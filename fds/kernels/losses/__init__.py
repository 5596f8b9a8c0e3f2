"""Cross-entropy, of logits and of a linear head that never holds all of them."""

from fds.kernels.losses._cross_entropy import check_options, check_targets, counted, cross_entropy, reduced
from fds.kernels.losses._linear_cross_entropy import (
    LinearCrossEntropy,
    cast_and_wanted,
    check,
    chunk_size,
    linear_cross_entropy,
    outputs,
    total_and_gradients,
)

__all__ = [
    "LinearCrossEntropy",
    "cast_and_wanted",
    "check",
    "check_options",
    "check_targets",
    "chunk_size",
    "counted",
    "cross_entropy",
    "linear_cross_entropy",
    "outputs",
    "reduced",
    "total_and_gradients",
]
