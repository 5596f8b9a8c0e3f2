"""A copy of a module in one mode, into which the parameters and buffers of a call are put."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import attrs
from torch import Tensor, nn

from fds.errors import LossError
from fds.loss.compiled import is_compiled, traceable, with_memory
from fds.loss.copies import Location


class Run(NamedTuple):
    """The result of one call of a module. A named tuple, because torch.compile can trace those."""

    out: Any
    buffers: dict[str, Tensor]  # the module's buffers after the call
    written: set[str]  # names of buffers that were assigned, or whose version counter changed


@attrs.frozen(eq=False)
class Variant:
    """A copy of a module in one mode, and the locations of its parameters and buffers."""

    module: nn.Module
    params: list[Location]
    buffers: list[Location]
    aliases: list[Location]  # where else the module holds parameters and buffers
    empty: list[Tensor] = attrs.field(init=False)  # what they hold between calls
    call: Callable = attrs.field(init=False)
    compiled: list[Location] = attrs.field(init=False)  # those of parameters in compiled submodules
    unset: list[tuple[dict, str, str, bool]] = attrs.field(init=False)  # buffers that are None: location, is a cache

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "empty", [held[key] for held, key, _ in self.locations()])
        object.__setattr__(self, "call", traceable(self.module))
        parts = [part for one in self.module.modules() if is_compiled(one) for part in one.modules()]
        own = {id(part._parameters) for part in parts}
        object.__setattr__(self, "compiled", [at for at in self.params if id(at[0]) in own])
        unset = [
            (part._buffers, n, f"{path}.{n}" if path else n, n in part._non_persistent_buffers_set)
            for path, part in self.module.named_modules()
            for n, x in part._buffers.items()
            if x is None
        ]
        object.__setattr__(self, "unset", unset)

    def locations(self) -> Iterator[Location]:
        """Return all locations in order."""
        return itertools.chain(self.params, self.buffers, self.aliases)

    def run(self, params: dict, buffers: dict, args: tuple, kwargs: dict) -> Run:
        """Call the module with these parameters and buffers.

        Like `torch.func.functional_call`, with the locations looked up once: 0.4 ms less a step in the example.
        """
        for held, key, name in self.params:
            held[key] = params[name]
        for held, key, name in self.compiled:
            held[key] = with_memory(params[name])
        for held, key, name in self.buffers:
            held[key] = buffers[name]
        for held, key, name in self.aliases:
            held[key] = params[name] if name in params else buffers[name]
        out = self.call(*args, **kwargs)
        new, written = {}, set()
        for held, key, path, cache in self.unset:
            if held.get(key) is not None and not cache:
                _raise_buffer_set_changed(path, "None before the call, and a tensor after it")
        for held, key, name in self.buffers:
            after, before = held.get(key), buffers[name]
            if after is None:
                _raise_buffer_set_changed(name, "a tensor before the call, and None after it")
            new[name] = after
            if (after is not before and _memory(after) != _memory(before)) or _version(before):
                written.add(name)
        return Run(out, new, written)

    def clear(self) -> None:
        """Remove the parameters and buffers of the last call."""
        for (held, key, _), x in zip(self.locations(), self.empty, strict=True):
            held[key] = x
        for held, key, *_ in self.unset:  # a cache: the next call computes its own
            held[key] = None


def _raise_buffer_set_changed(name: str, got: str) -> NoReturn:
    raise LossError(
        "the module adds a buffer to its state, or removes one, and the call would lose that",
        where=name,
        got=got,
        want="a tensor from the start",
        hint="call the module once before fds.functional(module); or "
        "register_buffer(..., None, persistent=False) for a cache that every call computes anew",
    )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _memory(x: Tensor) -> tuple:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype
