"""`fds doctor --ranks`: what ranks that a launcher started have between them: latency and bandwidth of every link.

A link is slow beside the median of its kind, links within a machine or between machines. The links of a rank are slow
beside those between the others: of three ranks two links are one rank's. Pairs are measured one after another, so that
no two share a cable: first all neighbours, then ranks two apart, and so on until the time is over.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import torch

from fds.collectives import Axis, init_distributed, mesh
from fds.collectives.launch import launched
from fds.collectives.measuring import time_collective, time_link
from fds.command_line.doctor import Finding
from fds.errors import FdsError
from fds.timing import peak_flops

FAR = 2.0  # times slower than the median, from which on something is wrong
PAIR = 0.02  # seconds for one block of messages between two ranks
SMALL, LARGE = 1 << 16, 1 << 22  # bytes of the messages that measure bandwidth: the least and the most
SHOWN = 16  # ranks of which a matrix is shown
NODES = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")  # where launchers say which node this is


@attrs.frozen
class RankSpeed:
    """What a rank says of itself: its machine, its threads, and how many products of numbers it does in a second."""

    node: str
    threads: int
    flops: float


@attrs.frozen
class LinkSpeed:
    """What a message takes between two ranks, one way: seconds of a small one, and bytes a second of a large one."""

    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.latency * 1e6:,.0f} us, {_speed(self.bandwidth)}"


Pair = tuple[int, int]
KINDS = ("on one machine", "between machines")


@attrs.frozen
class Links:
    """What was measured of all ranks.

    Attributes:
        ranks: in their order.
        pairs: two ranks, the lower first -> the link between them.
        all_reduce: of all ranks together: latency, and bandwidth of the bus, 2 (n - 1) / n of the tensor's.
    """

    ranks: tuple[RankSpeed, ...]
    pairs: Mapping[Pair, LinkSpeed]
    all_reduce: LinkSpeed

    @property
    def num_pairs(self) -> int:
        """How many links there are, measured or not."""
        return len(self.ranks) * (len(self.ranks) - 1) // 2

    def kind(self, pair: Pair) -> str:
        """Return which links a link is compared with."""
        return KINDS[self.ranks[pair[0]].node != self.ranks[pair[1]].node]


def measure(limit: float) -> tuple[Links, bool]:
    """Let all ranks that were started measure their links for `limit` seconds; return whether this is the first too.

    Raises `FdsError` for a rank alone, and `RankError` naming ranks that do not come within the limit, or hang.
    """
    launch = launched(os.environ)
    if launch is None or launch.world_size == 1:
        raise FdsError(
            "one rank has no links",
            where="fds doctor --ranks",
            want="ranks that a launcher starts, which all run this",
            hint="torchrun --nproc-per-node 2 -m fds doctor --ranks; srun -N 2 fds doctor --ranks: docs/launching.md",
        )
    init_distributed(timeout=limit)
    end, axis = time.monotonic() + limit / 2, mesh(ranks=-1)["ranks"]
    axis.barrier()
    flops = peak_flops(device=axis.device.type)  # of all at once, as in training
    node = next((f", node {os.environ[name]}" for name in NODES if name in os.environ), "")
    rows = axis.exchange([socket.gethostname() + node, torch.get_num_threads(), flops])
    latency, num_bytes = time_collective(axis, "all_reduce", 4, axis.device, PAIR).seconds, SMALL
    trial = time_collective(axis, "all_reduce", num_bytes, axis.device, PAIR).seconds
    num_bytes = max(axis.exchange(_large(num_bytes, trial)))
    seconds = time_collective(axis, "all_reduce", num_bytes, axis.device, PAIR).seconds
    bus = 2 * (axis.size - 1) / axis.size * num_bytes / seconds
    pairs = _pairs(axis, end)
    return Links(tuple(RankSpeed(*row) for row in rows), pairs, LinkSpeed(latency, bus)), axis.index == 0


def _pairs(axis: Axis, end: float) -> dict[Pair, LinkSpeed]:
    """Measure one pair after another while there is time; return the links of all, on every rank."""
    mine: list[tuple[int, int, float, float]] = []
    for apart in range(1, axis.size // 2 + 1):
        for low in range(axis.size // 2 if 2 * apart == axis.size else axis.size):
            here, there = sorted((low, (low + apart) % axis.size))
            if axis.exchange(time.monotonic() > end)[0]:  # and all have come
                return _of_all(axis, mine)
            if axis.index == there:
                _link(axis, here)
            elif axis.index == here:
                link = _link(axis, there)
                mine.append((here, there, link.latency, link.bandwidth))
    return _of_all(axis, mine)


def _of_all(axis: Axis, mine: list[tuple[int, int, float, float]]) -> dict[Pair, LinkSpeed]:
    rows = sorted(tuple(row) for rows in axis.exchange(mine) for row in rows)
    return {(low, high): LinkSpeed(*speed) for low, high, *speed in rows}


def _link(axis: Axis, peer: int) -> LinkSpeed:
    latency = time_link(axis, peer, 4, PAIR).seconds
    first = time_link(axis, peer, SMALL, PAIR).seconds
    size = torch.tensor([_large(SMALL, first)], device=axis.device)  # the lower rank decides
    (axis.start_send(size, peer) if axis.index < peer else axis.start_recv(size, peer)).wait()
    num_bytes = int(size)
    return LinkSpeed(latency, num_bytes / time_link(axis, peer, num_bytes, PAIR).seconds)


def _large(num_bytes: int, seconds: float) -> int:
    """Return how many bytes to send where so many take so long: what takes two blocks.

    Less shows the buffers of a slow cable: by messages of 64 KiB one of 100 Mbit/s was twice as fast.
    """
    return max(SMALL, min(LARGE, int(num_bytes * 2 * PAIR / max(seconds, 1e-6)))) // 1024 * 1024


def findings(links: Links) -> Iterator[Finding]:
    """Find what is far off the median of its kind, a rank before its links."""
    yield from _of_ranks(links)
    total, values = links.num_pairs, attrs.asdict(links.all_reduce)
    all_reduce = f"{links.all_reduce.latency * 1e6:,.0f} us; bus {_speed(links.all_reduce.bandwidth)}"
    yield Finding("all-reduce", f"of {len(links.ranks)} ranks: {all_reduce}", values=values)
    kinds = {kind: {pair: link for pair, link in links.pairs.items() if links.kind(pair) == kind} for kind in KINDS}
    for kind, pairs in kinds.items():
        if pairs:
            usual = _usual(pairs.values())
            rows = [[*pair, link.latency, link.bandwidth] for pair, link in pairs.items()]
            values = {"latency_s": usual.latency, "bytes_per_s": usual.bandwidth, "links": rows}
            yield Finding("links", f"{_many(len(pairs))} {kind}: median {usual}", values=values)
    if len(links.pairs) < total:
        advice = "the time was over: --limit, in seconds, has more of them measured"
        yield Finding("links", f"{len(links.pairs)} of {total} measured", "note", advice)
    for kind, pairs in kinds.items():
        yield from _of_links(links, kind, pairs)


def _of_links(links: Links, kind: str, pairs: Mapping[Pair, LinkSpeed]) -> Iterator[Finding]:
    """Find ranks whose links of a kind are far slower than those between the others, then other links that are."""
    left = dict(pairs)
    for rank in range(len(links.ranks)):
        its = {pair: link for pair, link in pairs.items() if rank in pair}
        others = [link for pair, link in pairs.items() if rank not in pair]
        if len(its) > 1 and others and _is_far(usual := _usual(its.values()), beside := _usual(others)):
            text = f"its {len(its)} links {kind} have {usual}; those between the others {beside}"
            yield Finding(f"rank {rank}", f"on {links.ranks[rank].node}: {text}", "problem", _NETWORK)
            left = {pair: link for pair, link in left.items() if rank not in pair}
    if not left:
        return
    usual = _usual(left.values())
    for pair, link in left.items():
        if _is_far(link, usual):
            yield Finding(f"link {pair[0]}-{pair[1]}", f"{link}", "problem", f"the median of links {kind} is {usual}")


def _usual(links: Iterable[LinkSpeed]) -> LinkSpeed:
    """Return the median of links; of two the faster."""
    each = [*links]
    latency = statistics.median_low([link.latency for link in each])
    return LinkSpeed(latency, statistics.median_high([link.bandwidth for link in each]))


def _is_far(link: LinkSpeed, usual: LinkSpeed) -> bool:
    return link.bandwidth * FAR < usual.bandwidth or link.latency > 2 * FAR * usual.latency  # latency varies more


_NETWORK = "look at that machine's interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), cable and other jobs"


def _of_ranks(links: Links) -> Iterator[Finding]:
    median = statistics.median([rank.flops for rank in links.ranks])
    for i, rank in enumerate(links.ranks):
        text = f"{rank.node}: {rank.threads} thread{'s' * (rank.threads != 1)}, {rank.flops / 1e9:,.1f} GFLOP/s"
        if rank.flops * FAR < median:
            advice = f"the others have {median / 1e9:,.1f}: look for other work there, its clock, and OMP_NUM_THREADS"
            yield Finding(f"rank {i}", text, "problem", advice, attrs.asdict(rank))
        else:
            yield Finding(f"rank {i}", text, values=attrs.asdict(rank))


def table(links: Links) -> str:
    """Return a matrix of bandwidths, and one of latencies, of few ranks; nothing for many."""
    size = len(links.ranks)
    if size > SHOWN:
        return ""
    matrices = {
        "MB/s": lambda link: f"{link.bandwidth / 1e6:,.0f}",
        "latency (us)": lambda link: f"{link.latency * 1e6:,.0f}",
    }
    return "\n".join(_matrix(title, size, links.pairs, show) for title, show in matrices.items())


def _matrix(title: str, size: int, pairs: Mapping[Pair, LinkSpeed], show) -> str:
    cell = lambda i, j: "-" if i == j else show(pairs[low]) if (low := (min(i, j), max(i, j))) in pairs else "?"
    rows: Sequence[Sequence[str]] = [
        [title, *map(str, range(size))],
        *([f"rank {i}", *(cell(i, j) for j in range(size))] for i in range(size)),
    ]
    return "\n".join(f"{row[0]:<12}" + "".join(f"{text:>8}" for text in row[1:]) for row in rows)


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s"


def _many(n: int) -> str:
    return f"{n} link{'s' * (n != 1)}"
