"""Local: saves of ranks without a common file system, each in a directory of its own.

`dir/rank0`, `dir/rank1`, ... are directories of runs, in whose manifests a rank lists all leaves and the chunks that it
held. Whoever sees several of them reads them as one; with all of them in one place, any topology can load the run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

import attrs

from fds.errors import StorageError
from fds.storage.draft import directory
from fds.storage.folders import find, tags
from fds.storage.manifest import Chunk, Manifest, read_manifest
from fds.storage.source import Source, saved
from fds.storage.together import Ranks


def opened(dir: Path, tag: str | None, ranks: Ranks, verify: bool) -> Source:
    """Return the save under a tag, by default the last that all ranks have; all of them call this.

    Where parts of all of a save's ranks are in sight, it is preferred: it is complete.

    Raises `StorageError`, on every rank, if there is none.
    """
    with ranks.together() as said:
        seen = _seen(dir, directory(dir, ranks, local=True))
        said.mine = {tag: [found[0][1].saved, _indices(found)] for tag, found in seen.items()}
    told = [{tag: when for tag, (when, _) in theirs.items()} for theirs in said.all]
    common = {tag: when for tag, when in told[0].items() if all(theirs.get(tag) == when for theirs in told)}
    if not common or tag not in (None, *common):
        with ranks.together():
            raise StorageError(
                "there is no save that all ranks have" + (f" under {tag!r:.80}" if tag else ""), where=str(dir),
                got=", ".join(sorted(seen)) or "nothing here", want=", ".join(sorted(common)) or "a tag on every rank",
            )  # fmt: skip
    whole = [t for t in common if len({i for theirs in said.all for i in theirs[t][1]}) == _num_ranks(seen[t])]
    chosen = max(whole or common, key=common.__getitem__) if tag is None else tag
    found = [(folder, manifest) for folder, manifest in seen[chosen] if manifest.saved == common[chosen]]
    return saved(_merged([manifest for _, manifest in found]), [folder for folder, _ in found], verify=verify)


def _seen(dir: Path, own: Path) -> dict[str, list[tuple[Path, Manifest]]]:
    """Return the folders and manifests of every tag that this rank sees, its own first."""
    runs = [p for p in sorted(dir.glob("rank*")) if re.fullmatch(r"rank\d+", p.name) and p != own]
    seen: dict[str, list[tuple[Path, Manifest]]] = {}
    for run in [own, *runs]:
        for tag in tags(run):
            folder = find(run, tag)
            with contextlib.suppress(StorageError):  # of one of many; if it is needed, it is missing
                seen.setdefault(tag, []).append((folder, read_manifest(folder)))
    return {tag: found for tag, found in seen.items() if found}


def _indices(found: list[tuple[Path, Manifest]]) -> list[int]:
    """Return which ranks of a save are here, of the one that is found first."""
    return [(one.part or (0, 1))[0] for _, one in found if one.saved == found[0][1].saved]


def _num_ranks(found: list[tuple[Path, Manifest]]) -> int:
    return (found[0][1].part or (0, 1))[1]


def _merged(manifests: list[Manifest]) -> Manifest:
    """Return the manifest of all that is here."""
    first = manifests[0]
    leaves = {
        name: attrs.evolve(leaf, chunks=_increasing(c for one in manifests for c in one.leaves[name].chunks))
        for name, leaf in first.leaves.items()
    }
    return attrs.evolve(first, files={n: f for one in manifests for n, f in one.files.items()}, leaves=leaves)


def _increasing(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Return the chunks that are needed of those that overlap, in order: each ends behind the one before it."""
    found: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: (c.start, -c.length, c.file)):
        if not found or chunk.start + chunk.length > found[-1].start + found[-1].length:
            found.append(chunk)
    return tuple(found)
