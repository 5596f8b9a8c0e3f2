"""How long messages take: collectives of all ranks of an axis, or messages to and fro between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fds.collectives.axis import Axis

BLOCKS = 3  # of collectives: their median counts
OF_LINK = 5  # blocks of messages between two ranks: the fastest counts, for it says most of the link
MOST = 1000  # messages of a block


def time_collective(axis: Axis, op: str, num_bytes: int, device: torch.device, seconds: float) -> float:
    """Return the seconds that a collective of a tensor takes, all ranks starting it again and again for `seconds`."""
    send = _sender(axis, op, num_bytes, device)
    count = lambda once: max(axis.exchange(max(3, min(MOST, int(seconds / once)))))
    return sorted(_blocks(send, device, count, axis.barrier, BLOCKS))[BLOCKS // 2]


def time_link(axis: Axis, peer: int, num_bytes: int, seconds: float) -> float:
    """Return the seconds that a tensor takes from this rank to a peer, half of the way there and back; both call it."""
    x, first = torch.zeros(max(num_bytes // 4, 1), device=axis.device), axis.index < peer
    counts = torch.zeros(1, dtype=torch.int64, device=axis.device)

    def send() -> None:
        for sends in (first, not first):
            (axis.start_send(x, peer) if sends else axis.start_recv(x, peer)).wait()

    def count(once: float) -> int:
        counts.fill_(max(1, min(MOST, int(seconds / once))))
        (axis.start_send(counts, peer) if first else axis.start_recv(counts, peer)).wait()
        return int(counts)

    return min(_blocks(send, axis.device, count, lambda: None, OF_LINK)) / 2


def _blocks(
    send: Callable[[], Any], device: torch.device, count: Callable[[float], int], meet: Callable[[], None], blocks: int
) -> list[float]:
    """Return the seconds of one message in each of some blocks; `count` says how many by the seconds of one."""

    def run(times: int) -> float:
        meet()
        begin = time.perf_counter()
        for _ in range(times):
            send()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / times

    run(2)
    times = count(max(run(2), 1e-6))
    return [run(times) for _ in range(blocks)]


def _sender(axis: Axis, op: str, num_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Return what sends one such message and waits for it; of float32, which gloo adds as fast as it can."""
    whole = torch.zeros(max(num_bytes // 4, axis.size) // axis.size * axis.size, device=device)
    part = torch.zeros(len(whole) // axis.size, device=device)
    peer = axis.index ^ 1
    sends: Mapping[str, Callable[[], Any]] = {
        "all_reduce": lambda: axis.start_all_reduce(whole).wait(),
        "all_gather": lambda: axis.start_all_gather(whole, part).wait(),
        "reduce_scatter": lambda: axis.start_reduce_scatter(part, whole).wait(),
        "all_to_all": lambda: axis.start_all_to_all(torch.empty_like(whole), whole).wait(),
        "broadcast": lambda: axis.start_broadcast(whole, 0).wait(),
        "barrier": axis.barrier,
        "exchange": lambda: axis.exchange(0),
        "send": lambda: (axis.start_send(whole, peer) if axis.index < peer else axis.start_recv(whole, peer)).wait(),
        "recv": lambda: None,  # it is counted where it is sent
    }
    if op == "send" and peer >= axis.size:
        return lambda: None
    return sends[op]
