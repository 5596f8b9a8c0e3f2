"""Operators of torch without a gradient of their own, around what launches kernels.

`torch.compile` keeps them whole, and tensor subclasses and dispatch modes see them as one call. The gradient is that of
the `first_order.Function` which calls them: an operator with `register_autograd` does not work under `torch.func`.

Not `torch.library.custom_op`: it passes through Python three times a call, which took 8 us of a slow host where this
takes 2.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fds.errors import KernelError

# private: torch has no public function that says whether dynamo would compile what is called here
_tracer: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # pyright: ignore

_library = torch.library.Library("fds", "FRAGMENT")


class Operator:
    """A functional operator: its results share no memory with its arguments, and it writes to none of them.

    Attributes:
        name: the operator is `torch.ops.fds.<name>`.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, _untraced(function), "CompositeExplicitAutograd")
        self._overload = getattr(torch.ops.fds, name).default

    def __call__(self, *args: Any) -> Any:
        """Return the results. Raises `KernelError` where autograd would need a gradient, which there is none."""
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise KernelError(
                "an operator has no gradient of its own", where=f"fds::{self.name}",
                got="an argument that requires grad",
                want="a call from a fds.kernels.first_order.Function, or under torch.no_grad()",
            )
        return self._overload(*args)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register what makes results without data, of the right shape, strides and dtype; return it."""
        torch.library.register_fake(f"fds::{self.name}", function, lib=_library)
        return function


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, which is no code to trace: a frame above that cannot be compiled has dynamo look here.

    Where dynamo does not look, as it mostly does not, this takes 1.5 us less of a slow host than turning it off.
    """
    off = torch._disable_dynamo(function)
    return lambda *args: function(*args) if _tracer() is None else off(*args)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator named `fds::<name>` of a function with annotated arguments, any number of them tensors."""
    return lambda function: Operator(name, function)
