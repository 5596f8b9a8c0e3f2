"""Write memory to a file, durably and as fast as the disk takes it: in this process, or aside, in one of its own.

A file is a header and spans of memory one after another, in blocks of `BLOCK` bytes; a chunk is the part of one span
in one block, and has its own checksum. The process aside runs this same file by its path. So only the standard
library and xxhash are imported, and of the library little: it starts in 40 ms and holds 14 MB and two blocks.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import errno
import fcntl
import io
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
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
_SET_PTRACER = 0x59616D61  # of prctl; the kernel's Yama
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ESRCH)

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
    are until this returns. After an error a part of the file may be there, but no thread and no open file.

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
    writing = threading.Thread(target=_drain, args=(path, full, free, errors))
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


def _drain(path: str | os.PathLike, full: queue.SimpleQueue, free: queue.SimpleQueue, errors: list) -> None:
    """Make the file, write the slots that come, with their place in it and bytes, and hand them back; None on an error.

    In the end comes the length of the whole file, or None if it is given up. The file is this thread's alone: nobody
    closes it under a write, whoever is interrupted.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
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
    except BaseException as error:
        errors.append(error)
        free.put(None)


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


class Aside:
    """A process that writes this one's memory to files, so that nothing here stands still for it but who waits.

    It starts with the first write, and ends when it is closed or this process is gone, however that died. It reads
    the spans while this process goes on: they must be ordinary memory (what a device's driver mapped cannot be read
    from outside: EFAULT) and must stay as they are until `write` returns. One write at a time. Leaving its `with`
    keeps it for the next `aside()`.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        _all.add(self)

    def write(self, path: str | os.PathLike, header: bytes, spans: Sequence[Span]) -> list[list[Chunk]]:
        """Write a file as `write` does, with the same chunks and the same errors.

        Where it cannot start or the system lets no process read another's memory, this process writes after all.
        Raises `ChildProcessError` if the process dies; the next call starts another.
        """
        if len(header) % ALIGN:
            raise ValueError(f"the header has {len(header)} bytes, not a multiple of {ALIGN}")
        job = {
            "path": os.path.abspath(os.fsdecode(path)), "header": header.decode("latin-1"),
            "spans": list(spans), "pid": os.getpid(),
        }  # fmt: skip
        try:
            process = self._process = self._process or _start()
        except OSError:
            return write(path, header, spans)
        try:
            answer = _ask(process, job)
        except BaseException as error:  # also Ctrl-C: whoever goes on may free the memory, so nobody may be reading it
            process.kill()
            self.close()
            if not isinstance(error, OSError | ValueError):
                raise
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
            what = f"the process that was writing this file died ({how})"
            raise OSError(errno.ECHILD, what, os.fspath(path)) from error
        if answer is None:
            return write(path, header, spans)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["strerror"], os.fspath(path))
        return [[(first, nbytes, check) for first, nbytes, check in chunks] for chunks in answer["chunks"]]

    def close(self) -> None:
        """End the process, after what it is writing, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.close()
            except OSError:
                pass  # it died with a job unread
            process.stdout.close()
            process.wait()

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *_) -> None:
        _idle.append(self)


_idle: list[Aside] = []
_all: weakref.WeakSet[Aside] = weakref.WeakSet()


def aside() -> Aside:
    """Return an `Aside` that nobody uses. A `with` around its use gives it back."""
    try:
        return _idle.pop()
    except IndexError:
        return Aside()


def _start() -> subprocess.Popen:
    # -I -S: nothing of the environment, of the folder or of site-packages is run or can stand in for the library.
    # A process group of its own: a Ctrl-C in the terminal is for those in front.
    program = "import sys; sys.path.append(sys.argv[1]); exec(compile(open(__file__).read(), __file__, 'exec'))"
    program = program.replace("__file__", repr(os.path.abspath(__file__)))
    library = os.path.dirname(os.path.dirname(xxhash.__file__))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, library],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,
    )  # fmt: skip


def _ask(process: subprocess.Popen, job: dict) -> dict | None:
    """Return the answer to a job. Raises `OSError` or `ValueError` if the process dies."""
    assert process.stdin is not None and process.stdout is not None
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_SET_PTRACER, ctypes.c_ulong(process.pid), 0, 0, 0)  # else Yama lets only parents read
    process.stdin.write(json.dumps(job).encode() + b"\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@atexit.register
def _end() -> None:
    while _idle:
        _idle.pop().close()


def _forget() -> None:
    """Let go, in a process that was forked, of its parent's processes: they read the parent's memory."""
    for one in _all:
        process, one._process = one._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert isinstance(pipe, io.BufferedWriter | io.BufferedReader)
                pipe.raw.close()  # the buffered file's own close would wait for a thread that is not here
            process.returncode = 0  # not to be waited for: it is the parent's
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


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
    """Do a job and return its answer: the chunks, or what went wrong; None if the memory may not be read."""
    spans, fetch = job["spans"], memory_of(job["pid"])
    try:
        for address, nbytes in spans:
            fetch([(address, min(nbytes, 1))], ctypes.addressof(ctypes.c_char()))
            break
    except OSError as error:
        if error.errno in _REFUSED:
            return None
        return {"errno": error.errno, "strerror": error.strerror}
    try:
        return {"chunks": write(job["path"], job["header"].encode("latin-1"), spans, fetch=fetch)}
    except OSError as error:
        return {"errno": error.errno, "strerror": error.strerror}


if __name__ == "__main__":
    main()
