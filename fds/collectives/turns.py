"""Threads that take turns: one runs at a time, until it waits for something or ends."""

from __future__ import annotations

import contextvars
import random as python_random
import sys
import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from torch.utils import _python_dispatch

from fds.errors import FdsError, RankError, is_int

# Private: torch has no public way to them. Each block restores on leaving what it found, so that of two threads which
# enter one after the other, and leave in the same order, the second sets what the first had set: for ever.
_flags: Any = _python_dispatch
_core: Any = torch._C


@attrs.frozen
class ProcessFlags:
    """What blocks of a thread set for its own code, which torch keeps in flags of the process."""

    active: bool  # whether a mode is active
    others: bool  # one that is not torch's own
    uncompiled: bool  # one that keeps torch.compile out
    lifted: bool  # that of fake tensors, where `torch.tensor` makes its values on the CPU first
    stance: Any  # of torch.compile, such as "force_eager"; None for the default

    @classmethod
    def now(cls) -> ProcessFlags:
        """Return the present flags."""
        return cls(
            _flags._is_in_torch_dispatch_mode,
            _flags._is_in_non_infra_torch_dispatch_mode,
            _flags._is_in_any_mode_without_ignore_compile_internals,
            _core._only_lift_cpu_tensors(),
            None if (it := _compiler()) is None or it._stance == it.DynamoStance() else it._stance,
        )

    def restore(self) -> None:
        """Set the flags to these."""
        _flags._is_in_torch_dispatch_mode = self.active
        _flags._is_in_non_infra_torch_dispatch_mode = self.others
        _flags._is_in_any_mode_without_ignore_compile_internals = self.uncompiled
        _flags.set_is_in_mode_without_ignore_compile_internals(self.uncompiled)
        _core._set_only_lift_cpu_tensors(self.lifted)
        if (compiler := _compiler()) is not None:
            compiler._stance = self.stance or compiler.DynamoStance()


def _compiler() -> Any:
    """Return the module of torch.compile that has the stance; None where nothing has loaded it, which takes 1 s."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module if hasattr(module, "_stance") else None


class Stopped(BaseException):
    """End a rank's thread because the simulation is over; not an error of the rank."""


@attrs.frozen(eq=False)
class Generators:
    """The states of the global generators: torch's of the CPU and of each GPU in use, Python's and NumPy's."""

    torch: Any
    gpus: tuple[Any, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        """Return the current states."""
        gpus = tuple(g.get_state() for g in _of_gpus())
        return cls(torch.default_generator.get_state(), gpus, python_random.getstate(), np.random.get_state())

    def restore(self, present: Generators | None = None) -> None:
        """Set the generators to these states.

        Those whose states are known to be `present` stay as they are where that is the same: comparing NumPy's takes
        2 us, setting it 20.
        """
        torch.default_generator.set_state(self.torch)
        for generator, state in zip(_of_gpus(), self.gpus, strict=False):  # a rank may be the first to use GPUs
            generator.set_state(state)
        if present is None or present.python != self.python:
            python_random.setstate(self.python)
        if present is None or not _is_same(present.numpy, self.numpy):
            np.random.set_state(self.numpy)


def _of_gpus() -> tuple[torch.Generator, ...]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()


def _is_same(a: tuple, b: tuple) -> bool:
    """Say whether two states of NumPy's generator are the same: an algorithm, its numbers, and three numbers more."""
    return (a[0], *a[2:]) == (b[0], *b[2:]) and np.array_equal(a[1], b[1])


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@attrs.define(eq=False)
class Seat:
    """One rank's thread."""

    thread: threading.Thread
    turn: threading.Lock = attrs.field(factory=_taken)  # the rank takes it, and another one releases it
    ready: Callable[[], bool] | None = None  # whether it can go on; None if it does not wait
    waiting: Callable[[], str] | None = None  # a description of what it waits for
    ended: bool = False
    result: Any = None


class Turns:
    """Run one function per rank, in threads that take turns in rank order."""

    def __init__(self, bodies: list[Callable[[], Any]]):
        self.seats = [
            Seat(
                threading.Thread(
                    target=self._run,
                    args=(rank, contextvars.copy_context(), body),
                    name=f"fds rank {rank}",
                    daemon=True,
                )
            )
            for rank, body in enumerate(bodies)
        ]
        self.error: BaseException | None = None
        self.stopped = False
        self.over = threading.Event()
        self.grad_mode = torch.is_grad_enabled()
        self.present = Generators.now()  # the states when the last rank stopped
        self.random = [self.present] * len(bodies)
        self.flags = [ProcessFlags.now()] * len(bodies)

    def run(self) -> list[Any]:
        """Return the results. Raises the first error of a rank, or `RankError` if no rank can run."""
        mine, flags = Generators.now(), ProcessFlags.now()
        for seat in self.seats:
            seat.thread.start()
        try:
            self.seats[0].turn.release()
            while not self.over.wait(timeout=0.5):
                pass  # polls, so Ctrl-C is handled whichever thread the signal is delivered to
            for seat in self.seats:
                seat.thread.join()
        except BaseException:  # Ctrl-C; the running rank stops at its next collective
            self.stopped = True
            self.over.wait(timeout=1.0)
            raise
        finally:
            mine.restore()
            flags.restore()
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        results = [seat.result for seat in self.seats]
        self.seats.clear()  # breaks the cycle with axes among the results
        return results

    def wait(self, rank: int, ready: Callable[[], bool], waiting: Callable[[], str]) -> None:
        """Let other ranks run until `ready()`; `waiting()` describes what for, in the error of a deadlock."""
        seat = self.seats[rank]
        if threading.current_thread() is not seat.thread:
            raise RankError(
                "a collective of a simulated rank was awaited on another thread",
                where=f"rank {rank}",
                got=threading.current_thread().name,
                want=seat.thread.name,
                hint="make the mesh inside the function that is simulated",
            )
        if self.stopped:
            raise Stopped
        if ready():
            return
        seat.ready, seat.waiting = ready, waiting
        self._end_turn(rank)
        self._take_turn(rank)
        seat.ready = seat.waiting = None

    def _run(self, rank: int, context: contextvars.Context, body: Callable[[], Any]) -> None:
        seat = self.seats[rank]
        torch.set_grad_enabled(self.grad_mode)
        torch.autograd.set_multithreading_enabled(False)  # else torch runs backward on a GPU in a thread of its own
        try:
            self._take_turn(rank)
            seat.result = context.run(body)
        except Stopped:
            pass
        except BaseException as error:
            if self.error is None and not self.stopped:
                error.add_note(f"in rank {rank} of {len(self.seats)}, simulated")
                self.error = error
            self.stopped = True
        finally:
            seat.ended = True
            self._end_turn(rank)

    def _take_turn(self, rank: int) -> None:
        self.seats[rank].turn.acquire()
        if self.stopped:
            raise Stopped
        self.random[rank].restore(self.present)
        self.flags[rank].restore()

    def _end_turn(self, rank: int) -> None:
        """Let the next rank run that is able to."""
        self.random[rank] = self.present = Generators.now()
        self.flags[rank] = ProcessFlags.now()
        order = [(rank + i) % len(self.seats) for i in range(1, len(self.seats) + 1)]
        alive = [r for r in order if not self.seats[r].ended]
        if not alive:
            self.over.set()
            return
        able = [r for r in alive if self.stopped or (ready := self.seats[r].ready) is None or ready()]
        if not able:
            self.error, self.stopped, able = self._deadlock(), True, alive
        self.seats[able[0]].turn.release()

    def _deadlock(self) -> RankError:
        describe = lambda seat: "has ended" if seat.waiting is None else f"waits in {seat.waiting()}"
        lines = [f"rank {rank} {describe(seat)}" for rank, seat in enumerate(self.seats)]
        return RankError(
            "no rank can run: each waits for another, or has ended",
            got="\n".join(lines),
            want="every rank of an axis to start the same collectives, in the same order",
        )


def check_size(world_size: int) -> None:
    """Raise `FdsError` unless this is a number of ranks."""
    if not is_int(world_size, 1):
        raise FdsError("not a number of ranks", where="world_size", got=repr(world_size), want="an int, 1 or more")
