"""Gradients as values, on torch.autograd over detached leaves.

`torch.func.grad` costs 45% more per step on small operators and refuses saved-tensor hooks, so
`torch.utils.checkpoint`; it is not the engine here, but what runs here may use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fds import tree
from fds.errors import LossError


def value_and_grad(f: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """Return a function computing `f` and its gradients by the arguments `argnums`.

    `f` returns a scalar, or `(scalar, aux)` with `has_aux`. The result returns `(value, grads)` or
    `((value, aux), grads)`, detached; `grads` has the structure of the argument (a tuple of them for a tuple of
    `argnums`), zeros where `f` does not depend on a leaf and None at leaves that are not floating point.

    >>> value, grads = value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
    >>> grads["w"]
    tensor([2., 4.])
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        outs, pull = _linearize(f, argnums, has_aux, args, kwargs)
        if has_aux and not (isinstance(outs, tuple) and len(outs) == 2):
            raise LossError("a function with aux returns a pair", where="value_and_grad", got=type(outs).__name__,
                            want="(scalar, aux)")  # fmt: skip
        value: Any = outs[0] if has_aux else outs
        check_scalar(value, "value_and_grad")
        if not value.requires_grad:
            raise LossError(
                "the loss does not depend on the parameters", got="a value without a graph",
                want="a value computed from params", hint="look for .detach(), .item(), torch.no_grad() or a constant",
            )  # fmt: skip
        return tree.map(_detach, outs), pull(torch.ones_like(value))

    return run


def vjp(f: Callable, *args: Any) -> tuple[Any, Callable[[Any], tuple]]:
    """Return `f(*args)` and the function from a cotangent of its value to the cotangents of all arguments."""
    outs, pull = _linearize(f, tuple(range(len(args))), False, args, {}, keep=True)
    return tree.map(_detach, outs), pull


def backward_into(total: Tensor, seed: Tensor | None, leaves: Sequence[Tensor]) -> None:
    """Add the gradients of `total` by `leaves` into their `.grad`, each as soon as it is ready.

    Unlike a list from `torch.autograd.grad`, which is whole before anyone can read it, this sums microbatches in
    place and frees each gradient at once; `leaves` are the step's own, so nobody else sees `.grad`.
    """
    if leaves and total.requires_grad:  # the loss of another rank may depend on parameters where this one does not
        torch.autograd.backward(total, seed, inputs=list(leaves))


def exclusive(grad: Tensor) -> Tensor:
    """Return `grad`, or a contiguous copy if its memory is shared with anything (a batch, another gradient).

    Autograd hands a gradient over without a copy when nobody holds the *tensor*; its storage may still be that of
    a view. Only memory that is ours may be written.
    """
    if grad.layout is not torch.strided:
        return grad.to_dense()
    return grad if is_alone(grad) and grad.is_contiguous() else grad.clone(memory_format=torch.contiguous_format)


def is_alone(x: Tensor) -> bool:
    """Say whether nobody else holds the memory of `x`: no other tensor, and no storage object."""
    return all(n <= alone for n, alone in zip(_holders(x), _ALONE, strict=True))


def _holders(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))  # how one tensor by itself is counted: 2 and 3 in torch 2.13


def check_scalar(value: Any, where: str) -> None:
    """Raise `LossError` unless `value` is a floating-point tensor of no dims."""
    if not isinstance(value, Tensor):
        raise LossError("the loss is no tensor", where=where, got=type(value).__name__, want="a 0-d floating tensor",
                        hint="look for .item() or float(); a pair is (scalar, metrics)")  # fmt: skip
    if value.dim() != 0:
        raise LossError(
            "the loss is not a scalar", where=where, got=f"shape {tuple(value.shape)}", want="shape ()",
            hint="return loss.mean(), or fds.Mean(loss.sum(), loss.numel())",
        )  # fmt: skip
    if not value.is_floating_point():
        raise LossError("the loss is not floating point", where=where, got=str(value.dtype), want="a float dtype")


def _linearize(
    f: Callable, argnums: Any, has_aux: bool, args: tuple, kwargs: dict, keep: bool = False
) -> tuple[Any, Callable]:
    picked = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    parts, build = tree.flatten([args[i] for i in picked])
    tracked = [x.detach().requires_grad_() if tree.is_float(x) else x for x in parts]
    inputs = [x for x in tracked if tree.is_float(x)]
    full = list(args)
    for i, arg in zip(picked, build(tracked), strict=True):
        full[i] = arg
    with torch.enable_grad():
        outs = f(*full, **kwargs)

    def pull(cotangent: Any) -> Any:
        pairs = zip(tree.leaves(outs[0] if has_aux else outs), tree.leaves(cotangent), strict=True)
        live = [(o, c) for o, c in pairs if isinstance(o, Tensor) and o.requires_grad]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in live], inputs, [c for _, c in live], materialize_grads=True, retain_graph=keep
            )
            if live
            else [torch.zeros_like(x) for x in inputs]
        )
        grads = tuple(build([exclusive(next(found)) if tree.is_float(x) else None for x in tracked]))
        return grads[0] if isinstance(argnums, int) else grads

    return outs, pull


def _detach(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
