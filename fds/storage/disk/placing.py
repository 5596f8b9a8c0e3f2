"""Publish exported files under their names, all of them or none.

They are written into a hidden folder beside their places. Files that they replace are moved there first, beginning with
the index, so that readers never find a mixture of two exports; then the new files are renamed, the index last. Other
files with them, such as a configuration, are set aside after the weights and renamed before them. A single file is
replaced by one rename. Files that a killed export had moved away stay in its hidden folder until the next export is
complete.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fds.errors import StorageError
from fds.media.locks import hold_lock
from fds.storage.disk import files
from fds.storage.disk.files import hold_alone, refusal, sync
from fds.storage.format.manifest import NAME

INDEX = "model.safetensors.index.json"
write_errors = functools.partial(files.write_errors, work="export")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@contextlib.contextmanager
def replace_files(folder: Path, names: list[str]) -> Iterator[Path]:
    """Yield a hidden folder for files of these names, and move them to `folder` when the block ends without an error.

    Other files that are there at the end are moved with them. If they are a model's files, with names as in `_WEIGHTS`,
    all earlier such files are removed. Raises `StorageError` for errors of the file system, for another running export
    to these names, and for a folder under one of the names.
    After any error existing files are unchanged.
    """
    stem = "model" if _WEIGHTS.fullmatch(names[0]) else names[0]
    with write_errors(folder), contextlib.ExitStack() as failing:
        for missing in reversed([p for p in (folder, *folder.parents) if not p.exists()]):
            failing.callback(_remove_if_empty, missing)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / NAME).exists():
            raise StorageError(
                "this is the folder of a save, to which nothing is exported", where=str(folder), want="another path"
            )
        with _hidden_folder(folder / f".{stem}.exporting") as hidden:
            yield hidden
            beside = [entry.name for entry in os.scandir(hidden) if entry.is_file() and entry.name not in names]
            _put_in_place(folder, hidden, names, sorted(beside))
        failing.pop_all()


def _put_in_place(folder: Path, hidden: Path, names: list[str], beside: list[str]) -> None:
    weights = bool(_WEIGHTS.fullmatch(names[0]))
    here = os.listdir(folder)
    old = sorted((n for n in here if n == names[0] or (weights and _WEIGHTS.fullmatch(n))), reverse=True)
    old += [name for name in beside if name in here]
    for name in old:
        if not (folder / name).is_file():
            where, want, hint = str(folder / name), "a file or nothing", "choose another path"
            raise refusal("what exists under the name of a file is not a file", where, want=want, hint=hint)
    aside = Path(tempfile.mkdtemp(prefix="old.", dir=hidden))
    moved, new = [], []
    try:
        for name in old:  # the index first
            _set_aside(folder / name, aside / name, stays=old == names)
            moved.append(name)
        sync(folder)
        for name in [*beside, *names]:
            os.rename(hidden / name, folder / name)
            new.append(name)
        sync(folder)
    except BaseException:
        for name in new:
            if name not in moved:
                os.unlink(folder / name)
        for name in reversed(moved):
            os.replace(aside / name, folder / name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside / name)  # renaming one of two links to the same file leaves both
        raise
    for left in hidden.glob("old.*"):
        shutil.rmtree(left, ignore_errors=True)


def _set_aside(path: Path, aside: Path, stays: bool) -> None:
    """Keep a file that will be replaced, also in its own place if it `stays` until then."""
    if stays:
        try:
            return os.link(path, aside, follow_symlinks=False)
        except OSError:
            pass  # a file system without links
    os.rename(path, aside)


@contextlib.contextmanager
def _hidden_folder(hidden: Path) -> Iterator[Path]:
    """Yield a hidden folder without files, locked; the kernel releases the lock when the process dies."""
    hidden.mkdir(exist_ok=True)
    try:
        fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        _remove_if_empty(hidden)
        raise
    with hold_alone(hold_lock(fd), "export", hidden.parent):
        if not os.path.samestat(os.fstat(fd), os.stat(hidden)):
            raise FileNotFoundError(0, "another export has just ended here: try again", str(hidden))
        _clear(hidden)
        try:
            yield hidden
        finally:
            _clear(hidden)
            _remove_if_empty(hidden)


def _clear(hidden: Path) -> None:
    """Remove files and empty folders; a folder with files holds those that could not be restored."""
    for entry in list(os.scandir(hidden)):
        if entry.is_dir(follow_symlinks=False):
            _remove_if_empty(Path(entry.path))
        else:
            os.unlink(entry.path)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)
