"""Record the tensor operations of a function that builds a module, on `meta`: nothing is allocated or drawn."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from fds import random, tree
from fds.loss.record import Operation, Record, Window

_aten = torch.ops.aten
_BLANK = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_OVERWRITING = {_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_}
_META = torch.device("meta")
_DEVICE, _IS_META = (getattr(Tensor, name).__get__ for name in ("device", "is_meta"))
_TRUNC_NORMAL = getattr(nn.init, "_no_grad_trunc_normal_", None)


def record(build: Callable[[], nn.Module], key: Tensor) -> tuple[Record, dict[str, Window | Tensor]] | None:
    """Return the record of `build()` and its parameters: windows, or tensors that existed before.

    None where it cannot be recorded: it raises, seeds a generator, passes its own one, uses `meta`, writes random
    numbers to a tensor that existed before, or uses sparse, quantized or other special tensors. Values that it reads
    are computed from `key`, like the parameters.
    """
    recorder = _Recorder(key, torch.get_default_device())
    if recorder.home.type == "meta":
        return None
    with random.seeded(key):
        recorder.seed, before = torch.initial_seed(), torch.get_rng_state()
        try:
            with recorder, _Disguise(recorder):
                named = dict(build().named_parameters())
            params = {name: recorder.parameter(p) for name, p in named.items()}
        except Exception:  # the caller then builds it for real, which succeeds or raises a better error
            return None
        if recorder.failed or not torch.equal(torch.get_rng_state(), before):
            return None
    return recorder.record, params


class _Unrecordable(Exception):
    """Raised for an operation that cannot be replayed."""


class _Recorder(TorchDispatchMode):
    """Run every operation on `meta` and record it, with the device on which it would have run."""

    def __init__(self, key: Tensor, home: torch.device):
        super().__init__()
        self.key, self.home, self.seed = key, home, 0
        self.record, self.num_draws, self.failed = Record(), 0, False
        self.numbers: dict[int, int] = {}  # address of a storage -> its number
        self.alive: list[torch.UntypedStorage] = []  # keeps addresses from being reused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch._dynamo: 1.7 s

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        try:
            with torch._C.DisableTorchFunction():  # private; shape functions must see `meta`, which _Disguise hides
                return self._dispatch(func, args, kwargs or {})
        except Exception:
            self.failed = True  # `build` may catch it
            raise

    def _dispatch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is _aten.lift_fresh.default and self.number(args[0]) is None:
            func = _aten.clone.default  # of the data of torch.tensor or torch.from_numpy
        flat, build = tree.flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        outside = [x for x in tensors if self.number(x) is None]
        written, signature = _written(func, args, kwargs), _signature(func)
        if signature.draws:
            self.check_generators(flat)
        elif tensors and len(outside) == len(tensors) and (written or signature.views or signature.returns_values):
            return func(*args, **kwargs)  # all of its tensors existed before: it runs now, and is not recorded
        if any(x.is_meta for x in outside):
            raise _Unrecordable("a tensor on meta from outside")
        if signature.returns_values:
            return self._read_values(func, flat, build)
        known = [n for x in written if (n := self.number(x)) is not None]
        if len(known) < len(written):
            raise _Unrecordable("writes to a tensor from outside")
        sizes = [x.untyped_storage().nbytes() for x in written]
        twins = {id(x): torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META) for x in outside}
        meta_args, meta_kwargs = build([_on_meta(x, twins) for x in flat])
        if signature.takes_device:
            meta_kwargs.pop("pin_memory", None)
            if not tensors:
                meta_kwargs["device"] = _META
        out = func(*meta_args, **meta_kwargs)
        if [self.number(x) for x in written] != known or [x.untyped_storage().nbytes() for x in written] != sizes:
            raise _Unrecordable("replaces or resizes a storage")
        if {x.untyped_storage()._cdata for x in twins.values()} & {_address(x) for x in tree.leaves(out)}:
            raise _Unrecordable("a view of a tensor from outside")
        device = self._device_of(tensors)
        created = self._created(out, next((_moved(x, device) for x in flat if isinstance(x, torch.device)), device))
        writes = frozenset([*known, *(w.storage for w in created.values())])
        if writes and func.overloadpacket not in _BLANK:
            args, kwargs = build([self._recorded(_moved(x, device)) for x in flat])
            self._add(func, args, kwargs, writes, created, signature.draws, func.overloadpacket in _OVERWRITING)
        return out

    def number(self, x: Tensor) -> int | None:
        """Return the number of a tensor's storage; None where it was not created here."""
        return self.numbers.get(x.untyped_storage()._cdata)

    def window(self, x: Tensor) -> Window:
        """Return the window of a recorded tensor."""
        if x.is_conj() or x.is_neg():
            raise _Unrecordable("a lazy conjugate or negative")
        number = self.numbers[x.untyped_storage()._cdata]
        return Window(number, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def parameter(self, p: Tensor) -> Window | Tensor:
        """Return the window of a parameter; the parameter itself where it was not created here."""
        if is_traceable_wrapper_subclass(p):
            raise _Unrecordable("a tensor subclass that wraps other tensors")
        return p.detach() if self.number(p) is None else self.window(p)

    def device(self, x: Tensor) -> torch.device | None:
        """Return the device on which a recorded tensor would be."""
        number = self.number(x) if x.layout == torch.strided else None
        return None if number is None else self.record.devices[number]

    def whole(self, frame: FrameType) -> None:
        """Record a call of torch's `trunc_normal_` as one draw: it loops until all values are within bounds."""
        kwargs = {name: frame.f_locals[name] for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]}
        self.check_generators(list(kwargs.values()))
        x = self.window(kwargs["tensor"])
        overwrites = kwargs["tensor"].is_contiguous()
        recorded = kwargs | {"tensor": x}
        self._add(_TRUNC_NORMAL, (), recorded, frozenset([x.storage]), {}, True, overwrites)

    def check_generators(self, arguments: list) -> None:
        """Raise unless a draw uses the default generator, which `build` has not seeded."""
        if any(isinstance(x, torch.Generator) for x in arguments) or torch.initial_seed() != self.seed:
            raise _Unrecordable("draws from a generator that was seeded")

    def _add(
        self,
        run: Any,
        args: tuple,
        kwargs: dict,
        writes: frozenset[int],
        created: dict[int, Window],
        draws: bool,
        overwriting: bool,
    ) -> None:
        windows = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Window)]
        if overwriting and self._covers(windows[0]):  # the first argument is what it writes to
            windows = windows[1:]
        draw = None
        if draws:
            draw, self.num_draws = self.num_draws, self.num_draws + 1
            devices = [self.record.devices[s] for s in writes]
            self.record.drawn_on.update(d for d in devices if d.type != "cpu")
        reads = frozenset(w.storage for w in windows)
        self.record.add(Operation(run, args, kwargs, reads, writes, created, draw))

    def _covers(self, window: Window) -> bool:
        """Say whether a window is its whole storage, contiguous."""
        stride = 1
        for n, step in zip(reversed(window.shape), reversed(window.stride), strict=True):
            if n != 1 and step != stride:
                return False
            stride *= n
        return stride * window.dtype.itemsize == self.record.sizes[window.storage]

    def _read_values(self, func: Any, flat: list, build: Callable) -> Any:
        """Run an operation that returns Python values, such as `item`, on the values that the tensors have now."""
        recorded = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and self.number(x) is not None]
        values = self.record.replay([self.window(flat[i]) for i in recorded], self.key)
        flat = list(flat)
        for i, value in zip(recorded, values, strict=True):
            flat[i] = value
        args, kwargs = build(flat)
        return func(*args, **kwargs)

    def _created(self, out: Any, device: torch.device) -> dict[int, Window]:
        """Add the new storages to the record, and return the windows onto them by the index of the result."""
        created = {}
        for index, x in enumerate(tree.leaves(out)):
            if isinstance(x, Tensor) and self.number(x) is None:
                storage = x.untyped_storage()
                self.numbers[storage._cdata] = self.record.add_storage(storage.nbytes(), device)
                self.alive.append(storage)
                created[index] = self.window(x)
        return created

    def _device_of(self, tensors: list[Tensor]) -> torch.device:
        """Return the device of an operation: that of its tensors, 0-d ones on the CPU last."""
        by_size = sorted(tensors, key=lambda x: x.dim() == 0)
        return next((self.device(x) or x.device for x in by_size), self.home)

    def _recorded(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().clone() if self.number(x) is None else self.window(x)
        return x


class _Disguise(TorchFunctionMode):
    """Report the device that recorded tensors would have: code that sees `meta` may skip their initialization."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(str(x) == "meta" for x in (*args, *(kwargs or {}).values()) if isinstance(x, str | torch.device)):
            self.recorder.failed = True
        if func not in (_DEVICE, _IS_META) or (device := self.recorder.device(args[0])) is None:
            try:
                return func(*args, **(kwargs or {}))
            except Exception:  # perhaps because the tensors are on meta; `build` may catch it
                self.recorder.failed = True
                raise
        if func == _DEVICE:
            return device
        caller = sys._getframe(1)
        if _TRUNC_NORMAL is None or caller.f_code is not _TRUNC_NORMAL.__code__:
            return False
        try:
            self.recorder.whole(caller)
        except Exception:
            self.recorder.failed = True
            raise
        return True  # whereupon trunc_normal_ returns at once


class _Signature:
    """Properties of an operation, from its schema."""

    def __init__(self, func: Any):
        schema = func._schema
        self.draws = torch.Tag.nondeterministic_seeded in func.tags or "generator" in {a.name for a in schema.arguments}
        self.views = func.is_view
        self.takes_device = "device" in {a.name for a in schema.arguments}
        self.returns_values = bool(schema.returns) and not any("Tensor" in str(r.type) for r in schema.returns)
        self.writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        self.written_names = {a.name for a, w in zip(schema.arguments, self.writes, strict=True) if w}


_signature = functools.cache(_Signature)


def _written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    signature = _signature(func)
    if not signature.written_names:
        return []
    by_position = [x for x, w in zip(args, signature.writes, strict=False) if w]
    by_name = [x for name, x in kwargs.items() if name in signature.written_names]
    return [x for x in tree.leaves((by_position, by_name)) if isinstance(x, Tensor)]


def _moved(x: Any, device: torch.device) -> Any:
    """Return `device` in place of `meta`, other arguments as they are."""
    return device if isinstance(x, torch.device) and x == _META else x


def _on_meta(x: Any, twins: dict[int, Tensor]) -> Any:
    return _META if isinstance(x, torch.device) else twins.get(id(x), x)


def _address(x: Any) -> int | None:
    return x.untyped_storage()._cdata if isinstance(x, Tensor) else None
