"""Losses and layers that run through torch.compile: what `fds.compile` puts in the place of a loss."""

from __future__ import annotations

import itertools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor
from torch.utils import _python_dispatch

from fds import random, tree
from fds.errors import ComposeError, LossError
from fds.loss import compiled
from fds.loss.modes import current
from fds.loss.modules import Apply
from fds.loss.values import total_of

_is_watched = _python_dispatch.is_in_any_mode_without_ignore_compile_internals
_numbers = itertools.count()
_known: weakref.WeakKeyDictionary[Any, dict[Hashable, Compiler]] = weakref.WeakKeyDictionary()


@attrs.frozen(eq=False, repr=False)
class Compiler:
    """How a loss is compiled, and what has been: a function for each kind of layer, or for the loss, in each mode.

    What is called for the first time in a mode also runs once uncompiled, which makes copies of its modules and looks
    for mistakes in it as in an uncompiled loss. That result is dropped. Inside a `TorchDispatchMode` that has to see
    every operator, such as `FlopCounterMode`, all run uncompiled, as torch would have it.
    """

    arguments: dict[str, Any]  # of torch.compile
    text: str
    number: int = attrs.field(init=False, factory=_numbers.__next__)
    functions: dict[Hashable, Callable] = attrs.field(init=False, factory=dict)
    looked: set[Hashable] = attrs.field(init=False, factory=set)  # functions that ran uncompiled, by id and mode
    alone: dict[int, Hashable] = attrs.field(init=False, factory=dict)  # kinds of layers that share no function, by id

    @classmethod
    def of(cls, loss: Any, arguments: dict[str, Any], text: str) -> Compiler:
        """Return the compiler of a loss with these arguments: one for all steps, whose functions outlive none of them.

        A loss holds all functions that it calls, so their ids stay their own.
        """
        compilers = _known.setdefault(loss, {})
        key = tuple(x if isinstance(x, Hashable) else repr(x) for x in arguments.values())
        return compilers.get(key) or compilers.setdefault(key, cls(arguments, text))

    def __repr__(self) -> str:
        return self.text

    def module(
        self, apply: Apply, params: dict, buffers: dict, x: Any, *, in_place: bool
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return a layer's output and new buffers. One that works in place leaves its input as it is."""
        if _is_watched():
            return apply.with_buffers(params, buffers, x)
        key = (self.number, *current().key)
        module = apply.traced.get(key)
        if module is None:
            self._look(apply.with_buffers, (params, buffers), (x,))
            module = apply.traced[key]
        where = f"layer {apply.prefix.rstrip('.')}, a {type(apply.source).__name__}"
        code = compiled.call_on_copy if in_place else compiled.call
        params, scope = compiled.lent(params)
        with scope:
            kind = self.alone.get(id(module), module.kind)
            try:
                return self._run(code, kind, where, module, params, buffers, x)
            except LossError as error:
                if kind is not module.kind or not _is_limit(error.__cause__):
                    raise
            # layers that look alike, and differ more often than torch compiles versions of a function
            kind = self.alone[id(module)] = (module.kind, id(module))
            return self._run(code, kind, where, module, params, buffers, x)

    def function(self, function: Callable, args: Sequence[Any], where: str) -> Any:
        """Return what a function of tensors returns: a layer without parameters, or a criterion."""
        if _is_watched():
            return function(*args)
        kind = self._look_once(function, (), args)
        return self._run(compiled.call_function, kind, where, function, tuple(args))

    def loss(self, function: Callable, args: Sequence[Any], where: str) -> Any:
        """Return what a whole loss returns."""
        if _is_watched():
            return function(*args)
        kind, now = self._look_once(function, args[:1], args[1:], is_loss=True), current()
        if not now.evaluating:
            return self._run(compiled.call_function, kind, where, function, tuple(args))
        carried = {} if now.carried is None else now.carried.values
        value, shown = self._run(compiled.call_and_show, kind, where, function, tuple(args), carried)
        if now.seen is not None:
            now.seen[:1] = shown
        return value

    def _look_once(
        self, function: Callable, params: Sequence[Any], args: Sequence[Any], *, is_loss: bool = False
    ) -> Hashable:
        """Run a function uncompiled, the first time in this mode; return what its compiled code is found by."""
        kind = (id(function), current().key)
        if kind not in self.looked:
            self._look(function, params, args, is_loss=is_loss)
            self.looked.add(kind)
        return kind

    def _look(self, function: Callable, params: Sequence[Any], args: Sequence[Any], *, is_loss: bool = False) -> None:
        """Run a function uncompiled, and drop what it returns, draws, saves and writes into what it is given."""
        args = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)
        compiled.now.looking = (self.number, *current().key)
        try:
            with (
                random.scope(random.in_use()),
                # A checkpoint's hooks count what is saved, and its modes what is called. Kept as it is, an output would
                # keep the graph that keeps it.
                torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x),
                _python_dispatch._disable_current_modes(),
            ):
                value = function(*params, *args)
            current().check_graph(total_of(value) if is_loss else None)
        finally:
            compiled.now.looking = None

    def _run(self, code: Callable, kind: Hashable, where: str, *args: Any) -> Any:
        """Call the compiled function of a kind. Raises `LossError` for what torch.compile refuses."""
        function = self.functions.get(kind) or self.functions.setdefault(kind, self._compile(code))
        before, compiled.now.key = compiled.now.key, (self.number, *current().key)
        try:
            return function(*args)
        except Exception as error:
            dynamo: Any = sys.modules["torch._dynamo"]
            if isinstance(error, dynamo.exc.TorchDynamoException) or _is_limit(error):
                self._raise(error, where)
            raise
        finally:
            compiled.now.key = before

    def _compile(self, code: Callable) -> Callable:
        """Return a compiled function, with a code object and a name of its own.

        torch limits how many versions each object has, and by name remembers which sizes change from call to call.
        """
        name = f"{code.__name__}_{self.number}_{len(self.functions)}"
        traced: Any = types.FunctionType(code.__code__.replace(co_name=name), code.__globals__, name)
        try:
            return torch.compile(traced, **self.arguments)
        except RuntimeError as error:
            raise ComposeError(
                "torch.compile does not take this", where="compile", got=str(error)[:400], want="its arguments"
            ) from error

    def _raise(self, error: Exception, where: str) -> NoReturn:
        raise LossError(
            "torch.compile refuses this code",
            where=where,
            got=_words(error).partition("\nSet TORCHDYNAMO_VERBOSE")[0].strip(),
            want=f"code that {self} can compile",
            hint=_hint(error),
        ) from error


def _is_limit(error: BaseException | None) -> bool:
    """Say whether torch.compile raised this because it compiled a function in as many versions as it does."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def _words(error: Exception) -> str:
    """Return what torch says; of a limit of versions why it is one, which stands in its cause."""
    if not _is_limit(error):
        return str(error)
    _, _, explained = str(error.__cause__).partition("Explanation: ")
    said = f"{explained.partition('. ')[0]}; " if explained else ""
    return f"{said}the last reason to compile again is in the warning that torch logged"


def _hint(error: Exception) -> str:
    if _is_limit(error):
        return (
            "where shapes change: batches of few shapes, or fds.compile(dynamic=True); where Python values change that "
            "the loss reads: put them into the batch, as tensors; or raise torch._dynamo.config.recompile_limit"
        )
    untraced = type(error).__name__ in ("Unsupported", "UserError")  # the latter: a branch on a value of a tensor
    return "fds.compile(fullgraph=False) lets what cannot be traced run uncompiled" if untraced else ""


@attrs.frozen(eq=False, repr=False)
class CompiledLoss:
    """A loss without layers in the open, compiled as a whole."""

    function: Callable[..., Any]
    compiler: Compiler
    __name__: str

    def __repr__(self) -> str:
        return f"{self.__name__}, through {self.compiler}"

    def __call__(self, *args: Any) -> Any:
        """Return what the loss returns."""
        return self.compiler.loss(self.function, args, self.__name__)
