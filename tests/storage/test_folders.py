"""Folders: what is named when, who may write there, and what in the place of a folder or file is left alone."""

import errno
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

import fds
from fds.errors import StorageError
from fds.media import locks
from fds.storage.disk import folders
from fds.storage.disk.files import read_small
from tests.storage.states import Template, num_calls, small_state

STEP = Template(small_state())


@pytest.fixture
def soon():
    """Fail a test that waits."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    yield
    signal.alarm(0)


def save(dir, calls, tag, **kwargs):
    return fds.save(dir, small_state(calls), STEP, tag, **kwargs)


def found(dir, tag=None):
    return num_calls(fds.load(dir, STEP, {}, tag=tag)[0])


def refused(dir, tag="b") -> StorageError:
    with pytest.raises(StorageError) as error:
        save(dir, 2, tag)
    return error.value


def in_a_child(body) -> int:
    """Run in a forked process; return its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("tag", ["a", "b"])
@pytest.mark.parametrize("request_", ["rename", "replace"])
def test_a_key_pressed_just_after_any_rename_leaves_latest_at_a_save(tmp_path, tag, request_):
    n = 0
    while True:
        dir, left, plain = tmp_path / str(n), [n], getattr(os, request_)
        save(dir, 1, "a")

        def pressed(old, new, left=left, plain=plain):
            plain(old, new)
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt

        try:
            with mock.patch.object(os, request_, pressed):
                save(dir, 2, tag)
        except KeyboardInterrupt:
            assert found(dir) == (1 if request_ == "rename" else 2)
            assert not (dir / ".saving").exists()
            n += 1
        else:
            break
    assert n == (1 if request_ == "replace" or tag == "b" else 2)


def test_an_error_after_the_last_rename_says_that_the_save_is_in_its_place(tmp_path):
    save(tmp_path, 1, "a")
    plain, of_the_run = folders.sync, []

    def sync(folder):
        of_the_run.extend([folder] if folder == tmp_path else [])
        if len(of_the_run) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))
        plain(folder)

    with mock.patch.object(folders, "sync", sync):
        error = refused(tmp_path, "a")
    assert error.what == "the save is in its place, but may not outlive a power failure" and error.hint
    assert error.got == os.strerror(errno.EIO) and found(tmp_path) == 2


def test_a_folder_with_a_file_of_somebodys_is_kept_by_keep(tmp_path):
    a, b, c, d = (f"step{calls:08d}" for calls in range(4))
    for calls, tag in enumerate((a, b, c)):
        save(tmp_path, calls, tag)
    (tmp_path / a / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / b, tmp_path / "elsewhere" / b)
    (tmp_path / b).symlink_to(tmp_path / "elsewhere" / b)
    save(tmp_path, 4, d, keep=1)
    assert folders.tags(tmp_path) == [a, b, d]
    assert (tmp_path / a / "notes.txt").read_text() == "mine" and (tmp_path / b).is_symlink()


@pytest.mark.parametrize("link", [".saving", ".saving/old", ".lock", "b"])
@pytest.mark.parametrize("stays", [False, True])
def test_nothing_is_moved_or_made_through_a_link(tmp_path, link, stays):
    run, outside = tmp_path / "run", tmp_path / "outside"
    save(run, 1, "a")
    (outside / "old" / "precious").mkdir(parents=True)
    (run / ".lock").unlink()
    (run / link).parent.mkdir(exist_ok=True)
    (run / link).symlink_to(outside / "made" if link == ".lock" else outside)
    with pytest.raises(StorageError) as error, folders.publish(run, "b", stays=stays):
        pass
    assert error.value.where == str(run / link)
    if link.startswith(".saving"):
        with pytest.raises(StorageError):
            folders.forget(run, "a", 1)
    assert os.listdir(outside) == ["old"] and os.listdir(outside / "old") == ["precious"]
    assert sorted(os.listdir(run)) == sorted({".lock", link.partition("/")[0], "a", "latest"})
    assert (run / link).is_symlink() and found(run) == 1


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, soon):
    save(tmp_path, 1, "a")
    for name in ("latest", ".lock"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError) as error:
        fds.load(tmp_path, STEP, {})
    assert error.value.got == "not a regular file" and error.value.where == str(tmp_path / "latest")
    error = refused(tmp_path)
    assert error.got == "not a regular file" and error.where == str(tmp_path / ".lock")
    (tmp_path / ".lock").unlink()
    save(tmp_path, 2, "b")
    assert found(tmp_path) == 2


def test_what_is_small_is_not_read_without_bound(tmp_path):
    save(tmp_path, 1, "a")
    os.truncate(tmp_path / "latest", 2**40)
    with pytest.raises(StorageError, match="it is not known which save is the last"):
        fds.load(tmp_path, STEP, {})
    (tmp_path / "some").write_bytes(b"1234")
    assert read_small(tmp_path / "some", 4) == b"1234"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_small(tmp_path / "some", 3)
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in ("zero", "a"):
        with pytest.raises(OSError, match=r"symbolic links|not a regular file"):
            read_small(tmp_path / path, 4)
    with pytest.raises(OSError, match="not a regular file"):
        read_small(Path("/dev/zero"), 4)


def test_one_holds_a_lock_and_it_is_free_afterwards(tmp_path):
    path = tmp_path / "lock"
    before = os.listdir("/proc/self/fd")
    for _ in range(2):
        with locks.lock_file(path), pytest.raises(BlockingIOError), locks.lock_file(path):
            pass
    assert os.listdir("/proc/self/fd") == before and not locks._locks


def test_a_forked_process_does_not_hold_its_parents_lock(tmp_path):
    lock = locks.lock_file(tmp_path / "lock")
    lock.__enter__()
    forked, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"!")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(forked, 1)
        for held in list(locks._locks):  # as if this process had been killed: nothing is unlocked, all is closed
            os.close(held.fd)
            held.fd = -1
        with locks.lock_file(tmp_path / "lock"):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(forked)
        os.close(write)
        lock.__exit__(None, None, None)


def test_a_forked_process_that_ends_leaves_the_save_and_its_lock_alone(tmp_path):
    publishing = folders.publish(tmp_path, "a")
    folder = publishing.__enter__()
    (folder / "manifest.json").write_text("{}")

    error = RuntimeError("the child ends")
    assert in_a_child(lambda: publishing.__exit__(RuntimeError, error, None)) == 0
    assert folder.exists()
    with pytest.raises(StorageError, match="another save is writing here"):
        save(tmp_path, 1, "b")
    publishing.__exit__(None, None, None)
    assert folders.tags(tmp_path) == ["a"]


def test_what_stays_is_there_until_it_is_forgotten(tmp_path):
    for calls in range(3):
        with folders.publish(tmp_path, "t", stays=True) as folder:
            (folder / "manifest.json").write_text(str(calls))
    with folders.publish(tmp_path, "u", stays=True) as folder:
        (folder / "manifest.json").write_text("u")

    def text(tag):
        return [(path / "manifest.json").read_text() for path in folders.versions(tmp_path, tag)]

    assert text("t") == ["2", "1", "0"] and folders.tags(tmp_path) == ["t", "u"]
    folders.forget(tmp_path, "u", None)
    assert text("t") == ["2", "1", "0"] and folders.find(tmp_path, "t") == tmp_path / "t"
    os.rename(tmp_path / "t", tmp_path / ".saving" / "old" / "t~~")  # killed between two renames
    assert text("t") == ["2", "1", "0"] and folders.find(tmp_path, "t").name == "t~~"
    with folders.publish(tmp_path, "u", stays=True) as folder:
        assert text("t") == ["2", "1", "0"] and folders.find(tmp_path, "t") == tmp_path / "t"
        (folder / "manifest.json").write_text("u")
    folders.forget(tmp_path, "t", None)
    assert text("t") == ["2"] and text("u") == ["u", "u"]
    folders.forget(tmp_path, "u", None)
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "t", "u"]
