"""Write memory to a file, durably and as fast as the disk takes it.

A file is a header and spans of memory one after another, in blocks of `BLOCK` bytes; a chunk is the part of one span
in one block, and has its own checksum. The processes of `fds.storage.disk.aside` run this file by its path. So only the
standard library and xxhash are imported, and of the library little: one starts in 40 ms and holds 14 MB and two blocks.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
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
ALIGN = 4096  # of all that the disk takes without the kernel's copy: place in the file, length, memory

Span = tuple[int, int]  # address, bytes
Chunk = tuple[int, int, str]  # first byte in the file, bytes, checksum
Fetch = Callable[[Sequence[Span], int], None]  # copies spans, one after another, to an address

_DIRECT = getattr(os, "O_DIRECT", 0)
_LIBC = ctypes.CDLL(None, use_errno=True)
_NUM_SPANS = 1024  # that the kernel takes in one call

# Measured on two cores (500 MB, alternating, medians of 9 to 15): with blocks of 8 MiB, one write at a time, 3.0 to 3.7
# GB/s; of 16 to 64 MiB, two or four at a time, or with the space asked for before, within the noise of that. Blocks
# without huge pages fell to 2.2, blocks fresh in every call cost 5 to 20 ms. One thread that fetches and hashes beside
# one that writes came to 0.9 of the raw speed; two threads that do both in turn to 0.8; a third block added nothing.
_NUM_SLOTS = 2
_kept: list[mmap.mmap] = []  # blocks that no write is using


def checksum(buffer: bytes | memoryview) -> str:
    """Return the checksum of contiguous bytes: XXH3 of 64 bits, its name in front.

    >>> checksum(b"")
    'xxh3:2d06800538d394c2'
    """
    return f"xxh3:{xxhash.xxh3_64_intdigest(buffer):016x}"


def own_memory(spans: Sequence[Span], destination: int) -> None:
    """Copy spans of this process's memory, one after another, to the address `destination`."""
    for address, nbytes in spans:
        ctypes.memmove(destination, address, nbytes)
        destination += nbytes


def memory_of(pid: int) -> Fetch:
    """Return what copies spans of another process's memory. It raises `OSError`: EFAULT where there is no memory."""
    read = _LIBC.process_vm_readv
    read.restype = ctypes.c_ssize_t
    read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]

    def fetch(spans: Sequence[Span], destination: int) -> None:
        for first in range(0, len(spans), _NUM_SPANS):
            some = spans[first : first + _NUM_SPANS]
            wanted = sum(nbytes for _, nbytes in some)
            local = array.array("Q", (destination, wanted))
            remote = array.array("Q", [number for span in some for number in span])
            count = read(pid, local.buffer_info()[0], 1, remote.buffer_info()[0], len(some), 0)
            if count != wanted:  # what is cut short ran into memory that is not there
                code = ctypes.get_errno() if count < 0 else errno.EFAULT
                raise OSError(code, f"{os.strerror(code)}, reading the memory of process {pid}")
            destination += wanted

    return fetch


def write(
    path: str | os.PathLike, header: bytes, spans: Sequence[Span], *, fetch: Fetch = own_memory
) -> list[list[Chunk]]:
    """Write a header and the bytes of spans to a new file, durably, and return every span's chunks in order.

    This thread fetches and hashes one block while another writes the block before, past the kernel's cache where the
    file system permits that. Two blocks of memory are taken, and kept for the next call. The spans must stay as they
    are until this returns. After an error no file is left of it, no thread and no open file.

    Args:
        path: of the file, which must not exist.
        header: its first bytes, a multiple of `ALIGN` of them.
        spans: address and number of bytes of each; one without bytes has no chunks.
        fetch: whose memory the addresses are of; this process's unless given.

    Raises `ValueError` for another length of the header, `OSError` with the path as its filename for all else.
    """
    if len(header) % ALIGN:
        raise ValueError(f"the header has {len(header)} bytes, not a multiple of {ALIGN}")
    free, full, errors = queue.SimpleQueue(), queue.SimpleQueue(), []
    slots = [_slot() for _ in range(_NUM_SLOTS)]
    for slot in slots:
        free.put(slot)
    chunks: list[list[Chunk]] = [[] for _ in spans]
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
            fetch([span for _, span in pieces], ctypes.addressof(ctypes.c_char.from_buffer(slot)) + at)
            for owner, (_, nbytes) in pieces:
                chunks[owner].append((first + at, nbytes, checksum(data[at : at + nbytes])))
                at += nbytes
            full.put((data, first, at))
        else:
            end = len(header) + sum(nbytes for _, nbytes in spans)
    except OSError as error:
        errors.append(error)
    finally:
        full.put(end)
        writing.join()
    _kept[:] = slots
    for error in errors:
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise error
    return chunks


def _slot() -> mmap.mmap:
    try:
        return _kept.pop()
    except IndexError:
        slot = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            slot.madvise(mmap.MADV_HUGEPAGE)
        return slot


def _blocks(header: int, spans: Sequence[Span]) -> Iterator[tuple[int, int, list[tuple[int, Span]]]]:
    """Yield the blocks of a file whose first `header` bytes are no span's.

    A block is the bytes from a first to an end, and the pieces in it: which span they are of, their place in memory.
    """
    for end in range(BLOCK, header + 1, BLOCK):
        yield end - BLOCK, end, []
    at, pieces = header, []
    for owner, (address, left) in enumerate(spans):
        while left:
            nbytes = min(left, BLOCK - at % BLOCK)
            pieces.append((owner, (address, nbytes)))
            at, address, left = at + nbytes, address + nbytes, left - nbytes
            if at % BLOCK == 0:
                yield at - BLOCK, at, pieces
                pieces = []
    if at % BLOCK:
        yield at - at % BLOCK, at, pieces


def _drain(path: str | bytes, full: queue.SimpleQueue, free: queue.SimpleQueue, errors: list) -> None:
    """Make the file, write the slots that come, with their place in it and bytes, and hand them back; None on an error.

    In the end comes the length of the whole file, or None if it is given up: then what was made of it is removed. The
    file is this thread's alone: nobody closes it under a write, whoever is interrupted.
    """
    made = whole = False
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        made = True
        try:
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, _DIRECT)  # not on opening, where a refusal would leave an empty file
            except OSError:
                pass  # a file system that has only ordinary writes
            while isinstance(block := full.get(), tuple):
                slot, first, nbytes = block
                _write_all(fd, memoryview(slot)[: -(-nbytes // ALIGN) * ALIGN], first)
                free.put(slot)
            if block is not None:
                os.ftruncate(fd, block)  # of the last block, what was written to fill it up
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
            pass  # what went wrong before is told


def _write_all(fd: int, data: memoryview, place: int) -> None:
    while data:
        try:
            count = os.pwrite(fd, data, place)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)  # some refuse direct writes only when they come, or after a short one
            count = os.pwrite(fd, data, place)
        if not count:
            raise OSError(errno.EIO, "the file system took nothing of a write")
        data, place = data[count:], place + count


def main() -> None:
    """Do the jobs that come by standard input, one a line, and answer each with a line; end with the input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        answer = json.dumps(_done(json.loads(line))).encode() + b"\n"
        try:
            while answer:
                answer = answer[os.write(sys.stdout.fileno(), answer) :]
        except BrokenPipeError:
            return  # nobody is left to hear it


def _done(job: dict) -> dict | None:
    """Do a job and return its answer: the chunks, or what went wrong; None if the memory cannot be read from here."""
    unread, read = [], memory_of(job["pid"])

    def fetch(spans: Sequence[Span], destination: int) -> None:
        try:
            read(spans, destination)
        except OSError as error:
            unread.append(error)
            raise

    try:
        return {"chunks": write(job["path"], job["header"].encode("latin-1"), job["spans"], fetch=fetch)}
    except OSError as error:
        return None if unread else {"errno": error.errno, "strerror": error.strerror}


if __name__ == "__main__":
    main()
