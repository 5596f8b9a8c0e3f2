"""Checks of what `forward` assigns to plain attributes of a module, which no state holds.

Since a copy of the module runs, the attributes of the module itself do not change. That is harmless for caches and for
values kept for inspection. But a running mean that is neither a parameter nor a buffer is lost, and an auxiliary loss
cannot be read from the module. The first two calls of each kind are therefore observed: is a new attribute computed
from its old value, and does the output depend on it?
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fds import tree
from fds.autodiff import nodes_behind
from fds.errors import LossError, LossWarning
from fds.loss.compiled import is_compiled
from fds.loss.copies import Absent
from fds.loss.module_copies import Watching

# operators whose result holds the values of their input, possibly rearranged
_COPYING = {
    "_to_copy", "clone", "copy_", "cat", "stack", "repeat", "constant_pad_nd", "_unsafe_view", "_reshape_alias",
    "index", "index_select", "slice_scatter", "lift_fresh", "slice_copy",
}  # fmt: skip
_OVERWRITING = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "resize_", "set_", "index_put_"}


class Dependencies(Watching):
    """Track which tensors are computed from those that the attributes held when the call began, by attribute name."""

    supports_higher_order_operators = True

    def __init__(self, attributes: dict[str, Tensor]):
        super().__init__()
        self.memory = {_memory(x): name for name, x in attributes.items() if _memory(x) is not None}
        self.copies, self.results = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.changed: set[str] = set()  # attributes that were updated in place

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        copies = {name for x in inputs for name in self._copies(x)}
        results = {name for x in inputs for name in self.results.get(x) or ()}
        out = func(*args, **(kwargs or {}))
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if not (copies or results) or name.endswith("_like") or name.startswith("new_"):
            return out
        if not (getattr(func, "is_view", False) or name in _COPYING):
            copies, results = set(), copies | results
        for x in tree.leaves(out):
            if isinstance(x, Tensor):
                self.copies[x], self.results[x] = copies, results
        if inputs and name.endswith("_") and name not in _OVERWRITING and _memory(inputs[0]) in self.memory:
            self.changed.add(self.memory[_memory(inputs[0])])
        return out

    def _copies(self, x: Tensor) -> set[str]:
        attribute = self.memory.get(_memory(x))
        names = self.copies.get(x) or set()
        return names if attribute is None else {*names, attribute}

    def is_result(self, name: str, new: Tensor) -> bool:
        """Say whether a tensor, or one that shares its memory, was computed from the attribute of this name."""
        if name in (self.results.get(new) or ()):
            return True
        memory = _memory(new)
        return memory is not None and any(name in names and _memory(x) == memory for x, names in self.results.items())


@attrs.define
class AttributeWatch:
    """The first two calls of a module in one mode: the second starts from the attributes that the first one left."""

    counted: dict[str, float] | None = None  # numbers that the first call changed, and by how much; None before it
    over: bool = False

    def begin(self, module: nn.Module) -> ObservedCall | None:
        """Return the record of a call that is about to start; None where compiled parts would hide what it does."""
        self.over = any(map(is_compiled, module.modules()))
        return None if self.over or torch.compiler.is_compiling() else ObservedCall(module)

    def end(self, call: ObservedCall, out: Any, *, trains: bool) -> None:
        """Check the attributes after a call. Raises `LossError` for lost state, and warns of what may be some."""
        call.check_state()
        if trains:
            call.warn_of_losses(out)
        counted = call.count_changes()
        has_new_tensors = not _tensors(call.module).keys() <= call.tensors.keys()
        if names := sorted(name for name, by in counted.items() if self.counted and self.counted.get(name) == by):
            warnings.warn(
                f"forward changes numbers in every call: {', '.join(names)}. They are kept in a copy of the module, not"
                " in the state, so no save has them, and a step that is repeated goes on counting: count in a buffer"
                " (register_buffer), or pass the number as an argument",
                LossWarning,
                stacklevel=2,
            )
        self.over = self.counted is not None or not (counted or has_new_tensors)
        self.counted = counted


class ObservedCall:
    """One call of a module, and what its attributes held before it."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.tensors, self.numbers = _tensors(module), _numbers(module)
        self.dependencies = Dependencies(self.tensors) if self.tensors else None

    def check_state(self) -> None:
        """Raise `LossError` where an attribute was computed from its own old value."""
        if self.dependencies is None:
            return
        now, by = _tensors(self.module), self.dependencies
        lost = {n for n, x in self.tensors.items() if n in now and now[n] is not x and by.is_result(n, now[n])}
        if lost := sorted(lost | by.changed):
            raise LossError(
                "the module keeps a state in a plain attribute, and no step would keep it",
                where=", ".join(lost),
                got=f"forward computes self.{lost[0].rpartition('.')[2]} from its own old value",
                want=f'self.register_buffer("{lost[0].rpartition(".")[2]}", ...) in __init__',
                hint="buffers that change go through apply.with_buffers and fds.with_buffers, into state.buffers; or "
                "pass it as an argument, and return the new one",
            )

    def warn_of_losses(self, out: Any) -> None:
        """Warn of new scalars that have a graph and that the output does not depend on, such as an auxiliary loss."""
        new = {name: x for name, x in _tensors(self.module).items() if x is not self.tensors.get(name)}
        scalars = {n: x for n, x in new.items() if x.dim() == 0 and x.is_floating_point() and x.grad_fn is not None}
        if not scalars:
            return
        seen = set(nodes_behind(tree.leaves(out)))
        if alone := sorted(name for name, x in scalars.items() if x.grad_fn not in seen):
            warnings.warn(
                f"forward of a {type(self.module).__name__} keeps a scalar in {', '.join(alone)}, which its output does"
                " not depend on. If it is a part of the loss, return it: fds.functional runs a copy of the module, so"
                " the module itself does not have it. If it is kept for inspection: .detach() it",
                LossWarning,
                stacklevel=2,
            )

    def count_changes(self) -> dict[str, float]:
        """Return the numbers that changed, and by how much; 0 for floats, whose changes vary."""
        new = {name: (self.numbers[name], x) for name, x in _numbers(self.module).items() if name in self.numbers}
        return {name: x - old if type(x) is int else 0.0 for name, (old, x) in new.items() if x != old}


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield all attributes that are not parameters, buffers or submodules by path, looking into dicts and lists."""
    for path, part in module.named_modules():
        registered = {id(part._parameters), id(part._buffers), id(part._modules)}
        for name, x in vars(part).items():
            full = f"{path}.{name}" if path else name
            if id(x) in registered or name == "training":
                continue
            if type(x) in (dict, list):
                yield from ((f"{full}.{key}", y) for key, y in (x.items() if type(x) is dict else enumerate(x)))
            else:
                yield full, x


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    kept = lambda x: isinstance(x, Tensor) and not isinstance(x, Absent | nn.Parameter)
    return {name: x for name, x in _attributes(module) if kept(x)}


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in _attributes(module) if type(x) in (int, float)}


def _memory(x: Tensor) -> int | None:
    """Return the address of a plain tensor's storage, None where it has none."""
    try:
        return x.untyped_storage()._cdata if type(x) in (Tensor, nn.Parameter) and not x.is_meta else None
    except (NotImplementedError, RuntimeError):  # sparse, or inside a transform of torch.func
        return None
