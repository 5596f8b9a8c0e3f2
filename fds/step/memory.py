"""`Memory`: what a filler of any station remembers between calls, in a slot of the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import attrs
import torch

from fds import random
from fds.errors import ComposeError
from fds.step.checks import contracts
from fds.step.topology import Dimensions

Lies = Literal["parameters", "named", "replicated"]
LIES: tuple[Lies, ...] = get_args(Lies)


@attrs.frozen(eq=False)
class Memory:
    """A slot of the state: how it begins, and how it lies over the ranks that share a step.

    Args:
        slot: its name, the key in `state.slots`.
        init: `(params, device) -> slot`, a tree of tensors on the device. For one that lies like the parameters,
            `params` is what this rank holds of them; else it is a dict of the whole shapes of all parameters, by name,
            the same on every rank.
        lies: `"parameters"`: where it has the structure of the parameters it is cut into slices and stages with them;
            `"named"`: a dict of tensors by the name of a parameter or a layer, the same on every rank; `"replicated"`:
            any tree, the same on every rank.

    Raises `ComposeError` for anything else.
    """

    slot: str
    init: Callable[[Any, torch.device], Any]
    lies: Lies

    def __attrs_post_init__(self) -> None:
        refuse = lambda what, got, want: ComposeError(
            f"a memory needs {what}", where=f"Memory({self.slot!r})", got=contracts.written(got)[:120], want=want)
        if not (isinstance(self.slot, str) and self.slot and "." not in self.slot):
            raise refuse("the name of a slot", self.slot, "a string without dots")
        if not contracts.takes(2)(self.init):
            raise refuse("what makes its slot", self.init, "init: a function (params, device) -> slot")
        if self.lies not in LIES:
            raise refuse("to lie over ranks in a way that a save knows", self.lies,
                         "lies=" + ", ".join(map(repr, LIES)))  # fmt: skip

    def __repr__(self) -> str:
        return f"{self.slot} ({self.lies})"

    @property
    def mirrors(self) -> bool:
        """Whether ranks that hold other parts of the parameters hold another part of it."""
        return self.lies == "parameters"

    def first(self, params: Any, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> Any:
        """Return the slot at the start of a run. Raises `ComposeError` for what it must not be."""
        found = contracts.first_slot(self.init(params if self.mirrors else dict(shapes), device), self.slot, self.init)
        if self.lies == "named":
            contracts.named_slot(found, self.slot, self.init)
        return found


def first_slots(
    memories: Mapping[str, Memory], params: Any, shapes: Mapping[str, tuple[int, ...]], device: torch.device,
    key: torch.Tensor, dimensions: Dimensions,
) -> dict[str, Any]:  # fmt: skip
    """Return all slots at the start of a run; those that every rank has alike are drawn alike."""
    slots = {}
    for name, memory in memories.items():
        with random.seeded(key, "slots", name, *(dimensions.coordinates if memory.mirrors else ())):
            slots[name] = memory.first(params, shapes, device)
    return slots
