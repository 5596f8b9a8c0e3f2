"""Handles: parameters that hold no memory and are gathered by whatever operator reads them.

A handle is the leaf that autograd records. Below autograd, `__torch_dispatch__` gives each operator a window onto the
gathered bucket. A view of a handle is a handle again, so an operator that saves one for backward saves no memory, and
what reads it in backward gathers by itself. There is neither a mode nor a saved-tensor hook: functions of others,
`torch.func` and `torch.utils.checkpoint`, which bring theirs, are served alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import LossError
from fds.loss.compiled import untraced

aten = torch.ops.aten
# What a tensor subclass must tell and ask the dispatcher has no public name.
_torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
# private: torch has no public function that returns the saved-tensor hooks in force
_hooks: Any = _torch_c._autograd
SavedTensors = contextlib.AbstractContextManager[object]


class BucketSource(Protocol):
    """Where handles find their memory."""

    def bucket(self, index: int) -> Tensor:
        """Return the whole flat bucket `index`, gathered now if it is not live.

        Asked from whichever thread runs forward or backward. It may drop its own references to other buckets, and
        must leave their memory alone: an operator in progress may read it.
        """
        ...


@attrs.frozen(eq=False)
class BucketWindow:
    """What of a bucket a handle shows: a parameter, or a view of one. It is the same in every step."""

    path: str  # of the parameter
    bucket: int
    offset: int  # where the parameter begins, in elements
    meta: Tensor = attrs.field(repr=False)  # in the bucket's dtype; its offset is in elements of the parameter
    views: dict[Any, BucketWindow] = tree.new(dict, repr=False)  # by operator and arguments
    shape: torch.Size = attrs.field(init=False, default=attrs.Factory(lambda self: self.meta.shape, True))
    stride: tuple[int, ...] = attrs.field(init=False, default=attrs.Factory(lambda self: self.meta.stride(), True))
    start: int = attrs.field(
        init=False, default=attrs.Factory(lambda self: self.offset + self.meta.storage_offset(), True)
    )  # in elements of the bucket

    @classmethod
    def whole(cls, path: str, bucket: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> BucketWindow:
        """Return the window onto a whole parameter, contiguous, at `offset` of a bucket of this dtype."""
        with torch.inference_mode(False):
            return cls(path, bucket, offset, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def onto(self, meta: Tensor) -> BucketWindow:
        """Return a window onto the same parameter."""
        return BucketWindow(self.path, self.bucket, self.offset, meta)


@tree.tensor
class Handle(Tensor):
    """A window onto a parameter whose bucket need not be in memory; made by `handle`."""

    # The dispatcher sees every caller; __torch_function__ would see Python's alone.
    __torch_function__: Any = _torch_c._disabled_torch_function_impl

    gathered_on_use = True
    source: BucketSource
    window: BucketWindow

    def read(self) -> Tensor:
        """Return the values as a view of the gathered bucket; a copy where the dtype is another."""
        at = self.window
        values = self.source.bucket(at.bucket).as_strided(at.shape, at.stride, at.start)
        return values if values.dtype == self.dtype else values.to(self.dtype)

    @classmethod
    @untraced("a parameter that is gathered on use has no memory for compiled code; pass it fds.materialize(p)")
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator that met a handle."""
        kwargs, facts = kwargs or {}, _FACTS.get(id(func)) or _facts(func)
        if facts.written:
            _check_unwritten(facts, func, args, kwargs)
        first = args[0] if args else None
        if facts.is_view:
            if facts.is_composite:  # only inference mode shows these: their parts say which outputs are views
                return func.decompose(*args, **kwargs)
            views = _views(first, func, args, kwargs) if isinstance(first, Handle) else None
            # otherwise a copy, lest a view of the bucket outlive this operator
            return _call(func, args, kwargs, lambda x: x.read().clone()) if views is None else views
        if func is aten._to_copy.default and isinstance(first, Handle) and _is_autocast(first, kwargs):
            # Autocast keeps each parameter's cast to its end, and backward saves it: as a handle, neither holds memory.
            return handle(first.source, first.window, kwargs["dtype"], first.device)
        return _call(func, args, kwargs, Handle.read)

    @staticmethod
    def lent(handles: Sequence[Handle]) -> tuple[tuple[Tensor, ...], SavedTensors]:
        """Return the values of handles for code that needs memory, with gradients, and scope in which that runs.

        What it saves of them for backward are windows, gathered again there, where no other hooks take what is saved.
        """
        values = _lend(*handles)
        if _hooks._top_saved_tensors_default_hooks(True) is not None:  # as of a checkpoint, which drops it
            return values, contextlib.nullcontext()
        lent = {_address(x): h for h, x in zip(handles, values, strict=True) if h.is_window}

        def pack(x: Tensor) -> Any:
            h = lent.get(_address(x))
            # an output that is kept as it is would keep the graph that keeps it
            return x.detach() if h is None else (h.source, h.window.bucket, x.shape, x.stride(), x.storage_offset())

        return values, torch.autograd.graph.saved_tensors_hooks(pack, _unpacked)

    @property
    def is_window(self) -> bool:
        """Whether reading it is a view of its bucket, not a copy in another dtype."""
        return self.dtype == self.window.meta.dtype

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Handle({self.window.path!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and self.dim() == 0 else repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array of their own."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return tree.values_of(self.detach().clone())

    def __dlpack__(self, **kwargs: Any) -> Any:
        plain: Any = self._copied()
        return plain.__dlpack__(**kwargs)

    def _copied(self) -> Any:
        return self.clone()

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  (Tensor's is one, in C)
        """The parameter without its graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _raise_written(self, "p.data = ...")


class _Lend(torch.autograd.Function):
    """Handles -> their values, which are views of gathered buckets."""

    @staticmethod
    def forward(ctx: Any, *handles: Handle) -> tuple[Tensor, ...]:
        return tuple(h.read() for h in handles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


_lend: Callable[..., tuple[Tensor, ...]] = _Lend.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _address(x: Tensor) -> int:
    """Return what tells the storage of a tensor from others that are alive."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _unpacked(kept: Any) -> Tensor:
    """Return what was saved for backward, gathered again where it was a window onto a bucket."""
    if isinstance(kept, Tensor):
        return kept
    source, bucket, *at = kept
    return source.bucket(bucket).as_strided(*at)


def handle(
    source: BucketSource, window: BucketWindow, dtype: torch.dtype, device: torch.device, requires_grad: bool = False
) -> Handle:
    """Return a leaf that reads as a window onto a bucket of `source`, in a dtype."""
    if torch.is_inference_mode_enabled():  # an ordinary tensor there too, since views of it have to be
        with torch.inference_mode(False):
            return handle(source, window, dtype, device, requires_grad)
    made: Any = Tensor._make_wrapper_subclass(
        Handle,
        window.shape,
        strides=window.stride,
        storage_offset=window.start - window.offset,
        dtype=dtype,
        device=device,
        requires_grad=requires_grad,
    )
    _torch_c._set_throw_on_mutable_data_ptr(made)  # C++ that asks for an address would otherwise be given 0
    made.source, made.window = source, window
    return made


def materialize(p: Tensor) -> Tensor:
    """Return a plain tensor of a parameter's values, through which gradients flow; anything but a handle as it is.

    It is for code that wants an address (a compiled extension, a kernel), and keeps this parameter in memory for as
    long as it is held, by the graph too.
    """
    return p.clone() if isinstance(p, Handle) else p


@attrs.frozen
class Facts:
    """What a schema says of an operator."""

    func: Any = attrs.field(repr=False)  # held, so that its id stays its own
    written: tuple[tuple[int, str], ...]  # position and name of the arguments that it writes
    is_view: bool  # its outputs may share memory with its inputs
    is_composite: bool  # autograd sees its parts instead of it


# as Any, since a type checker takes what it has seen to be a list for one of nothing known
_LIST: Any = list
_LISTS: Any = (list, tuple)
_FACTS: dict[int, Facts] = {}  # by id of the operator: its hash is a function of Python


def _facts(func: Any) -> Facts:
    arguments, returns = func._schema.arguments, func._schema.returns
    is_written: Callable[[Any], bool] = lambda x: x.alias_info is not None and x.alias_info.is_write
    _FACTS[id(func)] = facts = Facts(
        func,
        tuple((i, x.name) for i, x in enumerate(arguments) if is_written(x)),
        any(x.alias_info is not None and not is_written(x) for x in returns) or func in _UNSAFE,
        _torch_c._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
    )
    return facts


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any], read: Callable[[Handle], Tensor]) -> Any:
    """Call an operator with the handles among its arguments, and in lists of them, read."""

    def plain(x: Any) -> Any:
        if type(x) is Handle:
            return read(x)
        return [plain(y) for y in x] if isinstance(x, _LISTS) else x

    arguments = [read(x) if type(x) is Handle else x if type(x) in _SINGLE else plain(x) for x in args]
    return func(*arguments, **{name: plain(x) for name, x in kwargs.items()}) if kwargs else func(*arguments)


def _check_unwritten(facts: Facts, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise `LossError` where an operator would write over a handle."""
    for index, name in facts.written:
        written = args[index] if index < len(args) else kwargs.get(name, ())
        for x in written if isinstance(written, _LISTS) else [written]:
            if isinstance(x, Handle):
                _raise_written(x, func)


_SINGLE = {Tensor, torch.nn.Parameter, int, float, bool, type(None)}  # the arguments that most operators have
_UNSAFE = {aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten._unsafe_view.default}  # secret views


def _views(p: Handle, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return views of a handle, from those of its window, nothing gathered; None where a window cannot say it."""
    window = p.window
    key = (id(func), *[tuple(x) if type(x) is _LIST else x for x in args[1:]])
    if not kwargs and (view := window.views.get(key)) is not None:
        return handle(p.source, view, p.dtype, p.device)
    if func is aten.view.dtype:
        return None
    outs = func(window.meta, *args[1:], **kwargs)
    metas = [outs] if isinstance(outs, Tensor) else outs
    if func is aten.as_strided.default:  # unchecked on meta, and beyond this parameter lies another
        last = outs.storage_offset() + sum((n - 1) * step for n, step in zip(outs.shape, outs.stride(), strict=True))
        if (last + 1) * outs.element_size() > window.meta.untyped_storage().nbytes():
            return None
    if any(x.dtype != window.meta.dtype or x.is_conj() or x.is_neg() for x in metas):
        return None
    windows = [window.onto(x) for x in metas]
    if isinstance(outs, Tensor) and not kwargs and not outs.is_inference() and len(window.views) < _MOST_VIEWS:
        window.views[key] = windows[0]
    views = [handle(p.source, x, p.dtype, p.device) for x in windows]
    return views[0] if isinstance(outs, Tensor) else views


_MOST_VIEWS = 16  # that a window remembers


def _is_autocast(p: Handle, kwargs: dict[str, Any]) -> bool:
    """Say whether autocast asks for this cast, whose result nobody writes to, unlike what a user asks for.

    Autocast's own kernels run inside its context and with it switched off.
    """
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    kind = p.device.type
    return (
        nesting > 0
        and not torch.is_autocast_enabled(kind)
        and kwargs == {"dtype": torch.get_autocast_dtype(kind)}
        and aten._to_copy.default(p.window.meta).stride() == p.stride()  # a cast packs what is not dense
    )


def _raise_written(p: Handle, by: Any) -> NoReturn:
    raise LossError(
        "the loss writes over what it is given",
        where=p.window.path,
        got=f"an in-place operation ({by})",
        want="a loss that leaves its arguments as they are",
        hint="p.clone() gives memory that may be written",
    )


def _raise_address(p: Handle, by: str) -> NoReturn:
    raise LossError(
        "the memory of a parameter that is gathered on use was asked for",
        where=p.window.path,
        got=f"p.{by}",
        want="an operator of torch",
        hint="fds.materialize(p) gives a plain tensor, through which gradients flow",
    )


def _override(names: Sequence[str], raise_: Callable[[Handle, str], NoReturn]) -> None:
    for name in names:
        setattr(Handle, name, _refusal(name, raise_))


def _refusal(name: str, raise_: Callable[[Handle, str], NoReturn]) -> Callable[..., NoReturn]:
    def refuse(self: Handle, *args: Any, **kwargs: Any) -> NoReturn:
        raise_(self, name)

    return refuse


# Autograd refuses to write over a leaf before the dispatcher sees it, and cannot say which leaf.
_OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
_HARMLESS = {"requires_grad_", "detach_", "rename_", "share_memory_"}
_override(["__setitem__", *(f"__i{x}__" for x in _OPERATORS)], _raise_written)
_override([x for x in dir(Tensor) if x[0] != "_" and x[-1] == "_" and x not in _HARMLESS], _raise_written)
_override(["data_ptr", "const_data_ptr", "untyped_storage", "storage", "share_memory_"], _raise_address)
