"""Keep float32 masters in the state and compute in 16 bit.

Fills:  batch, gather, sum, reduce   State:  none
Law:    equals casting parameters and inputs by hand, and adding the gradients in `accumulate`
Cost:   2 bytes a parameter for the 16-bit copy within a step; matmuls at the 16-bit rate
Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.1

`autocast`: let torch choose the dtype of every operator from its lists; parameters keep theirs.

Fills:  context                  State:  none
Law:    equals `with torch.autocast(...)` around the loss
Cost:   a cast per operator input; weights are cast once a microbatch
Source: torch.amp; the counterpart of DeepSpeed's `amp` and `torch_autocast`
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import Rule
from fds.loss import Layers
from fds.step import Call, Step, Sum, Whole, check_tree, fill, transform


@attrs.frozen
class CastInputs:
    """The batch map: float32 leaves whose key path matches a pattern, in the compute dtype."""

    dtype: torch.dtype
    patterns: tuple[str, ...]
    draws: ClassVar = False
    pair: bool = False  # the batch is a pair, and its parts are called "0" and "1" even if they have names

    def __call__(self, batch: Any, call: Call) -> Any:
        """Return the batch, cast. Raises `BatchError` for leaves in which tensors are hidden."""
        if self.pair and tree.is_sequence(batch):
            parts = [self.cast_all(part, str(i)) for i, part in enumerate(batch)]
            kind: Any = type(batch)
            return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
        return self.cast_all(batch, "")

    def cast_all(self, part: Any, at: str) -> Any:
        """Return the part of the batch at a path, cast."""
        check_tree(part, at)
        leaves, build = tree.flatten(part)
        paths = [".".join(filter(None, (at, path))) for path in tree.paths(part)]
        return build([self.cast(path, x) for path, x in zip(paths, leaves, strict=True)])

    def cast(self, path: str, x: Any) -> Any:
        """Return one leaf, cast if it is a float32 tensor that matches."""
        if isinstance(x, Whole):
            return Whole(self.cast_all(x.value, path))
        wanted = isinstance(x, Tensor) and x.dtype is torch.float32
        return x.to(self.dtype) if wanted and any(fnmatch.fnmatchcase(path, p) for p in self.patterns) else x


_FLOATING = Rule(
    lambda dtype: isinstance(dtype, torch.dtype) and dtype.is_floating_point,
    ": {name} is not a floating-point dtype",
    "say, torch.bfloat16",
)


@transform(compute=_FLOATING, reduce=_FLOATING.or_none(), accumulate=_FLOATING)
def precision(
    compute: torch.dtype = torch.bfloat16,
    *,
    reduce: torch.dtype | None = None,
    accumulate: torch.dtype = torch.float32,
    keep_float32: str | Sequence[str] = (),
    inputs: str | Sequence[str] | None = None,
):
    """Compute in `compute`, from float32 master parameters that the optimizer updates.

    Args:
        compute: dtype of parameters and inputs as the loss sees them; with `torch.float16` add `loss_scale()`.
        reduce: dtype in which gradients travel between ranks; None for `accumulate`, so 4 bytes each: the compute
            dtype halves that. One rank sends nothing.
        accumulate: dtype of the gradient buffer, into which every microbatch is added.
        keep_float32: patterns of parameters that are not cast (`"*norm*"`). Modules of `functional` and `Layers` whose
            own parameters all match compute in float32: their inputs are cast up and their outputs down again.
        inputs: patterns of key paths of float32 batch leaves to cast; None for all, of `Layers` for `inputs` alone.

    Raises `ComposeError` for dtypes that are not floating point, `StateError` at init for a pattern without a match.
    """
    kept = (keep_float32,) if isinstance(keep_float32, str) else tuple(keep_float32)

    def apply(step: Step) -> Step:
        default = ("0", "0.*") if isinstance(step.loss, Layers) else ("*",)
        cast = default if inputs is None else (inputs,) if isinstance(inputs, str) else tuple(inputs)
        return fill(
            step,
            batch=CastInputs(compute, cast, isinstance(step.loss, Layers) and inputs is None),
            gather={"dtype": compute, "float32": kept},
            sum=Sum(accumulate),
            reduce={"dtype": reduce},
        )

    return apply


@attrs.frozen
class Autocast:
    """The context in which the loss runs, in training and in evaluation."""

    dtype: torch.dtype
    draws: ClassVar = False

    def __call__(self, call: Call) -> Any:
        """Return the context for the device of a call."""
        return torch.autocast(call.device.type, dtype=self.dtype)


@transform(
    dtype=Rule((torch.bfloat16, torch.float16).__contains__, " takes a 16-bit dtype", "torch.bfloat16 or torch.float16")
)
def autocast(dtype: torch.dtype = torch.bfloat16):
    """Evaluate the loss under `torch.autocast` of this dtype; with `torch.float16` add `loss_scale()`.

    Raises `ComposeError` for a dtype that is not 16 bit.
    """

    def apply(step: Step) -> Step:
        return fill(step, context=Autocast(dtype))

    return apply
