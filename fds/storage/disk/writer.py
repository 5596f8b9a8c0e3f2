"""Write memory, and extents of other files, to a file, durably and at the speed of the disk.

A file is a header followed by spans of memory or of files, in blocks of `BLOCK` bytes; a chunk is the part of one span
in one block, and has its own checksum. The processes of `fds.storage.disk.aside` run this file by its path. So it
imports only xxhash and few modules of the standard library: a process starts in 40 ms and holds 14 MB and two blocks.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import itertools
import json
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import xxhash

BLOCK = 8 * 2**20
ALIGN = 4096  # of offset, length and address in writes with O_DIRECT

Span = tuple[int, ...]  # address, bytes; or of a file: offset, bytes, descriptor
WrittenChunk = tuple[int, int, str]  # first byte in the file, bytes, checksum
Fetch = Callable[[Sequence[Span], int], None]  # copies spans, one after another, to an address

_DIRECT = getattr(os, "O_DIRECT", 0)
_LIBC = ctypes.CDLL(None, use_errno=True)
_NUM_SPANS = 1024  # the most in one call of the kernel

# Measured on two cores (500 MB, alternating, medians of 9 to 15): 3.0 to 3.7 GB/s with blocks of 8 MiB, one write at a
# time; blocks of 16 to 64 MiB, two or four writes at a time, and allocating the space first are within noise of that.
# Without huge pages 2.2 GB/s; fresh blocks in every call cost 5 to 20 ms. One thread that fetches and hashes beside one
# that writes reached 0.9 of the raw speed, two threads that do both in turn 0.8; a third block gained nothing.
_NUM_SLOTS = 2
_idle_slots: list[mmap.mmap] = []  # blocks that are not in use


def checksum(buffer: bytes | memoryview) -> str:
    """Return the checksum of contiguous bytes: 64-bit XXH3 with the prefix "xxh3:".

    >>> checksum(b"")
    'xxh3:2d06800538d394c2'
    """
    return f"xxh3:{xxhash.xxh3_64_intdigest(buffer):016x}"


def own_memory(spans: Sequence[Span], destination: int) -> None:
    """Copy spans of this process's memory consecutively to the address `destination`."""
    for address, nbytes, *_ in spans:
        ctypes.memmove(destination, address, nbytes)
        destination += nbytes


class OpenFiles:
    """The files that a process has open, by its descriptors: opened here once more, for reads of any alignment."""

    def __init__(self, pid: int | str = "self") -> None:
        self._pid = pid
        self._opened: dict[int, int] = {}
        self.refused = False  # whether the system forbids to open another process's

    def read(self, descriptor: int, offset: int, nbytes: int, destination: int) -> None:
        """Copy bytes to an address; the kernel is told not to keep them. Raises `OSError`."""
        if descriptor not in self._opened:
            self.refused = True
            self._opened[descriptor] = os.open(f"/proc/{self._pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            self.refused = False
        fd, done = self._opened[descriptor], 0
        data = memoryview((ctypes.c_char * nbytes).from_address(destination)).cast("B")
        while done < nbytes:
            count = os.preadv(fd, [data[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, "the file of the state ends early")
            done += count
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close what was opened."""
        while self._opened:
            os.close(self._opened.popitem()[1])


def memory_of(pid: int) -> Fetch:
    """Return a function that copies spans of another process's memory and raises `OSError`: EFAULT if unmapped."""
    read = _LIBC.process_vm_readv
    read.restype = ctypes.c_ssize_t
    read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]

    def fetch(spans: Sequence[Span], destination: int) -> None:
        for first in range(0, len(spans), _NUM_SPANS):
            batch = spans[first : first + _NUM_SPANS]
            wanted = sum(nbytes for _, nbytes in batch)
            local = array.array("Q", (destination, wanted))
            remote = array.array("Q", [number for span in batch for number in span])
            count = read(pid, local.buffer_info()[0], 1, remote.buffer_info()[0], len(batch), 0)
            if count != wanted:  # a short read met unmapped memory
                code = ctypes.get_errno() if count < 0 else errno.EFAULT
                raise OSError(code, f"{os.strerror(code)}, reading the memory of process {pid}")
            destination += wanted

    return fetch


def write(
    path: str | os.PathLike[str],
    header: bytes,
    spans: Sequence[Span],
    *,
    fetch: Fetch = own_memory,
    files: OpenFiles | None = None,
) -> list[list[WrittenChunk]]:
    """Write a header and the bytes of spans to a new file, durably, and return the chunks of each span in order.

    This thread fetches and hashes one block while another writes the previous one, with O_DIRECT where the file system
    supports it. Two blocks of memory are allocated, and kept for the next call. The spans must not change until this
    returns. An error leaves no file, thread or descriptor behind.

    Args:
        path: the file, which must not exist.
        header: the first bytes; their number is a multiple of `ALIGN`.
        spans: address and number of bytes of each, or offset, number of bytes and descriptor of a file; one without
            bytes has no chunks.
        fetch: copies from the memory of the addresses; by default this process's.
        files: of the descriptors; by default this process's. They are closed.

    Raises `ValueError` for any other length of the header, `OSError` with the path as its filename for other errors.
    """
    if len(header) % ALIGN:
        raise ValueError(f"the header has {len(header)} bytes, not a multiple of {ALIGN}")
    free, full, errors = queue.SimpleQueue(), queue.SimpleQueue(), []
    files = OpenFiles() if files is None else files
    slots = [_slot() for _ in range(_NUM_SLOTS)]
    for slot in slots:
        free.put(slot)
    chunks: list[list[WrittenChunk]] = [[] for _ in spans]
    writing = threading.Thread(target=_drain, args=(os.path.abspath(path), full, free, errors))
    writing.start()
    end = None
    try:
        for first, end_of_block, pieces in _blocks(len(header), spans):
            slot = free.get()
            if slot is None:
                break  # the other thread has failed
            data, at = memoryview(slot), len(header[first:end_of_block])
            data[:at] = header[first:end_of_block]
            _fetch(pieces, ctypes.addressof(ctypes.c_char.from_buffer(slot)) + at, fetch, files)
            for owner, (_, nbytes, *_) in pieces:
                chunks[owner].append((first + at, nbytes, checksum(data[at : at + nbytes])))
                at += nbytes
            full.put((data, first, at))
        else:
            end = len(header) + sum(span[1] for span in spans)
    except OSError as error:
        errors.append(error)
    finally:
        full.put(end)
        writing.join()
        files.close()
    _idle_slots[:] = slots
    for error in errors:
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise error
    return chunks


def _fetch(pieces: list[tuple[int, Span]], destination: int, fetch: Fetch, files: OpenFiles) -> None:
    """Copy the pieces of a block to an address, those of memory that follow one another together."""
    for in_memory, group in itertools.groupby((span for _, span in pieces), key=lambda span: len(span) == 2):
        spans = list(group)
        if in_memory:
            fetch(spans, destination)
            destination += sum(nbytes for _, nbytes in spans)
            continue
        for offset, nbytes, descriptor in spans:
            files.read(descriptor, offset, nbytes, destination)
            destination += nbytes


def _slot() -> mmap.mmap:
    try:
        return _idle_slots.pop()
    except IndexError:
        slot = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            slot.madvise(mmap.MADV_HUGEPAGE)
        return slot


def _blocks(header: int, spans: Sequence[Span]) -> Iterator[tuple[int, int, list[tuple[int, Span]]]]:
    """Yield the blocks of a file that begins with `header` bytes.

    A block is (first byte, end, pieces), a piece (index of the span, a part of it).
    """
    for end in range(BLOCK, header + 1, BLOCK):
        yield end - BLOCK, end, []
    at, pieces = header, []
    for owner, (address, left, *file) in enumerate(spans):
        while left:
            nbytes = min(left, BLOCK - at % BLOCK)
            pieces.append((owner, (address, nbytes, *file)))
            at, address, left = at + nbytes, address + nbytes, left - nbytes
            if at % BLOCK == 0:
                yield at - BLOCK, at, pieces
                pieces = []
    if at % BLOCK:
        yield at - at % BLOCK, at, pieces


def _drain(path: str | bytes, full: queue.SimpleQueue, free: queue.SimpleQueue, errors: list) -> None:
    """Create the file, write the blocks (slot, offset, length) of `full`, return slots to `free`, and None on an error.

    The last item of `full` is the length of the file, or None to give up, in which case the file is removed. Only this
    thread uses the descriptor, so that no interrupt can close it during a write.
    """
    made = whole = False
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        made = True
        try:
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, _DIRECT)  # not on opening, where an error would leave an empty file
            except OSError:
                pass  # a file system without direct writes
            while isinstance(block := full.get(), tuple):
                slot, first, nbytes = block
                _write_all(fd, memoryview(slot)[: -(-nbytes // ALIGN) * ALIGN], first)
                free.put(slot)
            if block is not None:
                os.ftruncate(fd, block)  # remove the padding of the last block
                os.fsync(fd)
        finally:
            os.close(fd)
        whole = block is not None
    except BaseException as error:
        errors.append(error)
        free.put(None)
    if made and not whole:
        try:
            os.unlink(path)
        except OSError:
            pass  # the earlier error is raised


def _write_all(fd: int, data: memoryview, place: int) -> None:
    while data:
        try:
            count = os.pwrite(fd, data, place)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)  # refused here by some file systems, or after a short write
            count = os.pwrite(fd, data, place)
        if not count:
            raise OSError(errno.EIO, "the file system wrote nothing")
        data, place = data[count:], place + count


def main() -> None:
    """Do the jobs on standard input, one per line, and answer each with a line, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        answer = json.dumps(_done(json.loads(line))).encode() + b"\n"
        try:
            while answer:
                answer = answer[os.write(sys.stdout.fileno(), answer) :]
        except BrokenPipeError:
            return  # the parent has ended


def _done(job: dict) -> dict | None:
    """Do a job and return its answer: the chunks or the error; None if its spans cannot be read from this process."""
    unread, read = [], memory_of(job["pid"])

    def fetch(spans: Sequence[Span], destination: int) -> None:
        try:
            read(spans, destination)
        except OSError as error:
            unread.append(error)
            raise

    files = OpenFiles(job["pid"])
    try:
        head = job["header"].encode("latin-1")
        return {"chunks": write(job["path"], head, job["spans"], fetch=fetch, files=files)}
    except OSError as error:
        return None if unread or files.refused else {"errno": error.errno, "strerror": error.strerror}


if __name__ == "__main__":
    main()
