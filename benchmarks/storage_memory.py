"""What keeping a state takes beyond the state: resident memory as the kernel counts it, in fresh processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from benchmarks.storage_contenders import MIB, Dcp, Fds, Setting, TorchSave, Way
from benchmarks.storage_trials import give_back, together

BUCKET = 32 * MIB
SAVES = 5  # with steps beside them


@attrs.frozen
class Beyond:
    """Bytes of the rank that takes most."""

    beyond_bytes: int  # at the peak, above what was resident before; loading: without the state itself
    state_bytes: int  # of this rank
    helper_bytes: int  # at their peaks, of the processes that it has started and that are there still
    met: int  # of SAVES: how many still ran when a step had given up what they save


def of_saving(way: Way, folder: Path) -> tuple[int, int]:
    """Return what a save takes."""
    way.held()
    before = start()
    way.save(folder)
    return peak() - before, 0


def of_loading(way: Way, folder: Path) -> tuple[int, int]:
    """Return what a load takes but for what it returns. A process before this one saved."""
    before = start()
    loaded = way.load(folder)
    return peak() - before - sum(x.nbytes for x in loaded), 0


def of_steps(way: Fds, folder: Path) -> tuple[int, int]:
    """Return what donating steps and saves beside them take, above the peak of the same steps alone; and how many of
    the steps gave up a state that was still being saved when they ended."""
    for _ in range(2):
        way.move_on()
    start()
    for _ in range(2 * SAVES):
        way.move_on()
    alone = peak()
    start()
    met = 0
    for i in range(SAVES):
        running = way.save_async(folder / str(i))
        way.move_on()
        met += not running.done()
        way.move_on()
        running.wait()
    return peak() - alone, met


def of_async(way: Dcp, folder: Path) -> tuple[int, int]:
    """Return what a save in the background takes, without steps."""
    way.held()
    before = start()
    way.save_async(folder).wait()
    return peak() - before, 0


# how it is weighed, and the claim: how many states and how many buckets beyond; None where it only informs
WEIGHED: dict[str, tuple[Callable[[Setting], Any], Callable[[Any, Path], tuple[int, int]], tuple[int, int] | None]] = {
    "fds.save": (Fds, of_saving, (0, 1)),
    "dcp.save": (Dcp, of_saving, None),
    "torch.save": (TorchSave, of_saving, None),
    "fds.load": (Fds, of_loading, (0, 1)),
    "dcp.load": (Dcp, of_loading, None),
    "torch.load": (TorchSave, of_loading, None),
    "fds.save_async, donating steps": (Fds, of_steps, (1, 1)),
    "dcp.async_save": (Dcp, of_async, None),
}


def at_most(name: str, beyond: Beyond) -> int | None:
    """Return the bytes claimed."""
    claim = WEIGHED[name][2]
    return None if claim is None else claim[0] * beyond.state_bytes + claim[1] * BUCKET


def store(setting: Setting, name: str, room: str) -> None:
    """Run on every rank: save, for `weigh` to load in another process."""
    way = WEIGHED[name][0](setting)
    Path(room).mkdir(exist_ok=True)
    together()
    way.save(Path(room))


def weigh(setting: Setting, name: str, room: str) -> Beyond:
    """Run on every rank of a fresh process: return what this takes."""
    torch.set_num_threads(1)
    way, weigh_it, _ = WEIGHED[name]
    Path(room).mkdir(exist_ok=True)
    taken, met = weigh_it(way(setting), Path(room))
    beyond = torch.tensor([taken, setting.rank_bytes, helpers(os.getpid()), met])
    if dist.is_initialized():
        dist.all_reduce(beyond, op=dist.ReduceOp.MAX)
    return Beyond(*beyond.tolist())


def start() -> int:
    """Give freed memory back, let the high water start anew, and return what is resident now."""
    torch.randn(256, 256) @ torch.randn(256, 256)  # the first product loads its library
    give_back()
    together()
    Path("/proc/self/clear_refs").write_text("5")
    return counted("VmRSS")


def peak() -> int:
    """Return the most bytes that were resident since."""
    return counted("VmHWM")


def helpers(process: int) -> int:
    """Return the sum of the peaks of the processes below this one."""
    below = [int(x) for path in Path(f"/proc/{process}/task").glob("*/children") for x in path.read_text().split()]
    return sum(counted("VmHWM", one) + helpers(one) for one in below)


def counted(name: str, process: int | str = "self") -> int:
    """Return bytes from the kernel's record of a process."""
    line = next(x for x in Path(f"/proc/{process}/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024
