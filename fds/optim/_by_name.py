"""`by_name`: one optimizer per group of parameters."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import OptimizerError, checked_call, did_you_mean
from fds.optim import returned
from fds.optim.assembly import is_assembled
from fds.optim.base import Optimizer, Segment, Values, single_group
from fds.optim.exchange import Exchange
from fds.tree import named

Pattern = str | Callable[[str, tuple[int, ...]], bool]


@checked_call
def by_name(optimizers: Mapping[Pattern | tuple[Pattern, ...], Optimizer]) -> Optimizer:
    """Give each parameter the optimizer of the first pattern that takes it.

    Args:
        optimizers: pattern -> optimizer, tried in order. A pattern is a shell-style text that the name matches (`*`
            crosses dots), a function `(name, shape) -> bool` of the name and the whole shape, or a tuple of such
            patterns, of which one suffices.

    Patterns with equal optimizers are one group. Every group has its own learning rate: `update` ignores its argument
    `lr`. A step reports the learning rate of each group as `lr/PATTERN`, by its first pattern, and `lr` if all groups
    have the same number or schedule. Slots of one name share an entry of `opt`, None for the slices of groups without
    it. A parameter is kept whole if its optimizer asks for it.

    Raises `OptimizerError` for values that are not optimizers, and when a step gets its parameters, for a parameter
    that no pattern takes, for a pattern or a tuple that takes no parameter, and for a function that fails.

    >>> from fds.optim import adamw
    >>> by_name({("*norm*", "*.bias"): adamw(weight_decay=0.0), "*": adamw(weight_decay=0.1)})
    by_name({('*norm*', '*.bias'): adamw(lr=0.001, weight_decay=0.0), '*': adamw(lr=0.001, weight_decay=0.1)})
    """
    _check_optimizers(optimizers)
    members: dict[str, Optimizer] = {}
    groups: dict[Pattern | tuple[Pattern, ...], int] = {}
    for pattern, optimizer in optimizers.items():
        index = next((i for i, member in enumerate(members.values()) if _is_equal(member, optimizer)), len(members))
        if index == len(members):
            label = _label(pattern)
            while label in members:
                label += "'"
            members[label] = optimizer
        groups[pattern] = index
    return _Groups(groups, members, f"by_name({{{', '.join(_entries(optimizers))}}})").optimizer()


def _patterns(key: Pattern | tuple[Pattern, ...]) -> tuple[Pattern, ...]:
    return key if isinstance(key, tuple) else (key,)


def _name_of(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__).strip("<>")  # `lambda`


def _label(key: Pattern | tuple[Pattern, ...]) -> str:
    """Return a key of `by_name` as it is in the names of metrics."""
    return named([pattern if isinstance(pattern, str) else _name_of(pattern) for pattern in _patterns(key)])


def _shown(key: Pattern | tuple[Pattern, ...]) -> str:
    """Return a key of `by_name` as text."""
    texts = [repr(pattern) if isinstance(pattern, str) else _name_of(pattern) for pattern in _patterns(key)]
    return f"({', '.join(texts)}{',' * (len(texts) == 1)})" if isinstance(key, tuple) else texts[0]


def _is_equal(a: Optimizer, b: Optimizer) -> bool:
    """Say whether two optimizers do the same: one object, or two made by equal calls of a factory of fds.

    Those of which a save has a sum of learning rates by pattern stay apart, since saves have all patterns.
    """
    if a.phases is not None and a.phases.apart:
        return False
    return a is b or (is_assembled(a) and is_assembled(b) and (a.text, a.lr, a.hyper) == (b.text, b.lr, b.hyper))


def _check_optimizers(optimizers: object) -> None:
    """Raise `OptimizerError` unless this maps at least one pattern to an optimizer."""
    if not isinstance(optimizers, Mapping):
        raise OptimizerError(
            "by_name: not a mapping", where="optimizers", got=repr(optimizers)[:60], want="{pattern: optimizer, ...}"
        )
    for pattern, optimizer in optimizers.items():
        if not _patterns(pattern) or not all(isinstance(x, str) or callable(x) for x in _patterns(pattern)):
            raise OptimizerError(
                "by_name: not a pattern",
                where="optimizers",
                got=repr(pattern)[:80],
                want='"*.bias", a function (name, shape) -> bool, or a tuple of these',
            )
        if not isinstance(optimizer, Optimizer):
            raise OptimizerError(
                "by_name: a pattern's value is not an optimizer",
                where=_shown(pattern),
                got=repr(optimizer),
                want="adamw(...), sgd(...), ...",
                hint="write by_name({pattern: optimizer, ...})",
            )
    members = list(optimizers.values())
    apart = next((member for member in members if member.phases != members[0].phases), None)
    if apart is not None:
        raise OptimizerError(
            "by_name: gradients are summed over ranks for all optimizers or for none",
            where=_shown(next(pattern for pattern, member in optimizers.items() if member is apart)),
            got=f"{members[0]} and {apart}",
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
    """The optimizers by group, and the functions of the optimizer that they make together.

    A group is what patterns with equal optimizers take; `members` have its first pattern's text as their key.
    """

    groups: dict[Pattern | tuple[Pattern, ...], int]
    optimizers: dict[str, Optimizer]
    text: str
    shapes: Mapping[str, tuple[int, ...]] | None = None  # whole ones, once they are known
    indices: dict[str, int] = attrs.field(factory=dict[str, int], init=False)

    def optimizer(self) -> Optimizer:
        """Return the optimizer that they make together."""
        members = self.members
        same = all(m.lr == members[0].lr for m in members)
        return Optimizer(
            self.init,
            self.update,
            whole=self.ask(Optimizer.needs_whole) if any(m.whole for m in members) else False,
            lr=members[0].lr if same else None,
            text=self.text,
            group=self.group,
            check=self.check,
            runs=self.runs,
            members=self.optimizers,
            separate=all(m.separate for m in members),
            elementwise=self.ask(Optimizer.is_elementwise),
            draws=any(m.draws for m in members),
            phases=members[0].phases,
            pieces=self.ask(Optimizer.takes_pieces),
            takes_shapes=True,  # which `returned.update` makes 1-D for those that do not
            bind=self.bind,
        )

    def bind(self, shapes: Mapping[str, tuple[int, ...]]) -> Optimizer:
        """Return the optimizer of parameters of these whole shapes, by name."""
        inner = {label: member.bound(shapes) for label, member in self.optimizers.items()}
        return attrs.evolve(self, optimizers=inner, shapes=shapes).optimizer()

    @property
    def members(self) -> list[Optimizer]:
        """The optimizer of every group."""
        return list(self.optimizers.values())

    def index(self, name: str) -> int:
        """Return which optimizer a parameter has: that of the first pattern that takes it."""
        if name not in self.indices:
            self.indices[name] = self._find(name)
        return self.indices[name]

    def _find(self, name: str) -> int:
        for key, index in self.groups.items():
            if self._takes(key, name):
                return index
        raise OptimizerError(
            "by_name: a parameter matches no pattern",
            where=name,
            got=", ".join(map(_shown, self.groups)),
            want="a pattern for every parameter",
            hint='end with "*": adamw(...)',
        )

    def _takes(self, key: Pattern | tuple[Pattern, ...], name: str) -> bool:
        """Say whether a pattern, or one of several, takes a parameter."""
        return any(
            fnmatch.fnmatchcase(name, pattern) if isinstance(pattern, str) else self._asked(pattern, name)
            for pattern in _patterns(key)
        )

    def _asked(self, function: Callable[[str, tuple[int, ...]], bool], name: str) -> bool:
        assert self.shapes is not None, f"{_name_of(function)} of {name!r} was asked before shapes are known"
        try:
            answer = function(name, self.shapes[name])
        except Exception as error:
            answer, cause = f"{type(error).__name__}: {error}", error
        else:
            cause = None
        if isinstance(answer, bool):
            return answer
        raise OptimizerError(
            "by_name: a function of names and shapes did not say yes or no",
            where=f"{_name_of(function)}, {name}",
            got=answer if cause else repr(answer)[:80],
            want="(name, shape) -> bool, say lambda name, shape: len(shape) < 2",
        ) from cause

    def group(self, name: str) -> Hashable:
        """Return the group of a parameter: of nested ones, that inside the group too."""
        index = self.index(name)
        member = self.members[index]
        return index if member.group is single_group else (index, member.group(name))

    def ask(self, question: Callable[[Optimizer, str], bool]) -> Callable[[str], bool]:
        """Return a function of a parameter's name that asks its optimizer."""
        return lambda name: question(self.members[self.index(name)], name)

    def check(self, names: Sequence[str]) -> None:
        """Raise `OptimizerError` for a pattern that takes no parameter, and let each optimizer check its own."""
        for key in self.groups:
            if not any(self._takes(key, name) for name in names):
                text = next((pattern for pattern in _patterns(key) if isinstance(pattern, str)), "")
                near = did_you_mean(text, names) if names else "there is no trainable parameter"
                several = 'a pattern that may match nothing goes into a tuple with one that does: ("*norm*", "*.bias")'
                raise OptimizerError(
                    "by_name: a pattern matches no parameter",
                    where=_shown(key),
                    got=f"{len(names)} parameters",
                    want="the name of a parameter, with * for any part of it",
                    hint="; ".join(filter(None, (near, several * bool(names)))),
                )
            if not any(self.index(name) == self.groups[key] for name in names if self._takes(key, name)):
                raise OptimizerError(
                    "by_name: earlier patterns take every parameter that this one matches",
                    where=_shown(key),
                    got=", ".join(map(_shown, self.groups)),
                    want="what is special before what is general",
                    hint='"*" comes last',
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
        evaluated = [m.values(step) for m in self.members] if values is None else values.members.values()
        new, after = list(params), {slot: list(tensors) for slot, tensors in opt.items()}
        turns = zip(self.optimizers.items(), self.slices(segments), evaluated, strict=True)
        for (pattern, member), slices, now in turns:
            if not slices:
                continue
            part = {slot: _pick(tensors, slices) for slot, tensors in opt.items()}
            part = {slot: tensors for slot, tensors in part.items() if any(x is not None for x in tensors)}
            pick = lambda tensors, at=slices: _pick(tensors, at)
            more = {} if exchange is None else {"exchange": exchange.for_group(pattern, pick)}
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


def _entries(optimizers: Mapping[Pattern | tuple[Pattern, ...], Optimizer], most: int = 8) -> list[str]:
    """Return the entries of a dict of optimizers as text; if there are more than `most`, equal ones are one entry."""
    if len(optimizers) <= most:
        return [f"{_shown(key)}: {member}" for key, member in optimizers.items()]
    keys_of: dict[str, list[Pattern | tuple[Pattern, ...]]] = {}
    for key, member in optimizers.items():
        keys_of.setdefault(member.text, []).append(key)
    return [
        f"{_shown(keys[0]) if len(keys) == 1 else named(list(map(_label, keys)))}: {text}"
        for text, keys in keys_of.items()
    ]


def _pick(values: Sequence, indices: list[int]) -> list:
    return [values[i] for i in indices]


def _same(a: Sequence, b: Sequence) -> bool:
    return all(map(operator.is_, a, b))


def _put(values: list, indices: list[int], part: Sequence) -> None:
    for index, value in zip(indices, part, strict=True):
        values[index] = value
