"""Saves of ranks without a common file system, each in a directory of its own.

`dir/rank0`, `dir/rank1`, ... are directories of runs. The manifest of each lists all leaves, and the chunks that the
rank held. A process that can see several of them reads them as one save; with all of them in one place, any topology
can load the run. A tag that was not replaced on all ranks has two versions on some: a save is identified by tag and
time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

import attrs

from fds.collectives import fingerprint
from fds.errors import StorageError
from fds.storage.disk.files import OpenFolder, refusal
from fds.storage.disk.folders import check_run_to_load, latest, tags, versions
from fds.storage.format import boxes
from fds.storage.format.manifest import Chunk, Manifest, read_manifest
from fds.storage.ranks.draft import directory
from fds.storage.ranks.exchange import Ranks
from fds.storage.source import Source, save_source

SaveId = tuple[str, str]  # tag and time
SaveParts = list[tuple[Path, Manifest]]  # the folders of one save, and their manifests


def open_local(dir: Path, tag: str | None, ranks: Ranks, verify: bool, take_over: bool) -> Source:
    """Open the save under a tag, by default the last that all ranks have; all of them call this.

    A save of which the parts of all ranks are visible is preferred, because it is complete.

    Raises `StorageError`, on every rank, if there is none, or if there may be a newer one that cannot be read.
    """
    with ranks.together() as exchange:
        visible_saves = _visible_saves(dir, directory(dir, ranks, local=True), tag)
        exchange.mine = [[*save, [_part(m)[0] for _, m in parts]] for save, parts in visible_saves.items()]
    visible = [{(tag, when): indices for tag, when, indices in theirs} for theirs in exchange.all]
    common = [save for save in visible[0] if all(save in theirs for theirs in visible)]
    requested = [save for save in common if tag in (None, save[0])]
    if not requested:
        with ranks.together():
            got, want = _listed(visible_saves) or "nothing here", _listed(common) or "a tag on every rank"
            raise refusal(
                "there is no save that all ranks have" + (f" under {tag!r:.80}" if tag else ""), str(dir), got, want
            )
    ranks_of = {save: {i for theirs in visible for i in theirs[save]} for save in requested}
    whole = [save for save in requested if len(ranks_of[save]) == _part(visible_saves[save][0][1])[1]]
    chosen = max(whole or requested, key=lambda save: save[1])
    with ranks.together() as exchange:
        folders = [OpenFolder.of(folder) for folder, _ in visible_saves[chosen]]
        manifests = [read_manifest(folder) for folder in folders]
        for folder, manifest in zip(folders, manifests, strict=True):
            if manifest.saved != chosen[1]:
                raise refusal("the save was replaced while it was being opened", str(folder.path), hint="load again")
            check_parts_agree(manifest, manifests[0], str(folder.path), str(folders[0].path))
        if not take_over:
            check_run_to_load(dir, folders[0].path, manifests[0].run)
        merged, exchange.mine = merge(manifests), _common_texts(manifests[0])
    ranks.check_equal(exchange.all)
    return save_source(merged, folders, verify=verify)


def _visible_saves(dir: Path, mine: Path, requested: str | None) -> dict[SaveId, SaveParts]:
    """Return every save of which this rank can see a part, its own first.

    Raises `StorageError` for an unreadable manifest of the requested tag, or of a save that may be the last.
    """
    runs = [p for p in sorted(dir.glob("rank*")) if re.fullmatch(r"rank\d+", p.name) and p != mine]
    visible_saves: dict[SaveId, SaveParts] = {}
    for run in [mine, *runs]:
        for tag in tags(run):
            for folder in versions(run, tag):
                try:
                    manifest = read_manifest(folder)
                except StorageError:
                    if requested == tag or (requested is None and (run == mine or _may_be_last(run, tag))):
                        raise
                    continue  # if this part is needed, it will be missing
                visible_saves.setdefault((tag, manifest.saved), []).append((folder, manifest))
    return visible_saves


def _may_be_last(run: Path, tag: str) -> bool:
    """Return whether a tag is the last of a rank's run, or may be, where that is unknown."""
    try:
        return latest(run) in (tag, "")
    except (OSError, UnicodeError):
        return True


def _common_texts(manifest: Manifest) -> dict[str, str]:
    """Return what is equal in the manifests of all parts of a save, as texts by name."""
    leaves = {f"leaf {name} of the save": str(leaf) for name, leaf in manifest.leaves.items()}
    count = f"{len(leaves)}, {fingerprint(sorted(leaves))}"
    return {
        "run of the save": str(manifest.run),
        "calls of the save": str(manifest.calls),
        "ranks of the save": str(_part(manifest)[1]),
        "leaves of the save": count,
        **leaves,
    }


def check_parts_agree(manifest: Manifest, first: Manifest, where: str, there: str) -> None:
    """Raise `StorageError` for a part of another save than the first is of."""
    got, want = _common_texts(manifest), _common_texts(first)
    for what, text in want.items():
        if got.get(what, "nothing") != text:
            raise StorageError(
                f"the parts of this save do not agree on the {what}",
                where=where,
                got=got.get(what, "nothing"),
                want=f"{text}, as in {there}",
                hint="is one of the folders of another run?",
            )


def _part(manifest: Manifest) -> tuple[int, int]:
    return manifest.part or (0, 1)


def _listed(saves: Iterable[SaveId]) -> str:
    return ", ".join(sorted({tag for tag, _ in saves}))


def merge(manifests: list[Manifest], near: Collection[str] = ()) -> Manifest:
    """Return one manifest of the parts of a save; of equal chunks those in the files `near` are preferred.

    Raises `StorageError` where the parts are not of one save.
    """
    first = manifests[0]
    leaves = {
        name: attrs.evolve(leaf, chunks=_increasing((c for m in manifests for c in m.leaves[name].chunks), near))
        for name, leaf in first.leaves.items()
    }
    for name, leaf in leaves.items():
        if not boxes.apart({chunk.box or boxes.whole(leaf.shape) for chunk in leaf.chunks}):
            got, want = "boxes that share elements", "each element in one box"
            raise refusal("the parts of this save overlap", name, got, want, "is one of them of another run?")
    return attrs.evolve(first, files={n: f for manifest in manifests for n, f in manifest.files.items()}, leaves=leaves)


def _increasing(chunks: Iterable[Chunk], near: Collection[str]) -> tuple[Chunk, ...]:
    """Return those of overlapping chunks that are needed, in order: of each box, each ends after the one before."""
    needed: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: (*c.order(), -c.length, c.file not in near, c.file)):
        if not needed or chunk.box != needed[-1].box or chunk.end > needed[-1].end:
            needed.append(chunk)
    return tuple(needed)
