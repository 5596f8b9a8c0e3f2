"""`Layers`: a loss whose sequence of layers is visible to activation checkpointing, pipelines and partitions."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds import _html, random
from fds.errors import BatchError, LossError
from fds.loss.compiling import Compiler
from fds.loss.modes import may_draw
from fds.loss.modules import Apply, functional
from fds.loss.recipes import LayerSpec, Recipe, always


@attrs.frozen(eq=False)
class Layer:
    """One built layer: its structure, and the names of its parameters and buffers."""

    apply: Apply | None  # None for a plain function
    function: Callable[..., Any] | None
    params: dict[str, str]  # name in the tree -> the module's own name
    buffers: dict[str, str]
    initial_buffers: dict[str, Tensor]
    draws: bool
    in_place: bool  # it overwrites its input, so it must be recomputed together with the layer before it
    compiler: Compiler | None = None

    def __call__(self, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the layer's output and its new buffers."""
        compiler = self.compiler
        if self.apply is None:
            assert self.function is not None
            return self.function(x) if compiler is None else compiler.function(self.function, (x,), "a layer"), {}
        own_params = {local: params[name] for name, local in self.params.items()}
        state = {local: buffers[name] for name, local in self.buffers.items()}
        if compiler is not None:
            out, new = compiler.module(self.apply, own_params, state, x, in_place=self.in_place)
        elif not self.buffers:
            return self.apply(own_params, x), {}
        else:
            out, new = self.apply.with_buffers(own_params, state, x)
        return out, {name: new[local] for name, local in self.buffers.items()}


class Use(nn.Module):
    """One use of a tied layer, called through its `forward_fn`."""

    def __init__(self, module: nn.Module, forward_fn: Callable[..., Any]):
        super().__init__()
        self.module, self.forward_fn = module, forward_fn

    def forward(self, x: Any) -> Any:
        return self.forward_fn(self.module, x)


def _children(layers: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names and layers of a list of layers or an `nn.Sequential`."""
    if not isinstance(layers, nn.Sequential):
        if isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList):
            raise LossError(
                "this module does not say which layers it calls in which order",
                got=type(layers).__name__,
                want="an nn.Sequential, or a list of layers: fds.Layers([embedding, *blocks, head], criterion)",
                hint="as one function: fds.functional(module); as one layer: fds.Layers([module], criterion)",
            )
        if not isinstance(layers, Iterable) or isinstance(layers, str | Tensor | dict):
            raise LossError("these are not layers", got=f"{layers!r}"[:80], want="a list of layers or an nn.Sequential")
        layers = tuple(layers)
        return tuple(map(str, range(len(layers)))), layers
    if type(layers).forward is not nn.Sequential.forward or layers._forward_hooks or layers._forward_pre_hooks:
        raise LossError(
            "this nn.Sequential does more than call its layers in order",
            got=type(layers).__name__,
            want="a plain nn.Sequential without hooks",
            hint="use fds.functional(module)",
        )
    return tuple(layers._modules), tuple(layers)


@attrs.frozen(eq=False, init=False)
class Layers:
    """A loss made of a sequence of layers and a criterion: `Layers(layers, criterion)(params, (inputs, targets))`.

    Args:
        layers: `LayerSpec`s, `TiedLayerSpec`s, modules, plain functions, or one `nn.Sequential`. Each is called
            with what the one before it returned (a tuple is one argument), the first with `inputs`.
        criterion: `criterion(output, targets)` returns what a loss returns.

    Parameters are a flat dict named as in `nn.Sequential` (`"0.weight"`), tied ones `"<key>.weight"`; a module that
    occurs twice is tied to its first occurrence.
    Persistent buffers are the initial `state.buffers`; others are constants. This plain call defines what every
    pipeline of the same layers must compute.
    """

    layers: tuple[Any, ...]
    criterion: Callable[..., Any]
    names: tuple[str, ...] = attrs.field(repr=False)
    built: dict[Any, Any] = attrs.field(repr=False)
    compiler: Compiler | None = attrs.field(default=None, repr=False)
    added: tuple[tuple[Mapping[str, Sequence[str]], bool], ...] = attrs.field(default=(), repr=False)

    def __init__(self, layers: Any, criterion: Callable[..., Any]):
        names, layers = _children(layers)
        self.__attrs_init__(layers, criterion, names, {})  # pyright: ignore[reportAttributeAccessIssue] (attrs makes it)
        for i, layer in enumerate(layers):
            if isinstance(layer, type) or not (isinstance(layer, LayerSpec) or callable(layer)):
                raise LossError(
                    "not a layer",
                    where=f"layers[{i}]",
                    got=repr(layer)[:80],
                    want="a LayerSpec, a module or a function",
                )
            if isinstance(layer, nn.Module):
                self.layer(i)  # copied now, since the caller may change it later
        if not callable(criterion) or isinstance(criterion, type):
            raise LossError(
                "not a criterion",
                where="criterion",
                got=repr(criterion)[:80],
                want="criterion(output, targets) -> scalar, or a module such as nn.MSELoss()",
            )
        if isinstance(criterion, nn.Module):
            apply, params, _ = functional(criterion)
            if params:
                raise LossError(
                    "the criterion has parameters, which would not be trained",
                    where="criterion",
                    got=", ".join(params),
                    want="none",
                    hint="put them into a layer",
                )
            self.built["criterion"] = functools.partial(apply, {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of, without what was built of that since."""
        return _restored, (self.layers, self.criterion, self.names, self.compiler, self.added)

    def __repr__(self) -> str:
        by = "" if self.compiler is None else f", each through {self.compiler}"
        return f"Layers(layers={self.layers!r}, criterion={self.criterion!r}){by}"

    def __str__(self) -> str:
        """Name each kind of layer once where several follow each other, modules by their classes."""
        of = lambda f: type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", "") or repr(f)
        kinds = [(word, len(list(same))) for word, same in itertools.groupby(map(of, self.layers))]
        words = ", ".join(word if n == 1 else f"{n} x {word}" for word, n in kinds)
        by = "" if self.compiler is None else f", each through {self.compiler}"
        return f"Layers({words}; criterion={of(self.criterion)}){by}"

    def _repr_html_(self) -> str:
        words = lambda f: getattr(f, "__name__", "") or repr(f)
        rows = [(name, words(layer)) for name, layer in zip(self.names, self.layers, strict=True)]
        table = _html.table([*rows, ("criterion", words(self.criterion))])
        return _html.box(f"Layers: {len(rows)}", table)

    def __len__(self) -> int:
        return len(self.layers)

    def __call__(self, params: dict[str, Tensor], batch: Any) -> Any:
        """Return what the criterion returns. Buffers start at their initial values, and their updates are dropped."""
        inputs, targets = self.split(batch)
        self.check(params)
        buffers = self.buffers()
        for i in range(len(self)):
            inputs, new = self.layer(i)(params, buffers, inputs)
            buffers.update(new)
        return self.compare(inputs, targets)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return `(inputs, targets)`. Raises `BatchError` for anything but a pair."""
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise BatchError("a loss made of layers takes a pair", got=type(batch).__name__, want="(inputs, targets)")
        return batch[0], batch[1]

    def compare(self, output: Any, targets: Any) -> Any:
        """Return what the criterion returns; a criterion that is a module runs in the mode of the step."""
        criterion = self.built.get("criterion", self.criterion)
        if self.compiler is not None:
            return self.compiler.function(criterion, (output, targets), "the criterion of Layers")
        return criterion(output, targets)

    def compiled(self, compiler: Compiler) -> Layers:
        """Return these layers, each and the criterion run as `compiler` compiles them."""
        layers = {i: attrs.evolve(x, compiler=compiler) if type(x) is Layer else x for i, x in self.built.items()}
        return self._with(layers, compiler, self.added)

    def adding(self, names: Mapping[str, Sequence[str]], *, draws: bool) -> Layers:
        """Return these layers with more parameters, which maps of their modules make use of.

        Args:
            names: of what is added, by the name of the parameter after which it stands.
            draws: whether a layer with such a parameter draws random numbers.
        """
        built = {key: x for key, x in self.built.items() if key != "names"}
        for i in range(len(self)):
            layer, params = self.layer(i), dict[str, str]()
            for name, local in layer.params.items():
                owner, inside = (f"{x.rpartition('.')[0]}.".lstrip(".") for x in (name, local))
                params |= {name: local} | {more: inside + more.removeprefix(owner) for more in names.get(name, ())}
            drawing = layer.draws or (draws and len(params) > len(layer.params))
            built[i] = attrs.evolve(layer, params=params, draws=drawing)
        return self._with(built, self.compiler, (*self.added, (names, draws)))

    def _with(self, built: dict[Any, Any], compiler: Compiler | None, added: tuple[Any, ...]) -> Layers:
        new = object.__new__(type(self))
        new.__attrs_init__(self.layers, self.criterion, self.names, built, compiler, added)  # pyright: ignore[reportAttributeAccessIssue]
        return new

    def check(self, params: Any) -> None:
        """Raise `LossError` unless these are the parameters of these layers."""
        if "names" not in self.built:
            self.built["names"] = {name for i in range(len(self)) for name in self.layer(i).params}
        names = self.built["names"]
        if not isinstance(params, dict) or params.keys() != names:
            got = params.keys() if isinstance(params, dict) else set()
            raise LossError(
                "the parameters are not those of the layers",
                got=f"missing {sorted(names - got)}, unknown {sorted(got - names)}",
                want="the dict of layers.init",
            )

    def layer(self, index: int) -> Layer:
        """Return layer `index`, built at its first use.

        Raises `LossError` for layers of one key that have different parameters.
        """
        if index not in self.built:
            spec = self.layers[index]
            with torch.inference_mode(False):  # the layer is kept, and trained later
                layer = self._describe(index, self._trace(index) if isinstance(spec, LayerSpec) else spec)
            first = layer if self.owner(index) == index else self.layer(self.owner(index))
            if layer.params.keys() != first.params.keys():
                raise LossError(
                    "layers of one key have different parameters",
                    where=f"layers[{index}]",
                    got=str(sorted(layer.params)),
                    want=str(sorted(first.params)),
                )
            self.built[index] = layer
        return self.built[index]

    @property
    def init(self) -> Recipe:
        """The recipe of all parameters, layer by layer: `layers.init(key)`, `step.init(layers.init, key=0)`.

        Layers that were passed as modules keep their values.
        """
        modules = [(i, spec) for i, spec in self._owners() if isinstance(spec, nn.Module)]
        names = frozenset(self._prefix(i) + name for i, module in modules for name, _ in module.named_parameters())
        return Recipe(self._shapes, self._pieces, names)

    def _shapes(self) -> dict[str, Tensor]:
        params: dict[str, Tensor] = {}
        for i, spec in self._owners():
            module = self._trace(i) if isinstance(spec, LayerSpec) else spec
            params.update((self._prefix(i) + name, p.detach().to("meta")) for name, p in module.named_parameters())
        return params

    def _pieces(self, key: Tensor, wanted: Callable[[str], bool] = always) -> Iterator[dict[str, Tensor]]:
        for i, spec in self._owners():
            if isinstance(spec, LayerSpec) and not any(map(wanted, self.layer(i).params)):
                continue
            module = self._build(i, key) if isinstance(spec, LayerSpec) else spec
            yield {self._prefix(i) + name: p.detach() for name, p in module.named_parameters()}

    def _owners(self) -> Iterator[tuple[int, Any]]:
        """Yield index and layer of those that own parameters: all but plain functions and later uses of tied layers."""
        for i, spec in enumerate(self.layers):
            if isinstance(spec, nn.Module | LayerSpec) and self.owner(i) == i:
                yield i, spec

    def buffers(self) -> dict[str, Tensor]:
        """Return the initial buffers of all layers."""
        buffers: dict[str, Tensor] = {}
        for i in range(len(self)):
            if self.owner(i) == i:
                buffers.update(self.layer(i).initial_buffers)
        return buffers

    def sources(self) -> dict[str, Tensor]:
        """Return the tensors from which the buffers were initialized; `StateBuffers` identifies modules by them."""
        sources: dict[str, Tensor] = {}
        for i in range(len(self)):
            layer = self.layer(i)
            if layer.apply is not None and self.owner(i) == i:
                sources.update((name, layer.apply.initial[local]) for name, local in layer.buffers.items())
        return sources

    def owner(self, index: int) -> int:
        """Return the index of the first layer that shares this layer's parameters: `index`, unless it is tied."""
        layer = self.layers[index]
        if isinstance(layer, LayerSpec) and layer.key is not None:
            return next(i for i, s in enumerate(self.layers) if isinstance(s, LayerSpec) and s.key == layer.key)
        return next(i for i, s in enumerate(self.layers) if s is layer) if isinstance(layer, nn.Module) else index

    def _prefix(self, index: int) -> str:
        spec = self.layers[index]
        tied = isinstance(spec, LayerSpec) and spec.key is not None
        return f"{spec.key}." if tied else f"{self.names[self.owner(index)]}."

    def _build(self, index: int, key: Tensor) -> nn.Module:
        with random.seeded(key, "layer", index):
            return self.layers[index].build()

    def _trace(self, index: int) -> nn.Module:
        """Build a layer on `meta`; for real where it has buffers or other tensors besides parameters."""
        try:
            with torch.device("meta"):
                module = self.layers[index].build()
            plain = [x for m in module.modules() for x in vars(m).values() if isinstance(x, Tensor)]
            if not plain and not list(module.buffers()):
                return module
        except Exception:  # a constructor that reads values: building for real succeeds, or raises a better error
            pass
        return self._build(index, random.key(0))

    def _describe(self, index: int, module: Any) -> Layer:
        prefix, spec = self._prefix(index), self.layers[index]
        if not isinstance(module, nn.Module):
            return Layer(None, module, {}, {}, {}, may_draw(module), False, self.compiler)
        names = [name for name, _ in module.named_parameters()]
        persistent = [name for name, _ in module.named_buffers() if _persistent(module, name)]
        values = dict(module.named_buffers())
        use, local = module, ""
        if spec_forward := getattr(spec, "forward_fn", None) if isinstance(spec, LayerSpec) else None:
            use, local = Use(module, spec_forward), "module."
        apply = attrs.evolve(functional(use)[0], prefix=prefix)
        return Layer(
            apply,
            None,
            {prefix + n: local + n for n in names},
            {prefix + n: local + n for n in persistent},
            {prefix + n: values[n].detach().clone() for n in persistent},
            may_draw(use),
            _writes_over_input(module),
            self.compiler,
        )


def _writes_over_input(module: nn.Module) -> bool:
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return getattr(module, "inplace", False) is True


def _persistent(module: nn.Module, name: str) -> bool:
    path, _, local = name.rpartition(".")
    return local not in module.get_submodule(path)._non_persistent_buffers_set


def _restored(
    layers: tuple[Any, ...], criterion: Any, names: tuple[str, ...], compiler: Compiler | None, added: tuple[Any, ...]
) -> Layers:
    """Return the loss that was pickled."""
    is_numbered = names == tuple(map(str, range(len(layers))))  # others are of the modules of an nn.Sequential
    made = Layers(layers if is_numbered else nn.Sequential(OrderedDict(zip(names, layers, strict=True))), criterion)
    made = made if compiler is None else made.compiled(compiler)
    for more, draws in added:
        made = made.adding(more, draws=draws)
    return made
