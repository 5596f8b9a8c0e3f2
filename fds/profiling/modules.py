"""Which module an operator belongs to, and which phase of a step: in backward the module whose forward it reverses."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_modules
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)

from fds import tree
from fds.loss.modes import current as mode_of_loss
from fds.loss.module_copies import Root, roots

Phase = Literal["forward", "recomputation", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "recomputation", "backward", "update")

# private: torch has no public functions for where autograd is
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr  # pyright: ignore
_node: Callable[[], Any] = torch._C._current_autograd_node  # pyright: ignore
_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_saving: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore


@attrs.define(eq=False)
class ModuleHooks:
    """What follows the modules that run in the block of a `with`, each by the name that its parameters begin with.

    Autograd numbers the nodes of its graph in the order of forward, so the numbers at which modules begin and end say
    to which of them a node belongs.

    Attributes:
        names: of the modules that ran, and of those inside of them.
    """

    names: dict[nn.Module, str] = tree.new(dict)
    _bases: dict[Root, str] = tree.new(dict)
    _starts: list[int] = attrs.field(factory=lambda: [0])  # the first nodes of modules
    _owners: list[str] = attrs.field(factory=lambda: [""])  # of the nodes from there on; empty outside of all
    _hooks: list[Any] = tree.new(list)

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(lambda module, args: self._follow(module, self._enter, args)),
            register_module_forward_hook(  # where forward raised it is called without keywords
                lambda module, *tensors: self._follow(module, self._leave, tensors), with_kwargs=True, always_call=True
            ),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
            hooks_of_modules._global_forward_hooks_with_kwargs.pop(hook.id, None)  # pyright: ignore[reportPrivateUsage]  (torch leaves it there)

    def _follow(self, module: nn.Module, act: Callable[[str, Any], None], tensors: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_followed(module):
            return
        if module not in self.names:
            self._name(module)
        act(self.names[module], tensors)

    def _name(self, module: nn.Module) -> None:
        """Name a module that is inside of none with a name, and all inside of it."""
        root = roots.get(module) or Root(-1 - len(self._bases), "")
        if root not in self._bases:
            base = root.prefix.rstrip(".")
            if not base and self._bases:  # the first alone has the names of the loss
                base = ".".join(filter(None, [self._above(), type(module).__name__]))
                same = [other for other in self._bases.values() if other == base or other.startswith(f"{base} ")]
                base = f"{base} {len(same) + 1}" if same else base
            self._bases[root] = base
        for path, part in module.named_modules():
            name = ".".join(filter(None, [self._bases[root], path]))
            self.names.setdefault(part, name)
            self._meet(name, part)

    def _is_followed(self, module: nn.Module) -> bool:  # hooks are those of all threads
        raise NotImplementedError

    def _above(self) -> str:  # the module after which those are named that run in it and are no part of it
        return ""

    def _meet(self, name: str, module: nn.Module) -> None:
        """Note a module that has got its name."""

    def _enter(self, name: str, tensors: Any) -> None:
        raise NotImplementedError

    def _leave(self, name: str, tensors: Any) -> None:
        raise NotImplementedError

    def begin(self, name: str) -> None:
        """Note that the nodes of the graph from here on are those of a module."""
        number = _next_node()
        if number >= self._starts[-1]:  # else another thread's, which recomputes
            self._starts.append(number)
            self._owners.append(name)

    def owner(self, node: Any) -> str:
        """Return the module to which a node of the graph belongs."""
        return self._owners[bisect.bisect_right(self._starts, node._sequence_nr()) - 1]


@attrs.define(eq=False)
class ModuleThatRan:
    """The class of a module, how often it ran forward, and its own parameters: id -> elements."""

    kind: str
    params: dict[int, int]
    calls: int = 0


@attrs.define(eq=False)
class Modules(ModuleHooks):
    """All modules that run while `is_active`.

    Attributes:
        ran: by name, outer ones before those inside.
        running: their names, outermost first.
    """

    is_active: Callable[[], bool] = attrs.field(kw_only=True)
    ran: dict[str, ModuleThatRan] = tree.new(dict)
    running: list[str] = tree.new(list)

    @property
    def current(self) -> str:
        """The innermost module that runs; empty outside of all."""
        return self.running[-1] if self.running else ""

    def _above(self) -> str:
        return self.current

    def _is_followed(self, module: nn.Module) -> bool:
        return self.is_active()

    def _meet(self, name: str, module: nn.Module) -> None:
        if name not in self.ran:
            params = {id(p): p.numel() for p in module._parameters.values() if p is not None}
            self.ran[name] = ModuleThatRan(type(module).__name__, params)

    def _enter(self, name: str, tensors: Any) -> None:
        self.running.append(name)
        self.ran[name].calls += _graph_task() == -1  # not in backward
        self.begin(name)

    def _leave(self, name: str, tensors: Any) -> None:
        if self.running:
            self.running.pop()
            self.begin(self.current)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Take what runs in the block, and its backward, for that of a module of this name, where it is in no other."""
        self.running.append(name)
        self.begin(name)
        try:
            yield
        finally:
            self._leave(name, ())


class Watching(TorchDispatchMode):
    """See every operator of a thread, and of autograd's threads that work for it, with the module and phase it is in.

    Other threads, as other simulated ranks are, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules = Modules(is_active=lambda: self in _get_current_dispatch_mode_stack())

    def place(self) -> tuple[str, Phase]:
        """Return the module and the phase of what runs now."""
        # a loss runs, and is run again, inside of a module or a layer, or where torch saves what it needs of it
        inside = self.modules.running or mode_of_loss().busy is not None or _saving(True) is not None
        if _graph_task() == -1:
            return self.modules.current, "forward" if inside else "update"
        if inside:
            return self.modules.current, "recomputation"
        node = _node()
        return "" if node is None else self.modules.owner(node), "backward"


def tensors_of(x: Any) -> Iterator[Tensor]:
    """Yield the tensors in what is given, or returned: lists, tuples and dicts of them."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple | dict):
        for part in x.values() if isinstance(x, dict) else x:
            yield from tensors_of(part)
