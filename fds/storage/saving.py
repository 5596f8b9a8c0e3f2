"""Save a state."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import attrs
import torch

from fds.errors import StorageError
from fds.layout import Sharded
from fds.state import State
from fds.step import Step
from fds.storage.folders import checked_tag, publish, refusing, unpublished
from fds.storage.manifest import FORMAT, Chunk, Leaf, Manifest, checked_extra, refuse_impossible, write_manifest
from fds.storage.parts import Part, parts_of
from fds.storage.tensors import refuse_unwritable, write_tensors
from fds.storage.together import Ranks
from fds.storage.union import Union, agreement


def save(
    dir: str | os.PathLike,
    state: State,
    step: Step,
    tag: str | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write a state below `dir`, whole and durably or not at all, and return the folder of its tag.

    Where ranks share the state, all of them call this, with one `dir` of a file system that all of them see, and each
    writes what it owns. What is written is the plain state: any number of ranks loads it, in any pipeline and stage.

    Args:
        dir: the run's directory, made if it is missing.
        state: what `step.init` or a step returned.
        step: whose state it is; its composition is written down for people to read.
        tag: the name of this save, `step00000012` after 12 calls unless given; one that exists is replaced.
        extra: what else the run needs to go on (a loader's position): a dict that JSON gives back as it is. Of several
            ranks, the first one's is written.

    Raises `StorageError` for whatever cannot be written or the file system refuses, on every rank if on any;
    `DonatedStateError` for a state that was given up; `RankError` if a rank is lost. Then the saves that were there,
    and which of them is the last, are as they were.
    """
    if not isinstance(state, State):
        raise StorageError("what is to be saved is no state", got=repr(type(state).__name__), want="a State",
                           hint="fds.save(dir, state, step)")  # fmt: skip
    ranks = Ranks.of(step)
    with ranks.together() as said:
        draft = _draft(Path(dir), state, step, tag, extra, ranks)
        said.mine = draft.common(ranks)
    ranks.refuse_different(said.all)
    union = Union.of(draft.parts, ranks)
    folder = unpublished(draft.dir, draft.tag)
    with contextlib.ExitStack() as saving:
        with ranks.together():
            if ranks.index == 0:
                saving.enter_context(publish(draft.dir, draft.tag))
        with ranks.together() as said, refusing(draft.dir):
            said.mine = _write(folder, draft, union, ranks)
        with ranks.together(), refusing(draft.dir):
            if ranks.index == 0:
                write_manifest(folder, draft.manifest(union, said.all))
                saving.close()  # from here on it has its name
    return draft.dir / draft.tag


@attrs.frozen
class Draft:
    """A save before anything of it is written."""

    dir: Path
    tag: str
    calls: int
    extra: dict[str, Any]
    composition: tuple[str, ...]
    parts: dict[str, Part]  # by key path

    def common(self, ranks: Ranks) -> dict[str, str]:
        """Return in what ranks must agree."""
        return {"directory": str(self.dir), "tag": self.tag, "calls made": str(self.calls),
                **agreement(self.parts, ranks)}  # fmt: skip

    def manifest(self, union: Union, written: list[dict[str, list]]) -> Manifest:
        """Return the manifest, given all leaves, and what `_write` returned on every rank."""
        found: dict[str, list[Chunk]] = {name: [] for name in union.leaves}
        for rank, chunks in enumerate(written):
            for name, chunk in chunks.items():
                found[name].append(Chunk(_file(rank), *chunk))
        leaves: dict[str, Leaf] = {}
        for name, chunks in found.items():
            tiles = tuple(sorted(chunks, key=lambda c: c.start))
            leaves[name] = attrs.evolve(union.leaves[name], chunks=tiles)
            refuse_impossible(leaves[name], where=name)
        return Manifest(
            FORMAT, _version(), torch.__version__, self.tag, self.calls, self.composition, leaves, self.extra
        )


def _draft(
    dir: Path, state: State, step: Step, tag: str | None, extra: dict[str, Any] | None, ranks: Ranks
) -> Draft:
    """Return what is to be saved. Raises `StorageError` for what cannot be."""
    state.check("save")
    if isinstance(state.params, Sharded):
        step.structure_of(state.params)  # refuses slices of another step
    parts, extra = parts_of(state, ranks.slice), checked_extra(extra)
    calls = int(state.calls)
    tag = f"step{calls:08d}" if tag is None else checked_tag(tag)
    refuse_unwritable({name: part.tensor for name, part in parts.items()})
    return Draft(dir, tag, calls, extra, tuple(map(repr, step.composition)), parts)


def _write(folder: Path, draft: Draft, union: Union, ranks: Ranks) -> dict[str, list]:
    """Write what this rank owns; return start, length and checksum by key path.

    Of leaves that the pipeline has at several places, the first place's ranks write. Of what is split among them,
    each its part, unless it is a copy; of what each of them has, the first one everything.
    """
    owned = {
        name: part for name, part in draft.parts.items()
        if union.first[name] == ranks.place
        and (part.tensor.numel() and ranks.replica == 0 if part.split else ranks.data == 0)
    }  # fmt: skip
    if not owned:
        return {}
    checksums = write_tensors(folder / _file(ranks.index), {name: part.written for name, part in owned.items()})
    return {name: [part.start, part.tensor.numel(), checksums[name]] for name, part in owned.items()}


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _version() -> str:
    try:
        return importlib.metadata.version("fds")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
