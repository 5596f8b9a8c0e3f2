"""`bake`: the model that a step's evaluation computes, as a plain module as small as its views make it."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds import loss as losses, random, tree
from fds.compression._shrink import Cut, shrink
from fds.compression.compressed_files import write
from fds.compression.grids import Packed
from fds.compression.packed_modules import hold, unpacked
from fds.errors import ComposeError, StateError, is_a, is_int
from fds.layout import Leaf
from fds.state import State
from fds.step import Call, Dimensions, Step, seen_parameters


@attrs.frozen
class Entry:
    """One parameter of a baked model.

    Attributes:
        name: of it in the state.
        shape: of it in the state.
        bits: of an integer; None where numbers are kept.
        bytes_before: in the state.
        bytes_after: in the baked model.
    """

    name: str
    shape: tuple[int, ...]
    bits: int | None
    bytes_before: int
    bytes_after: int


@attrs.frozen
class Speed:
    """Milliseconds of a call, the median: of the baked model, and of the same numbers, masked ones too, in float."""

    baked_ms: float
    plain_ms: float

    def __str__(self) -> str:
        ratio = self.plain_ms / self.baked_ms
        words = f"{ratio:.2f} times as fast as" if ratio > 1.02 else "no faster than"
        return f"{words} the same numbers in float here: {self.baked_ms:.3f} ms, and {self.plain_ms:.3f} ms"


@attrs.frozen(eq=False)
class Baked:
    """What `bake` made.

    Attributes:
        module: a plain module in eval mode, whose outputs are those of an evaluation, bit for bit; to rounding, where
            views leave out structures (`fds.compression.shrink`).
        entries: its parameters.
        masked: the module before structures were left out; None where none were.
    """

    module: nn.Module
    entries: tuple[Entry, ...]
    masked: nn.Module | None = attrs.field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        """The bytes of its parameters."""
        return sum(entry.bytes_after for entry in self.entries)

    def report(self, speed: Speed | None = None) -> str:
        """Return a table of bytes, before and after, and what `measure` returned in words."""
        rows = [("parameter", "shape", "bits", "bytes before", "after")]
        rows += [
            (x.name, " x ".join(map(str, x.shape)), str(x.bits or ""), f"{x.bytes_before:,}", f"{x.bytes_after:,}")
            for x in self.entries
        ]
        rows.append(("all", "", "", f"{sum(x.bytes_before for x in self.entries):,}", f"{self.num_bytes:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = (
            [word.ljust(n) if i < 2 else word.rjust(n) for i, (word, n) in enumerate(zip(row, widths, strict=True))]
            for row in rows
        )
        lines = ["  ".join(row).rstrip() for row in aligned]
        return "\n".join([*lines, *([] if speed is None else [f"speed: {speed}"])])

    def measure(self, *inputs: Any, repeats: int = 20) -> Speed:
        """Return how long a call of the module takes, and one of the masked numbers without integers, in turns.

        Raises `ComposeError` for no number of repeats.
        """
        if not is_int(repeats, 1):
            raise ComposeError("not a number of calls", where="repeats", got=repr(repeats)[:80], want="an int >= 1")
        modules = (self.module, self.unpacked())
        times: tuple[list[float], list[float]] = ([], [])
        with torch.no_grad():
            for i in range(repeats + 2):
                for module, taken in zip(modules, times, strict=True):
                    start = time.perf_counter()
                    module(*inputs)
                    if i > 1:  # the first ones make memory
                        taken.append(1000 * (time.perf_counter() - start))
        return Speed(*map(median, times))

    def unpacked(self) -> nn.Module:
        """Return a copy of the module that holds numbers in the place of integers, and masked ones: larger."""
        module = copy.deepcopy(self.module if self.masked is None else self.masked)
        unpacked(module)
        return module

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the module to `model.safetensors` and `config.json` in a folder, and return the files.

        Weights of symmetric grids of 8, 4 and 2 bits are written as compressed-tensors has them (`weight_packed`,
        `weight_scale`, `weight_shape`, and `quantization_config` in config.json), others under the names of the
        module's buffers. A `config.json` that is there keeps its other keys. `fds.compression.read_baked` reads it
        back. One rank calls this.

        Raises `StorageError` for a folder that cannot be written; existing files are then unchanged.
        """
        return write(self.module, folder)


def bake(step: Step, state: State, module: nn.Module | None = None) -> Baked:
    """Return the model that an evaluation of a step computes, as a plain module: weights rounded, integers packed.

    A weight that a view says it can pack (`packed(x, leaf, call)`) is held as integers, which are made numbers when
    they are read; all others as the loss sees them. What a view says that it removes (`removed(params, call)`: rows,
    channels, heads, scores) is not there any more. Outputs are those of an evaluation, bit for bit, for inputs as the
    loss gets them: with `fds.precision` in its dtype, with `fds.autocast` under the same. Where ranks share the state
    all of them call this, and each has the whole model.

    Args:
        step: what `compose(...)(loss)` returned.
        state: whose parameters and buffers are used.
        module: whose structure is taken; None for that of the loss: of `fds.Layers` the layers without the criterion,
            of another loss the one module that it calls by `fds.functional`.

    Raises `LossError` where a loss has no such module, `StateError` for another step's state, and where a later view
    has made columns other than 0 that are to be left out.
    """
    if not is_a(step, Step) or not is_a(state, State):
        raise ComposeError(
            "bake takes a step and its state", got=f"{type(step).__name__}, {type(state).__name__}", want="Step, State"
        )
    seen = tree.paths(seen_parameters(step, state))
    before = tree.paths(step.params(state))
    structure = losses.structure_of(step.loss, {name: x.shape for name, x in before.items()}, module)
    cuts = removed_by(step, state, before, seen)
    shorter = {cut.name for cut in cuts}
    values = {n: seen[n] if n in shorter else packed_or_seen(step, state, n, before, seen) for n in seen}
    _put(structure, values, step.dimensions.collect(state.buffers))
    for change in step.modules:
        if (bake_calls := getattr(change, "bake", None)) is not None:
            bake_calls(structure.module, structure.prefix, Call.with_state(state, Dimensions(), training=False))
    masked = structure.module.eval()
    path_of = {name: path for path, name in structure.paths.items()}
    _check_zeros(cuts, seen)
    smaller = shrink(masked, [attrs.evolve(cut, name=path_of[cut.name]) for cut in cuts if cut.name in path_of])
    left = dict(smaller.named_parameters(remove_duplicate=False))
    entries: list[Entry] = []
    for name, x in values.items():
        if name in path_of:
            after = x.num_bytes if isinstance(x, Packed) else left[p].nbytes if (p := path_of[name]) in left else 0
            bits = x.bits if isinstance(x, Packed) else None
            entries.append(Entry(name, tuple(before[name].shape), bits, before[name].nbytes, after))
    return Baked(smaller, tuple(entries), masked) if cuts else Baked(masked, tuple(entries))


def removed_by(step: Step, state: State, before: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> list[Cut]:
    """Return what views leave out of parameters, given those of the state and what the loss sees of them."""
    call, cuts = Call.with_state(state, Dimensions(), training=False), list[Cut]()
    params = {name: x.to(seen[name].dtype) if tree.is_float(seen[name]) else x for name, x in before.items()}
    for i, view in enumerate(step.views):
        removed: Any = getattr(view, "removed", None)
        cuts += [] if removed is None else removed(params, call.given_to(view, "view", i))
    return cuts


def _check_zeros(cuts: Sequence[Cut], seen: Mapping[str, Tensor]) -> None:
    """Raise `StateError` for columns that are to be left out and of which the loss reads other numbers than 0.

    Rows may have any numbers: what takes them has such columns.
    """
    for cut in cuts:
        x = seen.get(cut.name)
        if x is None or not 0 < cut.dim < x.dim() or cut.keep.shape != (x.shape[cut.dim],) or not cut.keep.any():
            continue
        if x.movedim(cut.dim, 0)[~cut.keep.to(x.device)].any():
            raise StateError(
                "what is to be left out of a weight is not 0",
                where=cut.name,
                got="a view after pruning that makes other numbers of zeros",
                want="zeros, as masks leave them",
                hint="compose pruning after that view",
            )


def packed_or_seen(
    step: Step, state: State, name: str, before: Mapping[str, Tensor], seen: Mapping[str, Tensor]
) -> Packed | Tensor:
    """Return a parameter as integers where these are what the loss sees, bit for bit; else what it sees."""
    want, call = seen[name], Call.with_state(state, Dimensions(), training=False)
    trained = name in step.held_by(state)[0].trained_names
    leaf = Leaf(name, tuple(before[name].shape), before[name].dtype, trained)
    x = before[name].to(want.dtype) if tree.is_float(want) else before[name]
    packed: Packed | None = None
    with random.scope([x.device]):
        for i, view in enumerate(step.views):
            at = call.given_to(view, "view", i, name)
            pack: Any = getattr(view, "packed", None)
            packed = packed if pack is None else pack(x, leaf, at) or packed  # a later view may leave it alone
            reads: Any = getattr(view, "reads", None)
            more = [] if reads is None else [{n: before[n].to(seen[n].dtype) for n in reads(leaf, at)}]
            x = view(x, leaf, at, *more)
    fits = packed is not None and packed.shape == want.shape and torch.equal(packed.numbers(), want)
    return packed if packed is not None and fits else want


def _put(structure: losses.Structure, values: Mapping[str, Packed | Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Put values in the places of parameters, and buffers of a state in theirs."""
    shared = {name: nn.Parameter(x, requires_grad=False) for name, x in values.items() if isinstance(x, Tensor)}
    for path, name in structure.paths.items():
        at, _, last = path.rpartition(".")
        parent, x = structure.module.get_submodule(at), values[name]
        if isinstance(x, Packed):
            hold(parent, last, x)
        else:
            parent._parameters[last] = shared[name]
    for path, _ in [*structure.module.named_buffers(remove_duplicate=False)]:
        at, _, last = path.rpartition(".")
        if structure.prefix + path in buffers:
            structure.module.get_submodule(at)._buffers[last] = buffers[structure.prefix + path].clone()
