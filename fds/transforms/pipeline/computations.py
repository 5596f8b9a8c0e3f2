"""The actions of a plan, done on the stages of this process; how packets travel is the mail's business."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import loss as losses, tree
from fds.errors import BatchError, RankError
from fds.plans import Action, Op, recorder
from fds.step import Kept, Order, Seeds, Totals, profiled
from fds.transforms.pipeline.packet import Packet
from fds.transforms.pipeline.stage import Stage

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)  # what begins a microbatch's backward
Item = tuple[str, int, int]  # ("activation" or "gradient", the stage that needs it, microbatch)


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
