"""What a step is, in words: station by station, the bytes that it holds, the parameters that its loss ignores."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import attrs
import torch

from fds import _html, tree
from fds.errors import DiskError, DiskFullError
from fds.loss import LayerMap
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.checks.agreement import same_composition
from fds.step.checks.state_check import StateTensors, usable
from fds.step.local_gradients import local_gradients
from fds.step.residency.contract import is_held
from fds.step.residency.in_chunks import InChunks
from fds.step.residency.lives import resident
from fds.step.sharding.footprint import PredictedMessages, held_bytes, predicted, sent_bytes
from fds.step.structure import Structure
from fds.step.update import Setup


@attrs.frozen
class Description:
    """A step in words; `str()` of it is a table.

    Attributes:
        stations: station -> what fills it, in program order, filled ones only.
        kernels: which run, and why: with a state the optimizer's and all others' on its device, else the rule.
        num_bytes: part -> bytes that this rank holds: those of the state between steps; within one also `gradients`,
            `buckets`, `whole`, `viewed` and `low` parameters, `chunks`, copies of what lives elsewhere, and `ahead`,
            what is updated in backward beside a state that is given up (see `fds.step.sharding.footprint`); `graphs`,
            what CUDA graphs hold for what lies between their inputs and outputs, and for batches; with a batch
            `stored`, the most that checkpointed layers keep elsewhere, in slices or in blocks at once. Empty without a
            state.
        places: place -> bytes of the state that live there between steps: "device", "host", "disk /nvme"; empty where
            all of it is on the device.
        lives: part -> the places of those that do not all live on the device: `params`, `opt`, `gradients`, `ahead`,
            `stored`, of `slots` averages.
        sent: station -> bytes that this rank sends in a step, where the loss uses every bucket once and ranks take
            one path; of `after`, which most steps do not, the mean.
        synchronized: the most bytes that this rank sends in one step to synchronize.
        buckets: whole bytes of each flat bucket, in the dtype of the masters; empty where nothing is sharded.
        frozen: names of parameters that are not trained.
        views: name of a parameter -> what views make of it with this state, of those that say so: "4 bits".
        unused: names of trained parameters that the loss did not use on the batch (of this rank): their gradient is
            zero.
        messages: those that this rank starts in a call, by kind, as `fds.messages` counts them: from the layout, and
            from what the calls so far have shown of the order of stage 3, of metrics, and of what goes between the
            stages of a pipeline. Not those of an optimizer, a gradient map, the loss, activations in slices or a
            transport of one's own.
        memory: slot -> bytes of it that this rank holds: all of these are in `num_bytes["slots"]`.
    """

    stations: dict[str, str]
    kernels: str
    num_bytes: dict[str, int] = tree.new(dict)
    lives: dict[str, str] = tree.new(dict)
    places: dict[str, int] = tree.new(dict)
    sent: dict[str, int] = tree.new(dict)
    frozen: tuple[str, ...] = ()
    views: dict[str, str] = tree.new(dict)
    unused: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()
    memory: dict[str, int] = tree.new(dict)
    messages: tuple[PredictedMessages, ...] = ()
    synchronized: int = 0

    def __str__(self) -> str:
        lines = [f"{name:<10} {text}" for name, text in self.stations.items() if name != "kernels"]
        lines += ["kernels    " + self.kernels.replace("\n", "\n" + " " * 11)]
        where = {name: f" in {place}" for name, place in self.lives.items()}
        lines += [f"{name:<10} {n:>16,} bytes{where.get(name, '')}" for name, n in self.num_bytes.items()]
        lines += [f"{name:<10} {n:>16,} bytes of the state" for name, n in self.places.items()]
        lines += [f"memory     {n:>16,} bytes in {slot}" for slot, n in self.memory.items()]
        lines += [f"{name:<10} {n:>16,} bytes sent a step" for name, n in self.sent.items()]
        lines += [f"{'':<10} {self.synchronized:>16,} bytes sent at once to synchronize"] if self.synchronized else []
        lines += [f"messages   {text}" for text in self._messages()]
        if self.buckets:
            least, most = f"{min(self.buckets):,}", f"{max(self.buckets):,}"
            sizes = most if least == most else f"{least} to {most}"
            lines += [f"layout     {len(self.buckets)} flat bucket{'s' * (len(self.buckets) > 1)} of {sizes} bytes"]
        lines += [f"view       {text}: {tree.named(names)}" for text, names in self._viewed().items()]
        lines += [f"frozen     {tree.named(self.frozen)}"] if self.frozen else []
        lines += [f"unused     {tree.named(self.unused)}: zero gradient"] if self.unused else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        stations = [(name, words) for name, words in self.stations.items() if name != "kernels"]
        stations += [("kernels", self.kernels)]
        where = {name: f"in {place}" for name, place in self.lives.items()}
        rows = [(name, f"{n:,}", "bytes", where.get(name, "")) for name, n in self.num_bytes.items()]
        rows += [(name, f"{n:,}", "bytes", "of the state") for name, n in self.places.items()]
        rows += [(f"slots.{slot}", f"{n:,}", "bytes", "of the slots") for slot, n in self.memory.items()]
        rows += [(name, f"{n:,}", "bytes", "sent a step") for name, n in self.sent.items()]
        rows += [("messages", text, "", "") for text in self._messages()]
        notes = [f"{text}: {tree.named(names)}" for text, names in self._viewed().items()]
        notes += [f"frozen: {tree.named(self.frozen)}"] if self.frozen else []
        notes += [f"unused, zero gradient: {tree.named(self.unused)}"] if self.unused else []
        notes += [f"{len(self.buckets)} flat buckets of {sum(self.buckets):,} bytes together"] if self.buckets else []
        parts = [_html.table(stations), _html.table(rows, right=(1,)) if rows else "", *map(_html.text, notes)]
        return _html.box("Step", *parts)

    def _viewed(self) -> dict[str, list[str]]:
        """Return what views make of parameters -> their names."""
        names: dict[str, list[str]] = {}
        for name, text in self.views.items():
            names.setdefault(text, []).append(name)
        return names

    def _messages(self) -> Iterator[str]:
        """Yield how many messages of all kinds a call starts, and what they are for; nothing where none is sent."""
        counts = Counter[str]()
        for messages in self.messages:
            counts[messages.kind.what or messages.kind.op] += messages.count
        if counts:
            most = "at most " * any(messages.at_most for messages in self.messages)
            yield f"{most}{counts.total():,} a call: " + ", ".join(f"{n:,} {what}" for what, n in counts.items())


def describe(step: Stations, state: State | None, batch: Any) -> Description:
    """Return the description of a step; see `Step.describe`."""
    stations: dict[str, str] = {}
    for station in attrs.fields(type(step)):
        value = getattr(step, station.name)
        if station.name != "eval_loss" and value not in (station.default, None, (), {}):
            stations[station.name] = _station(station.name, value)
            if station.name == "condition" and step.shard and not step.reduction.always_sums:
                stations["condition"] += "; in calls that do not sum gradients of each rank's own, by its norm"
        if station.name == "memory":  # what follows is not a station
            break
    kernels = stations.get("kernels", "torch's operators; on a GPU also kernels that passed there")
    if state is None and batch is None:
        return Description(stations, kernels)
    usable(state, "describe")
    assert state is not None and step.optimizer is not None
    structure, _ = step.held_by(state)
    trained = set(structure.trained_names)
    frozen = tuple(name for name in structure.names if name not in trained)
    unused, kept = ((), {}) if batch is None else _tried(step, structure, state, batch)
    from fds.kernels.choice import summary  # which a step that is not described does not load

    device = state.step.device
    dtypes = list(dict.fromkeys(leaf.dtype for leaf in structure.leaves.values() if leaf.trained)) or [torch.float32]
    kernels = f"{step.optimizer.runs(device, dtypes)}; others: {summary(device, dtypes)}"
    layout = structure.layout
    buckets = () if layout is None else tuple(b.numel * b.dtype.itemsize for b in layout.buckets)
    captured, places = step.runtime.captured[0], _places(step, structure, state)
    num_bytes, sums = held_bytes(step, structure, state), _sums(step, structure)
    if "ahead" in num_bytes:
        lives = step.lives(structure, state)
        sums["ahead"] = list(dict.fromkeys(compress(lives.media, lives.apart)))
    if captured is not None and captured.num_bytes:
        num_bytes["graphs"] = captured.num_bytes
    if stored := {place: n for place, n in kept.items() if n}:
        num_bytes["stored"], sums["stored"] = sum(stored.values()), list(stored)
    return Description(
        stations=stations,
        kernels=kernels,
        num_bytes=num_bytes,
        lives={part: ", ".join(words) for part, words in {**places, **sums}.items() if set(words) - {"device"}},
        places=_summed(places),
        sent=sent_bytes(step, structure),
        frozen=frozen,
        views=dict(_views(step, structure, state)),
        unused=unused,
        buckets=buckets,
        memory={name: tree.num_bytes(slot) for name, slot in state.slots.items()},
        messages=predicted(step, structure, state),
        synchronized=0 if step.synchronize is None else round(step.synchronize.bytes_sent(structure)[0]),
    )


def _views(step: Stations, structure: Structure, state: State) -> Iterator[tuple[str, str]]:
    """Yield the names of parameters, and what views that say so make of them."""
    views: list[Any] = [view for view in step.view if hasattr(view, "summary")]
    if not views or state.step.is_meta:  # a state without values, whose bytes are asked for
        return
    call, telling = step.call(state, training=False), [view.summary for view in views]
    for leaf in structure.leaves.values():
        if texts := [text for tell in telling if (text := tell(leaf, call))]:
            yield leaf.name, ", ".join(texts)


def explain(error: DiskError, step: Stations, state: State) -> None:
    """Note with an error of a disk what a donated state lost by it, and where a disk is full what a run needs in all.

    `state` is the one that the step was given, or one like that which it makes.
    """
    if state.token.spent_at is not None:
        error.add_note("the state was donated to this call, which has written over parts of it: load the last save")
    if isinstance(error, DiskFullError):
        structure, _ = step.structure_of(state.params)
        twice = "" if step.place.donate else ", twice unless steps donate it"
        places = _summed(_places(step, structure, state))
        needs = [f"{n:,} bytes in {place} for the state{twice}" for place, n in places.items() if place != "device"]
        for part, words in _sums(step, structure).items():
            needs.append(f"{held_bytes(step, structure, state)[part]:,} in {', '.join(words)} for sums of {part}")
        needs += [f"in {place} what layers keep, as describe(state, batch) says" for place, _ in _counting(step)[1]]
        error.add_note(f"in all a run needs {'; '.join(needs)}")


def _places(step: Stations, structure: Structure, state: State) -> dict[str, dict[str, int]]:
    """Return part of the state -> place -> bytes of its leaves there, where some live elsewhere."""
    residency, by_part = step.place.residency, dict[str, dict[str, int]]()
    for part in ("params", "opt", "buffers", "slots") if residency.kinds else ():
        by_place = by_part[part] = dict[str, int]()
        for path, x in tree.paths(getattr(state, part)).items():
            leaf = step.resident(structure, f"{part}.{path}")
            where = residency.medium(leaf) if leaf and is_held(residency, leaf, x.numel()) else "device"
            by_place[where] = by_place.get(where, 0) + x.nbytes
    return by_part


def _sums(step: Stations, structure: Structure) -> dict[str, list[str]]:
    """Return the places of the gradients' sums, where some live elsewhere."""
    residency, places = step.place.residency, dict[str, None]()
    for part in structure.trained if "gradients" in residency.kinds else ():
        leaf = resident(structure, "gradients", part)
        is_elsewhere = is_held(residency, leaf, structure.shapes[part].numel())
        places[residency.medium(leaf) if is_elsewhere else "device"] = None
    return {"gradients": list(places)} if places else {}


def _summed(places: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return place -> bytes there of all parts."""
    sums: dict[str, int] = {}
    for where, n in (pair for by_place in places.values() for pair in by_place.items()):
        sums[where] = sums.get(where, 0) + n
    return sums


def _station(name: str, value: Any) -> str:
    if name == "frozen":
        return tree.named(list(map(str, value)))
    if name == "memory":
        return ", ".join(map(str, value.values()))
    return ", ".join(map(_text, value)) if tree.is_sequence(value) else _text(value)


def _text(value: Any) -> str:
    text = value.__name__ if inspect.isfunction(value) else str(value)
    return type(value).__name__ if text == object.__repr__(value) else text


def _counting(step: Stations) -> tuple[Stations, list[tuple[str, Any]]]:
    """Return the step with layer maps that count what they keep elsewhere, and where that is, each with its tally.

    A map that keeps anything elsewhere has a method `counting`, which returns both.
    """
    layer, tallies = list[LayerMap](), list[tuple[str, Any]]()
    for map_ in step.layer:
        counting: Callable[[], tuple[LayerMap, dict[str, Any]]] | None = getattr(map_, "counting", None)
        map_, kept = (map_, {}) if counting is None else counting()
        layer.append(map_)
        tallies += kept.items()
    return attrs.evolve(step, layer=tuple(layer)) if tallies else step, tallies


def _tried(step: Stations, structure: Structure, state: State, batch: Any) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the parameters that the loss does not use on a batch, and place -> bytes that layers keep there."""
    same_composition(step)
    step, tallies = _counting(step)
    tensors = StateTensors(structure, tree.leaves(state.params), [], [])
    setup = attrs.evolve(Setup.of(step, state, tensors), scale=None, residency=step.place.residency)
    gradients = local_gradients(InChunks(step, setup), batch)
    unused = tuple(name for name, is_used in zip(structure.trained_names, gradients.used, strict=True) if not is_used)
    places: dict[str, int] = {}
    for place, tally in tallies:
        places[place] = places.get(place, 0) + tally.most
    return unused, places
