"""Quantize what linear layers and convolutions are given, in training and in evaluations.

Fills:  modules, layer, memory       State:  with range="static" slot `activation_ranges`: (2,) float32 a module
Law:    14, 15: the hand-written step that rounds these inputs; the gradient by them is passed straight through
Cost:   about six passes over these inputs, two of them to find ranges; in front of a row of a tensor axis a message of
        two numbers for each range
Source: DeepSpeed 0.19.6's grids; Jacob et al. 2018, arXiv:1712.05877; Yao et al. 2022, arXiv:2206.01861
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from fds import loss as losses
from fds.collectives.functional import largest
from fds.compression.activations import ActivationGrid, Most, Per, RoundedInputs, is_convolution, is_linear
from fds.errors import FLAG, ComposeError, LossError, Rule, count, is_int, is_number, slot_name
from fds.nn.parallel.linear import RowConv1D, RowLinear
from fds.nn.parallel.plan import Row
from fds.step import Call, Memory, SplitDim, Step, fill, transform

Range = Literal["dynamic", "static"]
Plan = tuple[Tensor | None, Mapping[str, Tensor]]  # whether the time has come, () bool; the ranges by module


@attrs.frozen(eq=False)
class Rounding:
    """What is done in the place of a call of a module.

    `slot` is that of static ranges, "" for dynamic ones. `groups` are the modules that were chosen, each with the group
    of numbers that has a range, and `dims` the dim of its weight that meets the features of its input.
    """

    grid: ActivationGrid
    per: Per | None
    offset: int
    slot: str
    decay: float
    groups: dict[str, Per] = attrs.field(factory=dict[str, Per], repr=False)
    dims: dict[str, int] = attrs.field(factory=dict[str, int], repr=False)

    @property
    def is_planned(self) -> bool:
        """Whether it follows the state."""
        return bool(self.slot or self.offset)

    def check(self, name: str, module: nn.Module) -> None:
        """Raise `ComposeError` for a module that is neither linear nor a convolution."""
        if not is_linear(module) and not is_convolution(module):
            within: Any = module
            inner = [path for path, part in within.named_modules() if is_linear(part) or is_convolution(part)]
            raise ComposeError(
                "quantize_activations rounds inputs of linear layers and convolutions",
                where=name,
                got=type(module).__name__,
                want="patterns that match such modules alone",
                hint=f"it has {name}.{inner[0]}" if inner else "",
            )
        self.groups[name] = self.per or ("sample" if is_convolution(module) else "token")
        self.dims[name] = int(is_convolution(module) or isinstance(module, nn.Linear))

    def plan(self, call: Call) -> Plan:
        """Return what a microbatch needs of the state. Raises `ComposeError` where ranks have parts of a group."""
        for entry in call.dimensions.entries:
            in_parts = any(getattr(part, "in_parts", ()) for part in getattr(entry.placement, "resolved", ()))
            if (entry.role == "sequence" or in_parts) and (self.slot or "sample" in self.groups.values()):
                raise ComposeError(
                    "quantize_activations: a range is of whole rows, and ranks pass parts of them",
                    got=f"{entry!r:.80}",
                    want='range="dynamic", per="token"',
                )
            rows = {
                f"{resolution.loss_module.prefix}{path}"
                for resolution in getattr(entry.placement, "resolved", ())
                for path, part in resolution.parts.items()
                if isinstance(part, Row)
            }
            for name, dim in self.dims.items() if entry.role == "tensor" else ():
                lies = entry.placement.lies(f"{name}.weight")
                if isinstance(lies, SplitDim) and lies.dim == dim and name not in rows:
                    raise ComposeError(
                        "quantize_activations: a range is of all features, and ranks have parts of them",
                        where=name,
                        got=f"{entry.axis!r:.60}: {lies}",
                        want="a module that tensor_parallel divides as a row",
                    )
        return None if not self.offset else call.step >= self.offset, call.slots[self.slot] if self.slot else {}

    def run(
        self,
        plan: Plan | None,
        call: Call | None,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module with its input on the grid."""
        key, x = ("", args[0]) if args else next(iter(kwargs.items()), ("", None))
        kwargs = {word: value for word, value in kwargs.items() if word != key}
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise LossError(
                "quantize_activations: a module is given something else than numbers",
                where=name,
                got=str(x.dtype) if isinstance(x, Tensor) else type(x).__name__,
                want="a floating tensor as its first argument",
            )
        started, ranges = plan or (None, {})
        most = _over_ranks(module)
        if self.slot:
            q = self._static(x, ranges[name], name, call, most)
        else:
            q = self.grid.by_groups(x, self.groups[name], most)
        q = q if started is None else torch.where(started, q, x)
        return forward(q, *args[1:], **kwargs)

    def _static(self, x: Tensor, range_: Tensor, name: str, call: Call | None, most: Most) -> Tensor:
        """Return x on the grid of the range of a slot, where none was seen yet on that of x; note the range of x."""
        if call is not None and x.numel():
            call.note(self.slot, name, self.grid.seen(x, range_))
        return self.grid.by_range(x, range_, most)

    def bake(self, name: str, module: nn.Module, call: Call) -> None:
        """Have a plain module round as an evaluation does: with the range that the state has, from `offset` on."""
        if int(call.step) >= self.offset:
            range_ = call.slots[self.slot][name] if self.slot else torch.zeros(0)
            RoundedInputs.put(module, self.grid, "all" if self.slot else self.groups[name], range_)

    def accept(self, slot: dict[str, Tensor], noted: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        """Return the moving averages: a first range as it is, none where nothing finite was noted."""

        def averaged(old: Tensor, new: Tensor) -> Tensor:
            after = torch.where((old == 0).all(), new, old * self.decay + new * (1 - self.decay))
            return torch.where(new.isfinite().all(), after, old)

        return {name: averaged(old, noted[name]) for name, old in slot.items()}


def _over_ranks(module: nn.Module) -> Most:
    """Return what makes ends of ranges of what a copy of a module is given those of what all ranks of an axis are."""
    region = module.region if isinstance(module, RowLinear | RowConv1D) else None
    return (lambda ends: ends) if region is None else (lambda ends: largest(ends, region.axis))


@transform(
    several=True,
    layers=losses.PATTERNS,
    bits=Rule(lambda x: is_int(x, 2) and x <= 8, ": {name} are those of a number", "an int from 2 to 8"),
    symmetric=FLAG,
    range=Rule(("dynamic", "static").__contains__, ": no such {name}", '"dynamic" or "static"'),
    per=Rule(("token", "sample").__contains__, ": no such group of numbers", '"token", "sample" or None').or_none(),
    offset=count(": {name} counts updates", 0),
    decay=Rule(lambda x: is_number(x) and 0 <= x < 1, ": {name} is that of an average", "0 <= decay < 1, say 0.95"),
    name=slot_name("ranges_4"),
)
def quantize_activations(
    layers: str | Sequence[str],
    *,
    bits: int = 8,
    symmetric: bool = True,
    range: Range = "dynamic",
    per: Per | None = None,
    offset: int = 0,
    decay: float = 0.95,
    name: str = "activation_ranges",
):
    """Round what some linear layers and convolutions are given to 2^bits numbers, in training and in evaluations.

    Symmetric, with m the largest absolute value of a group and s = 2 m / 2^bits, an input x becomes
    clamp(round(x / s), -2^(bits-1), 2^(bits-1) - 1) s. Asymmetric, with s = (greatest - least) / 2^bits and
    z = round(least / s) s, it becomes clamp(round((x - z) / s), 0, 2^bits - 1) s + z. Backward passes the gradient
    as if nothing was rounded.

    With `range="dynamic"` the range is that of each group. With `"static"` it is a module's in `state.slots[name]`,
    (-least, greatest) float32: the average of what an update's microbatches and ranks were given, of which after each
    update `decay` of the old and 1 - decay of the new are kept. It is what the state has before the call, also in
    evaluations, which leave it; before a first update each microbatch has its own. DeepSpeed updates it inside of
    forward, in each rank alone, and rounds to zeros what it never trained.

    Several of these may stand in a composition, with other patterns; of static ones each needs a `name` of its own.

    Args:
        layers: patterns of paths of modules (`*` crosses dots), which begin with the layer's name in `fds.Layers`:
            nn.Linear, convolutions of torch, and Conv1D of transformers.
        bits: 2 to 8.
        symmetric: whether the grid is around 0.
        range: "dynamic" or "static".
        per: of dynamic ranges: "token", a row of the last dim, or "sample", an entry of dim 0. None: "sample" of
            convolutions, and else "token".
        offset: updates before the first call that rounds, those with `state.step >= offset`. Static ranges are seen
            from the first on. DeepSpeed's default is 1000.
        decay: of the average of static ranges.
        name: of the slot of static ranges.

    On a tensor axis ranges in front of a row are those of the features of all ranks, which agree on them in each call.

    Raises `ComposeError` for anything else, patterns that match other modules or nothing, a module matched twice, and
    where ranks of sequences have parts of what a range is of. A call raises `LossError` for what is no floating tensor,
    and static ranges or an offset in layers that are compiled.
    """
    if range == "static" and per is not None:
        raise ComposeError(
            "quantize_activations: a static range is of all that a module is given",
            got=f"per={per!r}",
            want='per=None, or range="dynamic"',
        )
    rule = Rounding(ActivationGrid(bits, symmetric), per, offset, name if range == "static" else "", float(decay))

    def apply(step: Step) -> Step:
        modules = losses.at_submodules((step.loss, step.eval_loss), layers, rule, "quantize_activations")
        if both := losses.overlapping(step.modules, modules):
            raise ComposeError(
                "quantize_activations: two round the inputs of one module",
                where=both[0],
                got="patterns that both match it",
                want="each module matched once",
            )
        step = fill(step, modules=modules, layer=modules.around)
        if rule.slot:
            step = fill(
                step,
                memory=Memory(name, _first(modules.names), "named", merge="max", accept=rule.accept),
                hint="give each its own: quantize_activations(..., name='ranges_4')",
            )
        return step

    return apply


def _first(names: Sequence[str]) -> Callable[[Any, torch.device], dict[str, Tensor]]:
    def zeros(shapes: Any, device: torch.device) -> dict[str, Tensor]:
        return {name: torch.zeros(2, device=device) for name in names}

    return zeros
