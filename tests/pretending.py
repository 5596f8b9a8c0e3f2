"""A GPU that is not there: tensors that say "cuda:0", refuse to meet tensors of the CPU, and are computed on it.

What a run on CUDA would refuse is refused (two devices in one operator, `numpy()`, a generator of the other device),
and what it would draw comes from a generator of its own; its numbers are those of the CPU. Kernels run in Triton's
interpreter. It shows mistakes of devices, in fds and in its tests, before there is a GPU to show them; it knows nothing
of streams, of pinned memory and of what compiled kernels do.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

DEVICE = torch.device("cuda", 0)
HERE = ("cuda", "lazy")  # what it is to Python, and to torch's own code, which knows no CUDA in a build without
_aten = torch.ops.aten
MEETING = {  # operators that take tensors of two devices
    _aten.copy_, _aten._foreach_copy_, _aten._foreach_copy, _aten.index, _aten.index_put, _aten.index_put_, _aten.set_,
    _aten._index_put_impl_, _aten.record_stream, _aten.is_same_size, _aten._unsafe_index, _aten._unsafe_index_put,
}  # fmt: skip


_make_wrapper_subclass = torch.Tensor._make_wrapper_subclass


def _made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """Make a tensor of a subclass, on a GPU that torch's own code knows nothing of."""
    there = device is not None and torch.device(device).type == "cuda"
    return _make_wrapper_subclass(*args, device="lazy" if there else device, **kwargs)


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnGPU:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="lazy",  # for which every build of torch has what autograd asks of a device
        )  # fmt: skip
        made.held = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnGPU({self.held!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatched(func, types, args, kwargs or {})

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self):
        return DEVICE.index

    def data_ptr(self):
        return self.held.data_ptr()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def tolist(self):
        return self.held.tolist()

    def is_pinned(self, device=None):
        return False

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return self.held.numpy()

    def __array__(self, dtype=None):
        return self.numpy()

    def cuda(self, *args, **kwargs):
        return self

    def to(self, *args, **kwargs):
        """Convert as ever, though a device that is the tensor's own is no change."""
        args, kwargs = _without_device(args, kwargs)
        if not args and kwargs.keys() <= {"non_blocking"}:
            return self
        return super().to(*args, **kwargs)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.detach().clone().requires_grad_(self.requires_grad)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]


def _without_device(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of `Tensor.to` without a device that is where the tensor is already."""
    is_here = lambda x: isinstance(x, (str, torch.device)) and torch.device(x).type == "cuda"
    kwargs = {k: v for k, v in kwargs.items() if k != "device" or not is_here(v)}
    if args and is_here(args[0]):
        return args[1:], kwargs
    return (args[0].dtype, *args[1:]) if args and isinstance(args[0], OnGPU) else args, kwargs


def _dispatched(func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute an operator, unless another kind of tensor is among its arguments, which takes it apart itself first."""
    if any(t not in (OnGPU, torch.Tensor, torch.nn.Parameter) for t in types):
        return NotImplemented
    return _computed(func, args, kwargs)


def _computed(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute an operator on the CPU; refuse what CUDA would refuse, and say of results where CUDA would have them."""
    flat, spec = _pytree.tree_flatten((args, kwargs))
    given = [x for x in flat if isinstance(x, torch.Tensor)]
    here = [x for x in given if isinstance(x, OnGPU)]
    device, packet = kwargs.get("device"), func.overloadpacket
    if here:
        others = [x for x in given if not isinstance(x, OnGPU) and x.device.type == "cpu"]
        written = bool(others) and others[0] is given[0] and func._schema.is_mutable
        if packet not in MEETING and (written or any(x.dim() for x in others)):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! {func}"
            )
    goes = device.type in HERE if device is not None else bool(here) and not _stays(packet, given)
    if device is not None and device.type in HERE:
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if packet is _aten.to and not here:  # inside of a dispatch mode it comes whole, and is a copy
            kwargs["copy"] = True
        flat, spec = _pytree.tree_flatten((args, kwargs))
    generator = next((x for x in flat if isinstance(x, torch.Generator)), None)
    if generator is not None and goes is not isinstance(generator, Generator):
        raise RuntimeError(f"Expected a '{'cuda' if goes else 'cpu'}' device type for generator {func}")
    plain = [x.held if isinstance(x, OnGPU) else x for x in flat]
    args, kwargs = _pytree.tree_unflatten(plain, spec)
    kwargs.pop("pin_memory", None)
    if packet is _aten._pin_memory:
        return args[0].clone()
    draws = goes and generator is None and torch.Tag.nondeterministic_seeded in func.tags
    with _drawing() if draws else _nothing, torch._C.DisableTorchFunction():  # inside there is no default device
        out = func(*args, **kwargs)
    known = {id(x.held): x for x in here}
    if not goes:
        return _pytree.tree_map_only(torch.Tensor, lambda x: known.get(id(x), x), out)
    return _pytree.tree_map_only(torch.Tensor, lambda x: known[id(x)] if id(x) in known else _wrapped(x, given), out)


def _wrapped(x: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
    return x if any(x is y for y in given) or x.device.type != "cpu" else OnGPU(x)


def _stays(packet: Any, given: list[torch.Tensor]) -> bool:
    """Say whether results are on the CPU beside a tensor of the GPU: what is written to or indexed is there."""
    return packet in MEETING and bool(given) and not isinstance(given[0], OnGPU)


_nothing = contextlib.nullcontext()


class Generator(torch.Generator):
    """A generator of the GPU."""

    @property
    def device(self) -> torch.device:
        return DEVICE


_default = Generator()


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Let an operator draw from the GPU's generator."""
    kept = torch.default_generator.get_state()
    torch.default_generator.set_state(_default.get_state())
    try:
        yield
    finally:
        _default.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(kept)


class Pretending(TorchDispatchMode):
    """Compute everything as `OnGPU` does: what is made with `device="cuda"` too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _dispatched(func, types, args, kwargs or {})


class _Numbered(TorchFunctionMode):
    """Say of every "cuda" which one: torch asks the driver otherwise."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func in _ASKED and not isinstance(args[0], OnGPU):  # what torch.func wraps around one
            found = func(*args)
            is_device = func == torch.Tensor.device.__get__
            return (DEVICE if is_device else True) if torch.Tensor.device.__get__(args[0]).type == "lazy" else found
        say = lambda x: DEVICE if (isinstance(x, str) and x == "cuda") or x == _UNNUMBERED else x
        args = tuple(say(x) if isinstance(x, (str, torch.device)) else x for x in args)
        kwargs = {k: say(x) if isinstance(x, (str, torch.device)) else x for k, x in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], DEVICE)
        return func(*args, **kwargs)


_ASKED = {torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__}
_UNNUMBERED = torch.device("cuda")


class _Moment:
    """A stream or an event, where all is done at once."""

    cuda_stream, device = 0, DEVICE
    _ids = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = next(self._ids)

    def __getattr__(self, name: str) -> Any:
        if name in ("record", "wait", "wait_event", "wait_stream", "synchronize", "record_event"):
            return lambda *args, **kwargs: None
        if name == "query":
            return lambda: True
        raise AttributeError(name)


_OfTheCPU = torch.Generator


class _Either(type(_OfTheCPU)):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, _OfTheCPU)


class EitherGenerator(_OfTheCPU, metaclass=_Either):
    """What stands for `torch.Generator`: one of the GPU if it is asked for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return Generator() if torch.device(device).type == "cuda" else _OfTheCPU(device)


_PROPERTIES = types.SimpleNamespace(
    name="a GPU that is not there", multi_processor_count=2, total_memory=2**34, major=9, minor=0, L2_cache_size=2**20,
    shared_memory_per_block_optin=232448, warp_size=32,
)  # fmt: skip


class Driver:
    """What `torch.cuda.cudart` returns: which memory is page-locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}  # address -> bytes

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address not in self.locked and address % 4096 == nbytes % 4096 == 0 and flags == 1
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaError(self, code: int) -> int:
        return code

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


DRIVER = Driver()
CUDA = {
    "cudart": lambda: DRIVER,
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "current_stream": lambda device=None: _Moment(),
    "Stream": _Moment,
    "Event": _Moment,
    "stream": lambda stream: contextlib.nullcontext(),
    "device": lambda device: contextlib.nullcontext(),
    "is_current_stream_capturing": lambda: False,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "get_device_capability": lambda device=None: (9, 0),
    "mem_get_info": lambda device=None: (2**33, 2**34),
    "manual_seed": lambda seed: _default.manual_seed(seed),
    "manual_seed_all": lambda seed: _default.manual_seed(seed),
    "default_generators": (_default,),
    "get_rng_state": lambda device=None: _default.get_state(),
    "set_rng_state": lambda state, device=None: _default.set_state(state),
}


def _launched(run: Any) -> Any:
    """Return how the interpreter runs a kernel, given what tensors hold."""

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _pytree.tree_map_only(OnGPU, lambda x: x.held, (args, kwargs))
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    return launch


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Pretend that there is a GPU, in this thread."""
    with contextlib.ExitStack() as stack:
        for name, value in CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", EitherGenerator))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda x, device=None: x.clone()))
        stack.enter_context(mock.patch.object(torch.Tensor, "_make_wrapper_subclass", staticmethod(_made)))
        executor = interpreter.GridExecutor
        stack.enter_context(mock.patch.object(executor, "__call__", _launched(executor.__call__)))
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        # a module's `double()` then swaps parameters, where it would write to `data`, which is of the wrapper alone
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.enter_context(modes())
        yield


@contextlib.contextmanager
def modes() -> Iterator[None]:
    """Pretend in this thread what `pretended` does for the process."""
    with _Numbered(), Pretending():
        yield
