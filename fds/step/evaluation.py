"""Evaluation: the same parameters for many batches, no gradients, metrics shared over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import loss as losses, tree
from fds.collectives import Axis
from fds.errors import BatchError, LossError, StateError, is_a
from fds.state import State
from fds.step.agreement import Agreement
from fds.step.all_stations import Stations
from fds.step.checks.agreement import same_batch, same_composition
from fds.step.checks.state_check import graphless, usable
from fds.step.execution import Pass
from fds.step.parameters import Parameters, open_parameters
from fds.step.pool import Pool
from fds.step.residency.contract import deferred, hear
from fds.step.sharding.order import Order
from fds.step.sharding.reduce import same_metrics
from fds.step.stations import chosen_kernels
from fds.step.structure import Structure
from fds.step.totals import Totals

Local = Callable[[Any, bool], tuple[Totals, list[Any]]]


class Nothing:
    """In place of a batch on a rank that has no more, while other ranks have."""


def evaluator(step: Stations, state: State, outputs: bool = False) -> Callable[..., dict[str, Tensor]]:
    """Return a function of the batch; see `Step.evaluator`. Parameters are gathered once, at stage 3 when used."""
    local, default = _local(step, state), outputs

    @graphless
    def evaluate(batch: Any, *, outputs: bool = default) -> dict[str, Tensor]:
        totals, shown = local(batch, outputs)
        if outputs and not shown:
            raise LossError(
                "this loss shows no outputs",
                where=losses.name(step.eval_loss),
                got="outputs=True",
                want="Layers, or a loss that calls what fds.functional returned",
                hint="return what you want to see as a metric",
            )
        same_metrics(totals, step.everyone, "evaluate", step.runtime.asked)
        means = _shared(step, state, totals).means()
        return {**means, "step": state.step.clone(), **({"outputs": shown[0]} if outputs else {})}

    return evaluate


@graphless
def evaluate(step: Stations, state: State, batches: Iterable[Any]) -> dict[str, Tensor]:
    """Return the metrics of `eval_fn` (default: the loss) over many batches, and their `weight`.

    Means are those of all batches together: sum(total) / sum(weight), added in float64; a loss that returns a plain
    scalar weighs 1 a batch, so return a `Mean` where batches have different numbers of rows or tokens. Integer metrics
    are summed. `weight`, `()` float64, is the sum of all weights; where it is 0, means are NaN or infinite.

    Where ranks share the step all of them call this, each with its own batches. Ranks may have different numbers of
    them, and some none; in a pipeline all ranks have as many.

    Args:
        step: what `compose(...)(loss)` returned.
        state: whose parameters and buffers are used.
        batches: an iterable of batches, such as a loader, that ends.

    Raises `BatchError` for one batch in the place of many, no batches at all, in a pipeline different numbers of them,
    and on the other ranks where reading them failed on one; `LossError` for metrics that change; `StateError` for
    arguments in another order.
    """
    if isinstance(step, State):
        raise StateError(
            "state and step have changed places", got="a State first", want="fds.evaluate(step, state, batches)"
        )
    if is_a(batches, Tensor | Mapping | tuple) or not is_a(batches, Iterable):
        raise BatchError(
            "evaluate takes many batches",
            where="batches",
            got=type(batches).__name__,
            want="a list of batches, or a loader",
            hint="step.evaluate(state, batch) takes one",
        )
    local, sums = _local(step, state), Sums()
    for batch in _rounds(iter(batches), step.everyone, together=step.dimensions.shares_rows):
        totals, _ = local(batch, False)
        if batch is not Nothing:
            sums.add(totals, losses.name(step.eval_loss))
    totals = _shared(step, state, sums.agreed(step.everyone, state.step.device))
    weight = torch.as_tensor(totals.weight, dtype=torch.float64, device=state.step.device)
    means = {name: x.to(sums.dtypes[name]) for name, x in totals.means().items()}
    return {**means, "weight": weight, "step": state.step.clone()}


@attrs.define
class Sums:
    """Totals of batches, added in float64, and the dtypes in which they came."""

    totals: Totals | None = None
    dtypes: dict[str, torch.dtype] = tree.new(dict)

    def add(self, totals: Totals, where: str) -> None:
        """Add the totals of a batch. Raises `LossError` where it has other metrics than those before."""
        assert totals.loss is not None
        named = {"loss": totals.loss, **totals.metrics}
        kinds = {name: x.dtype for name, x in named.items()}
        self.dtypes = self.dtypes or kinds
        if kinds != self.dtypes:
            raise LossError("batches return different metrics", where=where, got=str(kinds), want=str(self.dtypes))
        wide = {name: x.double() if x.is_floating_point() else x for name, x in named.items()}
        weight = totals.weight
        if self.totals is not None:
            before = self._named()
            wide = {name: x + before[name] for name, x in wide.items()}
            weight = weight + self.totals.weight
        self.totals = attrs.evolve(totals, loss=wide.pop("loss"), metrics=wide, weight=weight)

    def agreed(self, everyone: Axis | None, device: torch.device) -> Totals:
        """Return the totals, zeros on a rank without batches. Raises `BatchError` where no rank has any."""
        kinds = {name: str(dtype).removeprefix("torch.") for name, dtype in sorted(self.dtypes.items())}
        answers = [kinds] if everyone is None else everyone.exchange(kinds, "evaluate")
        answered = [theirs for theirs in answers if theirs]
        if not answered:
            raise BatchError(
                "there are no batches to evaluate",
                got="an iterable that is empty",
                want="one or more",
                hint="a generator, or a loader that was read already, is at its end",
            )
        if any(theirs != answered[0] for theirs in answered):
            raise LossError(
                "ranks return different metrics", where="evaluate", got=str(answered[-1]), want=str(answered[0])
            )
        if self.totals is None:
            self.dtypes = {name: getattr(torch, dtype) for name, dtype in answered[0].items()}
            zero = {
                name: torch.zeros((), dtype=torch.float64 if dtype.is_floating_point else dtype, device=device)
                for name, dtype in self.dtypes.items()
            }
            self.totals = Totals(zero.pop("loss"), torch.zeros((), dtype=torch.float64, device=device), zero)
        return self.totals

    def _named(self) -> dict[str, Tensor]:
        assert self.totals is not None and self.totals.loss is not None
        named = {"loss": self.totals.loss, **self.totals.metrics}
        return {name: named[name] for name in self.dtypes}


def _rounds(batches: Iterator[Any], everyone: Axis | None, *, together: bool) -> Iterator[Any]:
    """Yield batches, and `Nothing` where only other ranks have one. Raises, on every rank, what reading one raised."""
    while True:
        batch, failed = Nothing, None
        try:
            batch = next(batches, Nothing)
        except Exception as error:
            failed = error
        report: list[Any] = [batch is not Nothing, None if failed is None else f"{type(failed).__name__}: {failed}"]
        reports = [report] if everyone is None else everyone.exchange(report, "evaluate")
        if failed is not None:
            raise failed
        for rank, (_, error) in enumerate(reports):
            if error is not None:
                raise BatchError("the batches of another rank could not be read", where=f"rank {rank}", got=error)
        has = [has_more for has_more, _ in reports]
        if not any(has):
            return
        if together and not all(has):
            raise BatchError(
                "ranks have different numbers of batches",
                where=f"rank {has.index(False)}",
                got="no more batches",
                want=f"one more, as rank {has.index(True)}",
                hint="ranks of a pipeline, or of a tensor or sequence axis, evaluate together",
            )
        yield batch


@graphless
def seen_parameters(step: Stations, state: State) -> Any:
    """Return all parameters as the loss sees them in an evaluation, whole and through the views; all ranks call it."""
    same_composition(step)
    usable(state, "seen_parameters")
    structure, parts = step.held_by(state)
    residency = deferred(step.place.residency, step.everyone)
    masters = step.masters(structure, parts, state.step.device, residency)
    params = open_parameters(step.gather, step.shard, structure, masters, Pool(), train=False, order=None)
    setting = step.settings(step.call(state, training=False), state.buffers, 1)[0]
    stations = step.microbatch(step.eval_loss, structure)
    with (
        chosen_kernels(step),
        stations.opened(params.tree, (), setting, "values given to views", plain=True) as (seen, _),
    ):
        copies = tree.map(torch.clone, seen)
    hear(residency)
    return step.dimensions.collect(copies)


def _local(step: Stations, state: State) -> Local:
    """Return a function of a batch, and of whether its outputs are wanted: this rank's totals and outputs."""
    same_composition(step)
    usable(state, "evaluate")
    structure, parts = step.held_by(state)
    waits = step.order("evaluate", structure) is not None
    residency = deferred(step.place.residency, step.everyone)
    masters = step.masters(structure, parts, state.step.device, residency)
    opened = functools.partial(
        open_parameters, step.gather, step.shard, structure, masters, step.runtime.pool, train=False
    )
    kept = None if waits else opened(order=None)

    def local(batch: Any, outputs: bool) -> tuple[Totals, list[Any]]:
        state.check("evaluate")
        if batch is not Nothing:
            same_batch(step, batch, "evaluate")
        order = step.order("evaluate", structure)
        params = kept or opened(order=order)
        ran: tuple[Totals, list[Any]] = Totals(), []
        try:
            with chosen_kernels(step):
                if batch is not Nothing:
                    ran = _run(step, state, structure, params, batch, order, outputs)
                elif order is not None:
                    order.finish()  # others gather what they need
        finally:
            params.close()
            if order is not None:
                order.joins.clear()
        hear(residency)
        return ran

    return local


def _run(
    step: Stations,
    state: State,
    structure: Structure,
    params: Parameters,
    batch: Any,
    order: Order | None,
    outputs: bool,
) -> tuple[Totals, list[Any]]:
    """Pass a batch through the stations of an evaluation: batch, split, view, context, layers, loss."""
    call = step.call(state, training=False)
    microbatches = step.split_batch(call, batch, whole=True)
    n = step.execute.pieces(microbatches, step.everyone)
    if n > 1:
        microbatches = step.in_pieces(microbatches, n, call)
    settings = step.settings(call, state.buffers, n)
    return step.execute.evaluate(
        Pass(
            loss=step.eval_loss,
            batch=microbatches,
            settings=settings,
            params=params,
            trained=(),
            buffers=state.buffers,
            each=step.microbatch(step.eval_loss, structure),
            order=order,
            everyone=step.everyone,
            runtime=step.runtime,
            outputs=outputs,
        )
    )


def _shared(step: Stations, state: State, totals: Totals) -> Totals:
    """Return the totals of all ranks."""
    agreement = Agreement(step.everyone, state.calls)
    counted = totals.put(agreement, repeats=step.dimensions.repeats)
    agreement.count()
    return counted()
