"""`monitor`: the metrics of a run, written to wherever people look at them."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Self

import attrs

from fds.collectives import worlds
from fds.display.readings import Reading, begin
from fds.errors import FdsError, checked_call, did_you_mean, is_a, is_int, is_number
from fds.monitors.sink import Event, Sink
from fds.state import State

_DEEPSPEEDS = {"loss": "train_loss"}


@attrs.define(eq=False)
class Guarded:
    """A sink that is left out, with a warning, from its first error on."""

    sink: Sink
    every: int
    failed: bool = False

    def write(self, events: Sequence[Event]) -> None:
        """Have the sink take events."""
        self._do(lambda: self.sink.write(events))

    def close(self) -> None:
        """Close the sink, if it can be."""
        self._do(getattr(self.sink, "close", lambda: None))

    def _do(self, what: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            what()
        except Exception as error:  # whatever it is, the run goes on
            self.failed = True
            warnings.warn(
                f"the monitor {self.sink!r} failed and is left out from now on: {type(error).__name__}: {error}",
                stacklevel=2,
            )


@attrs.frozen(eq=False)
class Waiting:
    """Metrics of a call, on their way to the host, and who takes them."""

    x: float
    reading: Reading
    sinks: Sequence[Guarded]


@attrs.define(eq=False)
class Queue:
    """What waits, in the order of calls."""

    tag: Callable[[str], str]
    sinks: Sequence[Guarded]
    waiting: deque[Waiting] = attrs.field(factory=deque)

    def write(self) -> None:
        """Write what has arrived; nothing is waited for."""
        while self.waiting and self.waiting[0].reading.arrived:
            self._write_next()

    def end(self) -> None:
        """Wait for the rest, write it, and close the sinks."""
        while self.waiting:
            self._write_next()
        for sink in self.sinks:
            sink.close()

    def _write_next(self) -> None:
        one = self.waiting.popleft()
        [numbers] = one.reading.numbers()
        events = [Event(self.tag(name), number + 0, one.x) for name, number in numbers.items()]  # True becomes 1
        if events:
            for sink in one.sinks:
                sink.write(events)


@attrs.define
class SameState:
    """A sink that is told of the first call that was not skipped whether its state and its metrics belong together."""

    settled: bool = False

    def write(self, events: Sequence[Event]) -> None:
        """Warn where the state counts other updates than the metrics."""
        held, counted, skipped = (event.value for event in events)
        if self.settled or skipped:
            return
        self.settled = True
        if held != counted:
            warnings.warn(
                f"monitor(state, metrics): the metrics are of update {counted:g}, and the state is after {held:g}: "
                "rows are written a call early; pass the state that the step returned with them",
                stacklevel=2,
            )


class Monitor:
    """What `fds.monitor` returns: call it after each step, and close it at the end, or use it in a `with` block.

    Its methods are called on every rank, and write on the first alone.
    """

    def __init__(self, queue: Queue, x: Callable[[int], float], names: Sequence[str] | None):
        self._queue, self._x, self._names = queue, x, names
        self._same, self._missing = SameState(), () if names is None else tuple(names)
        self._end = weakref.finalize(self, queue.end)  # also at the end of the program

    def __repr__(self) -> str:
        sinks = ", ".join(repr(one.sink) for one in self._queue.sinks)
        return f"monitor({sinks or 'nothing is written here'})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, state: State, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of the step that returned this state, to the sinks whose turn it is: `calls % every == 0`.

        Tensors of one element and numbers are written, and other metrics left out. Warns once of `names` that the
        first metrics have not, and of a state that is not the one that came with them. Raises `FdsError` for arguments
        of another kind, and after `close()`.
        """
        calls = self._checked(state, metrics)
        self._look(state, metrics)
        due = [sink for sink in self._queue.sinks if calls % sink.every == 0]
        chosen = [name for name in metrics if name != "step"] if self._names is None else self._names
        self._add(calls, {name: metrics[name] for name in chosen if name in metrics}, due)

    def note(self, state: State, values: Mapping[str, Any]) -> None:
        """Write other numbers, such as `{"eval_loss": ...}`, to every sink, whatever its `every` and the names are."""
        self._add(self._checked(state, values), values, self._queue.sinks)

    def close(self) -> None:
        """Wait for what is on its way, write it, and close the sinks; a second time nothing happens."""
        self._end()

    def _checked(self, state: State, metrics: Mapping[str, Any]) -> int:
        if not self._end.alive:
            raise FdsError("the monitor is closed", where="monitor(state, metrics)", want="a call before close()")
        if not is_a(state, State):
            raise FdsError("not a state", where="monitor", got=type(state).__name__, want="monitor(state, metrics)")
        if not is_a(metrics, Mapping):
            raise FdsError("no metrics", where="monitor", got=type(metrics).__name__, want="a dict of numbers by name")
        return int(state.calls)

    def _look(self, state: State, metrics: Mapping[str, Any]) -> None:
        """Warn of what is probably not meant."""
        missing, self._missing = [name for name in self._missing if name not in metrics], ()
        if missing:
            known = did_you_mean(missing[0], metrics)
            warnings.warn(f"monitor(names=): the first metrics have no {', '.join(missing)}; {known}", stacklevel=3)
        if "step" in metrics and self._queue.sinks and not self._same.settled:
            both = {"held": state.step, "counted": metrics["step"], "skipped": metrics.get("skipped", False)}
            self._queue.waiting.append(Waiting(0.0, begin([both]), [Guarded(self._same, 1)]))

    def _add(self, calls: int, values: Mapping[str, Any], sinks: Sequence[Guarded]) -> None:
        if sinks:
            self._queue.waiting.append(Waiting(self._x(calls), begin([values]), sinks))
        self._queue.write()


@checked_call
def monitor(
    *sinks: Sink,
    batch_size: int | None = None,
    x: Callable[[int], float] | None = None,
    names: Sequence[str] | None = None,
    tags: Callable[[str], str] | None = None,
) -> Monitor:
    """Return a monitor, which writes the metrics of a run to sinks: `fds.monitors.CSV`, `TensorBoard`, ...

        with fds.monitor(fds.monitors.CSV("runs/one"), fds.monitors.Console(every=50), batch_size=512) as monitor:
            for batch in loader.starting(state.calls):
                state, metrics = step(state, batch)
                monitor(state, metrics)

    It changes no number of the run and waits for no GPU: metrics are copied aside, and written when they have arrived,
    at the latest by `close()`. All ranks make it and call it; the first one writes. A sink that fails is left out with
    a warning, and the run goes on.

    Where an event belongs follows from `state.calls`, so a run that was resumed goes on where its state is: `CSV`,
    `JSONL` and `TensorBoard` leave out what was logged from there on before.

    Args:
        sinks: objects with a method `write(events)`; see `fds.monitors.Sink`.
        batch_size: samples of a call of the step, of all ranks together. `x` is then the number of samples so far, and
            the tags are DeepSpeed's, `Train/Samples/train_loss`; without it `x` is `state.calls`, and they are
            `Train/Steps/train_loss`.
        x: another axis: a function of `state.calls`, such as `lambda calls: calls * tokens_of_a_batch`.
        names: the metrics to write; None for all but `step`.
        tags: another name for each metric: a function such as `lambda name: f"gpt/{name}"`, or `str`, which keeps them.

    Raises `FdsError` for arguments of another kind.
    """
    for sink in sinks:
        if not callable(getattr(sink, "write", None)) or isinstance(sink, type):
            want = "an object with write(events)"
            raise FdsError("not a sink", where="monitor", got=repr(sink)[:80], want=want, hint=_meant(sink))
        if not is_int(getattr(sink, "every", 1), 1):
            raise FdsError("not a number of calls", where=f"{sink!r}.every", got=repr(sink.every), want="1 or more")  # pyright: ignore[reportAttributeAccessIssue]
    if batch_size is not None and not is_int(batch_size, 1):
        raise FdsError("not a number of samples", where="monitor, batch_size", got=repr(batch_size), want="1 or more")
    if x is not None and batch_size is not None:
        raise FdsError("two x axes", where="monitor", got="x and batch_size", want="one of them")
    if x is not None and not is_number(_tried(x, 1)):
        raise FdsError("not an x axis", where="monitor, x", got=repr(x)[:80], want="a function: calls -> number")
    listed = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(it, str) for it in names)
    if names is not None and not listed:
        raise FdsError("not names of metrics", where="monitor, names", got=repr(names)[:80], want='["loss", "lr"]')
    if tags is not None and not isinstance(_tried(tags, "loss"), str):
        raise FdsError("not tags", where="monitor, tags", got=repr(tags)[:80], want="a function: name -> tag")
    group = "Steps" if batch_size is None else "Samples"
    tag = (lambda name: f"Train/{group}/{_DEEPSPEEDS.get(name, name)}") if tags is None else tags
    here = [Guarded(sink, getattr(sink, "every", 1)) for sink in sinks if worlds.current().rank == 0]
    at = (lambda calls: calls * (batch_size or 1)) if x is None else x
    return Monitor(Queue(tag, here), at, names)


def _meant(wrong: object) -> str:
    """Return what may have been meant by something that is no sink, or nothing."""
    match wrong:
        case str() | PathLike():
            return f"fds.monitors.CSV({str(wrong)!r})"
        case type():
            return f"{wrong.__name__}(...): it is to be called"
        case Sequence():
            return "monitor(*sinks)"
        case _:
            return ""


def _tried(function: Any, argument: Any) -> Any:
    """Return what a function returns for an argument, or None where it cannot be called with it."""
    try:
        return function(argument)
    except Exception:
        return None
