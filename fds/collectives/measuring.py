"""How long messages take: collectives of all ranks of an axis, or messages to and fro between two of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fds.collectives.axis import Axis

BLOCKS = 3  # of collectives: their median counts
OF_LINK = 5  # blocks of messages between two ranks: the fastest counts, for it says most of the link
BURSTS = 3  # of messages on a line: the median of what they say counts
REST = 0.1  # seconds before a burst, in which a line saves what it is ahead of its rate at first
MOST = 1000  # messages of a block
LARGE = 1 << 20  # bytes of the tensors whose rate is measured
SENDS = 15  # whose delay is measured: the median counts
MEANWHILE = 0.01  # seconds that their sender computes: longer than a scheduler lets a thread wait


class Rate(NamedTuple):
    """How fast messages follow each other on a line.

    Attributes:
        bytes_per_second: that a rank sends.
        credit: by how many seconds the first messages after a rest arrive ahead of that rate: a token bucket has such.
        buffered: by how many seconds a rank that only sends is done before they have arrived.
    """

    bytes_per_second: float
    credit: float
    buffered: float = 0.0


class Timed(NamedTuple):
    """What a message takes: `seconds`, and for how many of them cores of this rank are `busy` with it, not a GPU's."""

    seconds: float
    busy: float


def time_collective(
    axis: Axis,
    op: str,
    num_bytes: int,
    device: torch.device,
    seconds: float,
    *,
    blocks: int = BLOCKS,
    rest: float = 0.0,
) -> Timed:
    """Return what a collective of a tensor takes, all ranks starting it again and again for `seconds`.

    Before each they compute for `rest` seconds, which do not count.
    """
    send = _sender(axis, op, num_bytes, device)
    count = lambda once: max(axis.exchange(max(1, min(MOST, int(seconds / once)))))
    return sorted(_blocks(send, device, count, axis.barrier, blocks, rest))[blocks // 2]


def time_link(
    axis: Axis, peer: int, num_bytes: int, seconds: float, *, blocks: int = OF_LINK, rest: float = 0.0
) -> Timed:
    """Return what a tensor takes from this rank to a peer, half of the way there and back; both call it.

    Before it is sent there they compute for `rest` seconds, which do not count.
    """
    x, first = torch.zeros(max(num_bytes // 4, 1), device=axis.device), axis.index < peer
    counts = torch.zeros(1, dtype=torch.int64, device=axis.device)

    def send() -> None:
        for sends in (first, not first):
            (axis.start_send(x, peer) if sends else axis.start_recv(x, peer)).wait()

    def count(once: float) -> int:
        counts.fill_(max(1, min(MOST, int(seconds / once))))
        (axis.start_send(counts, peer) if first else axis.start_recv(counts, peer)).wait()
        return int(counts)

    there_and_back = min(_blocks(send, axis.device, count, lambda: None, blocks, rest))
    return Timed(there_and_back.seconds / 2, there_and_back.busy / 2)


def time_line(axis: Axis, pair: tuple[int, ...], seconds: float) -> Rate:
    """Return the rate of what all ranks of an axis send each other, or of what the first of a pair of them sends.

    It is that of the slowest rank, in bursts of `seconds` each after a rest.
    """
    num_bytes, rates = LARGE * (axis.size - 1) // axis.size, list[Rate]()
    send, x = _sender(axis, "all_gather", LARGE, axis.device), torch.zeros(LARGE // 4, device=axis.device)
    if pair:
        num_bytes, source, to = LARGE, *pair
        send = lambda: axis.start_send(x, to).wait()
        if axis.index != source:
            send = lambda: axis.start_recv(x, source).wait() if axis.index == to else None
    for _ in range(BURSTS):
        time.sleep(REST)
        axis.barrier()
        arrivals, begin = list[float](), time.perf_counter()
        while not arrivals or max(axis.exchange(arrivals[-1])) < seconds:
            for _ in range(4):
                send()
                arrivals.append(time.perf_counter() - begin)
        times_of = axis.exchange(arrivals)
        rate = min(rate_of(times, num_bytes) for times in (times_of if not pair else [times_of[pair[1]]]))
        if pair:
            ahead = max(there - here for here, there in zip(times_of[pair[0]], times_of[pair[1]], strict=True))
            rate = rate._replace(buffered=max(0.0, ahead))
        rates.append(rate)
    return Rate(*(statistics.median(values) for values in zip(*rates, strict=True)))


def time_delay(axis: Axis) -> float:
    """Return by how many seconds a message is late whose sender computes meanwhile on the core that would send it.

    The first rank of an axis sends to the last; all call this.
    """
    x, to, late = torch.zeros(1, device=axis.device), axis.size - 1, dict[float, list[float]]()
    for meanwhile in (0.0, MEANWHILE) * SENDS:
        axis.barrier()
        begin = time.perf_counter()
        if axis.index == 0:
            work = axis.start_send(x, to)
            _compute(meanwhile)
            work.wait()
        elif axis.index == to:
            axis.start_recv(x, 0).wait()
            late.setdefault(meanwhile, []).append(time.perf_counter() - begin)
    waits, computes = axis.exchange([*late.values()])[to]
    return max(0.0, statistics.median(computes) - statistics.median(waits))


def _compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def rate_of(arrivals: Sequence[float], num_bytes: int) -> Rate:
    """Return the rate of messages of so many bytes that arrived at these times, in seconds after the first's start.

    The second half of them says the rate, the first how far ahead of it a line is that has rested. Where one comes
    late, as on a machine that did something else, those that follow catch up: so the furthest ahead counts.

    >>> rate_of([0.0, 0.0, 0.0, 1.0, 2.0, 3.0], 100)
    Rate(bytes_per_second=100.0, credit=3.0, buffered=0.0)
    """
    half = len(arrivals) // 2
    each = max((arrivals[-1] - arrivals[half - 1]) / (len(arrivals) - half), 1e-9)
    ahead = max(i * each - arrival for i, arrival in enumerate(arrivals[:half], start=1))
    return Rate(num_bytes / each, max(0.0, ahead))


def _blocks(
    send: Callable[[], Any],
    device: torch.device,
    count: Callable[[float], int],
    meet: Callable[[], None],
    blocks: int,
    rest: float,
) -> list[Timed]:
    """Return what a message takes in each of some blocks; `count` says of how many, by the seconds of one."""

    def run(times: int) -> Timed:
        meet()
        seconds = busy = 0.0
        for _ in range(times if rest else 1):
            _compute(rest)  # a core that sleeps is late
            begin, used = time.perf_counter(), time.process_time()
            for _ in range(1 if rest else times):
                send()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # in which the host spins
            seconds += time.perf_counter() - begin
            busy += time.process_time() - used if device.type == "cpu" else 0.0
        return Timed(seconds / times, busy / times)

    run(2)
    times = count(max(run(2).seconds, 1e-6))
    return [run(times) for _ in range(blocks)]


def _sender(axis: Axis, op: str, num_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Return what sends one such message and waits for it; of float32, which gloo adds as fast as it can."""
    whole = torch.zeros(max(num_bytes // 4, axis.size) // axis.size * axis.size, device=device)
    part = torch.zeros(len(whole) // axis.size, device=device)
    sends: Mapping[str, Callable[[], Any]] = {
        "all_reduce": lambda: axis.start_all_reduce(whole).wait(),
        "all_gather": lambda: axis.start_all_gather(whole, part).wait(),
        "reduce_scatter": lambda: axis.start_reduce_scatter(part, whole).wait(),
        "all_to_all": lambda: axis.start_all_to_all(torch.empty_like(whole), whole).wait(),
        "broadcast": lambda: axis.start_broadcast(whole, 0).wait(),
        "barrier": axis.barrier,
        "exchange": lambda: axis.exchange(0),
    }
    return sends[op]
