"""The station `grads` under a pipeline: which stages this rank has, and how a batch passes through all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.collectives import Axis, fingerprint
from fds.errors import LossError
from fds.step import (
    Found,
    Order,
    Parameters,
    Seeds,
    Step,
    Structure,
    Totals,
    materialize,
    open_parameters,
    rows,
    training,
)
from fds.transforms.pipeline import ranks, serial
from fds.transforms.pipeline.batches import digest, refuse_different
from fds.transforms.pipeline.failure import Failure, first
from fds.transforms.pipeline.lowered import Lowered
from fds.transforms.pipeline.ownership import Ownership
from fds.transforms.pipeline.packet import Packet
from fds.transforms.pipeline.post import Post
from fds.transforms.pipeline.stage import Stage
from fds.transforms.pipeline.work import Work


@attrs.frozen(eq=False, repr=False)
class Pipeline:
    """Every rank of an axis holds some stages, and all run a plan together; or one process runs all of it."""

    name: str  # of the schedule
    owned: Ownership
    plan: Lowered
    num_microbatches: int
    dynamic: bool
    channels: Mapping[Any, Axis]
    whole: set[int] = attrs.field(factory=set)  # layers that B was seen to run whole: for `describe`
    forwards: dict[int, Lowered] = attrs.field(factory=dict)  # by number of microbatches

    together = True

    @property
    def axis(self) -> Axis | None:
        """The ranks that hold different parameters."""
        return self.owned.axis

    def agreement(self) -> str:
        """Return in what all ranks must agree."""
        return f"{self}, dynamic_shapes={self.dynamic}, plan {fingerprint(self.plan.plan)}"

    def __call__(
        self, step: Any, state: Any, structure: Structure, parts: list[Tensor], batch: Any, scale: Tensor | None
    ) -> Found:
        """Return the gradients of a batch: of the parameters that this rank holds.

        Raises, on every rank, what was raised on any.
        """
        seen = digest(batch) if self.axis is not None and self.plan.reads else None
        totals, sums, buffers, failure, whole = self._train(step, state, structure, parts, batch, scale)
        used, leaves = sums.used(), sums.finish()
        try:
            wide = any(x.dtype is torch.float64 for x in leaves)
            totals, wide = self._agree(step, totals, failure, whole, wide, seen)
        except BaseException:
            step.runtime.memories.clear()  # what was learned in a step that failed is not what comes next
            raise
        return Found(totals, leaves, used, buffers, sums.predivide, wide)

    def _train(
        self, step: Step, state: Any, structure: Structure, parts: list[Tensor], batch: Any, scale: Tensor | None
    ) -> tuple[Totals, Any, dict[str, Tensor], Failure | None, list[int]]:
        """Run the plan; return totals, sums of gradients, buffers, what failed here, and layers that B ran whole."""
        order = step.order("step", structure)
        params = open_parameters(step.gather, structure, parts, step.runtime.pool, train=True, order=order)
        kinds = self._dtypes(step, params.trained)
        sums = step.reduce.sums(structure, params.trained, step.sum.dtype, step.runtime.pool, order, kinds)
        seeds = Seeds.of(step, scale, self.num_microbatches, kinds, None)  # every action settles
        named = dict(zip(structure.trained_names, params.trained, strict=True))
        work, failure = self._work(
            step, state, params.tree, named, batch, self.plan, sums.add, seeds=seeds, order=order
        )
        with training(work.settings[0], params, sums, order):
            failure = self._run(step, self.plan, work, failure)
        buffers = {name: x for stage in work.stages.values() for name, x in stage.buffers.items()}
        whole = sorted({layer for stage in work.stages.values() for layer in stage.whole})
        if seeds.share is not None:
            work.totals.divisor = 0 if seeds.divisor is None else seeds.divisor
        return work.totals, sums, buffers, failure, whole

    def _dtypes(self, step: Any, trained: Sequence[Tensor]) -> list[torch.dtype | None]:
        """Return the dtypes in which the loss sees parameters: those of all ranks, which are to divide alike.

        They hold other parameters, so they ask each other, in the first call.
        """
        if step.gather.dtype is not None:
            return [step.gather.dtype]
        if "kinds" not in step.runtime.asked:
            mine = sorted({str(x.dtype).removeprefix("torch.") for x in trained})
            heard = [mine] if step.everyone is None else step.everyone.exchange(mine, "step")
            step.runtime.asked["kinds"] = sorted({name for one in heard for name in one})
        return [getattr(torch, name) for name in step.runtime.asked["kinds"]]

    def forward(
        self, step: Any, state: Any, params: Parameters, batch: Any, order: Order | None, *, outputs: bool
    ) -> tuple[Totals, list]:
        """Evaluate a batch: in the step's microbatches where its rows divide into them, else in one piece."""
        n, failure = self._agreed_microbatches(step, state, batch)
        if n not in self.forwards:
            self.forwards[n] = self.plan.forwards(n)
        plan = self.forwards[n]
        work, failure = self._work(step, state, params.tree, {}, batch, plan, lambda backward, last: None,
                                   order=order, evaluating=True, keeps=outputs, failure=failure)  # fmt: skip
        shown: list = []
        with random.scope(work.settings[0].devices), torch.no_grad():
            failure = self._run(step, plan, work, failure)
            if failure is None and outputs and self.owned.num_stages - 1 in work.stages:
                try:
                    packets = [work.outputs[i] for i in range(n)]
                    shown = [tree.map(_plain, _joined([packet.build(packet.leaves) for packet in packets]))]
                    shown.append(Packet.of(shown[0]).header("the outputs"))
                except Exception as error:
                    failure = Failure.of(error)
        if order is not None:
            order.finish()
        totals, _ = self._agree(step, work.totals, failure, [], False, what="evaluate")
        return totals, [self.owned.from_last(*shown)] if outputs else []

    def _work(
        self, step: Step, state: Any, params: Any, named: dict[str, Tensor], batch: Any, plan: Lowered,
        add: Callable[..., None], *, seeds: Seeds | None = None, order: Order | None = None, evaluating: bool = False,
        keeps: bool = False, failure: Failure | None = None,
    ) -> tuple[Work, Failure | None]:  # fmt: skip
        """Return the computations of this rank, and what is wrong with its batch."""
        loss, n = step.eval_loss if evaluating else step.loss, plan.num_microbatches
        settings = step.settings(state, n, evaluating=evaluating, draws=self.owned.draws(loss))
        stages = {}
        for index in self.owned.own_stages:
            layers = self.owned.layers(index)
            mine = {name for i in layers for name in loss.layer(i).params}
            held = {name: state.buffers[name] for i in layers for name in loss.layer(i).buffers}
            leaves = [x for name, x in named.items() if name in mine]
            stages[index] = Stage(step, loss, layers, params, leaves, held, add)
        microbatches: list[Any] = [None] * n
        if batch is not None and failure is None and plan.reads:
            try:
                microbatches = [loss.split(one) for one in step.microbatches(state, batch, n, evaluating=evaluating)]
            except Exception as error:
                failure = Failure.of(error)
        work = Work(
            stages, self.owned.num_stages, microbatches, settings, plan.split, plan.final, seeds, order, keeps
        )  # fmt: skip
        return work, failure

    def _run(self, step: Step, plan: Lowered, work: Work, failure: Failure | None) -> Failure | None:
        if self.axis is None:
            return serial.run(plan.plan, work, failure)
        pool = step.runtime.pool if plan.plan.trains else None
        post = Post(pool, self.owned.placement, self.channels, self.owned.index, dynamic=self.dynamic, early=plan.early)
        return ranks.run(plan, work, post, failure)

    def _agree(
        self, step: Step, totals: Totals, failure: Failure | None, whole: list[int], wide: bool,
        seen: list[int | None] | None = None, what: str = "step",
    ) -> tuple[Totals, bool]:  # fmt: skip
        """Return totals with zeros for what the last stage alone has, and whether any rank has float64 gradients.

        Raises, on every rank, what was raised first on any, and `BatchError` where ranks along the pipeline were given
        different batches.
        """
        if step.everyone is None:
            if failure is not None:
                raise failure.alone()
            self.whole.update(whole)
            return totals, wide
        said = [failure and failure.json(), _kinds(totals), whole, wide, seen]
        heard = step.everyone.exchange(said, what)
        if failed := first([one[0] for one in heard]):
            rank, known = failed
            mine = failure is not None and rank == step.everyone.index
            known = failure if mine and failure is not None else known
            raise known.raised(f"rank {rank} of {step.everyone.name}")
        refuse_different([one[4] for one in heard], 1 if self.axis is None else self.axis.size)
        kinds = [one[1] for one in heard if one[1] is not None]
        if any(kind != kinds[0] for kind in kinds):
            raise LossError("ranks return different metrics", got=str(kinds[-1]), want=str(kinds[0]))
        self.whole.update(layer for one in heard for layer in one[2])
        return _like(totals, kinds[0], self.owned.device), any(one[3] for one in heard)

    def _agreed_microbatches(self, step: Step, state: Any, batch: Any) -> tuple[int, Failure | None]:
        """Return into how many microbatches a batch is cut for evaluation: the same on all ranks of the step."""
        n, failure = None, None
        if batch is not None and self.plan.reads:
            try:
                (one,) = step.microbatches(state, batch, 1, evaluating=True)
                length = rows(one)
                n = self.num_microbatches if length and length % self.num_microbatches == 0 else 1
            except Exception as error:
                failure = Failure.of(error)
        heard = [n] if step.everyone is None else step.everyone.exchange(n, "evaluate")
        return min((m for m in heard if m is not None), default=1), failure

    def __repr__(self) -> str:
        who = "one process" if self.axis is None else f"{self.axis.name} ({self.axis.size} ranks)"
        text = f"{self.name} over {who}, {self.num_microbatches} microbatches; layers {self.owned}"
        text += f"; bubble {self.plan.bubble:.0%} of equal stages"
        layers = ", ".join(map(str, sorted(self.whole)))
        return text + (f"; backward not split in layers {layers}" if self.whole else "")


def _kinds(totals: Totals) -> list | None:
    """Return the dtypes of totals, as JSON, None where there are none."""
    if totals.loss is None:
        return None
    name = lambda x: str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else "float64"
    return [name(totals.loss), name(totals.weight), totals.count, totals.weighted,
            [[metric, name(x)] for metric, x in sorted(totals.metrics.items())]]  # fmt: skip


def _like(totals: Totals, kinds: list, device: torch.device) -> Totals:
    """Return totals, or zeros of these kinds where there are none."""
    if totals.loss is not None:
        return totals
    zero = lambda kind: torch.zeros((), dtype=getattr(torch, kind), device=device)
    loss, weight, count, weighted, metrics = kinds
    sums = {metric: zero(kind) for metric, kind in metrics}
    return Totals(zero(loss), zero(weight), sums, count, weighted, totals.divisor)


def _joined(outputs: list[Any]) -> Any:
    """Return the outputs of microbatches as one: rows put together, of the rest the first's."""
    join = lambda *xs: torch.cat(xs) if isinstance(xs[0], Tensor) and xs[0].dim() else xs[0]
    try:
        return tree.map(join, *outputs) if len(outputs) > 1 else outputs[0]
    except (RuntimeError, ValueError, TypeError) as error:
        raise LossError(
            "the outputs of microbatches cannot be put together", where="evaluate(..., outputs=True)",
            got=str(error)[:200], want="outputs alike but for the number of rows",
            hint="a batch whose rows do not divide into the microbatches is evaluated in one piece",
        ) from error  # fmt: skip


def _plain(x: Any) -> Any:
    return materialize(x).detach().clone() if isinstance(x, Tensor) else x
