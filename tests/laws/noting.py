"""A transform for tests alone: fillers of five stations that note what passes them, in maxima and in sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fds
from fds.loss import LayerCall
from fds.step import Call, Gradients, Measure, Memory, fill, transform


def zeros(names: Any, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}


def view(x: Tensor, leaf: Any, call: Call) -> Tensor:
    """Note every parameter, which it leaves as it is."""
    size = x.detach().double().abs()
    call.note("largest parameter", leaf.name, size.max())
    call.note("all parameters", leaf.name, size.sum())
    return x


def noted(one: LayerCall, call: Call) -> LayerCall:
    """Return a call of layers that notes that it runs, and what they return, under the last of them."""

    def run(x: Any) -> Any:
        call.note("runs", "", torch.tensor(1, device=call.device))  # a recomputation may end early: before it
        out = one(x)
        size = out.detach().double().abs()
        call.note("largest activation", str(one.layers[-1]), size.max())
        call.note("all activations", str(one.layers[-1]), size.sum())
        return out

    return one.replaced(run)


def inputs(batch: Any, call: Call) -> Any:
    """Note the rows of a batch, and the largest of every column."""
    if batch[0] is not None:
        call.note("rows", "", torch.tensor(len(batch[0]), device=call.device))
        call.note("largest input", "", batch[0].double().abs().amax(0))
    return batch


class Squares:
    """A gradient map that notes the sum of the squares of all true gradients."""

    takes_slices = notes = True
    draws = False

    def __call__(self, grads: Gradients, call: Call) -> Gradients:
        scale = 1.0 if grads.scale is None else grads.scale
        for leaf, counts in zip(grads.leaves, grads.counted, strict=True):
            if counts:
                call.note("squares", "", (leaf.double() / scale).square().sum())
        return grads


@transform
def noting(width: int = 3):
    """Remember the largest and the sum of parameters, activations and inputs, and count accepted steps."""

    def apply(step: fds.Step) -> fds.Step:
        layers = list(map(str, range(len(step.loss))))
        whole = lambda shapes, device: torch.zeros((), dtype=torch.int64, device=device)
        number = lambda shapes, device: torch.zeros((), dtype=torch.float64, device=device)
        memories = [
            Memory("largest parameter", zeros, "named", merge="max"),
            Memory("all parameters", zeros, "named", merge="sum"),
            Memory("largest activation", lambda shapes, device: zeros(layers, device), "named", merge="max"),
            Memory("all activations", lambda shapes, device: zeros(layers, device), "named", merge="sum"),
            Memory("rows", whole, "replicated", merge="sum"),
            Memory("runs", whole, "replicated", merge="sum"),
            Memory(
                "largest input",
                lambda shapes, device: torch.zeros(width, dtype=torch.float64, device=device),
                "replicated",
                merge="max",
            ),
            Memory("squares", number, "replicated", merge="sum", accept=lambda slot, noted, call: noted),
            Memory("steps", number, "replicated", accept=lambda slot, noted, call: slot + 1),
        ]
        for memory in memories:
            step = fill(step, memory=memory)
        return fill(
            step,
            batch=inputs,
            view=view,
            layer=lambda calls, call: [noted(one, call) for one in calls],
            condition=Squares(),
            measure=Measure(norm=True),
        )

    return apply


MAXIMA = ("largest parameter", "largest activation", "largest input")
