"""The station `execute` under a pipeline: which stages this rank has, and how a batch passes through all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.collectives import Axis, fingerprint
from fds.collectives.links import dry
from fds.collectives.traffic import Expected
from fds.errors import LossError
from fds.microbatches import Microbatches
from fds.step import Pass, PassResult, Runtime, SplitBatch, Totals, materialize, rows
from fds.transforms.pipeline.computations import Computations, Failure, Lowered, first_failure, run_alone, run_row
from fds.transforms.pipeline.ownership import Ownership
from fds.transforms.pipeline.packets import Packet
from fds.transforms.pipeline.post import Post, expected
from fds.transforms.pipeline.stage import Stage


@attrs.frozen(eq=False, repr=False)
class Pipeline:
    """Every rank of an axis holds some stages, and all run a plan together; or one process runs all of it."""

    name: str  # of the schedule
    owned: Ownership
    plan: Lowered
    num_microbatches: int
    dynamic: bool
    channels: Mapping[Any, Axis]
    whole: set[int] = tree.new(set)  # layers that B was seen to run whole: for `describe`
    headers: dict[int, Any] = tree.new(dict)  # of what went over each border of this rank last: for `describe`
    kinds: dict[str, list[Any]] = tree.new(dict)  # of totals, in words, of the last call that told them; by what it was

    together = True

    @property
    def axis(self) -> Axis | None:
        """The ranks that hold other stages."""
        return self.owned.axis

    @property
    def runs_first(self) -> bool:
        """Whether the first stage is here."""
        return 0 in self.owned.own_stages

    def agreement(self) -> str:
        """Return in what all ranks must agree."""
        return f"{self}, dynamic_shapes={self.dynamic}, plan {fingerprint(self.plan.plan)}"

    def reads(self, batch: Any) -> bool:
        """Say whether a stage of this rank needs inputs or targets, and the batch has some."""
        return batch is not None and self.plan.reads

    def parts(self, batch: Any) -> list[Any]:
        """Return inputs and targets, None for what is not there; nothing of what is no pair, and refused later."""
        each = batch.parts if isinstance(batch, Microbatches) else (batch,)
        if not self.plan.reads or not all(tree.is_sequence(part) and len(part) == 2 for part in each):
            return []
        halves = list(zip(*each, strict=True))
        return [None if all(x is None for x in half) else half[0] if len(half) == 1 else half for half in halves]

    def draws(self, loss: Any) -> list[bool]:
        """Say which calls of the loss this rank makes and may draw in."""
        return self.owned.draws(loss)

    def dtypes(
        self,
        trained: Sequence[Tensor],
        computed: torch.dtype | None,
        everyone: Axis | None,
        asked: dict[str, list[str]],
    ) -> list[torch.dtype]:
        """Return the dtypes of the parameters of all stages; ranks exchange theirs in the first call."""
        if computed is not None:
            return [computed]
        if "kinds" not in asked:
            mine = sorted({str(x.dtype).removeprefix("torch.") for x in trained})
            replies = [mine] if everyone is None else everyone.exchange(mine, "step")
            asked["kinds"] = sorted({name for reply in replies for name in reply})
        return [getattr(torch, name) for name in asked["kinds"]]

    def messages(self, everyone: Axis, *, keeps: bool) -> Iterator[Expected]:
        """Yield the report at the end, and what goes over the borders of this rank's stages, once a call has shown it.

        Nothing is known of that where shapes may differ.
        """
        if self.axis is not None:
            yield Expected.of(everyone, "all_gather", 2, torch.int64, what="step")
            if not self.dynamic:
                yield from expected(self.plan.row, self.owned.placement, self.channels, self.headers, keeps)

    def train(self, run: Pass) -> PassResult:
        """Run the plan."""
        assert run.sums is not None and run.seeds is not None
        work, failure = self._work(run, self.plan, run.sums.add)
        failure = self._run(run, self.plan, work, failure)
        buffers = {name: x for stage in work.stages.values() for name, x in stage.buffers.items()}
        whole = sorted({layer for stage in work.stages.values() for layer in stage.whole})
        if run.seeds.share is not None:
            work.totals.divisor = 0 if run.seeds.divisor is None else run.seeds.divisor
        return PassResult(work.totals, buffers, (failure, whole))

    def agree(self, ran: PassResult, everyone: Axis | None, runtime: Runtime, *, wide: bool) -> tuple[Totals, bool]:
        """Return the totals of the last stage. Raises, on every rank, what was raised on any."""
        try:
            totals, wide = self._agree(ran.totals, everyone, *ran.report, wide=wide)
        except BaseException:
            runtime.memories.clear()  # what was learned in a step that failed is not what comes next
            raise
        if "step" not in runtime.asked:  # for `describe`
            kinds = {name: "mean" if x.is_floating_point() else "sum" for name, x in totals.metrics.items()}
            runtime.asked["step"] = [f"{name}: {kind}" for name, kind in kinds.items()]
        return totals, wide

    def pieces(self, batch: SplitBatch, everyone: Axis | None) -> int:
        """Return the step's number of microbatches where the rows divide into them on all ranks, else 1."""
        n = None
        if batch.microbatches is not None:
            length = rows(batch.microbatches[0])
            n = self.num_microbatches if length and length % self.num_microbatches == 0 else 1
        counts = [n] if everyone is None else everyone.exchange(n, "evaluate")
        return min((m for m in counts if m is not None), default=1)

    def evaluate(self, run: Pass) -> tuple[Totals, list[Any]]:
        """Run the plan's forwards; what the last layer returned goes to all ranks."""
        n = run.batch.count
        plan = run.runtime.forwards.get(n) or run.runtime.forwards.setdefault(n, self.plan.forwards(n))
        work, failure = self._work(run, plan, _add_nothing)
        shown: list[Any] = []
        with random.scope(run.settings[0].devices), torch.no_grad():
            failure = self._run(run, plan, work, failure)
            if failure is None and run.outputs and self.owned.num_stages - 1 in work.stages:
                try:
                    packets = [work.outputs[i] for i in range(n)]
                    shown = [tree.map(_plain, _joined([packet.build(packet.leaves) for packet in packets]))]
                    shown.append(Packet.of(shown[0]).header("the outputs"))
                except Exception as error:
                    failure = Failure.of(error)
        if run.order is not None:
            run.order.finish()
        totals, _ = self._agree(work.totals, run.everyone, failure, [], wide=False, what="evaluate")
        return totals, [self.owned.from_last(*shown)] if run.outputs else []

    def _work(self, run: Pass, plan: Lowered, add: Callable[..., None]) -> tuple[Computations, Failure | None]:
        """Return the computations of this rank, and what is wrong with its batch."""
        loss, params = run.loss, run.params
        stages: dict[int, Stage] = {}
        named = dict(zip(run.trained, params.trained, strict=True)) if run.trained else {}
        for index in self.owned.own_stages:
            layers = self.owned.layers(index)
            mine = {name for i in layers for name in loss.layer(i).params}
            buffers = {name: run.buffers[name] for i in layers for name in loss.layer(i).buffers}
            leaves = [x for name, x in named.items() if name in mine]
            stage_params = {name: x for name, x in params.tree.items() if name in mine}
            again = {name for name in mine if self.owned.stages[name][0] != index}
            stages[index] = Stage(run.each, loss, layers, stage_params, leaves, buffers, add, again)
        failure = None if run.batch.error is None else Failure.of(run.batch.error)
        microbatches: list[Any] = [None] * run.batch.count
        if run.batch.microbatches is not None:
            try:
                microbatches = [loss.split(microbatch) for microbatch in run.batch.microbatches]
            except Exception as error:
                failure = Failure.of(error)
        return Computations(
            stages,
            self.owned.num_stages,
            microbatches,
            run.settings,
            plan.split,
            plan.final,
            run.seeds,
            run.order,
            run.outputs,
            run.sums and run.sums.kept,
        ), failure

    def _run(self, run: Pass, plan: Lowered, work: Computations, failure: Failure | None) -> Failure | None:
        if self.axis is None:
            return run_alone(plan.plan, work, failure)
        pool = run.runtime.pool if plan.plan.trains else None
        post = Post(
            pool,
            self.owned.placement,
            self.channels,
            self.owned.index,
            dynamic=self.dynamic,
            early=plan.early,
            last=self.headers,
            shares=work.kept is not None,
        )
        failure = run_row(plan, work, post, failure)
        if plan.plan.trains:
            for stage in post.borders:
                self.headers[stage] = post.borders[stage].header
        return failure

    def _agree(
        self,
        totals: Totals,
        everyone: Axis | None,
        failure: Failure | None,
        whole: list[int],
        *,
        wide: bool,
        what: str = "step",
    ) -> tuple[Totals, bool]:
        """Return totals with zeros for what the last stage alone has, and whether any rank has float64 gradients.

        Raises, on every rank, what was raised first on any.
        """
        if failure is not None and (everyone is None or dry.get() is not None):  # there is nobody to tell
            raise failure.alone()
        if everyone is None:
            self.whole.update(whole)
            return totals, wide
        kinds = _kinds(totals)
        # what a call says that earlier ones did not, or that something failed, is told in words
        news = failure is not None or not self.whole.issuperset(whole) or kinds not in (None, self.kinds.get(what))
        numbers = everyone.exchange_numbers([int(news or what not in self.kinds), int(wide)], what)
        if not any(has_news for has_news, _ in numbers):
            return _like(totals, self.kinds[what], self.owned.device), any(is_wide for _, is_wide in numbers)
        reports = everyone.exchange([failure and failure.json(), kinds, whole], what)
        if failed := first_failure([report[0] for report in reports]):
            rank, first = failed
            mine = failure is not None and rank == everyone.index
            first = failure if mine and failure is not None else first
            raise first.raised(f"rank {rank} of {everyone.name}")
        all_kinds = [report[1] for report in reports if report[1] is not None]
        if any(kinds != all_kinds[0] for kinds in all_kinds):
            raise LossError("ranks return different metrics", got=str(all_kinds[-1]), want=str(all_kinds[0]))
        self.whole.update(layer for report in reports for layer in report[2])
        if not all_kinds:  # ranks that are only planned: the one that would say runs elsewhere, or not at all
            return _like(totals, _A_LOSS, self.owned.device), wide
        self.kinds[what] = all_kinds[0]
        return _like(totals, all_kinds[0], self.owned.device), any(is_wide for _, is_wide in numbers)

    def __repr__(self) -> str:
        who = "one process" if self.axis is None else f"{self.axis.name} ({self.axis.size} ranks)"
        text = f"{self.name} over {who}, {self.num_microbatches} microbatches; layers {self.owned}"
        text += f"; bubble {self.plan.bubble:.0%} of equal stages"
        layers = ", ".join(map(str, sorted(self.whole)))
        return text + (f"; backward not split in layers {layers}" if self.whole else "")


_A_LOSS: list[Any] = ["float32", "float32", 1, False, []]  # the kinds of totals without metrics


def _kinds(totals: Totals) -> list[Any] | None:
    """Return the dtypes of totals, as JSON, None where there are none."""
    if totals.loss is None:
        return None

    def name(x: Tensor | float) -> str:
        return str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else "float64"

    return [
        name(totals.loss),
        name(totals.weight),
        totals.count,
        totals.weighted,
        [[metric, name(x)] for metric, x in sorted(totals.metrics.items())],
    ]


def _like(totals: Totals, kinds: list[Any], device: torch.device) -> Totals:
    """Return totals, or zeros of these kinds where there are none."""
    if totals.loss is not None:
        return totals

    def zero(kind: str) -> Tensor:
        return torch.zeros((), dtype=getattr(torch, kind), device=device)

    loss, weight, count, weighted, metrics = kinds
    sums = {metric: zero(kind) for metric, kind in metrics}
    return Totals(zero(loss), zero(weight), sums, count, weighted, totals.divisor)


def _joined(outputs: list[Any]) -> Any:
    """Return the outputs of microbatches as one: rows put together, of the rest the first's."""

    def join(*xs: Any) -> Any:
        return torch.cat(xs) if isinstance(xs[0], Tensor) and xs[0].dim() else xs[0]

    try:
        return tree.map(join, *outputs) if len(outputs) > 1 else outputs[0]
    except (RuntimeError, ValueError, TypeError) as error:
        raise LossError(
            "the outputs of microbatches cannot be put together",
            where="evaluate(..., outputs=True)",
            got=str(error)[:200],
            want="outputs alike but for the number of rows",
            hint="a batch whose rows do not divide into the microbatches is evaluated in one piece",
        ) from error


def _add_nothing(backward: Callable[[list[Tensor]], None], last: bool) -> None:
    """Add the gradients of a pass that has no backward."""


def _plain(x: Any) -> Any:
    return materialize(x).detach().clone() if isinstance(x, Tensor) else x
