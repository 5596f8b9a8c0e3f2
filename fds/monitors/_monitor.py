"""`monitor`: the metrics of a run, written to sinks: to wherever people look at them."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import attrs

from fds.collectives import worlds
from fds.display.readings import Reading, begin
from fds.errors import FdsError, checked_call, did_you_mean, expanded, is_a, is_int, is_number
from fds.state import State


class Event(NamedTuple):
    """A number of a run: its tag, its value, and where on the x axis it belongs, mostly samples or calls."""

    tag: str
    value: float
    x: float


class Sink(Protocol):
    """Something that takes events: any object with this method.

    It may also have `every`, so that it takes the metrics of every so many calls (1 without it), and `close()`, which
    is called once at the end. A run that was resumed begins again behind its save: what another process gave to its
    sinks from the first `x` on comes a second time.
    """

    def write(self, events: Sequence[Event]) -> None:
        """Take events, all with the same `x`."""
        ...


def check_every(every: object, where: str) -> int:
    """Return a number of calls. Raises `FdsError` for any other value."""
    if not is_int(every, 1):
        raise FdsError("not a number of calls", where=f"{where}, every", got=repr(every), want="1 or more")
    return every


def check_path(path: object, where: str) -> str:
    """Return a path as a text. Raises `FdsError` for what is none."""
    text = path.__fspath__() if hasattr(path, "__fspath__") else path  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(text, str) or not text:
        raise FdsError("not a path", where=where, got=repr(path), want='"runs/one"')
    return expanded(text)


def make_directory(path: str | Path, where: str) -> Path:
    """Make a directory, on the first rank, which alone writes. Raises `FdsError` where nothing can be written there."""
    directory = Path(path)
    if worlds.current().rank == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            want = "a directory that this user may write"
            raise FdsError("nothing can be written there", where=where, got=str(error), want=want) from error
    return directory


def check_texts(where: str, **texts: object) -> dict[str, Any]:
    """Return arguments that are texts or None. Raises `FdsError` for others."""
    for name, text in texts.items():
        if not isinstance(text, str | None):
            raise FdsError("not a text", where=f"{where}, {name}", got=repr(text)[:80], want="a text or None")
    return texts


def check_mode(mode: object, modes: Sequence[str], where: str) -> None:
    """Raise `FdsError` for another mode than these, or None."""
    if mode is not None and mode not in modes:
        raise FdsError("no such mode", where=f"{where}, mode", got=repr(mode), want=", ".join(modes))


def require(package: str, extra: str, where: str) -> None:
    """Raise `FdsError` if a package is not installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise FdsError(f"it needs {package}", where=where, got="not installed", hint=f"pip install 'fds[{extra}]'")


_DEEPSPEEDS = {"loss": "train_loss"}


@attrs.define(eq=False)
class _Guarded:
    """A sink that is left out, with a warning, from its first error on."""

    sink: Sink
    every: int
    failed: bool = False

    def call(self, method: str, *args: Any) -> None:
        if self.failed or not hasattr(self.sink, method):  # not every sink can be closed
            return
        try:
            getattr(self.sink, method)(*args)
        except Exception as error:  # whatever it is, the run goes on
            self.failed = True
            warnings.warn(
                f"the monitor {self.sink!r} failed and is left out from now on: {type(error).__name__}: {error}",
                stacklevel=2,
            )


@attrs.frozen(eq=False)
class _Row:
    """Metrics of a call, on their way to the host, and who takes them."""

    x: float
    reading: Reading
    sinks: Sequence[_Guarded]


@attrs.define(eq=False)
class _Queue:
    """Rows that wait to be written, in the order of calls."""

    tag: Callable[[str], str]
    sinks: Sequence[_Guarded]
    waiting: deque[_Row] = attrs.field(factory=deque)

    def write(self, *, wait: bool = False) -> None:
        """Write what has arrived; all, if it may be waited for."""
        while self.waiting and (wait or self.waiting[0].reading.has_arrived):
            row = self.waiting.popleft()
            [numbers] = row.reading.numbers()
            events = [Event(self.tag(name), number + 0, row.x) for name, number in numbers.items()]  # True becomes 1
            for sink in row.sinks if events else ():
                sink.call("write", events)

    def end(self) -> None:
        self.write(wait=True)
        for sink in self.sinks:
            sink.call("close")


@attrs.define
class _SameState:
    """A sink that is told of the first call that was not skipped whether its state and its metrics belong together."""

    settled: bool = False

    def write(self, events: Sequence[Event]) -> None:
        of_state, of_metrics, skipped = (event.value for event in events)
        if self.settled or skipped:
            return
        self.settled = True
        if of_state != of_metrics:
            warnings.warn(
                f"monitor(state, metrics): the metrics are of update {of_metrics:g}, and the state is after "
                f"{of_state:g}: rows are written a call early; pass the state that the step returned with them",
                stacklevel=2,
            )


class Monitor:
    """What `fds.monitor` returns: call it after each step, and close it at the end, or use it in a `with` block.

    Its methods are called on every rank, and write on the first alone.
    """

    def __init__(self, queue: _Queue, x: Callable[[int], float], names: Sequence[str] | None):
        self._queue, self._x, self._names = queue, x, names
        self._same, self._missing = _SameState(), () if names is None else tuple(names)
        self._end = weakref.finalize(self, queue.end)  # also at the end of the program

    def __repr__(self) -> str:
        sinks = ", ".join(repr(guarded.sink) for guarded in self._queue.sinks)
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
        calls = self._check(state, metrics)
        missing, self._missing = [name for name in self._missing if name not in metrics], ()
        if missing:
            nearest = did_you_mean(missing[0], metrics)
            warnings.warn(f"monitor(names=): the first metrics have no {', '.join(missing)}; {nearest}", stacklevel=2)
        if "step" in metrics and self._queue.sinks and not self._same.settled:
            both = {"of_state": state.step, "of_metrics": metrics["step"], "skipped": metrics.get("skipped", False)}
            self._queue.waiting.append(_Row(0.0, begin([both]), [_Guarded(self._same, 1)]))
        due = [sink for sink in self._queue.sinks if calls % sink.every == 0]
        chosen = [name for name in metrics if name != "step"] if self._names is None else self._names
        self._add(calls, {name: metrics[name] for name in chosen if name in metrics}, due)

    def note(self, state: State, values: Mapping[str, Any]) -> None:
        """Write other numbers, such as `{"eval_loss": ...}`, to every sink, whatever its `every` and the names are."""
        self._add(self._check(state, values), values, self._queue.sinks)

    def close(self) -> None:
        """Wait for what is on its way, write it, and close the sinks; a second time nothing happens."""
        self._end()

    def _check(self, state: State, metrics: Mapping[str, Any]) -> int:
        if not self._end.alive:
            raise FdsError("the monitor is closed", where="monitor(state, metrics)", want="a call before close()")
        if not is_a(state, State):
            raise FdsError("not a state", where="monitor", got=type(state).__name__, want="monitor(state, metrics)")
        if not is_a(metrics, Mapping):
            raise FdsError("no metrics", where="monitor", got=type(metrics).__name__, want="a dict of numbers by name")
        return int(state.calls)

    def _add(self, calls: int, values: Mapping[str, Any], sinks: Sequence[_Guarded]) -> None:
        if sinks:
            self._queue.waiting.append(_Row(self._x(calls), begin([values]), sinks))
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
            raise FdsError("not a sink", where="monitor", got=repr(sink)[:80], want=want, hint=_guess_meaning(sink))
        if not is_int(getattr(sink, "every", 1), 1):
            raise FdsError("not a number of calls", where=f"{sink!r}.every", got=repr(sink.every), want="1 or more")  # pyright: ignore[reportAttributeAccessIssue]
    if batch_size is not None and not is_int(batch_size, 1):
        raise FdsError("not a number of samples", where="monitor, batch_size", got=repr(batch_size), want="1 or more")
    if x is not None and batch_size is not None:
        raise FdsError("two x axes", where="monitor", got="x and batch_size", want="one of them")
    if x is not None and not is_number(_try(x, 1)):
        raise FdsError("not an x axis", where="monitor, x", got=repr(x)[:80], want="a function: calls -> number")
    listed = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(it, str) for it in names)
    if names is not None and not listed:
        raise FdsError("not names of metrics", where="monitor, names", got=repr(names)[:80], want='["loss", "lr"]')
    if tags is not None and not isinstance(_try(tags, "loss"), str):
        raise FdsError("not tags", where="monitor, tags", got=repr(tags)[:80], want="a function: name -> tag")
    group = "Steps" if batch_size is None else "Samples"
    tag = (lambda name: f"Train/{group}/{_DEEPSPEEDS.get(name, name)}") if tags is None else tags
    here = [_Guarded(sink, getattr(sink, "every", 1)) for sink in sinks if worlds.current().rank == 0]
    at = (lambda calls: calls * (batch_size or 1)) if x is None else x
    return Monitor(_Queue(tag, here), at, names)


def _guess_meaning(wrong: object) -> str:
    match wrong:
        case str() | PathLike():
            return f"fds.monitors.CSV({str(wrong)!r})"
        case type():
            return f"{wrong.__name__}(...): it is to be called"
        case Sequence():
            return "monitor(*sinks)"
        case _:
            return ""


def _try(function: Any, argument: Any) -> Any:  # None where it cannot be called with it
    try:
        return function(argument)
    except Exception:
        return None
