"""What is timed in `benchmarks/storage.py`, and around what the clock stops."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sharding_contenders import AGAIN, Case
from benchmarks.storage_contenders import (
    PAGE,
    Dcp,
    DcpKept,
    Fds,
    Manner,
    Raw,
    Running,
    Setting,
    TorchSave,
    Way,
    rank,
    sync,
)

SMALL = Case("small", width=128, layers=2, rows=4, context=64)  # whose step is timed beside a save: some ms
STEPS = 20  # in one timing
MOST_SAVES = 200  # in one timing

LIBC = ctypes.CDLL(None)

Call = Callable[[], float]

# each returns a call that does it once and returns the seconds of this rank; ranks start together


def saving(way: Way, folder: Path) -> Call:
    """Save until every byte and name is on the disk."""
    prove(way, way.save, folder)

    def call() -> float:
        with fresh(folder):
            start = together()
            way.save(folder)
            return time.perf_counter() - start

    return call


def loading(way: Way, folder: Path, *, cold: bool) -> Call:
    """Load into fresh memory: what was freed before went back to the kernel. Cold: no page of a file is cached."""
    folder.mkdir(exist_ok=True)
    together()
    way.save(folder)
    assert same(way.load(folder), way.held())

    def call() -> float:
        give_back()
        together()
        if cold and rank() == 0:
            evict(folder)
        start = together()
        loaded = way.load(folder)
        seconds = time.perf_counter() - start
        del loaded
        return seconds

    return call


def stalling(way: Fds | Dcp, folder: Path) -> Call:
    """Start a save in the background: the time until the step may go on. Its end is awaited outside the clock."""
    prove(way, lambda folder: way.save_async(folder).wait(), folder)

    def call() -> float:
        with fresh(folder):
            start = together()
            running = way.save_async(folder)
            seconds = time.perf_counter() - start
            running.wait()
            return seconds

    return call


def stepping(way: Fds, folder: Path) -> Call:
    """Make steps; the mean of them."""

    def call() -> float:
        start = together()
        for _ in range(STEPS):
            way.move_on()
        return (time.perf_counter() - start) / STEPS

    return call


def stepping_beside(way: Fds | Dcp, folder: Path) -> Call:
    """Make as many steps of a small model while the large state is saved, again and again. The mean of those that
    began and ended while a save ran."""
    stepper = small(Setting(SMALL, 1))

    def call() -> float:
        took: list[float] = []
        for _ in range(MOST_SAVES):
            with fresh(folder):
                running = way.save_async(folder)
                took += steps_during(running, stepper, STEPS - len(took))
                running.wait()
            if len(took) == STEPS:
                return sum(took) / STEPS
        raise AssertionError(f"beside {MOST_SAVES} saves were {len(took)} steps: the state is too small")

    return call


def steps_during(running: Running, stepper: Fds, most: int) -> list[float]:
    """Return the seconds of steps, as long as the save runs."""
    took = []
    while len(took) < most:
        start = time.perf_counter()
        stepper.move_on()
        seconds = time.perf_counter() - start
        if running.done():
            break
        took.append(seconds)
    return took


def small(setting: Setting) -> Fds:
    """Return a small model's state and step."""
    return Fds(attrs.evolve(setting, case=SMALL))


cold, warm = functools.partial(loading, cold=True), functools.partial(loading, cold=False)

CONTENDERS: dict[str, tuple[Callable[[Setting], Any], Callable[[Any, Path], Call]]] = {
    "fds.save": (Fds, saving),
    "dcp.save": (Dcp, saving),
    "torch.save": (TorchSave, saving),
    "raw writes": (Raw, saving),
    "fds.load, cold": (Fds, cold),
    "dcp.load, cold": (Dcp, cold),
    "torch.load, cold": (TorchSave, cold),
    "fds.load, warm": (Fds, warm),
    "dcp.load, warm": (Dcp, warm),
    "torch.load, warm": (TorchSave, warm),
    "fds stall": (Fds, stalling),
    "dcp stall": (Dcp, stalling),
    "dcp stall, stager kept": (DcpKept, stalling),
    "step": (small, stepping),
    "step beside fds.save_async": (Fds, stepping_beside),
    "step beside dcp.async_save": (Dcp, stepping_beside),
}


def compete(setting: Setting, names: Sequence[str], rounds: int, turn: int, room: str) -> dict[str, list[float]]:
    """Run on every rank: return the seconds of the slowest one, by contender and round, in turned order.

    A name that ends in AGAIN is made a second time. Nobody's garbage is collected while a clock runs.
    """
    torch.set_num_threads(1)
    torch.manual_seed(rank())
    made = {}
    for i, name in enumerate(names):
        way, call = CONTENDERS[name.removesuffix(AGAIN)]
        made[name] = call(way(setting), Path(room) / str(i))
        made[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.disable()
    for i in range(turn, turn + rounds):
        for name in reversed(made) if i % 2 else made:
            gc.collect()
            seconds[name].append(made[name]())
    return slowest(seconds)


def try_manners(setting: Setting, manners: Sequence[Manner], rounds: int, room: str) -> dict[Manner, list[float]]:
    """Run on every rank: return the seconds of raw writes in each of these manners."""
    raw = Raw(setting)
    call = saving(raw, Path(room) / "raw")
    seconds: dict[Manner, list[float]] = {manner: [] for manner in manners}
    for i in range(rounds):
        for manner in reversed(manners) if i % 2 else manners:
            raw.manner = manner
            seconds[manner].append(call())
    return slowest(seconds)


def slowest(seconds: Mapping[Any, list[float]]) -> dict[Any, list[float]]:
    """Return the times of the slowest rank."""
    times = torch.tensor(list(seconds.values()), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return dict(zip(seconds, times.tolist(), strict=True))


def prove(way: Way, save: Callable[[Path], Any], folder: Path) -> None:
    """Save, load and compare, once: nobody does less work."""
    with fresh(folder):
        together()
        save(folder)
        assert same(way.load(folder), way.held())


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Tell whether these are the same numbers."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@contextlib.contextmanager
def fresh(folder: Path):
    """Have an empty folder on the disk, and have it gone from there afterwards."""
    if rank() == 0:
        folder.mkdir()
        sync(folder.parent)
    together()
    yield
    together()
    if rank() == 0:
        shutil.rmtree(folder)
        sync(folder.parent)


def evict(folder: Path) -> None:
    """Have no page of these files cached. Raises `AssertionError` where some page still is: say, it is mapped."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert not cached_pages(path), f"{cached_pages(path)} pages of {path} are still cached"


def cached_pages(path: Path) -> int:
    """Return how many pages of a file are cached."""
    mapped = np.memmap(path, np.uint8, "r")
    cached = np.zeros(-(-mapped.nbytes // PAGE), np.uint8)
    place = ctypes.c_void_p(mapped.ctypes.data)
    assert LIBC.mincore(place, ctypes.c_size_t(mapped.nbytes), ctypes.c_void_p(cached.ctypes.data)) == 0
    return int((cached & 1).sum())


def give_back() -> None:
    """Return freed memory to the kernel, so that what comes next is fresh for everybody."""
    gc.collect()
    LIBC.malloc_trim(0)


def together() -> float:
    """Wait for all ranks, and return the time."""
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter()
