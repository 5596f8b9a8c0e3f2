"""Drafts: what a save will write, which the ranks agree on before the first byte is written."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import itertools
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fds.state import State
from fds.step import Step
from fds.storage.disk.files import check_path, refusal
from fds.storage.disk.folders import (
    check_run_to_save,
    check_tag,
    forget,
    latest_known,
    publish,
    remember_run,
    remembered_run,
    unpublished,
)
from fds.storage.disk.writer import Span, WrittenChunk, checksum
from fds.storage.format import manifest as manifests
from fds.storage.format.manifest import Chunk, File, Manifest, check_extra
from fds.storage.format.tensors import DTYPES, check_writable, header, on_host, record_event, span_of
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import LeafPart, parts_of
from fds.storage.ranks.sharing import AllLeaves, LeafPiece, agreement, all_pieces, pieces_of_rank

TagValidation = Literal["fail", "warn", "ignore"]
Write = Callable[[str, bytes, list[Span]], list[list[WrittenChunk]]]  # fds.storage.disk.writer.write
RankRecord = dict[str, Any]  # JSON: what a rank wrote


@attrs.frozen
class SaveOptions:
    """The arguments of `save` that say how it is written; `save` says what they mean."""

    keep: int | None
    tag_validation: TagValidation
    local: bool
    take_over: bool

    def check(self) -> None:
        """Raise `StorageError` for values that they cannot have."""
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise refusal("not a number of saves to keep", "keep", repr(self.keep)[:40], "1 or more")
        if self.tag_validation not in ("fail", "warn", "ignore"):
            got = repr(self.tag_validation)[:40]
            raise refusal("unknown value of tag_validation", "tag_validation", got, "'fail', 'warn' or 'ignore'")


@attrs.frozen(eq=False)
class Draft:
    """A save before it is written, on one rank."""

    dir: Path  # the directory of the run, or of this rank with `local`
    folder: Path  # of the tag once it is published, below the path that the user passed
    tag: str
    saved: str
    run: str
    calls: int
    composition: tuple[str, ...]
    extra: dict[str, Any]
    parts: dict[str, LeafPart]  # what this rank holds; emptied once it is written
    union: AllLeaves  # all leaves of the plain state, which the manifest will list
    ranks: Ranks
    options: SaveOptions
    versions: dict[str, int]  # of each part's tensor when the save began: torch's count of in-place writes
    reached: torch.cuda.Event | None  # the CUDA event after which the parts are computed; None on the CPU

    @classmethod
    def of(
        cls,
        dir: str | os.PathLike[str],
        state: State,
        step: Step,
        tag: str | None,
        extra: dict[str, Any] | None,
        options: SaveOptions,
        *,
        doing: str,
    ) -> Draft:
        """Return the draft of a save by the function named `doing`; all ranks call it.

        Raises `StorageError`, on every rank, for arguments that cannot be saved.
        """
        if isinstance(step, State):
            hint = "fds.save(dir, state, step)"
            raise refusal("state and step have changed places", got=type(state).__name__, want="a State", hint=hint)
        ranks, local = Ranks.of(step, doing), options.local
        with ranks.together() as exchange:
            path = check_path(dir, "dir").absolute()  # the working directory may change meanwhile
            if not isinstance(state, State):
                got, hint = repr(type(state).__name__), "fds.save(dir, state, step)"
                raise refusal("what is to be saved is not a state", got=got, want="a State", hint=hint)
            state.check("save")
            options.check()
            step.check(state)
            parts, extra, calls = parts_of(state, ranks), check_extra(extra), int(state.calls)
            tag = f"step{calls:08d}" if tag is None else check_tag(tag)
            check_writable({name: part.tensor for name, part in parts.items()})
            agreed = f"keep={options.keep}, local={local}, take_over={options.take_over}"
            same = {"calls made": str(calls), "options": agreed, **agreement(parts, ranks)}
            same = same if local else {"directory": str(dir), **same}
            run = remembered_run(path) or uuid.uuid4().hex  # that it goes on with, or that begins
            exchange.mine = [tag, _new_time(directory(path, ranks, local)), run, same]
        ranks.check_equal([same for *_, same in exchange.all])
        tag = _common_tag([tag for tag, *_ in exchange.all], options.tag_validation, ranks)
        union = AllLeaves.of(parts, ranks)
        return cls(
            directory(path, ranks, local),
            directory(check_path(dir, "dir"), ranks, local) / tag,
            tag,
            exchange.all[0][1],
            exchange.all[0][2],
            calls,
            tuple(map(repr, step.composition)),
            extra,
            parts,
            union,
            ranks,
            options,
            {name: _version(part.tensor) for name, part in parts.items()},
            record_event(part.tensor for part in parts.values()),
        )

    @property
    def leads(self) -> bool:
        """Whether this rank creates the folder and publishes it."""
        return self.options.local or self.ranks.index == 0

    def begin(self, saving: contextlib.ExitStack) -> None:
        """Create the folder to write into, on the leading rank. Raises `StorageError`, for another run's directory too.

        All ranks call it. With the lock, or two runs that begin here at once would both be the first.
        """
        local = self.options.local
        with self.ranks.together():
            if self.leads:
                keep = None if local else self.options.keep
                saving.enter_context(publish(self.dir, self.tag, keep, stays=local))
                if not self.options.take_over:
                    check_run_to_save(self.dir, self.run)
        remember_run(self.dir.parent if local else self.dir, self.run)

    def write(self, write: Write) -> RankRecord:
        """Write this rank's share and return its record. Raises `OSError`, and `StorageError`."""
        pieces = all_pieces(self.parts) if self.options.local else pieces_of_rank(self.parts, self.union, self.ranks)
        if not pieces:
            return {"pieces": []}
        hosted = on_host((piece.tensor for piece in pieces), self.reached)
        head = header(_entries(pieces))
        spans = [span_of(x) for x in hosted]
        name = f"rank{self.ranks.index}.safetensors"
        chunks = write(str(unpublished(self.dir, self.tag) / name), head, spans)
        for leaf, version in self.versions.items():
            if _version(self.parts[leaf].tensor) != version:
                hint = "wait for the save first: saving.wait()"
                raise refusal("a leaf was written over while it was being saved", leaf, hint=hint)
        written = [[piece.name, piece.box, piece.start, row] for piece, row in zip(pieces, chunks, strict=True)]
        size = len(head) + sum(span[1] for span in spans)
        return {"file": name, "bytes": size, "header": checksum(head), "pieces": written}

    def finish(self, saving: contextlib.ExitStack, records: list[RankRecord]) -> None:
        """Write the manifest of what all ranks wrote and publish the folder, on the leading rank."""
        if self.leads:
            manifests.write_manifest(unpublished(self.dir, self.tag), self.manifest(records))
            saving.close()  # publishes the folder

    def forget(self) -> None:
        """Remove what this tag replaced and older tags, once all ranks have published it. Raises `StorageError`."""
        forget(self.dir, self.tag, self.options.keep)

    def manifest(self, records: list[RankRecord]) -> Manifest:
        """Return the manifest, given the records of the ranks."""
        chunks_of: dict[str, list[Chunk]] = {name: [] for name in self.union.leaves}
        for record in records:
            for name, box, start, chunks in record["pieces"]:
                itemsize = DTYPES[self.union.leaves[name].dtype].itemsize
                box = None if box is None else tuple(map(tuple, box))
                for offset, num_bytes, sum_ in chunks:
                    chunks_of[name].append(Chunk(record["file"], offset, start, num_bytes // itemsize, sum_, box))
                    start += num_bytes // itemsize
        leaves = {
            name: attrs.evolve(leaf, chunks=tuple(sorted(chunks_of[name], key=Chunk.order)))
            for name, leaf in self.union.leaves.items()
        }
        files = {r["file"]: File(r["bytes"], r["header"]) for r in records if r["pieces"]}
        part = (self.ranks.index, self.ranks.size) if self.options.local else None
        manifest = Manifest(
            manifests.FORMAT,
            _fds_version(),
            torch.__version__,
            self.tag,
            self.saved,
            self.calls,
            part,
            self.composition,
            files,
            leaves,
            self.extra,
            run=self.run,
        )
        manifests.check_manifest(manifest)
        return manifest


def _entries(pieces: list[LeafPiece]) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Yield the tensors of a file; the boxes of a leaf are one, flat."""
    for name, group in itertools.groupby(pieces, key=lambda piece: piece.name):
        first, *more = (piece.tensor for piece in group)
        shape = (sum(x.numel() for x in (first, *more)),) if more else tuple(first.shape)
        yield name, first.dtype, shape


def directory(dir: Path, ranks: Ranks, local: bool) -> Path:
    """Return the directory of a rank: the run's, or with `local` one of its own below it."""
    return dir / f"rank{ranks.index}" if local else dir


def _common_tag(tags: list[str], validation: TagValidation, ranks: Ranks) -> str:
    """Return the tag of the save: the first rank's, unless `validation` requires that all are equal."""
    if validation == "fail":
        ranks.check_equal([{"tag": tag} for tag in tags])
    if validation == "warn" and len(set(tags)) > 1:
        warnings.warn(
            f"the ranks passed different tags, {', '.join(sorted(set(tags)))}: saved as {tags[0]}", stacklevel=4
        )
    return tags[0]


def _new_time(dir: Path) -> str:
    """Return the current time, or, if a clock was set back, one just after that of the directory's last save."""
    now = datetime.datetime.now(datetime.UTC)
    with contextlib.suppress(OSError, ValueError, OverflowError, TypeError):  # not a time, or without a time zone
        last = manifests.saved_at(dir / latest_known(dir))
        now = max(now, datetime.datetime.fromisoformat(last) + datetime.timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _fds_version() -> str:
    try:
        return importlib.metadata.version("fds")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
