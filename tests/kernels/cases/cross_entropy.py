"""Launches of the cross-entropy, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.token_loss import cross_entropy


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    targets = torch.empty(512, dtype=torch.int64)
    for num_classes in [1000, 50257, 65536]:
        logits = torch.empty(512, num_classes, dtype=dtype, requires_grad=True)
        yield f"{num_classes} classes", lambda x=logits: cross_entropy(x, targets, z_loss=1e-4).backward()
        yield f"{num_classes} classes, smoothed", lambda x=logits: cross_entropy(x, targets, label_smoothing=0.1)
    chunk = torch.empty(512, 50304, dtype=dtype)[:, :50257].requires_grad_()  # as linear_cross_entropy has them
    yield "50257 of 50304 classes", lambda: cross_entropy(chunk, targets).backward()
