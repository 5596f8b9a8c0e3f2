"""Memory by mmap(2), as addresses: of a file, and of none."""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE = 4096  # bytes; what addresses, offsets and lengths of direct I/O are multiples of

_LIBC = ctypes.CDLL(None, use_errno=True)
_ADDRESS, _SIZE, _INT, _OFFSET = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_MMAP = ctypes.CFUNCTYPE(_ADDRESS, _ADDRESS, _SIZE, _INT, _INT, _INT, _OFFSET, use_errno=True)(("mmap", _LIBC))
_MUNMAP = ctypes.CFUNCTYPE(_INT, _ADDRESS, _SIZE, use_errno=True)(("munmap", _LIBC))
_MADVISE = ctypes.CFUNCTYPE(_INT, _ADDRESS, _SIZE, _INT, use_errno=True)(("madvise", _LIBC))
_FIXED, _NORESERVE, _HUGEPAGE, _DONTNEED = 0x10, 0x4000, 14, 4
_FAILED = ctypes.c_void_p(-1).value


def pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


def map_file(fd: int, nbytes: int) -> int:
    """Map a file, readable and writable, shared with it; also beyond its end, where it may grow. Raises `OSError`."""
    return _mapped(None, nbytes, mmap.MAP_SHARED | _NORESERVE, fd)


def map_private(fd: int, address: int, nbytes: int) -> None:
    """Map a file over what is mapped there, so that writes reach nobody else. Raises `OSError`."""
    _mapped(address, nbytes, mmap.MAP_PRIVATE | _NORESERVE | _FIXED, fd)


def map_memory(nbytes: int) -> int:
    """Map fresh memory, of large pages where the system gives them; it is taken as it is touched. Raises `OSError`."""
    address = _mapped(None, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
    _MADVISE(address, nbytes, _HUGEPAGE)
    return address


def unmap(address: int, nbytes: int) -> None:
    """Give mapped memory back."""
    _MUNMAP(address, nbytes)


def drop(address: int, nbytes: int) -> None:
    """Let go of what was read of a mapped file through the mapping; that which was written stays in the page cache."""
    _MADVISE(address, nbytes, _DONTNEED)


def _mapped(address: int | None, nbytes: int, flags: int, fd: int) -> int:
    found = _MMAP(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found
