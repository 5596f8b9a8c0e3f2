"""In a process of its own: save, load and export a state of 204 MiB that lives on a disk.

What is printed, a line a way, is bytes of memory in use at most meanwhile, beyond what was in use before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import fds
from fds import tree
from tests.bits import assert_same_bits
from tests.storage.loading_memory import in_use
from tests.storage.topologies import Topology

LARGE, SMALL = 17 * 2**20, 2000


def params(numel: int):
    return {"w": torch.ones(1).expand(numel - 1003), "b": torch.ones(1003)}


def make(leaves: Path, *transforms):
    disk = fds.disk(leaves)
    elsewhere = fds.offload(moments=disk, masters=disk)
    loss = lambda params, batch: params["w"].sum() + params["b"].sum()
    return fds.compose(*transforms, elsewhere, fds.donate(), fds.adamw(0.1))(loss)


def beyond(work: Callable[[], object]) -> int:
    """Return the bytes in use at most while this is done."""
    before = in_use("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the most so far
    work()
    return in_use("VmHWM") - before


def each(root: Path, numel: int) -> dict[str, int]:
    """Do everything, and return the bytes that it took."""
    (leaves := root / "leaves").mkdir(exist_ok=True)
    step, dir = make(leaves), root / str(numel)
    state, found, loaded = step.init(params(numel)), {}, []
    found["save"] = beyond(lambda: fds.save(dir, state, step))
    found["save_async"] = beyond(lambda: fds.save_async(dir, state, step).wait())
    found["load"] = beyond(lambda: loaded.append(fds.load(dir, step, params(numel))[0]))
    found["export"] = beyond(lambda: fds.export_weights(state, root / "w.safetensors", step=step))

    def on_ranks() -> None:
        step = make(leaves, Topology(2, 2, numel).shard())
        state, _ = fds.load(dir, step, params(numel))
        fds.save(dir, state, step, "again")

    found["load and save on two ranks"] = beyond(lambda: fds.simulate(on_ranks, 2))
    again, _ = fds.load(dir, step, params(numel), tag="again")
    assert_same_bits(loaded, [state])
    assert_same_bits(again, state)
    assert all(bool((x == 1).all()) for x in tree.leaves(again.params))
    return found


def measure(root: Path) -> None:
    each(root, SMALL)  # what is imported and made once
    for way, num_bytes in each(root, LARGE).items():
        print(num_bytes, way, flush=True)
