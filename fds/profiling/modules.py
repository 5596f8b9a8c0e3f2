"""Which module an operator belongs to: in forward the one that runs, in backward the one whose forward it reverses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fds import tree
from fds.loss.owners import Owners
from fds.loss.roots import Root, roots

# private: torch has no public function for where autograd is
_node: Callable[[], Any] = torch._C._current_autograd_node  # pyright: ignore


@attrs.define(eq=False)
class Found:
    """A module that ran: its class, how often it ran forward, and its own parameters by identity."""

    kind: str
    own: dict[int, int] = tree.new(dict)  # id of a parameter -> its elements
    calls: int = 0


@attrs.define(eq=False)
class Modules:
    """The modules that run while hooks are in place, by the names of their parameters.

    Autograd numbers what it records in the order of forward: the numbers at which modules begin and end say to which
    of them a node of the graph belongs.
    """

    active: Callable[[], bool]  # whether what runs here is to be seen: hooks are those of all threads
    found: dict[str, Found] = tree.new(dict)
    running: list[str] = tree.new(list)  # outermost first
    _names: dict[nn.Module, str] = tree.new(dict)
    _bases: dict[Root, str] = tree.new(dict)
    _owners: Owners = tree.new(Owners)
    _hooks: list[Any] = tree.new(list)

    def __enter__(self) -> Modules:
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._enter(module)),
            register_module_forward_hook(lambda *given: self._leave(given[0]), always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Take what runs in the block, and its backward, for that of a module of this name, where it is in no other."""
        self.running.append(name)
        self._mark()
        try:
            yield
        finally:
            self.running.pop()
            self._mark()

    @property
    def current(self) -> str:
        """The innermost module that runs; empty outside of all."""
        return self.running[-1] if self.running else ""

    def reversed(self) -> str:
        """Return the module of the node that backward is at; empty where there is none."""
        node = _node()
        return "" if node is None else self._owners.of(node)

    def _enter(self, module: nn.Module) -> None:
        if self.active():
            if module not in self._names:
                self._name(module)
            self.running.append(self._names[module])
            self.found[self.current].calls += torch._C._current_graph_task_id() == -1  # pyright: ignore
            self._mark()

    def _leave(self, module: nn.Module) -> None:
        if self.active() and self.running:
            self.running.pop()
            self._mark()

    def _mark(self) -> None:
        self._owners.begin(self.current)

    def _name(self, module: nn.Module) -> None:
        """Name a module that nobody holds among those that are known, and all that it holds."""
        root = roots.get(module) or Root(-1 - len(self._bases), "")
        base = self._bases.get(root)
        if base is None:
            base = root.prefix.rstrip(".") or ".".join(filter(None, [self.current, type(module).__name__]))
            if not root.prefix and not self._bases:
                base = ""  # a module alone: its names are those of the loss
            taken = [one for one in self._bases.values() if one == base or one.startswith(f"{base} ")]
            base = f"{base} {len(taken) + 1}" if taken and not root.prefix else base
            self._bases[root] = base
        for path, part in module.named_modules():
            name = ".".join(filter(None, [base, path]))
            self._names.setdefault(part, name)
            if name not in self.found:
                own = {id(p): p.numel() for p in part._parameters.values() if p is not None}
                self.found[name] = Found(type(part).__name__, own)
