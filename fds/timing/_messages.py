"""`messages`: every message of a call of a step, its bytes and times, beside what was predicted."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from fds.collectives import Axis, mesh, worlds
from fds.collectives.links import Collective, Work, bytes_sent
from fds.collectives.traffic import MessageKind, Traffic, counting
from fds.errors import FdsError, checked_call, is_a, nearest
from fds.step import Description
from fds.step.ranges import Clock
from fds.timing.clocks import InTurn, WatchedWork, check_every, milliseconds
from fds.timing.message_table import MessageRow, MessageTable, RankWaits, Spread


@attrs.frozen
class Message:
    """One message, as this rank saw it.

    Attributes:
        kind: what it was for, the operation, the axis and the size.
        group: the ranks of the axis.
        bytes_sent: by this rank.
        caller: the line that asked for it, with `debug`.
        latency_ms: from start to arrival; None where it was captured, or not waited for.
        waited_ms: that this rank stood waiting for it.
    """

    kind: MessageKind
    group: tuple[int, ...]
    bytes_sent: int
    caller: str
    latency_ms: float | None
    waited_ms: float | None

    def __str__(self) -> str:
        kind, size = self.kind, f"{self.kind.num_bytes:,} bytes" if self.kind.num_bytes else "texts"
        times = "no times" if self.waited_ms is None else f"{self.latency_ms:.3f} ms, {self.waited_ms:.3f} waited"
        text = f"{kind.what or 'other'}: {kind.op} of {size} on {kind.axis} ({kind.ranks} ranks): {times}"
        return text + (f", asked for by {self.caller}" if self.caller else "")


@attrs.define(eq=False)
class Running:
    """A message that was started, and the moments of it so far: seconds, or events of a GPU."""

    collective: Collective
    axis: Axis
    caller: str
    started: Any
    waited: Any = None
    ended: Any = None

    def has_arrived(self) -> bool:
        """Return whether the times can be read without waiting for a GPU."""
        return not isinstance(self.ended, torch.cuda.Event) or self.ended.query()

    def message(self) -> Message:
        """Return what came of it."""
        collective, axis = self.collective, self.axis
        kind, sent = MessageKind.of(collective, axis.size), bytes_sent(collective, axis.size, axis.index)
        if self.started is None or self.ended is None:
            return Message(kind, axis.ranks, sent, self.caller, None, None)
        times = milliseconds(self.started, self.ended), milliseconds(self.waited, self.ended)
        return Message(kind, axis.ranks, sent, self.caller, *times)


class Log(Traffic):
    """Note when each message of a call starts, is waited for, and has arrived."""

    def __init__(self, device: torch.device, ops: frozenset[str], *, debug: bool):
        super().__init__()
        self.clock, self.ops, self.debug = Clock(device), ops, debug
        self.messages: list[Running] = []
        self._about: dict[int, Running] = {}  # by the collective, between `add` and `watched`

    def add(self, collective: Collective, axis: Axis) -> None:
        """Note that a collective is about to start."""
        if collective.op in self.ops:
            caller = _find_caller() if self.debug else ""
            self._about[id(collective)] = Running(collective, axis, caller, self.now(collective))

    def watched(self, collective: Collective, work: Work) -> Work:
        """Return work whose `wait` is noted."""
        running = self._about.pop(id(collective), None)
        if running is None:
            return work
        self.messages.append(running)
        return WatchedWork(work, lambda: self._waiting(running))

    @contextlib.contextmanager
    def _waiting(self, running: Running) -> Iterator[None]:
        begun = self.now(running.collective)
        yield
        if running.waited is None:  # the first wait counts
            running.waited, running.ended = begun, self.now(running.collective)

    def now(self, collective: Collective) -> Any:
        """Return this moment, on the device that waits for the collective."""
        return self.clock.now() if collective.on_gpu else time.perf_counter()


_CARRIERS = ("fds.collectives", "fds.timing", "fds.step.sharding.transport", "torch.")


def _find_caller() -> str:
    """Return the line outside of collectives and transports that asked for a message, `module:line function`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_CARRIERS):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_lineno} {frame.f_code.co_name}"


_NAMES = "all_gather reduce_scatter all_reduce all_to_all broadcast send recv barrier exchange"
OPERATIONS = (*_NAMES.split(),)
_LAST = 100  # messages of a kind whose waits are kept, to be compared between ranks


class Messages(InTurn):
    """What `fds.messages` returns: call it around each call of the step, and print it."""

    _usage = "messages", "with messages(state):"

    def __init__(self, every: int | None, ops: frozenset[str], *, verbose: bool, debug: bool):
        self.every, self.ops, self.verbose, self.debug = every, ops, verbose, debug
        self._calls, self._rows = 0, dict[MessageKind, MessageRow]()
        self._waits: dict[tuple[MessageKind, tuple[int, ...]], deque[float]] = {}  # by kind and ranks of the axis
        self._last: tuple[Message, ...] = ()
        self._waiting: list[tuple[int, Log]] = []

    @contextlib.contextmanager
    def _watch(self, device: torch.device, number: int) -> Iterator[None]:
        log = Log(device, self.ops, debug=self.debug)
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
        return MessageTable(tuple(self._rows.values()), self._calls)

    def summary(self, description: Description | None = None) -> MessageTable:
        """Return the table with the waits of all ranks compared; all ranks call it.

        Args:
            description: `step.describe(state)`, for what was predicted beside what was measured.

        Raises `FdsError` for anything else than a description.
        """
        table = self.table
        if description is not None:
            table = table.beside(description)
            table = attrs.evolve(table, rows=tuple(row for row in table.rows if row.kind.op in self.ops))
        waits = [[*attrs.astuple(kind), list(group), list(times)] for (kind, group), times in self._waits.items()]
        return _compare(table, mesh(ranks=-1)["ranks"].exchange(waits, "messages"))

    def metrics(self) -> dict[str, float]:
        """Return what the last call sent and waited for as metrics for a monitor; empty before the first has arrived.

        `messages`, `messages_bytes_sent` and `messages_waited_ms`, and the same of each operation,
        `messages_all_gather` and so on. Nothing is waited for: on a GPU they are there a call later.
        """
        metrics: dict[str, float] = {}
        for message in self.last:
            amounts = {"": 1, "_bytes_sent": message.bytes_sent, "_waited_ms": message.waited_ms or 0.0}
            for name in ("messages", f"messages_{message.kind.op}"):
                for unit, amount in amounts.items():
                    metrics[name + unit] = metrics.get(name + unit, 0) + amount
        return metrics

    def __str__(self) -> str:
        """Return the table of this rank's messages."""
        return str(self.table)

    def _read(self) -> None:
        """Take over the calls whose times have arrived."""
        while self._waiting and all(running.has_arrived() for running in self._waiting[0][1].messages):
            number, log = self._waiting.pop(0)
            self._last, self._calls = tuple(running.message() for running in log.messages), self._calls + 1
            for message in self._last:
                self._rows[message.kind] = _add(self._rows.get(message.kind, MessageRow(message.kind)), message)
                if message.waited_ms is not None:
                    waits = self._waits.setdefault((message.kind, message.group), deque(maxlen=_LAST))
                    waits.append(message.waited_ms)
            if self.verbose and worlds.current().rank == 0:
                print(*(f"call {number}: {message}" for message in self._last), sep="\n")


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
    check_every(every, "messages")
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


def _add(row: MessageRow, message: Message) -> MessageRow:
    """Return a row with one more message."""
    callers = dict.fromkeys(filter(None, (*row.callers, message.caller)))
    count, sent = row.count + 1, row.bytes_sent + message.bytes_sent
    row = attrs.evolve(row, count=count, bytes_sent=sent, callers=tuple(callers))
    if message.latency_ms is None or message.waited_ms is None:
        return row
    return attrs.evolve(
        row,
        timed=row.timed + 1,
        latency_ms=row.latency_ms + message.latency_ms,
        waited_ms=row.waited_ms + message.waited_ms,
        shortest_ms=min(row.shortest_ms, message.latency_ms) if row.timed else message.latency_ms,
        longest_ms=max(row.longest_ms, message.latency_ms),
    )


def _compare(table: MessageTable, ranks: Sequence[Any]) -> MessageTable:
    """Return a table with what ranks waited for others: in each message longer than the one that came last.

    What is sent from one rank to another has no others, and a rank waits for its peer as long as it waits.
    """
    # of each rank its waits by kind and by ranks of the axis
    waits = [{(MessageKind(*kind), tuple(group)): times for *kind, group, times in theirs} for theirs in ranks]
    for_others, spreads = [0.0] * len(ranks), dict[MessageKind, list[float]]()
    for kind, group in dict.fromkeys(key for theirs in waits for key in theirs):
        by_rank = {rank: times for rank, theirs in enumerate(waits) if (times := theirs.get((kind, group)))}
        least = 0.0
        if kind.op not in ("send", "recv"):
            if {*by_rank} != {*group} or len({*map(len, by_rank.values())}) > 1:
                continue  # they did not watch the same calls
            least = sum(map(min, *by_rank.values()))
        for rank, times in by_rank.items():
            late = sum(times) - least
            for_others[rank] += late
            spreads.setdefault(kind, []).append(late / len(times))
    spread = {kind: Spread.of(times) for kind, times in spreads.items()}
    rows = tuple(attrs.evolve(row, for_others=spread.get(row.kind)) for row in table.rows)
    sums = ((rank, sum(map(sum, theirs.values()))) for rank, theirs in enumerate(waits))
    return attrs.evolve(table, rows=rows, ranks=tuple(RankWaits(rank, ms, for_others[rank]) for rank, ms in sums))
