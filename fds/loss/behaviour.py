"""What a call of a module depends on besides its arguments: random numbers, its mode, hooks on its parameters."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

from torch import nn

from fds.errors import LossWarning

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
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    functions = (inspect.unwrap(f) for one in own for f in vars(one).values() if inspect.isfunction(f))
    return any("training" in f.__code__.co_names for f in functions if inspect.isfunction(f))
