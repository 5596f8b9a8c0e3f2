"""The station `run` of a recorded step: the work of a call is recorded once for every kind of batch, and replayed."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import ComposeError
from fds.state import State
from fds.step.all_stations import Program, Stations
from fds.step.batch import Whole
from fds.step.checks.state_check import StateTensors
from fds.step.recorded import refusals
from fds.step.residency.contract import text_of

MOST_KINDS = 16  # of batches: each has a recording
# leaves of which a recording may hold what they are
_VALUES = (int, float, bool, str, bytes, complex, type(None), torch.dtype)
_PLAIN = (Tensor, torch.nn.Parameter)
_TENSOR = object()


@attrs.frozen(eq=False)
class Kind:
    """A batch taken apart: its tensors, and what must be equal for another one to be read from the same memory."""

    batch: Any
    key: Hashable
    tensors: list[Tensor]
    build: Callable[[Iterable[Tensor]], Any]

    @classmethod
    def of(cls, batch: Any, device: torch.device) -> Kind:
        """Take a batch apart. Raises `BatchError` for leaves other than dense tensors on the device, and values."""
        leaves, spec = tree.parts(batch)
        keys, tensors, parts = list[Hashable](), list[Tensor](), list[Any]()  # parts: `_TENSOR`, a `Kind` or a value
        for i, x in enumerate(leaves):
            part = x
            if isinstance(x, Whole):
                part = cls.of(x.value, device)
                keys.append(part.key)
                tensors += part.tensors
            elif type(x) in _PLAIN and x.layout is torch.strided and x.device == device:
                part = _TENSOR
                keys.append((x.shape, x.stride(), x.dtype, x.requires_grad))
                tensors.append(x)
            elif isinstance(x, _VALUES):
                keys.append((type(x), repr(x) if isinstance(x, float | complex) else x))  # -0.0, nan
            else:
                where = ".".join(filter(None, ("batch", list(tree.paths(batch))[i])))
                got = f"{type(x).__name__} on {x.device}, {x.layout}" if isinstance(x, Tensor) else type(x).__name__
                want = f"a dense torch.Tensor on {device}, a number, a string or None"
                raise refusals.BATCH_LEAF.error(got, where=where, want=want)

            parts.append(part)

        def build(tensors: Iterable[Tensor]) -> Any:
            rest = iter(tensors)
            whole: Callable[[Any], Any] = lambda part: Whole(part.build(rest)) if isinstance(part, Kind) else part
            return spec.unflatten([next(rest) if part is _TENSOR else whole(part) for part in parts])

        return cls(batch, (spec, *keys), tensors, build)

    def of_slots(self, resting: frozenset[str]) -> Kind:
        """Return the kind of this batch in calls in which these slots do not change."""
        return Kind(self.batch, (self.key, resting), self.tensors, self.build) if resting else self


# The work on batches of one kind: first run as if nothing were recorded, then recorded, then replayed.
Work = Callable[[Program, State, StateTensors, Kind], tuple[State, dict[str, Tensor]]]


@attrs.define(eq=False)
class Recordings(abc.ABC):
    """What a step has recorded on a device: a cache, without which every number is the same (compiled: to rounding)."""

    device: torch.device
    works: dict[tuple[Any, Hashable], Work] = attrs.field(init=False, factory=dict[tuple[Any, Hashable], Work])
    lock: Any = attrs.field(init=False, factory=threading.RLock)

    @abc.abstractmethod
    def may_record(self, state: State) -> bool:
        """Say whether this call may be recorded or replayed; if not, it is run."""

    @abc.abstractmethod
    def key(self, state: State, held: StateTensors, kind: Kind) -> tuple[Any, Hashable]:
        """Return the key of the work: where the state is, and what calls must have in common."""

    @abc.abstractmethod
    def new_work(self, place: Any, kind: Kind) -> Work:
        """Return work that has not been run, for the first half of a key."""

    @property
    def num_bytes(self) -> int:
        """The bytes held beside the state between calls."""
        return 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a step has recorded nothing


class Recorder(abc.ABC):
    """The station `run`: records the work of a call once for every kind of batch, and replays it.

    The first call on a kind of batch is run as if nothing were recorded, and what happens once happens there: kernels
    are compiled, checks that read values are made.
    """

    @abc.abstractmethod
    def refuse(self, step: Stations) -> None:
        """Raise `ComposeError` for a step whose work cannot be recorded, as far as its composition says so."""

    @abc.abstractmethod
    def open(self, device: torch.device) -> Recordings | None:
        """Return an empty cache; None for a device on which every call is run."""

    def __call__(
        self, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        """Return the next state and the metrics."""
        cache, device = program.runtime.captured, state.step.device
        if cache[0] is None or cache[0].device != device:
            cache[0] = self.open(device)
        recordings: Recordings | None = cache[0]
        if recordings is None or not recordings.may_record(state):
            return program.work(state, held, batch)
        with recordings.lock:
            kind = Kind.of(batch, device).of_slots(program.resting(state))
            key = recordings.key(state, held, kind)
            work = recordings.works.get(key)
            if work is None:
                if sum(place is key[0] for place, _ in recordings.works) == MOST_KINDS:
                    shapes = ", ".join(str(tuple(x.shape)) for x in tree.leaves(batch) if isinstance(x, Tensor))[:120]
                    got = f"shapes of number {MOST_KINDS + 1}: {shapes}"
                    raise refusals.KINDS.error(got, want=f"at most {MOST_KINDS}")
                work = recordings.new_work(key[0], kind)
            returned = work(program, state, held, kind)
            recordings.works[key] = work  # once it has run
            return returned


def refuse_first(what: str, faults: Iterable[tuple[str, str, str]]) -> None:
    """Raise `ComposeError` for the first fault (got, want, why) that a step has: whose `got` is not empty."""
    for got, want, why in faults:
        if got:
            raise ComposeError(what, where="station 'run'", got=got, want=want, hint=why)


def elsewhere(step: Stations, *, meeting: str) -> Iterator[tuple[str, str, str]]:
    """List what is off the device, and other ranks, which may not be met for the reason `meeting`."""
    residency, ranks = step.place.residency, step.everyone
    leaves = f"{', '.join(residency.kinds)} in {text_of(residency)}" if residency.kinds else ""
    yield leaves, "all leaves on the device", "the host reads and writes what lives elsewhere"
    yield "" if ranks is None else f"axis {ranks.name!r} of {ranks.size} ranks", "one rank", meeting
    for keeps in filter(None, (getattr(layer, "keeps", "") for layer in step.layer)):
        why = "the host keeps account of what waits for backward"
        yield f"checkpoint_activations({keeps})", "store='device', and nothing else", why
