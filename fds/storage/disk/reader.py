"""Read the bytes of a save's files, and check that they are those that were written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import attrs
import xxhash
from torch import Tensor

from fds.errors import StorageError
from fds.storage.disk import writer
from fds.storage.disk.files import OpenFolder, hint, refusal
from fds.storage.format.manifest import File

MOST = 64  # files that are open at a time

_HUGE = 2 * 2**20  # bytes of a huge page
_CHANGED = "a tensor file was changed after it was written"
_LIBC = ctypes.CDLL(None)


@attrs.frozen(eq=False)
class Files:
    """The files of a save, opened when first read; the last `MOST` stay open. For one thread at a time.

    Files are read, not mapped: access to a mapping of a file that was truncated kills the process.
    """

    folders: Mapping[str, OpenFolder]  # the folder of each, by name
    files: Mapping[str, File]  # size and checksum of each, by name
    verify: bool = True  # whether bytes that are read are compared with their checksums
    _open: OrderedDict[str, int] = attrs.field(factory=OrderedDict, init=False)  # least recently used first
    _data: dict[str, int] = attrs.field(factory=dict, init=False)  # first byte of data, for checked headers

    def read(self, file: str, offset: int, out: Tensor, checksum: str, where: str) -> None:
        """Fill `out`, a contiguous CPU tensor (num_bytes,) uint8, with a file's bytes from `offset` on.

        `checksum` is that of the bytes, `where` names them in errors. Raises `StorageError` if the file is missing, not
        a regular file, of another size or header, if the bytes belong to its header, or if a byte differs.
        """
        fd = self._descriptor(file)
        if offset < self._data[file]:
            want = f"{self._data[file]} or more"
            raise refusal("a chunk inside the header of its file", where, f"byte {offset}", want, "load another tag")
        data = out.numpy().data
        _fill(fd, data, offset, where)
        if self.verify and (got := writer.checksum(data)) != checksum:
            raise refusal(_CHANGED, where, got, checksum, "a byte flipped on the disk or on the way; load another tag")

    def check_file(self, file: str) -> None:
        """Raise `StorageError` if a file is missing, not a regular file, or of another size or header."""
        self._descriptor(file)

    def close(self) -> None:
        """Close all open files, and the folders."""
        while self._open:
            os.close(self._open.popitem()[1])
        for folder in self.folders.values():
            folder.close()

    def _descriptor(self, file: str) -> int:
        """Return the descriptor of a file, whose size and header have been checked."""
        fd = self._open.get(file)
        if fd is not None:
            self._open.move_to_end(file)
            return fd
        while len(self._open) >= MOST:
            os.close(self._open.popitem(last=False)[1])
        folder = self.folders[file]
        fd = self._open[file] = _open_file(folder, file, self.files[file].bytes)
        if file not in self._data:
            try:
                self._data[file] = _check_header(fd, folder.path / file, self.files[file])
            except BaseException:
                os.close(self._open.pop(file))
                raise
        return fd

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    __del__ = close


def touch_fresh(x: Tensor) -> None:
    """Request huge pages for a contiguous CPU tensor that was not written to yet.

    Reading into fresh memory is bound by page faults: 1.9 GB/s with small pages, 7.5 with huge ones.
    """
    start, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if x.device.type == "cpu" and last - first >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)  # errors are harmless


def _open_file(folder: OpenFolder, name: str, size: int) -> int:
    path = folder.path / name
    try:
        fd = folder.open(name)
    except FileNotFoundError as error:
        raise StorageError("a tensor file is missing", where=str(path), hint=hint(error)) from error
    except OSError as error:
        link = error.errno == errno.ELOOP
        raise _unreadable(
            path, "a symbolic link" if link else str(error.strerror), "a regular file", hint(error)
        ) from error
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise _unreadable(path, "not a regular file", "a regular file")
        if about.st_size != size:
            raise _unreadable(path, f"{about.st_size} bytes", f"{size} bytes")
        # One reader in the order of the file, with the kernel's read-ahead: 2.4 to 2.8 GB/s from a cold cache, where
        # two readers reached 1.0; 7.5 from a warm one, where two would reach 13.8.
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_header(fd: int, path: Path, want: File) -> int:
    """Return where the data after the header begins. Raises `StorageError` for another header than was written."""
    length = bytearray(8)
    _fill(fd, memoryview(length)[: min(want.bytes, 8)], 0, str(path))
    end = 8 + int.from_bytes(length, "little")
    if not 8 < end <= want.bytes:
        raise _unreadable(path, f"a header up to byte {end}", f"one within its {want.bytes} bytes")
    hashed = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(end, writer.BLOCK)))
    for start in range(0, end, writer.BLOCK):
        part = buffer[: end - start]
        _fill(fd, part, start, str(path))
        hashed.update(part)
    if (got := f"xxh3:{hashed.intdigest():016x}") != want.header:
        raise StorageError(_CHANGED, where=f"{path}: its header", got=got, want=want.header, hint="load another tag")
    return end


def _fill(fd: int, data: memoryview, offset: int, where: str) -> None:
    done = 0
    while done < len(data):
        try:
            count = os.preadv(fd, [data[done:]], offset + done)
        except OSError as error:
            raise _unreadable(where, str(error.strerror), f"{len(data)} bytes") from error
        if not count:
            raise _unreadable(where, f"{offset + done} bytes", f"{offset + len(data)} bytes")
        done += count


def _unreadable(where: Path | str, got: str, want: str, hint: str = "") -> StorageError:
    return StorageError(
        "a tensor file cannot be read",
        where=str(where),
        got=got,
        want=want,
        hint=hint or "it was truncated or changed after it was saved; load another tag",
    )
