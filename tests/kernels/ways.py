"""Ways to take gradients, which must agree; what a function keeps for backward; memory that tells on kernels."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fds.step.sharding.handles import BucketWindow, handle

# torch.compile makes an instance of every torch.autograd.Function that it traces, and warns of that itself
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def plain(loss: Callable[..., Tensor], args: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(loss(*args), args)


def transformed(loss: Callable[..., Tensor], args: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.func.grad(loss, argnums=tuple(range(len(args))))(*args)


def pulled_back(loss: Callable[..., Tensor], args: Sequence[Tensor]) -> Sequence[Tensor]:
    value, pull = torch.func.vjp(loss, *args)
    return pull(torch.ones_like(value))


def checkpointed(loss: Callable[..., Tensor], args: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(checkpoint(loss, *args, use_reentrant=False), args)


def compiled(loss: Callable[..., Tensor], args: Sequence[Tensor]) -> Sequence[Tensor]:
    torch.compiler.reset()
    return torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*args), args)


WAYS = {way.__name__: way for way in (plain, transformed, pulled_back, checkpointed, compiled)}


def kept_bytes(f: Callable[..., object], *args: object) -> int:
    """Return how many bytes `f(*args)` keeps for backward, inputs too, each once."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        f(*args)
    return sum(kept.values())


class _Zeros(TorchDispatchMode):
    """Add up the elements that operators fill with zeros."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += out.numel() if func in (torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default) else 0
        return out


def zeros_in_backward(y: Tensor) -> int:
    """Return how many zeros autograd makes up for outputs of which there is no gradient, when y's is taken."""
    dy = torch.ones_like(y)
    with _Zeros() as zeros:
        y.backward(dy)
    return zeros.count


def without_a_gradient(y: Tensor) -> Tensor:
    """Return y, whose gradient in backward is none at all, as of a function that returns None for it."""
    return _Cut.apply(y)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, dy: Tensor) -> None:
        return None


class Bucket:
    """A source of handles: one flat tensor, asked for whenever an operator reads."""

    def __init__(self, x: Tensor) -> None:
        self.flat, self.reads = x.detach().reshape(-1), 0

    def bucket(self, index: int) -> Tensor:
        self.reads += 1
        return self.flat.clone()


def as_handle(x: Tensor) -> Tensor:
    """Return a parameter that holds no memory and reads as `x`."""
    return handle(Bucket(x), BucketWindow.whole("w", 0, 0, x.shape, x.dtype), x.dtype, x.device, requires_grad=True)


@contextlib.contextmanager
def poisoned(margin: int = 1024) -> Iterator[None]:
    """Hand out NaNs for memory that is not yet written, and check that all of it is, and nothing around it."""
    empty_like, new_empty, given = torch.empty_like, Tensor.new_empty, []

    def within(made: Tensor) -> Tensor:
        if not made.is_floating_point() or not made.numel():
            return made
        span = 1 + sum((n - 1) * s for n, s in zip(made.shape, made.stride(), strict=True))
        around = torch.full((span + 2 * margin,), float("nan"), dtype=made.dtype, device=made.device)
        given.append((around, around.as_strided(made.shape, made.stride(), margin)))
        return given[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda *a, **k: within(empty_like(*a, **k)))
        patch.setattr(Tensor, "new_empty", lambda *a, **k: within(new_empty(*a, **k)))
        yield
    assert given, "nothing was allocated"
    for around, inside in given:
        assert not inside.isnan().any(), "an element was not written"
        assert around[:margin].isnan().all() and around[-margin:].isnan().all(), "written outside"
