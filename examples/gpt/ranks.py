"""Choose the number of ranks, start them with torchrun's agent, and share values between them."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fds.collectives import Axis


def fitting(device: str, *, rows: int, each: int = 1) -> int:
    """Return one rank per GPU, or per core without GPUs, as many as divide the rows of a microbatch.

    Where `each` of several ranks see the same rows, they are counted as one, and there is one such group at least.
    """
    most = torch.cuda.device_count() if device == "cuda" else num_cores() if device == "cpu" else 1
    return each * max(n for n in range(1, max(1, most // each) + 1) if rows % n == 0)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(words: Sequence[str], num_ranks: int, *, restarts: int) -> int:
    """Run a Python script once per rank, its threads shared out, and return its exit code, as torchrun would.

    torchrun's agent hands on Ctrl-C and SIGTERM and ends the other ranks when one is lost; what it logs of that is
    left out, since the ranks say it themselves, all but one that was killed.
    """
    logging.disable()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        max_restarts=restarts,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
    )
    try:
        elastic_launch(config, sys.executable)(*words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException:  # a second signal stops waiting for the ranks, which save and exit by themselves
        return 130
    return 0


def run_id() -> str | None:
    """Return the name that torchrun gave to this run of its ranks, the same after a restart."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def started_again() -> bool:
    """Return whether torchrun has restarted these ranks after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def share(rows: Tensor, axis: Axis) -> Tensor:
    """Return this rank's part of the rows; rows that do not divide evenly are used by all ranks."""
    return rows.chunk(axis.size)[axis.index] if len(rows) % axis.size == 0 else rows


def agree(axis: Axis, decide: Callable[[], None], values: dict) -> None:
    """Let the first rank decide, and broadcast its values; if it fails, the others exit."""
    try:
        if axis.index == 0:
            decide()
    except BaseException:
        axis.exchange(None)
        raise
    first = axis.exchange(values)[0]
    if first is None:
        sys.exit(2)
    values.update(first)
