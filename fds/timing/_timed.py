"""`timed`: how long the parts of a call take, of every so many calls; `trace`: all of one on all ranks, as a file."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.collectives import Axis, mesh, worlds
from fds.collectives.traffic import counting
from fds.errors import FdsError, checked_call, expanded, is_a, is_number
from fds.state import State
from fds.step import Step
from fds.step.ranges import Clock, clocked
from fds.timing.clocks import (
    OTHER,
    PARTS,
    WAIT,
    InTurn,
    LayerClock,
    Layers,
    Waits,
    check_every,
    intervals,
    milliseconds,
)

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # ranks of one machine share its clock


@attrs.frozen
class LayerTimes:
    """Milliseconds of a layer in a call, without those of the layers inside it and without waits and other parts.

    Attributes:
        forward: of all microbatches.
        recomputed: running it again in backward.
        backward: from the first node of its graph that backward comes to, to the first of another layer.
    """

    forward: float = 0.0
    recomputed: float = 0.0
    backward: float = 0.0


@attrs.frozen
class Times:
    """Times of a call, in milliseconds.

    Attributes:
        parts: by name, each without the parts inside it, so that they add up to `call_ms`: `gather` (and casting),
            `forward`, `backward`, `reduce` (and packing), `optimizer`, `offload` (waiting for what lives on the host or
            a disk), `wait` (for messages, and so for other ranks), `other`.
        call_ms: of the whole call.
        layers: name of a layer -> its share of `forward` and `backward`, in the order in which they ran; empty unless
            `fds.timed` was asked for them.
    """

    parts: Mapping[str, float]
    layers: Mapping[str, LayerTimes] = attrs.field(factory=dict)

    @property
    def call_ms(self) -> float:
        """Milliseconds of the whole call."""
        return sum(self.parts.values())

    @property
    def busy_ms(self) -> float:
        """Milliseconds of the call without those in which it waits for messages."""
        return self.call_ms - self.parts[WAIT]

    def __str__(self) -> str:
        """Return a line: `time (ms) | call: 61.20 | forward: 20.11 | ...`, and below it a table of layers."""
        times = {"call": self.call_ms, **self.parts}
        lines = [" | ".join(["time (ms)", *(f"{name}: {ms:.2f}" for name, ms in times.items())])]
        width = max(map(len, ("layer", *self.layers)))
        lines += [f"{'layer':<{width}} {'forward':>10} {'recomputed':>10} {'backward':>10}"] if self.layers else []
        for name, x in self.layers.items():
            lines.append(f"{name:<{width}} {x.forward:>10.2f} {x.recomputed:>10.2f} {x.backward:>10.2f}")
        return "\n".join(lines)


@attrs.frozen
class PartSpread:
    """Milliseconds of a part over ranks: the least, the mean and the most, and which rank takes most."""

    least: float
    mean: float
    most: float
    slowest: int


@attrs.frozen
class RankTimes:
    """The times of a call on all ranks; `str()` of it is a table.

    Attributes:
        ranks: the times of each; None where none have arrived.
    """

    ranks: tuple[Times | None, ...]

    @property
    def parts(self) -> dict[str, PartSpread]:
        """Part -> its times over the ranks; `busy` is the call without `wait`, `call` the call; empty without times."""
        by_rank = {rank: {"call": x.call_ms, "busy": x.busy_ms, **x.parts} for rank, x in enumerate(self.ranks) if x}
        spreads: dict[str, PartSpread] = {}
        for part in next(iter(by_rank.values()), {}):
            times = {rank: parts[part] for rank, parts in by_rank.items()}
            slowest = max(times, key=times.__getitem__)
            spreads[part] = PartSpread(min(times.values()), sum(times.values()) / len(times), times[slowest], slowest)
        return spreads

    @property
    def straggler(self) -> int | None:
        """The rank that is busy longest, for which the others wait; None without times."""
        return self.parts["busy"].slowest if self.parts else None

    def __str__(self) -> str:
        rows = [f"{'time (ms)':<10} {'least':>10} {'mean':>10} {'most':>10}  slowest rank"]
        for part, x in self.parts.items():
            rows.append(f"{part:<10} {x.least:>10.2f} {x.mean:>10.2f} {x.most:>10.2f}  {x.slowest}")
        return "\n".join(rows)


def times_of(clock: Clock) -> Times:
    """Return the times of a call that has ended, from its clock."""
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    layers: dict[str, LayerTimes] = {}
    layer, is_reversed = "", False
    borders = clock.borders if isinstance(clock, LayerClock) else {}
    for i, (part, at, until) in enumerate(intervals(clock.marks)):
        layer, is_reversed = borders.get(i, (layer, is_reversed))
        ms = milliseconds(at, until)
        spent[part] += ms
        if layer and part in ("forward", "backward"):
            phase = "backward" if is_reversed else "forward" if part == "forward" else "recomputed"
            before = layers.get(layer, LayerTimes())
            layers[layer] = attrs.evolve(before, **{phase: getattr(before, phase) + ms})
    return Times(spent, layers)


class Timed(InTurn):
    """What `fds.timed` returns: call it around each call of the step, and read `metrics()`."""

    _usage = "timed", "with timed(state):"

    def __init__(
        self,
        every: int | None,
        amounts: Mapping[str, float],
        peak_flops: float | None,
        layers: bool | tuple[str, ...] = False,
    ):
        self.every, self._amounts, self._peak_flops, self._layers = every, amounts, peak_flops, layers
        self._last: Times | None = None
        self._waiting: list[Clock] = []

    def __repr__(self) -> str:
        turn = "no call" if self.every is None else f"every={self.every}"
        amounts = [f"{name}={amount:g}" for name, amount in self._amounts.items()]
        return f"timed({', '.join([turn, *amounts])})"

    @contextlib.contextmanager
    def _watch(self, device: torch.device, number: int) -> Iterator[None]:
        clock, layers = Clock(device), None
        if self._layers is not False:
            clock = LayerClock(device)
            layers = Layers(clock=clock, patterns=None if self._layers is True else self._layers)
        with counting(Waits()), clocked(clock), clock.range(OTHER), layers or contextlib.nullcontext():
            yield
        self._waiting.append(clock)
        if layers is not None and worlds.current().size == 1:  # another rank may have other layers
            layers.check()

    @property
    def last(self) -> Times | None:
        """The times of the last call that was timed and whose times have arrived; None before."""
        while self._waiting and is_over(self._waiting[0].marks[-1][1]):
            self._last = times_of(self._waiting.pop(0))
        return self._last

    def metrics(self) -> dict[str, float]:
        """Return the last times, and speeds, as metrics for a monitor; empty before the first have arrived.

        Nothing is waited for: on a GPU the times of a call are there a call later. Until the next have arrived they are
        returned again.

        `elapsed_time_ms_forward`, `..._backward` (with `reduce` and `wait`), `..._backward_inner` (without),
        `..._backward_allreduce` (`reduce` and `wait`) and `..._step` (the optimizer) are DeepSpeed's; then there are
        `..._gather`, `..._offload`, `..._wait`, `..._other` and `..._call`, and `samples_per_s`, `tokens_per_s`,
        `flops_per_s` and `mfu` where `fds.timed` was given these amounts. A layer has `layer_time_ms_NAME_forward`,
        `..._recomputed` and `..._backward`.
        """
        if (last := self.last) is None:
            return {}
        parts, seconds = last.parts, last.call_ms / 1e3
        sending = parts["reduce"] + parts[WAIT]
        times = {
            "forward": parts["forward"],
            "backward": parts["backward"] + sending,
            "backward_inner": parts["backward"],
            "backward_allreduce": sending,
            "step": parts["optimizer"],
            "gather": parts["gather"],
            "offload": parts["offload"],
            WAIT: parts[WAIT],
            OTHER: parts[OTHER],
            "call": last.call_ms,
        }
        speeds = {f"{what}_per_s": amount / seconds for what, amount in self._amounts.items()}
        if self._peak_flops is not None:
            speeds["mfu"] = speeds["flops_per_s"] / self._peak_flops
        layers = {
            f"layer_time_ms_{name}_{phase}": ms
            for name, x in last.layers.items()
            for phase, ms in attrs.asdict(x).items()
        }
        return {f"elapsed_time_ms_{name}": ms for name, ms in times.items()} | layers | speeds

    def of_ranks(self) -> RankTimes:
        """Return the last times of every rank: all of them call this, after the same calls of the step.

        Those of layers are not sent.
        """
        last = self.last
        of_ranks = mesh(ranks=-1)["ranks"].exchange(None if last is None else dict(last.parts), "times")
        return RankTimes(tuple(None if parts is None else Times(parts) for parts in of_ranks))


def is_over(moment: object) -> bool:
    """Return whether a mark of a clock has come: a GPU may not be there yet."""
    return isinstance(moment, float) or moment.query()  # pyright: ignore[reportAttributeAccessIssue]  (an event)


@checked_call
def timed(
    *,
    every: int | None = 1,
    layers: bool | Sequence[str] = False,
    samples: int | None = None,
    tokens: int | None = None,
    flops: float | None = None,
    peak_flops: float | None = None,
) -> Timed:
    """Return a timer of the parts of a step, which changes no bit of it and waits for no GPU.

        timed = fds.timed(every=10, samples=512)
        for batch in loader:
            with timed(state):
                state, metrics = step(state, batch)
            monitor(state, {**metrics, **timed.metrics()})

    The times are this rank's, those of a GPU by its own events. `timed.last` has them as a record, a line when printed.

    Args:
        every: calls from one that is timed to the next; None times none.
        layers: whether `timed.last.layers` has the times of every layer of `Layers` and of the modules that a
            `functional` module calls; or patterns of names, as those of `fds.profile`, of modules at any depth. Each is
            without the layers inside it. Plain functions, and what is compiled or replayed, are no layers; a
            criterion that is a module is one, under the name of its class.
        samples: of a call, of all ranks together, for `samples_per_s`.
        tokens: of a call, of all ranks together, for `tokens_per_s`.
        flops: of the model in a call, forward and backward, of all ranks together, for `flops_per_s`.
        peak_flops: of all devices together, a second, for `mfu`, the share of it that the model's flops are;
            `fds.timing.peak_flops(dtype)` measures that of a device.

    Raises `FdsError` for numbers that are none, for a peak without `flops`, and for `layers` that are no patterns;
    after a call that is timed for a pattern that nothing matches, but where several ranks run, each with its layers.
    """
    check_every(every, "timed")
    amounts = {"samples": samples, "tokens": tokens, "flops": flops}
    for name, amount in {**amounts, "peak_flops": peak_flops}.items():
        if amount is not None and not (is_number(amount) and 0 < amount < float("inf")):
            raise FdsError("not an amount", where=f"timed, {name}", got=repr(amount), want="a number above 0, or None")
    if peak_flops is not None and flops is None:
        raise FdsError("a share of a peak needs flops", where="timed, peak_flops", want="flops= as well")
    if not isinstance(layers, bool):
        if isinstance(layers, str) or not isinstance(layers, Sequence) or not all(isinstance(x, str) for x in layers):
            raise FdsError("not names of layers", where="timed, layers", got=repr(layers), want='True, or ["blocks.*"]')
        layers = tuple(layers)
    return Timed(every, {name: amount for name, amount in amounts.items() if amount is not None}, peak_flops, layers)


@checked_call
def trace(step: Step, state: State, batch: Any, path: str | Path) -> tuple[State, dict[str, Tensor]]:
    """Call a step, and write what each rank did when; return what the step returns.

    All ranks call it, with their batches, and the first writes the file: a process for each rank, with the parts of the
    step, in a pipeline each with its stage and microbatch, and inside them the waits for messages, each with its
    operation, shape and axis. Clocks of several machines are aligned by barriers, to about as much as one takes. The
    second call of a step is a better one to trace than the first, which makes buffers and plans.

    Raises `FdsError`, on all ranks and before the step runs, for arguments of another kind and a file that cannot be
    written; and what the step raises.
    """
    for value, kind, name in ((step, Step, "step"), (state, State, "state")):
        if not is_a(value, kind):
            want = "fds.trace(step, state, batch, path)"
            raise FdsError(f"not a {name}", where="trace", got=type(value).__name__, want=want)
    axis, problem = mesh(ranks=-1)["ranks"], ""
    if axis.index == 0:
        try:
            Path(expanded(path)).parent.mkdir(parents=True, exist_ok=True)
            Path(expanded(path)).open("a").close()
        except (OSError, TypeError) as error:
            problem = str(error)
    problem = axis.exchange(problem, "the file of a trace")[0]
    if problem:
        raise FdsError("the trace cannot be written", where=f"trace, {path}", got=problem)
    ahead, clock = _measure_ahead(axis), Clock(state.step.device)
    _synchronize(clock.device)
    start = (time.perf_counter() - ahead) * 1e3
    with counting(Waits()), clocked(clock), clock.range("step"):
        result = step(state, batch)
    _synchronize(clock.device)
    slices, running = [], list[tuple[str, float]]()  # of every range its name, start and length, in milliseconds
    for name, moment in clock.marks:
        now = milliseconds(clock.marks[0][1], moment)
        if name:
            running.append((name, now))
        else:
            begun, at = running.pop()
            slices.append([begun, start + at, now - at])
    ranks = axis.exchange(slices, "trace")
    if axis.index == 0:
        Path(expanded(path)).write_text(json.dumps({"traceEvents": _events(ranks), "displayTimeUnit": "ms"}))
    return result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure_ahead(axis: Axis) -> float:
    """Return by how many seconds this rank's clock is ahead of the first rank's; 0 on the same machine."""
    machines = axis.exchange(_BOOT.read_text() if _BOOT.exists() else "", "machines")
    ahead: list[float] = []
    for _ in range(9 if len({*machines}) > 1 else 0):
        axis.barrier()
        now = time.perf_counter()
        ahead.append(now - axis.exchange(now, "clocks")[0])
    return sorted(ahead)[len(ahead) // 2] if ahead and machines[axis.index] != machines[0] else 0.0


def _events(ranks: list[list[tuple[str, float, float]]]) -> list[dict[str, Any]]:
    """Return the events of Chrome's format: a process for each rank; time 0 is when the first begins."""
    first = min(at for rank in ranks for _, at, _ in rank)
    named = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in range(len(ranks))
    ]
    return named + [
        {"name": name, "cat": name.split("/")[0], "ph": "X", "pid": rank, "tid": 0,
         "ts": (at - first) * 1e3, "dur": ms * 1e3}
        for rank, slices in enumerate(ranks)
        for name, at, ms in sorted(slices, key=lambda slice: (slice[1], -slice[2]))
    ]  # fmt: skip


def peak_flops(dtype: torch.dtype = torch.float32, *, device: Any = "cpu") -> float:
    """Measure the floating-point operations a second of one device, in products of square matrices: the best of five.

    On a CPU by as many threads as torch has now, in 0.1 s or so; 16-bit products may take ten times as long. A GPU is
    waited for. What it has no products for, such as integers, is refused.

        timed = fds.timed(flops=flops, peak_flops=num_ranks * fds.timing.peak_flops(torch.bfloat16, device="cuda"))

    Raises `FdsError` for what is not a floating-point dtype and not a device that is there.
    """
    if not is_a(dtype, torch.dtype) or not dtype.is_floating_point:
        raise FdsError("not a dtype of a step", where="dtype", got=repr(dtype)[:80], want="torch.bfloat16, or another")
    try:
        where = torch.device(device)
        n = 8192 if where.type == "cuda" else 1024
        x, times = torch.full((n, n), 1 / n, dtype=dtype, device=where), []
        for _ in range(6):  # the first warms up
            _synchronize(x.device)
            start = time.perf_counter()
            torch.mm(x, x)
            _synchronize(x.device)
            times.append(time.perf_counter() - start)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise FdsError(
            "there are no products of matrices of this dtype on this device",
            where=f"peak_flops, {device!r}"[:80],
            got=str(error)[:200],
            want='torch.float32 on "cpu", or another',
        ) from error
    return 2 * n**3 / min(times)
