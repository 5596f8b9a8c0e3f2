"""`assemble` makes an optimizer from an update rule; `Now` is what a rule reads, and how it writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import reading, tree
from fds.kernels.choice import all_run_triton, chosen, explained
from fds.optim.base import LRSchedule, Optimizer, Segment, Values, at
from fds.optim.exchange import Exchange, Phases

Rule = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], "Now"], None]
Kernel = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], "Now", list[Tensor | None]], None]
Check = Callable[[Sequence[Sequence[Segment]]], None]


@attrs.frozen
class Now:
    """What a rule reads at one update.

    Attributes:
        step: () int64, t.
        values: every hyper-parameter at t: a float, or a () tensor if reading it would synchronize.
        grad_scale: () float32, or None.
        skip: () bool, or None.
        segments: one list per slice.
        axes: mesh axes over which parameters are split.
        exchange: of a call in which gradients stay on their ranks; its own slots are among those of the rule.
    """

    step: Tensor
    values: Mapping[str, float | Tensor]
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


def assemble(
    rule: Rule,
    *,
    text: str,
    hyper: Mapping[str, LRSchedule],
    slots: Mapping[str, float],
    whole: bool = False,
    pieces: bool = False,
    elementwise: bool = False,
    check: Check | None = None,
    keep_empty: bool = False,
    kernel: Kernel | None = None,
    fused: Callable[[torch.device], bool] = lambda device: False,
    takes_shapes: bool = False,
    phases: Phases | None = None,
    numbers: Mapping[str, float] | None = None,
) -> Optimizer:
    """Make an optimizer from an in-place rule, and from a kernel that computes the same on accelerators.

    A kernel updates whole slices: an element's result does not depend on its position, and zero padding stays zero. It
    takes floats: if a hyper-parameter other than lr follows a schedule, the rule runs on accelerators too.

    Args:
        rule: `rule(params, grads, opt, now)`; gradients have the dtype of their params and are still scaled.
        text: the call that makes the optimizer, its repr.
        hyper: hyper-parameters that may be schedules, "lr" among them.
        slots: slot name -> initial value of its tensors.
        whole: as in `Optimizer`.
        pieces: as in `Optimizer`.
        elementwise: as in `Optimizer`.
        check: raises for segments that the rule cannot update.
        keep_empty: the rule also sees parameters of which this rank has no elements, since it communicates.
        kernel: `kernel(params, grads, opt, now, out)` on whole slices; gradients have their own dtype, still scaled;
            `out` has one tensor or None per slice.
        fused: device -> whether the rule runs torch's fused functions there, given floats.
        takes_shapes: as in `Optimizer`.
        phases: as in `Optimizer`.
        numbers: slot name -> initial value of one float64 per parameter, of which the rule gets tensors (); only with
            `phases` and `keep_empty`.
    """
    hyper = {name: float(value) if isinstance(value, Tensor) else value for name, value in hyper.items()}
    lr = hyper.pop("lr")
    ours = _RuleOptimizer(
        rule, text.partition("(")[0], lr, hyper, slots, check, keep_empty, kernel, fused, numbers or {}
    )
    return Optimizer(
        ours.init,
        ours.update,
        whole,
        lr=lr,
        text=text,
        runs=ours.runs,
        hyper=hyper,
        separate=phases is None,
        elementwise=elementwise,
        draws=False,
        takes_shapes=takes_shapes,
        phases=phases,
        pieces=pieces,
    )


def is_assembled(optimizer: Optimizer) -> bool:
    """Say whether a rule makes this optimizer, so that its text, its learning rate and `hyper` say all of it."""
    return isinstance(getattr(optimizer.update, "__self__", None), _RuleOptimizer)


@attrs.frozen(eq=False)
class _RuleOptimizer:
    """The functions of the optimizer that a rule makes; the attributes are the arguments of `assemble`."""

    rule: Rule
    name: str
    lr: LRSchedule
    hyper: Mapping[str, LRSchedule]  # without "lr"
    slots: Mapping[str, float]
    check: Check | None
    keep_empty: bool
    kernel: Kernel | None
    fused: Callable[[torch.device], bool]
    numbers: Mapping[str, float]

    def init(
        self, segments: Sequence[Sequence[Segment]], *, params: Sequence[Tensor]
    ) -> dict[str, list[Tensor | None]]:
        """Return the slots before the first update."""
        if self.check is not None:
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
        now = Now(step, self.hyper_at(step, lr, values), grad_scale, skip, segments, axes, exchange)
        with torch.no_grad():
            # a graph would not have its launches, which are no operators
            kernel = self.kernel if reading.now.recording is None else None
            if kernel is not None and all_run_triton(self.name, params) and now.static(*self.hyper):
                kernel(params, list(grads), opt, now, [None] * len(params) if out is None else list(out))
            else:
                self.run_rule(params, grads, opt, now, out)
        return params, opt

    def hyper_at(self, step: Tensor, lr: Tensor | None, values: Values | None) -> dict[str, float | Tensor]:
        """Return every hyper-parameter at t = `step` (): those that were passed, else evaluated here."""
        others = {name: at(x, step, name) for name, x in self.hyper.items()} if values is None else values.hyper
        rate = at(self.lr, step) if lr is None else lr
        return {name: _read_on_cpu(value) for name, value in {**others, "lr": rate}.items()}

    def run_rule(
        self, slices: list[Tensor], grads: Sequence[Tensor], opt: dict, now: Now, out: list[Tensor] | None
    ) -> None:
        """Run the rule on every parameter in the slices, and copy the slices to `out`."""
        if now.exchange is not None:
            opt = {**opt, **now.exchange.own}
        numbers = None
        if self.numbers:
            numbers = {slot: [x for own in opt[slot] for x in own.unbind()] for slot in self.numbers}
            opt = {slot: flats for slot, flats in opt.items() if slot not in numbers}
        params, grads, opt, alone = _by_segment(slices, grads, opt, now.segments, self.keep_empty)
        if not params:  # the slices are padding only
            return
        if list(map(tree.dtype_of, grads)) != list(map(tree.dtype_of, params)):
            grads = [g.to(p.dtype) for g, p in zip(grads, params, strict=True)]
        if numbers is not None:
            opt = {**opt, **numbers}
        self.rule(params, list(grads), opt, now if alone is now.segments else attrs.evolve(now, segments=alone))
        if out is not None:
            torch.ops.aten._foreach_copy_(out, slices)

    def runs(self, device: torch.device, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> str:
        """Return what updates parameters of these dtypes on a device, in words: all together, the kernel or not."""
        static = device.type == "cpu" or not any(map(callable, self.hyper.values()))
        has_kernel = self.kernel is not None and static
        other = [dtype for dtype in dtypes if has_kernel and chosen(self.name, device, dtype) != "triton"]
        if has_kernel and not other:
            return f"{self.name}: Triton kernel ({explained(self.name, device, dtypes[0])})"
        words = "torch's fused functions" if static and self.fused(device) else "torch's formula"
        why = f" ({explained(self.name, device, other[0])})" if other and device.type == "cuda" else ""
        return f"{self.name}: {words}{why}"


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
