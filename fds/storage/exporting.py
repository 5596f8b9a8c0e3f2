"""Export parameters as Hugging Face safetensors, from a save or from the ranks that hold them.

The files are planned from names and shapes alone. Then elements are read, cast and written a block at a time, by the
process that has them: the reader of a save, or each rank for its slices. Nothing is gathered.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.collectives import mesh
from fds.errors import StorageError, did_you_mean
from fds.layout import Sharded
from fds.state import State
from fds.step import Step, seen_parameters
from fds.storage.disk.files import check_path, refusal
from fds.storage.disk.placing import INDEX, replace_files, write_errors
from fds.storage.disk.writer import BLOCK
from fds.storage.format import boxes
from fds.storage.format.manifest import MAX_INT, SavedLeaf
from fds.storage.format.tensors import CODES, DTYPES, as_bytes, check_writable, header, in_memory, write_at
from fds.storage.opening import open_source
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import LeafPart, parts_of, split_version
from fds.storage.ranks.sharing import AllLeaves, LeafPiece, agreement, all_pieces, pieces_of_rank
from fds.storage.source import blocks
from fds.tree import paths

Pieces = Iterable[tuple[str, int, Tensor]]  # key path, first element, elements (length,)


def export_weights(
    source: State | str | os.PathLike[str],
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    step: Step | None = None,
    tag: str | None = None,
    tree: str = "params",
    max_shard_bytes: int = 5_000_000_000,
    view: bool = False,
) -> list[Path]:
    """Write parameters and module buffers as Hugging Face safetensors, and return the files.

    Tensors have the names of the module's `state_dict`. The files are written completely and durably or not at all, and
    replace earlier weights. No more than a block of 8 MiB of a leaf is in memory, beside the state.

    Args:
        source: a run's directory or anything else that `open_source` reads, for which no model, GPU or process group is
            needed; or a state.
        path: a file if it ends in `.safetensors`; else a directory, in which `model.safetensors` is made, or
            `model-00001-of-00002.safetensors` and so on with `model.safetensors.index.json`.
        dtype: of all floating-point leaves; None keeps the dtype of each. float32 gives the consolidated masters.
            Values too large for float16 become infinite.
        step: the step of the state. Where ranks share the state, all of them call this with the same `path` on a common
            file system, and each writes what it holds.
        tag: which save of a directory; by default the last.
        tree: the key path of the tree to export: "slots.ema" for averages in place of the parameters.
        max_shard_bytes: the most bytes of tensors in one file of a directory, unless one tensor is larger.
        view: write what the loss sees of the parameters of a state when it is evaluated, through the views of its
            `step`: rounded or pruned. Then every rank has all of them in memory, and the first one writes.

    Raises `StorageError` for what cannot be read or written, on every rank if on any; existing files are then
    unchanged. Raises `DonatedStateError` for a donated state, `RankError` if a rank is lost.
    """
    check_options(dtype, max_shard_bytes)
    to = check_path(path, "path")
    if view and (step is None or not isinstance(source, State) or tree != "params"):
        got = f"tree={tree!r:.40}" if tree != "params" else "no step" if isinstance(source, State) else "a directory"
        want = "export_weights(state, path, step=step, view=True)"
        hint = "state, _ = fds.load(dir, step, params); averages: attrs.evolve(state, params=state.slots['ema'])"
        raise refusal("what the loss sees is known of the parameters of a state with its step", "view", got, want, hint)
    if isinstance(source, State):
        if tag is not None:
            raise StorageError("a state has no tags", where="export_weights", got=f"tag={tag!r:.40}", want="no tag")
        return export_state(source, to, dtype, step, tree, max_shard_bytes, view=view)
    if step is not None:
        want = "a state with its step, or a directory without one"
        raise refusal("a saved run is exported by one process, without a step", "export_weights", "step=...", want)
    saved = open_source(source, tag)
    export = Export.of(saved.leaves, to, dtype, tree, max_shard_bytes)
    with export.publishing() as folder, write_errors(export.folder):
        export.write(folder, ((name, *block) for name in export.places for block in blocks(saved, name)))
    return export.paths


def check_options(dtype: Any, max_shard_bytes: Any) -> None:
    """Raise `StorageError` for what is no dtype of weights, or no size of a file."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in CODES):
        floats = ", ".join(name for name, x in DTYPES.items() if x.is_floating_point)
        where = "dtype"
        raise refusal("weights cannot be cast to this", where, repr(dtype)[:40], f"None, or of torch's dtypes {floats}")
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        where = "max_shard_bytes"
        raise refusal("not a size of a file", where, repr(max_shard_bytes)[:40], "a number of bytes, 1 or more")


def check_numbers(step: Step, doing: str, instead: str) -> None:
    """Raise `StorageError` for a step whose parameters are held in another form than numbers."""
    if step.encodings:
        got = ", ".join(map(str, step.composition))
        raise refusal("parameters are held in codes, which no other program reads", doing, got, instead)


def export_state(
    state: State,
    path: Path,
    dtype: torch.dtype | None,
    step: Step | None,
    tree: str,
    max_shard_bytes: int,
    *,
    view: bool,
    doing: str = "export_weights",
    beside: Callable[[Path], None] | None = None,
) -> list[Path]:
    """Write the weights of a state; see `export_weights`.

    Args:
        state, path, dtype, step, tree, max_shard_bytes, view: as there.
        doing: the public function that all ranks call.
        beside: writes other files to a folder, on the first rank; they get their names together with the weights.
    """
    if step is None:
        _check_whole_state(state)
    ranks = Ranks() if step is None else Ranks.of(step, doing)
    with ranks.together() as exchange:
        state.check(doing)
        if step is not None:
            step.held_by(state)  # raises an error for slices of another step
        parts = parts_of(state, ranks)
        check_writable({name: part.tensor for name, part in parts.items()})
        exchange.mine = {
            "path": str(path),
            "dtype": str(dtype),
            "tree": repr(tree),
            "size of a file": str(max_shard_bytes),
            "view": str(view),
            **agreement(parts, ranks),
        }
    ranks.check_equal(exchange.all)
    if view:
        assert step is not None
        seen = paths({"params": seen_parameters(step, state), "buffers": step.dimensions.collect(state.buffers)})
        parts = {name: LeafPart(x, tuple(x.shape)) for name, x in seen.items()}
    union = AllLeaves.of(parts, Ranks() if view else ranks)
    with ranks.together():
        export = Export.of(union.leaves, path, dtype, tree, max_shard_bytes)
    mine = {name: part for name, part in parts.items() if name in export.places}
    with contextlib.ExitStack() as publishing:
        with ranks.together() as exchange:
            exchange.mine = str(publishing.enter_context(export.publishing(beside))) if ranks.index == 0 else ""
        with ranks.together(), write_errors(export.folder):
            pieces = pieces_of_rank(mine, union, ranks) if not view else all_pieces(mine) if ranks.index == 0 else []
            export.write(Path(exchange.all[0]), _consecutive(pieces, union))
        with ranks.together():
            publishing.close()  # the files get their names
    return export.paths


def _consecutive(pieces: Iterable[LeafPiece], union: AllLeaves) -> Pieces:
    """Yield what this rank writes in parts that are consecutive in the flattened leaf."""
    for piece in pieces:
        if piece.box is None:
            yield piece.name, piece.start, piece.tensor
            continue
        flat = piece.tensor.reshape(-1)
        placed = boxes.rectangles(piece.box, piece.start, piece.start + len(flat))
        for start, at, length in boxes.runs(union.leaves[piece.name].shape, placed):
            yield piece.name, start, flat[at : at + length]


def _check_whole_state(state: State) -> None:
    size = mesh(ranks=-1).size
    if isinstance(state.params, Sharded) or size > 1:
        where = f", on one of {size} ranks" if size > 1 else ""
        raise StorageError(
            "a rank may hold a part of the state, which only the step knows",
            where="export_weights",
            got=f"a state without its step{where}",
            want="export_weights(state, path, step=step) on every rank",
            hint="one process can export a saved run alone: export_weights(dir, path)",
        )


@attrs.frozen
class TensorPlace:
    """The place of a leaf: its file, its first byte there, and its dtype."""

    file: str
    offset: int
    dtype: torch.dtype


@attrs.frozen(eq=False)
class Export:
    """The plan of the files of an export: the same on all ranks."""

    folder: Path  # of the files
    heads: dict[str, bytes]  # by name of a file, its header
    num_bytes: dict[str, int]  # by name of a file, its size
    places: dict[str, TensorPlace]  # by key path, in the order of the files
    index: dict[str, Any] | None  # for several files, the JSON that maps tensors to files

    @classmethod
    def of(
        cls, leaves: Mapping[str, SavedLeaf], path: Path, dtype: torch.dtype | None, tree: str, max_shard_bytes: int
    ) -> Export:
        """Return the plan of the files, given all leaves. Raises `StorageError` for a tree that does not exist."""
        names, alone = _names(leaves, tree), path.suffix == ".safetensors"
        saved = {key: DTYPES[leaves[key].dtype] for key in names}
        as_ = {key: dtype if dtype is not None and old.is_floating_point else old for key, old in saved.items()}
        size = {key: math.prod(leaves[key].shape) * as_[key].itemsize for key in names}
        shards, room = [[]], max_shard_bytes
        for key in names:
            if shards[-1] and size[key] > room and not alone:
                shards.append([])
                room = max_shard_bytes
            shards[-1].append(key)
            room -= size[key]
        export = cls(path.parent if alone else path, {}, {}, {}, None)
        for i, shard in enumerate(shards):
            shard.sort(key=lambda key: -as_[key].itemsize)  # so that every tensor starts aligned
            many = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            file = path.name if alone else "model.safetensors" if len(shards) == 1 else many
            head = header((names[key], as_[key], leaves[key].shape) for key in shard)
            end = len(head)
            for key in shard:
                export.places[key] = TensorPlace(file, end, as_[key])
                end += size[key]
            if end > MAX_INT:
                raise StorageError("no file is so large", where=file, got=f"{end} bytes")
            export.heads[file], export.num_bytes[file] = head, end
        if len(shards) == 1:
            return export
        files = {names[key]: place.file for key, place in export.places.items()}
        return attrs.evolve(export, index={"metadata": {"total_size": sum(size.values())}, "weight_map": files})

    @property
    def paths(self) -> list[Path]:
        """The files that it makes."""
        return [self.folder / name for name in [*self.heads, *([INDEX] if self.index else [])]]

    @contextlib.contextmanager
    def publishing(self, beside: Callable[[Path], None] | None = None) -> Iterator[Path]:
        """Yield a folder with the files and their headers; publish them when the block ends without an error.

        With them those that `beside` writes there.
        """
        with replace_files(self.folder, [path.name for path in self.paths]) as hidden:
            if beside is not None:
                beside(hidden)
            for name, head in self.heads.items():
                with open(hidden / name, "xb") as file:
                    file.write(head)
                    file.truncate(self.num_bytes[name])
            if self.index is not None:
                with open(hidden / INDEX, "x", encoding="utf-8") as file:
                    json.dump(self.index, file, indent=2)
                    file.flush()
                    os.fsync(file.fileno())
            yield hidden

    def write(self, folder: Path, pieces: Pieces) -> None:
        """Write elements of leaves to their places in the files of `folder`, durably. Raises `OSError`."""
        with contextlib.ExitStack() as closing:
            opened: dict[str, int] = {}
            for name, start, x in pieces:
                place = self.places[name]
                if place.file not in opened:
                    opened[place.file] = os.open(folder / place.file, os.O_WRONLY | os.O_NOFOLLOW)
                    closing.callback(os.close, opened[place.file])
                flat, most = x.detach().reshape(-1), BLOCK // x.element_size()
                for i in range(0, len(flat), most):
                    block = in_memory(flat[i : i + most]).to(place.dtype).resolve_conj().resolve_neg()
                    block = block.to("cpu").contiguous()
                    write_at(opened[place.file], as_bytes(block), place.offset + (start + i) * place.dtype.itemsize)
            for fd in opened.values():
                os.fsync(fd)


def _names(leaves: Mapping[str, SavedLeaf], tree: str) -> dict[str, str]:
    """Return, by key path, the exported names of the parameters, or of `tree` in their place, and of buffers.

    Raises `StorageError` for a tree that does not exist or does not match the parameters, and for equal names.
    """
    below = {
        root: {n.removeprefix(f"{root}."): n for n in leaves if n.startswith(f"{root}.") and not split_version(n)[1]}
        for root in ("params", "buffers", tree)
    }
    chosen, params, buffers = below[tree], below["params"], below["buffers"]
    if not chosen:
        above = {n.rsplit(".", i)[0]: None for n in leaves for i in range(1, n.count(".") + 1)}
        trees = sorted(above, key=lambda n: (n.count("."), n))
        raise StorageError(
            "there is nothing to export here",
            where="tree",
            got=repr(tree)[:80],
            want="the key path of a tree of tensors: params, or slots.ema",
            hint=did_you_mean(tree, trees),
        )
    for name in {**params, **chosen} if params else ():
        have, want = (str(leaves[x[name]].shape) if name in x else "nothing" for x in (chosen, params))
        if have != want:
            raise StorageError("this tree does not match the parameters", where=f"{tree}.{name}", got=have, want=want)
    for name in sorted(chosen.keys() & buffers.keys()):
        raise StorageError("a parameter and a buffer have the same name", where=name, hint="rename one of them")
    if "__metadata__" in {*chosen, *buffers}:
        raise StorageError("this name is reserved in safetensors files", where="__metadata__", hint="rename it")
    return {key: name for names in (chosen, buffers) for name, key in names.items()}
