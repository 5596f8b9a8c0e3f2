"""Log-probabilities of tokens, as an evaluation's outputs."""

from __future__ import annotations

from torch import Tensor

from fds import kernels
from fds.loss import show


def log_probs(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Return the log-probabilities of targets under softmax(logits), and let an evaluation's outputs be these.

    In a loss or an `eval_fn`, after the model: `step.evaluate(state, batch, outputs=True)["outputs"]` is then what this
    returns, and not the logits. In a pipeline outputs are those of the last layer.

    Args:
        logits: (..., V) float32, float16 or bfloat16 (float64 by torch's operators).
        targets: (...) int64.
        ignore_index: tokens with this target have 0.

    Returns:
        (...) float32, float64 for float64.

    Raises `KernelError` for any other dtype, shape or device.
    """
    result = kernels.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none").neg()
    show(result)
    return result
