"""Parameters that a module uses in its own forward, which runs as it is with pieces of them on each rank of an axis.

    y = leave(forward(enter(x)))        each rank's forward with its pieces: a term of y, of which ranks have the sum

So `act(x @ w1) @ w2` needs dim 1 of w1 and dim 0 of w2: a column and its row, written out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from fds.errors import ComposeError, LossError, did_you_mean, is_a, is_int
from fds.nn.parallel.linear import lengths
from fds.nn.parallel.plan import Dims, Part, first, wrap
from fds.nn.parallel.region import Region

Dim = int | tuple[int, int | tuple[int, ...]]
_WHOLE = ("sum", "once")


@attrs.frozen
class Split(Part):
    """See `split`."""

    by_name: Mapping[str, Dim | str]

    def __attrs_post_init__(self) -> None:
        for name, value in self.by_name.items() if is_a(self.by_name, Mapping) else [("", self.by_name)]:
            pair: Any = value if is_a(value, tuple) else (value, 1)
            is_dim = len(pair) == 2 and is_int(pair[0])  # what parts there are is seen beside the parameter
            if not (is_a(name, str) and (is_dim or (is_a(value, str) and value in _WHOLE))):
                raise ComposeError(
                    "split takes names of a module's parameters",
                    where=f"split: {name!r:.40}",
                    got=repr(value)[:80],
                    want="{'w1': 1, 'w2': 0, 'bias': 'once'}: the dim that is divided, (dim, parts), 'sum' or 'once'",
                )

    @property
    def sums(self) -> list[str]:
        """Names of parameters that all ranks have whole, and of whose gradients each has a term."""
        return [name for name, how in self.by_name.items() if how in _WHOLE]

    def dims(self, module: nn.Module, path: str) -> Dims:
        """Return the dims as they were named; every parameter of the module's own must be."""
        params = dict(module.named_parameters(recurse=False))
        for name in [*(self.by_name.keys() - params.keys()), *(params.keys() - self.by_name.keys())]:
            raise ComposeError(
                "split names each parameter that is the module's own, and nothing else",
                where=f"tensor_parallel: {path}",
                got=f"{name!r}, which " + ("it does not name" if name in params else "is no parameter of the module"),
                want=", ".join(params) or "a module that has parameters itself, not in submodules",
                hint="" if name in params else did_you_mean(name, list(params)),
            )
        dims: Dims = {}
        for name, how in self.by_name.items():
            if isinstance(how, str):
                continue
            (dim, parts), shape = how if isinstance(how, tuple) else (how, 1), params[name].shape
            if not -len(shape) <= dim < len(shape):
                raise ComposeError(
                    "split names a dim that a parameter does not have",
                    where=f"tensor_parallel: {path}.{name}",
                    got=f"dim {dim} of shape {tuple(shape)}",
                )
            dims[name] = dim % len(shape), lengths(parts, shape[dim], f"{path}.{name}")
        return dims

    def convert(self, module: nn.Module, region: Region, *, run: str | None) -> None:
        """Let in what the copy is given, and sum what it returns."""
        once = [name for name, how in self.by_name.items() if how == "once" and region.axis.index]
        wrap(module, functools.partial(_run_pieces, module._parameters, once, region, run))


def split(by_name: Mapping[str, Dim | str]) -> Split:
    """Divide parameters that a module's own forward uses: what it is given enters, and what it returns is summed.

    So what it returns, or the first of what it returns, has to be a sum over the dim that is divided, such as
    `act(x @ self.w1) @ self.w2` over the hidden width. Every rank runs the forward with its pieces.

    Args:
        by_name: for each parameter of the module itself, the dim that is divided, or `(dim, parts)` of several
            projections in one (see `column`); `"sum"` for one that is whole and meets what is divided, such as a
            router; `"once"` for one that is whole and added to what leaves, such as the last bias.

    Submodules have entries of their own: none that is a row, and `replicated(grads="sum")` for those that are whole.
    """
    return Split(by_name)


def _run_pieces(
    parameters: dict[str, Any],
    once: list[str],
    region: Region,
    run: str | None,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    tensors = sum(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
    if run is not None and tensors > 1:
        raise LossError(
            "a module that 'split' divides is given several tensors in a 'sequence' block, where each is a part",
            where=f"tensor_parallel over {region.axis.name!r}: split({', '.join(parameters)})",
            got=f"{tensors} tensors",
            want="no 'sequence' for the block, or one tensor",
        )
    let_in = functools.partial(_let_in, region, run)
    kept = {name: parameters[name] for name in once}
    parameters.update({name: x * 0 for name, x in kept.items()})  # the first rank adds it
    before, region.split = region.split, True
    try:
        out = forward(*map(let_in, args), **{name: let_in(x) for name, x in kwargs.items()})
    finally:
        parameters.update(kept)
        region.split = before
    return first(functools.partial(region.leave, run=run), out)


def _let_in(region: Region, run: str | None, x: Any) -> Any:
    is_activation = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
    return region.enter(x, run=run) if is_activation else x
