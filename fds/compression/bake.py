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
from fds.compression._shrink import Cut, merged, shrink
from fds.compression.compressed_files import rounded_inputs, write
from fds.compression.grids import Packed
from fds.compression.packed_modules import hold, unpacked
from fds.errors import ComposeError, StateError, is_a, is_int
from fds.layout import Leaf
from fds.state import State
from fds.step import Call, Dimensions, Step, seen_parameters
from fds.step.views import apply_views


@attrs.frozen
class Entry:
    """One parameter of a baked model.

    Attributes:
        name: of it in the state.
        shape: of it in the state.
        baked_shape: in the baked model; None where nothing of it is left.
        bits: of an integer; None where numbers are kept.
        zeros: the share of zeros among what is left of a weight that is pruned; None of others, and of no numbers.
        reason: why a weight is not integers although others are; "" of what is.
        bytes_before: in the state.
        bytes_after: in the baked model.
    """

    name: str
    shape: tuple[int, ...]
    baked_shape: tuple[int, ...] | None
    bits: int | None
    zeros: float | None
    reason: str
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(cls, name: str, before: Tensor, left: Tensor | None, packed: Packed | str, *, is_pruned: bool) -> Entry:
        """Return what became of a parameter of a state: what is left of it in float, and in integers or why not."""
        is_packed = isinstance(packed, Packed)
        return cls(
            name,
            tuple(before.shape),
            None if left is None else tuple(left.shape),
            packed.bits if is_packed else None,
            float((left == 0).double().mean()) if is_pruned and left is not None and left.numel() else None,
            "" if is_packed else packed,
            before.nbytes,
            packed.num_bytes if is_packed else 0 if left is None else left.nbytes,
        )

    def words(self) -> tuple[str, ...]:
        """Return its row of a report."""
        size = lambda shape: "nothing" if shape is None else " x ".join(map(str, shape))
        return (
            self.name,
            size(self.shape),
            size(self.baked_shape) if self.baked_shape != self.shape else "",
            str(self.bits or ""),
            f"{self.zeros:.0%}" if self.zeros else "",
            f"{self.bytes_before:,}",
            f"{self.bytes_after:,}",
            self.reason,
        )


COLUMNS = ("parameter", "shape", "cut to", "bits", "zeros", "bytes before", "after", "not integers, as")
WORDS = (0, 1, 2, 7)  # columns that are no numbers


@attrs.frozen
class Speed:
    """Milliseconds of a call, the median: of the baked model, and of `plain`, what it is compared with."""

    baked_ms: float
    plain_ms: float
    plain: str = "the same numbers in float"  # in words

    def __str__(self) -> str:
        ratio = self.plain_ms / self.baked_ms
        words = f"{ratio:.2f} times as fast as" if ratio > 1.02 else "no faster than"
        return f"{words} {self.plain} here: {self.baked_ms:.3f} ms, and {self.plain_ms:.3f} ms"


@attrs.frozen(eq=False)
class Baked:
    """What `bake` made.

    Attributes:
        module: a plain module in eval mode, whose outputs are those of an evaluation, bit for bit; to rounding, where
            views leave out structures (`fds.compression.shrink`).
        entries: its parameters.
        uncut: the module before structures were cut off, in float, with zeros in their place; None where none were.
        cuts: of parameters of `uncut`, what `module` was made by.
        ranges: paths of modules whose inputs are rounded by a dynamic range, of the inputs that are left; with larger
            ones cut off, outputs are not those of an evaluation.
    """

    module: nn.Module
    entries: tuple[Entry, ...]
    uncut: nn.Module | None = attrs.field(default=None, repr=False)
    cuts: tuple[Cut, ...] = attrs.field(default=(), repr=False)
    ranges: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of its parameters."""
        return sum(entry.bytes_after for entry in self.entries)

    def report(self, speed: Speed | None = None) -> str:
        """Return a table of shapes and bytes, before and after, and what `measure` returned in words."""
        total = f"{sum(x.bytes_before for x in self.entries):,}"
        rows = [COLUMNS, *(x.words() for x in self.entries), ("all", "", "", "", "", total, f"{self.num_bytes:,}", "")]
        columns = [(i, column) for i, column in enumerate(zip(*rows, strict=True)) if any(column[1:])]
        aligned: list[list[str]] = []
        for i, column in columns:
            width = max(map(len, column))
            aligned.append([word.ljust(width) if i in WORDS else word.rjust(width) for word in column])
        lines = ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
        lines += [f"{path}: inputs are rounded by the range of those that are left" for path in self.ranges]
        return "\n".join([*lines, *([] if speed is None else [f"speed: {speed}"])])

    def measure(self, *inputs: Any, repeats: int = 20) -> Speed:
        """Return how long a call of the module takes, and one of `unpacked()`, in turns.

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
        baked, plain = map(median, times)
        if self.uncut is not None:
            return Speed(baked, plain, "the uncut model in float")
        if any(entry.zeros for entry in self.entries) and not any(entry.bits for entry in self.entries):
            return Speed(baked, plain, "without zeros, which are multiplied as other numbers are")
        return Speed(baked, plain)

    def unpacked(self) -> nn.Module:
        """Return a copy of the module that holds numbers in the place of integers, with nothing cut off: larger."""
        module = copy.deepcopy(self.module if self.uncut is None else self.uncut)
        unpacked(module)
        return module

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the module to `model.safetensors` and `config.json` in a folder, and return the files.

        Weights of symmetric grids of 8, 4 and 2 bits are written as compressed-tensors has them (`weight_packed`,
        `weight_scale`, `weight_shape`, and `quantization_config` in config.json), others under the names of the
        module's buffers. A `config.json` that is there keeps its other keys, and says what was cut off.
        `fds.compression.read_baked` reads it back. One rank calls this.

        Raises `StorageError` for a folder that cannot be written; existing files are then unchanged.
        """
        return write(self.module, self.cuts, folder)


def bake(step: Step, state: State, module: nn.Module | None = None) -> Baked:
    """Return the model that an evaluation of a step computes, as a plain module: weights rounded, integers packed.

    A weight that a view can pack stays integers, which are made numbers when they are read; all others are as the loss
    sees them. `packed(x, leaf, call)` of a view returns a `Packed` of what it is given, None where it rounds nothing,
    or in words why it cannot. What a view says that it removes (`removed(params, call)`: rows, channels,
    heads, scores) is not there any more. Outputs are those of an evaluation, bit for bit, for inputs as the loss gets
    them: with `fds.precision` in its dtype, with `fds.autocast` under the same. Where ranks share the state all of
    them call this, and each has the whole model.

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
    call = Call.with_state(state, Dimensions(), resting=step.resting(state), training=False)
    seen, before = tree.paths(seen_parameters(step, state)), tree.paths(step.params(state))
    for change in step.modules:
        if (bake_parameters := getattr(change, "bake_parameters", None)) is not None:
            seen = bake_parameters(seen)
    shapes = {name: tuple(x.shape) for name, x in before.items()}
    params = {name: x.to(seen[name].dtype) if tree.is_float(seen[name]) else x for name, x in before.items()}
    structure = losses.structure_of(step.loss, shapes, module)
    places: dict[str, list[str]] = {}
    for path, name in structure.paths.items():
        places.setdefault(name, []).append(path)
    _put(structure, seen, step.dimensions.collect(state.buffers))
    for change in step.modules:
        if (bake_calls := getattr(change, "bake", None)) is not None:
            bake_calls(structure.module, structure.prefix, call)
    uncut = structure.module.eval()
    removed = [cut for cut in merged(removed_by(step, params, call)) if cut.name in places]
    _check_zeros(removed, seen)
    cuts = tuple(attrs.evolve(cut, name=places[cut.name][0]) for cut in removed)
    smaller = shrink(uncut, cuts) if cuts else uncut
    trained, entries = step.held_by(state)[0].trained_names, list[Entry]()
    for name in (name for name in seen if name in places):
        leaf = Leaf(name, shapes[name], before[name].dtype, name in trained)
        parent, _, last = places[name][0].rpartition(".")
        left = smaller.get_submodule(parent)._parameters.get(last)
        packed: Packed | str = ""
        if left is not None:
            keeps = {cut.dim: cut.keep for cut in removed if cut.name == name}
            packed = _fitting(asked(step, leaf, params, call), keeps, left.detach())
        if isinstance(packed, Packed):
            for path in places[name]:
                hold(smaller, path, packed)
        is_pruned = any(view.prunes(leaf, shapes) for view in step.views if hasattr(view, "prunes"))
        entries.append(Entry.of(name, before[name], left, packed, is_pruned=is_pruned))
    inputs = {path for path, how in rounded_inputs(smaller).items() if how["per"] != "all"}
    ranges = inputs.intersection(cut.name.rpartition(".")[0] for cut in cuts if cut.dim == 1)
    return Baked(smaller, tuple(entries), uncut if cuts else None, cuts, tuple(sorted(ranges)))


def removed_by(step: Step, params: Mapping[str, Tensor], call: Call) -> list[Cut]:
    """Return what views leave out of parameters, given these as the loss would see them without views."""
    cuts = list[Cut]()
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


def asked(step: Step, leaf: Leaf, params: Mapping[str, Tensor], call: Call) -> Packed | str:
    """Return a parameter as the integers that a view makes of it, or why it stays in float, "" where nothing is said.

    Args:
        step: whose views are asked.
        leaf: the parameter, whole.
        params: what the loss would see without views, by name.
        call: an evaluation.
    """
    answers = list[Packed | str | None]()

    def ask(view: Any, x: Tensor, at: Call) -> None:
        if hasattr(view, "packed"):
            answers.append(view.packed(x, leaf, at))

    with random.scope([call.device]):
        apply_views(step.views, leaf, params, lambda view, i: call.given_to(view, "view", i, leaf.name), ask)
    last = next(filter(None, reversed(answers)), None)  # a later view may leave it alone
    return last or ("no view rounds it" if answers and len(leaf.shape) > 1 else "")


def _fitting(packed: Packed | str, keeps: Mapping[int, Tensor], want: Tensor) -> Packed | str:
    """Return a parameter in integers, cut, where these are what is wanted, bit for bit; else why it stays in float."""
    if isinstance(packed, str):
        return packed
    packed = packed.cut(keeps) if keeps else packed
    if (packed.shape, packed.dtype) == (tuple(want.shape), want.dtype):
        for mask in (None, want == 0):  # which a view after it may have made
            packed = packed if mask is None else packed.zeroed(mask)
            if torch.equal(packed.numbers(), want):
                return packed
    return "a view after it makes other numbers"


def _put(structure: losses.Structure, values: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Put values in the places of parameters, and buffers of a state in theirs."""
    shared = {name: nn.Parameter(x, requires_grad=False) for name, x in values.items()}
    for path, name in structure.paths.items():
        at, _, last = path.rpartition(".")
        structure.module.get_submodule(at)._parameters[last] = shared[name]
    for path, _ in [*structure.module.named_buffers(remove_duplicate=False)]:
        at, _, last = path.rpartition(".")
        if structure.prefix + path in buffers:
            structure.module.get_submodule(at)._buffers[last] = buffers[structure.prefix + path].clone()
