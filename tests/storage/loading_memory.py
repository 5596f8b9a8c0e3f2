"""In a process of its own: save a state of 144 MiB below a directory, or load it and print the memory that it took.

What is printed, a line a way to load, is bytes of memory in use at most while it was loaded, beyond the state's own.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

import fds
from fds import tree

LARGE, SMALL = 12 * 2**20, 2000
WAYS = ({}, {"slots": "init"}, {"verify": False}, {"params_only": True}, {"without_optimizer": True}, {"strict": False})


def make(numel: int):
    step = fds.compose(fds.adamw(0.1))(lambda params, batch: params["w"].sum() + params["b"].sum())
    return step, lambda key: {"w": torch.ones(numel - 1000), "b": torch.ones(1000)}


def in_use(which: str) -> int:
    """Return bytes of memory in use now (`VmRSS`), or the most since it was forgotten (`VmHWM`)."""
    return 1024 * int(re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def load(dir: Path, numel: int, **options) -> int:
    step, params = make(numel)
    shapes = {name: x.to("meta") for name, x in params(None).items()} if numel > 10_000 else params
    before = in_use("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the most so far
    state, _ = fds.load(dir, step, shapes, **options)
    most = in_use("VmHWM")
    assert (state.params["w"] == 1).all()
    return most - before - sum(x.numel() * x.element_size() for x in tree.leaves(state))


def save_both(root: Path) -> None:
    for numel in (LARGE, SMALL):
        step, params = make(numel)
        fds.save(root / str(numel), step.init(params), step)


def load_each(root: Path) -> None:
    for options in WAYS:
        load(root / str(SMALL), SMALL, **options)  # what is imported and made once
        print(load(root / str(LARGE), LARGE, **options), options, flush=True)
