"""What is held at the peak of a call of a step, in a real run or in one without arithmetic."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from fds import tree
from fds.collectives.links import ALIKE, Collective, Exchange, Work, dry
from fds.collectives.simulation import performing
from fds.collectives.traffic import Traffic
from fds.errors import FdsError
from fds.profiling.counting import by_name
from fds.profiling.modules import Watching, tensors_of
from fds.state import State
from fds.step import Step
from fds.step.all_stations import AtOnce
from fds.step.residency.contract import is_held

aten: Any = torch.ops.aten
# what the host reads is computed: counters, keys, flags, and what is made of those
_MOST_COMPUTED = 16  # elements of the arguments
_MOST_FILLED = 2**16  # elements of results, which then are ones: sums that are compared, and what is divided by
_SECRET_VIEWS = {aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten._unsafe_view.default}
_UNKNOWN = {aten.mkldnn_rnn_layer.default}  # of nn.LSTM: of what it keeps for backward oneDNN alone knows the size
_MOVES = {torch.Tag.data_dependent_output, torch.Tag.inplace_view}


class DryRun(TorchDispatchMode):
    """Run operators on large tensors without arithmetic: results have memory, and in it anything.

    Raises what `FakeTensorMode` raises for results whose shape depends on values; `FdsError` for operators that keep
    memory of which nothing is known, and for those that communicate past fds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shapes = FakeTensorMode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        if func in _UNKNOWN or func.namespace == "c10d":
            raise FdsError(
                f"{func} cannot be run dry", want="operators whose memory is known from shapes, and collectives of fds"
            )
        if any(type(x) not in (Tensor, Parameter) for x in arguments):
            return NotImplemented  # such as a parameter that is gathered on use, which asks again with its values
        if func.is_view or func in _SECRET_VIEWS or _MOVES & {*func.tags}:  # no arithmetic, or what the host waits for
            return func(*args, **kwargs)
        computed = all(x.numel() <= _MOST_COMPUTED for x in arguments)
        if func._schema.is_mutable and all(result.alias_info is not None for result in func._schema.returns):
            return func(*args, **kwargs) if computed else _find_written(func, args, kwargs)
        with self._shapes:
            like_args, like_kwargs = tree.map(self._to_fake, (args, kwargs))
            outs = func(*like_args, **like_kwargs)
        if computed and all(x.numel() <= _MOST_FILLED for x in tree.leaves(outs) if isinstance(x, Tensor)):
            return func(*args, **kwargs)
        return tree.map(_allocate, outs)

    def _to_fake(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(self._shapes, like, x.device)


def _find_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an operator would write over, and return."""
    values, schema = by_name(func, args, kwargs), func._schema
    aliases = {frozenset(x.alias_info.before_set): values.get(x.name) for x in schema.arguments if x.alias_info}
    outs = [aliases[frozenset(result.alias_info.before_set)] for result in schema.returns]
    return None if not outs else outs[0] if len(outs) == 1 else tuple(outs)


def _allocate(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.fill_(1) if x.numel() <= _MOST_FILLED else made


Kind = tuple[str, str]  # a part of the state or a phase of a step, and the module that made it


class Storage(NamedTuple):
    """A storage that is alive."""

    ref: weakref.ref[Any]
    num_bytes: int
    kind: Kind
    number: int  # of this storage among all that were held

    @property
    def is_there(self) -> bool:
        """Whether it still has its memory, which `resize_` gives back while no operator runs."""
        storage = self.ref()
        return storage is not None and storage.nbytes() == self.num_bytes


class Holding(Watching):
    """Follow the storages of tensors that operators are given and return, and remember what there was at the peak.

    Attributes:
        num_bytes: kind -> bytes now.
        most: bytes at the peak since `begin`.
        at_peak: kind -> bytes then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[Kind] = Counter()
        self.most, self.at_peak, self.now = 0, Counter[Kind](), 0
        self._storages: dict[int, Storage] = {}  # by address: some lie over others
        self._count, self._count_at_peak = 0, 0  # of storages that were held

    def begin(self) -> None:
        """Take what is held now for the peak."""
        self.most, self.at_peak, self._count_at_peak = self.now, Counter(self.num_bytes), self._count

    def at_peak_of(self, x: Tensor) -> Kind | None:
        """Return what a tensor that is alive counted as at the peak, None where it was not there."""
        storage = self._storages.get(x.untyped_storage().data_ptr())
        return None if storage is None or storage.number > self._count_at_peak else storage.kind

    def name(self, kind: Kind, tensors: Iterable[Any]) -> None:
        """Say of tensors what they are."""
        for x in tensors:
            if isinstance(x, Tensor) and _is_plain(x):
                self._drop(x.untyped_storage().data_ptr())
                self._hold(x, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if performing.get():
            return out
        kind = None
        for x in filter(_is_plain, tensors_of((args, kwargs, out))):
            if not self._holds(x.untyped_storage().data_ptr()):
                module, phase = kind = kind or self.place()
                self._hold(x, (phase, module))
        if self.now > self.most:
            for address in [*self._storages]:
                self._holds(address)
            if self.now > self.most:
                self.begin()
        return out

    def _holds(self, address: int) -> bool:
        """Return whether something is held there; let go of what was, and has given its memory back."""
        storage = self._storages.get(address)
        if storage is not None and not storage.is_there:
            self._drop(address)
            return False
        return storage is not None

    def _hold(self, x: Tensor, kind: Kind) -> None:
        storage = x.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        self._count += 1
        self._storages[address] = Storage(weakref.ref(storage, lambda _: self._drop(address)), size, kind, self._count)
        self.num_bytes[kind] += size
        self.now += size

    def _drop(self, address: int) -> None:
        if (storage := self._storages.pop(address, None)) is not None:
            self.num_bytes[storage.kind] -= storage.num_bytes
            self.now -= storage.num_bytes


def _is_plain(x: Tensor) -> bool:  # with memory of its own, unlike a parameter that is gathered on use
    return type(x) in (Tensor, Parameter) and x.layout is torch.strided and not x.is_meta


STATE, NEXT, BATCH = "state", "next state", "batch"
_AWAY = "elsewhere"


@attrs.define(eq=False)
class Exchanges(Traffic):
    """The exchanges of this rank, in order, kept while calls run: what a dry run is told."""

    exchanges: list[Exchange] = attrs.field(factory=list)

    def watched(self, collective: Collective, work: Work) -> Work:
        """Keep an exchange, which has its replies once it was waited for."""
        if isinstance(work, Exchange):
            self.exchanges.append(work)
        return work


def of_second_call(step: Step, state: State, batch: Any) -> Counter[Kind]:
    """Return kind -> bytes on the device at the peak of the second of two calls; what they return is dropped.

    The first makes the memory that every later call finds. A state that would be given up is copied.
    """
    plain, device = attrs.evolve(step, run=AtOnce()), state.step.device
    holding, donates = Holding(), plain.place.donate
    if donates:
        state = tree.map(torch.clone, state)  # outside of the mode, which would hold the user's own against the step
    with torch.compiler.set_stance("force_eager"), holding.modules, holding:
        _name_leaves(holding, plain, state, STATE)
        holding.name((BATCH, ""), tree.leaves(batch))
        new, _ = plain(state, batch)
        gc.collect()
        _name_leaves(holding, plain, new, STATE if donates else NEXT)
        if donates:
            state = new
        del new
        holding.begin()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        new, _ = plain(state, batch)
    peak = holding.at_peak
    for x, _, there in leaves_of(plain, new):
        if not there and (kind := holding.at_peak_of(x)):
            peak[kind] -= x.untyped_storage().nbytes()
    return Counter({kind: n for kind, n in peak.items() if n and kind[0] != _AWAY})


def of_dry_run(step: Step, state: State, batch: Any, exchanges: Iterable[Exchange] = ALIKE) -> int:
    """Return the bytes at the peak of a call on the CPU, found without arithmetic; nothing is written to.

    No rank waits for another, so that what fails on some alone holds no others up, and no disk is read or written:
    `exchanges` are those of `of_second_call`. Raises what torch does where a shape depends on values, and where an
    operator has no rule for shapes.
    """
    token = dry.set(iter(exchanges))  # of an iterator itself
    try:
        with DryRun():
            return sum(of_second_call(step, state, batch).values())
    finally:
        dry.reset(token)


def leaves_of(step: Step, state: State) -> Iterator[tuple[Tensor, bool, bool]]:
    """Yield the leaves of params, opt and slots; whether an update writes each, and whether it lives on the device."""
    structure, parts = step.structure_of(state.params)
    residency, trained = step.place.residency, {id(parts[i]) for i in structure.trained}
    after = {filler.slot for filler in step.followers}
    for part in ("params", "opt", "slots"):
        for path, x in tree.paths(getattr(state, part)).items():
            written = id(x) in trained if part == "params" else part == "opt" or path.partition(".")[0] in after
            leaf = step.resident(structure, f"{part}.{path}") if residency.kinds else None
            away = leaf is not None and is_held(residency, leaf, x.numel()) and residency.medium(leaf) != "device"
            yield x, written, not away


def _name_leaves(holding: Holding, step: Step, state: State, what: str) -> None:
    for x, written, there in leaves_of(step, state):
        holding.name((_AWAY if not there else what if written else STATE, ""), [x])
    holding.name((STATE, ""), tree.leaves(state.buffers))
