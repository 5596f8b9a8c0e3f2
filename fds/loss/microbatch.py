"""Evaluate a loss of any kind on one microbatch: calls are seeded, and wrapped by the layer maps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random
from fds.errors import ComposeError
from fds.loss import compiled
from fds.loss.carried import Carried
from fds.loss.layers import Layers
from fds.loss.modes import Mode, mode
from fds.loss.values import Buffered, Outcome, read

LayerMap = Callable[[list[Callable]], list[Callable]]


@attrs.frozen(eq=False)
class Setting:
    """All that one evaluation of a loss depends on besides parameters, batch and buffers."""

    seeds: Sequence[int | None]  # one per layer that may draw, the criterion's last
    devices: tuple[torch.device, ...] = ()
    mode: Mode = Mode()
    maps: tuple[LayerMap, ...] = ()  # outermost first
    key: Tensor | None = None  # of the microbatch: what else draws in it is seeded from this

    def call(self, index: int, f: Callable) -> Callable:
        """Return `f` seeded and in this mode, however often and in whichever thread it is run again."""

        def run(*args: Any) -> Any:
            with mode(self.mode):
                seed = self.seeds[index]
                if seed is not None:
                    random.reseed(seed, self.devices)
                return f(*args)

        return run

    def seed(self, function: Any, *data: int | str) -> None:
        """Seed the generators for a function that may draw, from the microbatch's key and `data`."""
        if self.key is not None and random.draws(function):
            random.reseed(random.seed(self.key, *data), self.devices)

    def mapped(self, calls: list[Callable], first: int = 0) -> list[Callable]:
        """Apply the layer maps: a map takes the list of calls and may wrap or group them. `first` is the first layer.

        A map that may draw is seeded, and so is every call that it returns; the layers inside are seeded anew.
        """
        for index, layer_map in reversed(list(enumerate(self.maps))):
            given = {id(call) for call in calls}
            self.seed(layer_map, "layers", index, first)
            calls = check_calls(layer_map, layer_map(calls))
            if self.key is not None and random.draws(layer_map):
                calls = [call if id(call) in given else self._seeded(call, "layer", index, first + at)
                         for at, call in enumerate(calls)]  # fmt: skip
        return calls

    def _seeded(self, call: Callable, *data: int | str) -> Callable:
        @functools.wraps(call)  # and with its marks
        def run(*args: Any) -> Any:
            self.seed(call, *data)
            return call(*args)

        return run


def check_calls(layer_map: LayerMap, calls: Any) -> list[Callable]:
    """Return what a layer map returned. Raises `ComposeError` unless it is a list of functions."""
    if isinstance(calls, list | tuple) and calls and all(map(callable, calls)):
        return list(calls)
    raise ComposeError(
        "a layer map returned no calls", where=f"station 'layer', {getattr(layer_map, '__name__', layer_map)}",
        got=repr(calls)[:80], want="a list of functions of one argument, at least one",
    )  # fmt: skip


def draws(loss: Any) -> list[bool]:
    """Say which calls of a loss are seeded: the one of an opaque loss; layers that may draw, and the criterion."""
    if isinstance(loss, Layers):
        return [loss.layer(i).draws for i in range(len(loss))] + [True]
    return [True]


def initial_buffers(loss: Any) -> dict[str, Tensor]:
    """Return the initial `state.buffers`."""
    if isinstance(loss, Layers):
        return loss.buffers()
    return loss.buffers if isinstance(loss, Buffered) else {}


def carried_buffers(loss: Any, eval_loss: Any, buffers: dict[str, Tensor]) -> Carried | None:
    """Return the state's buffers for an `eval_loss` that does not take them; None if it does, or if there are none."""
    if not buffers or isinstance(eval_loss, Buffered | Layers):
        return None
    initial = loss.sources() if isinstance(loss, Layers) else initial_buffers(loss)
    return Carried({name: x for name, x in initial.items() if name in buffers}, buffers)


def run(loss: Any, params: Any, batch: Any, buffers: dict[str, Tensor], setting: Setting) -> Outcome:
    """Evaluate a loss on one microbatch. Raises `LossError` for an invalid result."""
    if isinstance(loss, Layers):
        return _run_layers(loss, params, batch, buffers, setting)
    threaded = isinstance(loss, Buffered)
    f = loss.loss_fn if threaded else loss
    (call,) = setting.mapped([setting.call(0, f)])
    if threaded:
        value = call(params, batch, {key: b.clone() for key, b in buffers.items()})
    else:
        value = call(params, batch)
    return read(value, where=name(loss), buffers=buffers, threaded=threaded)


def is_compiled(loss: Any) -> bool:
    """Return whether this loss was returned by `torch.compile`, so that its parameters must be plain tensors."""
    return compiled.is_compiled(loss.loss_fn if isinstance(loss, Buffered) else loss)


def name(loss: Any) -> str:
    """Return the name of a loss for messages."""
    inner = loss.loss_fn if isinstance(loss, Buffered) else loss
    return getattr(inner, "__name__", type(inner).__name__)


def _run_layers(loss: Layers, params: Any, batch: Any, buffers: dict[str, Tensor], setting: Setting) -> Outcome:
    x, targets = loss.split(batch)
    loss.check(params)
    current = dict(buffers)
    for call in setting.mapped(layer_calls(loss, range(len(loss)), params, current, setting)):
        x = call(x)
    value = setting.call(len(loss), loss.compare)(x, targets)
    if setting.mode.seen is not None:
        setting.mode.seen[:] = [x]
    return read(value, where="the criterion of Layers", buffers=current)


def layer_calls(
    loss: Layers, indices: Iterable[int], params: Any, current: dict[str, Tensor], setting: Setting
) -> list[Callable]:
    """Return the calls of some layers, in order, for one microbatch; each writes its new buffers into `current`."""
    given: dict[int, dict[str, Tensor]] = {}

    def layer_call(index: int) -> Callable:
        layer = loss.layer(index)

        def one(x: Any) -> Any:
            first = index not in given  # a recomputation finds the buffers of the first run, and its updates are lost
            out, new = layer(params, given.setdefault(index, dict(current)) if layer.buffers else {}, x)
            if first:
                current.update(new)
            return out

        call = setting.call(index, one)
        call.in_place = layer.in_place  # for maps that run a call twice
        return call

    return [layer_call(i) for i in indices]
