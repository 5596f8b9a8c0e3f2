"""`init_distributed`: the ranks that a launcher started meet, and are connected.

Rank 0 hosts a store. Every rank writes its name into it, and the last one to arrive marks the roll as complete. torch's
own rendezvous does not name missing ranks, and counts a rank that was started twice as two.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
import urllib.parse
import uuid

import torch
import torch.distributed as dist

from fds.collectives import worlds
from fds.collectives.launch import Launch, launched
from fds.errors import FdsError, MeshError, RankError, is_number


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

    Raises `MeshError` for an incomplete environment or arguments, for a `timeout` that is no time, if two processes
    have the same rank, and if another job uses the same address; `RankError` after `timeout`, naming the missing ranks.
    """
    if worlds.simulated.get() is not None:
        return
    limit = _limit(timeout)
    if not dist.is_initialized():
        launch = _launch(rank, world_size, init_method)
        if launch is None or launch.world_size == 1:
            return
        _start(backend, limit, launch, init_method)
        worlds.of_torch()  # which answers others from now on
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


def _limit(timeout: object) -> datetime.timedelta:
    """Return a time limit. Raises `MeshError` for none, and for a century or more, which C++ cannot add to now."""
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if not (is_number(seconds) and 0 < seconds < 3e9):
        raise MeshError("not a time limit", where="timeout", got=repr(timeout)[:80], want="seconds, above 0")
    return datetime.timedelta(seconds=seconds)


def _start(backend: str | None, limit: datetime.timedelta, launch: Launch, init_method: str | None) -> None:
    if backend not in (None, "nccl", "gloo"):
        raise MeshError("no such backend", got=repr(backend), want="'nccl', 'gloo', or None for what fits")
    backend = backend or ("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
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


LOOK = 0.1  # seconds between polls of the store, whose own `wait` does not handle Ctrl-C, and logs warnings
GRACE = 2.0  # seconds for the other ranks to read the reason of a failure
_own = uuid.uuid4().hex  # identifies this process together with its pid, which differs in a fork


def meet(launch: Launch, init_method: str | None, limit: datetime.timedelta) -> dist.Store:
    """Wait for all ranks of the job, and return their store.

    Raises `RankError` after the time limit, naming the missing ranks, and `MeshError` if two processes have the same
    rank or if another job uses this address; all waiting ranks raise.
    """
    end = time.monotonic() + limit.total_seconds()
    try:
        store = _store(launch, init_method, limit, end)
        store = dist.PrefixStore("fds-meeting", store)
        _compare_jobs(store, launch, end)
        _call_the_roll(store, launch, limit, end)
    except (dist.DistError, RuntimeError) as error:  # for example, rank 0 has ended, and the store with it
        raise RankError(
            "the ranks could not meet",
            where=f"rank {launch.rank} of {launch.world_size}",
            got=str(error).partition("\n")[0][:300],
            want="rank 0 to run until all have arrived",
            hint="look at the output of rank 0",
        ) from error
    return store


def _store(launch: Launch, init_method: str | None, limit: datetime.timedelta, end: float) -> dist.Store:
    """Host the store on rank 0, connect to it on other ranks; for URLs other than tcp://, use torch's rendezvous."""
    if init_method is not None and not init_method.startswith("tcp://"):
        try:
            return next(dist.rendezvous(init_method, launch.rank, launch.world_size, timeout=limit))[0]
        except (ValueError, RuntimeError, OSError) as error:
            raise MeshError(
                "not a rendezvous URL",
                where="init_method",
                got=f"{init_method!r}: {error}"[:300],
                want="'tcp://host:port' or 'file:///path'",
            ) from error
    host, port = (launch.address, launch.port) if init_method is None else _parse(init_method)
    agent = init_method is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = launch.rank == 0 and not agent
    if not serves:
        _await_server(host, port, launch, end)
    try:
        store = dist.TCPStore(
            host, port, launch.world_size, serves, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise MeshError(
            "rank 0 cannot wait for the others at this port" if serves else "rank 0 does not answer",
            where=f"{host}:{port}",
            got=str(error).partition("\n")[0][:300],
            want="a free port",
            hint="another job, or a second rank 0, may use it: set a different MASTER_PORT for this job",
        ) from error
    # torchrun keeps one store for all restarts, which still has the addresses of ranks that died
    # (pytorch/pytorch#135712), so every start uses its own keys.
    return dist.PrefixStore(_name_of_start(store, launch, limit, end), store) if agent else store


def _parse(url: str) -> tuple[str, int]:
    """Return the host and port of tcp://host:port. Raises `MeshError`."""
    try:
        parts = urllib.parse.urlparse(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise MeshError(
            "not the address of rank 0",
            where="init_method",
            got=repr(url),
            want="'tcp://host:port', with a port from 1 to 65535",
        )
    return host, port


def _await_server(host: str, port: int, launch: Launch, end: float) -> None:
    """Wait until a server listens at an address. Raises `RankError`."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(min(1.0, end - time.monotonic()), 0.01)):
                return
        except OSError as error:
            if time.monotonic() >= end:
                raise RankError(
                    "rank 0 did not arrive in time",
                    where=f"rank {launch.rank} of {launch.world_size}",
                    got=f"{host}:{port}: {error.strerror or error}",
                    want="rank 0 to wait there for the others",
                    hint="is it started, and does every node reach that host and port?",
                ) from error
        time.sleep(0.05)


def _compare_jobs(store: dist.Store, launch: Launch, end: float) -> None:
    """Raise `MeshError` if rank 0 belongs to another job, or expects another number of ranks."""
    mine = f"{launch.world_size} ranks" + (f", job {launch.job}" if launch.job else "")
    if launch.rank == 0:
        store.set("job", mine)
    elif not _await_key(store, "job", end):
        raise RankError(
            "rank 0 did not arrive in time",
            where=f"rank {launch.rank} of {launch.world_size}",
            want="rank 0 to wait for the others",
        )
    theirs = store.get("job").decode()
    if theirs != mine:
        store.set("another", f"; {_place(_name())} came as rank {launch.rank} of {mine}")
        raise MeshError(
            "another job uses this address",
            where=f"rank {launch.rank}",
            got=theirs,
            want=mine,
            hint="set a different MASTER_PORT for each job",
        )


def _call_the_roll(store: dist.Store, launch: Launch, limit: datetime.timedelta, end: float) -> None:
    """Wait until all ranks have arrived."""
    name, row = _name(), f"rank {launch.rank}"
    came_before = store.check([row])
    first = store.compare_set(row, "", name).decode()
    if first != name:
        what = f"two processes are rank {launch.rank} of {launch.world_size}: {_place(first)}, and {_place(name)}"
        if not store.check(["all"]):  # waiting ranks fail too; a job that already runs goes on
            _fail_all(store, "MeshError", what)
        raise _failure(launch, "MeshError", what)
    if not came_before and store.add("arrived", 1) == launch.world_size:
        store.set("all", "")
    if not _await_key(store, "all", end):
        missing = [f"rank {rank}" for rank in range(launch.world_size) if not store.check([f"rank {rank}"])]
        stranger = store.get("another").decode() if store.check(["another"]) else ""
        what = f"{', '.join(missing[:16])} did not arrive within {limit.total_seconds():g} s{stranger}"
        _fail_all(store, "RankError", what)
    if store.check(["failure"]):
        over = time.monotonic() + GRACE
        store.add("informed", 1)
        while launch.rank == 0 and store.add("informed", 0) < store.add("arrived", 0) and time.monotonic() < over:
            time.sleep(LOOK / 2)  # the store ends with this process, and other ranks still read the failure
        raise _failure(launch, *store.get("failure").decode().split(": ", 1))


def _fail_all(store: dist.Store, kind: str, what: str) -> None:
    """Let all waiting ranks raise this error, unless there is an earlier one."""
    store.compare_set("failure", "", f"{kind}: {what}")
    store.set("all", "")


def _failure(launch: Launch, kind: str, what: str) -> FdsError:
    where = f"rank {launch.rank} of {launch.world_size}"
    if kind == "RankError":
        return RankError(
            what, where=where, want=f"{launch.world_size} ranks", hint="were they started, and with these ranks?"
        )
    return MeshError(
        what, where=where, want="one process for each rank", hint="for two jobs, set a different MASTER_PORT for each"
    )


def _name() -> str:
    return f"{_own}.{os.getpid()} on {socket.gethostname()}"


def _place(name: str) -> str:
    return "process " + name.partition(".")[2]


def _await_key(store: dist.Store, key: str, end: float) -> bool:
    """Wait until the store has a key or the time is over, and return whether it has."""
    pause = 0.001
    while not store.check([key]):
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LOOK)
    return True


def _name_of_start(store: dist.Store, launch: Launch, limit: datetime.timedelta, end: float) -> str:
    """Agree on a name that no earlier start has used, in a store that still has the keys of earlier starts.

    Restart counts are of no use, since each node's agent counts its own. A rank asks with a new random key, so it never
    reads an old answer. Rank 0 answers all requests, old ones too, until every rank has confirmed the name. Agents
    end all ranks of a start before the next one begins.
    """
    token = uuid.uuid4().hex
    if launch.rank:
        store.set(f"asks {launch.rank}", token)
        if not _await_key(store, f"answer to {token}", end):
            raise RankError(
                f"rank 0 did not arrive within {limit.total_seconds():g} s",
                where=f"rank {launch.rank} of {launch.world_size}",
                want="rank 0 to answer",
            )
        name = store.get(f"answer to {token}").decode()
        store.set(f"{name} {launch.rank} confirmed", "")
        return name
    unconfirmed = list(range(1, launch.world_size))
    while unconfirmed and time.monotonic() < end:
        for other in unconfirmed:
            if store.check([f"asks {other}"]):
                store.set(f"answer to {store.get(f'asks {other}').decode()}", token)
        unconfirmed = [other for other in unconfirmed if not store.check([f"{token} {other} confirmed"])]
        time.sleep(0.01)
    if unconfirmed:
        raise RankError(
            f"{', '.join(f'rank {i}' for i in unconfirmed[:16])} did not arrive within {limit.total_seconds():g} s",
            where=f"rank 0 of {launch.world_size}",
            want="all ranks to start",
        )
    return token
