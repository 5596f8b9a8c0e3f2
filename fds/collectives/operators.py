"""Collectives as torch operators without a gradient, which tensor subclasses and dispatch modes can intercept.

An axis is passed by its handle, since operators take only numbers and tensors. `fds.collectives.functional` adds the
gradients: an operator with `register_autograd` does not work under `torch.func`, but one without, called from an
`autograd.Function`, does.
"""

# No `from __future__ import annotations`: custom_op reads the annotations.
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fds.collectives.axis import of_handle


def operator(shape: Callable[..., Any]) -> Callable[[Callable[..., Tensor]], Any]:
    """Return a decorator that makes a torch operator of a function; `shape(x, *args)` is the shape of its result."""

    def make(function: Callable[..., Tensor]) -> Any:
        custom_op = torch.library.custom_op(f"fds::{function.__name__}", function, mutates_args=())
        custom_op.register_fake(lambda x, *args: x.new_empty(shape(x, *args)))
        return custom_op

    return make


def _same_shape(x: Tensor, *args: int) -> Any:
    return x.shape


def _pieces(x: Tensor, size: int, dim: int) -> Tensor:
    """Return the equal pieces of `x` along `dim` as `(size, ...)`, contiguous."""
    return x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).contiguous()


def _gathered_shape(x: Tensor, axis: int, dim: int) -> list[int]:
    return [n * of_handle(axis).size if i == dim else n for i, n in enumerate(x.shape)]


def _scattered_shape(x: Tensor, axis: int, dim: int) -> list[int]:
    return [n // of_handle(axis).size if i == dim else n for i, n in enumerate(x.shape)]


def _transposed_shape(x: Tensor, axis: int, split_dim: int, concat_dim: int) -> list[int]:
    size, shape = of_handle(axis).size, list(x.shape)
    shape[split_dim] //= size
    shape[concat_dim] *= size
    return shape


@operator(_gathered_shape)
def gather(x: Tensor, axis: int, dim: int) -> Tensor:
    """Concatenate the tensors of all ranks along `dim`."""
    along = of_handle(axis)
    out = x.new_empty((along.size, *x.shape))
    along.start_all_gather(out.view(-1), x.contiguous().view(-1)).wait()
    return out.movedim(0, dim).reshape(_gathered_shape(x, axis, dim))


@operator(_scattered_shape)
def scatter_sum(x: Tensor, axis: int, dim: int) -> Tensor:
    """Sum the tensors of all ranks and return this rank's piece along `dim`."""
    along = of_handle(axis)
    whole = _pieces(x, along.size, dim)
    out = x.new_empty(whole.shape[1:])
    along.start_reduce_scatter(out.view(-1), whole.view(-1)).wait()
    return out


@operator(_same_shape)
def sum_all(x: Tensor, axis: int) -> Tensor:
    """Sum the tensors of all ranks."""
    out = x.clone(memory_format=torch.contiguous_format)
    of_handle(axis).start_all_reduce(out).wait()
    return out


@operator(_same_shape)
def max_all(x: Tensor, axis: int) -> Tensor:
    """Return the largest of the tensors of all ranks, element by element."""
    out = x.clone(memory_format=torch.contiguous_format)
    of_handle(axis).start_all_reduce(out, "max").wait()
    return out


@operator(_same_shape)
def sum_to(x: Tensor, axis: int, to: int) -> Tensor:
    """Sum the tensors of all ranks on one of them, and return zeros on the others."""
    along, out = of_handle(axis), x.clone(memory_format=torch.contiguous_format)
    along.start_all_reduce(out).wait()
    return out if along.index == to else out.zero_()


@operator(_transposed_shape)
def transpose(x: Tensor, axis: int, split_dim: int, concat_dim: int) -> Tensor:
    """Send piece i along `split_dim` to rank i, and concatenate the pieces received along `concat_dim`."""
    along = of_handle(axis)
    pieces = _pieces(x, along.size, split_dim)
    out = torch.empty_like(pieces)
    along.start_all_to_all(out, pieces).wait()
    return out.movedim(0, concat_dim).reshape(_transposed_shape(x, axis, split_dim, concat_dim))


@operator(_same_shape)
def copy_from(x: Tensor, axis: int, source: int) -> Tensor:
    """Return the tensor of the rank with coordinate `source`."""
    along = of_handle(axis)
    out = x.clone(memory_format=torch.contiguous_format) if along.index == source else x.new_empty(x.shape)
    along.start_broadcast(out, source).wait()
    return out


@operator(lambda x, *args: ())
def send_to(x: Tensor, axis: int, to: int) -> Tensor:
    """Send a tensor, and return a 0-d zero."""
    of_handle(axis).start_send(x.contiguous(), to).wait()
    return x.new_zeros(())


@operator(_same_shape)
def recv_from(like: Tensor, axis: int, source: int) -> Tensor:
    """Receive a tensor of this shape and dtype."""
    out = like.new_empty(like.shape)
    of_handle(axis).start_recv(out, source).wait()
    return out
