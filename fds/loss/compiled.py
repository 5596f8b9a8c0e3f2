"""torch.compile and fds: code that it must not trace, and compiled modules that are called from such code."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

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
    own: Any = types.FunctionType(code, _call.__globals__, _call.__name__)

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _suspended.compiler is None:
            return function(*args, **kwargs)
        eval_frame.set_eval_frame(_suspended.compiler)
        try:
            return own(function, args, kwargs)
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
