"""Launches of the loss with its gradient, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.logit_rows import launch_with_gradient as launch


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    targets, loss = torch.empty(512, dtype=torch.int64), torch.empty(512)
    for num_classes in [1000, 50257, 65536]:
        for smoothing in (0.0, 0.1):
            # rows as linear_cross_entropy has them, padded to 64 elements
            logits = torch.empty(512, -(-num_classes // 64) * 64, dtype=dtype)[:, :num_classes]
            yield (
                f"{num_classes} classes, {smoothing=}",
                lambda x=logits, s=smoothing: launch(x, targets, loss, s, 1e-4, -100),
            )
