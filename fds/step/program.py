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

from fds import loss as losses, reading, tree
from fds.collectives import Axis
from fds.errors import DiskError, DiskFullError
from fds.optim.base import Values
from fds.state import State
from fds.step.agreement import Agreement
from fds.step.all_stations import Stations
from fds.step.call import Call, seeded
from fds.step.checks import contracts, state_check as check
from fds.step.checks.agreement import same_batch, same_composition
from fds.step.conditions import conditioned
from fds.step.decision import Decision
from fds.step.describe import Description, describe, explain
from fds.step.drafts import Drafts, may_note
from fds.step.evaluation import evaluator
from fds.step.execution import LocalGradients
from fds.step.gradients import Gradients
from fds.step.initial import at_first, initial, traced, with_parameters
from fds.step.into import into, whole_parameters
from fds.step.one_rank import compare_with_one_rank
from fds.step.own_sums import OwnSums
from fds.step.ranges import profiled
from fds.step.residency.apart import Apart
from fds.step.residency.contract import Residency
from fds.step.residency.deferred import Deferred, hear, heard
from fds.step.residency.speculation import Granted, Speculation
from fds.step.residency.visit import Visit
from fds.step.seeds import guesses
from fds.step.stations import Program, with_chosen_kernels
from fds.step.sums import check_used
from fds.step.totals import Totals, averaged
from fds.step.update import NewLeaves, Rule, leaves_apart, new_leaves

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
        held = self.check(state)
        if (plain := check.without_graph(state, held)) is not state:
            state, held = plain, self.check(plain)
        try:
            compare = functools.partial(compare_with_one_rank, self)
            return self.run(Program(self.work, self.check, self.leaves, self.runtime, compare), state, held, batch)
        except DiskError as error:
            explain(error, self, state)
            raise

    def work(self, state: State, held: check.StateTensors, batch: Any) -> tuple[State, dict[str, Tensor]]:
        """Return what a call does, of a state that was checked and holds these tensors: from the batch to the update.

        Nothing in it depends on values that the host reads, but keys and `calls`, where a device is at work.
        """
        structure, parts = held.structure, held.parts
        assert self.optimizer is not None
        drafts = self.drafts(state)
        call = self.call(state, drafts)

        # from the batch to one summed gradient
        scale = None
        if self.scale is not None:
            with seeded(call, [self.scale], "scale"):
                scale = contracts.scalar(self.scale.scale(state.slots, state.step.device), self.scale)
        with seeded(call, self.optimizer.schedules(), "schedule"):
            values = self.optimizer.values(state.step)
        self.runtime.pool.sweep()
        dimensions = self.dimensions
        everyone = dimensions.everyone
        residency = self.place.residency
        if everyone is not None and residency.kinds:  # one that says what fails when all ranks hear
            residency = Deferred(residency)
        own_sums = None
        if self.optimizer.phases is not None:
            own_sums = OwnSums.of(self.optimizer.phases, self.shard, structure, state.slots, call, self.runtime.pool)
        local = own_sums is not None and own_sums.exchange.axis is not None
        ahead = self._speculation(state, held, scale, values, call, residency) if self.place.speculate else None
        seen = parts if own_sums is None else own_sums.seen(structure, parts)
        found = self.gradients(state, structure, seen, batch, scale, call, residency, ahead, local)
        if everyone is None:
            check_used(found.used, losses.name(self.loss), viewed=bool(self.view))

        # from the gradient to a decision, the same on every rank
        device, decides = state.step.device, self.skips or guesses(found.totals)
        totals, norm, buffers = self._agree(found, state.calls, drafts, decides=decides)
        decision = Decision.of(totals, norm, scale, found.predivide, device, decides=decides)
        if dimensions.local is not None:
            decision, buffers = self._share(decision, totals, buffers, dimensions.local, state.calls, drafts)
        grads = found.for_maps(decision, structure.segments, dimensions)
        failed, landing = None, found.landing
        versions = [] if ahead is None else list(map(tree.version_of, found.leaves))
        try:
            grads, skip = self._conditioned(grads, call) if self.condition else grads, decision.skip
            if ahead is not None:
                written = versions != list(map(tree.version_of, found.leaves))
                changed = written or any(x is not y for x, y in zip(grads.leaves, found.leaves, strict=True))
                failed = ahead.fails(grads.scale, skip, device, changed=changed)
            grads = grads.settled()
            if landing is not None:  # what a map changed, or what was divided, is on its way
                landing.settle()
        except BaseException:
            if landing is not None:
                landing.close()
            raise

        # the update: from the last of these lines on the new state's memory is written
        new = self.leaves(state, held, residency, None if ahead is None else ahead.apart)
        chunks = self.chunks(structure)
        with profiled("optimizer"), seeded(call, [self.optimizer], "optimizer", *self.dimensions.coordinates):
            new.update(
                state,
                structure.optimizer,
                grads,
                chunks,
                self.dimensions,
                skip=skip,
                values=values,
                exchange=None if own_sums is None else own_sums.exchange,
                again=None if ahead is None or failed is None else ahead.again(failed),
            )

        if reading.now.recording is None and state.step.device.type == "cpu":
            self.runtime.pool.ballast.extend(grads.leaves)

        # keep or skip, and what follows
        drafts.written += filter(None, (found.kept, own_sums))
        slots = drafts.settle(decision, state, call) | new.after
        if skip is not None and buffers:
            buffers = {k: torch.where(skip, state.buffers[k], b) for k, b in buffers.items()}
        if self.synchronize is not None:
            new.synchronize(self.synchronize, skip=skip, call=call)
        params = structure.put(parts, new.trained)
        for i, one in enumerate(self.after):
            own = call.after(slots).given_to(one, "after", i, *self.dimensions.coordinates)
            with seeded(own, [one]):
                slots[one.slot] = new.follow(one, slots[one.slot], params, chunks, skip=skip, call=own)
        if residency is not self.place.residency:
            hear(residency, everyone)
        step = state.step + (1 if skip is None else ~skip)
        after = State(
            step=step,
            calls=state.calls + 1,
            params=params,
            opt=new.opt,
            buffers=buffers,
            slots=slots,
            key=state.key,
            token=new.token(state),
        )
        metrics = decision.metrics(step, values.rates(), failed, norm=self.optimizer.phases is None)
        return after, metrics | contracts.reported(self.scale, state.slots, step.device)

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

    def leaves(
        self, state: State, held: check.StateTensors, residency: Residency | None = None, apart: Apart | None = None
    ) -> NewLeaves:
        """Return memory for what an update of a state writes, with the old values; some may be `apart` already.

        A `residency` stands in for that of the step, and all ranks hear of what fails there.
        """
        lives = self.lives(held.structure, state)
        if residency is not None and residency.kinds:
            lives = attrs.evolve(lives, residency=residency)
            with heard(residency, self.everyone):
                return new_leaves(self.place, lives, self.runtime.pool, state, held, self.after, apart)
        return new_leaves(self.place, lives, self.runtime.pool, state, held, self.after, apart)

    def _conditioned(self, grads: Gradients, call: Call) -> Gradients:
        """Return what all gradient maps make of gradients."""
        known = grads
        for i, one in enumerate(self.condition):
            own = call.given_to(one, "condition", i, *self.dimensions.coordinates)
            own = own if may_note(one) else own.silent()
            with seeded(own, [one]):
                grads = conditioned(one, grads, known, own, self.dimensions.share)
        return grads

    def _speculation(
        self,
        state: State,
        held: check.StateTensors,
        scale: Tensor | None,
        values: Values,
        call: Call,
        residency: Residency,
    ) -> Speculation:
        """Return the part of the update that begins in backward, by what is decided where the norm is 0."""
        structure, device = held.structure, state.step.device
        lives, chunks = attrs.evolve(self.lives(structure, state), residency=residency), self.chunks(structure)
        with heard(residency, self.everyone):
            apart = leaves_apart(lives, self.runtime.ahead, held)

        def grant(totals: Totals, own: Totals, predivide: float, wide: bool) -> Granted:
            norm = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
            decides = self.skips or guesses(own)
            decision = Decision.of(totals, norm, scale, predivide, device, decides=decides)
            grads = self._conditioned(Gradients([], decision.scale, decision.norm), call.keeping())
            return Granted(grads.scale, decision.skip, wide)

        def visits(granted: Granted) -> Visit:
            rule = Rule.of(
                structure.optimizer,
                structure,
                self.dimensions,
                state,
                values,
                scale=granted.grad_scale,
                skip=granted.skip,
                divisor=granted.divisor,
            )
            return apart.visit(structure, lives, chunks, rule)

        return Speculation(apart, grant, visits, self.everyone)

    def _agree(
        self, found: LocalGradients, calls: Tensor, drafts: Drafts, *, decides: bool
    ) -> tuple[Totals, Tensor | None, dict[str, Tensor]]:
        """Return totals, the global norm of the summed gradients (where it is measured) and buffers of all ranks.

        All are those that make one update together.
        """
        norm, dimensions = found.norm() if decides or any(m.norm for m in self.measure) else None, self.dimensions
        if dimensions.group is None:
            return found.totals, norm, found.buffers
        some = any(found.used) or not found.used
        agreement = Agreement(dimensions.group, calls)
        totals = found.totals.put(agreement, used=some, repeats=dimensions.repeats)
        return _counted(agreement, totals, norm, averaged(found.buffers, agreement, dimensions.data), drafts)

    def _share(
        self, decision: Decision, totals: Totals, buffers: dict[str, Tensor], local: Axis, calls: Tensor, drafts: Drafts
    ) -> tuple[Decision, dict[str, Tensor]]:
        """Return what ranks that make updates of their own decide together, and their common buffers."""
        agreement = Agreement(local, calls)
        counted = attrs.evolve(totals, divisor=None).put(agreement)
        totals, norm, buffers = _counted(agreement, counted, decision.norm, averaged(buffers, agreement, local), drafts)
        return decision.shared(totals, norm, local.size), buffers


def _counted(
    agreement: Agreement,
    totals: Callable[[], Totals],
    norm: Tensor | None,
    buffers: Callable[[], dict[str, Tensor]],
    drafts: Drafts,
) -> tuple[Totals, Tensor | None, dict[str, Tensor]]:
    """Return totals, norm and buffers of all ranks; put in and take notes beside them."""
    joint = None if norm is None else agreement.norm(norm)
    take = drafts.put(agreement) if drafts.kinds and not drafts.late else None
    agreement.count()
    if take is not None:
        take()
    return totals(), None if joint is None else joint.value, buffers()
