"""What torch.compile meets of fds: code that it must not trace, and modules that it is to trace all the same."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch._C._dynamo import eval_frame  # without torch._dynamo, whose import takes 1.7 s

P = ParamSpec("P")
R = TypeVar("R")

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


class _Outside(threading.local):
    compiler: Any = None  # what traces the code that called what is `untraced`


_outside = _Outside()


def untraced(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function run as it is inside compiled code: it ends the graph, and neither it nor its callees are traced.

    With `fullgraph=True` torch raises its own error there, which shows the reason.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            compiler = eval_frame.set_eval_frame(None)
            if compiler is None:
                return function(*args, **kwargs)
            before, _outside.compiler = _outside.compiler, compiler
            try:
                return function(*args, **kwargs)
            finally:
                _outside.compiler = before
                eval_frame.set_eval_frame(compiler)

        run._torchdynamo_disable = True  # type: ignore[attr-defined]
        run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        eval_frame.set_code_exec_strategy(run.__code__, _SKIP)  # type: ignore[attr-defined]
        return run

    return mark


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """Return what calls a function, inside something `untraced` too, as the compiled code around that would."""
    # a code object of its own: torch limits how many versions it compiles of one
    code = _call.__code__.replace()
    own: Any = types.FunctionType(code, _call.__globals__, _call.__name__)

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _outside.compiler is None:
            return function(*args, **kwargs)
        eval_frame.set_eval_frame(_outside.compiler)
        try:
            return own(function, args, kwargs)
        finally:
            eval_frame.set_eval_frame(None)

    return run


def is_compiled(function: Any) -> bool:
    """Return whether this is what `torch.compile` returned for a function or a module."""
    return hasattr(function, "_torchdynamo_orig_callable") or (
        type(function).__name__ == "OptimizedModule" and type(function).__module__.startswith("torch._dynamo")
    )


def with_memory(p: Tensor) -> Tensor:
    """Return a parameter as compiled code can read it: a copy of one that is gathered on use."""
    return p.clone() if getattr(type(p), "gathered_on_use", False) else p


def _call(function: Callable, args: tuple, kwargs: dict) -> Any:
    return function(*args, **kwargs)
