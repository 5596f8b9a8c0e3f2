"""Load a state from a save or another source."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import fingerprint
from fds.errors import StorageError
from fds.layout import Leaf, Sharded
from fds.state import State
from fds.step import Step, beginning, encode, encoded_leaves, same_composition
from fds.storage.disk.files import OpenFolder, check_path, refusal
from fds.storage.disk.folders import SAVING, check_run_to_load, find, last_run, remember_run
from fds.storage.disk.reader import touch_fresh
from fds.storage.disk.writer import BLOCK
from fds.storage.format.manifest import Manifest, SavedLeaf, read_manifest
from fds.storage.format.tensors import DTYPES, copy_to, dtype_name, is_on_disk
from fds.storage.matching import MatchOptions, check_slots, match
from fds.storage.ranks.draft import directory
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import LeafPart, blank, parts_of
from fds.storage.ranks.local import open_local
from fds.storage.ranks.sharing import AllLeaves, agreement
from fds.storage.source import Source, blank_like, save_source, spans

Slots = Literal["init", "drop"]


@torch.inference_mode(False)
def load(
    dir: str | os.PathLike[str],
    step: Step,
    params: Any,
    *,
    tag: str | None = None,
    slots: Slots | Iterable[Slots] = (),
    strict: bool = True,
    params_only: bool = False,
    without_optimizer: bool = False,
    without_schedule: bool = False,
    verify: bool = True,
    local: bool = False,
    take_over: bool = False,
) -> tuple[State, dict[str, Any]]:
    """Read a state that `save` wrote to `dir`, and the `extra` that was saved with it.

    Where ranks share the state, all of them call this, and each reads what it will hold. The number of ranks, pipeline,
    ZeRO stage and buckets with which the state was saved do not matter.

    Args:
        dir: the run's directory.
        step: the step that will use the state; its plain state must have the structure of the saved one.
        params: the argument of `step.init`: tensors, `meta` tensors or a recipe. It gives the structure and the device
            of the state (that of the first tensor with data, else torch's default); where parameters may be missing
            (`strict=False`), also their values.
        tag: which save; by default the last.
        slots: "init" to initialise state of the optimizer and transforms that the save lacks, as `step.init` would for
            the loaded parameters; "drop" to ignore such state that the step lacks; or both.
        strict: whether any other difference is an error. If not, missing leaves are initialised, others ignored, and a
            `StorageWarning` lists all that were missing, unexpected, or of another shape or dtype.
        params_only: read parameters and module buffers; the run begins anew: counters at 0, key `0`.
        without_optimizer: initialise the optimizer's state. Its bias corrections continue from `state.step`, as if the
            averages were old; `without_schedule=True` restarts them too.
        without_schedule: count updates from 0 again: schedules, and all else that depends on `state.step`, restart.
        verify: whether to compare the bytes that are read with their checksums.
        local: read what `save(..., local=True)` wrote: each rank reads its own directory and those of others that it
            can see. The last save is the last that all ranks have.
        take_over: whether to go on with the run that is here, though this process began or loaded another one here.

    Raises `StorageError`, on every rank if on any, if there is no such save, if it is of another model or composition
    (naming the first parameter or slot that differs), of another run than this process goes on with here, or if a byte
    of it changed. Raises `RankError` if a rank is lost.
    """
    ranks = Ranks.of(step, "load")
    with ranks.together():
        if isinstance(params, Sharded):
            got = "the sharded params of a state"
            want = "the argument of step.init"
            hint = "dict(module.named_parameters()); only structure is read"
            raise refusal("the structure of whole parameters cannot be derived from slices", "params", got, want, hint)
        path = check_path(dir, "dir")
        options = MatchOptions(check_slots(slots), strict, params_only, without_optimizer, without_schedule)
    source = (open_local if local else _open_save)(path, tag, ranks, verify, take_over)
    state = fill(source, step, params, options, ranks)
    if run := source.run or last_run(directory(path, ranks, local)):
        remember_run(path, run)
    return state, source.extra


def fill(source: Source, step: Step, params: Any, options: MatchOptions, ranks: Ranks, key: int | Tensor = 0) -> State:
    """Return a state of `step` with the leaves of a source; other leaves are those of `step.init(params, key=)`.

    All ranks call it. Raises `StorageError`, on every rank, for leaves that do not match.
    """
    same_composition(step)
    with ranks.together():
        template = step.structure(params)
        parts_here = parts_of(template, ranks)
    union = AllLeaves.of(parts_here, ranks)
    want = union.leaves | {name: part.leaf() for name, part in parts_here.items()}
    with ranks.together() as exchange:
        encoding = _Encoding.of(step, params, source) if options.foreign else _Encoding()
        want |= {name: SavedLeaf(dtype_name(leaf.dtype), leaf.shape, ()) for name, leaf in encoding.leaves.items()}
        names, device = match(source, want, options, ranks.partial), _device(params)
        digest = fingerprint((sorted(names.items()), options))
        exchange.mine = {"leaves that they read": f"{len(names)} leaves, {digest}", **agreement(parts_here, ranks)}
    ranks.check_equal(exchange.all)
    missing = {name.partition(".")[0] for name in want if name not in names}
    if not missing:
        with ranks.together():
            state = blank(step, template, device)
            _read(parts_of(state, ranks), names, source, encoding)
        return state
    if "params" in missing:
        template = step.init(params, key=key)
    with ranks.together():
        if "params" in missing and device.type != "meta" and any(x.is_meta for x in tree.leaves(template.params)):
            where, got = source.where, "meta tensors"
            raise refusal(
                "a parameter that the save lacks has no values", where, got, "parameters with values, or a recipe"
            )
        state = template if "params" in missing else blank(step, template, device)
        _read(parts_of(attrs.evolve(state, opt={}, slots={}), ranks), names, source, encoding)
    params_loaded = state.params
    del state, template  # or what is initialised now would be in memory twice
    state = beginning(step, params_loaded, key, device)
    with ranks.together():
        parts = parts_of(state, ranks)
        _read({n: part for n, part in parts.items() if n.partition(".")[0] != "params"}, names, source, encoding)
    return state


@attrs.frozen
class _Encoding:
    """Parameters that a state holds in another form than a source has them, by key path; and what encodes them."""

    leaves: Mapping[str, Leaf] = attrs.field(factory=dict)
    views: Sequence[Any] = ()

    @classmethod
    def of(cls, step: Step, params: Any, source: Source) -> _Encoding:
        """Return which parameters are to be encoded: those that the source has as `step.init` would be given them."""
        leaves = {f"params.{name}": leaf for name, leaf in encoded_leaves(step, params).items()}
        have = {name: leaf for name, leaf in leaves.items() if name in source.leaves}
        return cls({n: leaf for n, leaf in have.items() if source.leaves[n].shape == leaf.shape}, step.encodings)

    def read(self, part: LeafPart, leaf: Leaf, name: str, source: Source) -> None:
        """Read the rows of which a part has codes, and encode them: a block at a time, where views take rows."""
        flat, count = part.tensor.view(-1), leaf.shape[0]
        if not len(flat):
            return
        ranges = part.ranges or tuple(((0, n),) for n in part.shape)
        width, each = math.prod(sum(n for _, n in along) for along in ranges[1:]), leaf.numel // count
        most = max(1, BLOCK // (4 * max(1, each)))
        if not all(getattr(view, "by_row", False) for view in self.views):
            most = count
        before = 0  # rows of the piece
        for start, length in ranges[0]:
            low, high = (min(max(at // width - before, 0), length) for at in (part.start, part.end + width - 1))
            for first in range(low, high, most):
                last = min(high, first + most)
                codes = self._codes(start + first, last - first, leaf, name, source)
                for dim, along in enumerate(ranges[1:], 1):
                    codes = torch.cat([codes.narrow(dim, i, n) for i, n in along], dim)
                at = (before + first) * width
                begin, end = max(part.start, at), min(part.end, (before + last) * width)
                copy_to(flat[begin - part.start : end - part.start], codes.reshape(-1)[begin - at : end - at])
            before += length

    def _codes(self, first: int, num_rows: int, leaf: Leaf, name: str, source: Source) -> Tensor:
        """Return what is held of some rows of a parameter, given by the first one of them."""
        by_row = all(getattr(view, "by_row", False) for view in self.views)
        start, count = (first, num_rows) if by_row else (0, leaf.shape[0])
        each = leaf.numel // leaf.shape[0]
        rows = blank_like(source.leaves[name], count * each)
        source.read(name, start * each, rows)
        codes = encode(self.views, rows.to(leaf.dtype).view(-1, *leaf.shape[1:]), leaf)
        return codes[first - start : first - start + num_rows]


def _open_save(dir: Path, tag: str | None, ranks: Ranks, verify: bool, take_over: bool) -> Source:
    """Return the save that the first rank finds; other ranks might find a newer one."""
    with ranks.together() as exchange:
        opened = _find_save(dir, tag) if ranks.index == 0 else None
        if opened is not None and not take_over:
            check_run_to_load(dir, opened[0].path, opened[1].run)
        place = "" if opened is None else str(opened[0].path.relative_to(dir))
        exchange.mine = {"place": place, "asked": {"tag": repr(tag)}}
    ranks.check_equal([sent["asked"] for sent in exchange.all])
    folder = dir / exchange.all[0]["place"]
    with ranks.together() as exchange:
        opened_folder, manifest = _open_folder(folder) if opened is None else opened
        exchange.mine = {"save that they read": fingerprint(manifest)}
    ranks.check_equal(exchange.all)
    return save_source(manifest, [opened_folder], verify=verify)


def _find_save(dir: Path, tag: str | None, attempts: int = 5) -> tuple[OpenFolder, Manifest]:
    """Return folder and manifest of a save; tries again while another process is replacing it."""
    before = _modified(dir)
    try:
        return _open_folder(find(dir, tag))
    except StorageError:
        if attempts == 1 or (_modified(dir) == before and not (dir / SAVING).exists()):
            raise
        time.sleep(0.02)
        return _find_save(dir, tag, attempts - 1)


def _open_folder(folder: Path) -> tuple[OpenFolder, Manifest]:
    opened = OpenFolder.of(folder)
    return opened, read_manifest(opened)


def _modified(dir: Path) -> int:
    try:
        return os.stat(dir).st_mtime_ns
    except OSError:
        return 0


def _read(parts: Mapping[str, LeafPart], names: Mapping[str, str], source: Source, encoding: _Encoding) -> None:
    """Read the elements of the parts into their tensors, in the order of the files."""
    leaves_read = {name: source.leaves[names[name]] for name in parts if name in names}
    on_disk = any(is_on_disk(parts[name].tensor) for name in leaves_read)
    # one for all pieces: malloc need not give back fresh ones
    block = torch.empty(BLOCK if on_disk else 0, dtype=torch.uint8, device="cpu")
    for name, leaf in sorted(leaves_read.items(), key=lambda item: _place(parts[item[0]], item[1])):
        part = parts[name]
        if name in encoding.leaves:
            encoding.read(part, encoding.leaves[name], names[name], source)
            continue
        if part.term is not None and leaf.shape != part.shape:
            _read_terms(part, leaf, names[name], source)
            continue
        flat = part.tensor.view(-1)
        if flat.device.type == "cpu" and part.leaf().dtype == leaf.dtype and not is_on_disk(flat):
            touch_fresh(flat)
            _fill(flat, part, names[name], source)
            continue
        if part.has_boxes:
            whole = blank_like(leaf, len(flat))
            _fill(whole, part, names[name], source)
            copy_to(flat, whole)
            continue
        most = BLOCK // DTYPES[leaf.dtype].itemsize
        pieces = ((start, most) for start in range(part.start, part.end, most))  # of a box, in elements of it
        for start, length in spans(leaf) if part.ranges is None else pieces:
            low, high = max(part.start, start), min(part.end, start + length)
            if low < high:
                num_bytes = (high - low) * DTYPES[leaf.dtype].itemsize
                fits = num_bytes <= len(block)
                piece = block[:num_bytes].view(DTYPES[leaf.dtype]) if fits else blank_like(leaf, high - low)
                _fill(piece, attrs.evolve(part, start=low), names[name], source)
                copy_to(flat[low - part.start : high - part.start], piece)


def _fill(out: Tensor, part: LeafPart, name: str, source: Source) -> None:
    """Fill `out`, (length,) on the CPU, with the elements of a part from its first on."""
    for box, start, x in part.by_box(out):
        if x.is_contiguous():
            source.fill(name, box, start, x.view(-1))
            continue
        read = blank_like(source.leaves[name], x.numel())
        source.fill(name, box, start, read)
        x.copy_(read.view(x.shape))


def _read_terms(part: LeafPart, leaf: SavedLeaf, name: str, source: Source) -> None:
    """Read this rank's term of a sum of which the save has another number: of n terms the r-th is r, r + n, ..."""
    assert part.term is not None
    length = part.tensor.numel()
    part.tensor.zero_()
    for term in range(part.term, leaf.shape[0] if length else 0, part.shape[0]):
        piece = blank_like(leaf, length)
        if part.ranges is None:
            _fill(piece, attrs.evolve(part, start=term * length), name, source)
        else:
            _fill(piece, attrs.evolve(part, ranges=(((term, 1),), *part.ranges[1:])), name, source)
        part.tensor.view(-1).add_(piece.to(part.tensor.device))


def _place(part: LeafPart, leaf: SavedLeaf) -> tuple[str, int]:
    """Return file and offset of the first byte of a part."""
    box, start, _ = next(part.by_box(part.tensor), (None, part.start, None))
    chunk = next((c for c in leaf.chunks if c.box != box or c.end > start), None)
    return ("", 0) if chunk is None else (chunk.file, chunk.offset)


def _device(params: Any) -> torch.device:
    leaves = [] if callable(params) else tree.leaves(params)
    real = (x.device for x in leaves if isinstance(x, Tensor) and not x.is_meta)
    return next(real, torch.get_default_device())
