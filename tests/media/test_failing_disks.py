"""Directories and disks that fail: named errors, and nothing lost that was not on them."""

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import fds
from fds import media
from fds.errors import DiskError
from fds.media import arena, locks
from fds.media.drive import Clock
from fds.media.locks import lock_file

CPU = torch.device("cpu")


def fill(disk, values):
    made = [disk.make(x) for x in values]
    disk.write(values, made)()
    return made


def file_of(disk):
    return disk._open[0].arena.file


class Stuck:
    """Threads whose disk answers when it is told to."""

    def __init__(self):
        self.clock, self.pieces = Clock(), []

    def start(self, pieces):
        self.pieces += pieces


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("directory", x) for x in (None, "", b"/tmp", 3)),
        *(("buffer_bytes", x) for x in (0, 4095, 1e6, True, "64MiB")),
        *(("buffers", x) for x in (0, -1, 1.5, None)),
        *(("queue_depth", x) for x in (0, 1025, 2.0)),
        *(("checksums", x) for x in (1, None, "yes")),
        *(("timeout", x) for x in (0, -1, float("nan"), float("inf"), True, "60")),
    ],
)
def test_wrong_arguments_are_refused_by_name(tmp_path, name, value):
    with pytest.raises(DiskError) as caught:
        fds.disk(**({"directory": tmp_path} | {name: value}))
    assert caught.value.where == name and caught.value.want


@pytest.mark.parametrize("backend", ["io_uring", "threads", "auto"])
def test_the_backend_that_disks_had_is_refused_with_what_to_write(tmp_path, backend):
    with pytest.raises(fds.FdsError, match=r"'backend'(.|\n)*hint:  leave backend out: threads read and write"):
        fds.disk(tmp_path, backend=backend)


def test_nothing_is_opened_before_the_first_leaf(tmp_path):
    disk = fds.disk(tmp_path / "missing", buffers=2)
    assert repr(disk) == f"fds.disk('{tmp_path}/missing', buffers=2)" and os.listdir(tmp_path) == []
    with pytest.raises(DiskError, match=f"No such file or directory(.|\n)*mkdir -p {tmp_path}/missing"):
        disk.make(torch.ones(3))
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="Not a directory"):
        fds.disk(tmp_path / "file").make(torch.ones(3))
    (tmp_path / "missing").mkdir()
    assert fill(disk, [torch.ones(3)])[0].sum() == 3


def test_a_lock_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fds.lock-0")
    with pytest.raises(DiskError, match="not a regular file"):
        fds.disk(tmp_path).make(torch.ones(3))


def test_what_others_have_under_the_name_of_a_lock_keeps_every_byte_and_still_locks(tmp_path):
    precious, lock = tmp_path / "precious", tmp_path / "fds.lock-0"
    for text, is_link in (("x" * 10_000, True), ("process 1 of the recipe\nstir\n", True), ("process 1\nstir", False)):
        (precious if is_link else lock).write_text(text)
        if is_link:
            os.link(precious, lock)
        disk = fds.disk(tmp_path)
        made = fill(disk, [torch.ones(3)])
        assert lock.read_text() == text and "another run" in in_a_process(refusal, tmp_path)
        del disk, made
        gc.collect()
        assert lock.read_text() == text
        lock.unlink()
    precious.write_text("process 1 on vm since 2020\n")  # a lock's text under two names
    os.link(precious, lock)
    made = fill(fds.disk(tmp_path), [torch.ones(3)])
    assert made[0].sum() == 3 and precious.read_text() == "process 1 on vm since 2020\n"


def test_a_stale_lock_of_another_user_is_taken_over():
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o1777)
        lock, save = (os.path.join(directory, name) for name in ("fds.lock-0", "save"))
        for path in lock, save:
            with open(path, "w") as file:
                file.write("process 1 on vm since 2020\n")
            os.chmod(path, 0o444)
        assert in_a_process(as_another_user, directory, save) == repr((3.0, True))
        with open(lock) as file:
            assert file.read() == "process 1 on vm since 2020\n"


def as_another_user(directory, save):
    if not os.getuid():
        os.setgid(65534)
        os.setuid(65534)
    made = fill(fds.disk(directory), [torch.ones(3)])
    with lock_file(Path(save)):
        return float(made[0].sum()), not os.access(save, os.W_OK)


def refusal(directory):
    try:
        fds.disk(directory).make(torch.ones(1))
    except DiskError as error:
        return error.what


def test_a_directory_that_another_thread_is_closing_is_waited_for(tmp_path, monkeypatch):
    closing = locks.lock_directory(str(tmp_path))
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: closing.release())
    assert fill(fds.disk(tmp_path), [torch.ones(3)])[0].sum() == 3 and closing.fd == -1


def test_a_disk_that_fails_is_named_and_works_again_when_it_does(tmp_path):
    disk = fds.disk(tmp_path)
    values = torch.randn(2**20)
    made = fill(disk, [values])
    good = os.dup(file_of(disk).fd)
    for path, flags, read_error, write_error in (
        ("/dev/full", os.O_RDWR, None, "No space left"),
        ("/dev/null", os.O_RDWR, "nothing was read", None),
        (tmp_path / "empty", os.O_WRONLY | os.O_CREAT, "Bad file descriptor", None),
        (tmp_path / "empty", os.O_RDONLY, "nothing was read", "Bad file descriptor"),
    ):
        bad = os.open(path, flags)
        os.dup2(bad, file_of(disk).fd)
        os.close(bad)
        if read_error:
            with pytest.raises(DiskError, match=f"failed to read\n.*\n.*{read_error}.*bytes at"):
                disk.read(made, CPU)()
        if write_error:
            with pytest.raises(DiskError, match=f"failed to write\n.*\n.*{write_error}.*bytes at"):
                disk.write([values], made)()
        os.dup2(good, file_of(disk).fd)
        assert torch.equal(disk.read(made, CPU)()[0], values)
    os.close(good)


def test_a_disk_that_does_not_answer_is_not_waited_for_and_its_memory_not_used_again(tmp_path):
    disk = fds.disk(tmp_path, buffer_bytes=4096, buffers=2, timeout=0.05)
    made = fill(disk, [torch.ones(1024)])
    drive = disk._open[0]
    working, drive.threads = drive.threads, (stuck := Stuck())
    with pytest.raises(DiskError, match=r"did not get on(.|\n)*nothing done in 0.05 s"):
        disk.read(made, CPU)()
    with pytest.raises(DiskError, match="to write"):
        disk.write([torch.zeros(1024)], made)()
    drive.threads = working
    busy = {id(one.request): one for one in stuck.pieces}
    places = [torch.frombuffer(one.memory, dtype=torch.uint8).data_ptr() for one in busy.values()]
    held = [disk.read(made, CPU)() for _ in range(3)]
    assert len(places) == 2 and not {x.data_ptr() for (x,) in held} & set(places)
    address = made[0].data_ptr()
    del made
    assert disk.make(torch.ones(1024)).data_ptr() != address  # the disk may still write there
    for one in stuck.pieces:
        one.request.done(one)
    del held
    assert {slot[0] is not None for slot in drive.buffers.take([4096]) or []} == {True}


def test_a_byte_that_changed_on_disk_is_noticed(tmp_path):
    disk = fds.disk(tmp_path, checksums=True)
    values = [torch.randn(100), torch.randn(5000)]
    made = fill(disk, values)
    assert all(map(torch.equal, disk.read(made, CPU)(), values))
    extent = media.extent_of(made[1])
    with open(f"/proc/self/fd/{extent.fd}", "r+b", buffering=0) as file:
        (before,) = os.pread(file.fileno(), 1, extent.offset + 7777)
        os.pwrite(file.fileno(), bytes([before ^ 1]), extent.offset + 7777)
        os.fsync(file.fileno())
    with pytest.raises(DiskError, match="other bytes than were written"):
        disk.read(made, CPU)()
    assert torch.equal(disk.read(made[:1], CPU)()[0], values[0])
    disk.write(values, made)()
    assert all(map(torch.equal, disk.read(made, CPU)(), values))


def test_a_file_system_without_direct_io_or_nameless_files_will_do(tmp_path, monkeypatch):
    def refuse(fd, command, flags):
        raise OSError(errno.EINVAL, "no O_DIRECT")

    open_ = os.open

    def open_named(path, flags, mode=0o777, **how):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return open_(path, flags, mode, **how)

    monkeypatch.setattr(arena.fcntl, "fcntl", refuse)
    monkeypatch.setattr(arena.os, "open", open_named)
    disk = fds.disk(tmp_path)
    values = [torch.randn(5000), torch.randn(3)]
    made = fill(disk, values)
    assert all(map(torch.equal, disk.read(made, CPU)(), values)) and all(map(torch.equal, made, values))
    assert str(disk).endswith(", not O_DIRECT") and os.listdir(tmp_path) == ["fds.lock-0"]


def in_a_process(function, *args):
    """Return what a function writes to the pipe that it is given, run in a process that is forked."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reads)
            torch.set_num_threads(1)  # OpenMP does not survive a fork
            os.write(writes, repr(function(*args)).encode())
        except BaseException as error:
            os.write(writes, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found


def test_a_child_keeps_the_values_and_changes_nothing_of_its_parents(tmp_path):
    disk = fds.disk(tmp_path)
    made = fill(disk, [torch.ones(2000), torch.full((10,), 2.0)])
    offset = media.extent_of(made[1]).offset

    def child():
        found = [float(x.sum()) for x in media.read(made, CPU)()]
        media.write([torch.zeros(2000)], made[:1])()
        kinds = [media.medium_of(x) for x in made]
        found += [float(made[0].sum()), kinds]
        del made[:]
        try:
            disk.make(torch.ones(1))
        except DiskError as error:
            return found, error.what, str(os.getppid()) in error.got
        return found

    want = ([2000.0, 20.0, 0.0, [None, None]], "another run has its leaves in this directory", True)
    assert in_a_process(child) == repr(want)
    assert [float(x.sum()) for x in disk.read(made, CPU)()] == [2000, 20]
    assert os.listdir(tmp_path) == ["fds.lock-0"]
    new = fill(disk, [torch.zeros(10)])
    assert media.extent_of(new[0]).offset > offset and float(made[1].sum()) == 20


def limited(directory):
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, 2**21))
    disk = fds.disk(directory)
    made = fill(disk, [torch.ones(2**18)])
    try:
        disk.make(torch.ones(2**19))
    except DiskError as error:
        full = error.what, "2,097,152 bytes more" in str(error)
    small = fill(disk, [torch.ones(2**10)])
    made += small
    return full, [float(x.sum()) for x in disk.read(made, CPU)()]


def test_a_full_disk_is_an_error_when_a_leaf_is_made_and_never_later(tmp_path):
    assert in_a_process(limited, tmp_path) == repr((("the disk is full", True), [2.0**18, 2.0**10]))


RUN = """
import sys, torch, fds
disk = fds.disk(sys.argv[1])
made = [disk.make(torch.empty(2**22)) for _ in range(4)]
worked = disk.read(made[:1], torch.device("cpu"))()
print("ready", flush=True)
while True:
    waits = [disk.write(worked, [leaf]) for leaf in made]
    [wait() for wait in waits]
"""


def test_a_second_run_is_refused_and_a_killed_one_leaves_nothing_in_the_way():
    with tempfile.TemporaryDirectory() as directory:
        run = subprocess.Popen([sys.executable, "-c", RUN, directory], stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        disk = fds.disk(directory)
        with pytest.raises(DiskError, match=f"another run(.|\n)*fds.lock-0(.|\n)*locked by process {run.pid} on"):
            disk.make(torch.ones(1))
        time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.stdout.close()
        assert os.listdir(directory) == ["fds.lock-0"]
        assert fill(disk, [torch.ones(5)])[0].sum() == 5
        with open(f"{directory}/fds.lock-0") as file:
            assert file.read().startswith(f"process {os.getpid()} on")
        del disk
