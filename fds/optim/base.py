"""What an optimizer is: two functions over flat slices, and what the step must know about them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import attrs
import torch
from torch import Tensor

from fds.layout import Segment

__all__ = ["Optimizer", "Schedule", "Segment", "at", "single_group"]

Schedule = float | Callable[[int | Tensor], float | Tensor]


def at(value: Schedule, step: Tensor) -> float | Tensor:
    """Return a value or its schedule at t = `step` () int64.

    On the CPU a schedule gets a Python int: reading it is free, and `0.98**t` of an int tensor would be float32.
    """
    if not callable(value):
        return value
    return value(int(step) if step.device.type == "cpu" else step.clone())


def single_group(name: str) -> Hashable:
    """Return the same group for every parameter."""
    return 0


@attrs.frozen(eq=False, repr=False)
class Optimizer:
    """Hold the two functions of an optimizer and what the step must know about them.

    Lists hold one 1-D contiguous tensor per slice, in the same order everywhere; `segments` holds one
    list of `Segment` per slice.

    Attributes:
        init: `init(segments, *, params) -> opt`, with `opt[slot]` a list of one tensor per slice, of its
            shape, dtype and device (`meta` stays `meta`), or None where that slice has no such slot.
        update: `update(grads, opt, params, *, step, lr, grad_scale, skip, segments, axes, out=None) ->
            (params, opt)`. Writes into `params`, `opt` and `grads` (of any floating dtype), returns the
            first two, and never synchronises with an accelerator.

            - step: () int64, updates applied before this one (t).
            - lr: () float64, or None for the optimizer's own schedule at t.
            - grad_scale: () float32 that the gradients arrive multiplied by, or None.
            - skip: () bool, or None; where true, params and opt keep every bit, whatever the gradients hold.
            - axes: mesh axes over which parameters are split: objects with `all_reduce(tensor) -> tensor`
              (sum). Their ranks hold the same segments in the same order, of length 0 where a rank has none.
            - out: one tensor per slice that receives the new params in its own dtype, or None; where `skip` is
              true it may keep what it held.
        lr: learning rate or its schedule `f(t)`: what the step evaluates, passes as `lr` and reports.
        text: how the optimizer was written; also its repr.
        whole: True where `update` needs whole parameters in each slice; or parameter name -> that.
        group: parameter name -> group; a slice never mixes groups.
        check: called with the names of all trained parameters, of all ranks, before `init`; raises `OptimizerError`.
        runs: device -> what updates float32 parameters there, in words: "adamw: triton".
    """

    init: Callable[..., dict[str, list[Tensor | None]]]
    update: Callable[..., tuple[list[Tensor], dict[str, list[Tensor | None]]]]
    whole: bool | Callable[[str], bool] = False
    lr: Schedule = 0.0
    text: str = "optimizer"
    group: Callable[[str], Hashable] = single_group
    check: Callable[[Sequence[str]], None] = lambda names: None
    runs: Callable[[torch.device], str] = lambda device: "the optimizer's own"

    def needs_whole(self, name: str) -> bool:
        """Say whether a slice must hold all or nothing of the parameter of this name."""
        return self.whole(name) if callable(self.whole) else self.whole

    def learning_rate(self, step: Tensor) -> Tensor:
        """Return the learning rate at t = `step` () as a () float64 tensor on its device."""
        value = at(self.lr, step)
        if isinstance(value, Tensor):
            return value.to(step.device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=step.device)

    def __repr__(self) -> str:
        return self.text
