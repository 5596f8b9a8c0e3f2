"""`init_distributed`: join the ranks that a launcher started."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from fds.collectives import worlds
from fds.collectives.launch import Launch, launched
from fds.collectives.meeting import meet
from fds.errors import MeshError, RankError


def init_distributed(
    backend: str | None = None,
    *,
    timeout: float | datetime.timedelta = 1800.0,
    check: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
) -> None:
    """Join the ranks that torchrun, Slurm or MPI started; do nothing where there is one, or inside `simulate`.

    Called again, it does nothing but what `check` asks; of a group that somebody else initialised, likewise.

    Args:
        backend: "nccl" (the default where there is a GPU) or "gloo".
        timeout: seconds that a rank waits for the others in a collective before it raises `RankError`.
        check: compare what the ranks do before every collective, and raise `RankError` on all of them where they
            differ, of axes that are made from now on: for finding why ranks hang, at a few round trips a collective.
        rank: which rank this is, where no launcher says; together with `world_size` and `init_method`.
        world_size: how many ranks there are.
        init_method: torch's URL of the meeting place, "tcp://host:port" or "file:///path"; by default what the
            environment says.

    Raises `MeshError` for an environment or arguments that say half of what is needed, where two processes have one
    rank, and where another job meets at the same address; `RankError` when `timeout` is over, naming who is missing.
    """
    if worlds.simulated.get() is not None:
        return
    if not dist.is_initialized():
        launch = _launch(rank, world_size, init_method)
        if launch is None or launch.world_size == 1:
            return
        _start(backend, timeout, launch, init_method)
    if check:
        worlds.of_torch().check = True


def _launch(rank: int | None, world_size: int | None, init_method: str | None) -> Launch | None:
    if rank is None and world_size is None:
        return launched(os.environ)
    if rank is None or world_size is None or not 0 <= rank < world_size or (init_method is None and world_size > 1):
        raise MeshError("these arguments do not make a rank", got=f"rank={rank}, world_size={world_size}, "
                        f"init_method={init_method!r}", want="all three, with 0 <= rank < world_size")  # fmt: skip
    local = os.environ.get("LOCAL_RANK", rank)
    return Launch(rank, world_size, int(local))


def _start(backend: str | None, timeout: float | datetime.timedelta, launch: Launch, init_method: str | None) -> None:
    if backend not in (None, "nccl", "gloo"):
        raise MeshError("no such backend", got=repr(backend), want="'nccl', 'gloo', or None for what fits")
    backend = backend or ("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
    limit = timeout if isinstance(timeout, datetime.timedelta) else datetime.timedelta(seconds=timeout)
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise MeshError("NCCL needs GPUs", got="torch sees none", want="backend='gloo'")
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"  # values of the host travel over gloo
    store = meet(launch, init_method, limit)
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("fds-group", store), rank=launch.rank, world_size=launch.world_size,
            timeout=limit,
        )  # fmt: skip
    except RuntimeError as error:
        raise RankError("the ranks met, and could not connect to each other", where=f"rank {launch.rank}",
                        got=str(error).strip().partition("\n")[0][:300],
                        want="every rank to stay, and to reach all others",
                        hint="GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME choose the network interface") from error
