"""`timed`: how long the parts of a call of a step take."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import attrs
import torch

from fds.collectives import mesh, worlds
from fds.collectives.traffic import counting
from fds.errors import FdsError, checked_call, is_a, is_int, is_number
from fds.state import State
from fds.step.ranges import Clock, clocked
from fds.timing.layers import SAME, LayerClock
from fds.timing.waits import WAIT, Waits

T = TypeVar("T")
OTHER = "other"  # what is in no range: measures, gradient maps, the host between kernels
PARTS = ("gather", "forward", "backward", "reduce", "optimizer", "offload", WAIT, OTHER)


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
        known = {rank: {"call": x.call_ms, "busy": x.busy_ms, **x.parts} for rank, x in enumerate(self.ranks) if x}
        found: dict[str, PartSpread] = {}
        for part in next(iter(known.values()), {}):
            times = {rank: parts[part] for rank, parts in known.items()}
            slowest = max(times, key=times.__getitem__)
            found[part] = PartSpread(min(times.values()), sum(times.values()) / len(times), times[slowest], slowest)
        return found

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


def intervals(marks: Sequence[tuple[str, T]]) -> Iterator[tuple[str, T, T]]:
    """Yield the part that is innermost between one mark and the next, and both."""
    inside: list[str] = []
    for (name, at), (_, until) in itertools.pairwise(marks):
        if name == SAME:
            pass
        elif name:
            inside.append(name.split("/")[0].removesuffix("_weight"))
        else:
            inside.pop()
        yield inside[-1], at, until


def milliseconds(start: object, end: object) -> float:
    """Return the time between two marks of a clock."""
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e3
    return start.elapsed_time(end)  # pyright: ignore[reportAttributeAccessIssue]  (both are events)


class Timed:
    """What `fds.timed` returns: call it around each call of the step, and read `metrics()`."""

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
    def __call__(self, state: State) -> Iterator[None]:
        """Time the call of the step in the block, if it is its turn: its number divides by `every`.

        `state` is what the step is given. Raises `FdsError` for anything else.
        """
        if not is_a(state, State):
            raise FdsError("not a state", where="timed", got=type(state).__name__, want="with timed(state):")
        if self.every is None or (int(state.calls) + 1) % self.every:
            yield
            return
        clock, watching = self._clock(state.step.device)
        with counting(Waits()), clocked(clock), clock.range(OTHER), watching:
            yield
        self._waiting.append(clock)
        if isinstance(clock, LayerClock) and worlds.current().size == 1:  # another rank may have other layers
            clock.check()

    def _clock(self, device: torch.device) -> tuple[Clock, contextlib.AbstractContextManager[None]]:
        """Return a clock, and what follows layers for it."""
        if self._layers is False:
            return Clock(device), contextlib.nullcontext()
        clock = LayerClock(device, patterns=None if self._layers is True else self._layers)
        return clock, clock.watching()

    @property
    def last(self) -> Times | None:
        """The times of the last call that was timed and whose times have arrived; None before."""
        while self._waiting and arrived(self._waiting[0].marks):
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
        found = mesh(ranks=-1)["ranks"].exchange(None if last is None else dict(last.parts), "times")
        return RankTimes(tuple(None if parts is None else Times(parts) for parts in found))


def arrived(marks: Sequence[tuple[str, object]]) -> bool:
    """Return whether a GPU has come to the last mark."""
    last = marks[-1][1]
    return isinstance(last, float) or last.query()  # pyright: ignore[reportAttributeAccessIssue]  (an event)


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
    if every is not None and not is_int(every, 1):
        raise FdsError("not a number of calls", where="timed, every", got=repr(every), want="1 or more, or None")
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
