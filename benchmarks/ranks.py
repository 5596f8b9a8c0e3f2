"""Two ranks on this machine, or four: started in a moment, timed in turns, and their resident memory.

Processes are forked from one that has imported everything already (a fork server), so that a fresh pair costs a
second and not ten, and what importing holds is in every baseline.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from benchmarks import cable
from benchmarks.harness import Call

ROOT = Path(__file__).parent.parent
NUM_RANKS = 2
TIMEOUT = datetime.timedelta(minutes=5)  # of a collective: DeepSpeed compiles an operator at its first start (40 s)


@attrs.frozen
class Turns:
    """What the contenders of one comparison did, by name."""

    losses: dict[str, list[float]]  # of the first calls, the mean over ranks
    seconds: dict[str, list[float]]  # of the slowest rank, round by round


@attrs.frozen
class Resident:
    """Resident bytes of the rank that holds most, above what it held before the contender was made."""

    peak_bytes: int  # from the making to the last call
    stepping_bytes: int  # the same, from the third call on: what making takes at most for itself is left out


def prepare(modules: Sequence[str]) -> None:
    """Say what ranks import, before the first is started. One thread each, on CPUs."""
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "KINETO_LOG_LEVEL": "6"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, for DeepSpeed
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def launch(work: Callable[..., Any], *arguments: Any, over: str = "", num_ranks: int = NUM_RANKS) -> list[Any]:
    """Return what `work(*arguments)` returns on each of so many fresh ranks.

    Half of them are at each end of a cable of the rate `over`, if there is one. Raises `RuntimeError` with the
    tracebacks of the ranks that failed.
    """
    context, port = multiprocessing.get_context("forkserver"), _free_port()
    ends, ranks = [], []
    with cable.joined(over, num_ranks // 2) if over else contextlib.nullcontext([None]) as nodes:
        try:
            for rank in range(num_ranks):
                node = nodes[rank * len(nodes) // num_ranks]
                here, there = context.Pipe(duplex=False)
                arguments_of_rank = (rank, num_ranks, node, port, there, work, arguments)
                process = context.Process(target=_rank, args=arguments_of_rank, daemon=True)
                process.start()
                there.close()
                ends.append(here)
                ranks.append(process)
            answers = [_answer(end) for end in ends]
        finally:
            for process in ranks:
                process.join(10)
                process.kill()
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if failed:
        raise RuntimeError("\n".join([f"{work.__name__}{arguments} failed", *failed]))
    return [value for _, value in answers]


def take_turns(
    make: Mapping[str, Callable[[], Call]],
    *,
    rounds: int,
    first_calls: int,
    turn: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Turns:
    """Make all contenders in this process, then time one call of each in every round, in turned order.

    All ranks call this with the same arguments. They meet before every call; nobody's garbage is collected while a
    clock runs. With `time.thread_time` for a clock, what is timed is the work of the thread that calls, not its waits.
    """
    calls = {name: made() for name, made in make.items()}
    losses = {name: [_mean(call()) for _ in range(first_calls)] for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for i in range(turn, turn + rounds):
        gc.collect()
        for name in reversed(calls) if i % 2 else calls:
            dist.barrier()
            start = clock()
            calls[name]()
            seconds[name].append(clock() - start)
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Turns(losses, dict(zip(calls, slowest.tolist(), strict=True)))


def measure_resident(make: Callable[[], Call], *, calls: int) -> Resident:
    """Make a contender, call it, and return what that took. For a fresh process: what was freed may stay resident."""
    torch.randn(256, 256) @ torch.randn(256, 256)  # the first product loads its library
    dist.all_reduce(torch.zeros(1))
    gc.collect()
    before = high_water(reset=True)
    call = make()
    for _ in range(2):
        call()
    first = high_water(reset=True)
    for _ in range(calls - 2):
        call()
    rest = high_water(reset=False)
    most = torch.tensor([max(first, rest) - before, rest - before])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return Resident(*most.tolist())


def high_water(*, reset: bool) -> int:
    """Return the most bytes that were resident since the last reset; a reset starts at what is resident now."""

    def read(name: str) -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
        return int(line.split()[1]) * 1024

    peak = read("VmHWM")
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return peak


def _mean(loss: torch.Tensor) -> float:
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _rank(
    rank: int,
    num_ranks: int,
    node: cable.Node | None,
    port: int,
    out: Connection,
    work: Callable[..., Any],
    arguments: tuple,
) -> None:
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(num_ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | ({} if node is None else node.enter())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what peers print
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        out.send(("", work(*arguments)))
        dist.barrier()  # the first to leave would close the other's connections
    except BaseException:
        out.send((traceback.format_exc(), None))
    out.close()
    sys.stderr.flush()
    os._exit(0)  # engines that wait in destructors wait for nobody


def _answer(end: Connection) -> tuple[str, Any]:
    try:
        return end.recv()
    except EOFError:
        return "ended without an answer", None


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
