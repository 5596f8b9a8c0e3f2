"""The structure of a parameter tree: names, which leaves are trained, and the flat slices an optimizer sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import StateError
from fds.optim import Optimizer, Segment


@attrs.frozen(eq=False)
class Structure:
    """Names of all leaves in order, the indices of those that are trained, and the optimizer's segments."""

    names: tuple[str, ...]
    trained: tuple[int, ...]
    build: Callable[[Sequence], Any]
    segments: list[list[Segment]]
    opt_names: dict[str, dict[str, Any]]  # slot of the optimizer -> names of the parameters that have it

    @classmethod
    def of(cls, params: Any, frozen: Sequence[str], optimizer: Optimizer) -> Structure:
        """Read the structure of a tree of tensors. Raises `StateError` for a leaf that is no tensor."""
        named = tree.paths(params)
        for name, x in named.items():
            if not isinstance(x, Tensor):
                raise StateError("a parameter is no tensor", where=name, got=repr(x)[:60], want="a tensor")
            if x.is_complex():
                raise StateError("a parameter is complex", where=name, got=str(x.dtype), want="a real dtype",
                                 hint="keep real and imaginary part: torch.view_as_real")  # fmt: skip
        still = tree.match(frozen, named, what="freeze")
        trained = tuple(i for i, (n, x) in enumerate(named.items()) if tree.is_float(x) and n not in still)
        leaves = list(named.values())
        segments = [[Segment(tuple(named)[i], tuple(leaves[i].shape), 0, leaves[i].numel())] for i in trained]
        made = cls(tuple(named), trained, tree.flatten(params)[1], segments, {})
        flat = [torch.empty(leaves[i].numel(), dtype=leaves[i].dtype, device="meta") for i in trained]
        made.opt_names.update(made.name_slots(optimizer.init(segments, params=flat)))
        return made

    def pick(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the trained ones of all leaves."""
        return [leaves[i] for i in self.trained]

    def put(self, leaves: Sequence[Tensor], trained: Sequence[Tensor]) -> Any:
        """Return the tree of `leaves` with the trained ones replaced."""
        out = list(leaves)
        for i, x in zip(self.trained, trained, strict=True):
            out[i] = x
        return self.build(out)

    def name_slots(self, opt: dict[str, list]) -> dict[str, dict[str, Tensor]]:
        """Turn the optimizer's flat slices into tensors under the names of their parameters."""
        return {
            slot: {s.name: x.view(s.shape) for (s,), x in zip(self.segments, parts, strict=True) if x is not None}
            for slot, parts in opt.items()
        }

    def flat_slots(self, opt: dict[str, dict[str, Tensor]]) -> dict[str, list]:
        """Undo `name_slots`: views, no copies."""
        return {
            slot: [parts[s.name].view(-1) if s.name in parts else None for (s,) in self.segments]
            for slot, parts in opt.items()
        }


def own(params: Any) -> Any:
    """Copy parameters for a state: contiguous and detached. Raises `StateError` for NaN and for shared leaves."""
    named, seen = tree.paths(params), {}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            continue
        if x.numel() and not x.is_meta:
            others = seen.setdefault((x.device, x.untyped_storage().data_ptr()), {})
            for other, y in others.items():
                if overlap(x, y):
                    raise StateError(
                        "two parameters share their memory, and a copy would untie them", where=name,
                        got=f"memory of {other!r}", want="each parameter once",
                        hint="leave one name out (fds.functional and TiedLayerSpec do), and use it twice in the loss",
                    )  # fmt: skip
            others[name] = x
        if x.is_floating_point() and not x.is_meta and not bool(torch.isfinite(x).all()):
            bad = int((~torch.isfinite(x)).sum())
            raise StateError("a parameter is not finite", where=name, got=f"{bad} of {x.numel()} elements NaN or "
                             "infinite", want="finite initial values")  # fmt: skip
    return tree.map(lambda x: contiguous_copy(x) if isinstance(x, Tensor) else x, params)


def overlap(x: Tensor, y: Tensor) -> bool:
    """Say whether two tensors of one storage share an element."""
    (a, b), (c, d) = ((t.storage_offset(), t.storage_offset() + _extent(t)) for t in (x, y))
    if x.dtype != y.dtype or b <= c or d <= a:
        return b > c and d > a
    used = torch.zeros(max(b, d), dtype=torch.bool)
    used.as_strided(x.shape, x.stride(), a).fill_(True)
    return bool(used.as_strided(y.shape, y.stride(), c).any())


def distinct(leaves: list[Tensor]) -> list[Tensor]:
    """Return leaves that may be written one by one: copies of what is not contiguous or aliases an earlier one."""
    seen: set[int] = set()
    out = []
    for x in leaves:
        place = x.data_ptr() if x.numel() and not x.is_meta else 0
        out.append(x if x.is_contiguous() and (not place or place not in seen) else contiguous_copy(x))
        seen.add(place)
    return out


def contiguous_copy(x: Tensor) -> Tensor:
    """Return a detached contiguous copy."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _extent(x: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
