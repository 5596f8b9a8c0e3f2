"""Local: saves of ranks without a common file system, each in a directory of its own.

`dir/rank0`, `dir/rank1`, ... are directories of runs, in whose manifests a rank lists all leaves and the chunks that it
held. Whoever sees several of them reads them as one; with all of them in one place, any topology can load the run.
A tag that was not replaced on all ranks is there twice on some: a save is known by its tag and when it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import attrs

from fds.collectives import fingerprint
from fds.errors import StorageError
from fds.storage.disk.folders import latest, tags, versions
from fds.storage.disk.held import Held
from fds.storage.format.manifest import Chunk, Manifest, read_manifest
from fds.storage.ranks.draft import directory
from fds.storage.ranks.together import Ranks
from fds.storage.source import Source, saved

Save = tuple[str, str]  # its tag, and when it was made
Found = list[tuple[Path, Manifest]]  # the folders of one save, and their manifests


def opened(dir: Path, tag: str | None, ranks: Ranks, verify: bool) -> Source:
    """Return the save under a tag, by default the last that all ranks have; all of them call this.

    Where parts of all of a save's ranks are in sight, it is preferred: it is complete.

    Raises `StorageError`, on every rank, if there is none, or if a newer one may be there and cannot be read.
    """
    with ranks.together() as said:
        seen = _seen(dir, directory(dir, ranks, local=True), tag)
        said.mine = [[*save, _indices(found)] for save, found in seen.items()]
    told = [{(tag, when): indices for tag, when, indices in theirs} for theirs in said.all]
    common = [save for save in told[0] if all(save in theirs for theirs in told)]
    asked = [save for save in common if tag in (None, save[0])]
    if not asked:
        with ranks.together():
            raise StorageError(
                "there is no save that all ranks have" + (f" under {tag!r:.80}" if tag else ""), where=str(dir),
                got=_listed(seen) or "nothing here", want=_listed(common) or "a tag on every rank",
            )  # fmt: skip
    whole = [save for save in asked if len({i for theirs in told for i in theirs[save]}) == _num_ranks(seen[save])]
    chosen = max(whole or asked, key=lambda save: save[1])
    with ranks.together() as said:
        held = [Held.of(folder) for folder, _ in seen[chosen]]
        manifests = [read_manifest(folder) for folder in held]
        for folder, manifest in zip(held, manifests, strict=True):
            if manifest.saved != chosen[1]:
                raise StorageError("the save was replaced while it was being opened", where=str(folder.path),
                                   hint="load again")  # fmt: skip
            _refuse_other(manifest, manifests[0], str(folder.path), str(held[0].path))
        said.mine = _in_common(manifests[0])
    ranks.refuse_different(said.all)
    return saved(_merged(manifests), held, verify=verify)


def _seen(dir: Path, own: Path, asked: str | None) -> dict[Save, Found]:
    """Return every save of which this rank sees a part, its own first.

    Raises `StorageError` for a manifest that cannot be read, of the tag that is asked for, or of what may be the last.
    """
    runs = [p for p in sorted(dir.glob("rank*")) if re.fullmatch(r"rank\d+", p.name) and p != own]
    seen: dict[Save, Found] = {}
    for run in [own, *runs]:
        for tag in tags(run):
            for folder in versions(run, tag):
                try:
                    manifest = read_manifest(folder)
                except StorageError:
                    if asked == tag or (asked is None and (run == own or _may_be_last(run, tag))):
                        raise
                    continue  # of one of many; if it is needed, it is missing
                seen.setdefault((tag, manifest.saved), []).append((folder, manifest))
    return seen


def _may_be_last(run: Path, tag: str) -> bool:
    """Return whether a tag is the last of a rank's run, or it is not known which is."""
    try:
        return latest(run) in (tag, "")
    except (OSError, UnicodeError):
        return True


def _in_common(manifest: Manifest) -> dict[str, str]:
    """Return what the parts of one save all say, as texts."""
    leaves = {f"leaf {name} of the save": str(leaf) for name, leaf in manifest.leaves.items()}
    count = f"{len(leaves)}, {fingerprint(sorted(leaves))}"
    ranks = str((manifest.part or (0, 1))[1])
    return {"calls of the save": str(manifest.calls), "ranks of the save": ranks, "leaves of the save": count, **leaves}


def _refuse_other(manifest: Manifest, first: Manifest, where: str, there: str) -> None:
    """Raise `StorageError` for a part that says something else than the first of what all of them say."""
    got, want = _in_common(manifest), _in_common(first)
    for what, text in want.items():
        if got.get(what, "nothing") != text:
            raise StorageError(f"the parts of this save do not agree on the {what}", where=where,
                               got=got.get(what, "nothing"), want=f"{text}, as in {there}",
                               hint="is one of the folders of another run?")  # fmt: skip


def _listed(saves: Iterable[Save]) -> str:
    return ", ".join(sorted({tag for tag, _ in saves}))


def _indices(found: Found) -> list[int]:
    """Return which ranks of a save are here."""
    return [(manifest.part or (0, 1))[0] for _, manifest in found]


def _num_ranks(found: Found) -> int:
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
