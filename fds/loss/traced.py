"""A module in a form that torch.compile can trace: parameters and buffers are put in and taken out in the trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor, nn

from fds.loss.carried import Carried
from fds.loss.copies import Location
from fds.loss.modes import Mode, ModuleMap
from fds.loss.variants import Variant

Key = tuple[int, bool, tuple[str, ...], bool, tuple[ModuleMap, ...]]  # number of a compiler, and `Mode.key`


@attrs.frozen(eq=False)
class TracedModule:
    """A copy of a module in one mode, which holds no parameters and buffers, neither before a call nor after it."""

    module: nn.Module
    params: list[Location]
    buffers: list[Location]
    aliases: list[Location]
    unset: list[tuple[dict, str]]  # buffers that are None: location
    constants: dict[str, Tensor]  # of buffers that a call is not given
    carried: dict[str, str]  # buffer -> its name in the state, for an `eval_fn` that does not pass it
    kind: tuple  # what layers have in common that share compiled code

    @classmethod
    def of(cls, variant: Variant, constants: dict[str, Tensor], mode: Mode) -> TracedModule:
        """Return that of a variant, which is used for nothing else afterwards."""
        shapes = [(name, p.shape, p.dtype) for (_, _, name), p in zip(variant.params, variant.empty, strict=False)]
        # torch does not notice whether a module has hooks (torch._dynamo.config.skip_nnmodule_hook_guards)
        own = id(variant.module) if any(map(_has_hooks, variant.module.modules())) else None
        kind = (type(variant.module), repr(variant.module), *shapes, mode.key, own)
        for held, key, _ in variant.locations():
            held[key] = None
        unset = [(held, key) for held, key, *_ in variant.unset]
        return cls(variant.module, variant.params, variant.buffers, variant.aliases, unset, constants, {}, kind)

    def find(self, buffers: dict[str, Tensor], carried: Carried | None) -> None:
        """Remember where in the state the buffers are that a call did not pass."""
        for local, x in buffers.items():
            assert carried is not None
            self.carried[local] = next(name for name, y in carried.values.items() if y is x)

    def run(self, params: dict, buffers: dict, args: tuple, kwargs: dict) -> tuple[Any, dict[str, Tensor]]:
        """Return the module's output, and all its buffers after the call, none of which are those that were given."""
        given: dict[str, Tensor] = {**self.constants, **buffers}
        at = {"device": next(iter(params.values())).device} if params else {}
        copies = {name: b.detach().to(**at, dtype=b.dtype, copy=True) for name, b in given.items()}
        for held, key, name in self.params:
            held[key] = params[name]
        for held, key, name in self.buffers:
            held[key] = copies[name]
        for held, key, name in self.aliases:
            held[key] = params[name] if name in params else copies[name]
        out = self.module(*args, **kwargs)
        new = {}
        for held, key, name in self.buffers:
            new[name] = held[key].detach()
            held[key] = None
        for held, key, _ in self.params:
            held[key] = None
        for held, key, _ in self.aliases:
            held[key] = None
        for held, key in self.unset:  # a cache: the next call computes its own
            held[key] = None
        return out, new


def _has_hooks(part: nn.Module) -> bool:
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
    return any(hooks)


class _Now(threading.local):
    key: Key | None = None  # of the compiled code that runs, or is being traced
    looking: Key | None = None  # of the compiler for which a loss is run once uncompiled


now = _Now()
SHOWN: list[Any] = []  # in a trace: the last output of a module
CARRIED: list[dict[str, Tensor]] = []  # in a trace: the buffers of the state


def constant(function: Callable) -> Callable:
    """Decorate a function that is called when code is traced, and whose result is a constant in it."""
    # what torch.compiler.assume_constant_result does, which imports torch._dynamo
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@constant
def key_in_trace() -> Key | None:
    """Return the key of the code of ours that is being traced; None in code that a user compiles."""
    return now.key


def output(module: TracedModule, params: dict, buffers: dict | None, args: tuple, kwargs: dict) -> Any:
    """Return the module's output, in a trace."""
    if buffers is None:
        buffers = {local: CARRIED[0][name] for local, name in module.carried.items()}
    out, _ = module.run(params, buffers, args, kwargs)
    if CARRIED:
        SHOWN.clear()
        SHOWN.append(out)
    return out


def output_and_buffers(
    module: TracedModule, params: dict, buffers: dict, args: tuple, kwargs: dict
) -> tuple[Any, dict]:
    """Return the module's output and the new ones of these buffers, in a trace."""
    out, new = module.run(params, buffers, args, kwargs)
    if CARRIED:
        SHOWN.clear()
        SHOWN.append(out)
    return out, {name: new[name] for name in buffers}


def call(module: TracedModule, params: dict, buffers: dict, x: Any) -> Any:
    """Return the output of a layer and its new buffers; compiled code begins here."""
    return output_and_buffers(module, params, buffers, (x,), {})


def call_on_copy(module: TracedModule, params: dict, buffers: dict, x: Any) -> Any:
    """Do the same for a layer that writes over its input, which compiled code cannot keep for backward then."""
    return call(module, params, buffers, x.clone() if isinstance(x, Tensor) else x)


def call_function(function: Callable, args: tuple) -> Any:
    """Return what a function returns; compiled code begins here."""
    return function(*args)


def call_and_show(function: Callable, args: tuple, carried: dict[str, Tensor]) -> tuple[Any, list[Any]]:
    """Return what a function returns, and the last output of a module in it; compiled code begins here."""
    CARRIED.append(carried)
    value = function(*args)
    CARRIED.clear()
    shown = list(SHOWN)
    SHOWN.clear()
    return value, shown
