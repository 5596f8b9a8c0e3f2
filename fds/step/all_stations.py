"""`Stations`: the fields of a step, and what its calls, evaluations and descriptions derive from them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import loss as losses, random, tree
from fds.collectives import Axis
from fds.errors import ComposeError
from fds.optim import Optimizer
from fds.state import State
from fds.step.added import Adds
from fds.step.batch import Split, SplitBatch, cut, split_batch
from fds.step.call import Call
from fds.step.checks import state_check as check
from fds.step.checks.forms import is_around, is_encoding, writes_params
from fds.step.checks.state_check import StateTensors
from fds.step.drafts import Drafts, slots_at_rest
from fds.step.execution import Executor, InTurn, Microbatch
from fds.step.gradients import Gradients, Measure
from fds.step.memory import Memory
from fds.step.new_leaves import NewLeaves
from fds.step.residency.chunks import Piece, agreed_chunks, may_leave
from fds.step.residency.contract import Residency, Resident
from fds.step.residency.lives import NOWHERE, Lives, Masters, elsewhere, resident_at
from fds.step.sharding.gather import Gather
from fds.step.sharding.order import LearnedOrder, Order
from fds.step.sharding.reduce import Reduce, WhileWarm
from fds.step.sharding.shard import Shard, shard_of
from fds.step.stations import (
    After,
    Composing,
    Kernels,
    Place,
    Runtime,
    Scale,
    Synchronize,
    follow_in_pieces,
    remembering,
)
from fds.step.structure import AllBut, Structure
from fds.step.sums import Sum
from fds.step.topology import Dimension, Dimensions
from fds.step.views import Decode, View, Views

Context = Callable[[Call], contextlib.AbstractContextManager[object]]


def _derived(of: Callable[[Any], Any]) -> Any:
    """Return a field that follows from others of a step."""
    return attrs.field(default=attrs.Factory(of, takes_self=True), init=False, repr=False)


@attrs.frozen(eq=False)
class Program:
    """What the station `run` may know of a step.

    Attributes:
        work: `(state, its tensors, batch) -> (state, metrics)`: what the device does in a call.
        check: returns the tensors of a state that the step can take, and raises `StateError` for any other.
        leaves: `(state, its tensors) -> leaves` with the values of those that an update writes, to be written over.
        runtime: the step's caches.
        resting: returns the slots that do not change in a call with a state: what it records depends on them.
        compare: `(state, batch)`: raises where the call is not what one rank would do; see
            `fds.debugging.compare_with_one_rank`.
    """

    work: Callable[[State, StateTensors, Any], tuple[State, dict[str, Tensor]]]
    check: Callable[[State], StateTensors]
    leaves: Callable[[State, StateTensors], NewLeaves]
    runtime: Runtime
    resting: Callable[[State], frozenset[str]]
    compare: Callable[[State, Any], object]


class Run(Protocol):
    """The station `run`: how the work of a call is done, with the results that doing it at once has, bit for bit."""

    def refuse(self, step: Stations) -> None:
        """Raise `ComposeError` for a step whose work cannot be done so."""
        ...

    def __call__(
        self, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        """Return the next state and the metrics, of a state that was checked and holds these tensors."""
        ...


@attrs.frozen
class AtOnce:
    """Every call launches its work on the device by itself."""

    def refuse(self, step: Stations) -> None:
        """Do nothing: every step's can."""

    def __call__(
        self, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        """Do the work."""
        return program.work(state, held, batch)


@attrs.frozen(eq=False, repr=False)
class Stations:
    """The stations of a step, down to `place` in the order in which it passes them, and how it does so."""

    topology: tuple[Dimension, ...] = ()  # the axes that share the step, and how parameters lie along each
    batch: tuple[Callable[[Any, Call], Any], ...] = ()  # maps of the batch, before anything else
    split: Split = Split()  # batch -> microbatches
    frozen: tuple[str | AllBut, ...] = ()  # patterns of parameters that are not trained
    added: tuple[Adds, ...] = ()  # parameters that the loss lacks
    gather: Gather = Gather()  # slices -> whole parameters, and in which dtype the loss sees them
    execute: Executor = InTurn()  # which half of which microbatch runs where and when
    view: tuple[View, ...] = ()  # maps of one parameter, as the loss sees it; some say how a state holds it
    context: tuple[Any, ...] = ()  # entered around forward, or around each layer
    kernels: Kernels | None = None  # entered around the step: which kernels run
    modules: tuple[losses.ModuleMap, ...] = ()  # maps of the copies of modules that the loss runs
    loss: Any = None  # what is trained on: `(params, batch) -> loss`, or `Layers`
    eval_loss: Any = None  # what `evaluate` runs: the loss, or an `eval_fn`
    layer: tuple[losses.LayerMap, ...] = ()  # maps of `LayerCall`s
    scale: Scale | None = None  # the factor of the loss before backward
    sum: Sum = Sum()  # how gradients of microbatches are added up, and in which dtype
    reduce: Reduce = Reduce()  # how gradients become means over the data ranks
    measure: tuple[Measure, ...] = ()  # what is measured of the reduced gradients: their norm
    condition: tuple[Callable[[Gradients, Call], Gradients], ...] = ()  # maps of the reduced gradients
    optimizer: Optimizer | None = None  # gradients -> new parameters
    after: tuple[After | Synchronize, ...] = ()  # what follows an accepted update
    place: Place = Place()  # where the new state is written
    run: Run = AtOnce()  # how all of this is done: at once, or captured and replayed
    memory: Mapping[str, Memory] = tree.new(dict)  # by slot
    composition: tuple[Any, ...] = ()  # the transforms, as they were written
    composing: Composing = attrs.field(default=Composing(), repr=False)
    dimensions: Dimensions = attrs.field(default=Dimensions(), repr=False)  # what follows from `topology`
    shard: Shard | None = _derived(lambda step: shard_of(step.dimensions))  # how data ranks share the work, if they do
    # `reduce`, which an optimizer may leave out in some calls
    reduction: Reduce = _derived(lambda step: WhileWarm.of(step.reduce, step.optimizer))
    encodings: tuple[View, ...] = _derived(lambda step: tuple(x for x in step.view if is_encoding(x)))
    views: tuple[View, ...] = _derived(lambda step: tuple(x for x in step.view if not is_encoding(x)))
    contexts: tuple[Context, ...] = _derived(lambda step: tuple(x for x in step.context if not is_around(x)))
    around: tuple[losses.Around, ...] = _derived(
        lambda step: tuple(x.around_layer for x in step.context if is_around(x))
    )
    evaluated: tuple[losses.LayerMap, ...] = _derived(  # layer maps that hold in evaluations too
        lambda step: tuple(x for x in step.layer if getattr(x, "in_evaluation", False))
    )
    # those whose slot changes by a rule; whether anything may be noted; whether what is not finite is skipped
    following: tuple[Memory, ...] = _derived(
        lambda step: tuple(memory for memory in step.memory.values() if memory.follows)
    )
    noting: bool = _derived(lambda step: any(memory.merge or memory.on_skip == "keep" for memory in step.following))
    skips: bool = _derived(lambda step: any(measure.skips for measure in step.measure))
    normed: bool = _derived(lambda step: any(measure.norm for measure in step.measure))  # whether the norm is measured
    # what of `after` writes parameters, how ranks with parameters of their own agree on them; and the others
    synchronize: Synchronize | None = _derived(lambda step: next((x for x in step.after if writes_params(x)), None))
    followers: tuple[After, ...] = _derived(lambda step: tuple(x for x in step.after if not writes_params(x)))
    # the optimizer, with what `synchronize` keeps beside its state
    remembering: Optimizer | None = _derived(lambda step: remembering(step.optimizer, step.synchronize))
    runtime: Runtime = attrs.field(factory=Runtime, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if set(map(id, self.topology)) != set(map(id, self.dimensions.source)):
            raise ComposeError(
                "the topology of a step was replaced, and not what follows from it",
                where="station 'topology'",
                got=", ".join(map(repr, self.topology)) or "no dimensions",
                want=", ".join(map(repr, self.dimensions.source)) or "no dimensions",
                hint="fds.step.fill(step, topology=dimension) in a transform adds one",
            )

    @property
    def everyone(self) -> Axis | None:
        """The ranks that share this step, None for one alone."""
        return self.dimensions.everyone

    def __repr__(self) -> str:
        return f"compose({', '.join(map(str, self.composition))})({losses.name(self.loss)})"

    def call(self, state: State, drafts: Drafts | None = None, *, training: bool = True) -> Call:
        """Return what fillers may know of a call with this state, and where they note."""
        notes = drafts if self.noting else None
        resting = self.resting(state) if drafts is None else drafts.resting
        return Call.with_state(state, self.dimensions, notes, resting, training=training)

    def resting(self, state: State) -> frozenset[str]:
        """Return the slots that change by a rule, and not in a call with this state."""
        return slots_at_rest(self.following, state)

    def masters(self, structure: Structure, parts: list[Tensor], device: torch.device, residency: Residency) -> Masters:
        """Return the parameters as a state holds them, for a loss that runs on a device."""
        where = NOWHERE
        if residency.kinds:
            where = self.runtime.elsewhere.get((structure, device))
            if where is None:
                where = self.runtime.elsewhere[structure, device] = elsewhere(residency, structure, device)
        return Masters(parts, device, residency, where)

    def microbatch(self, loss: Any, structure: Structure) -> Microbatch:
        """Return the stations that every microbatch passes."""
        shard, views = self.shard, None
        if functions := (Decode(self.encodings, self.gather), *self.views) if self.encodings else self.view:
            apart = shard is not None and shard.reduces_each_microbatch
            again = self.dimensions.repeated(structure.names) if self.noting else None
            views = Views(functions, structure.leaves, self.runtime.viewed, apart, again)
        return Microbatch(views, self.contexts, losses.name(loss), shard is None, self.runtime.asked)

    def split_batch(self, call: Call, batch: Any, *, whole: bool = False) -> SplitBatch:
        """Return a batch through the stations `batch` and `split`; a `whole` one in one piece.

        Raises `BatchError`, unless the executor tells other ranks of it.
        """
        failed, split = None, Split(1) if whole else self.split
        if self.execute.reads(batch):
            if self.noting:  # ranks along a pipeline or a tensor axis pass the same batch
                call = call.counted(self.execute.runs_first and self.dimensions.tells)
            try:
                return split_batch(batch, self.batch, split, call)
            except Exception as error:
                if not self.execute.together:
                    raise
                failed = error
        return SplitBatch(batch, split.num_microbatches, error=failed)

    def in_pieces(self, batch: SplitBatch, n: int, call: Call) -> SplitBatch:
        """Return a batch that was given whole in `n` microbatches, mapped no second time.

        Raises `BatchError`, unless the executor tells other ranks of it.
        """
        microbatches, failed = None, batch.error
        if batch.parts is not None:
            try:
                microbatches = cut(batch.parts, Split(n), call)
            except Exception as error:
                if not self.execute.together:
                    raise
                failed = error
        return attrs.evolve(batch, count=n, microbatches=microbatches, error=failed)

    def order(self, what: str, structure: Structure) -> Order | None:
        """Return the order in which ranks meet where each comes at its own time, None where they come at fixed ones."""
        shard = self.shard
        if shard is None or not (shard.reduces_each_microbatch if what == "step" else shard.gathers_on_use):
            return None
        memory = self.runtime.memories.setdefault((what, structure.layout), LearnedOrder())
        ahead = shard.prefetch if shard.gathers_on_use else 0
        return Order(shard.axis, memory, ahead, self.dimensions.shares_rows, what)

    def structure_of(self, params: Any) -> tuple[Structure, list[Tensor]]:
        """Return the structure of these parameters, read once for each kind of tree, and their leaves."""
        leaves, spec = tree.parts(params)
        key = (spec, *check.kinds(leaves))
        last_key, structure = self.runtime.recent[0]  # read once: other threads may read other trees
        if structure is None or last_key != key:
            if key not in self.runtime.structures:
                assert self.remembering is not None
                self.runtime.structures[key] = Structure.of(
                    params,
                    gather=self.gather,
                    reduce=self.reduce.transport,
                    optimizer=self.remembering,
                    frozen=self.frozen,
                    dimensions=self.dimensions,
                    text=repr(self),
                )
            structure = self.runtime.structures[key]
            self.runtime.recent[0] = key, structure
        return structure, leaves

    def held_by(self, state: State) -> tuple[Structure, list[Tensor]]:
        """Return the structure of a state's parameters, and what it holds of them.

        Raises `StateError` for whole parameters, or slices of something else, where a state of this step has slices.
        """
        check.same_form(state.params, self.shard)
        return self.structure_of(state.params)

    def resident(self, structure: Structure, path: str) -> Resident | None:
        """Return the leaf at a key path of a state as a residency knows it, None for one that never lives elsewhere."""
        return resident_at(
            structure, path, [filler.slot for filler in self.followers], follow_in_pieces(self.followers)
        )

    def lives(self, structure: Structure, state: State) -> Lives:
        """Return where the leaves live that an update writes, read once for each structure."""
        device = torch.get_default_device() if state.step.is_meta else state.step.device
        lives = self.runtime.lives.get((structure, device))
        if lives is None:
            lives = self.runtime.lives[structure, device] = Lives.of(
                self.place.residency,
                structure,
                state.slots,
                [filler.slot for filler in self.followers],
                follow_in_pieces(self.followers),
                device,
                functools.partial(may_leave, structure, bool(self.dimensions.split)),
                speculate=self.place.speculate,
            )
        return lives

    def chunks(self, structure: Structure) -> list[list[Piece]]:
        """Return in which chunks an update visits the slices, on all ranks that hold slices of the same parameters."""
        chunks = self.runtime.chunks.get(structure)
        if chunks is None:
            everyone, place = self.everyone if self.dimensions.split else None, self.dimensions.place
            chunks = self.runtime.chunks[structure] = agreed_chunks(self.place.residency, structure, everyone, place)
        return chunks

    def settings(self, call: Call, buffers: dict[str, Tensor], n: int) -> list[losses.Setting]:
        """Return the setting of each microbatch: all seeds of a call, computed before its first kernel."""
        evaluating, base = not call.training, call.words
        call = call.counted(self.dimensions.tells) if self.noting else call
        draws = self.execute.draws(self.eval_loss if evaluating else self.loss)
        carried = losses.carried_buffers(self.loss, self.eval_loss, buffers) if evaluating else None
        seen, busy = (list[Any](), None) if evaluating else (None, list[Any]())
        mode = losses.Mode(
            evaluating, self.gather.float32, carried, self.gather.low, seen, busy, self.modules, self.around
        )
        return [
            losses.Setting(
                [random.seed(k, j) if d else None for j, d in enumerate(draws)],
                (call.device,),
                attrs.evolve(mode, lengths={}, staged=self.execute.together) if self.modules else mode,
                self.evaluated if evaluating else self.layer,
                call.of(k),
            )
            for k in [random.folded(base, self.dimensions.share_of_batch[0] * n + i) for i in range(n)]
        ]
