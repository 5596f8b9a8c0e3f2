"""What stands where their loop and the user's callbacks look: for the module, the optimizer and the scheduler."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
from torch import nn


class Trainer(Protocol):
    """A trainer as its first callback sees it."""

    read_events: set[str]

    def write_back(self) -> None:
        """Write the step's parameters into the module."""


class StandIn:
    """The module as `compute_loss` receives it: called with the step's parameters, and the module in all else."""

    def __init__(self, call: Any, module: nn.Module):
        self._call, self._module = call, module

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleVariableOverride]  (isinstance(model, PeftModel))
        return type(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@attrs.define(eq=False)
class Follower:
    """What their loop and callbacks read of an optimizer and a scheduler: the rates of the last update.

    It steps nothing: the step has done so.
    """

    rates: list[float] = attrs.field(factory=lambda: [math.nan])
    defaults: dict[str, Any] = attrs.field(factory=dict)
    state: dict[Any, Any] = attrs.field(factory=dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups as torch's optimizers have them, without parameters."""
        return [{"lr": rate, "params": []} for rate in self.rates]

    def get_last_lr(self) -> list[float]:
        """Return the rates of the last update, of each group."""
        return self.rates

    def step(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state is that of the step."""
        return {}


class Readers:
    """The first callback: has the step's parameters in the module before one of the user's is called."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer

    def __getattr__(self, event: str) -> Any:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return functools.partial(self._called, event)

    def _called(self, event: str, *_: Any, **__: Any) -> None:
        if event in self._trainer.read_events:
            self._trainer.write_back()


def events_of(callbacks: Sequence[Any]) -> set[str]:
    """Return the events that callbacks of others than transformers and trl follow: they may read the module."""
    ours = [callback for callback in callbacks if not isinstance(callback, Readers)]
    return {
        event
        for callback in ours
        for event in dir(type(callback))
        if event.startswith("on_") and home(getattr(type(callback), event)) not in ("transformers", "trl")
    }


def home(function: Any) -> str:
    """Return the package of which a function or a class is."""
    return getattr(function, "__module__", "").partition(".")[0]
