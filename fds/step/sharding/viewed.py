"""Views at stage 3: what a view makes of a parameter exists while an operator reads it, as the parameter itself does.

The loss is given a handle of the viewed shape. Whatever reads it, in forward or in backward, gathers the parameter and
runs the view on it. When the gradient with respect to the viewed tensor is there, the view runs once more, with a
graph, and gives the gradient with respect to the parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random
from fds.errors import ComposeError, LossError
from fds.step.sharding.handles import BucketWindow, Handle, handle

View = Callable[..., Tensor]  # all views of one parameter, in one microbatch; given that, and what they read
Known = dict[Hashable, BucketWindow | None]  # by parameter and kind of call; see `OnUse`
# private: torch has no public way to read and to set the dispatch keys
_torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
# private: torch has no public function that returns the saved-tensor hooks in force, or says that there are none
_hooks: Any = _torch_c._autograd


@attrs.frozen(eq=False)
class Surroundings:
    """How operators run where a microbatch opens its parameters: with which of autograd, autocast and `torch.func`.

    An operator that reads a handle is past all of these; a view has to run as it would before the loss.
    """

    included: Any
    excluded: Any
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]  # types of devices on which it is enabled

    @classmethod
    def now(cls, device: torch.device) -> Surroundings:
        """Return those of the caller."""
        keys = _torch_c._dispatch_tls_local_include_set(), _torch_c._dispatch_tls_local_exclude_set()
        types = filter(torch.amp.is_autocast_available, dict.fromkeys(("cpu", device.type)))  # not of meta tensors
        kinds = filter(torch.is_autocast_enabled, types)
        return cls(*keys, torch.is_grad_enabled(), tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds))

    @contextlib.contextmanager
    def again(self) -> Generator[None]:
        """Run code in them, in whichever thread; it fills no cache of autocast and calls no hook of saved tensors."""
        with (
            _torch_c._ForceDispatchKeyGuard(self.included, self.excluded),
            torch.set_grad_enabled(self.grad),
            _without_hooks(),
            contextlib.ExitStack() as stack,
        ):
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield


@attrs.frozen(eq=False)
class OnUse:
    """How the views of one microbatch run when an operator reads a parameter."""

    known: Known  # remembered from call to call
    evaluating: bool
    devices: tuple[torch.device, ...] | None  # whose generators they draw from; None where they draw nothing
    around: Surroundings

    @classmethod
    def now(cls, known: Known, devices: tuple[torch.device, ...], *, evaluating: bool, draws: bool) -> OnUse:
        """Return how they run where this is called."""
        return cls(known, evaluating, devices if draws else None, Surroundings.now(devices[0]))

    def __call__(self, inputs: Sequence[Tensor], view: View) -> ViewedSource | None:
        """Return where a handle finds what views, which return the same each time, make of a parameter.

        `inputs` are the parameter, a handle, and others that the views read. The first time they are run on made-up
        values, to learn what they return; None where no handle can stand for it (a sparse tensor, a tensor subclass).
        """
        parameter: Any = inputs[0]
        source, key = ViewedSource(parameter, tuple(inputs[1:]), view, self), (parameter.window, self.evaluating)
        if key not in self.known:
            self.known[key] = _learned(source)
        source.window = self.known[key]
        return None if source.window is None else source


@attrs.define(eq=False)
class ViewedSource:
    """Where the handle of a viewed parameter finds its values, for one microbatch."""

    parameter: Handle
    others: tuple[Tensor, ...]  # that the view reads
    view: View
    how: OnUse
    window: BucketWindow | None = None  # onto what the view returns
    unchanged: bool = False  # it returned the parameter itself, so it has no backward

    def bucket(self, index: int) -> Tensor:
        """Return what the view makes of the parameter, flat; kept until another one's is asked for."""
        live: Any = self.parameter.source
        if live.viewed is not None and live.viewed[0] is self:
            return live.viewed[1]
        if torch.is_inference_mode_enabled():  # what is kept may be read outside of it, and saved for backward there
            with torch.inference_mode(False):
                return self.bucket(index)
        live.viewed = None
        x = self.parameter.read()
        out = self.run(x, *map(_value, self.others))
        self.unchanged = out is x
        shares = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        flat = _flat(self._checked(out), self.window, copies=shares)  # it would keep the whole bucket
        live.viewed = self, flat
        return flat

    def handle(self) -> Handle:
        """Return a handle of it; a leaf, cut off from the parameter."""
        assert self.window is not None
        dtype, p = self.window.meta.dtype, self.parameter
        trained = any(x.requires_grad for x in (p, *self.others))
        wants = trained and self.how.around.grad and dtype.is_floating_point
        return handle(self, self.window, dtype, p.device, wants)

    def backward(self, grad: Tensor) -> None:
        """Add to the gradients of the parameter and the others, given that with respect to what the view returned."""
        parameters: tuple[Tensor, ...] = self.parameter, *self.others
        gradients: Sequence[Tensor | None] = [grad]
        if not self.unchanged:
            live: Any = self.parameter.source
            live.viewed = None
            leaves, out = self._run(self.parameter.read(), *map(_value, self.others))
            if out is not leaves[0]:
                trained = [i for i, x in enumerate(leaves) if x.requires_grad]
                parameters, wanted = tuple(parameters[i] for i in trained), [leaves[i] for i in trained]
                wants = self._checked(out).requires_grad
                gradients = torch.autograd.grad(out, wanted, grad, allow_unused=True) if wants else []
        for p, gradient in zip(parameters, gradients, strict=False):
            if gradient is not None and p.requires_grad:
                torch.autograd.backward([p], [gradient], inputs=[p])  # so that its hooks run

    def run(self, values: Tensor, *others: Tensor) -> Tensor:
        """Return what the view makes of the parameter's values, without a graph: `values` itself where it is that."""
        leaves, out = self._run(values, *others)
        return values if out is leaves[0] else out.detach()

    def _run(self, *values: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return what the view was given, leaves, and what it returned."""
        draws = contextlib.nullcontext() if self.how.devices is None else random.scope(self.how.devices)
        with draws, self.how.around.again():
            parameters = self.parameter, *self.others
            leaves = [x.detach().requires_grad_(p.requires_grad) for x, p in zip(values, parameters, strict=True)]
            versions = [None if x.is_inference() else x._version for x in leaves]
            out = self.view(*leaves)
            if any(before not in (None, x._version) for x, before in zip(leaves, versions, strict=True)):
                raise _written(self.parameter.window.path)
        return leaves, out

    def _checked(self, out: Tensor) -> Tensor:
        """Return what the view returned. Raises `ComposeError` where its shape or dtype is not the one known."""
        window = self.window
        assert window is not None
        if out.shape != window.shape or out.dtype != window.meta.dtype or not _is_plain(out, self.parameter):
            raise ComposeError(
                "a view returned another kind of tensor than when it was first called, which stage 3 cannot follow",
                where=f"station 'view', {window.path}",
                got=f"{tuple(out.shape)} {out.dtype}",
                want=f"{tuple(window.shape)} {window.meta.dtype}",
                hint="one shape and dtype for each parameter; they may differ between training and evaluation",
            )
        return out


def _learned(source: ViewedSource) -> BucketWindow | None:
    """Return the window onto what a view returns, None for what has none; the view is given made-up values."""
    parameter, path = source.parameter, source.parameter.window.path
    x, *others = map(_made_up, (parameter, *source.others))
    before = x.clone()
    try:
        out = source.run(x, *others)
    except Exception as error:
        error.add_note(f"in a view of {path}, given made-up values of its shape, to learn the shape of what it returns")
        raise
    if not torch.equal(x, before):  # through `.data`, which leaves no version
        raise _written(path)
    if not _is_plain(out, parameter):
        return None
    with torch.inference_mode(False):
        meta = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
        return BucketWindow(path, 0, 0, torch.empty_like(meta))  # dense: no two elements share their memory


def _made_up(p: Tensor) -> Tensor:
    """Return values such as a parameter may have."""
    if not p.is_floating_point():
        return torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    return torch.randn(p.shape, generator=random.generator(random.key(0), p.device), device=p.device).to(p.dtype)


def _value(p: Tensor) -> Tensor:
    """Return the values of a parameter, gathered where they are not here."""
    return p.read() if isinstance(p, Handle) else p


def _is_plain(x: Tensor, parameter: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided and x.device == parameter.device


def _flat(x: Tensor, window: BucketWindow | None, *, copies: bool) -> Tensor:
    """Return the memory of a tensor, which a window is a view of; a copy where the tensor lies in another way."""
    assert window is not None
    if copies or x.stride() != window.stride or x.storage_offset() or x.is_conj() or x.is_neg():
        x = torch.empty_strided(window.shape, window.stride, dtype=x.dtype, device=x.device).copy_(x)
    return x.as_strided((x.numel(),), (1,), 0)


def _without_hooks() -> contextlib.AbstractContextManager[object]:
    """Return a scope in which no hook of saved tensors is called: a checkpoint counts what its own code saves."""
    enabled = _hooks._saved_tensors_hooks_is_enabled()  # torch.func disables them
    if not enabled or _hooks._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    # kept as it is, an output would keep the graph that keeps it
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _same)


def _written(path: str) -> LossError:
    return LossError(
        "a view writes over the parameter that it is given",
        where=f"station 'view', {path}",
        got="an in-place operation",
        want="a view that leaves its argument as it is",
        hint="x.clone() gives memory that may be written",
    )


def _same(x: Tensor) -> Tensor:
    return x
