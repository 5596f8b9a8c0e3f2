"""Drafts: what a save will write, agreed between the ranks before the first byte of it is written."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fds.errors import StorageError
from fds.state import State
from fds.step import Step
from fds.storage.disk.folders import checked_tag, forget, latest_known, publish, unpublished
from fds.storage.disk.hosting import on_host, reached
from fds.storage.disk.paths import checked_path
from fds.storage.disk.writer import checksum
from fds.storage.format import manifest as manifests
from fds.storage.format.manifest import Chunk, File, Manifest, checked_extra
from fds.storage.format.tensors import DTYPES, header, refuse_unwritable
from fds.storage.ranks.parts import Part, parts_of
from fds.storage.ranks.sharing import held, own
from fds.storage.ranks.together import Ranks
from fds.storage.ranks.union import Union, agreement

TagValidation = Literal["fail", "warn", "ignore"]
Write = Callable[[str, bytes, list[tuple[int, int]]], list[list[tuple[int, int, str]]]]  # fds.storage.disk.writer.write
Record = dict[str, Any]  # JSON: what a rank wrote


@attrs.frozen(eq=False)
class Draft:
    """A save before anything of it is written, as one rank has it.

    Attributes:
        dir: the directory of the run, or of this rank's part of it.
        folder: of the tag, once it is published, as the user calls it.
        parts: what this rank holds, until it is written.
        union: all leaves of the plain state, of which the manifest tells.
        versions: how often each part had been written to when the save began.
        reached: when a GPU has computed them.
        local: whether every rank keeps what it holds, in a directory of its own.
    """

    dir: Path
    folder: Path
    tag: str
    saved: str
    calls: int
    composition: tuple[str, ...]
    extra: dict[str, Any]
    parts: dict[str, Part]
    union: Union
    ranks: Ranks
    keep: int | None
    local: bool
    versions: dict[str, int]
    reached: torch.cuda.Event | None

    @classmethod
    def of(
        cls, dir: str | os.PathLike, state: State, step: Step, tag: str | None, extra: dict[str, Any] | None, *,
        doing: str, keep: int | None, tag_validation: TagValidation, local: bool,
    ) -> Draft:  # fmt: skip
        """Return what the call `doing` is to save; all ranks call it.

        Raises `StorageError`, on every rank, for what cannot be saved.
        """
        if isinstance(step, State):
            raise StorageError("state and step have changed places", got=type(state).__name__, want="a State",
                               hint="fds.save(dir, state, step)")  # fmt: skip
        ranks = Ranks.of(step, doing)
        with ranks.together() as said:
            path = checked_path(dir, "dir").absolute()  # the process may change its own while it is written
            if not isinstance(state, State):
                raise StorageError("what is to be saved is no state", got=repr(type(state).__name__), want="a State",
                                   hint="fds.save(dir, state, step)")  # fmt: skip
            state.check("save")
            _refuse_options(keep, tag_validation)
            step.check(state)
            parts, extra, calls = parts_of(state, ranks.slice), checked_extra(extra), int(state.calls)
            tag = f"step{calls:08d}" if tag is None else checked_tag(tag)
            refuse_unwritable({name: part.tensor for name, part in parts.items()})
            same = {"calls made": str(calls), "options": f"keep={keep}, local={local}", **agreement(parts, ranks)}
            said.mine = [tag, _later(directory(path, ranks, local)), same if local else {"directory": str(dir), **same}]
        ranks.refuse_different([same for _, _, same in said.all])
        tag = _agreed([tag for tag, _, _ in said.all], tag_validation, ranks)
        union = Union.of(parts, ranks)
        return cls(
            directory(path, ranks, local), directory(Path(dir), ranks, local) / tag, tag, said.all[0][1], calls,
            tuple(map(repr, step.composition)), extra, parts, union, ranks, keep, local,
            {name: _version(part.tensor) for name, part in parts.items()},
            reached(part.tensor for part in parts.values()),
        )  # fmt: skip

    @property
    def leads(self) -> bool:
        """Whether this rank makes the folder and gives it its name."""
        return self.local or self.ranks.index == 0

    def begin(self, saving: contextlib.ExitStack) -> None:
        """Make the folder to write into, on the rank that does. Raises `StorageError`."""
        if self.leads:
            saving.enter_context(publish(self.dir, self.tag, None if self.local else self.keep, stays=self.local))

    def write(self, write: Write) -> Record:
        """Write this rank's share and return the record of it. Raises `OSError`, and `StorageError`."""
        pieces = held(self.parts) if self.local else own(self.parts, self.union, self.ranks)
        if not pieces:
            return {"pieces": []}
        hosted = on_host((piece.tensor for piece in pieces), self.reached)
        head = header((piece.name, piece.tensor.dtype, tuple(piece.tensor.shape)) for piece in pieces)
        spans = [(x.data_ptr(), x.numel() * x.element_size()) for x in hosted]
        name = f"rank{self.ranks.index}.safetensors"
        chunks = write(str(unpublished(self.dir, self.tag) / name), head, spans)
        for leaf, version in self.versions.items():
            if _version(self.parts[leaf].tensor) != version:
                raise StorageError("a leaf was written over while it was being saved", where=leaf,
                                   hint="wait for the save first: saving.wait()")  # fmt: skip
        told = [[piece.name, piece.start, found] for piece, found in zip(pieces, chunks, strict=True)]
        size = len(head) + sum(n for _, n in spans)
        return {"file": name, "bytes": size, "header": checksum(head), "pieces": told}

    def finish(self, saving: contextlib.ExitStack, records: list[Record]) -> None:
        """Write the manifest of what all ranks wrote, and give the folder its name, on the rank that does."""
        if self.leads:
            manifests.write_manifest(unpublished(self.dir, self.tag), self.manifest(records))
            saving.close()  # from here on it has its name

    @property
    def forgets_later(self) -> bool:
        """Whether what is replaced, and older tags, stay until all ranks have given this one its name.

        For that they must meet.
        """
        return self.local

    def forget(self) -> None:
        """Remove what this tag replaced, and older tags of this rank; all ranks have it. Raises `StorageError`."""
        forget(self.dir, self.tag, self.keep)

    def manifest(self, records: list[Record]) -> Manifest:
        """Return the manifest, given what ranks wrote."""
        found: dict[str, list[Chunk]] = {name: [] for name in self.union.leaves}
        for record in records:
            for name, start, chunks in record["pieces"]:
                itemsize = DTYPES[self.union.leaves[name].dtype].itemsize
                for offset, num_bytes, sum_ in chunks:
                    found[name].append(Chunk(record["file"], offset, start, num_bytes // itemsize, sum_))
                    start += num_bytes // itemsize
        leaves = {
            name: attrs.evolve(leaf, chunks=tuple(sorted(found[name], key=lambda chunk: chunk.start)))
            for name, leaf in self.union.leaves.items()
        }
        files = {r["file"]: File(r["bytes"], r["header"]) for r in records if r["pieces"]}
        part = (self.ranks.index, self.ranks.size) if self.local else None
        manifest = Manifest(
            manifests.FORMAT, _installed(), torch.__version__, self.tag, self.saved, self.calls, part,
            self.composition, files, leaves, self.extra,
        )  # fmt: skip
        manifests.refuse_impossible(manifest)
        return manifest


def directory(dir: Path, ranks: Ranks, local: bool) -> Path:
    """Return where a rank reads and writes: where all do, or below it in a folder of its own."""
    return dir / f"rank{ranks.index}" if local else dir


def _agreed(tags: list[str], validation: TagValidation, ranks: Ranks) -> str:
    """Return the tag of the save: the first rank's, if others may have another."""
    if validation == "fail":
        ranks.refuse_different([{"tag": tag} for tag in tags])
    if validation == "warn" and len(set(tags)) > 1:
        warnings.warn(f"the ranks named different tags, {', '.join(sorted(set(tags)))}: saved as {tags[0]}",
                      stacklevel=4)  # fmt: skip
    return tags[0]


def _refuse_options(keep: Any, tag_validation: Any) -> None:
    if keep is not None and (type(keep) is not int or keep < 1):
        raise StorageError("not a number of saves to keep", where="keep", got=repr(keep)[:40], want="1 or more")
    if tag_validation not in ("fail", "warn", "ignore"):
        raise StorageError("not a way to treat tags that differ", where="tag_validation", got=repr(tag_validation)[:40],
                           want="'fail', 'warn' or 'ignore'")  # fmt: skip


def _later(dir: Path) -> str:
    """Return the time, later than that of the last save of a directory even if a clock was set back since."""
    now = datetime.datetime.now(datetime.UTC)
    with contextlib.suppress(OSError, ValueError, OverflowError, TypeError):  # a time that is none, or names no zone
        last = manifests.saved_at(dir / latest_known(dir))
        now = max(now, datetime.datetime.fromisoformat(last) + datetime.timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _installed() -> str:
    try:
        return importlib.metadata.version("fds")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
