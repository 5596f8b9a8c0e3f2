"""Record the tensor operations of a function that builds a module, on `meta`, and replay them for a few tensors.

Nothing is allocated or drawn while recording. A recorded tensor is a window onto a numbered storage, so views need no
entry. Recorded operations are those that create storages or write to them. The value of a tensor is computed by
replaying, in order, the operations on which its storage depends. A random operation is seeded by the key and its index,
so its values do not depend on what else is replayed.
"""

from __future__ import annotations

import bisect
import functools
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from fds import random, tree


@attrs.frozen
class Window:
    """A recorded tensor: a view of storage number `storage`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the view of a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@attrs.frozen(eq=False)
class Operation:
    """A call `run(*args, **kwargs)`, in which windows stand for recorded tensors; other tensors are constants."""

    run: Callable
    args: tuple
    kwargs: dict[str, Any]
    reads: frozenset[int]  # storages whose values it depends on
    writes: frozenset[int]  # storages that it creates or changes
    created: dict[int, Window]  # index of a result -> window onto the storage created for it
    draw: int | None = None  # index of this draw; None if it draws no random numbers


@attrs.frozen(eq=False)
class Record:
    """Operations in order, and the storages that they use."""

    operations: list[Operation] = attrs.field(factory=list)
    writers: list[list[int]] = attrs.field(factory=list)  # storage -> indices of operations that write to it, in order
    sizes: list[int] = attrs.field(factory=list)  # storage -> bytes
    devices: list[torch.device] = attrs.field(factory=list)  # storage -> its device
    drawn_on: set[torch.device] = attrs.field(factory=set)

    def add_storage(self, num_bytes: int, device: torch.device) -> int:
        """Add a storage, which holds zeros until it is written to, and return its number."""
        self.writers.append([])
        self.sizes.append(num_bytes)
        self.devices.append(device)
        return len(self.sizes) - 1

    def add(self, operation: Operation) -> None:
        """Append an operation."""
        for storage in operation.writes:
            self.writers[storage].append(len(self.operations))
        self.operations.append(operation)

    def replay(self, windows: Iterable[Window], key: Tensor) -> list[Tensor]:
        """Return the final value of each window in new memory; intermediate storages are freed after their last use.

        Torch's generators keep their states. Raises what the operations raise.
        """
        windows = list(windows)
        kept = {w.storage for w in windows}
        chosen, blank = self._find_needed(kept)
        last = {s: i for i in chosen for s in self.operations[i].reads | self.operations[i].writes}
        storages: dict[int, torch.UntypedStorage] = {}

        def real(x: Any) -> Any:
            if not isinstance(x, Window):
                return x
            if x.storage not in storages:
                create = torch.zeros if x.storage in blank else torch.empty
                size, device = self.sizes[x.storage], self.devices[x.storage]
                storages[x.storage] = create(size, dtype=torch.uint8, device=device).untyped_storage()
            return x.over(storages[x.storage])

        with random.scope(self.drawn_on), torch.no_grad():
            for i in chosen:
                op = self.operations[i]
                if op.draw is not None:
                    random.reseed(random.seed(key, "draw", op.draw), self.drawn_on)
                args, kwargs = tree.map(real, (op.args, op.kwargs))
                results = tree.leaves(op.run(*args, **kwargs))
                storages.update((w.storage, _as_recorded(results[index], w)) for index, w in op.created.items())
                del args, kwargs, results
                for storage in op.reads | op.writes:
                    if last[storage] == i and storage not in kept:
                        storages.pop(storage, None)
            return [real(w) for w in windows]

    def _find_needed(self, storages: Iterable[int]) -> tuple[list[int], set[int]]:
        """Return the operations that final values depend on, in order, and storages that are read before written."""
        chosen: set[int] = set()
        blank: set[int] = set()
        todo = [(s, len(self.operations)) for s in storages]
        while todo:
            storage, before = todo.pop()
            place = bisect.bisect_left(self.writers[storage], before)
            if place == 0:
                blank.add(storage)
            elif (i := self.writers[storage][place - 1]) not in chosen:
                chosen.add(i)
                todo += [(read, i) for read in self.operations[i].reads]
        return sorted(chosen), blank


def _as_recorded(x: Tensor, window: Window) -> torch.UntypedStorage:
    """Return a storage of `x` in the recorded layout: a kernel may choose other strides than its shape function."""
    if (x.stride(), x.storage_offset()) != (window.stride, window.offset):
        copy = torch.empty_strided(window.shape, window.stride, dtype=x.dtype, device=x.device)
        if window.offset:
            whole = torch.empty(
                copy.untyped_storage().nbytes() // x.itemsize + window.offset, dtype=x.dtype, device=x.device
            )
            copy = whole.as_strided(window.shape, window.stride, window.offset)
        x = copy.copy_(x)
    return x.untyped_storage()


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
    recorded = _recorded(build, key)
    return None if recorded is None else (recorded[1].record, recorded[2])


def record_module(build: Callable[[], nn.Module], key: Tensor) -> nn.Module | None:
    """Return the module of `build()` with its parameters on `meta`, and all other tensors that it holds replayed.

    None where it cannot be recorded; see `record`.
    """
    recorded = _recorded(build, key)
    if recorded is None:
        return None
    module, recorder, _ = recorded
    places = [
        (table, name, x)
        for part in module.modules()
        for table in (part._buffers, vars(part))
        for name, x in table.items()
        if isinstance(x, Tensor) and recorder.number(x) is not None
    ]
    windows = {id(x): recorder.window(x) for _, _, x in places}
    values = dict(zip(windows, recorder.record.replay(windows.values(), key), strict=True))
    for table, name, x in places:
        table[name] = values[id(x)]
    return module


def _recorded(
    build: Callable[[], nn.Module], key: Tensor
) -> tuple[nn.Module, _Recorder, dict[str, Window | Tensor]] | None:
    recorder = _Recorder(key, torch.get_default_device())
    if recorder.home.type == "meta":
        return None
    with random.seeded(key):
        recorder.seed, before = torch.initial_seed(), torch.get_rng_state()
        try:
            with recorder, _Disguise(recorder):
                module = build()
                named = dict(module.named_parameters())
            params = {name: recorder.parameter(p) for name, p in named.items()}
        except Exception:  # the caller then builds it for real, which succeeds or raises a better error
            return None
        if recorder.failed or not torch.equal(torch.get_rng_state(), before):
            return None
    return module, recorder, params


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
        written, signature = _find_written(func, args, kwargs), _signature(func)
        if signature.draws:
            self.check_generators(flat)
        elif tensors and len(outside) == len(tensors) and (written or signature.views or signature.returns_values):
            return func(*args, **kwargs)  # all of its tensors existed before: it runs now, and is not recorded
        if any(x.is_meta for x in outside):
            raise _Unrecordable("a tensor on meta from outside")
        if signature.returns_values:
            return self._read_values(func, flat, build)
        numbers = [n for x in written if (n := self.number(x)) is not None]
        if len(numbers) < len(written):
            raise _Unrecordable("writes to a tensor from outside")
        sizes = [x.untyped_storage().nbytes() for x in written]
        twins = {id(x): torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META) for x in outside}
        meta_args, meta_kwargs = build([_META if isinstance(x, torch.device) else twins.get(id(x), x) for x in flat])
        if signature.takes_device:
            meta_kwargs.pop("pin_memory", None)
            if not tensors:
                meta_kwargs["device"] = _META
        out = func(*meta_args, **meta_kwargs)
        if [self.number(x) for x in written] != numbers or [x.untyped_storage().nbytes() for x in written] != sizes:
            raise _Unrecordable("replaces or resizes a storage")
        storages = {x.untyped_storage()._cdata for x in twins.values()}
        if any(isinstance(x, Tensor) and x.untyped_storage()._cdata in storages for x in tree.leaves(out)):
            raise _Unrecordable("a view of a tensor from outside")
        by_size = sorted(tensors, key=lambda x: x.dim() == 0)  # 0-d ones, which may be on the CPU, last
        device = next((self.device(x) or x.device for x in by_size), self.home)
        created = self._add_created(
            out, next((_replace_meta(x, device) for x in flat if isinstance(x, torch.device)), device)
        )
        writes = frozenset([*numbers, *(w.storage for w in created.values())])
        if writes and func.overloadpacket not in _BLANK:
            args, kwargs = build([self._to_window(_replace_meta(x, device)) for x in flat])
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

    def _add_created(self, out: Any, device: torch.device) -> dict[int, Window]:
        """Add the new storages to the record, and return the windows onto them by the index of the result."""
        created = {}
        for index, x in enumerate(tree.leaves(out)):
            if isinstance(x, Tensor) and self.number(x) is None:
                storage = x.untyped_storage()
                self.numbers[storage._cdata] = self.record.add_storage(storage.nbytes(), device)
                self.alive.append(storage)
                created[index] = self.window(x)
        return created

    def _to_window(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().clone() if self.number(x) is None else self.window(x)
        return x


class _Disguise(TorchFunctionMode):
    """Report the device that recorded tensors would have: code that sees `meta` may skip their initialization."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        names = (x for x in (*args, *(kwargs or {}).values()) if isinstance(x, str | torch.device))
        if func is not torch.device and "meta" in map(str, names):  # transformers names the device to compare with it
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


def _find_written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    signature = _signature(func)
    if not signature.written_names:
        return []
    by_position = [x for x, w in zip(args, signature.writes, strict=False) if w]
    by_name = [x for name, x in kwargs.items() if name in signature.written_names]
    return [x for x in tree.leaves((by_position, by_name)) if isinstance(x, Tensor)]


def _replace_meta(x: Any, device: torch.device) -> Any:
    """Return `device` in place of `meta`, other arguments as they are."""
    return device if isinstance(x, torch.device) and x == _META else x
