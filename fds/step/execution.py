"""The station `execute`: in which order the microbatches of a batch run, each through the same stations.

A microbatch is two halves, `Microbatch.forward` (or what runs inside `Microbatch.opened`, where a loss is cut into
stages) and a backward that goes to `sums`. An executor says which half of which microbatch runs where and when.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import autodiff, loss as losses, random, tree
from fds.collectives import Axis
from fds.collectives.traffic import Expected
from fds.layout import Segment
from fds.step.agreement import clamped, combined, placed
from fds.step.batch import SplitBatch
from fds.step.call import Call
from fds.step.checks import contracts, state_check as check
from fds.step.gradients import Gradients, global_norm
from fds.step.parameters import Parameters
from fds.step.ranges import in_range, profiled
from fds.step.residency.landing import Landing
from fds.step.seeds import Seeds
from fds.step.sharding.buckets import Bucketed
from fds.step.sharding.handles import materialize
from fds.step.sharding.order import Order
from fds.step.sharding.reduce import same_metrics
from fds.step.stations import Runtime
from fds.step.sums import InPlace, detached
from fds.step.topology import Dimensions
from fds.step.totals import Decision, Expect, Totals
from fds.step.views import Cut, Views


@attrs.frozen(eq=False)
class Microbatch:
    """The stations that every microbatch passes, whoever runs it: view, context, layer, loss."""

    views: Views | None
    context: tuple[Callable[[Call], contextlib.AbstractContextManager[object]], ...]
    loss: str  # how to call it in a message
    alone: bool  # no other rank adds to the gradients
    asked: dict[str, list[str]]  # what was found in earlier calls

    @in_range("forward")
    def forward(
        self, loss: Any, params: Any, batch: Any, buffers: dict[str, Tensor], setting: losses.Setting
    ) -> tuple[losses.Outcome, list[Tensor]]:
        """Evaluate a whole loss; return what came of it, and the leaves of viewed parameters that it read.

        Raises `LossError` where it writes into parameters or batch.
        """
        at = f"values given to {'eval_fn' if setting.mode.evaluating else 'the loss'}"
        plain = losses.is_compiled(loss)
        with self.opened(params, batch, setting, at, plain=plain) as (seen, cuts):
            return losses.run(loss, seen, batch, buffers, setting), [cut.leaf for cut in cuts.values()]

    @contextlib.contextmanager
    def opened(
        self,
        params: Any,
        inputs: Any,
        setting: losses.Setting,
        at: str,
        *,
        plain: bool = False,
        in_pieces: bool = False,
        again: Collection[str] = (),
    ) -> Generator[tuple[Any, dict[str, Cut]]]:
        """Yield parameters through the views, and what of them is cut off (see `Views.seen`), inside the contexts.

        Views and what runs inside get containers of their own: what they put into them is gone after this microbatch.
        `plain` ones have memory, at stage 3 too; notes of those that are viewed `again` do not count. Raises
        `LossError` where anything writes into parameters or `inputs`.
        """
        trees = {"params": params, "batch": inputs}
        if self.views or self.context or setting.maps:  # which are given the call
            trees |= {"slots": dict(setting.record.own_slots), "step": setting.record.step}
        with check.intact(self.asked, at, **trees), contextlib.ExitStack() as stack:
            if self.views is not None:
                with check.intact(self.asked, f"{at}, by views", by="a view", **trees):
                    params, cuts = self.views.seen(params, setting, plain=plain, in_pieces=in_pieces, again=again)
            else:
                params, cuts = tree.map(materialize, params) if plain else tree.copied(params), {}
            for i, make in enumerate(self.context):
                stack.enter_context(contracts.context(make(setting.at(make, "context", i)), make))
            yield params, cuts

    def check_graph(self, total: Tensor, setting: losses.Setting) -> bool:
        """Raise `LossError` for a total that no parameter of the step, or one of a module itself, decides on.

        What changes modules is shown it too.

        Return whether the loss checkpoints reentrantly. The first graph tells.
        """
        if self.alone and not total.requires_grad:
            raise detached(self.loss, "a value without a graph", viewed=self.views is not None)
        setting.mode.check_graph(total)
        if "graph" not in self.asked:
            losses.check_no_originals(total)
            self.asked["graph"] = ["reentrant"] if autodiff.is_reentrant(total) else []
        return bool(self.asked["graph"])


@attrs.frozen(eq=False)
class Pass:
    """One pass of a batch through a loss: all that an executor is given."""

    loss: Any
    batch: SplitBatch
    settings: Sequence[losses.Setting]  # of every microbatch
    params: Parameters
    trained: Sequence[str]  # names of `params.trained`
    buffers: dict[str, Tensor]
    each: Microbatch
    order: Order | None  # in which data ranks meet, where each comes at its own time
    everyone: Axis | None
    runtime: Runtime
    sums: InPlace | Bucketed | None = None  # where gradients go; None in an evaluation
    seeds: Seeds | None = None
    expects: Sequence[Expect] = ()  # told of the totals before the last backward
    outputs: bool = False  # whether an evaluation is to return what the last layer returned


@attrs.define(eq=False)
class PassResult:
    """What came of a pass on this rank."""

    totals: Totals
    buffers: dict[str, Tensor]
    report: Any = None  # of the executor to itself


@attrs.define(eq=False)
class LocalGradients:
    """The gradients of a batch on this rank, and what goes with them, before ranks agree on it."""

    totals: Totals
    leaves: list[Tensor]  # summed gradients of the trained parts
    used: list[bool]  # by trained parameter: whether a gradient came for it
    counted: list[bool]  # by leaf: whether its norm counts here; see `Dimensions.add_up`
    buffers: dict[str, Tensor]
    predivide: float = 1.0  # what they were divided by before they were sent
    wide: bool = False  # some rank's gradients are float64
    landing: Landing | None = None  # where leaves live that do not live where the step runs
    apart: Axis | None = None  # the data ranks, where each has its own gradient: they add up to the whole one

    def for_maps(self, decision: Decision, segments: Sequence[Sequence[Segment]], dimensions: Dimensions) -> Gradients:
        """Return them as gradient maps get them, with what ranks have agreed on.

        The norm of a rank's own gradient is that of the mean over its own rows, as if those of all others were like it.
        """
        norm, norm_of = decision.norm, None
        if self.apart is not None:
            norm, norm_of = None, functools.partial(self._norm_of_own, axes=[axis for axis, _ in dimensions.differing])
        elif dimensions.differing:
            assert dimensions.group is not None
            norm_of = functools.partial(self._norm_over, axes=[dimensions.group])
        split, counted = dimensions.split, self.counted
        return Gradients(self.leaves, decision.scale, norm, segments, split, norm_of, counted, self.landing)

    def norm(self) -> Tensor:
        """Return the norm () of the leaves that count here."""
        return self._norm(self.leaves, self.landing)

    def _norm(self, leaves: Sequence[Tensor], landing: Landing | None) -> Tensor:
        pairs = zip(leaves, self.counted, strict=True)
        norm = global_norm([x if counts else x.new_empty(0) for x, counts in pairs], landing=landing)
        assert self.totals.loss is not None
        return (norm.double() if self.wide else norm).to(self.totals.loss.device)

    def _norm_over(self, leaves: Sequence[Tensor], axes: Sequence[Axis], landing: Landing | None) -> Tensor:
        """Return the norm () of what became of these leaves on all ranks of some axes, the same on each."""
        norm = self._norm(leaves, landing)
        for axis in axes:
            norm = clamped(combined(axis.all_reduce(placed(norm, axis), what="norm")), norm.dtype)
        return norm

    def _norm_of_own(self, leaves: Sequence[Tensor], axes: Sequence[Axis], landing: Landing | None) -> Tensor:
        assert self.apart is not None
        return self._norm_over(leaves, axes, landing) * self.apart.size


class Executor(Protocol):
    """The station `execute`: how the microbatches of a batch run."""

    @property
    def together(self) -> bool:
        """Whether ranks run every batch together: they tell each other what goes wrong, and meet after every action."""
        ...

    @property
    def runs_first(self) -> bool:
        """Whether the first layer runs here: of ranks that pass the same batch, that one counts what is noted of it."""
        ...

    def agreement(self) -> str:
        """Return in what the ranks that share the step must agree."""
        ...

    def reads(self, batch: Any) -> bool:
        """Say whether this rank needs the batch."""
        ...

    def parts(self, batch: Any) -> Sequence[Any]:
        """Return what of a batch must be alike on ranks that share rows: in parts, at most two, that they may lack."""
        ...

    def draws(self, loss: Any) -> list[bool]:
        """Say which calls of the loss are to be seeded here."""
        ...

    def dtypes(
        self,
        trained: Sequence[Tensor],
        computed: torch.dtype | None,
        everyone: Axis | None,
        asked: dict[str, list[str]],
    ) -> list[torch.dtype]:
        """Return the dtypes in which the loss sees parameters, on all ranks that add gradients up with this one.

        `computed` is that of the station `gather`, None for the parameters' own.
        """
        ...

    def pieces(self, batch: SplitBatch, everyone: Axis | None) -> int:
        """Return into how many microbatches a batch, given in one piece, is cut for evaluation: alike on all ranks."""
        ...

    def messages(self, everyone: Axis, *, keeps: bool) -> Iterable[Expected]:
        """Return the messages of a training call of its own, as far as earlier calls have shown them.

        `keeps` says whether gradients are sent with error feedback.
        """
        ...

    def train(self, run: Pass) -> PassResult:
        """Run every microbatch forward and backward."""
        ...

    def agree(self, ran: PassResult, everyone: Axis | None, runtime: Runtime, *, wide: bool) -> tuple[Totals, bool]:
        """Return the totals, and whether any rank has float64 gradients, given whether this one has.

        Raises what the executor or another rank found wrong, on every rank.
        """
        ...

    def evaluate(self, run: Pass) -> tuple[Totals, list[Any]]:
        """Run every microbatch forward; return a list of what the last layer returned, where that is wanted."""
        ...


@contextlib.contextmanager
def training(
    setting: losses.Setting, params: Parameters, sums: InPlace | Bucketed, order: Order | None
) -> Generator[None]:
    """Run forwards and backwards inside: gradients on, generators restored; then let go of what only they need."""
    with random.scope(setting.devices), autodiff.differentiated(), torch.enable_grad():
        try:
            yield
            if order is not None:
                order.finish()
        except BaseException:
            sums.close()
            if sums.landing is not None:
                sums.landing.close()
            raise
        finally:
            setting.mode.release()
            params.close()
            if order is not None:
                order.joins.clear()


@attrs.frozen
class InTurn:
    """Every rank runs its microbatches one after another, forward and backward."""

    together, runs_first = False, True

    def agreement(self) -> str:
        """Return nothing."""
        return ""

    def reads(self, batch: Any) -> bool:
        """Return True."""
        return True

    def parts(self, batch: Any) -> list[Any]:
        """Return all of it."""
        return [batch]

    def draws(self, loss: Any) -> list[bool]:
        """Return which calls of the loss may draw."""
        return losses.draws(loss)

    def dtypes(
        self,
        trained: Sequence[Tensor],
        computed: torch.dtype | None,
        everyone: Axis | None,
        asked: dict[str, list[str]],
    ) -> list[torch.dtype]:
        """Return the dtypes of the parameters."""
        return list(set(map(tree.dtype_of, trained)))

    def pieces(self, batch: SplitBatch, everyone: Axis | None) -> int:
        """Return 1."""
        return 1

    def messages(self, everyone: Axis, *, keeps: bool) -> list[Expected]:
        """Return nothing."""
        return []

    def train(self, run: Pass) -> PassResult:
        """Run every microbatch forward and backward."""
        assert run.batch.microbatches is not None and run.sums is not None and run.seeds is not None
        totals, buffers = Totals(), run.buffers
        for i, (microbatch, setting) in enumerate(zip(run.batch.microbatches, run.settings, strict=True)):
            outcome, cut = run.each.forward(run.loss, run.params.tree, microbatch, buffers, setting)
            buffers, last = outcome.buffers, i + 1 == run.batch.count
            totals.add(outcome, run.each.loss)
            if run.params.trained:
                reentrant = run.each.check_graph(outcome.total, setting)
                backward = functools.partial(
                    autodiff.backward_into,
                    outcome.total,
                    run.seeds.seed(outcome, microbatch),
                    more=cut,
                    reentrant=reentrant,
                )
                if run.expects:
                    _foresee(run, outcome, totals, last=last)
                with profiled("backward"):
                    run.sums.add(backward, last=last, in_parts=reentrant)
                del backward
            del outcome, cut  # and its graph
            setting.mode.release()
        totals.divisor = run.seeds.divisor
        return PassResult(totals, buffers)

    def agree(self, ran: PassResult, everyone: Axis | None, runtime: Runtime, *, wide: bool) -> tuple[Totals, bool]:
        """Return the totals. Raises `LossError` where ranks have other metrics."""
        same_metrics(ran.totals, everyone, "step", runtime.asked)
        return ran.totals, False

    def evaluate(self, run: Pass) -> tuple[Totals, list[Any]]:
        """Evaluate a batch in one piece."""
        assert run.batch.microbatches is not None
        (batch,), (setting,), totals = run.batch.microbatches, run.settings, Totals()
        with random.scope(setting.devices), torch.no_grad():
            outcome, _ = run.each.forward(run.loss, run.params.tree, batch, run.buffers, setting)
            totals.add(outcome, run.each.loss)
            shown: list[Any] = tree.map(_plain, (setting.mode.seen or [])[-1:]) if run.outputs else []
        if run.order is not None:
            run.order.finish()
        return totals, shown


def _foresee(run: Pass, outcome: losses.Outcome, totals: Totals, *, last: bool) -> None:
    """Tell what acts in the last backward what all ranks' totals are; all of them call this before every backward."""
    assert run.sums is not None and run.seeds is not None
    if totals.count == 1:
        run.seeds.has_weights(outcome)
    if not last:
        return
    global_totals, mine = run.seeds.foreseen(totals, run.everyone), attrs.evolve(totals, divisor=run.seeds.divisor)
    for expect in run.expects:
        expect(global_totals, mine, run.sums.predivide)


def _plain(x: Any) -> Any:
    """Return what can still be read when the parameters are gone."""
    return materialize(x).detach() if isinstance(x, Tensor) else x
