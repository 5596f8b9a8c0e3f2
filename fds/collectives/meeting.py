"""Meeting: the ranks of a job find each other, and are told who is missing, who came twice and who is of another job.

Rank 0 serves a store at an address. Every rank writes its name into it, and the last one to come says that all are
there. torch's own rendezvous names nobody, and takes a rank that comes twice for one that is missing.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
import urllib.parse
import uuid

import torch.distributed as dist

from fds.collectives.launch import Launch
from fds.errors import FdsError, MeshError, RankError

LOOK = 0.1  # seconds between looks at the store; its own `wait` would not notice Ctrl-C, and it warns
GRACE = 2.0  # seconds that the others have to read why they do not go on
_own = uuid.uuid4().hex  # of this process, with its number, which a forked one does not share


def meet(launch: Launch, init_method: str | None, limit: datetime.timedelta) -> dist.Store:
    """Return the store in which all ranks of the job have met.

    Raises `RankError` when the time is over, naming who is missing, `MeshError` where two processes have one rank, and
    where the ranks of another job meet at this address; in either case on all that wait.
    """
    end = time.monotonic() + limit.total_seconds()
    try:
        store = _store(launch, init_method, limit, end)
        store = dist.PrefixStore("fds-meeting", store)
        _compare_jobs(store, launch, end)
        _call_the_roll(store, launch, limit, end)
    except (dist.DistError, RuntimeError) as error:  # such as the end of the store with the process of rank 0
        raise RankError("the ranks could not meet", where=f"rank {launch.rank} of {launch.world_size}",
                        got=str(error).partition("\n")[0][:300], want="rank 0 to stay until all have come",
                        hint="look at the output of rank 0") from error  # fmt: skip
    return store


def _store(launch: Launch, init_method: str | None, limit: datetime.timedelta, end: float) -> dist.Store:
    """Serve the store on rank 0, connect to it on the others; or what another URL than tcp:// stands for."""
    if init_method is not None and not init_method.startswith("tcp://"):
        try:
            return next(dist.rendezvous(init_method, launch.rank, launch.world_size, timeout=limit))[0]
        except (ValueError, RuntimeError, OSError) as error:
            raise MeshError("not a meeting place", where="init_method", got=f"{init_method!r}: {error}"[:300],
                            want="'tcp://host:port' or 'file:///path'") from error  # fmt: skip
    host, port = (launch.address, launch.port) if init_method is None else _parsed(init_method)
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
            where=f"{host}:{port}", got=str(error).partition("\n")[0][:300], want="a port that nobody else uses",
            hint="another job, or a second rank 0, may have it: give this job a MASTER_PORT of its own",
        ) from error  # fmt: skip
    # torchrun keeps one store for all its restarts, and the addresses of ranks that have died are still in it
    # (pytorch/pytorch#135712): every start gets keys of its own.
    return dist.PrefixStore(_name_of_start(store, launch, limit, end), store) if agent else store


def _parsed(url: str) -> tuple[str, int]:
    """Return the host and port of tcp://host:port. Raises `MeshError`."""
    try:
        parts = urllib.parse.urlparse(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise MeshError("not the address of rank 0", where="init_method", got=repr(url), want="'tcp://host:port', "
                        "with a port from 1 to 65535")  # fmt: skip
    return host, port


def _await_server(host: str, port: int, launch: Launch, end: float) -> None:
    """Return when somebody listens at an address. Raises `RankError`."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(min(1.0, end - time.monotonic()), 0.01)):
                return
        except OSError as error:
            if time.monotonic() >= end:
                raise RankError(
                    "rank 0 did not come in time", where=f"rank {launch.rank} of {launch.world_size}",
                    got=f"{host}:{port}: {error.strerror or error}", want="rank 0 to wait there for the others",
                    hint="is it started, and does every node reach that host and port?",
                ) from error  # fmt: skip
        time.sleep(0.05)


def _compare_jobs(store: dist.Store, launch: Launch, end: float) -> None:
    """Raise `MeshError` where rank 0 is of another job, or counts other ranks."""
    mine = f"{launch.world_size} ranks" + (f", job {launch.job}" if launch.job else "")
    if launch.rank == 0:
        store.set("job", mine)
    elif not _come(store, "job", end):
        raise RankError("rank 0 did not come in time", where=f"rank {launch.rank} of {launch.world_size}",
                        want="rank 0 to wait for the others")  # fmt: skip
    theirs = store.get("job").decode()
    if theirs != mine:
        store.set("another", f"; {_place(_name())} came as rank {launch.rank} of {mine}")
        raise MeshError("another job meets at this address", where=f"rank {launch.rank}", got=theirs, want=mine,
                        hint="give each job a MASTER_PORT of its own")  # fmt: skip


def _call_the_roll(store: dist.Store, launch: Launch, limit: datetime.timedelta, end: float) -> None:
    """Return when all ranks have come."""
    name, row = _name(), f"rank {launch.rank}"
    known = store.check([row])
    there = store.compare_set(row, "", name).decode()
    if there != name:
        what = f"two processes are rank {launch.rank} of {launch.world_size}: {_place(there)}, and {_place(name)}"
        if not store.check(["all"]):  # those that wait are told; a job that runs goes on
            _refuse(store, "MeshError", what)
        raise _refusal(launch, "MeshError", what)
    if not known and store.add("come", 1) == launch.world_size:
        store.set("all", "")
    if not _come(store, "all", end):
        missing = [f"rank {rank}" for rank in range(launch.world_size) if not store.check([f"rank {rank}"])]
        stranger = store.get("another").decode() if store.check(["another"]) else ""
        _refuse(store, "RankError", f"{', '.join(missing[:16])} did not come in {limit.total_seconds():g} s{stranger}")
    if store.check(["refused"]):
        over = time.monotonic() + GRACE
        store.add("heard", 1)
        while launch.rank == 0 and store.add("heard", 0) < store.add("come", 0) and time.monotonic() < over:
            time.sleep(LOOK / 2)  # the store ends with this process, and all are to read it
        raise _refusal(launch, *store.get("refused").decode().split(": ", 1))


def _refuse(store: dist.Store, kind: str, what: str) -> None:
    """Tell all that wait why they do not go on; the first reason counts."""
    store.compare_set("refused", "", f"{kind}: {what}")
    store.set("all", "")


def _refusal(launch: Launch, kind: str, what: str) -> FdsError:
    where = f"rank {launch.rank} of {launch.world_size}"
    if kind == "RankError":
        return RankError(what, where=where, want=f"{launch.world_size} ranks",
                         hint="were they started, and with these numbers?")  # fmt: skip
    return MeshError(what, where=where, want="one process for each rank",
                     hint="of two jobs, each has a MASTER_PORT of its own")  # fmt: skip


def _name() -> str:
    return f"{_own}.{os.getpid()} on {socket.gethostname()}"


def _place(name: str) -> str:
    return "process " + name.partition(".")[2]


def _come(store: dist.Store, key: str, end: float) -> bool:
    """Wait until a key is there or the time is over, and return whether it is."""
    pause = 0.001
    while not store.check([key]):
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LOOK)
    return True


def _name_of_start(store: dist.Store, launch: Launch, limit: datetime.timedelta, end: float) -> str:
    """Agree on a name that no earlier start of these ranks has had, in a store where keys of earlier ones still are.

    Agents count their own restarts only, so the count differs between nodes. A rank asks under a name of its own, so
    an answer is never an old one; rank 0 answers whoever asks, also for ranks that are gone, until all have told it
    that they know. Agents end all ranks of a start before the next one begins.
    """
    own = uuid.uuid4().hex
    if launch.rank:
        store.set(f"asks {launch.rank}", own)
        if not _come(store, f"answer to {own}", end):
            raise RankError(f"rank 0 did not come in {limit.total_seconds():g} s",
                            where=f"rank {launch.rank} of {launch.world_size}", want="rank 0 to answer")  # fmt: skip
        name = store.get(f"answer to {own}").decode()
        store.set(f"{name} {launch.rank} knows", "")
        return name
    unknowing = list(range(1, launch.world_size))
    while unknowing and time.monotonic() < end:
        for other in unknowing:
            if store.check([f"asks {other}"]):
                store.set(f"answer to {store.get(f'asks {other}').decode()}", own)
        unknowing = [other for other in unknowing if not store.check([f"{own} {other} knows"])]
        time.sleep(0.01)
    if unknowing:
        raise RankError(
            f"{', '.join(f'rank {rank}' for rank in unknowing[:16])} did not come in {limit.total_seconds():g} s",
            where=f"rank 0 of {launch.world_size}", want="all ranks to start",
        )  # fmt: skip
    return own
