"""Grids of activations: what a module is given, rounded to 2^bits numbers between the ends of a range.

Symmetric, of the largest absolute value m: s = 2 m / 2^b, q = clamp(round(x / s), -2^(b-1), 2^(b-1) - 1) s. Asymmetric,
of the range from `least` to `greatest`: s = (greatest - least) / 2^b, z = round(least / s) s,
q = clamp(round((x - z) / s), 0, 2^b - 1) s + z. Halves are rounded to even. Where s is 0, q is x.

Source: DeepSpeed 0.19.6, whose grids these are, but for s = 0, of which it makes NaN; the gradient is passed straight
through: Bengio et al. 2013, arXiv:1308.3432.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

Per = Literal["token", "sample"]
Most = Callable[[Tensor], Tensor]  # ends of the ranges of parts -> the largest of all parts


def _here(ends: Tensor) -> Tensor:
    return ends


@attrs.frozen
class ActivationGrid:
    """A grid of 2^bits numbers for each range.

    Attributes:
        bits: 2 to 8.
        symmetric: around 0; if not, from the least to the greatest number.
    """

    bits: int = 8
    symmetric: bool = True

    def by_groups(self, x: Tensor, per: Per, most: Most = _here) -> Tensor:
        """Return x (..., features), a grid for each `token`, a row of the last dim, or `sample`, an entry of dim 0.

        `most` is of the ends of ranges, (2, ...) -least and greatest, where x is a part of what they are of.
        """
        if not x.numel():
            return x
        dims = (-1,) if per == "token" or x.dim() < 2 else tuple(range(1, x.dim()))
        seen = x.detach()
        ends = most(torch.stack([-seen.amin(dims, keepdim=True), seen.amax(dims, keepdim=True)]))
        return self.between(x, -ends[0], ends[1])

    def by_range(self, x: Tensor, range_: Tensor, most: Most = _here) -> Tensor:
        """Return x on the grid of a range, (2,) -least and greatest; of zeros, which is none, on that of all of x."""
        if not x.numel():
            return x
        used = torch.where((range_ == 0).all(), most(self.seen(x, range_)), range_)
        return self.between(x, -used[0], used[1])

    def seen(self, x: Tensor, like: Tensor) -> Tensor:
        """Return the range of all of x, which is not empty."""
        return torch.stack([-x.detach().amin(), x.detach().amax()]).to(like.dtype)

    def between(self, x: Tensor, least: Tensor, greatest: Tensor) -> Tensor:
        """Return x on the grid of a range, whose ends are broadcast to it; in float32 or wider, cast back."""
        return _Rounded.apply(x, least, greatest, self.bits, self.symmetric)  # pyright: ignore[reportReturnType]


class _Rounded(torch.autograd.Function):
    """The numbers of a grid, and the gradient as it comes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, least: Tensor, greatest: Tensor, bits: int, symmetric: bool) -> Tensor:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        dtype, half = x.dtype, 2 ** (bits - 1)
        x, least, greatest = x.to(wide), least.to(wide), greatest.to(wide)  # an end of 0 dims does not widen x
        if symmetric:
            step = torch.maximum(-least, greatest) / half
            step = torch.where(step == 0, 1, step)  # x is 0 there, and stays so
            q = torch.div(x, step).round_().clamp(-half, half - 1).mul_(step)
        else:
            step = (greatest - least) / (2 * half)
            flat = step == 0
            step = torch.where(flat, 1, step)
            zero = torch.where(flat, least, (least / step).round() * step)
            q = torch.sub(x, zero).div_(step).round_().clamp(0, 2 * half - 1).mul_(step).add_(zero)
        return q.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


@attrs.frozen(eq=False)
class RoundedInputs:
    """A hook before the forward of a plain module, that puts what it is given on a grid.

    Attributes:
        grid: which.
        per: whose range it is; "all" for that of the module's buffer `input_range`, (-least, greatest), or, where that
            is zeros, of all that it is given.
    """

    grid: ActivationGrid
    per: Per | Literal["all"]

    @classmethod
    def put(cls, module: nn.Module, grid: ActivationGrid, per: Per | Literal["all"], range_: Tensor) -> None:
        """Put one before a module, in the place of another."""
        cls.remove(module)
        module.register_forward_pre_hook(cls(grid, per), with_kwargs=True)
        if per == "all":
            module.register_buffer("input_range", range_.clone())

    @classmethod
    def remove(cls, module: nn.Module) -> None:
        """Take away what was put before a module."""
        hooks = {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, cls)}
        for key, hook in hooks.items():
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            if hook.per == "all":
                del module.input_range

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return arguments with the first one rounded."""
        key, x = ("", args[0]) if args else next(iter(kwargs.items()))
        kwargs = {word: value for word, value in kwargs.items() if word != key}
        q = self.grid.by_groups(x, self.per) if self.per != "all" else self.grid.by_range(x, module.input_range)  # pyright: ignore[reportArgumentType]
        return (q, *args[1:]), kwargs


def is_convolution(module: nn.Module) -> bool:
    """Say whether a module is a convolution of torch, in 1 to 3 dims, transposed ones included."""
    return isinstance(module, nn.modules.conv._ConvNd)


def is_conv1d(module: nn.Module) -> bool:
    """Say whether a module is the Conv1D of transformers, a linear layer whose weight is (inputs, outputs)."""
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Say whether a module multiplies rows by its weight: nn.Linear, or Conv1D of transformers."""
    return isinstance(module, nn.Linear) or is_conv1d(module)
