"""Placing: how exported files appear under their names, all of them or none.

They are written into a hidden folder beside their places. What they replace moves there first, the index before all
else, so that nobody finds half of one export and half of another; then they are renamed, the index last. A lone file
is replaced in one rename. What a killed export had moved away stays in its hidden folder until the next one is done.
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
from fds.storage.disk import folders
from fds.storage.disk.folders import sync
from fds.storage.disk.locks import locked
from fds.storage.format.manifest import NAME

INDEX = "model.safetensors.index.json"
refusing = functools.partial(folders.refusing, work="export")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@contextlib.contextmanager
def placed(folder: Path, names: list[str]) -> Iterator[Path]:
    """Give a hidden folder for new files of these names, and put them into `folder` when the block ends well.

    Where they are a model's files, as `_WEIGHTS` names them, all such files that were there go. Raises `StorageError`
    for what the file system refuses, for another export to these names that is running, and for what is in the way
    and no file. After any error what was there is as it was.
    """
    stem = "model" if _WEIGHTS.fullmatch(names[0]) else names[0]
    with refusing(folder), contextlib.ExitStack() as failing:
        for missing in reversed([p for p in (folder, *folder.parents) if not p.exists()]):
            failing.callback(_remove_if_empty, missing)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / NAME).exists():
            raise StorageError("this is the folder of a save, and nothing is exported into it", where=str(folder),
                               want="another path")  # fmt: skip
        with _held(folder / f".{stem}.exporting") as hidden:
            yield hidden
            _put_in_place(folder, hidden, names)
        failing.pop_all()


def _put_in_place(folder: Path, hidden: Path, names: list[str]) -> None:
    weights = bool(_WEIGHTS.fullmatch(names[0]))
    old = [n for n in os.listdir(folder) if n == names[0] or (weights and _WEIGHTS.fullmatch(n))]
    for name in old:
        if not (folder / name).is_file():
            raise StorageError("what is in the place of a file is none", where=str(folder / name),
                               want="a file or nothing", hint="choose another path")  # fmt: skip
    aside = Path(tempfile.mkdtemp(prefix="old.", dir=hidden))
    moved, new = [], []
    try:
        for name in sorted(old, reverse=True):  # the index first
            _set_aside(folder / name, aside / name, stays=old == names)
            moved.append(name)
        sync(folder)
        for name in names:
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
                os.unlink(aside / name)  # of two links to one file, replacing leaves both
        raise
    for left in hidden.glob("old.*"):
        shutil.rmtree(left, ignore_errors=True)


def _set_aside(path: Path, aside: Path, stays: bool) -> None:
    """Keep a file that is about to be replaced, in its own place too if it `stays` until then."""
    if stays:
        try:
            return os.link(path, aside, follow_symlinks=False)
        except OSError:
            pass  # a file system without links
    os.rename(path, aside)


@contextlib.contextmanager
def _held(hidden: Path) -> Iterator[Path]:
    """Give a hidden folder without files that nobody else holds; the kernel frees it when the process dies."""
    hidden.mkdir(exist_ok=True)
    try:
        fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        _remove_if_empty(hidden)
        raise
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(fd))
        except BlockingIOError:
            raise StorageError("another export is writing here", where=str(hidden.parent),
                               want="one export at a time") from None  # fmt: skip
        if not os.path.samestat(os.fstat(fd), os.stat(hidden)):
            raise FileNotFoundError(0, "another export has just ended here: try again", str(hidden))
        _empty(hidden)
        try:
            yield hidden
        finally:
            _empty(hidden)
            _remove_if_empty(hidden)


def _empty(hidden: Path) -> None:
    """Remove files, and folders without any: one with files holds what could not be put back."""
    for entry in list(os.scandir(hidden)):
        if entry.is_dir(follow_symlinks=False):
            _remove_if_empty(Path(entry.path))
        else:
            os.unlink(entry.path)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)
