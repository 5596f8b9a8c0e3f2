"""Run as a program: save a state of 144 MiB below a directory, or load it and print the memory that it took.

What is printed, a line a way to load, is bytes of memory in use at most while it was loaded, beyond the state's own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import fds
from fds import tree

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


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, large, small = Path(sys.argv[1]), 12 * 2**20, 2000
    if sys.argv[2] == "save":
        for numel in (large, small):
            step, params = make(numel)
            fds.save(root / str(numel), step.init(params), step)
    else:
        for options in WAYS:
            load(root / str(small), small, **options)  # what is imported and made once
            print(load(root / str(large), large, **options), options, flush=True)
