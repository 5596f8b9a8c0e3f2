"""Messages of few bits: written, and summed where they arrive, beside torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.goals import COPY_FORWARD
from benchmarks.kernel_streams import drawn, together
from benchmarks.kernel_works import Goals, Setting, Way, Work
from fds.kernels import quantized, signs, sums

RANKS = 8
CODES = {8: 256, 4: 256, 1: 2048}  # bits -> numbers of a group


def messages(setting: Setting) -> Iterator[Work]:
    """Yield messages to 8 ranks of a bucket, with what they lose, and the sum of 8 in a rank."""
    group_of = {8: 64, 4: 64, 1: 64} if setting.tiny else CODES
    n = setting.size(2**23, 200)
    x, kept = drawn(RANKS, n, dtype=torch.float32, trained=False), partial(_zeros, RANKS, n)
    for bits, group in group_of.items():
        ours, torchs = (signs.pack_signs, signs.reference) if bits == 1 else (quantized.quantize, quantized.reference)
        options: dict[str, Any] = {"group": group} if bits == 1 else {"group": group, "bits": bits}
        size = -(-n // group) * (4 + group * bits // 8)
        named = f"{RANKS} x {n} in float32, {bits} bits by {group}"
        write = lambda f, options=options, size=size: partial(_written, f, size, options)
        compared = 1 if bits == 1 else None  # scales of signs are rounded otherwise; what is kept says all of a message
        ways = [Way("fds", write(ours), compared=compared), Way("torch eager", write(torchs), compared=compared)]
        family = "pack_signs" if bits == 1 else "quantize"
        yield Work(
            family, named, "forward", together(x=x, kept=kept), ways, ways[1], RANKS * (12 * n + size),
            Goals(COPY_FORWARD),
        )  # fmt: skip
        add = lambda f, code=(bits, group): partial(_summed, f, n, *code)
        ways = [Way("fds", add(sums.sum_messages)), Way("torch eager", add(sums.reference))]
        given = together(messages=lambda g, write=write, torchs=torchs: _made(write(torchs), g, x))
        yield Work(
            "sum_messages", named, "forward", given, ways, ways[1], RANKS * size + 4 * n, Goals(COPY_FORWARD)
        )  # fmt: skip


def _zeros(*shape_and: Any) -> Tensor:
    *shape, g = shape_and
    return torch.zeros(shape, device=g.device)


def _made(write: Callable, g: torch.Generator, x: Callable) -> Tensor:
    numbers = x(g)
    return write(x=numbers, kept=torch.zeros_like(numbers))[1]


def _written(f: Callable, size: int, options: dict[str, Any], x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.empty(len(x), size, dtype=torch.uint8, device=x.device)
    f(x, found, kept=kept, **options)
    return kept, found


def _summed(f: Callable, n: int, bits: int, group: int, messages: Tensor) -> Tensor:
    out = torch.empty(n, device=messages.device)
    f(messages, out, bits=bits, group=group)
    return out
