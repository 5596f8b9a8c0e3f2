"""`Optimizer`: two functions over flat slices, and what a step must know about them."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import attrs
import torch
from torch import Tensor

from fds import reading
from fds.errors import FdsError, OptimizerError, ScheduleError
from fds.layout import Segment
from fds.optim.exchange import Phases

__all__ = ["LRSchedule", "Optimizer", "Segment", "Values", "at", "one_dimensional", "single_group"]

LRSchedule = float | Tensor | Callable[[Tensor], float | Tensor]


def at(value: LRSchedule, step: Tensor, name: str = "lr") -> float | Tensor:
    """Return a value, or its schedule at t = `step` () int64; `name` is its name in errors.

    A schedule gets t as a () float64 tensor on the device of the step: `0.98**t` of an int tensor would be float32, and
    reading a number from an accelerator would synchronize.

    Raises `ScheduleError` if the schedule raises or does not return a finite number; a tensor on an accelerator is not
    checked for being finite, since that would synchronize.

    >>> at(lambda t: 0.5**t, torch.tensor(2))
    tensor(0.2500, dtype=torch.float64)
    """
    if not callable(value):
        return value
    t = step.to(torch.float64, copy=True)
    try:
        result = value(t)
    except FdsError:
        raise
    except Exception as error:
        raise _schedule_error(name, value, f"{type(error).__name__}: {error}", step) from error
    result = result.detach() if isinstance(result, Tensor) else result
    good = _is_scalar(result)
    readable = good and (not isinstance(result, Tensor) or reading.is_free(result))
    if not good or (readable and not math.isfinite(result)):
        raise _schedule_error(name, value, f"it returned {result!r}"[:200], step)
    return result if isinstance(result, Tensor) else float(result)


def _is_scalar(x: Any) -> TypeGuard[float | Tensor]:
    """Say whether a value is a real number, or a () tensor of one; booleans are none."""
    if isinstance(x, Tensor):
        return x.dim() == 0 and x.dtype != torch.bool and not x.is_complex()
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _schedule_error(name: str, schedule: Callable[..., Any], got: str, step: Tensor) -> ScheduleError:
    label = getattr(schedule, "__qualname__", None) or repr(schedule)
    t = "" if step.is_meta or reading.now.recording is not None else f", t = {int(step)}"
    return ScheduleError(
        "a schedule did not return a number",
        where=f"{name}, {label}{t}",
        got=got,
        want="a finite number, or a () tensor of one",
        hint=f"t is a () float64 tensor on {step.device.type!r}, the number of updates before this one: choose between "
        "values with torch.where(t < 10, ...); int(t) can index a list or a dict, but synchronizes with a GPU",
    )


_KEYWORDS = ("step", "lr", "grad_scale", "skip", "segments", "axes")  # that a step passes to `update`


def _check_signature(name: str, function: Any, first: Sequence[str], keywords: Sequence[str]) -> None:
    """Raise `OptimizerError` for a function that cannot be called with these arguments."""
    want = f"{name}({', '.join([*first, '*', *keywords])})"
    if not callable(function):
        raise OptimizerError(
            f"the {name} of an optimizer is not a function", where=name, got=repr(function)[:80], want=want
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions not written in Python may have no signature
        return
    try:
        signature.bind(*first, **dict.fromkeys(keywords))
    except TypeError as error:
        raise OptimizerError(
            f"the {name} of an optimizer does not take what a step passes",
            where=name,
            got=f"{name}{signature}"[:200],
            want=want,
            hint=str(error),
        ) from None


@attrs.frozen(eq=False)
class Values:
    """The values of all schedules of an optimizer at one t, which a step evaluates before it writes anything.

    Attributes:
        lr: () float64 on the step's device; None where groups differ in it.
        hyper: name -> value of `Optimizer.hyper`.
        members: pattern -> values of the optimizer of that group.
    """

    lr: Tensor | None
    hyper: Mapping[str, float | Tensor]
    members: Mapping[str, Values]

    def to(self, device: torch.device) -> Values:
        """Return the same on a device."""
        moved = lambda x: x.to(device) if isinstance(x, Tensor) else x
        hyper = {name: moved(x) for name, x in self.hyper.items()}
        return Values(moved(self.lr), hyper, {name: values.to(device) for name, values in self.members.items()})

    def rates(self) -> dict[str, Tensor]:
        """Return the learning rates under their names in the metrics: `lr` if all are equal, `lr/PATTERN` per group."""
        rates = {} if self.lr is None else {"lr": self.lr}
        for pattern, values in self.members.items():
            rates |= {f"lr/{pattern}{name.removeprefix('lr')}": rate for name, rate in values.rates().items()}
        return rates


def one_dimensional(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous gradients as 1-D views."""
    return [g if g.dim() == 1 else g.view(-1) for g in grads]


def single_group(name: str) -> Hashable:
    """Return the same group for every parameter."""
    return 0


@attrs.frozen(eq=False, repr=False)
class Optimizer:
    """The two functions of an optimizer, and what a step must know about them.

    Lists hold one 1-D contiguous tensor per slice, in the same order everywhere; `segments` holds one
    list of `Segment` per slice.

    Attributes:
        init: `init(segments, *, params) -> opt`, with `opt[slot]` a list of one tensor per slice, of its
            shape, dtype and device (`meta` stays `meta`), or None where that slice has no such slot. With `phases`,
            where slices are whole parameters, a slot may have one number for each of them, (len(segments),).
        update: `update(grads, opt, params, *, step, lr, grad_scale, skip, segments, axes, out=None) ->
            (params, opt)`, and `values=` where the optimizer has `hyper` or `members`. Writes into `params`, `opt` and
            `grads` (of any floating dtype), returns the first two, and never synchronizes with an accelerator.

            - step: () int64, updates applied before this one (t).
            - lr: () float64, or None for the optimizer's own schedule at t.
            - values: the `Values` at t, or None for the optimizer to evaluate them.
            - grad_scale: () float32 by which the gradients are multiplied, or None.
            - skip: () bool, or None; if true, params and opt stay bit-equal, whatever the gradients are.
            - axes: mesh axes over which parameters are split: objects with `all_reduce(tensor) -> tensor`
              (sum). Their ranks hold the same segments in the same order, of length 0 where a rank has none. Over an
              axis along which others are split a parameter may be replicated: all ranks have it, and sums over the
              axis count it as often, which a ratio of two sums does not show.
            - exchange: the `Exchange` of a call in which `phases` has gradients stay on their ranks, else None; passed
              where the optimizer has `phases`.
            - out: one tensor per slice to which the new params are also written, in its dtype, or None; if `skip` is
              true it may stay as it is.
        lr: learning rate or its schedule `f(t)`, which the step evaluates, passes as `lr` and reports. None if
            `members` differ in it.
        hyper: name -> other hyper-parameter that may be a schedule. The step evaluates them before it writes anything.
        members: pattern -> optimizer of that group; the step reports the learning rate of each as `lr/PATTERN`.
        text: the call that makes the optimizer, its repr.
        whole: True if `update` needs whole parameters in each slice; or a function parameter name -> bool.
        pieces: with `whole`, True if `update` puts together by `Segment.piece` what ranks have pieces of along axes
            other than those of slices; or a function parameter name -> bool.
        group: parameter name -> group; a slice never mixes groups.
        check: called with the names of all trained parameters of all ranks before `init`; raises `OptimizerError`.
        runs: device, dtypes of the parameters, float32 by default -> text that says what updates them there: "adamw:
            torch's fused functions".
        separate: True if `init` and `update` treat every slice by itself, so that they may be given some of the slices
            at a time, as a residency asks for (`fds.step.Residency`); else they are given all at once.
        elementwise: True if what `init` and `update` make of an element depends on no other, so that they may be given
            pieces of slices too, cut at multiples of 64 elements; or a function parameter name -> bool.
        draws: False if `update` draws no random numbers; else torch's default generators are seeded for it from the
            key of the state, equally on ranks that update the same slices, differently on ranks with other slices.
        takes_shapes: True if `update` also takes gradients in the shapes of their parameters, contiguous, so that
            nobody makes 1-D views of them.
        phases: in which calls the data ranks do not sum gradients, since the optimizer adds up something else, with
            errors that the step remembers in the slots `worker_error` and `server_error`; None for an optimizer that
            always gets the gradient.
        bind: the whole shapes of all parameters by name -> the optimizer of these, which a step uses; None for one that
            treats all parameters alike.

    Raises `OptimizerError` for an `init` or `update` that does not take what a step passes, and for an `lr` or a hyper-
    parameter that is neither a number nor a schedule.
    """

    init: Callable[..., dict[str, list[Tensor | None]]]
    update: Callable[..., tuple[list[Tensor], dict[str, list[Tensor | None]]]]
    whole: bool | Callable[[str], bool] = False
    lr: LRSchedule | None = 0.0
    text: str = "optimizer"
    group: Callable[[str], Hashable] = single_group
    check: Callable[[Sequence[str]], None] = lambda names: None
    runs: Callable[..., str] = lambda device, dtypes=(): "the optimizer's own"
    hyper: Mapping[str, LRSchedule] = attrs.field(factory=dict)
    members: Mapping[str, Optimizer] = attrs.field(factory=dict)
    separate: bool = False
    elementwise: bool | Callable[[str], bool] = False
    draws: bool = True
    takes_shapes: bool = False
    phases: Phases | None = None
    pieces: bool | Callable[[str], bool] = False
    bind: Callable[[Mapping[str, tuple[int, ...]]], Optimizer] | None = None

    def __attrs_post_init__(self) -> None:
        for name, value in {"lr": self.lr, **self.hyper}.items():
            if not (_is_scalar(value) or callable(value) or (name == "lr" and value is None)):
                raise OptimizerError(
                    f"{self.text}: {name} is not a number",
                    where=name if name == "lr" else f"hyper, {name}",
                    got=repr(value)[:80],
                    want="a number, a () tensor of one, or a schedule f(t)",
                )
        values = ("values",) * bool(self.hyper or self.members) + ("exchange",) * (self.phases is not None)
        _check_signature("init", self.init, ("segments",), ("params",))
        _check_signature("update", self.update, ("grads", "opt", "params"), (*_KEYWORDS, *values))

    def bound(self, shapes: Mapping[str, tuple[int, ...]]) -> Optimizer:
        """Return the optimizer of parameters of these whole shapes, by name."""
        return self if self.bind is None else self.bind(shapes)

    def needs_whole(self, name: str) -> bool:
        """Return whether a slice must hold all of this parameter or nothing of it."""
        return self.whole(name) if callable(self.whole) else self.whole

    def takes_pieces(self, name: str) -> bool:
        """Return whether this parameter may be a piece of one that is needed whole."""
        return self.pieces(name) if callable(self.pieces) else self.pieces

    def is_elementwise(self, name: str) -> bool:
        """Return whether what becomes of an element of this parameter depends on no other."""
        return self.elementwise(name) if callable(self.elementwise) else self.elementwise

    def learning_rate(self, step: Tensor) -> Tensor | None:
        """Return the learning rate at t = `step` () as a () float64 tensor on its device, None if groups differ.

        Raises `ScheduleError` for a schedule that does not return a number.
        """
        if self.lr is None:
            return None
        value = at(self.lr, step)
        if isinstance(value, Tensor):
            return value.to(step.device, torch.float64)
        if reading.now.recording is not None:
            return reading.constant(value, step.device)
        return torch.full((), value, dtype=torch.float64, device=step.device)

    def values(self, step: Tensor) -> Values:
        """Return the values of all schedules at t = `step` (). Raises `ScheduleError` if one is not a number."""
        members = {pattern: member.values(step) for pattern, member in self.members.items()}
        shared = next(iter(members.values())).lr if members and self.lr is not None else None
        lr = self.learning_rate(step) if shared is None else shared.clone()
        hyper = {name: at(x, step, name) if callable(x) else x for name, x in self.hyper.items()}
        return Values(lr, hyper, members)

    def given(self, values: Values) -> dict[str, Any]:
        """Return the keyword arguments of `update` that depend on t."""
        return {"lr": values.lr, "values": values} if self.hyper or self.members else {"lr": values.lr}

    def schedules(self) -> Iterator[Callable[..., Any]]:
        """Yield every schedule, including those of members."""
        yield from filter(callable, (self.lr, *self.hyper.values()))
        for member in self.members.values():
            yield from member.schedules()

    def __repr__(self) -> str:
        return self.text
