"""A save that dies or fails leaves the last complete one."""

import errno
import gc
import os
import resource
from pathlib import Path

import pytest

import fds
from fds.errors import StorageError
from fds.storage.disk import folders
from tests import ranks, sweeps
from tests.storage import killing
from tests.storage.faults import at_request
from tests.storage.states import Template, num_calls, small_state

STEP = Template(small_state())


def found(dir):
    return num_calls(fds.load(dir, STEP, {})[0])


@pytest.mark.sweep
def test_killed_at_any_request_and_any_instant_the_last_complete_save_loads(tmp_path):
    status, told = ranks.alone(killing.main, tmp_path, sweeps.STRIDE)
    assert status == 0, told
    assert told.count(" kills, ") == 6


@pytest.mark.sweep
@pytest.mark.parametrize(("code", "tag"), [(errno.ENOSPC, None), (errno.EIO, "best")])
def test_an_error_at_any_request_is_a_storage_error_and_changes_nothing(tmp_path, code, tag):

    def fail(request):
        raise OSError(code, os.strerror(code))

    gc.collect()  # what earlier tests left open is closed now, and not by a request that fails
    n, refused = 0, 0
    while True:
        dir = tmp_path / str(n)
        fds.save(dir, small_state(1), STEP, tag)
        try:
            with at_request(n, fail) as made:
                fds.save(dir, small_state(2), STEP, tag)
        except StorageError as error:
            refused += 1
            assert os.strerror(code) in error.got
            if "replace" in made[:n]:  # only the flush after the last rename failed: all is there, perhaps not durably
                assert found(dir) == 2
            else:
                assert found(dir) == 1 and folders.tags(dir) == [tag or "step00000001"]
            assert not (dir / ".saving").exists()
        else:
            assert found(dir) == 2
            if len(made) <= n:
                break  # there was no such request
        fds.save(dir, small_state(3), STEP, tag)
        assert found(dir) == 3 and not (dir / ".saving").exists()
        n += sweeps.STRIDE
    assert refused >= 20 // sweeps.STRIDE


def test_everything_is_flushed_before_it_is_named(tmp_path, monkeypatch):
    flushed, named = set(), []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def flush(fd):
        fsync(fd)
        flushed.add(os.fstat(fd).st_ino)

    def put(call):
        def checked(old, new):
            if Path(new).parent == tmp_path:
                inside = [Path(old), *(Path(old).iterdir() if Path(old).is_dir() else [])]
                assert {p.stat().st_ino for p in inside} <= flushed, f"{new} has a name before it is on the disk"
                named.append((Path(new).name, tmp_path.stat().st_ino in flushed))
                flushed.discard(tmp_path.stat().st_ino)
            call(old, new)

        return checked

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", put(rename))
    monkeypatch.setattr(os, "replace", put(replace))
    fds.save(tmp_path, small_state(1), STEP, "best")
    fds.save(tmp_path, small_state(2), STEP, "best")
    assert [name for name, _ in named] == ["best", "latest"] * 2
    assert all(before for name, before in named if name == "latest"), "latest names a tag that is not durable"
    assert tmp_path.stat().st_ino in flushed


def test_ctrl_c_while_saving_changes_nothing(tmp_path):
    def interrupt(request):
        raise KeyboardInterrupt

    fds.save(tmp_path, small_state(1), STEP)
    for n in range(12):
        with pytest.raises(KeyboardInterrupt), at_request(n, interrupt):
            fds.save(tmp_path, small_state(2), STEP)
        assert found(tmp_path) == 1 and sorted(os.listdir(tmp_path)) == [".lock", "latest", "step00000001"]


def test_a_file_size_limit_is_a_storage_error(tmp_path):
    fds.save(tmp_path, small_state(1), STEP)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # Python ignores the signal that comes with it
    try:
        with pytest.raises(StorageError) as error:
            fds.save(tmp_path, small_state(2, width=50_000), STEP)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.got == os.strerror(errno.EFBIG)
    assert found(tmp_path) == 1 and sorted(os.listdir(tmp_path)) == [".lock", "latest", "step00000001"]


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path):
    fds.save(tmp_path, small_state(1), STEP)
    left = tmp_path / ".saving" / "new" / "step00000009"
    left.mkdir(parents=True)
    (left / "rank0.safetensors").write_bytes(b"half")
    assert found(tmp_path) == 1
    fds.save(tmp_path, small_state(2), STEP)
    assert found(tmp_path) == 2 and not (tmp_path / ".saving").exists()


def test_a_tag_that_a_killed_save_had_moved_away_loads_and_returns(tmp_path):
    folder = fds.save(tmp_path, small_state(1), STEP, "best")
    (tmp_path / ".saving" / "old").mkdir(parents=True)
    os.rename(folder, tmp_path / ".saving" / "old" / "best")
    assert found(tmp_path) == 1
    fds.save(tmp_path, small_state(2), STEP, "other")
    assert sorted(os.listdir(tmp_path)) == [".lock", "best", "latest", "other"]
    assert num_calls(fds.load(tmp_path, STEP, {}, tag="best")[0]) == 1


def test_two_saves_into_one_directory_at_once_are_refused(tmp_path):
    with folders.publish(tmp_path, "first") as folder:
        with pytest.raises(StorageError, match="another save is writing here"):
            fds.save(tmp_path, small_state(2), STEP)
        assert folder.exists()
        (folder / "manifest.json").write_text("{}")
    fds.save(tmp_path, small_state(3), STEP)
    assert found(tmp_path) == 3
