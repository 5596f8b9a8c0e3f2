"""Count what operators do while a step runs: a dispatch mode, which changes nothing of what they compute."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)

from fds.collectives.memory import performing
from fds.loss.modes import current as mode_of_loss
from fds.profiling.formulas import formula, unmasked
from fds.profiling.modules import Modules

Phase = Literal["forward", "recomputation", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "recomputation", "backward", "update")

_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_saving: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
UNINITIALISED = frozenset(f"aten.{name}" for name in _EMPTY)  # what they return has anything in it
_MOVES_NOTHING = UNINITIALISED | {"aten._unsafe_view", "aten.lift_fresh"}


@attrs.define
class Work:
    """What operators did.

    Attributes:
        calls: how many operators ran.
        flops: floating-point operations of products of matrices, convolutions and attention, of which every pair of a
            query and a key counts.
        unmasked_flops: the same without pairs that a causal mask hides.
        elements: of the other operators, the elements of the largest argument or result of each, or of lists of them.
        num_bytes: what operators read and wrote: every tensor that is an argument or a result, once a call; views are
            free.
        seconds: the time in operators, each measured by itself; on a GPU between two events, so with what the host took
            to launch it.
    """

    calls: int = 0
    flops: int = 0
    unmasked_flops: int = 0
    elements: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def macs(self) -> int:
        """Multiplications with an addition each: half of the flops."""
        return self.flops // 2

    def add(self, other: Work) -> None:
        """Add what others did."""
        self.calls += other.calls
        self.flops += other.flops
        self.unmasked_flops += other.unmasked_flops
        self.elements += other.elements
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds


@attrs.frozen
class Place:
    """Where an operator ran: in which module (empty: outside of all), in which phase of a step, and which it was."""

    module: str
    phase: Phase
    operator: str


class Watching(TorchDispatchMode):
    """See every operator of a thread, and of autograd's threads that work for it, with the module and phase it is in.

    Other threads, as other simulated ranks are, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules = Modules(lambda: self in _get_current_dispatch_mode_stack())

    def place(self) -> tuple[str, Phase]:
        """Return the module and the phase of what runs now."""
        # a loss runs, and is run again, inside of a module or a layer, or where torch saves what it needs of it
        inside = self.modules.running or mode_of_loss().busy is not None or _saving(True) is not None
        if _graph_task() == -1:
            return self.modules.current, "forward" if inside else "update"
        return (self.modules.current, "recomputation") if inside else (self.modules.reversed(), "backward")


class Counting(Watching):
    """Count every operator, by module, phase and name; see `counting`.

    Attributes:
        done: place -> what was done there.
        modules: those that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: dict[Place, Work] = {}
        self.events: list[tuple[Work, Any, Any]] = []  # whose time is known when the device has come so far

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or its parts where torch knows it by those alone, and count it."""
        kwargs = kwargs or {}
        if performing.get():
            return func(*args, **kwargs)
        if {*types} - {Tensor, Parameter}:  # such as a parameter gathered on use, which asks again with its values
            return NotImplemented
        packet = getattr(func, "_overloadpacket", None)
        if packet is None:  # an operator of higher order, such as cond, whose parts count
            return NotImplemented
        count = formula(packet)
        if count is None and func is not torch.ops.prim.device.default:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        work = self.done.setdefault(Place(*self.place(), str(packet)), Work())
        out = self._timed(work, func, args, kwargs)
        given, made = list(tensors_of((args, kwargs))), list(tensors_of(out))
        work.calls += 1
        if count is not None:
            flops = count(*args, **kwargs, out_val=out)
            left, of = unmasked(func, args, kwargs)
            work.flops += flops
            work.unmasked_flops += flops * left // of
        if not func.is_view and str(packet) not in _MOVES_NOTHING:
            work.num_bytes += sum(x.nbytes for x in {id(x): x for x in given + made}.values())
            if count is None:
                results = out if isinstance(out, tuple) else (out,)
                work.elements += max(map(_numel, (*args, *kwargs.values(), *results)), default=0)
        return out

    def _timed(self, work: Work, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.cuda.is_initialized() and any(x.is_cuda for x in tensors_of((args, kwargs))):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = func(*args, **kwargs)
            end.record()
            self.events.append((work, start, end))
            return out
        start = time.perf_counter()
        out = func(*args, **kwargs)
        work.seconds += time.perf_counter() - start
        return out


@contextlib.contextmanager
def counting() -> Iterator[Counting]:
    """Count what runs inside; times on a GPU are known afterwards."""
    counted = Counting()
    with counted.modules, counted:
        yield counted
    if counted.events:
        torch.cuda.synchronize()
    for work, start, end in counted.events:
        work.seconds += start.elapsed_time(end) / 1000


def tensors_of(x: Any) -> Iterator[Tensor]:
    """Yield the tensors in what an operator is given, or returns: lists, tuples and keywords of them."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple | dict):
        for one in x.values() if isinstance(x, dict) else x:
            yield from tensors_of(one)


def _numel(x: Any) -> int:
    """Return the elements of an argument or a result: a tensor, or a list of them."""
    return sum(one.numel() for one in tensors_of(x))


def inclusive(done: dict[Place, Work], names: list[str]) -> dict[str, dict[Phase, Work]]:
    """Return module -> phase -> what was done in it and in the modules inside of it; "" is everything."""
    found: dict[str, dict[Phase, Work]] = {name: {phase: Work() for phase in PHASES} for name in ["", *names]}
    for place, work in done.items():
        words = place.module.split(".") if place.module else []
        for n in range(len(words) + 1):
            name = ".".join(words[:n])
            if name in found:
                found[name][place.phase].add(work)
    return found
