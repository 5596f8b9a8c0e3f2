"""Handles: parameters that hold no memory and are gathered by whatever operator reads them.

A handle is the leaf that autograd records. Below autograd, `__torch_dispatch__` gives each operator a window onto the
gathered bucket. A view of a handle is a handle again, so an operator that saves one for backward saves no memory, and
what reads it in backward gathers by itself. There is neither a mode nor a saved-tensor hook: functions of others,
`torch.func` and `torch.utils.checkpoint`, which bring theirs, are served alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import attrs
import torch
from torch import Tensor

from fds.errors import LossError
from fds.loss.compiled import untraced

aten = torch.ops.aten


class Source(Protocol):
    """Where handles find their memory."""

    def bucket(self, index: int) -> Tensor:
        """Return the whole flat bucket `index`, gathered now if it is not live.

        Asked from whichever thread runs forward or backward. It may drop its own references to other buckets, and
        must leave their memory alone: an operator in progress may read it.
        """
        ...


@attrs.frozen(eq=False)
class Place:
    """Where a parameter lies."""

    path: str  # its key path
    source: Source = attrs.field(repr=False)
    bucket: int
    offset: int  # in elements


class Handle(Tensor):
    """A window onto a parameter whose bucket need not be in memory; made by `handle`."""

    # The dispatcher sees every caller; __torch_function__ would see Python's alone.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    gathered_on_use = True
    place: Place
    window: Tensor  # on meta, in the bucket's dtype: shape, strides and offset in elements of the parameter

    def onto(self, window: Tensor, dtype: torch.dtype | None = None) -> Handle:
        """Return the handle of another window onto the same parameter; with `dtype`, of its values cast to it."""
        return _made(self.place, window, dtype or self.dtype, self.device)

    def read(self) -> Tensor:
        """Return the values as a view of the gathered bucket; a copy where the dtype is another."""
        place, at = self.place, self.window
        values = place.source.bucket(place.bucket).as_strided(at.shape, at.stride(), place.offset + at.storage_offset())
        return values if at.dtype == self.dtype else values.to(self.dtype)

    @classmethod
    @untraced("a parameter that is gathered on use has no memory for compiled code; pass it fds.materialize(p)")
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        """Run an operator that met a handle."""
        kwargs, facts = kwargs or {}, _facts(func)
        for index, name in facts.written:
            written = args[index] if index < len(args) else kwargs.get(name)
            for x in written if isinstance(written, list | tuple) else [written]:
                if isinstance(x, Handle):
                    _refuse_write(x, func)
        first = args[0] if args else None
        if facts.is_view:
            if facts.is_composite:  # only inference mode shows these: their parts say which outputs are views
                return func.decompose(*args, **kwargs)
            views = _views(first, func, args, kwargs) if isinstance(first, Handle) else None
            # otherwise a copy, lest a view of the bucket outlive this operator
            return _call(func, args, kwargs, lambda x: x.read().clone()) if views is None else views
        if func is aten._to_copy.default and isinstance(first, Handle) and _is_autocast(first, kwargs):
            # Autocast keeps each parameter's cast to its end, and backward saves it: as a handle, neither holds memory.
            return first.onto(first.window, kwargs["dtype"])
        return _call(func, args, kwargs, Handle.read)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Handle({self.place.path!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and self.dim() == 0 else repr(self), spec)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array of their own."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.detach().clone().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.clone().__dlpack__(**kwargs)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  (Tensor's is one, in C)
        """The parameter without its graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse_write(self, "p.data = ...")


def handle(
    source: Source, bucket: int, offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, *,
    name: str, requires_grad: bool,
) -> Tensor:  # fmt: skip
    """Return a leaf that reads as the parameter at `offset` of a bucket, contiguous, of the bucket's dtype."""
    window = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return _made(Place(name, source, bucket, offset), window, dtype, torch.device(device), requires_grad)


def materialize(p: Tensor) -> Tensor:
    """Return a plain tensor of a parameter's values, through which gradients flow; anything but a handle as it is.

    It is for code that wants an address (a compiled extension, a kernel), and keeps this parameter in memory for as
    long as it is held, by the graph too.
    """
    return p.clone() if isinstance(p, Handle) else p


def _made(
    place: Place, window: Tensor, dtype: torch.dtype, device: torch.device, requires_grad: bool = False
) -> Handle:
    # An ordinary tensor in inference mode too, since views of it have to be.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        made: Any = Tensor._make_wrapper_subclass(
            Handle, window.shape, strides=window.stride(), storage_offset=window.storage_offset(), dtype=dtype,
            device=device, requires_grad=requires_grad,
        )  # fmt: skip
    torch._C._set_throw_on_mutable_data_ptr(made)  # C++ that asks for an address would otherwise be given 0
    made.place, made.window = place, window
    return made


@attrs.frozen
class Facts:
    """What a schema says of an operator."""

    written: tuple[tuple[int, str], ...]  # position and name of the arguments that it writes
    is_view: bool  # its outputs may share memory with its inputs
    is_composite: bool  # autograd sees its parts instead of it


@functools.cache
def _facts(func: Any) -> Facts:
    arguments, returns = func._schema.arguments, func._schema.returns
    is_written = lambda x: x.alias_info is not None and x.alias_info.is_write
    return Facts(
        tuple((i, x.name) for i, x in enumerate(arguments) if is_written(x)),
        any(x.alias_info is not None and not is_written(x) for x in returns) or func in _UNSAFE,
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
    )


def _call(func: Any, args: Sequence, kwargs: dict, read: Callable[[Handle], Tensor]) -> Any:
    """Call an operator with the handles among its arguments, and in lists of them, read."""

    def plain(x: Any) -> Any:
        if isinstance(x, Handle):
            return read(x)
        return [plain(y) for y in x] if isinstance(x, list | tuple) else x

    return func(*map(plain, args), **{name: plain(x) for name, x in kwargs.items()})


_UNSAFE = {aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten._unsafe_view.default}  # secret views


def _views(p: Handle, func: Any, args: Sequence, kwargs: dict) -> Any:
    """Return views of a handle, from those of its window, nothing gathered; None where a window cannot say it."""
    if func is aten.view.dtype:
        return None
    outs = func(p.window, *args[1:], **kwargs)
    windows = [outs] if isinstance(outs, Tensor) else outs
    if func is aten.as_strided.default:  # unchecked on meta, and beyond this parameter lies another
        last = outs.storage_offset() + sum((n - 1) * step for n, step in zip(outs.shape, outs.stride(), strict=True))
        if (last + 1) * outs.element_size() > p.window.untyped_storage().nbytes():
            return None
    if any(x.dtype != p.window.dtype or x.is_conj() or x.is_neg() for x in windows):
        return None
    return p.onto(outs) if isinstance(outs, Tensor) else [p.onto(x) for x in windows]


def _is_autocast(p: Handle, kwargs: dict) -> bool:
    """Say whether autocast asks for this cast, whose result nobody writes to, unlike what a user asks for.

    Autocast's own kernels run inside its context and with it switched off.
    """
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    kind = p.device.type
    return (
        nesting > 0 and not torch.is_autocast_enabled(kind)
        and kwargs == {"dtype": torch.get_autocast_dtype(kind)}
        and aten._to_copy.default(p.window).stride() == p.stride()  # a cast packs what is not dense
    )  # fmt: skip


def _refuse_write(p: Handle, by: Any) -> NoReturn:
    raise LossError(
        "the loss writes over what it is given", where=p.place.path, got=f"an in-place operation ({by})",
        want="a loss that leaves its arguments as they are", hint="p.clone() gives memory that may be written",
    )  # fmt: skip


def _refuse_address(p: Handle, by: str) -> NoReturn:
    raise LossError(
        "the memory of a parameter that is gathered on use was asked for", where=p.place.path, got=f"p.{by}",
        want="an operator of torch", hint="fds.materialize(p) gives a plain tensor, through which gradients flow",
    )  # fmt: skip


def _override(names: Sequence[str], refuse: Callable[[Handle, str], NoReturn]) -> None:
    for name in names:
        setattr(Handle, name, lambda self, *args, _name=name, **kwargs: refuse(self, _name))


# Autograd refuses to write over a leaf before the dispatcher sees it, and cannot say which leaf.
_OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
_HARMLESS = {"requires_grad_", "detach_", "rename_", "share_memory_"}
_override(["__setitem__", *(f"__i{x}__" for x in _OPERATORS)], _refuse_write)
_override([x for x in dir(Tensor) if x[0] != "_" and x[-1] == "_" and x not in _HARMLESS], _refuse_write)
_override(["data_ptr", "const_data_ptr", "untyped_storage", "storage", "share_memory_"], _refuse_address)
