"""Adapters in modules: places for factors in copies of a loss's modules, and linear layers that compute with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds import loss as losses, random
from fds.collectives import Axis
from fds.collectives.functional import sum_out
from fds.compression.activations import is_linear
from fds.errors import ComposeError, LossError
from fds.layout import Leaf
from fds.loss import Root, Submodules
from fds.nn.parallel import tokens
from fds.nn.parallel.linear import RowConv1D, RowLinear
from fds.step import Call
from fds.transforms.lora.low_rank import PARTS, LowRank


@attrs.frozen(eq=False)
class InLayers:
    """The rule of linear layers with factors: y = x W^T + s dropout(x) A^T B^T; W + s B A is never made.

    On a tensor axis a rank adds this to its columns of y, or to its term of the sum, with the pieces of factors that it
    has: nothing more is sent.
    """

    adapter: LowRank
    names: Mapping[str, str]  # of weights, by the layer's

    @property
    def is_planned(self) -> bool:
        """Whether it needs a plan: it does not."""
        return False

    def check(self, name: str, module: nn.Module) -> None:
        """Raise `ComposeError` for what is no linear layer."""
        if not is_linear(module):
            raise ComposeError(
                "lora: factors in layers are those of linear layers",
                where=name,
                got=type(module).__name__,
                want="nn.Linear, or Conv1D of transformers",
                hint="form='view' takes any matrix",
            )

    def plan(self, call: Any) -> None:
        """Return nothing: factors are parameters."""

    def run(
        self,
        plan: None,
        call: Any,
        name: str,
        module: Any,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Return what a layer returns, and what its factors add. Raises `LossError` for what is no activation."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            raise LossError("lora: a layer is given no activation", where=name, got=f"{type(x).__name__}")
        before = kwargs.get("beside")  # of an adapter that comes after this one

        def beside(y: Tensor) -> Tensor:
            y = self._added(y, x, name, module)
            return y if before is None else before(y)

        if getattr(module, "region", None) is None:
            return self._added(forward(*args, **kwargs), x, name, module)
        return forward(*args, **{**kwargs, "beside": beside})  # a rank's columns, or its term of rows

    def _added(self, y: Tensor, x: Tensor, name: str, module: Any) -> Tensor:
        """Return y, what a layer makes of x without its factors, with what these add."""
        a, b, *rest = (_at(module, f"{part}.{self.adapter.name}.weight") for part in PARTS[: 2 + self.adapter.dora])
        h = F.linear(self._given(x, module).to(a.dtype), a) * self.adapter.scale
        if not rest:
            flat = torch.addmm(y.reshape(-1, y.shape[-1]), h.reshape(-1, h.shape[-1]).to(y.dtype), b.T.to(y.dtype))
            return flat.view(y.shape)
        axis = module.region.axis if _is_row(module) else None
        weight, bias = module.weight, getattr(module, "bias", None) if axis is None else None  # added to a row's sum
        factor = self._factor(weight.detach(), a.detach(), b.detach(), rest[0], self.names[name], axis)
        y = (y if bias is None else y - bias) + F.linear(h, b).to(y.dtype)
        y = y * factor.to(y.dtype)
        return y if bias is None else y + bias

    def _given(self, x: Tensor, module: Any) -> Tensor:
        """Return what A is given: of a row a rank's piece of the inputs, of a column all of them; with dropout."""
        region, p = getattr(module, "region", None), self.adapter.dropout if module.training else 0.0
        if region is None:
            return F.dropout(x, p) if p else x
        cut = tokens.Cut(*region.features(module.cut)) if _is_row(module) else None
        x = region.enter(x, run=module.run) if cut is None else x
        return tokens.drop(x, p, cut) if p else x

    def _factor(self, weight: Any, a: Tensor, b: Tensor, m: Tensor, name: str, axis: Axis | None) -> Tensor:
        """Return by what outputs are multiplied: |W_i + s B_i A|^2 = |W_i|^2 + 2 s B_i A W_i + s^2 B_i A A^T B_i.

        Ranks of an axis have parts of W_i and of A, whose squares are added up.
        """
        w, s = (weight.T if name in self.adapter.transposed else weight), self.adapter.scale
        old = w.square().sum(1)
        change = ((2 * s) * (w @ a.T.to(w.dtype)) + s * s * (b @ (a @ a.T)).to(w.dtype)).mul(b).sum(1)
        squares = torch.stack([old, old + change])
        old, new = (squares if axis is None else sum_out(squares, axis)).clamp_min(0).sqrt()
        return (torch.where(old == 0, 1, old) + m) / torch.where(new == 0, 1, new)

    def bake(self, name: str, module: nn.Module, call: Any) -> None:
        """Do nothing: what is baked has the weights that `Adapted.bake_parameters` returns."""


def _is_row(module: nn.Module) -> bool:
    """Say whether a tensor axis divides a layer by its inputs."""
    return isinstance(module, RowLinear | RowConv1D) and module.region is not None


def _at(module: nn.Module, path: str) -> Tensor:
    for part in path.split("."):
        module = getattr(module, part)
    return module  # pyright: ignore[reportReturnType]


@attrs.frozen(eq=False, repr=False)
class Adapted:
    """The module map: copies of modules have places for what is added, and in layers compute with it."""

    adapter: LowRank
    places: Mapping[int, Mapping[str, tuple[str, Tensor]]]  # of modules, by number: of each path a name, and its like
    layers: Submodules | None  # None of views

    def __repr__(self) -> str:
        return f"{self.adapter!r}, in {'views' if self.layers is None else 'layers'}"

    def adds(self, number: int) -> Mapping[str, tuple[str, Tensor]]:
        """Return by path what is added to a module: its name, and what it is like."""
        return self.places.get(number, {})

    def __call__(self, module: nn.Module, root: Root) -> None:
        """Have linear layers of a copy compute with their factors."""
        if self.layers is not None and root.number in self.layers.numbers:  # a criterion is none of them
            self.layers(module, root)

    def reads(self, leaf: Leaf, call: Call) -> Sequence[str]:
        """Return the names of what `bake_parameters` puts into a parameter."""
        return [] if self.layers is None else self.adapter.reads(leaf, call)

    def bake_parameters(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters, whole ones by name, with factors in their weights where layers compute with them."""
        if self.layers is None:
            return dict(params)
        x: dict[str, Tensor] = dict(params)
        for name in params:
            if all(part in params for part in self.adapter.parts(name)) and self.adapter.chooses(name, x[name].dim()):
                x[name] = self.adapter.merged(x[name], [params[p].to(x[name]) for p in self.adapter.parts(name)], name)
        return x


def adapted(adapter: LowRank, of: Sequence[Any]) -> tuple[LowRank, Adapted | None, dict[str, list[str]]]:
    """Return an adapter of the weights of losses, its module map, and what it adds by the name of the weight.

    None for a map where they have no modules. Raises `ComposeError` for factors in layers that are no linear layers.
    """
    places = [x for loss in of for x in losses.places_of(loss) if adapter.chooses(x.name, _like(x).dim())]
    transposed = frozenset(x.name for x in places if not isinstance(x.module, nn.Linear) and is_linear(x.module))
    adapter = attrs.evolve(adapter, transposed=transposed)
    names, chosen, more = dict[str, str](), dict[tuple[int, str], str](), dict[str, list[str]]()
    at: dict[int, dict[str, tuple[str, Tensor]]] = {}
    for x in places:
        beside = adapter.beside(x.name, _like(x), random.key(0))
        more[x.name] = [*beside]
        for path, local, like in zip(adapter.parts(x.path), adapter.parts(x.local), beside.values(), strict=True):
            at.setdefault(x.number, {})[path] = (local, like)
        chosen[x.number, x.path.rpartition(".")[0]] = x.name.rpartition(".")[0]
        names[x.name.rpartition(".")[0]] = x.name
    layers = None
    if adapter.form == "layer":
        if shapes := {x.name: tuple(_like(x).shape) for loss in of for x in losses.places_of(loss)}:
            adapter.check(shapes)
        rule = InLayers(adapter, names)
        for x in places:
            rule.check(x.name, x.module)
        numbers = frozenset(x.number for loss in of for x in losses.modules_of(loss))
        layers = Submodules(rule, chosen, numbers, "lora")
    return adapter, Adapted(adapter, at, layers) if places else None, more


def _like(place: losses.Place) -> Tensor:
    """Return what a parameter is like, on `meta`."""
    x = place.module.get_parameter(place.path.rpartition(".")[2])
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
