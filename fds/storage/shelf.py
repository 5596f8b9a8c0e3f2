"""Shelves: where the ranks of a run that stops leave what they hold of its state, in the memory of their node.

    /dev/shm/fds-1000-8f2c/           of this user, and of the run's directory
      directory                       which is this one
      5d0c.../                        the run
        3be1....00000012/             the state after 12 calls, as the ranks of one start held it
          rank0/                      what the first of these ranks held, as a save with `local=True` has it
          rank2/

To leave something takes no message, since other ranks may be dead; ranks of a node that hold the same leave it once.
What lies on the shelves of all nodes that are there is one state if it covers every leaf. A node that lacks pieces
which its ranks will hold gets those, and no others, from a node that has them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from fds.collectives import Axis
from fds.errors import StorageError
from fds.layout import Box
from fds.media.locks import lock_file
from fds.state import State
from fds.step import Step
from fds.storage.disk import writer
from fds.storage.disk.files import OpenFolder, refusal, write_errors
from fds.storage.disk.folders import unpublished
from fds.storage.format import boxes
from fds.storage.format.manifest import NAME, Chunk, File, Manifest, SavedLeaf, parse_manifest, write_manifest
from fds.storage.format.tensors import DTYPES, as_bytes, header, record_event, write_at
from fds.storage.loading import fill
from fds.storage.matching import MatchOptions
from fds.storage.ranks.draft import Draft, SaveOptions
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import LeafPart, nearest_version, parts_of
from fds.storage.ranks.local import check_parts_agree, merge
from fds.storage.ranks.sharing import AllLeaves, all_pieces
from fds.storage.source import placed_chunks, save_source

MEMORY = Path("/dev/shm")  # a file system in memory, on Linux
DIRECTORY = "directory"  # the file that names the directory of the run
PATIENCE = 20.0  # seconds, of the 30 that torchrun's agent gives ranks to end
BROUGHT = header([])  # of a file of chunks from other nodes, which only the manifest names

Entry = tuple[str, int]  # id of a start of the ranks, calls made
Key = tuple[str, int]  # file and offset of a chunk


@attrs.frozen
class Shelf:
    """The shelf of a run on this node."""

    folder: Path
    id: str  # the same for all ranks that see this folder

    @classmethod
    def of(cls, dir: Path, run: str, root: Path | None = None) -> Shelf:
        """Open the shelf of a run in `dir`; remove what other runs in `dir` left, and runs whose directory is gone.

        Raises `StorageError` if it cannot be written, or is another user's.
        """
        root = root or (MEMORY if MEMORY.is_dir() else Path("/tmp"))
        place = root / f"fds-{os.getuid()}-{hashlib.blake2b(os.fsencode(dir.resolve()), digest_size=8).hexdigest()}"
        with write_errors(root, "shelf"):
            root.mkdir(parents=True, exist_ok=True)
            place.mkdir(mode=0o700, exist_ok=True)
            about = os.lstat(place)
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():  # in /dev/shm anybody may make names
                raise refusal("the shelf of this run is not a folder of this user", str(place), want="remove it")
            for other in place.iterdir():
                if other.name not in (run, DIRECTORY):
                    shutil.rmtree(other, ignore_errors=True)
            _remove_of_gone_directories(root)
            (place / DIRECTORY).write_text(str(dir.resolve()))
            (place / run).mkdir(exist_ok=True)
            about = os.stat(place / run)
        return cls(place / run, f"{_boot()}.{about.st_dev}.{about.st_ino}")

    def leave(
        self, state: State, step: Step, union: AllLeaves, start: str, made: str, extra: dict[str, Any] | None = None
    ) -> None:
        """Write what this rank holds of a state; no other rank needs to live.

        Args:
            union: all leaves, which the ranks have agreed on while all of them lived.
            start: the id of this start of the ranks, equal on all of them.
            made: when the state was made: ISO 8601, in UTC.
            extra: what else is left, a dict of JSON.

        Raises `StorageError`, for a full memory too.
        """
        ranks = Ranks.of(step, "fds.elastic.run")
        parts, calls = parts_of(state, ranks), int(state.calls)
        entry = self.folder / f"{start}.{calls:08d}"
        new, place, tag = entry / f".new{ranks.index}", entry / f"rank{ranks.index}", f"step{calls:08d}"
        options, composed = SaveOptions(None, "fail", local=True, take_over=False), tuple(map(repr, step.composition))
        reached = record_event(part.tensor for part in parts.values())
        draft = Draft(
            new,
            place,
            tag,
            made,
            self.folder.name,
            calls,
            composed,
            extra or {},
            parts,
            union,
            ranks,
            options,
            {},
            reached,
        )
        with write_errors(self.folder, "shelf"):
            unpublished(new, tag).mkdir(parents=True)
            try:
                with _turn(entry / f".of-{_digest(parts)}") as claim:
                    if not claim.exists():  # as it does where another rank of this node has left the same
                        write_manifest(unpublished(new, tag), draft.manifest([draft.write(writer.write)]))
                        os.rename(unpublished(new, tag), place)
                        claim.touch()
            finally:
                shutil.rmtree(new)

    def clear(self, but: str = "") -> None:
        """Remove all that was left here, but by the start of this id. Ranks of a node may do so at once."""
        for entry in self.folder.glob("*.*"):
            if entry.is_dir() and not (but and entry.name.startswith(f"{but}.")):
                shutil.rmtree(entry, ignore_errors=True)

    def remove(self) -> None:
        """Remove the shelf of a run that is over."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # on a shelf in memory nobody may find it otherwise
            (self.folder.parent / DIRECTORY).unlink(missing_ok=True)
            self.folder.parent.rmdir()

    def parts(self, entry: Entry) -> dict[str, Path]:
        """Return the folders of an entry by the name of the file that each has."""
        folder = self.folder / f"{entry[0]}.{entry[1]:08d}"
        return {f"{p.parent.name}.safetensors": p.parent for p in sorted(folder.glob(f"rank*/{NAME}"))}

    def entries(self) -> list[Entry]:
        """Return what was left here."""
        names = [p.name.partition(".") for p in self.folder.glob("*.*") if p.is_dir()]
        return sorted((start, int(calls)) for start, _, calls in names)


@attrs.frozen(eq=False)
class Pieces:
    """The newest state that lies on the shelves of the nodes that are there, from the point of view of a rank."""

    shelf: Shelf
    everyone: Axis  # all ranks, also those that will hold nothing of the state
    entry: Entry
    shelves: list[str]  # the id of each rank's shelf
    files: dict[str, list[str]]  # the shelves that have each file
    manifests: list[Manifest]

    @property
    def calls(self) -> int:
        """The calls that were made."""
        return self.entry[1]

    @property
    def made(self) -> str:
        """When the state was made: ISO 8601, in UTC."""
        return min(manifest.saved for manifest in self.manifests)

    @property
    def extra(self) -> dict[str, Any]:
        """What else a rank has left."""
        return next((manifest.extra for manifest in self.manifests if manifest.extra), {})

    @classmethod
    def newest(cls, shelf: Shelf, everyone: Axis, after: int) -> Pieces | None:
        """Return the newest state of more than `after` calls that the shelves cover, None if there is none.

        All ranks call it, and get the same. A part whose manifest cannot be read counts as lost, and is printed.
        """
        ranks = Ranks(everyone if everyone.size > 1 else None, "fds.elastic.run", everyone.index)
        with ranks.together() as exchange:
            exchange.mine = [shelf.id, [entry for entry in shelf.entries() if entry[1] > after]]
        shelves = [id for id, _ in exchange.all]
        entries = {(start, calls) for _, entries in exchange.all for start, calls in entries}
        for entry in sorted(entries, key=lambda entry: (-entry[1], entry[0])):
            with ranks.together() as exchange:
                leads = shelves.index(shelf.id) == everyone.index
                parts = shelf.parts(entry) if leads else {}
                exchange.mine = {file: (folder / NAME).read_text() for file, folder in parts.items()}
            files, manifests = dict[str, list[str]](), list[Manifest]()
            texts = {file: text for texts in exchange.all for file, text in texts.items()}
            for file in sorted(texts):
                try:
                    manifests.append(parse_manifest(texts[file], f"{shelf.folder}: {file}"))
                except StorageError as error:  # on all ranks alike, which have the same text
                    if everyone.index == 0:
                        print(f"fds: a part of the state in memory is left out: {error}", file=sys.stderr)
                    continue
                files[file] = [id for id, texts in zip(shelves, exchange.all, strict=True) if file in texts]
            for manifest in manifests:
                check_parts_agree(manifest, manifests[0], str(manifest.part), str(manifests[0].part))
            if manifests and all(_covers(leaf) for leaf in merge(manifests).leaves.values()):
                return cls(shelf, everyone, entry, shelves, files, manifests)
        return None

    def bring(self, wanted: Mapping[str, LeafPart] | None = None) -> Manifest:
        """Bring the chunks over that this node's ranks need, and return the manifest of what the node has then.

        All ranks call it; `wanted` is what this rank will hold, None for nothing. Raises `StorageError`, on every rank,
        if a node cannot write what is brought.
        """
        mine = self.shelf.id
        near = {file for file, ids in self.files.items() if mine in ids}
        merged = merge(self.manifests, near)
        chunks = ((c, size) for c, size in _needed(merged, wanted or {}) if c.file not in near)
        needs = sorted({(c.file, c.offset): size for c, size in chunks}.items())
        asked = self.everyone.exchange([[*key, size] for key, size in needs], "pieces that are needed")
        bring = dict[str, dict[Key, int]]()  # by shelf: chunks, and their sizes in bytes
        for id, rows in zip(self.shelves, asked, strict=True):
            bring.setdefault(id, {}).update({(file, offset): size for file, offset, size in rows})
        failures = [self._carry(id, sorted(bring[id].items())) for id in dict.fromkeys(self.shelves)]
        with Ranks(
            self.everyone if self.everyone.size > 1 else None, "fds.elastic.run", self.everyone.index
        ).together():
            for error in filter(None, failures):
                raise error
        at, placed = len(BROUGHT), dict[Key, int]()
        for key, size in sorted(bring[mine].items()):
            placed[key] = at
            at += size
        moved = lambda c: attrs.evolve(c, file=_brought(mine), offset=placed[c.file, c.offset])
        leaves = {
            name: attrs.evolve(leaf, chunks=tuple(moved(c) if (c.file, c.offset) in placed else c for c in leaf.chunks))
            for name, leaf in merged.leaves.items()
        }
        files = merged.files | {_brought(mine): File(at, writer.checksum(BROUGHT))}
        return attrs.evolve(merged, leaves=leaves, files=files)

    def load(self, step: Step, params: Any) -> State:
        """Return the state; the ranks of the step call it, while the others call `bring`."""
        ranks = Ranks.of(step, "fds.elastic.run")
        with ranks.together():
            wanted = parts_of(step.structure(params), ranks)
        manifest = self.bring(wanted)
        with ranks.together():
            parts = self.shelf.parts(self.entry)
            folders = [OpenFolder.of(p) for p in (*parts.values(), self._folder) if p.is_dir()]
        return fill(save_source(manifest, folders), step, params, MatchOptions(), ranks)

    @property
    def _folder(self) -> Path:
        return self.shelf.folder / f"{self.entry[0]}.{self.entry[1]:08d}"

    def _carry(self, id: str, chunks: list[tuple[Key, int]]) -> OSError | None:
        """Send chunks to the first rank of a node, which writes them to one file. All ranks call it.

        Returns what kept this rank from reading or writing: the messages go on, or others would wait for them.
        """
        to, rank, failed = self.shelves.index(id), self.everyone.index, None
        if rank == to and chunks:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / _brought(id)).write_bytes(BROUGHT)
            except OSError as error:
                failed = error
        end = len(BROUGHT)
        for (name, offset), size in chunks:
            source = self.shelves.index(self.files[name][0])
            if rank == source:
                data = torch.zeros(size, dtype=torch.uint8, device="cpu")
                try:
                    with open(self.shelf.parts(self.entry)[name] / name, "rb") as part:
                        part.seek(offset)
                        part.readinto(data.numpy().data)  # compared with its checksum where it is read
                except OSError as error:
                    failed = error
                self.everyone.start_send(data.to(self.everyone.device), to).wait()
            if rank == to:
                there = torch.empty(size, dtype=torch.uint8, device=self.everyone.device)
                self.everyone.start_recv(there, source).wait()
                if failed is None:
                    try:
                        with open(self._folder / _brought(id), "r+b") as file:
                            write_at(file.fileno(), as_bytes(there.cpu()), end)
                    except OSError as error:
                        failed = error
            end += size
        return failed


def _remove_of_gone_directories(root: Path) -> None:
    """Remove the shelves of this user whose directory was removed, or they would stay in memory until a reboot."""
    for place in root.glob(f"fds-{os.getuid()}-*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            dir = Path((place / DIRECTORY).read_text())
            if not dir.exists() and dir.parent.is_dir():  # or a file system may just not be there
                shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _turn(claim: Path) -> Iterator[Path]:
    """Wait until no other rank of this node writes what `claim` stands for: one that dies writes nothing to its end.

    One that hangs is not waited for longer than `PATIENCE`; it is then left twice.
    """
    end = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as locks:
        while time.monotonic() < end:
            try:
                locks.enter_context(lock_file(claim.with_name(f"{claim.name}.lock")))
                break
            except BlockingIOError:
                time.sleep(0.01)
        yield claim


def _brought(id: str) -> str:
    return f"brought-{hashlib.blake2b(id.encode(), digest_size=8).hexdigest()}.safetensors"


def _needed(manifest: Manifest, wanted: Mapping[str, LeafPart]) -> Iterable[tuple[Chunk, int]]:
    """Yield the chunks that have elements of parts, and their sizes in bytes."""
    for name, part in wanted.items():
        leaf = manifest.leaves.get(name) or manifest.leaves.get(nearest_version(name, manifest.leaves))
        if leaf is None:
            continue  # which `fill` says
        itemsize, whole = DTYPES[leaf.dtype].itemsize, boxes.whole(leaf.shape)
        if part.shape == leaf.shape:
            boxed = part.by_box(part.tensor.reshape(-1) if part.has_boxes else part.tensor)
            # of an empty part the file of the first element is looked at, as `Source.read` says
            wants = [boxes.rectangles(box or whole, start, start + max(x.numel(), 1)) for box, start, x in boxed]
        else:  # terms of a sum, of which there were more or fewer
            wants = [boxes.rectangles(whole, 0, boxes.numel(whole))]
        for placed in placed_chunks(leaf):
            if any(boxes.shares(want, placed.rectangles) for want in wants):
                yield placed.chunk, placed.chunk.length * itemsize


def _covers(leaf: SavedLeaf) -> bool:
    """Return whether chunks, of boxes that are apart, have all elements of a leaf."""
    whole, count, ends = boxes.whole(leaf.shape), 0, dict[Box, int]()
    for chunk in leaf.chunks:
        box = chunk.box or whole
        count += max(0, chunk.end - max(chunk.start, ends.get(box, 0)))
        ends[box] = max(chunk.end, ends.get(box, 0))
    return count == boxes.numel(whole)


def _digest(parts: Mapping[str, LeafPart]) -> str:
    """Return what tells from each other ranks that hold other elements."""
    pieces = [(piece.name, piece.box, piece.start, piece.tensor.numel()) for piece in all_pieces(parts)]
    return hashlib.blake2b(repr(pieces).encode(), digest_size=16).hexdigest()


def _boot() -> str:
    """Return what tells this node from others: containers of one node have it in common, and other file systems."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename
