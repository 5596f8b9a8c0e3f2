"""All work of the kernels, in the order in which it is measured; checked by several processes at once, ahead of time.

A unit is some work at one size, in all its phases. Checking one compiles all that timing it needs, Triton's kernels and
torch.compile's, and the caches of both are files: so units are checked by child processes on all cores, in waves, and
the process that measures finds everything compiled. Who crashes a child, or hangs, is left out of the timing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config

from benchmarks import (
    kernel_messages as messages,
    kernel_products as products,
    kernel_sparse as sparse,
    kernel_streams as streams,
)
from benchmarks.children import Outcome, Pool, Task
from benchmarks.kernel_timing import COPIED_BYTES, Clock
from benchmarks.kernel_works import Setting, Work, by_inductor, by_tracing
from fds.kernels import choice, language

FAMILIES: dict[str, Callable[[Setting], Iterator[Work]]] = {
    "attention": products.attentions,
    "norms": streams.norms,
    "losses": products.losses,
    "elementwise": streams.elementwise,
    "updates": streams.updates,
    "layer": products.transformer_layers,
    "softmax": products.softmaxes,
    "columns": streams.columns,
    "messages": messages.messages,
    "sparse": sparse.sparse_attentions,
}
CHECK_S = 150.0  # of one way: torch.compile takes tens of seconds where every core compiles
RECOMPILATIONS = 64  # of one function: a size each
MOST_CHILDREN = 8  # each holds half a gigabyte of the GPU, and up to 40 while it checks


def works(setting: Setting, only: list[str]) -> Iterator[Work]:
    """Yield all work of the families, or of the names, that are asked for; what is not asked for is not made."""
    names = [name for name in only if name not in FAMILIES]
    for family, make in FAMILIES.items():
        whole = not only or family in only
        for work in make(setting) if whole or names else ():
            if whole or work.family.startswith(tuple(names)):
                yield work


def in_turn(some: Iterator[Work]) -> list[Work]:
    """Order work so that the first size of everything comes before the second of anything; phases stay together."""
    sizes: dict[str, list[str]] = {}
    placed: list[tuple[int, Work]] = []
    for work in some:
        known = sizes.setdefault(work.family, [])
        if work.unit not in known:
            known.append(work.unit)
        placed.append((known.index(work.unit), work))
    return [work for _, work in sorted(placed, key=lambda one: one[0])]


def nowhere(setting: Setting) -> Setting:
    """Return a setting in which work can be listed: no tensor has memory, nothing is compiled."""
    return Setting(torch.device("meta"), setting.tiny, lambda f: f)


def of_unit(setting: Setting, unit: str) -> list[Work]:
    """Return the work of a unit, one for each phase."""
    listed = nowhere(setting)
    (family,) = (name for name, make in FAMILIES.items() if any(work.unit == unit for work in make(listed)))
    return [work for work in FAMILIES[family](setting) if work.unit == unit]


def setting_of(device: str, tiny: bool) -> Setting:
    """Return the setting of a device, with torch's compiler as it is used there."""
    return Setting(torch.device(device), tiny, by_tracing if tiny else by_inductor)


def kernels_of(device: torch.device) -> AbstractContextManager[None]:
    """Return the scope in which fds's kernels run: on a GPU torch's operators are the default."""
    runs = device.type == "cuda" or language.is_interpreted
    return choice.only(choice.TRITON if runs else choice.REFERENCE)


@contextmanager
def compiler() -> Iterator[None]:
    """Let torch.compile take one function at many sizes, and call its backward repeatedly."""
    recompile = {"recompile_limit": RECOMPILATIONS, "accumulated_recompile_limit": 4 * RECOMPILATIONS}
    again, itself = {"donated_buffer": False}, {"compile_threads": 1}  # no processes of inductor's while a clock runs
    patches = (torch._functorch.config.patch(again), torch._inductor.config.patch(itself))
    with torch._dynamo.config.patch(recompile), patches[0], patches[1]:
        yield


@functools.cache
def clock_of(device: torch.device, tiny: bool) -> Clock:
    """Return the clock of this process."""
    return Clock(device, 4096 if tiny else COPIED_BYTES)


def check(
    device: str, tiny: bool, unit: str, *, skip: Mapping[str, str], tell: Callable[[str], None]
) -> dict[str, str]:
    """Check a unit, in a child: what is wrong with each way, "" where nothing is."""
    setting = setting_of(device, tiny)
    work = of_unit(setting, unit)[0]  # all phases are checked as one
    clock = Clock(setting.device, 2)  # no copies here
    with kernels_of(setting.device), compiler():
        return clock.check(work, skip=skip, tell=tell)


@functools.cache
def children() -> Pool:
    """Return the processes that check, which stay as long as this one."""
    return Pool(max(1, min(MOST_CHILDREN, (os.cpu_count() or 1) // 2)))


def checked(setting: Setting, units: list[str], *, seconds: float = float("inf")) -> dict[str, Outcome]:
    """Check units in child processes, several at once; those for which there is no time are left out."""
    arguments = lambda unit: (str(setting.device), setting.tiny, unit)
    return children().run([Task(unit, check, arguments(unit), CHECK_S) for unit in units], seconds=seconds)
