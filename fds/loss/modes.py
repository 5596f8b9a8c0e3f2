"""The mode in which a step runs the modules of a loss, known to modules that the loss holds in its closure too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import attrs
from torch import Tensor, nn

from fds.loss.carried import Carried
from fds.loss.roots import Root

ModuleMap = Callable[[nn.Module, Root], None]  # changes a copy of a module in place
Draw = Callable[[int, Any], AbstractContextManager[object]]  # number of a layer, what it is given -> how it draws


@attrs.frozen
class Mode:
    """How modules run in the current context: training or evaluation, and in which dtypes."""

    evaluating: bool = False
    float32: tuple[str, ...] = ()  # patterns of parameters whose modules compute in float32
    carried: Carried | None = attrs.field(default=None, eq=False)  # for an eval_fn that does not take the buffers
    low: bool = False  # parameters and inputs are 16 bit: batch statistics are computed in float32 all the same
    seen: list[Any] | None = attrs.field(default=None, eq=False)  # receives the last output
    busy: list[Any] | None = attrs.field(default=None, eq=False)  # copies of modules that backward may run again
    modules: tuple[ModuleMap, ...] = ()  # what is done to every copy of a module before it runs
    draw: Draw | None = None  # entered around every call of the loss, and around what of it runs again
    lengths: dict[str, int] | None = attrs.field(default=None, eq=False)  # of a microbatch, noted by what these do
    staged: bool = False  # ranks of a pipeline each run some of the layers

    def release(self) -> None:
        """Drop the parameters that copies of modules still hold; called after backward."""
        for _, variant, free in self.busy or ():
            variant.clear()
            free.append(variant)
        if self.busy is not None:
            self.busy.clear()

    def check_graph(self, total: Tensor | None) -> None:
        """Show a loss and its graph to what changes modules; None for a first call of which there is none."""
        for one in self.modules:
            if (check := getattr(one, "check_graph", None)) is not None:
                check(total)

    @property
    def key(self) -> tuple[bool, tuple[str, ...], bool, tuple[ModuleMap, ...]]:
        """What copies of a module are cached by."""
        return self.evaluating, self.float32, self.low, self.modules


_mode: ContextVar[Mode] = ContextVar("fds_mode", default=Mode())  # noqa: B039 (frozen)
current = _mode.get


class mode:  # not a generator, which takes three times as long: every call of a layer enters one
    """Run modules in this mode; each layer call enters it again, since autograd's threads recompute layers."""

    __slots__ = ("token", "value")

    def __init__(self, value: Mode):
        self.value = value

    def __enter__(self) -> None:
        self.token = _mode.set(self.value)

    def __exit__(self, *error: object) -> None:
        _mode.reset(self.token)
