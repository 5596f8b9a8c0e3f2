"""Look at what every operator of a step returns: a dispatch mode, which changes nothing of what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeGuard, cast

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives.simulation import performing
from fds.loss import LayerCall
from fds.profiling.counting import UNINITIALISED
from fds.profiling.modules import Modules, Watching, tensors_of
from fds.step import Call, Gradients
from fds.step.ranges import Clock

_STEP = 2**22  # elements that are looked at together: a leaf may lie on a disk, and be larger than memory


@attrs.frozen
class Statistics:
    """What is in a tensor.

    Attributes:
        name: what it is: "output", "input 1", "params.1.weight".
        dtype: such as "float16".
        shape: of the tensor.
        num_nan: how many elements are NaN.
        num_inf: how many are infinite, of either sign.
        least: the smallest finite element; None where there is none, as in the next two.
        most: the largest finite element.
        mean: of the finite elements.
        first: index of the first element that is not finite; None where all are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    least: float | None
    most: float | None
    mean: float | None
    first: tuple[int, ...] | None

    @classmethod
    def of(cls, name: str, x: Tensor) -> Statistics:
        """Look at every element."""
        nan = inf = finite = at = 0
        least, most, total, first = math.inf, -math.inf, 0.0, None
        for part in _pieces(x):
            bad, is_nan = ~part.isfinite(), int(part.isnan().sum())
            if first is None and bool(bad.any()):
                first = at + int(bad.nonzero()[0])
            good, at = part[~bad].double(), at + len(part)
            nan, inf, finite = nan + is_nan, inf + int(bad.sum()) - is_nan, finite + len(good)
            if len(good):
                least, most = min(least, float(good.min())), max(most, float(good.max()))
                total += float(good.sum())
        of_finite = (least, most, total / finite) if finite else (None, None, None)
        index = None if first is None else unravel(first // (1 + x.is_complex()), tuple(x.shape))
        return cls(name, str(x.dtype).removeprefix("torch."), tuple(x.shape), nan, inf, *of_finite, index)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Statistics:
        """Return what another rank sent as JSON."""
        first = fields["first"]
        return cls(**fields | {"shape": tuple(fields["shape"]), "first": None if first is None else tuple(first)})

    def __str__(self) -> str:
        counts = f"{self.num_nan:,} NaN, {self.num_inf:,} inf of {math.prod(self.shape):,}"
        finite = "" if self.mean is None else f"; finite {self.least:.4g} to {self.most:.4g}, mean {self.mean:.4g}"
        at = "" if self.first is None else f"; first at {list(self.first)}"
        return f"{self.name}: {self.dtype} {self.shape}: {counts}{finite}{at}"


def is_read(x: object) -> TypeGuard[Tensor]:
    """Return whether something holds numbers that are read here without asking other ranks for them.

    That are plain dense tensors of floating-point or complex numbers: parameters of stage 3 would be gathered.
    """
    if type(x) not in (Tensor, torch.nn.Parameter):
        return False
    x = cast(Tensor, x)
    return x.layout is torch.strided and not x.is_meta and (x.is_floating_point() or x.is_complex())


def is_finite(x: object) -> bool:
    """Return whether every element is finite; True for what is not read."""
    return not is_read(x) or all(bool(part.isfinite().all()) for part in _pieces(x))


def not_finite(values: Any, above: str) -> list[Statistics]:
    """Return the leaves of a tree that are not all finite, by their key paths behind `above`."""
    named = tree.paths(values)
    return [Statistics.of(f"{above}.{path}".rstrip("."), x) for path, x in named.items() if not is_finite(x)]


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element with this index in the flattened tensor.

    >>> unravel(5, (2, 3))
    (1, 2)
    """
    indices: list[int] = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        indices.append(at)
    return tuple(reversed(indices))


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Yield all elements, flat, of a dtype that can be looked at; of complex numbers the real and imaginary parts."""
    flat = x.detach().reshape(-1)
    for i in range(0, len(flat), _STEP):
        part = flat[i : i + _STEP]
        part = torch.view_as_real(part.resolve_conj()).reshape(-1) if part.is_complex() else part
        yield part.float() if part.itemsize == 1 else part  # numbers of 8 bits know no isfinite


_FEW = 4  # tensors that an operator was given, and that it made, that are kept
_OVERWRITING = tuple(f"aten.{kind}{name}_" for kind in ("", "_foreach_") for name in ("copy", "fill", "zero"))


@attrs.frozen
class NonFinite:
    """The first numbers of a call of a step that are not finite, of all ranks that share it.

    Attributes:
        call: `state.calls` before it.
        rank: where they were found, among the ranks that share the step.
        num_ranks: how many these are.
        part: "state" or "batch", where the call was given them; "gather", "forward", "recomputation" or "backward",
            where an operator made them of finite ones; "reduce" where that happened between ranks or microbatches;
            "nowhere" where no operator that is looked at did it, as where the call is finite when it is run again.
        module: the innermost one in which the operator ran, or in backward whose forward was reversed; "layers[2]" for
            a layer that is no module; empty outside of all.
        kind: the module's class.
        operator: torch's name of it, "aten.div".
        stage: of a pipeline.
        microbatch: its index, on this rank; None outside of all.
        tensors: what the operator was given and what it returned, or leaves of the state or the batch.
        params: the parameters whose summed gradient is not finite, in the order of the state.
    """

    call: int
    rank: int
    num_ranks: int
    part: str
    module: str = ""
    kind: str = ""
    operator: str = ""
    stage: int | None = None
    microbatch: int | None = None
    tensors: tuple[Statistics, ...] = ()
    params: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: dict[str, Any]) -> NonFinite:
        """Return what another rank sent as JSON."""
        tensors = tuple(map(Statistics.read, fields["tensors"]))
        return cls(**fields | {"tensors": tensors, "params": tuple(fields["params"])})

    @property
    def place(self) -> str:
        """Where it is, in words: `backward of '2.ffn' (FFN), aten.mul, microbatch 1, rank 0 of 4`."""
        inside = f"{self.part} of {self.module!r}" if self.module else self.part
        words = [inside + (f" ({self.kind})" if self.kind else ""), self.operator]
        words += [f"{name} {i}" for name in ("stage", "microbatch") if (i := getattr(self, name)) is not None]
        return ", ".join(filter(None, [*words, f"rank {self.rank} of {self.num_ranks}" * (self.num_ranks > 1)]))

    def __str__(self) -> str:

        lines = [f"first not finite: {self.place}", *map(str, self.tensors)]
        return "\n".join([*lines, f"gradients not finite: {tree.named(self.params)}"] if self.params else lines)


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
        make: returns a `NonFinite` of this call and rank.
        culprits: part of the step -> the first of them in it, in the order in which they ran.
        of_loss: that from which the first scalar of a forward that is not finite came, mostly the loss.
        params: the names of parameters on this rank whose summed gradient is not finite.
    """

    def __init__(self, device: torch.device, make: Callable[..., NonFinite]) -> None:
        super().__init__()
        self.parts, self.make = Parts(device), make
        self.culprits: dict[str, NonFinite] = {}
        self.of_loss: NonFinite | None = None
        self.params: dict[str, None] = {}
        self._origins: dict[int, NonFinite] = {}  # address of memory -> who made what is not finite in it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, part = kwargs or {}, self.parts.current
        packet = getattr(func, "_overloadpacket", None)
        if packet is None:  # an operator of higher order, such as cond, whose parts are looked at
            return NotImplemented
        if performing.get() or part in ("", "optimizer") or str(packet) in UNINITIALISED:
            return func(*args, **kwargs)
        written = list(_find_written(func, args, kwargs))
        reads = str(packet) not in _OVERWRITING
        bad = [x for x in written if reads and not is_finite(x)]  # before: what it had is gone afterwards
        out = func(*args, **kwargs)
        made = list({id(x): x for x in (*tensors_of(out), *written)}.values())
        if wrong := [x for x in made if not is_finite(x)]:
            inputs = [x for x in tensors_of((args, kwargs)) if not any(x is output for output in written)]
            bad += [x for x in inputs if not is_finite(x)]
            # what it makes comes from what is bad of its inputs; it is its own if all were finite, unless it is meant,
            # as masked_fill(mask, -inf) is
            meant = any(isinstance(x, float) and not math.isfinite(x) for x in (*args, *kwargs.values()))
            origin = next((culprit for x in bad if (culprit := self._origins.get(_address(x))) is not None), None)
            if not bad and not meant:
                origin = self._culprit(str(packet), inputs, made)
                self.culprits.setdefault(origin.part, origin)
            self._note(wrong, origin)
        return out

    def _note(self, wrong: list[Tensor], origin: NonFinite | None) -> None:
        if origin is None:
            for x in wrong:  # whoever had its memory before is not to be blamed
                self._origins.pop(_address(x), None)
            return
        self._origins |= {_address(x): origin for x in wrong}
        if self.of_loss is None and self.parts.current == "forward" and any(x.dim() == 0 for x in wrong):
            self.of_loss = origin

    def _culprit(self, operator: str, inputs: list[Tensor], outputs: list[Tensor]) -> NonFinite:
        (module, phase), part = self.place(), self.parts.current
        kind = self.modules.ran[module].kind if module and module in self.modules.ran else ""
        wrong = [i for i, x in enumerate(outputs) if not is_finite(x)][:_FEW]
        pairwise = len(inputs) == len(outputs)  # lists go pairwise
        shown = [(f"input {i}", x) for i, x in enumerate(inputs) if i in wrong or not pairwise][:_FEW]
        shown += [("output" if len(outputs) == 1 else f"output {i}", outputs[i]) for i in wrong]
        tensors = tuple(Statistics.of(word, x) for word, x in shown if is_read(x))
        part = phase if part == "backward" else part
        return self.make(part, module, kind, operator, self.parts.stage, self.parts.microbatch, tensors)


@attrs.frozen
class NamedLayers:
    """A filler of `layer`: what runs in a layer that is no module has a name too, and so has its backward."""

    modules: Modules
    draws: ClassVar = False

    def __call__(self, calls: list[LayerCall], call: Call) -> list[LayerCall]:
        """Return the calls, each inside of a name."""
        return [layer.replaced(self._name(layer)) if layer.layers else layer for layer in calls]

    def _name(self, layer: LayerCall) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self.modules.inside(", ".join(f"layers[{i}]" for i in layer.layers)):
                return layer.run(*args)

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
            self.params.update({part.name: None for part in inside if not is_finite(part.of(leaf.reshape(-1)))})
        return grads


def _find_written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_of(kwargs.get(argument.name, args[i] if i < len(args) else ()))


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
