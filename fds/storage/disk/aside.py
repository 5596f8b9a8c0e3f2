"""Write files in a separate process that reads this one's memory, so that this process is not blocked."""

from __future__ import annotations

import atexit
import ctypes
import errno
import io
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence

import xxhash

from fds.storage.disk import writer

_LIBC = ctypes.CDLL(None)
_SET_PTRACER = 0x59616D61  # of prctl; the kernel's Yama
_MS_ASYNC = 1  # of msync, which then only checks whether the memory is mapped


class WriterProcess:
    """A process that writes this one's memory to files.

    It starts with the first write, and ends when it is closed or this process ends, in whatever way. It reads the spans
    while this process continues: they must not change until `write` returns. One write at a time. The end of a `with`
    block keeps it for the next call of `process()`.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        _all.add(self)

    def write(
        self, path: str | os.PathLike[str], header: bytes, spans: Sequence[writer.Span]
    ) -> list[list[writer.WrittenChunk]]:
        """Write a file as `fds.storage.disk.writer.write` does, with the same chunks and the same errors.

        If it cannot start or cannot read the memory (the system forbids reading another process's memory, or a device
        driver mapped it), this process writes instead. Raises `ChildProcessError` if the process dies: then a part of
        the file may exist, and the next call starts another process.
        """
        if len(header) % writer.ALIGN:
            raise ValueError(f"the header has {len(header)} bytes, not a multiple of {writer.ALIGN}")
        job = {
            "path": os.path.abspath(os.fsdecode(path)),
            "header": header.decode("latin-1"),
            "spans": list(spans),
            "pid": os.getpid(),
        }
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was killed while idle
        try:
            process = self._process = self._process or _start()
        except OSError:
            return writer.write(path, header, spans)
        try:
            answer = _ask(process, job)
        except BaseException as error:  # also Ctrl-C: the caller may free the memory
            process.kill()
            self.close()
            if not isinstance(error, OSError | ValueError):
                raise
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
            what = f"the process that was writing this file died ({how})"
            raise OSError(errno.ECHILD, what, os.fspath(path)) from error
        if answer is None:
            _check_mapped(path, spans)
            return writer.write(path, header, spans)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["strerror"], os.fspath(path))
        return [[(first, nbytes, check) for first, nbytes, check in chunks] for chunks in answer["chunks"]]

    def close(self) -> None:
        """End the process after its current write, and wait for it."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.close()
            except OSError:
                pass  # it died before it read a job
            process.stdout.close()
            process.wait()

    def __enter__(self) -> WriterProcess:
        return self

    def __exit__(self, *_) -> None:
        _idle.append(self)


_idle: list[WriterProcess] = []
_all: weakref.WeakSet[WriterProcess] = weakref.WeakSet()


def process() -> WriterProcess:
    """Return an idle `WriterProcess`, or a new one. The end of its `with` block makes it idle again."""
    try:
        return _idle.pop()
    except IndexError:
        return WriterProcess()


def _start() -> subprocess.Popen:
    # -I -S: neither environment variables, the working directory nor site-packages can run code or shadow modules.
    # A process group of its own, which Ctrl-C in the terminal does not reach.
    program = "import sys; sys.path.append(sys.argv[1]); exec(compile(open(__file__).read(), __file__, 'exec'))"
    program = program.replace("__file__", repr(os.path.abspath(writer.__file__)))
    library = os.path.dirname(os.path.dirname(xxhash.__file__))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, library],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )


def _ask(process: subprocess.Popen, job: dict) -> dict | None:
    """Return the answer to a job. Raises `OSError` or `ValueError` if the process dies."""
    assert process.stdin is not None and process.stdout is not None
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_SET_PTRACER, ctypes.c_ulong(process.pid), 0, 0, 0)  # otherwise Yama allows only parents to read
    process.stdin.write(json.dumps(job).encode() + b"\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _check_mapped(path: str | os.PathLike[str], spans: Sequence[writer.Span]) -> None:
    """Raise `OSError` for unmapped memory: copying it here would crash this process."""
    page = os.sysconf("SC_PAGE_SIZE")
    for address, nbytes, *file in spans:
        first = address // page * page
        if (
            nbytes
            and not file
            and _LIBC.msync(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first), _MS_ASYNC)
        ):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT), os.fspath(path))


@atexit.register
def _end() -> None:
    while _idle:
        _idle.pop().close()


def _forget() -> None:
    """In a forked process, drop the parent's writer processes, which read the parent's memory."""
    for worker in _all:
        process, worker._process = worker._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert isinstance(pipe, io.BufferedWriter | io.BufferedReader)
                pipe.raw.close()  # closing the buffered file would wait for a thread that was not forked
            process.returncode = 0  # or it would be waited for, and is the parent's child
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
