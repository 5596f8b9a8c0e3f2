"""Modules that hold weights as integers and make numbers of them when they are read."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds.compression.grids import Packed

PARTS = ("codes", "scales", "zeros", "sizes")


class Holding(nn.Module):
    """A module some of whose parameters are integers: buffers `<name>_codes` and so on, one of each of `PARTS`."""

    integers: dict[str, Packed]  # by name of a parameter, without its tensors

    def __getattr__(self, name: str) -> Any:
        """Return a parameter that is held as integers, as numbers; anything else as a module does."""
        if name in self.__dict__.get("integers", ()):
            return packed_of(self, name).numbers()
        return super().__getattr__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (type(self).__mro__[2],), self.__dict__

    def extra_repr(self) -> str:
        """Say which parameters have how many bits."""
        words = [super().extra_repr(), *(f"{name}: {x.bits} bits" for name, x in self.integers.items())]
        return ", ".join(filter(None, words))


def hold(module: nn.Module, path: str, packed: Packed) -> None:
    """Hold a parameter as integers, from here on; the module that has it becomes one of a subclass of its class."""
    parent, _, name = path.rpartition(".")
    module = module.get_submodule(parent)
    if not isinstance(module, Holding):
        module.__class__ = _holding(type(module))
        module.__dict__["integers"] = {}
    assert isinstance(module, Holding)
    module._parameters.pop(name, None)
    module.integers[name] = attrs.evolve(packed, **dict.fromkeys(PARTS, torch.empty(0)))
    for part in PARTS:
        module.register_buffer(f"{name}_{part}", getattr(packed, part))


def packed_of(module: Holding, name: str) -> Packed:
    """Return a parameter that a module holds as integers."""
    parts: dict[str, Tensor | None] = {part: module._buffers[f"{name}_{part}"] for part in PARTS}
    return attrs.evolve(module.integers[name], **parts)


def unpacked(module: nn.Module) -> None:
    """Have a module and those inside hold numbers again, as parameters without gradients, in place."""
    numbers = dict[int, nn.Parameter]()  # by the codes that several modules may share
    for part in module.modules():
        if isinstance(part, Holding):
            values = {name: packed_of(part, name) for name in part.integers}
            for name, packed in values.items():
                for word in PARTS:
                    del part._buffers[f"{name}_{word}"]
                if id(packed.codes) not in numbers:
                    numbers[id(packed.codes)] = nn.Parameter(packed.numbers(), requires_grad=False)
            part.__dict__.pop("integers")
            part.__class__ = type(part).__mro__[2]
            for name, packed in values.items():
                part.register_parameter(name, numbers[id(packed.codes)])


@functools.cache
def _holding(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Packed{cls.__name__}", (Holding, cls), {"__module__": cls.__module__})


def _new(cls: type[nn.Module]) -> nn.Module:
    """Return an empty module of the class that holds parameters of another as integers: for copies, and pickle."""
    made = _holding(cls)
    return made.__new__(made)
