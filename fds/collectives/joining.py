"""`init_distributed`: connect the ranks that a launcher started."""

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
    """Connect the ranks that torchrun, Slurm or MPI started; do nothing for one rank, or inside `simulate`.

    If torch.distributed is initialized already, by an earlier call or by other code, only `check` takes effect.

    Args:
        backend: "nccl" (the default where there is a GPU) or "gloo".
        timeout: seconds that a rank waits for the others in a collective before it raises `RankError`.
        check: before every collective, compare what the ranks are about to do, and raise `RankError` on all of them if
            it differs. It applies to axes that are made afterwards, and costs a few round trips per collective; use it
            to find out why ranks hang.
        rank: this process' rank, if there is no launcher; together with `world_size` and `init_method`.
        world_size: the number of ranks.
        init_method: torch's URL for the rendezvous, "tcp://host:port" or "file:///path"; by default as the environment
            says.

    Raises `MeshError` for an incomplete environment or arguments, if two processes have the same rank, and if another
    job uses the same address; `RankError` after `timeout`, naming the missing ranks.
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


def backends() -> dict[str, bool]:
    """Return which backends this build of torch.distributed has: name -> whether it is there."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def _launch(rank: int | None, world_size: int | None, init_method: str | None) -> Launch | None:
    if rank is None and world_size is None:
        return launched(os.environ)
    if rank is None or world_size is None or not 0 <= rank < world_size or (init_method is None and world_size > 1):
        raise MeshError(
            "these arguments do not make a rank",
            got=f"rank={rank}, world_size={world_size}, init_method={init_method!r}",
            want="all three, with 0 <= rank < world_size",
        )
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
        backend = "cpu:gloo,cuda:nccl"  # tensors on the CPU go over gloo
    store = meet(launch, init_method, limit)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("fds-group", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=limit,
        )
    except RuntimeError as error:
        raise RankError(
            "the ranks could not connect to each other",
            where=f"rank {launch.rank}",
            got=str(error).strip().partition("\n")[0][:300],
            want="every rank to keep running, and to reach all others",
            hint="GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network interface",
        ) from error
