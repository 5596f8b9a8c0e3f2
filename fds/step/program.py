"""The program: a training step as a fixed sequence of stations. Reading `Step.__call__` is reading the step.

What a call checks on the host comes first. The rest, from the batch to the next state, is `Step.work`: what the device
does, which the station `run` runs at once, or captures and replays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from fds import loss as losses, tree
from fds.errors import DiskError, DiskFullError
from fds.state import State
from fds.step.agreement import Agreement
from fds.step.all_stations import Program, Stations
from fds.step.checks import contracts, state_check as check
from fds.step.checks.agreement import same_batch, same_composition
from fds.step.describe import Description, describe, explain
from fds.step.evaluation import evaluator
from fds.step.execution import LocalGradients
from fds.step.initial import at_first, initial, traced, with_parameters
from fds.step.into import into, whole_parameters
from fds.step.local_gradients import local_gradients
from fds.step.new_leaves import NewLeaves, new_leaves
from fds.step.one_rank import compare_with_one_rank
from fds.step.residency.early import open_update
from fds.step.seeds import guesses
from fds.step.stations import with_chosen_kernels
from fds.step.sums import check_used
from fds.step.totals import Decision, put_all
from fds.step.update import Setup, Update
from fds.step.weights.plan import BUCKET_BYTES, Options
from fds.step.weights.stream import Weights, weights

M = TypeVar("M", bound=nn.Module)


@attrs.frozen(eq=False, repr=False)
class Step(Stations):
    """A training step: a value whose fields are its stations, and a pure function `(state, batch) -> (state, metrics)`.

    `fds.compose(...)(loss)` makes one, and transforms fill its stations, which are listed, down to `place`, in the
    order in which a step passes them.
    """

    @check.graphless
    @with_chosen_kernels
    def init(self, params: Any, *, key: int | Tensor = 0) -> State:
        """Make the first state: parameters copied, optimizer and slots fresh.

        Args:
            params: a pytree of tensors, of which rank 0's values are taken; or a recipe `key -> params`
                (`layers.init`, `fds.recipe(factory)`), which every rank runs layer by layer, keeping its slices.
            key: where all randomness of the run starts, an int or a `(2,) int64` key.

        Raises `StateError` for NaN, leaves that are no tensors or share memory, patterns that match nothing.
        """
        try:
            return initial(self, params, key)
        except DiskFullError as error:
            explain(error, self, traced(self, params))
            raise

    @check.graphless
    @with_chosen_kernels
    def structure(self, params: Any) -> State:
        """Return the state that `init` would make, as `meta` tensors: nothing is allocated or drawn.

        `params` is what `init` takes: tensors, `meta` tensors or a recipe.
        """
        return traced(self, params)

    @check.undifferentiated
    @check.graphless
    @with_chosen_kernels
    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, Tensor]]:
        """Return the next state and the metrics; inputs and global generators stay as they are.

        With `fds.donate` the state is given up: its memory becomes the new state's.

        Metrics are 0-d tensors on the step's device: `loss` (unscaled, the mean over the batch), `step` (updates
        applied, this one included), `lr` (and under `by_name` `lr/PATTERN` of each group; `lr` itself only where they
        have the same number or schedule), `grad_norm` (before clipping, where measured), `loss_scale` (that of this
        step), `skipped` (where a gradient that is not finite is, or a `Mean` may weigh nothing), `at_minimum_scale`,
        `rolled_back` (where updates begin in backward: whether a clip or a skip decided otherwise), and the loss's own:
        floats averaged by weight, without microbatches of weight 0, and integers summed.

        Raises `BatchError`, `LossError`, `StateError`, `DonatedStateError`; the state is then as it was, but for what
        a loss that is refused for it wrote there itself. Raises `DiskError` where leaves live on a disk that fails;
        with `fds.donate` a note with it says where the state was written over before.
        """
        same_composition(self)
        same_batch(self, batch)
        tensors = self.check(state)
        if (plain := check.without_graph(state, tensors)) is not state:
            state, tensors = plain, self.check(plain)
        try:
            compare = functools.partial(compare_with_one_rank, self)
            program = Program(self.work, self.check, self.new_leaves, self.runtime, self.resting, compare)
            return self.run(program, state, tensors, batch)
        except DiskError as error:
            explain(error, self, state)
            raise

    def work(self, state: State, held: check.StateTensors, batch: Any) -> tuple[State, dict[str, Tensor]]:
        """Return what a call does, of a state that was checked and holds these tensors: from the batch to the update.

        Nothing in it depends on values that the host reads, but keys and `calls`, where a device is at work.
        """
        setup = Setup.of(self, state, held)  # scale, learning rates, drafts of the slots: before anything can fail late
        update = open_update(self, setup)  # and memory of what is written before the step has decided
        local = local_gradients(update, batch)  # of all microbatches, summed over ranks
        decision, buffers = self.decide(setup, local)  # in the one small message: the same on every rank
        update.run(local, decision)  # from here on memory of the next state is written
        slots = setup.drafts.settle(decision, state, setup.call)  # before what follows, which may read them
        params, slots = update.follow(slots)
        new = update.state(params, slots, buffers)
        return new, self.metrics(setup, decision, new, update)

    def evaluate(self, state: State, batch: Any, *, outputs: bool = False) -> dict[str, Tensor]:
        """Return the metrics of `eval_fn` (default: the loss) on a batch, without gradients, modules in eval mode.

        `outputs=True` adds `metrics["outputs"]`: what the last layer, or the last module applied, returned.
        The batch is evaluated in one piece; by a pipeline in its microbatches, where the rows of every rank divide into
        them, which is the same for a criterion that is a mean over rows, or a `Mean`. Where ranks share the step all of
        them call this, each with its own batch.
        """
        return self.evaluator(state)(batch, outputs=outputs)

    @check.graphless
    def evaluator(self, state: State, *, outputs: bool = False) -> Callable[..., dict[str, Tensor]]:
        """Gather the parameters once and return `evaluate(batch, *, outputs=...)` for many batches.

        At stage 3 they are gathered when used. Where ranks share a step all of them call this, and what it returns.
        """
        return evaluator(self, state, outputs)

    @check.graphless
    def params(self, state: State) -> Any:
        """Return copies of the whole parameters, in master precision, in the user's structure: all ranks call it."""
        return whole_parameters(self, state, "params", copies=True)

    def weights(
        self,
        state: State,
        *,
        names: Any = None,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        view: bool = False,
    ) -> Weights:
        """Return an iterator of (name, whole weight), for a consumer such as a serving engine: all ranks call it.

        Parameters come one bucket after another, then module buffers, in an order that is the same on all ranks. Every
        rank gets all of them, and takes part in every collective whatever its consumer does: one that stops early, or
        raises, gives the iterator up, which takes part in the rest; so does `close()`, and the end of a `with` block.
        One that is still open when the step, or a save, is asked for something else of all ranks is ended by that, and
        then raises. A slow consumer lets the other ranks wait.

        A weight is a tensor on the step's device that nobody writes into, and is the consumer's to keep. Its memory is
        used again for others once nobody holds it: then no more than `bucket_bytes` is there beside the state.

        Args:
            state: of this step.
            names: which weights, under which names. None: all, under the user's. A pattern (`*` crosses dots) or a list
                of them: those that match. A dict: by the first pattern that matches, a new name, in which each `*` is
                what it matched; a list of names, each of the same tensor, as for tied weights; a function (tensor) ->
                {name: tensor}, called with a tensor on `meta` first; or None, which leaves it out. So are those that no
                pattern matches: "*": "*" keeps them.
            dtype: of floating-point weights, cast before they are sent; None: that in which they are held.
            bucket_bytes: of memory beside the state; twice a weight that is larger than half of it.
            view: hand out what the loss sees in an evaluation, in its dtype: through views (low rank, rounded, pruned),
                and with parameters inside that a transform added. Else parameters are as the state holds them, in
                numbers where they are held in another form, and what was added has names of its own.

        Raises `StateError` for bad arguments, on every rank if on any, and where ranks ask for different weights;
        `DonatedStateError` for a state that was given up, also meanwhile; `DiskError` for a disk that fails.
        """
        return weights(self, state, names, Options(dtype, bucket_bytes, view))

    @check.graphless
    @with_chosen_kernels
    def with_params(self, state: State, params: Any) -> State:
        """Return the state with other values of its parameters, the inverse of `params`: all ranks call it.

        Args:
            state: of this step. All else of it, such as the optimizer's slots, is shared with the new one.
            params: whole parameters in the user's structure, of which rank 0's values are taken; or a slot of
                `state.opt`, the values that an optimizer keeps for evaluation, say.

        Raises `StateError`, on every rank, for other names, shapes or dtypes, and for values that are not finite.
        """
        return with_parameters(self, state, params)

    @check.graphless
    def into(self, module: M, state: State, *, prefix: str = "", buffers_prefix: str | None = None) -> M:
        """Write whole parameters and buffers back into a module, and return it; all ranks call it.

        The module keeps its tensors, tied ones too, with their dtypes and devices. Buffers that are not in the state
        stay as they are.

        Args:
            module: with the parameters of the state, by name and shape.
            state: of this step.
            prefix: what stands before the module's names in a state of several modules (`"student."`).
            buffers_prefix: the same of buffers, where it is another.

        Raises `StateError` for a module that does not fit, before anything is written on any rank; `DiskError` for a
        disk that fails, with which a part of the module is written. Parameters elsewhere are read a bucket at a time.
        """
        return into(self, module, state, prefix, buffers_prefix)

    def _repr_html_(self) -> str:
        return self.describe()._repr_html_()  # pyright: ignore[reportPrivateUsage]  (the name is IPython's)

    @check.graphless
    @with_chosen_kernels
    def describe(self, state: State | None = None, batch: Any = None) -> Description:
        """Say station by station what is composed; with a state, the bytes held and sent; with a batch, what is unused.

        For that the loss runs forward and backward, so where ranks share the step all of them call it with a batch.
        """
        return describe(self, state, batch)

    def check(self, state: Any) -> check.StateTensors:
        """Return the tensors of a state that this step can take. Raises `StateError` for any other."""
        check.usable(state, "step")
        structure, leaves = self.held_by(state)
        check.counters(state)
        check.same_composition(state, self.memory, structure.opt)
        if structure not in self.runtime.fresh:
            self.runtime.fresh[structure] = at_first(self, state)
        for name, want in self.runtime.fresh[structure].items():
            if (got := getattr(state, name)) != {} or want != {}:
                check.same_kinds(name, got, want)
        devices = list(map(tree.device_of, structure.pick(leaves)))
        at = None if self.place.residency.kinds else devices
        return check.StateTensors(structure, leaves, devices, check.same_slots(state, structure.opt, at))

    def new_leaves(self, state: State, held: check.StateTensors) -> NewLeaves:
        """Return memory for what an update of a state writes, with the old values."""
        lives, pool = self.lives(held.structure, state), self.runtime.pool
        return new_leaves(self.place, lives, pool, state, held, self.followers)

    def decide(self, setup: Setup, local: LocalGradients) -> tuple[Decision, dict[str, Tensor]]:
        """Return what ranks decide together, and their common module statistics, in one small message.

        One more goes to ranks that make updates of their own, for what all of them share.
        """
        dimensions, device, calls = self.dimensions, setup.call.device, setup.state.calls
        if dimensions.everyone is None:
            check_used(local.used, losses.name(self.loss), viewed=bool(self.views))
        decides = self.skips or guesses(local.totals)
        norm = local.norm() if decides or self.normed else None
        totals, buffers, drafts = local.totals, local.buffers, setup.drafts
        if (group := dimensions.group) is not None:
            agreement, used = Agreement(group, calls), any(local.used) or not local.used
            data, repeats, puts = dimensions.data, dimensions.repeats, drafts.puts(setup.residency, device)
            agreed = put_all(agreement, totals, norm, buffers, data, puts, used=used, repeats=repeats)
            agreement.count()
            totals, norm, buffers = agreed()
        decision = Decision.of(totals, norm, setup.scale, local.predivide, device, decides=decides)
        if (apart := dimensions.local) is not None:
            agreement, shared = Agreement(apart, calls), attrs.evolve(totals, divisor=None)
            agreed = put_all(agreement, shared, decision.norm, buffers, apart, drafts.puts(setup.residency, device))
            agreement.count()
            totals, norm, buffers = agreed()
            decision = decision.shared(totals, norm, apart.size)
        return decision, buffers

    def metrics(self, setup: Setup, decision: Decision, new: State, update: Update) -> dict[str, Tensor]:
        """Return the metrics of a call: those of the loss, of the decision and of the scale."""
        rates, norm = setup.values.rates(), self.reduction.always_sums
        metrics = decision.metrics(new.step, rates, update.failed, norm=norm)
        return metrics | contracts.reported(self.scale, setup.state.slots, setup.call.device)
