"""Sample text from the model, a byte at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fds


def generate(
    evaluate: Callable,
    prompt: str,
    *,
    num_bytes: int,
    context: int,
    key: Tensor,
    device: torch.device,
    temperature: float = 0.8,
    top_k: int = 40,
) -> str:
    """Return the prompt and `num_bytes` more, each drawn from the `top_k` likeliest next bytes.

    `evaluate` is a `step.evaluator(state)`. Nothing is cached: every byte runs the model on the whole window, which
    at these sizes takes a few ms.
    """
    generator = fds.random.generator(key)
    text = list(prompt.encode() or b"\n")
    for _ in range(num_bytes):
        inputs = torch.tensor([text[-context:]], device=device)
        logits = evaluate((inputs, inputs), outputs=True)["outputs"][0, -1].float().cpu()
        values, places = logits.topk(top_k)
        choice = torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)
        text.append(int(places[choice]))
    return bytes(text).decode(errors="replace")
