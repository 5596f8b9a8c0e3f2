"""What every rule shares: values at t, unscaling, skipping, fused kernels; and the optimizer made of a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.kernels.choice import all_run_triton, chosen
from fds.optim.base import Optimizer, Schedule, Segment, Values, at

Rule = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], "Now"], None]
Kernel = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], "Now", list[Tensor | None]], None]
Check = Callable[[Sequence[Sequence[Segment]]], None]


@attrs.frozen
class Now:
    """Hold what a rule reads at one update.

    Attributes:
        step: () int64, t.
        values: every hyper-parameter at t: a float, or a () tensor where reading it would synchronise.
        grad_scale: () float32, or None.
        skip: () bool, or None.
        segments: one list per slice.
        axes: over which parameters are split.
    """

    step: Tensor
    values: Mapping[str, float | Tensor]
    grad_scale: Tensor | None
    skip: Tensor | None
    segments: Sequence[Sequence[Segment]]
    axes: Sequence[Any]

    def read(self, *names: str) -> list[Any]:
        """Return the values under these names."""
        return [self.values[name] for name in names]

    def static(self, *names: str) -> bool:
        """Tell whether fused kernels, which take floats only, can have these values."""
        return not any(isinstance(self.values[name], Tensor) for name in names)

    def read_on_device(self) -> dict[str, Any]:
        """Return what every kernel reads in the memory of the device: the learning rate, the scale, the flag."""
        lr = self.values["lr"]
        if isinstance(lr, Tensor):
            lr = lr.double()
        else:
            lr = torch.full((), lr, dtype=torch.float64, device=self.step.device)
        return {"lr": lr, "grad_scale": self.grad_scale, "skip": self.skip}

    def updates(self) -> Tensor:
        """Return t + 1, the number of updates with this one, as () float64."""
        return (self.step + 1).double()

    def unscale(self, grads: list[Tensor]) -> list[Tensor]:
        """Divide the gradients, in place, by the scale that they arrive with."""
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
        """Run a fused kernel of torch, which unscales and skips by itself, once per dtype; `lists[0]`: params."""
        lr = self.values["lr"]
        options["lr"] = lr.float() if isinstance(lr, Tensor) else lr
        options["grad_scale"] = None if self.grad_scale is None else self.grad_scale.float()
        options["found_inf"] = None if self.skip is None else self.skip.float()
        dtypes = set(map(tree.dtype_of, lists[0]))
        for dtype in dtypes:
            same = lists
            if len(dtypes) > 1:
                same = [[x for p, x in zip(lists[0], xs, strict=False) if p.dtype == dtype] for xs in lists]
            kernel(*same, maximize=False, **options)


def assemble(
    rule: Rule, *, text: str, hyper: Mapping[str, Schedule], slots: Mapping[str, float],
    whole: bool = False, check: Check | None = None, keep_empty: bool = False, kernel: Kernel | None = None,
    fused: Callable[[torch.device], bool] = lambda device: False,
) -> Optimizer:  # fmt: skip
    """Make an optimizer of an in-place rule, and of a kernel that does the same where kernels run.

    A kernel updates whole slices: it computes an element alike wherever it lies, and gaps of zeros stay zero. It takes
    floats; where another hyper-parameter than lr follows a schedule on an accelerator, the rule runs there too.

    Args:
        rule: `rule(params, grads, opt, now)`; gradients come in the dtype of their params, still scaled.
        text: how the optimizer was written.
        hyper: hyper-parameters that may be schedules, "lr" among them.
        slots: slot name -> what its tensors are filled with at first.
        whole: as in `Optimizer`.
        check: refuses segments that the rule cannot update.
        keep_empty: the rule sees parameters of which this rank has nothing too, since ranks do something together.
        kernel: `kernel(params, grads, opt, now, out)` on whole slices; gradients come as they are, still scaled, and
            `out` has one tensor or None per slice.
        fused: device -> whether the rule runs torch's fused functions there, where it has floats.
    """
    hyper = {name: float(value) if isinstance(value, Tensor) else value for name, value in hyper.items()}
    floats = [name for name in hyper if name != "lr"]

    def init(segments: Sequence[Sequence[Segment]], *, params: Sequence[Tensor]) -> dict[str, list[Tensor | None]]:
        if check is not None:
            check(segments)
        return {name: [torch.full_like(p, fill, requires_grad=False) for p in params] for name, fill in slots.items()}

    @torch.no_grad()
    def update(
        grads: Sequence[Tensor], opt: dict, params: list[Tensor], *, step: Tensor, lr: Tensor | None,
        grad_scale: Tensor | None, skip: Tensor | None, segments: Sequence[Sequence[Segment]], axes: Sequence[Any],
        out: list[Tensor] | None = None, values: Values | None = None,
    ) -> tuple[list[Tensor], dict]:  # fmt: skip
        if not params:
            return params, opt
        others = {name: at(hyper[name], step, name) for name in floats} if values is None else values.hyper
        rate = at(hyper["lr"], step) if lr is None else lr
        known = {name: _cheap(value) for name, value in {**others, "lr": rate}.items()}
        now = Now(step, known, grad_scale, skip, segments, axes)
        if kernel is not None and all_run_triton(params) and now.static(*floats):
            kernel(params, list(grads), opt, now, [None] * len(params) if out is None else list(out))
            return params, opt
        slices, given = params, opt
        params, grads, opt, alone = _by_segment(params, grads, opt, segments, keep_empty)
        if not params:  # all that is in these slices is padding
            return slices, given
        now = attrs.evolve(now, segments=alone)
        if list(map(tree.dtype_of, grads)) != list(map(tree.dtype_of, params)):
            grads = [g.to(p.dtype) for g, p in zip(grads, params, strict=True)]
        rule(params, list(grads), opt, now)
        if out is not None:
            torch.ops.aten._foreach_copy_(out, slices)
        return slices, given

    name = text.partition("(")[0]

    def runs(device: torch.device) -> str:
        static = device.type == "cpu" or not any(callable(hyper[name]) for name in floats)
        if kernel is not None and static and chosen(device) == "triton":
            return f"{name}: triton"
        return f"{name}: torch's fused functions" if static and fused(device) else f"{name}: torch's formula"

    others = {name: hyper[name] for name in floats}
    return Optimizer(init, update, whole, lr=hyper["lr"], text=text, runs=runs, hyper=others, draws=False)


def _by_segment(
    params: list, grads: Sequence, opt: dict, segments: Sequence[Sequence[Segment]], keep_empty: bool
) -> tuple:
    """Return views of every parameter in slices of many.

    The last elements of a tensor, too few for a vector register, are computed one by one, and round differently in some
    kernels: in slices they are the same ones as in the parameter by itself, so every stage gives the same bits.
    """
    lengths = tuple(map(Tensor.numel, params))
    if list(lengths) == [inside[0].length if len(inside) == 1 else None for inside in segments]:
        return params, grads, opt, segments
    cuts, alone = _cuts(tuple(map(tuple, segments)), lengths, keep_empty)
    cut = lambda flats: [
        parts[k] for x, (sizes, kept) in zip(flats, cuts, strict=True) for parts in (x.split(sizes),) for k in kept
    ]  # fmt: skip
    return cut(params), cut(grads), {slot: cut(flats) for slot, flats in opt.items()}, alone


@functools.lru_cache(maxsize=64)  # per step, group and optimizer; 1000 parameters: 73 ms without
def _cuts(
    segments: tuple[tuple[Segment, ...], ...], lengths: tuple[int, ...], keep_empty: bool
) -> tuple[list[tuple[list[int], list[int]]], list[list[Segment]]]:
    """Return for every slice how to split it and which parts are parameters; and those parts as slices of their own."""
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


def _cheap(value: float | Tensor) -> float | Tensor:
    # On the CPU reading a tensor is free, and with floats the fused kernels equal torch.optim's bit for bit.
    return value if isinstance(value, Tensor) and value.device.type != "cpu" else float(value)
