"""`Call`: the checked arguments of an optimizer; `Rule`: an update in place, of which it makes an optimizer; `Now`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import reading, tree
from fds.errors import OptimizerError, is_number
from fds.kernels.choice import all_run_triton, chosen, explained
from fds.optim.base import LRSchedule, Optimizer, Segment, Values, at, one_dimensional
from fds.optim.exchange import Exchange, Phases

Tensors = list[Tensor]
Slots = dict[str, Tensors]


@attrs.frozen
class Call:
    """A call of an optimizer's factory, whose arguments are checked.

    Attributes:
        text: the call, with the rate and what is not at its default.
        hyper: what may be a schedule, by name; of the pair `betas`, `beta1` and `beta2`.
        fixed: all other arguments.
    """

    text: str
    hyper: Mapping[str, LRSchedule]
    fixed: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        factory: Callable,
        arguments: Mapping[str, Any],
        *,
        below: Mapping[str, float] = MappingProxyType({}),
        **at_most: str,
    ) -> Call:
        """Return a call with these arguments, of which annotations say what they may be.

        A `float` is a number from 0 on, below the one of its name in `below`; an `LRSchedule` also a schedule or a
        0-d tensor, which is read once; `betas` are a pair of such below 1. `min_x="max_x"` has `min_x` be no larger.

        Raises `OptimizerError`, naming the argument, for any other.

        >>> def halve(lr: "LRSchedule" = 0.1, eps: "float" = 1e-8): ...
        >>> Call.of(halve, {"lr": 0.5, "eps": 1e-8}).text
        'halve(lr=0.5)'
        """
        name, parameters = factory.__name__, inspect.signature(factory).parameters
        shown = (p for p in parameters if p == "lr" or arguments[p] != parameters[p].default)
        text = f"{name}({', '.join(f'{p}={_shown(arguments[p])}' for p in shown)})"
        kinds = {p: parameters[p].annotation for p in parameters}
        hyper = {p: arguments[p] for p, kind in kinds.items() if kind == "LRSchedule"}
        check_numbers(name, **hyper)
        for p in (p for p, kind in kinds.items() if kind == "float"):
            check_numbers(name, schedule=False, high=below.get(p, inf), **{p: arguments[p]})
        if "betas" in kinds:
            hyper["beta1"], hyper["beta2"] = _checked_pair(name, arguments["betas"])
        for least, most in at_most.items():
            if arguments[least] > arguments[most]:
                raise OptimizerError(
                    f"{name}: {least} is larger than {most}",
                    where=least,
                    got=f"{least}={arguments[least]}, {most}={arguments[most]}",
                    want=f"{least} <= {most}",
                    hint="swap them",
                )
        hyper = {p: float(x) if isinstance(x, Tensor) else x for p, x in hyper.items()}
        return cls(text, hyper, {p: x for p, x in arguments.items() if p not in hyper and p != "betas"})


def check_numbers(factory: str, *, high: float = inf, schedule: bool = True, **values: Any) -> None:
    """Raise `OptimizerError` for a value outside [0, high), and for a schedule unless `schedule`.

    Where a schedule is allowed a 0-d tensor is too; it is read once.

    >>> check_numbers("adam", eps=1e-8, schedule=False)
    """
    bounds = "a number of at least 0" if high == inf else f"a number in [0, {high:g})"
    for name, value in values.items():
        if callable(value) and schedule:
            continue
        if isinstance(value, Tensor) and value.dim() == 0 and value.dtype != torch.bool and schedule:
            value = float(value)
        if is_number(value) and 0 <= value < high:
            continue
        raise OptimizerError(
            f"{factory}: {name} is out of range",
            where=name,
            got=repr(value),
            want=bounds + (", or a schedule f(t)" if schedule else ""),
            hint="" if schedule or not callable(value) else f"{name} cannot follow a schedule",
        )


def _checked_pair(factory: str, betas: Any) -> tuple[LRSchedule, LRSchedule]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise OptimizerError(
            f"{factory}: betas is not a pair",
            where="betas",
            got=repr(betas),
            want="(beta1, beta2)",
            hint="to schedule a beta, write (beta1, lambda t: ...)",
        )
    check_numbers(factory, high=1.0, **{"betas[0]": betas[0], "betas[1]": betas[1]})
    return betas[0], betas[1]


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_shown, value)) + ")"
    if isinstance(value, Tensor):
        return repr(float(value))
    return value.__qualname__ if inspect.isfunction(value) else repr(value)


@attrs.frozen
class Now:
    """What a rule reads at one update.

    Attributes:
        step: () int64, t.
        values: every hyper-parameter at t: a float, or a () tensor if reading it would synchronize; and what is fixed.
        grad_scale: () float32, or None.
        skip: () bool, or None.
        segments: one list per slice.
        axes: mesh axes over which parameters are split.
        exchange: of a call in which gradients stay on their ranks; its own slots are among those of the rule.
    """

    step: Tensor
    values: Mapping[str, Any]
    grad_scale: Tensor | None
    skip: Tensor | None
    segments: Sequence[Sequence[Segment]]
    axes: Sequence[Any]
    exchange: Exchange | None = None

    def read(self, *names: str) -> list[Any]:
        """Return the values under these names."""
        return [self.values[name] for name in names]

    def static(self, *names: str) -> bool:
        """Return whether fused kernels can run: all of these values are floats, and no compiler fuses the formula."""
        graph = reading.now.recording
        if graph is not None and graph.fuses:
            return False
        return not any(isinstance(self.values[name], Tensor) for name in names)

    def read_on_device(self) -> dict[str, Any]:
        """Return what kernels read from device memory: the learning rate, the gradient scale and the skip flag."""
        lr = self.values["lr"]
        if isinstance(lr, Tensor):
            lr = lr.double()
        else:
            lr = torch.full((), lr, dtype=torch.float64, device=self.step.device)
        return {"lr": lr, "grad_scale": self.grad_scale, "skip": self.skip}

    def updates(self) -> Tensor:
        """Return t + 1, the number of updates including this one, as () float64."""
        return (self.step + 1).double()

    def unscale(self, grads: list[Tensor]) -> list[Tensor]:
        """Divide the gradients by their scale, in place."""
        if self.grad_scale is not None:
            torch.ops.aten._foreach_div_(grads, self.grad_scale)
        return grads

    def write(self, old: Tensor, new: Tensor) -> None:
        """Write `new` over `old`, unless this update is skipped."""
        if self.skip is None:
            old.copy_(new)
        else:
            torch.where(self.skip, old, new, out=old)

    def fused(self, kernel: Callable, lists: Sequence[list[Tensor]], **options: Any) -> None:
        """Run a fused kernel of torch, which unscales and skips by itself, once per dtype; lists[0] is params."""
        lr = self.values["lr"]
        options["lr"] = lr.float() if isinstance(lr, Tensor) and lr.device.type != "cpu" else lr
        options["grad_scale"] = None if self.grad_scale is None else self.grad_scale.float()
        options["found_inf"] = None if self.skip is None else self.skip.float()
        dtypes = set(map(tree.dtype_of, lists[0]))
        for dtype in dtypes:
            same = lists
            if len(dtypes) > 1:
                same = [[x for p, x in zip(lists[0], xs, strict=False) if p.dtype == dtype] for xs in lists]
            kernel(*same, maximize=False, **options)


@attrs.frozen(eq=False)
class Rule:
    """An update in place, and perhaps a kernel that computes the same on accelerators.

    A kernel updates whole slices: an element's result does not depend on its position, and zero padding stays zero. It
    takes floats: if a hyper-parameter other than lr follows a schedule, the rule runs on accelerators too.

    Attributes:
        call: the arguments of the optimizer.
        run: `run(params, grads, opt, now)`; gradients have the dtype of their params and are still scaled.
        slots: slot name -> initial value of its tensors.
        numbers: slot name -> initial value of one float64 per parameter, of which the rule gets tensors (); only with
            `phases` and `keep_empty`.
        kernel: `now` -> a function of `fds.kernels`, and arguments of it beside the slices, the slots and the values.
        fused: device -> whether the rule runs torch's fused functions there, given floats.
        keep_empty: the rule also sees parameters of which this rank has no elements, since it communicates.
        check: raises for segments that the rule cannot update.
    """

    call: Call
    run: Callable[[Tensors, Tensors, Slots, Now], None]
    slots: Mapping[str, float] = attrs.field(kw_only=True)
    numbers: Mapping[str, float] = attrs.field(factory=dict, kw_only=True)
    kernel: Callable[[Now], tuple[Callable[..., None], dict[str, Any]]] | None = attrs.field(default=None, kw_only=True)
    fused: Callable[[torch.device], bool] = attrs.field(default=lambda device: False, kw_only=True)
    keep_empty: bool = attrs.field(default=False, kw_only=True)
    check: Callable[[Sequence[Sequence[Segment]]], None] = attrs.field(default=lambda segments: None, kw_only=True)

    @property
    def name(self) -> str:
        """The factory of the optimizer, and the name of its kernel."""
        return self.call.text.partition("(")[0]

    def optimizer(self, *, phases: Phases | None = None, **more: Any) -> Optimizer:
        """Return the optimizer; the arguments are attributes of it."""
        hyper = {name: x for name, x in self.call.hyper.items() if name != "lr"}
        return Optimizer(
            self.init,
            self.update,
            lr=self.call.hyper["lr"],
            text=self.call.text,
            runs=self.runs,
            hyper=hyper,
            separate=phases is None,
            draws=False,
            phases=phases,
            **more,
        )

    def init(
        self, segments: Sequence[Sequence[Segment]], *, params: Sequence[Tensor]
    ) -> dict[str, list[Tensor | None]]:
        """Return the slots before the first update."""
        self.check(segments)
        opt: dict[str, list[Tensor | None]] = {
            name: [torch.full_like(p, x, requires_grad=False) for p in params] for name, x in self.slots.items()
        }
        for name, x in self.numbers.items():
            make = lambda inside, p, x=x: torch.full((len(inside),), x, dtype=torch.float64, device=p.device)
            opt[name] = list(map(make, segments, params))
        return opt

    def update(
        self,
        grads: Sequence[Tensor],
        opt: dict,
        params: list[Tensor],
        *,
        step: Tensor,
        lr: Tensor | None,
        grad_scale: Tensor | None,
        skip: Tensor | None,
        segments: Sequence[Sequence[Segment]],
        axes: Sequence[Any],
        out: list[Tensor] | None = None,
        values: Values | None = None,
        exchange: Exchange | None = None,
    ) -> tuple[list[Tensor], dict]:
        """Write into params, slots and gradients by the kernel where it can run, else by the rule."""
        if not params:
            return params, opt
        hyper = self.call.hyper if values is None else {**self.call.hyper, **values.hyper}
        read = {name: _read_on_cpu(at(x, step, name)) for name, x in hyper.items() if name != "lr"}
        read["lr"] = _read_on_cpu(at(self.call.hyper["lr"], step) if lr is None else lr)
        now = Now(step, {**self.call.fixed, **read}, grad_scale, skip, segments, axes, exchange)
        with torch.no_grad():
            # a graph would not have its launches, which are no operators
            kernel = self.kernel if reading.now.recording is None else None
            if kernel is not None and all_run_triton(self.name, params) and now.static(*read.keys() - {"lr"}):
                launch, more = kernel(now)
                slots = {name: opt[name] for name in self.slots}
                out_of = [None] * len(params) if out is None else list(out)
                options = {**now.values, **now.read_on_device(), **more}
                launch(params, one_dimensional(grads), **slots, **options, out=out_of)
            else:
                self.run_rule(params, grads, opt, now, out)
        return params, opt

    def run_rule(
        self, slices: list[Tensor], grads: Sequence[Tensor], opt: dict, now: Now, out: list[Tensor] | None
    ) -> None:
        """Run the rule on every parameter in the slices, and copy the slices to `out`."""
        if now.exchange is not None:
            opt = {**opt, **now.exchange.slots}
        numbers = None
        if self.numbers:
            numbers = {slot: [x for numbers_of in opt[slot] for x in numbers_of.unbind()] for slot in self.numbers}
            opt = {slot: flats for slot, flats in opt.items() if slot not in numbers}
        params, grads, opt, alone = _by_segment(slices, grads, opt, now.segments, self.keep_empty)
        if not params:  # the slices are padding only
            return
        if list(map(tree.dtype_of, grads)) != list(map(tree.dtype_of, params)):
            grads = [g.to(p.dtype) for g, p in zip(grads, params, strict=True)]
        if numbers is not None:
            opt = {**opt, **numbers}
        self.run(params, list(grads), opt, now if alone is now.segments else attrs.evolve(now, segments=alone))
        if out is not None:
            torch.ops.aten._foreach_copy_(out, slices)

    def runs(self, device: torch.device, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> str:
        """Return what updates parameters of these dtypes on a device, in words: all together, the kernel or not."""
        static = device.type == "cpu" or not any(callable(x) for name, x in self.call.hyper.items() if name != "lr")
        has_kernel = self.kernel is not None and static
        other = [dtype for dtype in dtypes if has_kernel and chosen(self.name, device, dtype) != "triton"]
        if has_kernel and not other:
            return f"{self.name}: Triton kernel ({explained(self.name, device, dtypes[0])})"
        words = "torch's fused functions" if static and self.fused(device) else "torch's formula"
        why = f" ({explained(self.name, device, other[0])})" if other and device.type == "cuda" else ""
        return f"{self.name}: {words}{why}"


def is_assembled(optimizer: Optimizer) -> bool:
    """Say whether a rule makes this optimizer, so that its text, its learning rate and `hyper` say all of it."""
    return isinstance(getattr(optimizer.update, "__self__", None), Rule)


def _by_segment(
    params: list, grads: Sequence, opt: dict, segments: Sequence[Sequence[Segment]], keep_empty: bool
) -> tuple:
    """Return the same lists with one view per parameter instead of slices that hold several.

    The last elements of a tensor, too few for a vector register, are computed one by one, and round differently in some
    kernels. In views of single parameters these are the same elements at every ZeRO stage, so all stages agree bit for
    bit.
    """
    lengths = tuple(map(Tensor.numel, params))
    if set(map(len, segments)) == {1} and lengths == tuple([inside[0].length for inside in segments]):
        return params, grads, opt, segments
    cuts, alone = _cuts(tuple(map(tuple, segments)), lengths, keep_empty)
    cut = lambda flats: [
        parts[k] for x, (sizes, kept) in zip(flats, cuts, strict=True) for parts in (_split(x, sizes),) for k in kept
    ]
    return cut(params), cut(grads), {slot: cut(flats) for slot, flats in opt.items()}, alone


# Views that autograd does not know as such: 0.23 us each where `split` takes 0.35. A state has no graph.
_split = torch.unsafe_split_with_sizes


@functools.lru_cache(maxsize=64)  # per step, group and optimizer; 1000 parameters: 73 ms without
def _cuts(
    segments: tuple[tuple[Segment, ...], ...], lengths: tuple[int, ...], keep_empty: bool
) -> tuple[list[tuple[list[int], list[int]]], list[list[Segment]]]:
    """Return for every slice how to split it and which parts are parameters, and the segments of these parts."""
    cuts, alone = [], []
    for inside, length in zip(segments, lengths, strict=True):
        sizes: list[int] = []
        kept: list[tuple[Segment, int]] = []
        end = 0
        for segment in sorted((s for s in inside if s.length), key=lambda s: s.offset):
            if segment.offset > end:
                sizes.append(segment.offset - end)
            kept.append((segment, len(sizes)))
            sizes.append(segment.length)
            end = segment.offset + segment.length
        sizes += [length - end, 0]
        places = dict(kept) | {s: len(sizes) - 1 for s in inside if not s.length and keep_empty}
        cuts.append((sizes, [places[s] for s in inside if s in places]))
        alone += [[attrs.evolve(s, offset=0)] for s in inside if s in places]
    return cuts, alone


def lerp(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """Return start + weight * (end - start), for a weight that is a float or a () tensor."""
    return torch.lerp(start, end, weight.to(start.dtype) if isinstance(weight, Tensor) else weight)


def _read_on_cpu(value: float | Tensor) -> float | Tensor:
    # Reading a CPU tensor costs nothing, and with floats the fused kernels equal torch.optim's bit for bit.
    return value if isinstance(value, Tensor) and not reading.is_free(value) else float(value)
