"""`by_name`: one optimizer per group of parameters."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import OptimizerError, checked_call, did_you_mean
from fds.optim import returned
from fds.optim.base import Optimizer, Segment, Values
from fds.optim.exchange import Exchange
from fds.tree import named


@checked_call
def by_name(optimizers: Mapping[str, Optimizer]) -> Optimizer:
    """Give each parameter the optimizer of the first pattern that its name matches.

    Args:
        optimizers: shell-style pattern (`*` crosses dots) -> optimizer, tried in order. A parameter's group
            is the index of its pattern; every slice holds parameters of one group.

    Every group has its own learning rate: `update` ignores its argument `lr`. A step reports the learning rate of each
    group as `lr/PATTERN`, and `lr` if all groups have the same number or schedule. Slots of one name share an entry of
    `opt`, None for the slices of groups without it. A parameter is kept whole if its optimizer asks for it.

    Raises `OptimizerError` for values that are not optimizers, and when a step gets its parameters, for a parameter
    that matches no pattern and for a pattern that matches no parameter.

    >>> from fds.optim import adamw
    >>> by_name({"*.bias": adamw(weight_decay=0.0), "*": adamw(weight_decay=0.1)})
    by_name({'*.bias': adamw(weight_decay=0.0), '*': adamw(weight_decay=0.1)})
    """
    _check_optimizers(optimizers)
    groups = _Groups(dict(optimizers))
    members = groups.members
    same = all(m.lr == members[0].lr for m in members)
    return Optimizer(
        groups.init,
        groups.update,
        whole=groups.needs_whole if any(m.whole for m in members) else False,
        lr=members[0].lr if same else None,
        text=f"by_name({{{', '.join(_entries(optimizers))}}})",
        group=groups.index,
        check=groups.check,
        runs=groups.runs,
        members=groups.optimizers,
        separate=all(m.separate for m in members),
        elementwise=groups.is_elementwise,
        draws=any(m.draws for m in members),
        phases=members[0].phases,
        pieces=groups.takes_pieces,
        takes_shapes=True,  # which `returned.update` makes 1-D for those that do not
    )


def _check_optimizers(optimizers: object) -> None:
    """Raise `OptimizerError` unless this maps at least one pattern to an optimizer."""
    if not isinstance(optimizers, Mapping):
        raise OptimizerError(
            "by_name: not a mapping", where="optimizers", got=repr(optimizers)[:60], want="{pattern: optimizer, ...}"
        )
    for pattern, optimizer in optimizers.items():
        if not isinstance(optimizer, Optimizer):
            raise OptimizerError(
                "by_name: a pattern's value is not an optimizer",
                where=repr(pattern),
                got=repr(optimizer),
                want="adamw(...), sgd(...), ...",
                hint="write by_name({pattern: optimizer, ...})",
            )
    every = list(optimizers.values())
    apart = next((one for one in every if one.phases != every[0].phases), None)
    if apart is not None:
        raise OptimizerError(
            "by_name: gradients are summed over ranks for all optimizers or for none",
            where=repr(next(pattern for pattern, one in optimizers.items() if one is apart)),
            got=f"{every[0]} and {apart}",
            want="optimizers that send alike, in the same calls",
        )
    if not optimizers:
        raise OptimizerError(
            "by_name: no optimizer",
            where="optimizers",
            got="{}",
            want="{pattern: optimizer, ...}",
            hint='a last entry "*" takes all other parameters',
        )


@attrs.frozen(eq=False)
class _Groups:
    """The optimizers by pattern, and the functions of the optimizer that they make together."""

    optimizers: dict[str, Optimizer]

    @property
    def members(self) -> list[Optimizer]:
        """The optimizer of every group."""
        return list(self.optimizers.values())

    def index(self, name: str) -> int:
        """Return the group of a parameter: the index of the first pattern that its name matches."""
        for index, pattern in enumerate(self.optimizers):
            if fnmatch.fnmatchcase(name, pattern):
                return index
        raise OptimizerError(
            "by_name: a parameter matches no pattern",
            where=name,
            got=", ".join(map(repr, self.optimizers)),
            want="a pattern for every parameter",
            hint='end with "*": adamw(...)',
        )

    def needs_whole(self, name: str) -> bool:
        """Return whether the optimizer of this parameter needs it whole."""
        return self.members[self.index(name)].needs_whole(name)

    def takes_pieces(self, name: str) -> bool:
        """Return whether the optimizer of this parameter puts pieces of it together."""
        return self.members[self.index(name)].takes_pieces(name)

    def is_elementwise(self, name: str) -> bool:
        """Return whether the optimizer of this parameter treats every element by itself."""
        return self.members[self.index(name)].is_elementwise(name)

    def check(self, names: Sequence[str]) -> None:
        """Raise `OptimizerError` for a pattern that matches no parameter, and let each optimizer check its own."""
        for pattern in self.optimizers:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise OptimizerError(
                    "by_name: a pattern matches no parameter",
                    where=repr(pattern),
                    got=f"{len(names)} parameters",
                    want="the name of a parameter, with * for any part of it",
                    hint=did_you_mean(pattern, names) if names else "there is no trainable parameter",
                )
        for index, member in enumerate(self.members):
            member.check([name for name in names if self.index(name) == index])

    def slices(self, segments: Sequence[Sequence[Segment]]) -> list[list[int]]:
        """Return, for every group, the indices of its slices; a slice without parameters goes to the last group."""
        slices: list[list[int]] = [[] for _ in self.optimizers]
        for index, inside in enumerate(segments):
            groups = {self.index(segment.name) for segment in inside} or {len(self.optimizers) - 1}
            assert len(groups) == 1, f"slice {index} mixes the groups {sorted(groups)}"
            slices[groups.pop()].append(index)
        return slices

    def init(
        self, segments: Sequence[Sequence[Segment]], *, params: Sequence[Tensor]
    ) -> dict[str, list[Tensor | None]]:
        """Return the slots of all groups, None for the slices of groups without a slot."""
        opt: dict[str, list[Tensor | None]] = {}
        for member, slices in zip(self.members, self.slices(segments), strict=True):
            if not slices:
                continue
            part = returned.first_slots(member, _pick(segments, slices), _pick(params, slices))
            for slot, tensors in part.items():
                _put(opt.setdefault(slot, [None] * len(params)), slices, tensors)
        return opt

    def update(
        self,
        grads: list[Tensor],
        opt: dict,
        params: list[Tensor],
        *,
        step: Tensor,
        lr: Tensor | None,
        segments: Sequence[Sequence[Segment]],
        out: list[Tensor] | None = None,
        values: Values | None = None,
        exchange: Exchange | None = None,
        **rest: Any,
    ) -> tuple[list[Tensor], dict]:
        """Update the slices of every group with its optimizer, at its own learning rate."""
        known = [m.values(step) for m in self.members] if values is None else list(values.members.values())
        new, after = list(params), {slot: list(tensors) for slot, tensors in opt.items()}
        for (pattern, member), slices, now in zip(self.optimizers.items(), self.slices(segments), known, strict=True):
            if not slices:
                continue
            part = {slot: _pick(tensors, slices) for slot, tensors in opt.items()}
            part = {slot: tensors for slot, tensors in part.items() if any(x is not None for x in tensors)}
            more = (
                {} if exchange is None else {"exchange": exchange.of(pattern, lambda held, at=slices: _pick(held, at))}
            )
            moved, slots = returned.update(
                member,
                _pick(grads, slices),
                part,
                _pick(params, slices),
                step=step,
                segments=_pick(segments, slices),
                **more,
                **(rest if out is None else {"out": _pick(out, slices), **rest}),
                **member.given(now),
            )
            _put(new, slices, moved)
            for slot, tensors in slots.items():
                _put(after.setdefault(slot, [None] * len(params)), slices, tensors)
        written = after.keys() == opt.keys() and all(_same(after[slot], opt[slot]) for slot in opt)
        return (params, opt) if written and _same(new, params) else (new, after)

    def runs(self, device: torch.device, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> str:
        """Return what the optimizers run on a device for parameters of these dtypes, each once."""
        words = [word for member in self.members for word in member.runs(device, dtypes).split(", ")]
        return ", ".join(dict.fromkeys(words))


def _entries(optimizers: Mapping[str, Optimizer], most: int = 8) -> list[str]:
    """Return the entries of a dict of optimizers as text; if there are more than `most`, equal ones are one entry."""
    if len(optimizers) <= most:
        return [f"{pattern!r}: {member}" for pattern, member in optimizers.items()]
    patterns_of: dict[str, list[str]] = {}
    for pattern, member in optimizers.items():
        patterns_of.setdefault(member.text, []).append(pattern)
    return [f"{repr(names[0]) if len(names) == 1 else named(names)}: {text}" for text, names in patterns_of.items()]


def _pick(values: Sequence, indices: list[int]) -> list:
    return [values[i] for i in indices]


def _same(a: Sequence, b: Sequence) -> bool:
    return all(map(operator.is_, a, b))


def _put(values: list, indices: list[int], part: Sequence) -> None:
    for index, one in zip(indices, part, strict=True):
        values[index] = one
