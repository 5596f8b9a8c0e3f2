"""One training loop over flat slices, for every test of optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fds.optim import Optimizer, Segment
from fds.optim.exchange import Exchange


def segments_of(shapes: Sequence[Sequence[int]], *, together: bool, names: Sequence[str] | None = None) -> list:
    """Lay parameters into one slice each, or all into one slice with two elements of padding."""
    names = names or [f"p{i}" for i in range(len(shapes))]
    sizes = [math.prod(shape) for shape in shapes]
    if not together:
        return [[Segment(n, tuple(s), 0, size)] for n, s, size in zip(names, shapes, sizes, strict=True)]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return [[Segment(n, tuple(s), o, size) for n, s, o, size in zip(names, shapes, offsets, sizes, strict=True)]]


def flatten(tensors: Sequence[Tensor], *, together: bool) -> list[Tensor]:
    flat = [x.detach().reshape(-1).clone() for x in tensors]
    return [torch.cat([*flat, flat[0].new_zeros(2)])] if together else flat


def alone(optimizer: Optimizer, flat: Sequence[Tensor]) -> Any:
    """Return what a step remembers for an optimizer that adds up by itself, before the first message."""
    slots = () if optimizer.phases is None else optimizer.phases.slots
    own = {slot: [torch.zeros_like(x, dtype=torch.float32) for x in flat] for slot in slots}
    return own, torch.zeros((), dtype=torch.float64)


@pytest.fixture
def train() -> Callable:
    def run(
        optimizer: Optimizer,
        params: Sequence[Tensor],
        batches: Sequence[Sequence[Tensor]],
        *,
        together: bool = False,
        names: Sequence[str] | None = None,
        edit: Callable = lambda t, keywords: {},
    ) -> tuple[list[Tensor], dict]:
        """Return (params, opt) after one update per batch; params as flat tensors, one per parameter."""
        segments = segments_of([p.shape for p in params], together=together, names=names)
        flat = flatten(params, together=together)
        opt, kept = optimizer.init(segments, params=flat), alone(optimizer, flat)
        for t, grads in enumerate(batches):
            step = torch.tensor(t)
            keywords = {"step": step, "lr": optimizer.learning_rate(step), "grad_scale": None, "skip": None, "axes": ()}
            keywords |= edit(t, keywords)
            calls = int(keywords["step"])
            if optimizer.phases is not None and optimizer.phases.local(calls):  # of one rank, which loses nothing
                if optimizer.phases.begins(calls):
                    kept = alone(optimizer, flat)
                given = copy.deepcopy(kept)
                keywords["exchange"] = Exchange(calls, None, *given)
                kept = kept if keywords["skip"] is not None and keywords["skip"] else given
            slices = flatten(grads, together=together)
            back, opt_back = optimizer.update(slices, opt, flat, segments=segments, **keywords)
            assert all(a is b for a, b in zip(back, flat, strict=True)) and opt_back is opt
        return [s.of(x).clone() for x, inside in zip(flat, segments, strict=True) for s in inside], opt

    return run


@pytest.fixture
def draw() -> Callable:
    def make(shapes: Sequence[Sequence[int]], *, num_steps: int = 50, dtype: torch.dtype = torch.float32) -> tuple:
        """Return random (params, batches of gradients)."""
        generator = torch.Generator().manual_seed(len(shapes))
        tensors = lambda: [torch.randn(tuple(s), dtype=dtype, generator=generator) for s in shapes]
        return tensors(), [tensors() for _ in range(num_steps)]

    return make
