"""What `forward` leaves in plain attributes of a module: there no state holds it, and nobody outside finds it.

A copy of the module runs, so the copy has what was assigned. Of no harm are caches that any call would make again, and
what is written to be looked at. A running mean that is neither a parameter nor a buffer is lost, and an auxiliary loss
that is read from the module itself is not there. The first calls are followed: which operators take what was held
before, and whether the output depends on what is held after.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from fds import tree
from fds.errors import LossError, LossWarning
from fds.loss.compiled import is_compiled
from fds.loss.copies import Absent

_COPYING = {  # operators whose result is what they were given, arranged in another way
    "_to_copy", "clone", "copy_", "cat", "stack", "repeat", "constant_pad_nd", "_unsafe_view", "_reshape_alias",
    "index", "index_select", "slice_scatter", "lift_fresh", "slice_copy",
}  # fmt: skip
_OVERWRITING = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "resize_", "set_", "index_put_"}


class Followed(TorchDispatchMode):
    """Finds what is computed of tensors that were held when the call began, each under its name."""

    supports_higher_order_operators = True

    def __init__(self, held: dict[str, Tensor]):
        super().__init__()
        self.memory = {_memory(x): name for name, x in held.items() if _memory(x) is not None}
        self.copies, self.results = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.changed: set[str] = set()  # held tensors that were computed anew in place

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # to skip it, torch would import torch._dynamo, which takes seconds
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run as they are; what they compute is not looked at."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        copies = {name for x in given for name in self._copies(x)}
        results = {name for x in given for name in self.results.get(x) or ()}
        out = func(*args, **(kwargs or {}))
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if not (copies or results) or name.endswith("_like") or name.startswith("new_"):
            return out
        if not (getattr(func, "is_view", False) or name in _COPYING):
            copies, results = set(), copies | results
        for x in tree.leaves(out):
            if isinstance(x, Tensor):
                self.copies[x], self.results[x] = copies, results
        if given and name.endswith("_") and name not in _OVERWRITING and (at := self.memory.get(_memory(given[0]))):
            self.changed.add(at)
        return out

    def _copies(self, x: Tensor) -> set[str]:
        held = self.memory.get(_memory(x))
        found = self.copies.get(x) or set()
        return found if held is None else {*found, held}

    def is_result(self, name: str, new: Tensor) -> bool:
        """Say whether a tensor was computed of what was held under a name; `.data` of it was too."""
        if name in (self.results.get(new) or ()):
            return True
        at = _memory(new)
        return at is not None and any(name in names and _memory(x) == at for x, names in self.results.items())


@attrs.define
class Watch:
    """The first two calls of a module in one mode: what one leaves is what the next one finds."""

    counted: dict[str, float] | None = None  # numbers that the first call changed, and by how much; None before it
    over: bool = False

    def begin(self, module: nn.Module) -> Call | None:
        """Return what is to be known before a call; None where compiled parts would hide what it does."""
        self.over = any(map(is_compiled, module.modules()))
        return None if self.over or torch.compiler.is_compiling() else Call(module)

    def end(self, call: Call, out: Any, *, trains: bool) -> None:
        """Look at what a call left. Raises `LossError` for a state that would be lost, and warns of what may be one."""
        call.refuse_state()
        if trains:
            call.warn_of_losses(out)
        counted = call.counted()
        if self.counted is not None:
            _warn_of_counts(sorted(name for name, by in counted.items() if self.counted.get(name) == by))
        self.over = self.counted is not None or not (counted or call.grown())
        self.counted = counted


class Call:
    """One call of a module, and what its attributes held before."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.tensors, self.numbers = _tensors(module), _numbers(module)
        self.mode = Followed(self.tensors) if self.tensors else None

    def followed(self) -> contextlib.AbstractContextManager:
        """Return what the call is to run in."""
        return contextlib.nullcontext() if self.mode is None else self.mode

    def refuse_state(self) -> None:
        """Raise `LossError` where what is held now was computed of what was held before."""
        if self.mode is None:
            return
        now, mode = _tensors(self.module), self.mode
        lost = {n for n, x in self.tensors.items() if n in now and now[n] is not x and mode.is_result(n, now[n])}
        if lost := sorted(lost | mode.changed):
            raise LossError(
                "the module keeps a state in a plain attribute, and no step would keep it", where=", ".join(lost),
                got=f"forward computes self.{lost[0].rpartition('.')[2]} of its own old value",
                want=f'self.register_buffer("{lost[0].rpartition(".")[2]}", ...) in __init__',
                hint="buffers that change go through apply.with_buffers and fds.with_buffers, into state.buffers; or "
                "pass it as an argument, and return the new one",
            )  # fmt: skip

    def warn_of_losses(self, out: Any) -> None:
        """Warn of scalars with a graph that the output does not depend on: of use to nobody but who reads them."""
        new = {name: x for name, x in _tensors(self.module).items() if x is not self.tensors.get(name)}
        scalars = {n: x for n, x in new.items() if x.dim() == 0 and x.is_floating_point() and x.grad_fn is not None}
        if not scalars:
            return
        seen = {x.grad_fn for x in tree.leaves(out) if isinstance(x, Tensor)}
        todo = [node for node in seen if node is not None]
        while todo:
            for node, _ in todo.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    todo.append(node)
        if alone := sorted(name for name, x in scalars.items() if x.grad_fn not in seen):
            warnings.warn(
                f"forward of a {type(self.module).__name__} keeps a scalar in {', '.join(alone)}, which its output does"
                " not depend on. If it is a part of the loss, return it: fds.functional runs a copy of the module, so"
                " the module itself does not have it. If it is for looking at: .detach() it",
                LossWarning, stacklevel=2,
            )  # fmt: skip

    def counted(self) -> dict[str, float]:
        """Return the numbers that are others now, and by how much; of floats 0, since that varies."""
        new = {name: (self.numbers[name], x) for name, x in _numbers(self.module).items() if name in self.numbers}
        return {name: x - old if type(x) is int else 0.0 for name, (old, x) in new.items() if x != old}

    def grown(self) -> bool:
        """Say whether there are tensors where none was."""
        return not _tensors(self.module).keys() <= self.tensors.keys()


def _warn_of_counts(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"forward changes numbers in every call: {', '.join(names)}. They are kept in a copy of the module, not in"
            " the state, so no save has them and steps that are made again go on counting: count in a buffer"
            " (register_buffer), or pass the number as an argument",
            LossWarning, stacklevel=2,
        )  # fmt: skip


def _held(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the parts of a module hold beside parameters, buffers and parts, also in dicts and lists."""
    for path, part in module.named_modules():
        own = {id(part._parameters), id(part._buffers), id(part._modules)}
        for name, x in vars(part).items():
            at = f"{path}.{name}" if path else name
            if id(x) in own or name == "training":
                continue
            if type(x) in (dict, list):
                yield from ((f"{at}.{key}", y) for key, y in (x.items() if type(x) is dict else enumerate(x)))
            else:
                yield at, x


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    kept = lambda x: isinstance(x, Tensor) and not isinstance(x, Absent | nn.Parameter)
    return {name: x for name, x in _held(module) if kept(x)}


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in _held(module) if type(x) in (int, float)}


def _memory(x: Tensor) -> int | None:
    """Return which storage a plain tensor lies in, None where it has none."""
    try:
        return x.untyped_storage()._cdata if type(x) in (Tensor, nn.Parameter) and not x.is_meta else None
    except (NotImplementedError, RuntimeError):  # sparse, or of a transform of torch.func
        return None
