"""What runs for every kernel on a device, and why, in words: for descriptions of steps, and for `fds doctor`."""

from __future__ import annotations

from collections.abc import Collection

import torch

from fds.kernels import choice, evidence

RUNS = {choice.TRITON: "Triton kernel", choice.REFERENCE: "torch's operators"}


def explanations(device: torch.device, more: Collection[torch.dtype] = ()) -> dict[str, str]:
    """Return for every kernel what runs on a device, and why, for the dtypes of kernels and `more`, told apart."""
    texts = {}
    for kernel in evidence.HOMES:
        dtypes_of: dict[str, list[str]] = {}
        for dtype in dict.fromkeys((*choice.DTYPES, *more)):
            text = f"{RUNS[choice.chosen(kernel, device, dtype)]} ({choice.explained(kernel, device, dtype)})"
            dtypes_of.setdefault(text, []).append(str(dtype).removeprefix("torch."))
        if len(dtypes_of) == 1:
            texts[kernel] = next(iter(dtypes_of))
        else:
            texts[kernel] = "; ".join(f"{text} in {', '.join(dtypes)}" for text, dtypes in dtypes_of.items())
    return texts


def summary(device: torch.device, more: Collection[torch.dtype] = ()) -> str:
    """Return the same as one text: one line if it is the same for all kernels, else one for each text."""
    kernels: dict[str, list[str]] = {}
    for kernel, text in explanations(device, more).items():
        kernels.setdefault(text, []).append(kernel)
    if len(kernels) == 1:
        return next(iter(kernels))
    return "\n".join(f"{', '.join(names)}: {text}" for text, names in kernels.items())
