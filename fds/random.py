"""Explicit randomness: keys, keys folded from others, and scopes in which torch's generators are seeded from them.

A key is a `(2,) int64` tensor on the CPU. `fold_in` derives another key from it and any integers or names; `seed`
returns the integer seed for a generator. Nothing else in fds seeds a generator.

The default generators of torch, Python and NumPy are shared by all threads of the process, so only one scope is active
at a time: if two threads step, evaluate, initialize or load data, one waits until the other has left its scope. The
threads of a simulation take turns, so a simulation as a whole is one scope. A thread that draws from a default
generator outside of fds while a step runs still disturbs it: give it a `torch.Generator` of its own.

A loss, or a rank of `fds.simulate`, must not wait for another thread that enters a scope, unless that thread runs in a
copy of its context (`contextvars.copy_context`). Otherwise the two wait for each other; the thread that waits for the
scope raises an `FdsError` once the process has been idle for `PATIENCE_S` seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random as python_random
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Protocol

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # private: no public function leaves all modes

from fds.errors import FdsError, is_a, is_int

PATIENCE_S = 120.0  # how long a scope waits for another one while the process is idle

Words = tuple[int, int]  # a key as numbers on the host: folding many of them makes no tensors


class Calls(int):
    """A number of calls, in a run whose seeds are traced."""


class TracedWords(tuple[int, int]):
    """The words of a key, of which `fold` says how they follow from a state's key; None for that key itself."""

    fold: Fold | None = None


class TracedSeed(int):
    """A seed, of which `fold` says how it follows from a state's key."""

    fold: Fold


@attrs.frozen
class Fold:
    """How a key follows from a state's key and its number of calls, for which None stands among the data."""

    parent: Fold | None
    data: tuple[int | str | None, ...]

    def words(self, base: Words, calls: int, cache: dict[int, Words]) -> Words:
        """Return the words that follow from a key's; `cache` remembers those of other folds, by id."""
        if id(self) not in cache:
            key = base if self.parent is None else self.parent.words(base, calls, cache)
            cache[id(self)] = folded(key, *(calls if x is None else x for x in self.data))
        return cache[id(self)]

    def seed(self, base: Words, calls: int, cache: dict[int, Words]) -> int:
        """Return the seed that follows from a key's words, as `random.seed` of it is."""
        return (self.words(base, calls, cache)[0] & _WORD) >> 1

    def __str__(self) -> str:
        data = ", ".join("calls" if x is None else repr(x) for x in self.data)
        return data if self.parent is None else f"{self.parent}, {data}"


_WORD = 2**64 - 1


class Seeding(Protocol):
    """What is done in the place of seeding the default generators: see `seeding_by`."""

    def reseed(self, seed: int, devices: Iterable[torch.device]) -> None:
        """Have what is drawn from here on follow from a seed."""
        ...

    def scope(self, devices: Iterable[torch.device]) -> contextlib.AbstractContextManager[None]:
        """Return a scope that what is seeded inside is confined to."""
        ...


_lock = threading.Lock()  # held while a scope uses the generators of the process
_holds: ContextVar[bool] = ContextVar("fds_generators", default=False)  # whether this context holds the lock
_instead: Seeding | None = None  # of all threads: a backward on a GPU, and what it computes again, runs in another one


def key(seed: int | Tensor) -> Tensor:
    """Return the key `(2,) int64` for an integer seed; a key is returned as it is.

    Raises `FdsError` for anything else.
    """
    if isinstance(seed, Tensor):
        if seed.shape != (2,) or seed.dtype != torch.int64:
            raise FdsError("not a random key", got=f"{tuple(seed.shape)} {seed.dtype}", want="(2,) torch.int64")
        return seed.to("cpu", copy=True)
    if not is_int(seed):
        raise FdsError("not a random seed", got=repr(seed), want="an int or a key")
    return fold_in(torch.zeros(2, dtype=torch.int64, device="cpu"), seed)


def fold_in(key: Tensor, *data: int | str) -> Tensor:
    """Derive a key from a key and any integers or names. Distinct data give independent keys.

    BLAKE2b over the key and the tagged data (RFC 7693): stateless, the same on every machine and version.

    >>> k = fold_in(key(0), 3, "dropout")
    >>> bool((k == fold_in(key(0), 3, "dropout")).all())
    True
    """
    return as_key(folded(words(key), *data))


def folded(key: Words, *data: int | str) -> Words:
    """Return what `fold_in` does, of words."""
    numbers = struct.unpack("<qq", _digest(key, data))
    if type(key) is not TracedWords:
        return numbers
    traced = TracedWords(numbers)
    traced.fold = _fold(key, data)
    return traced


def words(key: Tensor) -> Words:
    """Return the words of a key."""
    return tuple(key.tolist())


def as_key(words: Words) -> Tensor:
    """Return the key of these words, `(2,) int64`."""
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def seed(key: Tensor | Words, *data: int | str) -> int:
    """Return the 63-bit seed of `fold_in(key, *data)`, for a generator."""
    number = int.from_bytes(_digest(key if isinstance(key, tuple) else words(key), data)[:8], "little") >> 1
    if type(key) is not TracedWords:
        return number
    traced = TracedSeed(number)
    traced.fold = _fold(key, data)
    return traced


def of_call(key: Tensor, calls: Tensor) -> tuple[Words, int]:
    """Return a state's key and calls on the host, from which all seeds of a call follow; traced in `seeding_by`."""
    return (words(key), int(calls)) if _other() is None else (TracedWords(words(key)), Calls(calls))


def generator(key: Tensor, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator on `device` seeded by the key."""
    return torch.Generator(device).manual_seed(seed(key))


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Hold the generators of the process: other threads wait here, unless they run in a copy of this context.

    Raises `FdsError` for a deadlock.
    """
    if _is_held_here():
        yield
        return
    lock = _lock
    if lock.locked():
        _wait_for(lock)
    with lock:
        token = _holds.set(True)
        try:
            yield
        finally:
            _holds.reset(token)


def _wait_for(lock: threading.Lock) -> None:
    """Wait until a lock is free. Raises `FdsError` if the process is idle: the holder seems to wait for this thread."""
    worked = time.process_time()
    while not lock.acquire(timeout=PATIENCE_S):
        before, worked = worked, time.process_time()
        if worked - before < PATIENCE_S / 100:
            raise FdsError(
                "a step, an evaluation, init or a loader waits for another thread, which is idle",
                got=f"torch's default generators in use by that thread, and an idle process for {PATIENCE_S:g} s",
                want="threads that step without waiting for each other",
                hint="if a loss, or a rank of fds.simulate, waits for a thread that steps: start that "
                "thread in a copy of the context, Thread(target=contextvars.copy_context().run, args=(f,))",
            )
    lock.release()


@contextlib.contextmanager
def seeding_by(other: Seeding) -> Iterator[None]:
    """Have another seed the generators inside, in every scope of the process, given seeds that are traced."""
    global _instead
    with exclusive():
        _instead = other
        try:
            yield
        finally:
            _instead = None


@contextlib.contextmanager
def scope(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the default generators of the CPU and of `devices` on leaving; other threads' scopes wait until then."""
    if (other := _other()) is not None:
        with other.scope(devices):
            yield
        return
    with exclusive():
        states = [(g, g.get_state()) for g in default_generators(devices)]
        try:
            yield
        finally:
            for g, state in states:
                g.set_state(state)


@attrs.frozen(eq=False)
class Snapshot:
    """What the default generators of the CPU and of some devices would draw next."""

    states: tuple[tuple[torch.Generator, Tensor], ...]

    @classmethod
    def taken(cls, devices: Iterable[torch.device]) -> Snapshot:
        """Return it as it is now."""
        return cls(tuple((g, g.get_state()) for g in default_generators(devices)))

    @property
    def has_moved(self) -> bool:
        """Whether something was drawn since."""
        with _disable_current_modes():  # of a graph that is made of the step this would become a part
            return not all(torch.equal(g.get_state(), state) for g, state in self.states)

    def checked(self, where: str) -> Snapshot:
        """Return it. Raises `FdsError` where a graph is made of the step, which would not draw the same again."""
        if _other() is not None:
            raise FdsError(
                "numbers are drawn that are to be drawn again, which a graph of the step would not",
                where=where,
                want="a step without fds.cuda_graph and fds.compile(whole=True)",
            )
        return self

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same inside once more, and go on after it as if nothing had been drawn."""
        before = [(g, g.get_state()) for g, _ in self.states]
        for g, state in self.states:
            g.set_state(state)
        try:
            yield
        finally:
            for g, state in before:
                g.set_state(state)


def in_use() -> list[torch.device]:
    """Return the devices on which a function may draw: all GPUs if CUDA is initialized, else the default device."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return [torch.get_default_device()]
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


@contextlib.contextmanager
def seeded(key: Tensor | Words, *data: int | str, devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Seed the default generators of `devices` from `fold_in(key, *data)` inside, and restore them on leaving.

    The default is `in_use()`.
    """
    devices = in_use() if devices is None else list(devices)
    with scope(devices):
        reseed(seed(key, *data), devices)
        yield


@contextlib.contextmanager
def stream(name: str, *data: int | str, devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Draw from a stream of its own inside, and go on with the default generators' after it.

    In a loss it follows from the key of the call, of the microbatch and of the layer, as all draws do: it is a fold of
    what the CPU's default generator draws next, with the name and `data`. So two uses of one name draw other numbers,
    and what is computed again in backward the same. `data` tells apart what must differ, such as ranks:
    `with fds.random.stream("noise", mesh["tp"].index)`; without, ranks that compute one loss draw alike.

    Args:
        name: of the stream.
        data: further integers and names.
        devices: whose default generators are seeded beside the CPU's; the default is `in_use()`.

    Raises `FdsError` for other data, and where a graph is made of the step, in which the key would stay what it is.
    """
    if not is_a(name, str):
        raise FdsError("a stream has a name", where="fds.random.stream", got=repr(name)[:80], want="a str")
    if devices is not None:
        devices = _devices(devices)
    if _other() is not None:
        raise FdsError(
            "a stream follows from a number on the host, which a graph of the step would keep for good",
            where=f"fds.random.stream({name!r})",
            want="a step without fds.cuda_graph and fds.compile(whole=True)",
        )
    _digest((0, 0), data)  # raises for data that is nothing to fold, before anything is drawn
    drawn = int(torch.randint(2**62, (), device="cpu"))
    with seeded((drawn, 0), "stream", name, *data, devices=devices):
        yield


@contextlib.contextmanager
def python_seeded(key: Tensor) -> Iterator[None]:
    """Seed the global generators of Python and NumPy from the key, and restore them on leaving."""
    with exclusive():
        python, numpy = python_random.getstate(), np.random.get_state()
        try:
            reseed_python(seed(key, "python"))
            yield
        finally:
            python_random.setstate(python)
            np.random.set_state(numpy)


def draws(function: object) -> bool:
    """Say whether a function may draw random numbers: True unless it has an attribute `draws` that is False."""
    return getattr(function, "draws", True)


def reseed(seed: int, devices: Iterable[torch.device]) -> None:
    """Seed the default generators of the CPU and of `devices`; call it inside a `scope`.

    `Generator.manual_seed` costs 1.4 us on the CPU, `torch.manual_seed` 157 us.
    """
    if (other := _other()) is not None:
        return other.reseed(seed, devices)
    for g in default_generators(devices):
        g.manual_seed(seed)
    return None


def reseed_python(seed: int) -> None:
    """Seed the global generators of Python and NumPy; call it inside a `python_seeded`."""
    python_random.seed(seed)
    np.random.seed(seed % 2**32)


def _is_held_here() -> bool:
    """Return whether the lock is held by this context, or by the thread that waits for the backward in this one."""
    return _holds.get() or torch._C._current_graph_task_id() != -1  # private; torch has no public function for it


def _other() -> Seeding | None:
    """Return what seeds generators here in the place of this module."""
    return _instead if _instead is not None and _is_held_here() else None


def _renew() -> None:
    """Replace the lock in the child of a fork, where the thread that held it does not exist."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def default_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return torch's default generators of the CPU and of `devices`, in this order."""
    generators = [torch.default_generator]
    for device in devices:
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
    return generators


def _devices(devices: object) -> list[torch.device]:
    listed = list(devices) if isinstance(devices, Iterable) else [devices]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if all(is_a(device, torch.device) for device in listed):
        return listed  # pyright: ignore[reportReturnType]
    want = '[torch.device("cuda:0")], or None'
    raise FdsError("these are no devices", where="devices", got=repr(devices)[:80], want=want)  # pyright: ignore[reportUnknownArgumentType]


def _fold(key: TracedWords, data: tuple[int | str, ...]) -> Fold:
    return Fold(key.fold, tuple(None if type(x) is Calls else x for x in data))


def _digest(words: Words, data: tuple[int | str, ...]) -> bytes:
    if len(words) != 2:
        raise FdsError("not a random key", got=f"{len(words)} words", want="(2,) torch.int64, from fds.random.key")
    h = hashlib.blake2b(struct.pack("<qq", *words), digest_size=16)
    for d in data:
        if isinstance(d, str):
            text = d.encode()
            h.update(b"s" + struct.pack("<q", len(text)) + text)
        elif isinstance(d, int) and abs(d) < 2**71 - 1:
            h.update(b"i" + int(d).to_bytes(9, "little", signed=True))
        else:
            raise FdsError("a key cannot be folded with this", got=repr(d)[:60], want="an int of 71 bits, or a str")
    return h.digest()
