"""Look at what every operator of a step returns: a dispatch mode, which changes nothing of what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives.memory import performing
from fds.debugging.statistics import Statistics, is_finite, is_read
from fds.loss import LayerCall
from fds.profiling.counting import UNINITIALISED, Watching, tensors_of
from fds.profiling.modules import Modules
from fds.step import Call, Gradients
from fds.step.ranges import Clock

_FEW = 4  # tensors that an operator was given, and that it made, that are kept
_OVERWRITING = tuple(f"aten.{kind}{name}_" for kind in ("", "_foreach_") for name in ("copy", "fill", "zero"))


@attrs.frozen
class Culprit:
    """An operator that made numbers that are not finite of finite ones.

    Attributes:
        part: of the step: gather, forward, recomputation, backward, reduce.
        module: the innermost one that ran, or in backward whose forward is reversed; empty outside of all.
        kind: the module's class.
        operator: such as "aten.div".
        stage: of a pipeline.
        microbatch: of the batch of this rank; of a pipeline, of all.
        tensors: what it was given and what it returned.
    """

    part: str
    module: str
    kind: str
    operator: str
    stage: int | None
    microbatch: int | None
    tensors: tuple[Statistics, ...]


@attrs.define(eq=False)
class Parts(Clock):
    """Which part of a step runs now, by the ranges that a clock is told of."""

    running: list[str] = tree.new(list)
    microbatch: int | None = None
    stage: int | None = None

    def mark(self, name: str) -> None:
        """Note that a range begins, or for "" that one ends."""
        if not name:
            self.running.pop()
            return
        part, *at = name.split("/")
        self.running.append(part.removesuffix("_weight"))
        if at:  # in a pipeline: "forward/stage1/microbatch0"
            self.stage, self.microbatch = int(at[0].removeprefix("stage")), int(at[1].removeprefix("microbatch"))
        elif part == "forward":
            self.microbatch = 0 if self.microbatch is None else self.microbatch + 1

    @property
    def current(self) -> str:
        """The innermost range; empty outside of all."""
        return self.running[-1] if self.running else ""


class Checking(Watching):
    """Find the operators that make NaN or infinities of finite numbers, in a call of a step.

    Attributes:
        parts: a clock for the ranges of the step.
        culprits: part of the step -> the first of them in it, in the order in which they ran.
        of_loss: that from which the first scalar of a forward that is not finite came, mostly the loss.
        params: the names of parameters on this rank whose summed gradient is not finite.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.parts = Parts(device)
        self.culprits: dict[str, Culprit] = {}
        self.of_loss: Culprit | None = None
        self.params: dict[str, None] = {}
        self._origins: dict[int, Culprit] = {}  # address of memory -> who made what is not finite in it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and look at what it returns."""
        kwargs, part = kwargs or {}, self.parts.current
        packet = getattr(func, "_overloadpacket", None)
        if packet is None:  # an operator of higher order, such as cond, whose parts are looked at
            return NotImplemented
        if performing.get() or part in ("", "optimizer") or str(packet) in UNINITIALISED:
            return func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        reads = str(packet) not in _OVERWRITING
        bad = [x for x in written if reads and not is_finite(x)]  # before: what it had is gone afterwards
        out = func(*args, **kwargs)
        made = list({id(x): x for x in (*tensors_of(out), *written)}.values())
        if wrong := [x for x in made if not is_finite(x)]:
            given = [x for x in tensors_of((args, kwargs)) if not any(x is one for one in written)]
            bad += [x for x in given if not is_finite(x)]
            self._note(str(packet), given, made, wrong, bad, meant=_is_meant(args, kwargs))
        return out

    def _note(
        self, name: str, given: list[Tensor], made: list[Tensor], wrong: list[Tensor], bad: list[Tensor], *, meant: bool
    ) -> None:
        """Note from whom what is `wrong` of what an operator made has come: from what it was given that is `bad`.

        It is the operator's own if that was finite, unless it is `meant`.
        """
        origin = next((found for x in bad if (found := self._origins.get(_memory(x))) is not None), None)
        if not bad and not meant:
            origin = self._culprit(name, given, made)
            self.culprits.setdefault(origin.part, origin)
        if origin is None:
            for x in wrong:  # whoever had its memory before is not to be blamed
                self._origins.pop(_memory(x), None)
            return
        self._origins |= {_memory(x): origin for x in wrong}
        if self.of_loss is None and self.parts.current == "forward" and any(x.dim() == 0 for x in wrong):
            self.of_loss = origin

    def _culprit(self, name: str, given: list[Tensor], made: list[Tensor]) -> Culprit:
        module, phase = self.place()
        part = self.parts.current
        kind = self.modules.found[module].kind if module and module in self.modules.found else ""
        wrong = [i for i, x in enumerate(made) if not is_finite(x)][:_FEW]
        read = [i for i, _ in enumerate(given) if i in wrong or len(given) != len(made)][:_FEW]  # lists go pairwise
        known = [(f"input {i}", given[i]) for i in read]
        known += [("output" if len(made) == 1 else f"output {i}", made[i]) for i in wrong]
        tensors = tuple(Statistics.of(word, x) for word, x in known if is_read(x))
        part = phase if part == "backward" else part
        return Culprit(part, module, kind, name, self.parts.stage, self.parts.microbatch, tensors)


@attrs.frozen
class NamedLayers:
    """A filler of `layer`: what runs in a layer that is no module has a name too, and so has its backward."""

    modules: Modules
    draws: ClassVar = False

    def __call__(self, calls: list[LayerCall], call: Call) -> list[LayerCall]:
        """Return the calls, each inside of a name."""
        return [one.replaced(self._inside(one)) if one.layers else one for one in calls]

    def _inside(self, one: LayerCall) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self.modules.inside(", ".join(f"layers[{i}]" for i in one.layers)):
                return one.run(*args)

        return run


@attrs.frozen
class CheckedGradients:
    """A filler of `condition`: it notes the parameters on this rank whose summed gradient is not finite."""

    params: dict[str, None]
    takes_slices: ClassVar = True
    needs: ClassVar = "slices"
    draws: ClassVar = False

    def __call__(self, grads: Gradients, call: Call) -> Gradients:
        """Return the gradients as they are."""
        for leaf, inside in zip(grads.leaves, grads.segments, strict=True):
            self.params.update({one.name: None for one in inside if not is_finite(one.of(leaf.reshape(-1)))})
        return grads


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes over."""
    for i, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            yield from tensors_of(kwargs[one.name] if one.name in kwargs else args[i] if i < len(args) else ())


def _is_meant(args: Any, kwargs: Any) -> bool:
    """Say whether an operator was given a number that is not finite itself, as `masked_fill(mask, -inf)` is."""
    return any(isinstance(x, float) and not math.isfinite(x) for x in (*args, *kwargs.values()))


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
