"""A loss's modules as plain modules without values: the one that a function calls, or layers one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from fds.errors import LossError, is_a
from fds.loss.layers import Layers, Use
from fds.loss.microbatch import modules_of, name


class Chain(nn.Module):
    """Layers one after another, without a criterion; its parameters have the names that they have in `fds.Layers`."""

    def __init__(self, layers: Layers):
        super().__init__()
        self.calls: list[tuple[str, Callable[..., Any] | None]] = []  # a path, or "", and what uses the module there
        for layer in (layers.layer(i) for i in range(len(layers))):
            if layer.apply is None:
                self.calls.append(("", layer.function))
                continue
            source, path = layer.apply.source, layer.apply.prefix.removesuffix(".")
            use = source.forward_fn if isinstance(source, Use) else None
            self.calls.append((path, use))
            if path not in dict(self.named_modules()):
                _put(self, path, copy.deepcopy(source.module if isinstance(source, Use) else source))

    def forward(self, x: Any) -> Any:
        """Return what the last layer returns."""
        for path, use in self.calls:
            if path:
                module = self.get_submodule(path)
                x = module(x) if use is None else use(module, x)
            elif use is not None:
                x = use(x)
        return x


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    *above, last = path.split(".")
    for part in above:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)


@attrs.frozen(eq=False)
class Structure:
    """A plain module of which parameters are still to be put in their places.

    Attributes:
        module: a copy; what is not a parameter or a buffer of the state has its values.
        paths: of all its parameters, and the names that they have among those of the state.
        prefix: of the names of its buffers among those of the state.
    """

    module: nn.Module
    paths: dict[str, str]
    prefix: str


def structure_of(loss: Any, shapes: Mapping[str, Sequence[int]], module: nn.Module | None = None) -> Structure:
    """Return the module of a loss, given the shapes of its parameters.

    Args:
        loss: `fds.Layers`, or a function that calls what `fds.functional` returned.
        shapes: of all parameters of a state, by name.
        module: one whose structure is taken in the place of the loss's.

    Raises `LossError` where there is not one module that these are the parameters of.
    """
    if module is not None:
        if not is_a(module, nn.Module):
            raise LossError("not a module", where="module", got=repr(module)[:80], want="an nn.Module")
        first = {id(p): path for path, p in module.named_parameters()}
        paths = {path: first[id(p)] for path, p in module.named_parameters(remove_duplicate=False)}
        options = [(copy.deepcopy(module), paths)]
    elif isinstance(loss, Layers):
        chain = Chain(loss)
        return Structure(chain, {path: path for path, _ in chain.named_parameters()}, "")
    else:
        options = [(x.module, x.paths) for x in modules_of(loss)]
    fits = [
        Structure(copy.deepcopy(source), {path: prefix + local for path, local in paths.items()}, prefix)
        for source, paths in options
        if paths and (prefix := _prefix(source, paths, shapes)) is not None
    ]
    if len(fits) != 1:
        raise LossError(
            "this loss does not call one module that these are the parameters of",
            where=name(loss),
            got=f"{len(fits)} such modules",
            want="fds.Layers, or apply, params, buffers = fds.functional(module), and a loss that calls apply",
            hint="" if module is not None else "say which one: bake(step, state, module)",
        )
    return fits[0]


def _prefix(module: nn.Module, paths: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Return what stands before the names of a module's parameters among those of a state; None where they are not."""
    local = {paths[at]: tuple(x.shape) for at, x in module.named_parameters()}
    name = min(local, key=len)
    prefixes = [n.removesuffix(name) for n in sorted(shapes, key=len) if n.endswith(name)]
    fits = lambda prefix: all(tuple(shapes.get(prefix + n, ())) == shape for n, shape in local.items())
    return next((p for p in prefixes if p[-1:] in ("", ".") and fits(p)), None)
