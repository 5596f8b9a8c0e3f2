"""Who keeps a state in `benchmarks/storage.py`, and what is timed and weighed of them.

The state is that of AdamW on a GPT: some hundred float32 parameters and twice as much in the optimizer. One rank has
plain tensors. Of two, fds has its slices of buckets (stage 3), DCP and torch.save the halves of every tensor along
dim 0, as DTensors and as the plain tensors in them.
"""

from __future__ import annotations

import functools
import mmap
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty

import fds
from benchmarks.sharding_contenders import BETAS, EPS, GPT, LR, VOCABULARY, WEIGHT_DECAY, Case, loss_of

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # what DCP says to one process

MIB = 1 << 20
PAGE = 4096


@attrs.frozen
class Manner:
    """How raw bytes are written: in blocks of so many bytes, so many of them at a time."""

    block_bytes: int
    at_once: int

    def __str__(self) -> str:
        return f"{self.block_bytes // MIB} MiB, {self.at_once} at a time"


@attrs.frozen
class Setting:
    """A state, and on how many ranks it is."""

    case: Case
    num_ranks: int
    manner: Manner = Manner(64 * MIB, 1)  # of raw writes

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks" if self.num_ranks > 1 else "1 rank"

    @functools.cached_property
    def shapes(self) -> dict[str, Tensor]:
        """The leaves of the plain state by key path, on `meta`."""
        step = fds.compose(fds.adamw())(lambda params, batch: params)
        with torch.device("meta"):
            _, params, _ = fds.functional(GPT(self.case))
        return fds.tree.paths(step.structure(params))

    @property
    def rank_bytes(self) -> int:
        """What a rank has of the state, to a few elements."""
        return sum(x.nbytes for x in self.shapes.values()) // self.num_ranks


@attrs.frozen
class Running:
    """A save in the background."""

    done: Callable[[], bool]
    wait: Callable[[], Any]


class Way(Protocol):
    """A way to keep a state. Every rank calls everything."""

    def held(self) -> Sequence[Tensor]:
        """Return what this rank has."""
        ...

    def save(self, folder: Path) -> None:
        """Write it below an empty folder that is on the disk, until all of it is."""
        ...

    def load(self, folder: Path) -> Sequence[Tensor]:
        """Return what was held, in fresh memory."""
        ...


class Fds:
    """fds."""

    def __init__(self, setting: Setting):
        shards = []
        if setting.num_ranks > 1:
            fds.init_distributed()
            shards = [fds.shard_optimizer(fds.mesh(dp=setting.num_ranks)["dp"], stage=3)]
        self.case = setting.case
        with torch.device("meta"):
            apply, self.params, _ = fds.functional(GPT(setting.case))
        self.step = fds.compose(*shards, fds.adamw(LR, BETAS, EPS, weight_decay=WEIGHT_DECAY), fds.donate())(
            lambda params, batch: loss_of(apply(params, batch[0]), batch[1])
        )

    @functools.cached_property
    def state(self) -> fds.State:
        state = self.step.init(fds.functional(GPT(self.case))[1])
        for x in fds.tree.leaves(state.opt):
            x.normal_()  # zeros that nothing has touched are one page, which costs nothing to read
        return state

    def held(self) -> list[Tensor]:
        return fds.tree.leaves(self.state)

    def save(self, folder: Path) -> None:
        fds.save(folder, self.state, self.step)  # it waits for files and names by itself

    def load(self, folder: Path) -> list[Tensor]:
        state, _ = fds.load(folder, self.step, self.params)
        return fds.tree.leaves(state)

    def save_async(self, folder: Path) -> Running:
        saving = fds.save_async(folder, self.state, self.step)
        return Running(saving.done, saving.wait)

    def move_on(self) -> None:
        """Make a donating step from the state."""
        self.state, _ = self.step(self.state, tokens(self.case))


class Dcp:
    """torch.distributed.checkpoint, as it is by default."""

    stager: DefaultStager | None = None

    def __init__(self, setting: Setting):
        self.setting = setting

    def blank(self) -> dict[str, Tensor]:
        """Return memory that nothing was written to, by name."""
        shapes = self.setting.shapes
        if self.setting.num_ranks == 1:
            return {name: torch.empty(x.shape, dtype=x.dtype) for name, x in shapes.items()}
        mesh = init_device_mesh("cpu", (self.setting.num_ranks,))
        split = lambda x: empty(x.shape, dtype=x.dtype, device_mesh=mesh, placements=[Shard(0)])
        return {
            name: split(x) if x.is_floating_point() else torch.empty(x.shape, dtype=x.dtype)
            for name, x in shapes.items()
        }

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        tensors = self.blank()
        for x in local(tensors):
            x.normal_() if x.is_floating_point() else x.zero_()
        return tensors

    def held(self) -> list[Tensor]:
        return local(self.tensors)

    def save(self, folder: Path) -> None:
        dcp.save(self.tensors, checkpoint_id=folder)  # it waits for its files, not for their names
        sync(folder)

    def load(self, folder: Path) -> list[Tensor]:
        tensors = self.blank()
        dcp.load(tensors, checkpoint_id=folder)
        return local(tensors)

    def save_async(self, folder: Path) -> Running:
        future = dcp.async_save(self.tensors, checkpoint_id=folder, async_stager=self.stager)
        return Running(future.done, future.result)


class DcpKept(Dcp):
    """The same with one stager for all saves, whose copy of the state is there from the second on."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.stager = DefaultStager(StagingOptions(False, False, False, False))


class TorchSave:
    """torch.save and torch.load, a file a rank; with torch's checksum (CRC-32), its default."""

    def __init__(self, setting: Setting):
        self.dcp = Dcp(setting)

    def held(self) -> list[Tensor]:
        return self.dcp.held()

    def save(self, folder: Path) -> None:
        file = folder / f"rank{rank()}.pt"
        torch.save(dict(zip(self.dcp.tensors, self.held(), strict=True)), file)
        sync(file, folder)

    def load(self, folder: Path) -> list[Tensor]:
        return list(torch.load(folder / f"rank{rank()}.pt", weights_only=True).values())


class Raw:
    """As many bytes, past the cache from memory that is aligned and in huge pages; no name, no checksum, no copy."""

    def __init__(self, setting: Setting):
        self.manner, self.bytes = setting.manner, -(-setting.rank_bytes // PAGE) * PAGE
        self.memory = mmap.mmap(-1, self.bytes + 2 * MIB)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(self.memory, np.uint64)
        array[:] = np.random.default_rng(rank()).integers(1 << 63, size=len(array), dtype=np.uint64)

    def held(self) -> list[Tensor]:
        return [torch.frombuffer(self.memory, dtype=torch.uint8, count=self.bytes)]

    def save(self, folder: Path) -> None:
        block, at_once = self.manner.block_bytes, self.manner.at_once
        file = os.open(folder / f"rank{rank()}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)

        def write(first: int) -> None:
            for start in range(first * block, self.bytes, at_once * block):
                part = memoryview(self.memory)[start : min(start + block, self.bytes)]
                assert os.pwrite(file, part, start) == len(part)

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(write, range(at_once)))
        os.fsync(file)
        os.close(file)
        sync(folder)

    def load(self, folder: Path) -> list[Tensor]:
        return [torch.from_numpy(np.fromfile(folder / f"rank{rank()}", np.uint8))]


def tokens(case: Case) -> tuple[Tensor, Tensor]:
    """Return a batch: always the same."""
    inputs = torch.arange(case.rows * case.context).view(case.rows, case.context) % VOCABULARY
    return inputs, (5 * inputs + 3) % VOCABULARY


def local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what this rank has of them."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors.values()]


def sync(*paths: Path) -> None:
    """Wait until these files, or the names in these folders, are on the disk."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def rank() -> int:
    """Return this rank's number, 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0
