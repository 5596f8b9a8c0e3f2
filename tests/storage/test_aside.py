"""The process aside: the same file as this process writes, whatever becomes of either of them."""

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from fds.storage.disk import aside, writer
from fds.storage.disk.aside import process
from fds.storage.disk.writer import ALIGN, write
from tests.storage.test_writer import HEADER, ROOT, laid_out, nothing_is_left, small_blocks  # noqa: F401  (a fixture)


def test_a_process_aside_writes_the_same_file_with_the_same_chunks(tmp_path):
    spans, want, data = laid_out([2 * writer.BLOCK + 3, 0, 100, 70_001])
    here = write(tmp_path / "here", HEADER, spans)
    with process() as other:
        assert other.write(tmp_path / "1 ä\udcff", HEADER, spans) == here
        assert other.write(os.fsencode(tmp_path / "2"), HEADER, spans) == here
        assert other.write(tmp_path / "3", b"\x00\xff\n\r" * (ALIGN // 4), []) == []
    assert (tmp_path / "1 ä\udcff").read_bytes() == (tmp_path / "2").read_bytes() == HEADER + want
    assert (tmp_path / "3").read_bytes() == b"\x00\xff\n\r" * (ALIGN // 4)
    del data


def test_a_relative_path_is_relative_to_this_process(tmp_path, monkeypatch):
    with process() as other:
        other.write(tmp_path / "starts it", HEADER, [])
        monkeypatch.chdir(tmp_path)
        other.write("file", HEADER, [])
        with pytest.raises(FileNotFoundError) as error:
            other.write("missing/file", HEADER, [])
    assert error.value.filename == "missing/file" and (tmp_path / "file").read_bytes() == HEADER


def test_a_process_that_is_free_is_used_again(tmp_path):
    with process() as one, process() as two:
        one.write(tmp_path / "1", HEADER, [])
        two.write(tmp_path / "2", HEADER, [])
        pids = {one._process.pid, two._process.pid}
    with process() as one:
        one.write(tmp_path / "3", HEADER, [])
        assert one._process.pid in pids and len(pids) == 2


def test_a_process_that_was_killed_while_it_had_nothing_to_do_is_replaced(tmp_path):
    with process() as other:
        other.write(tmp_path / "1", HEADER, [])
        killed = other._process
        killed.kill()
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        other.write(tmp_path / "2", HEADER, [])
        assert other._process.pid != killed.pid and killed.returncode == -signal.SIGKILL


def test_a_process_that_is_killed_in_the_middle_is_an_error(tmp_path):
    spans, want, data = laid_out([1000])
    with process() as other:
        other.write(tmp_path / "1", HEADER, [])
        other._process.send_signal(signal.SIGSTOP)
        threading.Timer(0.1, other._process.kill).start()
        with pytest.raises(ChildProcessError):
            other.write(tmp_path / "2", HEADER, spans)
        other.write(tmp_path / "3", HEADER, spans)
    assert (tmp_path / "3").read_bytes() == HEADER + want
    del data


def test_an_interrupt_while_waiting_ends_the_process(tmp_path):
    with process() as other:
        other.write(tmp_path / "1", HEADER, [])
        started = other._process
        with mock.patch.object(aside.json, "loads", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            other.write(tmp_path / "2", HEADER, [])
        assert started.returncode == -signal.SIGKILL
        other.write(tmp_path / "3", HEADER, [])


def test_ctrl_c_in_the_terminal_is_not_for_the_process_aside(tmp_path):
    with process() as other:
        other.write(tmp_path / "1", HEADER, [])
        assert os.getpgid(other._process.pid) == other._process.pid
        other._process.send_signal(signal.SIGINT)
        other.write(tmp_path / "2", HEADER, [])


@contextlib.contextmanager
def refused_reading(code: int, num_good: int = 0):
    """Let the process aside read memory so many times, and then no more."""
    left = num_good

    def fetch(spans, destination):
        nonlocal left
        if not left:
            raise OSError(code, os.strerror(code))
        left -= 1
        writer.own_memory(spans, destination)

    def ask(_, job):
        with mock.patch.object(writer, "memory_of", return_value=fetch):
            return writer._done(job)

    with mock.patch.object(aside, "_ask", ask):
        yield


@pytest.mark.parametrize("num_good", [0, 1, 3])  # another process may become the one that Yama admits; memory is pinned
@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ESRCH, errno.EFAULT])
def test_where_memory_may_not_be_read_this_process_writes(tmp_path, code, num_good):
    spans, want, data = laid_out([3 * ALIGN, 0, 20_000, 5])
    with process() as other, small_blocks(), refused_reading(code, num_good):
        chunks = other.write(tmp_path / "1", HEADER, spans)
        assert chunks == write(tmp_path / "2", HEADER, spans)
    assert (tmp_path / "1").read_bytes() == HEADER + want
    del data


def test_where_memory_may_not_be_read_another_s_file_is_left_alone(tmp_path):
    spans, _, data = laid_out([1000])
    (tmp_path / "file").write_bytes(b"mine")
    with process() as other, refused_reading(errno.EPERM), pytest.raises(FileExistsError):
        other.write(tmp_path / "file", HEADER, spans)
    assert (tmp_path / "file").read_bytes() == b"mine"
    del data


def test_where_no_process_can_be_started_this_process_writes(tmp_path):
    with mock.patch.object(sys, "executable", str(tmp_path / "nothing")), process() as other:
        other.write(tmp_path / "file", HEADER, [])
    assert (tmp_path / "file").read_bytes() == HEADER


def gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return gone(pid)


PARENT = """
import os, sys, time
sys.path.insert(0, {root!r})
from fds.storage.disk import aside
other = aside.process()
other.write(sys.argv[1] + "/1", b"", [])
child = os.fork()
if child == 0:
    time.sleep(60)  # holds what it inherited
print(other._process.pid, child, flush=True)
time.sleep(60)
"""


def test_the_process_ends_when_its_parent_is_killed_though_a_forked_child_lives(tmp_path):
    program = PARENT.format(root=str(ROOT))
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        other, child = map(int, parent.stdout.readline().split())
        assert not gone(other)
        parent.kill()
        try:
            assert wait_until_gone(other)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_has_a_process_of_its_own(tmp_path):
    with process() as other:
        other.write(tmp_path / "1", HEADER, [])
        kept = process()
        kept.write(tmp_path / "2", HEADER, [])
        with kept:
            pass
        pid = os.fork()
        if pid == 0:
            good = False
            with contextlib.suppress(BaseException):
                good = not aside._idle and other._process is None
                other.write(tmp_path / "3", HEADER, [])
                other.close()
            os._exit(0 if good else 1)
        assert os.waitpid(pid, 0)[1] == 0
        other.write(tmp_path / "4", HEADER, [])
    assert (tmp_path / "3").read_bytes() == (tmp_path / "4").read_bytes() == HEADER


def test_a_write_keeps_what_was_in_memory_when_it_returned(tmp_path):
    buffer = ctypes.create_string_buffer(b"before", 6)
    with process() as other:
        other.write(tmp_path / "file", b"", [(ctypes.addressof(buffer), 6)])
        buffer.raw = b"after!"
    assert (tmp_path / "file").read_bytes() == b"before"
