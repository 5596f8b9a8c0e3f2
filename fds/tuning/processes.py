"""Ranks in fresh processes, with a limit of time: what they return, or how they ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import attrs
import torch

from fds.collectives import init_distributed
from fds.errors import FdsError

_GRACE = 2.0  # seconds in which the others may say why they failed, once one has


@attrs.frozen
class Ended:
    """How the processes of a job ended.

    Attributes:
        answers: what each rank has told, in order; of a job that failed, up to then.
        how: "done"; or "failed", where a rank raised an error, "died", where one ended otherwise, and "hung".
        why: of what is not done: the rank, and the first line of its error, its signal, or the limit.
        rank: the one that it says this of.
    """

    answers: tuple[tuple[Any, ...], ...]
    how: str
    why: str = ""
    rank: int = 0


def run_processes(
    work: Callable[..., None], arguments: Sequence[Any], environs: Sequence[Mapping[str, str]], *, limit: float
) -> Ended:
    """Run `work(tell, *arguments)` in a fresh process for each environment, ranks that meet; kill those left.

    `tell(value)` hands a value to this process at once, so that what was told stays where a later part fails. All are
    killed once `limit` seconds have passed, and soon after one fails. Values and arguments are pickled.

    Raises `FdsError` for arguments that do not pickle, and where a process ends before it has imported what it needs.
    """
    context = multiprocessing.get_context("spawn")
    processes, ends, until = [], dict[Connection, int](), time.monotonic() + limit
    answers: list[list[Any]] = [[] for _ in environs]
    begun, failures = set[int](), dict[int, tuple[str, str]]()
    try:
        for rank, environ in enumerate(environs):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(dict(environ), there, work, tuple(arguments)), daemon=True)
            try:
                process.start()
            except OSError:  # of the machine, which starts no more processes
                raise
            except Exception as error:
                raise _unpicklable(error) from error
            there.close()
            ends[here], processes = rank, [*processes, process]
        while ends and (left := until - time.monotonic()) > 0:
            for end in wait([*ends], left):
                assert isinstance(end, Connection)
                rank = ends[end]
                try:
                    kind, value = end.recv()
                    begun.add(rank)
                except (EOFError, ConnectionResetError):
                    kind, value = "ended", ""
                if kind == "began":
                    continue
                if kind == "told":
                    answers[rank].append(value)
                    continue
                del ends[end]
                if kind == "ended":
                    processes[rank].join(_GRACE)
                    code = processes[rank].exitcode
                    if rank not in begun and (code or 0) > 0:
                        raise _unimportable()
                    failures[rank] = "died", _how(code)
                elif value:
                    failures[rank] = "failed", value
                if failures:
                    until = min(until, time.monotonic() + _GRACE)
        if ends and not failures:
            late, total = ", ".join(environs[rank]["RANK"] for rank in sorted(ends.values())), environs[0]["WORLD_SIZE"]
            failures[min(ends.values())] = ("hung", f"{late} of {total} ranks not done after {limit:g} s")
    finally:
        for process in processes:
            process.kill()
            process.join()
    heard = tuple(map(tuple, answers))
    names = {rank: int(environs[rank]["RANK"]) for rank in sorted(failures)}
    ends_of = [Ended((), failures[i][0], f"rank {name}: {failures[i][1]}", name) for i, name in names.items()]
    return attrs.evolve(first_of([*ends_of, Ended((), "done")]), answers=heard)


def first_of(ends: Sequence[Ended]) -> Ended:
    """Return the one that says best why a job ended: a rank that lost another says so later than that other ended."""
    return min(ends, key=lambda end: (end.how == "done", ": RankError" in end.why, end.how == "hung"))


def environ_of(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return what a launcher would tell one of so many ranks of this machine, which meet at a port of the loopback."""
    world = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_RANK": rank}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {name: str(n) for name, n in world.items()}


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def _rank(environ: dict[str, str], end: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Be one rank: join the others, work, and say how it ended."""
    end.send(("began", ""))
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that started this process is asked, and kills it
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(environ["LOCAL_WORLD_SIZE"])))
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(environ["LOCAL_RANK"]) % torch.cuda.device_count())
        init_distributed(timeout=300.0)
        work(lambda value: end.send(("told", value)), *arguments)
        end.send(("done", ""))
    except BaseException as error:  # told to the one that started it, also where it is a KeyboardInterrupt
        end.send(("done", f"{type(error).__name__}: {error}".split("\n")[0]))


def _how(code: int | None) -> str:
    """Return how a process ended that did not say so."""
    if code is not None and code < 0:
        killed = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"ended by {signal.Signals(-code).name}{killed}"
    return f"exit code {code}"


def _unpicklable(error: Exception) -> FdsError:
    return FdsError(
        "trials run in fresh processes, and what they are given does not pickle",
        got=f"{type(error).__name__}: {error}"[:200],
        want="functions and classes at the top of a module: no lambda, nothing that is defined in a function",
        hint="a composition does not pickle: give the function that makes it",
    )


def _unimportable() -> FdsError:
    return FdsError(
        "a fresh process could not import what trials need, and has written why to standard error",
        want='a program that starts a search under `if __name__ == "__main__":`, and modules that import anywhere',
    )
