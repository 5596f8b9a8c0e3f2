"""Messages of one kind as a row, and rows as a table: counts, bytes, latency, bandwidth, and what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from fds.collectives.traffic import MessageKind
from fds.errors import FdsError, is_a
from fds.step import Description

# What a link of a ring carries, by what is sent: so bandwidths of operations can be compared with that of the wire.
_BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


@attrs.frozen
class Spread:
    """A time over the ranks, in milliseconds."""

    min_ms: float
    mean_ms: float
    max_ms: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Return the spread of the times of all ranks."""
        return cls(min(times), sum(times) / len(times), max(times))


@attrs.frozen
class MessageRow:
    """The messages of one kind that this rank started, in one call or in several.

    Attributes:
        kind: what they have in common: `what`, `op`, `axis`, `ranks` and `num_bytes`.
        count: how many they are.
        bytes_sent: by this rank, in all of them.
        timed: how many of them were waited for, and so have times: all but those that are captured to be replayed.
        latency_ms: from start to arrival, in all of them; the arrival is known where the wait for it ends.
        waited_ms: that this rank stood waiting for them, and did nothing else.
        shortest_ms, longest_ms: the least and the greatest latency of one; 0 without times.
        callers: the lines that asked for them, with `debug`.
        predicted_count, predicted_bytes: of `count` and `bytes_sent`, where they are compared with a description; None
            for what it does not know.
        at_most: whether there may be fewer than predicted.
        buckets: which flat buckets they carry, where that is known.
        for_others: the part of a wait for one message in which another rank had not come yet, over the ranks; None
            before ranks are compared.
    """

    kind: MessageKind
    count: int = 0
    bytes_sent: int = 0
    timed: int = 0
    latency_ms: float = 0.0
    waited_ms: float = 0.0
    shortest_ms: float = 0.0
    longest_ms: float = 0.0
    callers: tuple[str, ...] = ()
    predicted_count: int | None = None
    predicted_bytes: int | None = None
    at_most: bool = False
    buckets: tuple[int, ...] = ()
    for_others: Spread | None = None

    @property
    def algorithm_gb_per_s(self) -> float | None:
        """The bytes of a tensor over the latency of its message, in 10^9 bytes a second; None without either."""
        if not self.latency_ms or not self.kind.num_bytes:
            return None
        return self.kind.num_bytes * self.timed / self.latency_ms / 1e6

    @property
    def bus_gb_per_s(self) -> float | None:
        """What each link of a ring would carry meanwhile.

        All_reduce 2 (n - 1) / n of the algorithm's, all_gather, reduce_scatter and all_to_all (n - 1) / n, as in
        nccl-tests; others all of it.
        """
        if (algorithm := self.algorithm_gb_per_s) is None:
            return None
        return algorithm * _BUS.get(self.kind.op, lambda n: 1)(self.kind.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON can hold it, the kind's fields among the others, with the bandwidths."""
        fields = attrs.asdict(self)
        bandwidths = {"algorithm_gb_per_s": self.algorithm_gb_per_s, "bus_gb_per_s": self.bus_gb_per_s}
        return {**fields.pop("kind"), **fields, **bandwidths}


@attrs.frozen
class RankWaits:
    """How long a rank waited for messages, in milliseconds, in the last 100 of each kind.

    Attributes:
        rank: which one.
        waited_ms: in all of these messages together.
        for_others_ms: the part of it in which another rank had not come yet. The rank for which the others wait has the
            least.
    """

    rank: int
    waited_ms: float
    for_others_ms: float

    def __str__(self) -> str:
        return f"rank {self.rank} waited {self.waited_ms:,.2f} ms, {self.for_others_ms:,.2f} of it for others"


@attrs.frozen
class MessageTable:
    """Messages by kind; `str()` of it is a table.

    Attributes:
        rows: by kind, in the order in which they first came, predicted ones that did not come last.
        calls: how many calls they are of.
        ranks: how long each rank waited, where ranks are compared.
    """

    rows: tuple[MessageRow, ...]
    calls: int
    ranks: tuple[RankWaits, ...] = ()

    @property
    def count(self) -> int:
        """How many messages this rank started."""
        return sum(row.count for row in self.rows)

    @property
    def bytes_sent(self) -> int:
        """How many bytes this rank sent."""
        return sum(row.bytes_sent for row in self.rows)

    @property
    def waited_ms(self) -> float:
        """How long this rank stood waiting, in milliseconds."""
        return sum(row.waited_ms for row in self.rows)

    def beside(self, description: Description) -> MessageTable:
        """Return the table with what `step.describe(state)` predicts for so many calls.

        Raises `FdsError` for anything else than a description.
        """
        if not is_a(description, Description):
            where, got = "messages, description", type(description).__name__
            raise FdsError("not a description", where=where, got=got, want="step.describe(state)")
        predictions = {messages.kind: messages for messages in description.messages}
        rows = {row.kind: row for row in self.rows}
        for kind, messages in predictions.items():
            rows[kind] = attrs.evolve(
                rows.get(kind, MessageRow(kind)),
                predicted_count=self.calls * messages.count,
                predicted_bytes=None if kind.op == "exchange" else self.calls * messages.bytes_sent,  # texts
                at_most=messages.at_most,
                buckets=messages.buckets,
            )
        return attrs.evolve(self, rows=tuple(rows.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON can hold it: `calls`, `rows` and `ranks`."""
        ranks = [attrs.asdict(rank) for rank in self.ranks]
        return {"calls": self.calls, "rows": [row.to_dict() for row in self.rows], "ranks": ranks}

    def __str__(self) -> str:
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        title = f"Messages of {calls}: {self.count:,}, {self.bytes_sent:,} bytes sent, {self.waited_ms:,.2f} ms waited"
        lines = [title, *(_lines(self.rows) if self.rows else [])]
        return "\n".join([*lines, *map(str, self.ranks)])


def _show_mean(total: float, row: MessageRow) -> str:
    return f"{total / row.timed:,.3f}" if row.timed else "-"


def _show_predicted(number: int | None, *, at_most: bool) -> str:
    return "" if number is None else f"{'<= ' * at_most}{number:,}"


def _spans(numbers: Sequence[int]) -> str:
    """Return numbers in few words.

    >>> _spans([0, 1, 2, 5])
    '0-2, 5'
    """
    spans: list[list[int]] = []
    for i in sorted(numbers):
        if spans and spans[-1][-1] + 1 == i:
            spans[-1].append(i)
        else:
            spans.append([i])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def _show_speed(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}"


def _wait_for_others(row: MessageRow, which: str) -> str:
    return "" if row.for_others is None else f"{getattr(row.for_others, which):,.3f}"


# heading, what stands there, and whether it stands there where all rows have nothing
_COLUMNS: Sequence[tuple[str, Callable[[MessageRow], str], bool]] = (
    ("for", lambda row: row.kind.what or "other", True),
    ("operation", lambda row: row.kind.op, True),
    ("axis", lambda row: f"{row.kind.axis} ({row.kind.ranks})", True),
    ("bytes", lambda row: f"{row.kind.num_bytes:,}" if row.kind.num_bytes else "text", True),
    ("count", lambda row: f"{row.count:,}", True),
    ("predicted", lambda row: _show_predicted(row.predicted_count, at_most=row.at_most), False),
    ("sent", lambda row: f"{row.bytes_sent:,}", True),
    ("predicted", lambda row: _show_predicted(row.predicted_bytes, at_most=row.at_most), False),
    ("ms each", lambda row: _show_mean(row.latency_ms, row), True),
    ("waited", lambda row: _show_mean(row.waited_ms, row), True),
    ("algbw", lambda row: _show_speed(row.algorithm_gb_per_s), True),
    ("busbw GB/s", lambda row: _show_speed(row.bus_gb_per_s), True),
    ("for others: min", lambda row: _wait_for_others(row, "min_ms"), False),
    ("mean", lambda row: _wait_for_others(row, "mean_ms"), False),
    ("max", lambda row: _wait_for_others(row, "max_ms"), False),
    ("buckets", lambda row: _spans(row.buckets), False),
    ("asked for by", lambda row: ", ".join(row.callers), False),
)
_LEFT = {"for", "operation", "axis", "buckets", "asked for by"}


def _lines(rows: Sequence[MessageRow]) -> list[str]:
    columns: list[list[str]] = []
    for name, cell, always in _COLUMNS:
        cells = [cell(row) for row in rows]
        if always or any(cells):
            width, side = max(map(len, (name, *cells))), "<" if name in _LEFT else ">"
            columns.append([f"{text:{side}{width}}" for text in (name, *cells)])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
