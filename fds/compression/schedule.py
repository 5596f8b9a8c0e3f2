"""When masks of pruning are made, how dense they are, and of what."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import reading, tree
from fds.compression import masks
from fds.compression.masks import Curve
from fds.compression.scores import is_score
from fds.errors import ComposeError, StateError, is_a, is_int
from fds.step import Call

LATE, LATER = 8, 64  # of LATE skipped steps no single mask is late; a look is a selection of the largest on a GPU


@attrs.frozen(repr=False)
class Schedule:
    """From the update `offset` on masks are in use; from `start` to `end` they are made, every `stride` updates.

    Whether a mask is looked at is decided on the host, by calls; whether and how it is made, by updates applied, which
    the host does not know: each skipped step puts these behind. So it is looked at in the calls start, start + stride,
    ... to `end`, in the LATE calls after that, and then in each of LATER: there it is made if it could not be before,
    as in a run that begins with masks later on.
    """

    density: float
    offset: int
    start: int
    end: int
    stride: int
    curve: Curve
    method: str  # what scores are: "l1", "topk", or sums

    @classmethod
    def of(
        cls, density: Any, offset: Any, end: Any, stride: Any, curve: Any, *, initial: bool, method: str, where: str
    ) -> Schedule:
        """Return the schedule of these arguments of a transform. Raises `ComposeError` for what none has."""
        if not masks.is_share(density):
            want = "0 < density <= 1"
            raise ComposeError(f"{where} takes the share that stays", got=f"{density=}"[:80], want=want)
        if method != "l1" and (initial or (method == "topk" and end is not None)):
            raise ComposeError(
                f"{where}: masks of {method!r} follow their scores",
                where="initial" if initial else "end",
                got=f"{initial=}, {end=}",
                want='method="l1" of initial weights; no end of "topk"',
            )
        last = offset if end is None else end
        for name, value, least in (("offset", offset, 0), ("end", last, offset), ("stride", stride, 1)):
            if not is_int(value, least if is_int(least) else 0):
                raise ComposeError(f"{where}: {name} counts updates", got=repr(value)[:60], want=f"an int >= {least}")
        if curve not in ("cubic", "exponential"):
            raise ComposeError(f"{where}: there is no such curve", got=repr(curve)[:60], want="'cubic', 'exponential'")
        if initial and last != offset:
            raise ComposeError(f"{where}: initial weights give one mask", got=f"end={end!r}", want="initial=True alone")
        start, last = (0, 0) if initial else (offset, last)
        return cls(density, offset, start, last, stride, curve, method)

    def __repr__(self) -> str:
        until = f" to {self.end}, every {self.stride}, {self.curve}" if self.end > self.start else ""
        return f"density {self.density:g} from update {self.offset}{until}"

    def is_look(self, calls: int) -> bool:
        """Say whether masks are looked at in the call after so many others."""
        if calls <= self.end:
            return calls >= self.start and (calls - self.start) % self.stride == 0
        late = calls - self.end
        return late <= LATE or late % LATER == 0

    def is_idle(self, call: Call, slot: str) -> bool:
        """Say whether masks, which are in a slot, are neither in use nor made in a call, as far as the host knows.

        Scores that are sums have their gradient from masks, in each call.
        """
        if self.method not in ("l1", "topk") or (self.method == "l1" and call.is_due(slot)):
            return False
        return reading.is_free(call.step) and bool(call.step < self.offset)

    @property
    def rule(self) -> dict[str, Any]:
        """How a slot of masks changes, as arguments of `Memory`: in looks alone, and not where scores are the masks."""
        return {} if self.method == "topk" else {"merge": "max", "accept": _made_or_old, "when": self.is_look}

    def in_use(self, mask: Tensor, step: Tensor) -> Tensor:
        """Return what a mask is after so many updates: before the offset all stays."""
        if not self.offset or (reading.is_free(step) and step >= self.offset):
            return mask
        return mask.bool() | (step < self.offset)

    def num_kept(self, step: Tensor, count: int) -> int | Tensor:
        """Return how many of `count` blocks stay in a mask that is made after `step` updates."""
        if self.start == self.end:
            return masks.num_kept(self.density, count)
        density = masks.density_at(step, self.density, self.start, self.end, self.curve)
        return (density * count).ceil().long().clamp_min(masks.num_kept(self.density, count))

    def current(self, step: Tensor, old: Tensor, final: int, make: Callable[[], Tensor]) -> Tensor:
        """Return the mask of a call in which it is looked at: the old one, bool, or what `make` makes in its place.

        `final` is how many numbers the last mask keeps: past the end one that keeps more was not made in time.
        """
        due = self.is_due(step, old.sum(), final)
        if reading.is_free(step) and not due:  # on a CPU a mask that is not needed is not made
            return old
        return torch.where(due, make(), old)

    def is_due(self, step: Tensor, kept: Tensor, final: int) -> Tensor:
        """Return whether a mask that keeps so many numbers is made after `step` updates, () bool."""
        return (step >= self.start) & ((step <= self.end) | (kept > final))


def _made_or_old(slot: Any, noted: Any, call: Any) -> Any:
    """Return the masks that were made in a call, and where none was the old ones: what a slot of masks becomes."""
    return tree.map(lambda old, new: torch.where(new >= 0, new, old), slot, noted)


def patterns_of(values: Any, where: str, what: str = "") -> tuple[str, ...]:
    """Return patterns of names, one or more unless `what` names an argument that may have none.

    Raises `ComposeError` for anything else.
    """
    listed = tuple[str, ...](values) if is_a(values, tuple | list) else None
    if listed is None or not all(is_a(pattern, str) and pattern for pattern in listed) or not (listed or what):
        raise ComposeError(
            f"{where} takes patterns of parameter names",
            where=what,
            got=repr(values)[:80],
            want='say, "*.mlp.*.weight"; `*` crosses dots',
        )
    return listed


@functools.lru_cache(2**14)
def is_chosen(name: str, patterns: tuple[str, ...], excluded: tuple[str, ...]) -> bool:
    """Say whether patterns choose a parameter that others do not; scores are never chosen."""
    matches = lambda listed: any(fnmatch.fnmatch(name, pattern) for pattern in listed)
    return matches(patterns) and not matches(excluded) and not is_score(name)


def chosen(
    shapes: Mapping[str, tuple[int, ...]],
    patterns: tuple[str, ...],
    excluded: tuple[str, ...],
    where: str,
    dims: Sequence[int] = range(2, 65),
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights, with one of these numbers of dims, that patterns choose, by name.

    Raises `StateError` for a pattern that matches nothing, and where they choose no weight.
    """
    tree.match(excluded, shapes, what=where)
    matches = tree.match(patterns, shapes, what=where)
    weights = {n: shapes[n] for n in sorted(shapes) if is_chosen(n, patterns, excluded) and len(shapes[n]) in dims}
    if not weights:
        raise StateError(
            f"{where}: patterns choose no weight",
            got=tree.named([*patterns]),
            want=f"one of {dims[0]}{' or more' * (len(dims) > 1)} dims: others are left alone",
            hint=f"they match {tree.named(sorted(matches))}",
        )
    return weights
