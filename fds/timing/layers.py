"""Which layer a call of a step is in: hooks around modules say it in forward, and on nodes of the graph in backward."""

from __future__ import annotations

import contextlib
import fnmatch
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fds import tree
from fds.errors import FdsError, did_you_mean
from fds.loss.owners import Owners
from fds.loss.roots import Root, roots
from fds.step.ranges import Clock

SAME = "="  # a mark at which no range begins or ends


class Position(NamedTuple):
    """The innermost layer that runs, or whose forward backward reverses; empty outside of all."""

    layer: str
    reversed: bool


_OUTSIDE = Position("", reversed=False)


@attrs.define(eq=False)
class LayerClock(Clock):
    """A clock that also knows in which layer a call is.

    Autograd numbers the nodes of its graph in the order of forward, and runs them from the last to the first. So
    backward enters or leaves a layer at a node which that layer was given or returned, and the numbers at which layers
    begin and end in forward say to which of them this node belongs.

    Attributes:
        patterns: of names of layers; None for the outermost ones.
        borders: index of a mark -> where the call is from there on.
    """

    patterns: Sequence[str] | None = None
    borders: dict[int, Position] = tree.new(dict)
    _now: Position = _OUTSIDE
    _running: list[Position | None] = tree.new(list)  # per module that runs: where it was before, None for no layer
    _names: dict[nn.Module, str] = tree.new(dict)
    _bases: dict[Root, str] = tree.new(dict)
    _owners: Owners = tree.new(Owners)
    _thread: int | None = None  # that of the call, while it runs: hooks are those of all threads

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Follow the layers of the call in the block."""
        hooks = [
            register_module_forward_pre_hook(lambda module, args: self._enter(module, args)),
            register_module_forward_hook(  # where forward raised it is called without keywords
                lambda module, *given: self._leave(module, given), with_kwargs=True, always_call=True
            ),
        ]
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
            for hook in hooks:
                hook.remove()
                module._global_forward_hooks_with_kwargs.pop(hook.id, None)  # pyright: ignore[reportPrivateUsage]  (torch leaves it there)

    def check(self) -> None:
        """Raise `FdsError` for a pattern that matches no module of those that ran; where none did, nothing is known."""
        names = [name for name in self._names.values() if name]
        for pattern in self.patterns or ():
            if names and not fnmatch.filter(names, pattern):
                hint = did_you_mean(pattern, names)
                raise FdsError("no layer has such a name", where="timed, layers", got=repr(pattern), hint=hint)

    def mark(self, name: str) -> None:
        """Note that a range begins or ends; forward and backward begin outside of all layers."""
        if name.startswith(("forward", "backward")) and not self._running:
            self._move(_OUTSIDE)
        super().mark(name)

    def _move(self, to: Position) -> None:
        if to != self._now and (now := self.now()) is not None:
            self._now = to
            self.borders[len(self.marks)] = to
            self.marks.append((SAME, now))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._knows(module):
            return
        chosen = self._chooses(module)
        self._running.append(self._now if chosen else None)
        if chosen:
            self._hook(args)  # what it writes over has another node afterwards
            self._owners.begin(self._names[module])
            self._move(Position(self._names[module], reversed=False))

    def _leave(self, module: nn.Module, tensors: Any) -> None:
        if torch.compiler.is_compiling() or not self._knows(module) or not self._running:
            return
        if (before := self._running.pop()) is not None:
            self._hook(tensors)
            self._owners.begin(before.layer)
            self._move(before)

    def _hook(self, tensors: Any) -> None:
        """Have backward say when it comes to the nodes of these tensors."""
        for node in {x.grad_fn for x in _tensors(tensors) if x.grad_fn is not None}:
            to = Position(self._owners.of(node), reversed=True)
            node.register_prehook(lambda _, to=to: self._move(to) if self._is_here() else None)

    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def _knows(self, module: nn.Module) -> bool:
        """Return whether a module is one of a loss and runs in this call; name those of a copy that is new."""
        if not self._is_here():
            return False
        if module not in self._names and (root := roots.get(module)) is not None:
            for path, part in module.named_modules():
                self._names.setdefault(part, ".".join(filter(None, [self._base(root, module), path])))
        return module in self._names

    def _base(self, root: Root, module: nn.Module) -> str:
        """Return what the names of a copy begin with: those of a second model, with its class."""
        if root not in self._bases:
            base = root.prefix.rstrip(".") or (type(module).__name__ if self._bases else "")
            others = list(self._bases.values()) if not root.prefix else []
            names = [base, *(f"{base} {i}" for i in range(2, len(others) + 2))]
            self._bases[root] = next(name for name in names if name not in others)
        return self._bases[root]

    def _chooses(self, module: nn.Module) -> bool:
        name = self._names[module]
        if self.patterns is not None:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)
        return name != "" and all(before is None for before in self._running)


def _tensors(x: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module is given or returns: lists, tuples and dicts of them."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple | dict):
        for one in x.values() if isinstance(x, dict) else x:
            yield from _tensors(one)
