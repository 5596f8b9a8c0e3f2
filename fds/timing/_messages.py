"""`messages`: every message of a call of a step, its bytes and times, beside what was predicted."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from fds.collectives import mesh, worlds
from fds.collectives.traffic import MessageKind, counting
from fds.errors import FdsError, checked_call, is_a, is_int, nearest
from fds.state import State
from fds.step import Description
from fds.timing.message_log import Log, Message
from fds.timing.message_table import MessageRow, MessageTable, RankWaits, Spread

OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "barrier",
    "exchange",
)
_LAST = 100  # messages of a kind whose waits are kept, to be compared between ranks


@attrs.define(eq=False)
class Sums:
    """The running sums of a kind of message."""

    kind: MessageKind
    count: int = 0
    bytes_sent: int = 0
    timed: int = 0
    latency_ms: float = 0.0
    waited_ms: float = 0.0
    shortest_ms: float = math.inf
    longest_ms: float = 0.0
    callers: dict[str, None] = attrs.field(factory=dict)
    waits: dict[tuple[int, ...], deque[float]] = attrs.field(factory=dict)  # the last ones, by the ranks of the axis

    def add(self, one: Message) -> None:
        """Add a message."""
        self.count += 1
        self.bytes_sent += one.bytes_sent
        if one.caller:
            self.callers[one.caller] = None
        if one.latency_ms is not None and one.waited_ms is not None:
            self.timed += 1
            self.latency_ms += one.latency_ms
            self.waited_ms += one.waited_ms
            self.shortest_ms = min(self.shortest_ms, one.latency_ms)
            self.longest_ms = max(self.longest_ms, one.latency_ms)
            self.waits.setdefault(one.group, deque(maxlen=_LAST)).append(one.waited_ms)

    def row(self) -> MessageRow:
        """Return them as a row of a table."""
        shortest = self.shortest_ms if self.timed else 0.0
        times = self.latency_ms, self.waited_ms, shortest, self.longest_ms
        return MessageRow(self.kind, self.count, self.bytes_sent, self.timed, *times, tuple(self.callers))


class Messages:
    """What `fds.messages` returns: call it around each call of the step, and print it."""

    def __init__(self, every: int | None, ops: frozenset[str], *, verbose: bool, debug: bool):
        self.every, self.ops, self.verbose, self.debug = every, ops, verbose, debug
        self._calls, self._sums = 0, dict[MessageKind, Sums]()
        self._last: tuple[Message, ...] = ()
        self._waiting: list[tuple[int, Log]] = []

    @contextlib.contextmanager
    def __call__(self, state: State) -> Iterator[None]:
        """Watch the messages of the call of the step in the block, if it is its turn: its number divides by `every`.

        `state` is what the step is given. Raises `FdsError` for anything else. A call that raises is not counted.
        """
        if not is_a(state, State):
            raise FdsError("not a state", where="messages", got=type(state).__name__, want="with messages(state):")
        number = int(state.calls) + 1
        if self.every is None or number % self.every:
            yield
            return
        log = Log(state.step.device, self.ops, debug=self.debug)
        with counting(log):
            yield
        self._waiting.append((number, log))
        self._read()

    @property
    def last(self) -> tuple[Message, ...]:
        """The messages of the last call that was watched and whose times have arrived, in the order of their starts."""
        self._read()
        return self._last

    @property
    def table(self) -> MessageTable:
        """This rank's messages by kind, over all calls that were watched."""
        self._read()
        return MessageTable(tuple(one.row() for one in self._sums.values()), self._calls)

    def summary(self, description: Description | None = None) -> MessageTable:
        """Return the table with the waits of all ranks compared; all ranks call it.

        Args:
            description: `step.describe(state)`, for what was predicted beside what was measured.

        Raises `FdsError` for anything else than a description.
        """
        table = self.table
        if description is not None:
            table = _only(table.beside(description), self.ops)
        own = [
            [*attrs.astuple(kind), list(group), list(waits)]
            for kind, sums in self._sums.items()
            for group, waits in sums.waits.items()
        ]
        everyone = mesh(ranks=-1)["ranks"]
        return _compared(table, everyone.exchange(own, "messages"))

    def metrics(self) -> dict[str, float]:
        """Return what the last call sent and waited for as metrics for a monitor; empty before the first has arrived.

        `messages`, `messages_bytes_sent` and `messages_waited_ms`, and the same of each operation,
        `messages_all_gather` and so on. Nothing is waited for: on a GPU they are there a call later.
        """
        found: dict[str, float] = {}
        for one in self.last:
            for name in ("messages", f"messages_{one.kind.op}"):
                amounts = {"": 1, "_bytes_sent": one.bytes_sent, "_waited_ms": one.waited_ms or 0.0}
                for unit, amount in amounts.items():
                    found[name + unit] = found.get(name + unit, 0) + amount
        return found

    def __str__(self) -> str:
        """Return the table of this rank's messages."""
        return str(self.table)

    def _read(self) -> None:
        """Take over the calls whose times have arrived."""
        while self._waiting and all(one.has_come() for one in self._waiting[0][1].messages):
            number, log = self._waiting.pop(0)
            self._last, self._calls = tuple(one.message() for one in log.messages), self._calls + 1
            for one in self._last:
                self._sums.setdefault(one.kind, Sums(one.kind)).add(one)
            if self.verbose and worlds.current().rank == 0:
                print(*(f"call {number}: {one}" for one in self._last), sep="\n")


@checked_call
def messages(
    *, every: int | None = 1, ops: Sequence[str] | None = None, verbose: bool = False, debug: bool = False
) -> Messages:
    """Return a log of the messages of a step, which changes no bit of it and waits for nothing that it does not.

        messages = fds.messages(every=10)
        for batch in loader:
            with messages(state):
                state, metrics = step(state, batch)
            monitor(state, {**metrics, **messages.metrics()})
        print(messages.summary(step.describe(state)))

    Args:
        every: calls from one that is watched to the next; None watches none.
        ops: the operations that are watched, such as `["all_reduce"]`; None for all.
        verbose: whether the first rank prints each message of a call that was watched.
        debug: whether the line that asked for each is found.

    Raises `FdsError` for anything else.
    """
    if every is not None and not is_int(every, 1):
        raise FdsError("not a number of calls", where="messages, every", got=repr(every), want="1 or more, or None")
    for name, flag in (("verbose", verbose), ("debug", debug)):
        if not isinstance(flag, bool):
            raise FdsError("not a switch", where=f"messages, {name}", got=repr(flag)[:80], want="True or False")
    if isinstance(ops, str) or not (ops is None or is_a(ops, Sequence)):
        raise FdsError("not operations", where="messages, ops", got=repr(ops)[:80], want='such as ["all_reduce"]')
    for op in ops or ():
        if op not in OPERATIONS:
            raise FdsError(
                "no such operation",
                where="messages, ops",
                got=repr(op)[:80],
                want=", ".join(OPERATIONS),
                hint=nearest(str(op), OPERATIONS),
            )
    return Messages(every, frozenset(OPERATIONS if ops is None else ops), verbose=verbose, debug=debug)


def _only(table: MessageTable, ops: frozenset[str]) -> MessageTable:
    return attrs.evolve(table, rows=tuple(row for row in table.rows if row.kind.op in ops))


def _compared(table: MessageTable, ranks: Sequence[Any]) -> MessageTable:
    """Return a table with what ranks waited for others: in each message longer than the one that came last.

    What is sent from one rank to another has no others, and a rank waits for its peer as long as it waits.
    """
    waits = [
        {(MessageKind(*kind), tuple(group)): times for *kind, group, times in theirs} for theirs in ranks
    ]  # by kind and ranks of the axis
    waited = [sum(map(sum, theirs.values())) for theirs in waits]
    others, spreads = [0.0] * len(ranks), dict[MessageKind, list[float]]()
    for kind, group in dict.fromkeys(key for theirs in waits for key in theirs):
        own = {rank: times for rank, theirs in enumerate(waits) if (times := theirs.get((kind, group)))}
        least = 0.0
        if kind.op not in ("send", "recv"):
            if {*own} != {*group} or len({*map(len, own.values())}) > 1:
                continue  # they did not watch the same calls
            least = sum(map(min, *own.values()))
        for rank, times in own.items():
            late = sum(times) - least
            others[rank] += late
            spreads.setdefault(kind, []).append(late / len(times))
    rows = [
        attrs.evolve(row, for_others=Spread.of(spreads[row.kind]) if row.kind in spreads else None)
        for row in table.rows
    ]
    return attrs.evolve(
        table,
        rows=tuple(rows),
        ranks=tuple(RankWaits(rank, a, b) for rank, (a, b) in enumerate(zip(waited, others, strict=True))),
    )
