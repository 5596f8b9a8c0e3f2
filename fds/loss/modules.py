"""`functional`: a module as a function of its parameters, on a structural copy that nobody else holds."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds import random, tree
from fds.errors import LossError


@attrs.frozen
class Mode:
    """How modules are to run just now: what a step asks of modules that a loss hides in its closure."""

    evaluating: bool = False
    float32: tuple[str, ...] = ()  # patterns of parameters whose modules compute in float32
    low: bool = False  # parameters and inputs are 16 bit: batch statistics compute in float32 too
    seen: list | None = attrs.field(default=None, eq=False)  # receives the last output


_mode: ContextVar[Mode] = ContextVar("fds_mode", default=Mode())  # noqa: B039 (frozen)


@contextlib.contextmanager
def mode(value: Mode) -> Iterator[None]:
    """Run modules in this mode; each layer call enters it anew, since autograd's threads recompute layers."""
    token = _mode.set(value)
    try:
        yield
    finally:
        _mode.reset(token)


@attrs.frozen(eq=False)
class Apply:
    """A module as a pure function: `apply(params, *args, buffers=None, **kwargs)`.

    `params` and `buffers` map the module's own names to tensors. A shared parameter goes by its first name.
    """

    source: nn.Module = attrs.field(repr=False)  # parameters on meta, buffers its own
    param_names: frozenset[str] = attrs.field(repr=False)
    constants: dict[str, Tensor] = attrs.field(repr=False)
    prefix: str = ""  # what stands before these names in the whole tree of parameters
    variants: dict[tuple, nn.Module] = attrs.field(factory=dict, repr=False)

    def __call__(self, params: dict[str, Tensor], *args: Any, buffers: dict | None = None, **kwargs: Any) -> Any:
        """Return the module's output. Raises `LossError` where the module changes its buffers."""
        given = self.constants if buffers is None else {**self.constants, **buffers}
        before = [(name, b, b._version) for name, b in given.items()]
        out = self._run(params, given, args, kwargs)
        changed = [name for name, b, version in before if b._version != version]
        if changed:
            for name in changed:
                if name in self.constants:
                    self.constants[name] = dict(self.source.named_buffers())[name].clone()
            raise LossError(
                "the module changes its buffers, and this call would lose the change", where=", ".join(changed),
                got="apply(params, ...)", want="apply.with_buffers(params, buffers, ...) -> (out, new_buffers)",
                hint="make the loss with fds.with_buffers(loss_fn, buffers), or module.eval() before functional",
            )  # fmt: skip
        return out

    def with_buffers(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the module's output and the new buffers; those that were passed stay as they are."""
        new = {name: b.detach().clone() for name, b in buffers.items()}
        out = self._run(params, {**self.constants, **new}, args, kwargs)
        return out, new

    def _run(self, params: dict[str, Tensor], buffers: dict[str, Tensor], args: tuple, kwargs: dict) -> Any:
        if params.keys() != self.param_names:
            missing, extra = sorted(self.param_names - params.keys()), sorted(params.keys() - self.param_names)
            raise LossError(
                "the parameters are not the module's", got=f"missing {missing}, unknown {extra}",
                want="the dict that fds.functional returned, with other values",
            )  # fmt: skip
        now = _mode.get()
        out = torch.func.functional_call(self._variant(now), (params, buffers), args, kwargs)
        if now.seen is not None:
            now.seen[:] = [out]
        return out

    def _variant(self, now: Mode) -> nn.Module:
        key = (now.evaluating, now.float32, now.low)
        if key not in self.variants:
            module = structural(self.source) if any(key) else self.source
            if now.evaluating:
                module.eval()
            _in_float32(module, now, self.prefix)
            self.variants[key] = module
        return self.variants[key]


def functional(module: nn.Module) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """Split a module into `(apply, params, buffers)` and never touch it again.

    `params` and `buffers` map names to detached tensors, the module's own memory (`step.init` copies them).
    Buffers that training changes (batch norm) go through `apply.with_buffers` and `fds.with_buffers`; others are
    captured as constants. Training or eval mode of every submodule is what it was at this call;
    `step.evaluate` runs an eval-mode copy.
    """
    params = {name: p.detach() for name, p in module.named_parameters()}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    constants = {name: b.clone() for name, b in buffers.items()}
    return Apply(structural(module), frozenset(params), constants), params, buffers


def recipe(module_factory: Callable[[], nn.Module]) -> Callable[[Tensor], dict[str, Tensor]]:
    """Make `key -> params` of a function that builds a module: for `step.init(fds.recipe(GPT), key=0)`.

    The factory runs with torch's generators seeded from the key; names are those of `named_parameters`.
    """

    def build(key: Tensor) -> dict[str, Tensor]:
        devices = [torch.get_default_device()]
        with random.scope(devices):
            random.reseed(random.seed(key), devices)
            return {name: p.detach() for name, p in module_factory().named_parameters()}

    return build


def structural(module: nn.Module) -> nn.Module:
    """Copy a module's structure: parameters become empty `meta` tensors, buffers stay shared."""
    memo: dict[int, Any] = {id(b): b for b in module.buffers()}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(module, memo)


_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
            nn.MultiheadAttention, nn.RNNBase, nn.Transformer, nn.TransformerEncoderLayer,
            nn.TransformerDecoderLayer)  # fmt: skip


def may_draw(module: Any) -> bool:
    """Say whether calling this may draw random numbers: all but torch's own modules that never do."""
    if not isinstance(module, nn.Module):
        return True
    return any(isinstance(m, _DRAWING) or not type(m).__module__.startswith("torch.nn.") for m in module.modules())


def _in_float32(module: nn.Module, now: Mode, prefix: str) -> None:
    """Make the submodules whose own parameters match a pattern, and batch norms, compute in float32."""
    for path, part in module.named_modules():
        own = [f"{prefix}{path}.{n}" if path else prefix + n for n, _ in part.named_parameters(recurse=False)]
        kept = own and all(any(fnmatch.fnmatchcase(n, p) for p in now.float32) for n in own)
        if kept or (now.low and isinstance(part, nn.modules.batchnorm._NormBase)):
            part.forward = _float32(part, part.forward)


def _float32(part: nn.Module, forward: Callable) -> Callable:
    """Return `forward` of a module with inputs and parameters cast up, and its outputs cast down again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        low = next((x.dtype for x in tree.leaves((args, kwargs)) if _is_low(x)), None)
        if low is None:
            return forward(*args, **kwargs)
        args, kwargs = tree.map(lambda x: x.float() if _is_low(x) else x, (args, kwargs))
        held = dict(part._parameters)
        part._parameters.update({n: p.float() for n, p in held.items() if _is_low(p)})  # type: ignore[arg-type]
        try:
            out = forward(*args, **kwargs)
        finally:
            part._parameters.update(held)
        return tree.map(lambda x: x.to(low) if _is_float(x) else x, out)

    return run


def _is_low(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
