"""torch.compile and fds: code that it must not trace, compiled modules in such code, modules as it traces them."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import attrs
from torch import Tensor, nn

# Private: what torch.compiler.disable() is made of. torch.compiler.disable imports torch._dynamo, which takes 1.7 s and
# would be paid by programs that compile nothing.
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


class _Suspended(threading.local):
    compiler: Any = None  # the compiler of the code that called an `untraced` function


_suspended = _Suspended()


def untraced(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for functions that torch.compile must not trace: it breaks the graph there.

    What the function calls is not traced either. With `fullgraph=True` torch raises an error that shows `reason`.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            compiler = eval_frame.set_eval_frame(None)
            if compiler is None:
                return function(*args, **kwargs)
            before, _suspended.compiler = _suspended.compiler, compiler
            try:
                return function(*args, **kwargs)
            finally:
                _suspended.compiler = before
                eval_frame.set_eval_frame(compiler)

        marked: Any = run
        marked._torchdynamo_disable = True  # by these two attributes torch.compile knows a disabled function
        marked._torchdynamo_disable_msg = reason
        eval_frame.set_code_exec_strategy(marked.__code__, _SKIP)  # also where torch.compile meets its frame first
        return run

    return mark


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that is compiled even where an `untraced` function calls it, if that runs in compiled code."""
    # A code object of its own, since torch limits how many versions it compiles of each.
    code = _call.__code__.replace()
    compiled: Any = types.FunctionType(code, _call.__globals__, _call.__name__)

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _suspended.compiler is None:
            return function(*args, **kwargs)
        eval_frame.set_eval_frame(_suspended.compiler)
        try:
            return compiled(function, args, kwargs)
        finally:
            eval_frame.set_eval_frame(None)

    return run


def is_compiled(function: Any) -> bool:
    """Return whether this function or module was returned by `torch.compile`."""
    return hasattr(function, "_torchdynamo_orig_callable") or (
        type(function).__name__ == "OptimizedModule" and type(function).__module__.startswith("torch._dynamo")
    )


def lent(params: dict[str, Tensor]) -> tuple[dict[str, Tensor], AbstractContextManager[object]]:
    """Return parameters that compiled code can read, and the scope in which it has to run.

    Those that are gathered on use are gathered now, and again for backward.
    """
    names = [name for name, p in params.items() if getattr(type(p), "gathered_on_use", False)]
    if not names:
        return params, nullcontext()
    handles: Any = [params[name] for name in names]
    values, scope = type(handles[0]).lent(handles)
    return {**params, **dict(zip(names, values, strict=True))}, scope


def with_memory(p: Tensor) -> Tensor:
    """Return a parameter that compiled code can read: a copy where the parameter is gathered on use."""
    return p.clone() if getattr(type(p), "gathered_on_use", False) else p


def _call(function: Callable, args: tuple, kwargs: dict) -> Any:
    return function(*args, **kwargs)


Location = tuple[Any, Any, str]  # a dict or list, the key in it, and the name of what belongs there
Key = tuple[Any, ...]  # number of a compiler, and `Mode.key`


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

    def find(self, buffers: dict[str, Tensor], state_buffers: dict[str, Tensor]) -> None:
        """Remember where in the state the buffers are that a call did not pass."""
        for local, x in buffers.items():
            self.carried[local] = next(name for name, y in state_buffers.items() if y is x)

    def run(self, params: dict, buffers: dict, args: tuple, kwargs: dict) -> tuple[Any, dict[str, Tensor]]:
        """Return the module's output, and all its buffers after the call, none of which are those that were given."""
        before: dict[str, Tensor] = {**self.constants, **buffers}
        at = {"device": next(iter(params.values())).device} if params else {}
        copies = {name: b.detach().to(**at, dtype=b.dtype, copy=True) for name, b in before.items()}
        for place, key, name in self.params:
            place[key] = params[name]
        for place, key, name in self.buffers:
            place[key] = copies[name]
        for place, key, name in self.aliases:
            place[key] = params[name] if name in params else copies[name]
        out = self.module(*args, **kwargs)
        new = {}
        for place, key, name in self.buffers:
            new[name] = place[key].detach()
            place[key] = None
        for place, key, _ in self.params:
            place[key] = None
        for place, key, _ in self.aliases:
            place[key] = None
        for place, key in self.unset:  # a cache: the next call computes its own
            place[key] = None
        return out, new


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


def is_trial_run() -> bool:
    """Say whether a loss is run once uncompiled, before it is compiled."""
    return now.looking is not None


def output(module: TracedModule, params: dict, buffers: dict | None, args: tuple, kwargs: dict) -> Any:
    """Return the module's output, in a trace."""
    if buffers is None:
        buffers = {local: CARRIED[0][name] for local, name in module.carried.items()}
    return output_and_buffers(module, params, buffers, args, kwargs)[0]


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
