"""What a call of a module depends on besides its arguments: the mode of the step, dtypes, random numbers, hooks."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from fds import tree
from fds.errors import LossError, LossWarning
from fds.loss.module_copies import Root, StateBuffers

ModuleMap = Callable[[nn.Module, Root], None]  # changes a copy of a module in place
Around = Callable[[int, Any], AbstractContextManager[object]]  # given the number of a layer and what it is given


@attrs.frozen
class Mode:
    """How modules run in the current context: training or evaluation, and in which dtypes."""

    evaluating: bool = False
    float32: tuple[str, ...] = ()  # patterns of parameters whose modules compute in float32
    carried: StateBuffers | None = attrs.field(default=None, eq=False)  # for an eval_fn that does not take the buffers
    low: bool = False  # parameters and inputs are 16 bit: batch statistics are computed in float32 all the same
    seen: list[Any] | None = attrs.field(default=None, eq=False)  # a module's last output, then what `show` is given
    busy: list[Any] | None = attrs.field(default=None, eq=False)  # copies of modules that backward may run again
    modules: tuple[ModuleMap, ...] = ()  # what is done to every copy of a module before it runs
    around: tuple[Around, ...] = ()  # entered around every call of a layer, and around what of it runs again
    lengths: dict[str, int] | None = attrs.field(default=None, eq=False)  # of a microbatch, noted by what these do
    staged: bool = False  # ranks of a pipeline each run some of the layers

    def release(self) -> None:
        """Drop the parameters that copies of modules still hold; called after backward."""
        for _, variant, free in self.busy or ():
            variant.clear()
            free.append(variant)
        if self.busy is not None:
            self.busy.clear()

    def check_graph(self, total: Tensor | None) -> None:
        """Show a loss and its graph to what changes modules; None for a first call of which there is none."""
        for change in self.modules:
            if (check := getattr(change, "check_graph", None)) is not None:
                check(total)

    @property
    def key(self) -> tuple[bool, tuple[str, ...], bool, tuple[ModuleMap, ...]]:
        """What copies of a module are cached by."""
        return self.evaluating, self.float32, self.low, self.modules


_mode: ContextVar[Mode] = ContextVar("fds_mode", default=Mode())  # noqa: B039 (frozen)
current = _mode.get


class mode:  # not a generator, which takes three times as long: every call of a layer enters one
    """Run modules in this mode; each layer call enters it again, since autograd's threads recompute layers."""

    __slots__ = ("token", "value")

    def __init__(self, value: Mode):
        self.value = value

    def __enter__(self) -> None:
        self.token = _mode.set(self.value)

    def __exit__(self, *error: object) -> None:
        _mode.reset(self.token)


_DRAWING = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def may_draw(module: Any) -> bool:
    """Say whether a call may draw random numbers: False only for unmodified modules of torch that never do."""
    if not isinstance(module, nn.Module):
        return True
    return any(
        isinstance(m, _DRAWING)
        or not type(m).__module__.startswith("torch.nn.modules.")
        or "forward" in vars(m)
        or m._forward_hooks
        or m._forward_pre_hooks
        for m in module.modules()
    )


def warn_of_eval_mode(module: nn.Module) -> None:
    """Warn that a module in eval mode is being trained, if that makes a difference.

    Submodules in eval mode of a module in training mode are taken as intended.
    """
    if module.training:
        return
    parts = {name: part for name, part in module.named_modules() if not part.training and _depends_on_mode(part)}
    if parts:
        kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in parts.values()))
        first = next(iter(parts)) or "the module itself"
        warnings.warn(
            f"a {type(module).__name__} in eval mode is being trained, and these act as in evaluation: {kinds}"
            f" (first: {first!r}). from_pretrained returns modules in eval mode: call module.train() before"
            " fds.functional, fds.Layers or fds.initialize, and .eval() of the parts that should stay in eval mode. If"
            " all of it is intended: warnings.simplefilter('ignore', fds.errors.LossWarning)",
            LossWarning,
            stacklevel=2,
        )


def warn_of_hooks(module: nn.Module) -> None:
    """Warn of hooks on parameters: a step never calls them, since it computes with tensors of its own."""
    hooked = [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        warnings.warn(
            f"parameters of a {type(module).__name__} have hooks of their own (p.register_hook, wandb.watch), which no"
            f" step calls: {len(hooked)}, first {hooked[0]!r}. Change gradients by a transform, such as"
            " fds.clip_by_value, or one of your own (docs/write-your-own.md); hooks on modules are called.",
            LossWarning,
            stacklevel=3,
        )


def _depends_on_mode(part: nn.Module) -> bool:
    """Say whether a module's own methods read `training`; a dropout with p=0 does so without effect."""
    return _reads_mode(type(part)) and not (isinstance(part, nn.modules.dropout._DropoutNd) and part.p == 0)


@functools.cache
def _reads_mode(cls: type) -> bool:
    classes = cls.__mro__[: cls.__mro__.index(nn.Module)]
    functions = (inspect.unwrap(f) for c in classes for f in vars(c).values() if inspect.isfunction(f))
    return any("training" in f.__code__.co_names for f in functions if inspect.isfunction(f))


def in_float32(module: nn.Module, patterns: Sequence[str], *, low: bool, prefix: str) -> None:
    """Make submodules compute in float32 if all of their own parameters match a pattern; if `low`, batch norms too."""
    for path, part in module.named_modules():
        names = [f"{prefix}{path}.{n}" if path else prefix + n for n, _ in part.named_parameters(recurse=False)]
        kept = names and all(any(fnmatch.fnmatchcase(n, p) for p in patterns) for n in names)
        if kept or (low and isinstance(part, nn.modules.batchnorm._NormBase)):
            part.forward = _float32(part, part.forward)


def _float32(part: nn.Module, forward: Callable) -> Callable:
    """Return `forward` of a module with inputs and parameters cast to float32, and outputs cast back."""

    def run(*args: Any, **kwargs: Any) -> Any:
        low = next((x.dtype for x in tree.leaves((args, kwargs)) if tree.is_low(x)), None)
        if low is None:
            return forward(*args, **kwargs)
        args, kwargs = tree.map(lambda x: x.float() if tree.is_low(x) else x, (args, kwargs))
        params = dict(part._parameters)
        low_params = {n: p for n, p in params.items() if p is not None and tree.is_low(p)}
        part._parameters.update({n: cast(nn.Parameter, p.float()) for n, p in low_params.items()})
        try:
            out = forward(*args, **kwargs)
        finally:
            part._parameters.update(params)
        return tree.map(lambda x: x.to(low) if tree.is_float(x) else x, out)

    return run


def raise_if_mixed(error: RuntimeError, params: dict, buffers: dict) -> None:
    """Raise `LossError` if this is an error of mixed dtypes, which float32 buffers of a 16-bit module may explain."""
    wide = [name for name, b in buffers.items() if b.dtype is torch.float32]
    if not wide or not re.search("dtype|scalar type|should be the same", str(error)):
        return
    low = next((str(p.dtype).removeprefix("torch.") for p in params.values() if tree.is_low(p)), "bfloat16")
    raise LossError(
        "an operator received both 16-bit and float32 tensors, and the module has float32 buffers",
        where=", ".join(wide),
        got=str(error).partition("\n")[0],
        want=f"self.{wide[0]}.to(x.dtype) in forward",
        hint=f"or module.{wide[0]} = module.{wide[0]}.{low}() before fds.functional(module): precision casts no "
        "buffers, since some (rotary frequencies, counts) are wrong in 16 bits",
    ) from error


def show(x: Any) -> None:
    """Let the outputs of an evaluation be this, and not the last module's."""
    if (seen := current().seen) is not None:
        seen[:] = [x, x]
