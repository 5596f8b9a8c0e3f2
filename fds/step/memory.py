"""`Memory`: what a filler of any station remembers between calls, in a slot of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, get_args

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.errors import ComposeError, is_a
from fds.step.call import Call
from fds.step.checks import contracts, forms
from fds.step.topology import Dimensions

Lies = Literal["parameters", "named", "replicated", "partial"]
LIES: tuple[Lies, ...] = get_args(Lies)
Merge = Literal["max", "sum"]
MERGES: tuple[Merge, ...] = get_args(Merge)
TOGETHER: dict[Merge, Callable[[Tensor, Tensor], Tensor]] = {"max": torch.maximum, "sum": torch.add}


@attrs.frozen
class Merged:
    """The rule of a memory without one: what was noted, merged into the slot as notes are merged with each other."""

    merge: Merge
    draws: ClassVar = False

    def __call__(self, slot: Any, noted: Any, call: Call) -> Any:
        """Return the new slot."""
        return tree.map(TOGETHER[self.merge], slot, noted)


@attrs.frozen(eq=False)
class Memory:
    """A slot of the state: how it begins, what becomes of it in a step, and how it lies over the ranks that share one.

    Args:
        slot: its name, the key in `state.slots`.
        init: `(params, device) -> slot`, a tree of tensors on the device. For one that lies like the parameters,
            `params` is what this rank holds of them; for a partial one a dict of the shapes of the trained parameters
            that this rank holds, by name; else one of the whole shapes of all parameters, the same on every rank.
        lies: `"parameters"`: where it has the structure of the parameters it is cut into slices and stages with them;
            `"named"`: a dict of tensors by the name of a parameter or a layer, the same on every rank; `"replicated"`:
            any tree, the same on every rank; `"partial"`: a dict of tensors by the name of a trained parameter, of
            which the value is the sum over the ranks that hold it. On other ranks than before rank r of n is given the
            sum of the old ranks r, r + n, ...
        merge: how what fillers note (`call.note`) of one entry in the microbatches and on the ranks of a call is put
            together, in any order: `"max"` or `"sum"`; None where nothing is noted.
        accept: `(slot, noted, call) -> slot`, what the slot becomes after a step that is not skipped; a skipped one
            leaves its bits. `noted` is a tree like the slot, with the lowest number, or 0 in a sum, where nothing was
            noted; None without `merge`. By default the larger of the two, or their sum.
        on_skip: `"keep"`; or `"run"`, where `accept` is called for skipped steps too, which `call.overflow` tells
            apart, but for those of a batch that weighs nothing.
        when: `(calls) -> bool`, whether the slot changes in the call after so many others, where not in each. In the
            other calls nothing is noted of it or sent, and it keeps its bits. Fillers ask `call.is_due(slot)`, which
            holds in a graph of a step too: each answer has a graph of its own.

    Raises `ComposeError` for anything else.
    """

    slot: str
    init: Callable[[Any, torch.device], Any]
    lies: Lies
    merge: Merge | None = None
    accept: Callable[[Any, Any, Call], Any] | None = None
    on_skip: Literal["keep", "run"] = "keep"
    when: Callable[[int], bool] | None = None

    def __attrs_post_init__(self) -> None:
        def refuse(what: str, got: object, want: str) -> ComposeError:
            where = f"Memory({self.slot!r})"
            return ComposeError(f"a memory needs {what}", where=where, got=forms.written(got)[:120], want=want)

        if not (is_a(self.slot, str) and self.slot and "." not in self.slot):
            raise refuse("the name of a slot", self.slot, "a string without dots")
        if not forms.takes(2)(self.init):
            first = "params" if self.lies == "parameters" else "shapes"
            raise refuse("a function that makes its slot", self.init, f"init: a function ({first}, device) -> slot")
        if self.lies not in LIES:
            raise refuse("to lie over ranks in a way that a save knows", self.lies, f"lies={_among(LIES)}")
        if self.merge not in (None, *MERGES):
            raise refuse("a way to merge what is noted in any order", self.merge, f"merge={_among(MERGES)} or None")
        if self.accept is not None and not forms.takes(3)(self.accept):
            raise refuse("a rule of one form", self.accept, "accept: a function (slot, noted, call) -> slot")
        if self.on_skip not in ("keep", "run") or (self.on_skip == "run" and self.accept is None):
            raise refuse("to say what becomes of it on a skip", self.on_skip, "on_skip='keep', or 'run' with accept=")
        if self.when is not None and not (self.follows and forms.takes(1)(self.when)):
            want = "when: a function (calls) -> bool, of a slot with merge= or accept="
            raise refuse("to change in calls that their number tells", self.when, want)
        if self.lies in ("parameters", "partial") and self.follows:
            raise refuse(
                "entries that every rank has, where it follows what is noted",
                self.lies,
                'lies="named" or "replicated"; a filler of `after` for one like the parameters',
            )

    def __repr__(self) -> str:
        return f"{self.slot} ({self.lies}{'' if self.merge is None else f', {self.merge} of what is noted'})"

    @property
    def mirrors(self) -> bool:
        """Whether ranks that hold other parts of the parameters hold another part of it."""
        return self.lies == "parameters"

    @property
    def follows(self) -> bool:
        """Whether it changes by `accept`; if not, a filler of `after` writes it, or nobody."""
        return self.merge is not None or self.accept is not None

    def is_due(self, calls: int) -> bool:
        """Say whether its slot changes in the call after so many others. Raises `ComposeError` for no answer."""
        due: Any = self.when is None or self.when(calls)
        if not isinstance(due, bool):
            raise ComposeError(
                "a memory is due in a call or is not",
                where=f"Memory({self.slot!r}, when=...)",
                got=f"{type(due).__name__} in call {calls}",
                want="a bool of the host, the same on every rank",
            )
        return due

    def first(
        self,
        params: Any,
        local_shapes: Mapping[str, tuple[int, ...]],
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> Any:
        """Return the slot at the start of a run. Raises `ComposeError` for what it must not be."""
        likes = params if self.mirrors else dict(local_shapes if self.lies == "partial" else shapes)
        slot = contracts.first_slot(self.init(likes, device), self.slot, self.init)
        if self.lies in ("named", "partial"):
            contracts.named_slot(slot, self.slot, self.init, among=likes if self.lies == "partial" else None)
        if self.merge is not None:
            contracts.merged_slot(slot, self.slot, self.init, device)
        return slot

    @property
    def rule(self) -> Callable[[Any, Any, Call], Any]:
        """What its slot becomes after a step: `accept`, or what `merge` makes of the slot and what was noted."""
        if self.accept is not None:
            return self.accept
        assert self.merge is not None
        return Merged(self.merge)


def first_slots(
    memories: Mapping[str, Memory],
    params: Any,
    local_shapes: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
    key: Tensor,
    dimensions: Dimensions,
) -> dict[str, Any]:
    """Return all slots at the start of a run; those that every rank has alike are drawn alike.

    `local_shapes` are the shapes of the trained parameters that this rank holds, `shapes` those of all parameters.
    """
    slots: dict[str, Any] = {}
    for name, memory in memories.items():
        with random.seeded(key, "slots", name, *(dimensions.coordinates if memory.mirrors else ())):
            slots[name] = memory.first(params, local_shapes, shapes, device)
    return slots


def _among(values: Iterable[str]) -> str:
    return ", ".join(map(repr, values))
