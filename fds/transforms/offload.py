"""Let leaves of the state live in the host's memory or on a disk; an update visits them a chunk at a time.

Fills:  place                    State:  none; leaves of it live elsewhere
Law:    the composition without it, bit for bit, wherever any leaf lives
Cost:   what lives elsewhere is read and written once a step; on the device, copies of three chunks while it is updated
Source: Ren et al. 2021, arXiv:2101.06840; Rajbhandari et al. 2021, arXiv:2104.07857; Lian et al. 2025, arXiv:2509.21271

`donate`: give up the old state: the step writes over it, and allocates no memory for the new one.

Fills:  place                    State:  none
Law:    the same results, bit for bit; a state that was given up is refused by every entry of fds
Cost:   less: no second copy of parameters, optimizer state and averages
Source: jax.jit's donate_argnums, as a transform
"""

from __future__ import annotations

import fnmatch
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import media, tree
from fds.errors import ComposeError, Rule, instance, is_a, is_number, nearest
from fds.media import Disk, Host, disk
from fds.step import Resident, Step, Structure, fill, transform
from fds.step.residency.lives import resident

Where = str | Disk
Rules = tuple[tuple[str, Host | Disk | None], ...]  # patterns of names, the first match counts; None is the device

_KINDS = {"moments": "opt", "masters": "params", "gradients": "gradients", "averages": "slots"}  # as residencies say
_WORDS: dict[str, Host | None] = {"device": None, "host": Host()}
_MEANT = {"cpu": "host", "ram": "host", "memory": "host", "cuda": "device", "gpu": "device"}  # what others call them
_CUT = 2**12  # elements: pieces begin at whole blocks of a disk
_CHUNK = 2**26  # bytes from the host that are updated together; no less time by more, as for a disk


@attrs.frozen(repr=False)
class Offloaded:
    """Where leaves live: of each kind, patterns of names of parameters with their media.

    Attributes:
        rules: kind, as residencies call it -> its patterns; of kinds of which some leaves live elsewhere.
        ratio: the part of the slices that leaves the device, the last ones.
    """

    rules: Mapping[str, Rules]
    ratio: float = 1.0
    updates_on = "host"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of which some leaves live elsewhere."""
        return tuple(self.rules)

    def __repr__(self) -> str:
        words = [f"{name}={_text(self.rules[kind])}" for name, kind in _KINDS.items() if kind in self.rules]
        return f"offload({', '.join(words + [f'ratio={self.ratio:g}'] * (self.ratio < 1))})"

    def medium(self, leaf: Resident) -> str:
        """Return where a leaf lives: `host`, or `disk` and a directory."""
        return _word(self.where(leaf))

    def where(self, leaf: Resident) -> Host | Disk | None:
        """Return where a leaf lives, as the first parameter of its slice does; None for the device."""
        if leaf.index < int((1 - self.ratio) * leaf.count):
            return None
        return self.said(leaf.kind, leaf.names[0] if leaf.names else "")

    def said(self, kind: str, name: str) -> Host | Disk | None:
        """Return where patterns say that leaves of a parameter live; None for the device."""
        return next((where for pattern, where in self.rules.get(kind, ()) if fnmatch.fnmatchcase(name, pattern)), None)

    def holds(self, leaf: Resident) -> bool:
        """Say whether a leaf lives elsewhere."""
        return self.where(leaf) is not None

    def make(self, x: Tensor, leaf: Resident) -> Tensor:
        """Return memory for a leaf like `x` where it lives."""
        where = self.where(leaf)
        assert where is not None  # `holds` said so
        memory = where.make(x)
        return media.written_in_place(memory) if leaf.in_place else memory

    def chunks(self, structure: Structure) -> list[list[tuple[int, int, int]]]:
        """Return slices in order, as many together as a buffer of each medium has room for, larger ones in pieces."""
        groups: list[list[tuple[int, int, int]]] = []
        filled: dict[Host | Disk, int] = {}
        self._tell_of_others(structure)
        for i in range(len(structure.segments)):
            numel, each = structure.shapes[structure.trained[i]].numel(), self._num_bytes(structure, i)
            room = min((_bound(where) // n for where, n in each.items() if n), default=numel)
            most = max(room // _CUT, 1) * _CUT
            for start in range(0, max(numel, 1), most):
                end = min(start + most, numel)
                more = {where: (end - start) * n for where, n in each.items()}
                if not groups or any(filled.get(where, 0) + n > _bound(where) for where, n in more.items()):
                    groups.append([])
                    filled = {}
                groups[-1].append((i, start, end))
                filled |= {where: filled.get(where, 0) + n for where, n in more.items()}
        return groups

    def read(self, old: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Begin to read; return the function that waits."""
        return media.read(old, device)

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], Any]:
        """Begin to write; return the function that waits."""
        return media.write(worked, new)

    def _tell_of_others(self, structure: Structure) -> None:
        """Warn of parameters that live elsewhere than patterns say, since they share a bucket with others."""
        slices = [structure.inside(i) for i in structure.trained]
        others = {
            name: None
            for kind in self.rules
            for names in slices
            for name in names[1:]
            if self.said(kind, name) != self.said(kind, names[0])
        }
        if others:
            warnings.warn(
                f"{self}: {len(others)} of the parameters live elsewhere than patterns say, as the first of a bucket: "
                f"{', '.join(list(others)[:8])}{', ...' * (len(others) > 8)}",
                stacklevel=2,
            )

    def _num_bytes(self, structure: Structure, i: int) -> dict[Host | Disk, int]:
        """Return the bytes of an element of a slice that an update, or what follows it, reads from each medium."""
        at = structure.trained[i]
        size = structure.leaves[structure.inside(at)[0]].dtype.itemsize
        most: dict[Host | Disk, int] = {}
        for sizes in (
            {"params": size, "gradients": size, "opt": _slot_bytes(structure, i)},
            {"params": size, "slots": max(size, 4)},
        ):
            read: dict[Host | Disk, int] = {}
            for kind, each in sizes.items():
                where = self.where(resident(structure, kind, at))
                if where is not None:
                    read[where] = read.get(where, 0) + each
            most |= {where: max(most.get(where, 0), n) for where, n in read.items()}
        return most


def _text(rules: Rules) -> str:
    words = {pattern: repr(where) if isinstance(where, Disk) else repr(_word(where)) for pattern, where in rules}
    return words["*"] if list(words) == ["*"] else "{" + ", ".join(f"{p!r}: {word}" for p, word in words.items()) + "}"


def _word(where: Host | Disk | None) -> str:
    return "device" if where is None else media.place_of(where)


def _bound(where: Host | Disk) -> int:
    return where.buffer_bytes if isinstance(where, Disk) else _CHUNK


def _slot_bytes(structure: Structure, i: int) -> int:
    """Return the bytes of the optimizer's state for each element of a slice."""
    return sum(slot.dtypes[sum(slot.has[:i])].itemsize for slot in structure.opt.values() if slot.has[i])


@transform(
    ratio=Rule(lambda x: is_number(x) and 0 <= x <= 1, ": {name} is a part of the slices", "a number from 0 to 1"),
    speculate=instance(bool, ": {name} is true or false", "True or False"),
)
def offload(
    moments: Where | Mapping[str, Where] | None = None,
    masters: Where | Mapping[str, Where] | None = None,
    gradients: Where | Mapping[str, Where] | None = None,
    averages: Where | Mapping[str, Where] | None = None,
    *,
    ratio: float = 1.0,
    speculate: bool = False,
):
    """Let the optimizer's moments, the master parameters, sums of gradients and averages live away from the device.

    Each argument is a medium, `"device"`, `"host"` or `fds.disk(directory)`, or patterns of names of parameters with
    their media, `{"embed.*": fds.disk(directory), "*": "host"}`: the first one that matches counts, and what none
    matches stays on the device. Where ranks share a state a leaf is a slice of a bucket, and lives where its first
    parameter does; a warning names those of which patterns say otherwise. What lives elsewhere is a tensor of the
    state like any other: it can be read, compared, saved.

    Args:
        moments: the optimizer's state.
        masters: the parameters as the state holds them.
        gradients: their sums, from when they are complete until the update.
        averages: what `ema` and others keep beside the parameters.
        ratio: the part of the slices, from 0 to 1, of which leaves live elsewhere: the last ones.
        speculate: update slices of which moments or masters live elsewhere in backward, as their gradients become
            complete, and once more where a clip or a skip decides otherwise: `metrics["rolled_back"]`. Such leaves are
            held twice while a step runs, `donate` or not. Gradient maps other than of the norm, pipelines, and
            optimizers that draw, ask other ranks or update all slices at once are refused.

    Raises `ComposeError` for anything else; `step.init` raises `StateError` for a pattern that matches no parameter,
    and `DiskError` for a directory that cannot be written.
    """
    places = {"moments": moments, "masters": masters, "gradients": gradients, "averages": averages}
    if all(where is None for where in places.values()):
        raise ComposeError(
            "offload: nothing is said to live elsewhere", got="no argument", want='say, offload(moments="host")'
        )
    rules = {_KINDS[name]: _rules(name, where) for name, where in places.items() if where is not None}
    elsewhere = {kind: of_kind for kind, of_kind in rules.items() if any(where is not None for _, where in of_kind)}
    if speculate and not elsewhere:
        raise ComposeError(
            "offload: there is nothing to restore a slice from",
            got="speculate=True, and all leaves on the device",
            want='moments="host" or fds.disk(directory) beside it',
        )

    def apply(step: Step) -> Step:
        patterns = tuple(
            dict.fromkeys(pattern for of_kind in rules.values() for pattern, _ in of_kind if pattern != "*")
        )
        residency = Offloaded(elsewhere, float(ratio))
        return fill(step, place={"residency": residency, "patterns": patterns, "speculate": speculate})

    return apply


def _rules(name: str, where: Any) -> Rules:
    """Return the rules of an argument. Raises `ComposeError` for anything but media, or patterns with their media."""
    if not tree.is_mapping(where):
        return (("*", _medium(name, where)),)
    if not where or not all(is_a(pattern, str) for pattern in where):
        raise ComposeError(
            f"offload: {name} takes patterns of parameter names with their media",
            got=repr(where)[:120],
            want='say, {"embed.*": fds.disk(directory), "*": "host"}',
        )
    return tuple((pattern, _medium(f"{name}[{pattern!r}]", medium)) for pattern, medium in where.items())


def _medium(name: str, where: Any) -> Host | Disk | None:
    """Return a medium, None for the device. Raises `ComposeError` for anything else."""
    if isinstance(where, Disk):
        return where
    if not is_a(where, str) or where not in _WORDS:
        raise ComposeError(
            f"offload: {name} is not a medium",
            got=repr(where)[:120],
            want='"device", "host" or fds.disk(directory)',
            hint=_hint(where),
        )
    return _WORDS[where]


def _hint(where: Any) -> str:
    if where is disk:
        return "fds.disk(directory): it is to be called"
    if where in ("disk", "nvme"):
        return "fds.disk(directory)"
    if isinstance(where, Path) or (isinstance(where, str) and os.sep in where):
        return f"fds.disk({str(where)!r})"
    word = str(where).partition(":")[0]
    return f"did you mean {_MEANT[word]!r}?" if word in _MEANT else nearest(word, _WORDS)


@transform
def donate():
    """Let `step(state, batch)` write over the state it is given; use what it returns.

    A tensor that something else holds too (a state that was made of this one by `fds.tree.map`, a view, an array) is
    copied instead of written over, and so is one in a dataclass, a `Mapping` or a class other than dict, list, tuple
    and slotted attrs records, since references to it cannot be counted. An error before the first write leaves the
    state usable. Any function of fds that is given a state which was donated before raises a `DonatedStateError`.
    """

    def apply(step: Step) -> Step:
        return fill(step, place={"donate": True})

    return apply
