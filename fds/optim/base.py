"""What an optimizer is: two functions over flat slices, and what the step must know about them."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import FdsError, OptimizerError, ScheduleError
from fds.layout import Segment

__all__ = ["LRSchedule", "Optimizer", "Segment", "Values", "at", "single_group"]

LRSchedule = float | Tensor | Callable[[Tensor], float | Tensor]


def at(value: LRSchedule, step: Tensor, name: str = "lr") -> float | Tensor:
    """Return a value, or its schedule at t = `step` () int64. `name` is what an error calls it.

    A schedule gets t as a () float64 tensor on the device of the step, on every device: `0.98**t` of an int tensor
    would be float32, and reading a number from an accelerator would wait for it.

    Raises `ScheduleError` where the schedule raises, or returns anything but a number, which is finite where that is
    known without waiting for an accelerator.

    >>> at(lambda t: 0.5**t, torch.tensor(2))
    tensor(0.2500, dtype=torch.float64)
    """
    if not callable(value):
        return value
    t = step.to(torch.float64, copy=True)
    try:
        found = value(t)
    except FdsError:
        raise
    except Exception as error:
        raise _refused(name, value, f"{type(error).__name__}: {error}", step) from error
    if isinstance(found, Tensor):
        found = found.detach()
        good = found.dim() == 0 and found.dtype != torch.bool and not found.is_complex()
        known = good and found.device.type == "cpu"
    else:
        good = known = isinstance(found, numbers.Real) and not isinstance(found, bool)
    if not good or (known and not math.isfinite(found)):
        raise _refused(name, value, f"it returned {found!r}"[:200], step)
    return found if isinstance(found, Tensor) else float(found)


def _refused(name: str, schedule: Callable, got: str, step: Tensor) -> ScheduleError:
    called = getattr(schedule, "__qualname__", None) or repr(schedule)
    t = "" if step.is_meta else f", t = {int(step)}"
    return ScheduleError(
        "a schedule did not give a number", where=f"{name}, {called}{t}", got=got,
        want="a finite number, or a () tensor of one",
        hint=f"t is a () float64 tensor on {step.device.type!r}, the number of updates before this one: choose between "
        "values with torch.where(t < 10, ...); int(t) makes a list's index or a dict's key of it, and on a GPU waits "
        "for it",
    )  # fmt: skip


_PASSED = ("step", "lr", "grad_scale", "skip", "segments", "axes")  # to `update`, as keywords


def _demand_takes(name: str, function: Any, first: Sequence[str], keywords: Sequence[str]) -> None:
    """Raise `OptimizerError` for a function that cannot be called with these arguments."""
    want = f"{name}({', '.join([*first, '*', *keywords])})"
    if not callable(function):
        raise OptimizerError(f"the {name} of an optimizer is not a function", where=name, got=repr(function)[:80],
                             want=want)  # fmt: skip
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function that is not written in Python
        return
    try:
        signature.bind(*first, **dict.fromkeys(keywords))
    except TypeError as error:
        raise OptimizerError(
            f"the {name} of an optimizer does not take what a step passes", where=name, got=f"{name}{signature}"[:200],
            want=want, hint=str(error),
        ) from None  # fmt: skip


@attrs.frozen(eq=False)
class Values:
    """What all schedules of an optimizer are at one t; a step has them before it writes anything.

    Attributes:
        lr: () float64 on the step's device; None where groups differ in it.
        hyper: name -> value of `Optimizer.hyper`.
        members: pattern -> values of the optimizer of that group.
    """

    lr: Tensor | None
    hyper: Mapping[str, float | Tensor]
    members: Mapping[str, Values]

    def rates(self) -> dict[str, Tensor]:
        """Return the learning rates as a step reports them: `lr` if there is one, `lr/PATTERN` of every group."""
        found = {} if self.lr is None else {"lr": self.lr}
        for pattern, values in self.members.items():
            found |= {f"lr/{pattern}{name.removeprefix('lr')}": rate for name, rate in values.rates().items()}
        return found


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
            (params, opt)`, and `values=` where the optimizer has `hyper` or `members`. Writes into `params`, `opt` and
            `grads` (of any floating dtype), returns the first two, and never synchronises with an accelerator.

            - step: () int64, updates applied before this one (t).
            - lr: () float64, or None for the optimizer's own schedule at t.
            - values: the `Values` at t, or None for the optimizer to evaluate them.
            - grad_scale: () float32 that the gradients arrive multiplied by, or None.
            - skip: () bool, or None; where true, params and opt keep every bit, whatever the gradients hold.
            - axes: mesh axes over which parameters are split: objects with `all_reduce(tensor) -> tensor`
              (sum). Their ranks hold the same segments in the same order, of length 0 where a rank has none.
            - out: one tensor per slice that receives the new params in its own dtype, or None; where `skip` is
              true it may keep what it held.
        lr: learning rate or its schedule `f(t)`: what the step evaluates, passes as `lr` and reports. None where
            `members` differ in it.
        hyper: name -> other number that may be a schedule. The step evaluates them before it writes anything.
        members: pattern -> optimizer of that group; the step reports the rate of each as `lr/PATTERN`.
        text: how the optimizer was written; also its repr.
        whole: True where `update` needs whole parameters in each slice; or parameter name -> that.
        group: parameter name -> group; a slice never mixes groups.
        check: called with the names of all trained parameters, of all ranks, before `init`; raises `OptimizerError`.
        runs: device -> what updates float32 parameters there, in words: "adamw: triton".
        draws: False where `update` draws no random numbers; else torch's default generators are seeded for it from
            the key of the state, alike where ranks update the same and differently where they have other slices.

    Raises `OptimizerError` for an `init` or `update` that does not take what a step passes.
    """

    init: Callable[..., dict[str, list[Tensor | None]]]
    update: Callable[..., tuple[list[Tensor], dict[str, list[Tensor | None]]]]
    whole: bool | Callable[[str], bool] = False
    lr: LRSchedule | None = 0.0
    text: str = "optimizer"
    group: Callable[[str], Hashable] = single_group
    check: Callable[[Sequence[str]], None] = lambda names: None
    runs: Callable[[torch.device], str] = lambda device: "the optimizer's own"
    hyper: Mapping[str, LRSchedule] = attrs.field(factory=dict)
    members: Mapping[str, Optimizer] = attrs.field(factory=dict)
    draws: bool = True

    def __attrs_post_init__(self) -> None:
        values = ("values",) if self.hyper or self.members else ()
        _demand_takes("init", self.init, ("segments",), ("params",))
        _demand_takes("update", self.update, ("grads", "opt", "params"), (*_PASSED, *values))

    def needs_whole(self, name: str) -> bool:
        """Say whether a slice must hold all or nothing of the parameter of this name."""
        return self.whole(name) if callable(self.whole) else self.whole

    def learning_rate(self, step: Tensor) -> Tensor | None:
        """Return the learning rate at t = `step` () as a () float64 tensor on its device, None where groups differ.

        Raises `ScheduleError` for a schedule that gives no number.
        """
        if self.lr is None:
            return None
        value = at(self.lr, step)
        if isinstance(value, Tensor):
            return value.to(step.device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=step.device)

    def values(self, step: Tensor) -> Values:
        """Return what all schedules are at t = `step` (). Raises `ScheduleError` for one that gives no number."""
        members = {pattern: member.values(step) for pattern, member in self.members.items()}
        shared = next(iter(members.values())).lr if members and self.lr is not None else None
        lr = self.learning_rate(step) if shared is None else shared.clone()
        return Values(lr, {name: at(value, step, name) for name, value in self.hyper.items()}, members)

    def given(self, values: Values) -> dict[str, Any]:
        """Return what `update` takes of these values, as keywords."""
        return {"lr": values.lr, "values": values} if self.hyper or self.members else {"lr": values.lr}

    def schedules(self) -> Iterator[Callable]:
        """Yield every schedule, those of members too."""
        yield from filter(callable, (self.lr, *self.hyper.values()))
        for member in self.members.values():
            yield from member.schedules()

    def __repr__(self) -> str:
        return self.text
