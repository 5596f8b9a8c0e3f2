"""A plan as one process runs it: the actions done on its stages, in order, and what becomes of a failure."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import errors, loss as losses, tree
from fds.errors import BatchError, FdsError, RankError
from fds.plans import Action, Op, Plan, assign_buffers, communicate, forwards_of, linear, overlap, recorder, simulate
from fds.plans.plan import COMPUTE
from fds.step import Kept, Order, Seeds, Totals, profiled
from fds.transforms.pipeline.packets import Packet
from fds.transforms.pipeline.post import Item, Post
from fds.transforms.pipeline.stage import Stage


@attrs.frozen(slots=False, eq=False)
class Lowered:
    """A plan, and this rank's part of it; `index` is None where one process does all."""

    plan: Plan
    index: int | None
    early: bool  # receives may begin before they are needed

    @property
    def num_microbatches(self) -> int:
        """How many microbatches a batch is cut into."""
        return self.plan.num_microbatches

    @functools.cached_property
    def whole(self) -> Plan:
        """The plan of all ranks with its messages and buffers."""
        plan = communicate(self.plan)
        return assign_buffers(overlap(plan) if self.early else plan)

    @functools.cached_property
    def row(self) -> tuple[Action, ...]:
        """What this rank does."""
        assert self.index is not None
        return self.whole.rows[self.index]

    @functools.cached_property
    def places(self) -> dict[Action, int]:
        """Of every action of the plan, its place in an order of all."""
        return {action: place for place, (_, action) in enumerate(linear(self.whole))}

    @functools.cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch)s whose backward is in two halves."""
        actions = (a for row in self.plan.rows for a in row)
        return frozenset((a.stage, a.microbatch) for a in actions if a.op is Op.BACKWARD_WEIGHT)  # type: ignore[misc]

    @functools.cached_property
    def final(self) -> Action | None:
        """The last backward that completes a sum on this rank."""
        actions = [a for _, a in linear(self.plan)] if self.index is None else self.row
        ends = [a for a in actions if a.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)]
        return ends[-1] if ends else None

    @property
    def reads(self) -> bool:
        """Whether this rank has the first or the last stage, which need the batch."""
        ends = {self.plan.placement[0], self.plan.placement[self.plan.num_stages - 1]}
        return self.index is None or self.index in ends

    @functools.cached_property
    def bubble(self) -> float:
        """The bubble's share of the time, if all stages cost the same."""
        return simulate(self.plan).bubble_fraction

    def forwards(self, num_microbatches: int) -> Lowered:
        """Return the plan of forwards alone, for stages that lie where this plan has them."""
        return Lowered(forwards_of(self.plan.placement, num_microbatches), self.index, self.early)


BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)  # what begins a microbatch's backward


class Mail(Protocol):
    """How what a stage makes gets to the stage that needs it."""

    def give(self, item: Item, value: Any) -> None:
        """Take what was made: a `Packet`, or a list of gradients by leaf of one."""
        ...

    def take(self, item: Item) -> Any:
        """Return what is needed, once it is there."""
        ...


class Local:
    """Mail inside one process."""

    def __init__(self) -> None:
        self.box: dict[Item, Any] = {}

    def give(self, item: Item, value: Any) -> None:
        """Keep it."""
        self.box[item] = value

    def take(self, item: Item) -> Any:
        """Hand it over."""
        return self.box.pop(item)


@attrs.define(eq=False)
class Computations:
    """The computations of one pass through a plan, on the stages of this process."""

    stages: dict[int, Stage]
    num_stages: int
    microbatches: Sequence[Any]  # (inputs, targets) each, or None where neither is needed
    settings: Sequence[losses.Setting]
    split: Collection[tuple[int, int]]  # (stage, microbatch)s whose backward is in two halves
    final: Action | None  # the last backward of this process: then sums are complete
    seeds: Seeds | None = None  # None where there are no backwards
    order: Order | None = None  # in which data ranks meet
    keeps: bool = False  # whether what the last stage returned is wanted
    kept: Kept | None = None  # what transports keep: then the weights of microbatches travel with their gradients
    shares: dict[int, Tensor] = tree.new(dict)  # by microbatch, how much it adds to the weight over the divisor
    totals: Totals = attrs.field(factory=Totals)
    outputs: dict[int, Packet] = tree.new(dict)
    outcomes: dict[int, losses.Outcome] = tree.new(dict)  # by microbatch, until its backward begins
    began: float = 0.0  # when what an action needs was there, where that is recorded

    def do(self, action: Action, mail: Mail) -> None:
        """Do a computation."""
        self._do(action, mail)
        if (recording := recorder()) is not None:
            recording.add(action, self.began, self._now())

    def skip(self, action: Action) -> None:
        """Do what data ranks need of a computation that this rank cannot do."""
        if self.seeds is not None and action.op in BACKWARDS and action.stage == self.num_stages - 1:
            self.seeds.decide(None)
        if action == self.final:
            try:
                self._weigh()
                next(iter(self.stages.values())).add(_nothing, last=True)
            except RankError:
                raise
            except Exception:  # a transport fails again: what failed first is raised, when all ranks know of it
                pass
        self._settle(action)

    def _do(self, action: Action, mail: Mail) -> None:
        s, i, last = action.stage, action.microbatch, action == self.final
        assert s is not None and i is not None
        stage = self.stages[s]
        if action.op is Op.FORWARD:
            self._forward(stage, s, i, mail)
        elif action.op is Op.BACKWARD_WEIGHT:
            if last:
                self._weigh()
            self._begin()
            with profiled("backward_weight", stage=s, microbatch=i):
                stage.backward_weight(i, last=last)
        else:
            grads = self._seed(i) if s + 1 == self.num_stages else mail.take(("gradient", s, i))
            share = [] if self.kept is None else [grads.pop()]
            self.shares.update((i, x) for x in share)
            if last:
                self._weigh()
            self._begin()
            with profiled("backward", stage=s, microbatch=i):
                whole = action.op is Op.BACKWARD
                grads = stage.backward(i, grads, last=last) if whole else stage.backward_input(i, grads)
            if s:
                mail.give(("gradient", s - 1, i), [*grads, *share])
        self._settle(action)

    def _forward(self, stage: Stage, s: int, i: int, mail: Mail) -> None:
        inputs, targets = self._microbatch(s, i) if s in (0, self.num_stages - 1) else (None, None)
        packet = mail.take(("activation", s, i)) if s else Packet.of(inputs)
        self._begin()
        with profiled("forward", stage=s, microbatch=i):
            packet, outcome = stage.forward(i, packet, self.settings[i], targets, split=(s, i) in self.split)
        if outcome is None:
            mail.give(("activation", s + 1, i), packet)
            return
        if self.keeps:
            self.outputs[i] = packet
        self.totals.add(outcome, "the criterion of Layers")
        if self.seeds is not None:
            self.outcomes[i] = attrs.evolve(outcome, metrics={}, buffers={})

    def _seed(self, i: int) -> list[Tensor]:
        """Return the gradient at which backward of microbatch `i` begins, and its share where that is asked for."""
        assert self.seeds is not None
        outcome = self.outcomes.pop(i)
        seed = self.seeds.seed(outcome, self.microbatches[i][1])
        seed = torch.ones_like(outcome.total) if seed is None else seed
        return [seed] if self.kept is None else [seed, self.seeds.share_of(outcome)]

    def _weigh(self) -> None:
        """Add up what the batch weighs, before the last gradients come; data ranks call it at the same action."""
        if self.kept is not None and self.kept.total is None:
            assert self.seeds is not None
            zero = torch.zeros((), dtype=torch.float64, device=self.settings[0].devices[0])
            self.kept.weigh(self.seeds.summed(sum(self.shares.values(), zero)))

    def _microbatch(self, s: int, i: int) -> tuple[Any, Any]:
        if self.microbatches[i] is None:
            needs = "inputs" if s == 0 else "targets"
            raise BatchError(
                f"this rank needs the {needs} of the batch",
                got="None",
                want="(inputs, targets)",
                hint="ranks that differ only along the pipeline pass the same batch; None where a rank "
                "has neither the first stage nor the last",
            )
        return self.microbatches[i]

    def _begin(self) -> None:
        """Begin to count an action's time: waiting for what it needs is none of it."""
        if recorder() is not None:
            self.began = self._now()

    def _now(self) -> float:
        """Return the time in seconds, when what was begun is done: a recording waits for the device."""
        for device in self.settings[0].devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return time.perf_counter()

    def _settle(self, action: Action) -> None:
        """Let data ranks, which gather and reduce at their own times, come to the end of this action together."""
        gathers = self.order is not None and "gather" in self.order.joins
        if self.order is not None and (gathers or action.op is not Op.FORWARD):
            self.order.settle()


def _nothing(leaves: list[Tensor]) -> None:
    """Be a backward that adds nothing to the gradients."""


def run_row(plan: Lowered, work: Computations, post: Post, failure: Failure | None) -> Failure | None:
    """Do this rank's row; return what failed first on it, where something did. Raises `RankError` for a lost rank.

    A row is lowered: it says when a message is sent, and from when on it may be received. Both only begin there; a send
    is waited for when its buffer is needed again, a receive when what it brings is used. A rank on which an action
    fails goes on through its row without computing: it receives what is sent to it and sends zeros, so that no other
    rank waits for it, and at the end all ranks learn what happened.
    """
    for action in plan.row:
        if failure is None:
            try:
                _do(action, work, post)
                continue
            except RankError:
                raise
            except Exception as error:
                failure = Failure.of(error, plan.places[action], action)
        if action.op in COMPUTE:
            post.forgo(action)
            work.skip(action)
        else:
            _do(action, work, post, hollow=True)
    post.close()
    return failure


def _do(action: Action, work: Computations, post: Post, *, hollow: bool = False) -> None:
    if action.op in COMPUTE:
        work.do(action, post)
    elif action.op in (Op.SEND_ACTIVATION, Op.SEND_GRAD):
        post.send(action, hollow=hollow)
    elif action.op in (Op.RECV_ACTIVATION, Op.RECV_GRAD):
        post.receive(action)


def run_alone(plan: Plan, work: Computations, failure: Failure | None) -> Failure | None:
    """Do the computations of a plan; return what failed first, where something did. Raises what a lost rank raises.

    One process does all rows, in one order that gives each action what it needs: it sends nothing and cannot deadlock.
    """
    mail = Local()
    for place, (_, action) in enumerate(linear(plan)):
        if failure is None:
            try:
                work.do(action, mail)
                continue
            except RankError:
                raise
            except Exception as error:
                failure = Failure.of(error, place, action)
        work.skip(action)  # data ranks still meet
    return failure


_WORDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward (B)",
    Op.BACKWARD_WEIGHT: "backward (W)",
    Op.SEND_ACTIVATION: "output",
    Op.SEND_GRAD: "gradient",
    Op.RECV_ACTIVATION: "input",
    Op.RECV_GRAD: "gradient of the output",
}


@attrs.frozen
class Failure:
    """An error at a place of the plan: what came of it elsewhere has a later place."""

    place: int  # in the order of the whole plan; -1 before it begins
    where: str
    kind: str  # of the error
    fields: tuple[str, ...]  # of an `FdsError`; the text of any other
    error: Exception | None = attrs.field(default=None, eq=False)  # on the rank that failed

    @classmethod
    def of(cls, error: Exception, place: int = -1, action: Action | None = None) -> Failure:
        """Return the failure of an action, or of what comes before the first."""
        where = "" if action is None else f"stage {action.stage}, {_WORDS[action.op]} of microbatch {action.microbatch}"
        kind = type(error).__name__
        if isinstance(error, FdsError):
            kind = next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
            fields = tuple(map(_text, (error.what, error.where, error.got, error.want, error.hint)))
        else:
            fields = ("\n".join([_text(error), *map(_text, getattr(error, "__notes__", ()))]),)
        return cls(place, where, kind, fields, error)

    def json(self) -> list[Any]:
        """Return it for the other ranks."""
        return [self.place, self.where, self.kind, list(self.fields)]

    def alone(self) -> Exception:
        """Return what one process raises: an `FdsError` with stage and microbatch, any other with a note of them."""
        assert self.error is not None
        if isinstance(self.error, FdsError):
            return self.raised()
        self.error.add_note(f"in {self.where}" if self.where else "before the pipeline began")
        return self.error

    def raised(self, rank: str = "") -> FdsError:
        """Return what every rank raises: an `FdsError` as it was, with stage and microbatch; else `RankError`."""
        where = ", ".join(filter(None, [rank, self.where]))
        kind = getattr(errors, self.kind, None)
        if kind is not None and len(self.fields) == 5:
            what, place, got, want, hint = self.fields
            made = kind(what, where=": ".join(filter(None, [where, place])), got=got, want=want, hint=hint)
        else:
            made = RankError("a stage of the pipeline failed", where=where, got=f"{self.kind}: {self.fields[0]}")
        made.__cause__ = self.error
        return made


def _text(x: object) -> str:
    """Return a text of anything, even of what fails to say what it is: the other ranks wait for it."""
    try:
        return str(x)[:2000]
    except Exception as error:
        return f"(its text cannot be made: {type(error).__name__})"


def first_failure(failures: Sequence[list[Any] | None]) -> tuple[int, Failure] | None:
    """Return which rank failed first, and how, given what `json` returned on those that did."""
    ranked = [(report[0], rank, report) for rank, report in enumerate(failures) if report is not None]
    if not ranked:
        return None
    _, rank, (place, where, kind, fields) = min(ranked, key=lambda entry: entry[:2])
    return rank, Failure(place, where, kind, tuple(fields))
