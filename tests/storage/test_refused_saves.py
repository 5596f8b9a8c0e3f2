"""What cannot be saved is refused by a StorageError that shows it, before or without anything half-written."""

import os
import subprocess

import attrs
import pytest
import torch

import fds
from fds import tree
from fds.errors import DonatedStateError, StateError, StorageError
from tests.storage.states import Template, num_calls, small_state, state_of

STEP = Template(small_state())


def refused(dir, *args, **kwargs):
    with pytest.raises(StorageError) as error:
        fds.save(dir, *args, **kwargs)
    return error.value


def test_a_directory_that_is_a_file(tmp_path):
    path = tmp_path / "run"
    path.write_text("mine")
    error = refused(path, small_state(), STEP)
    assert (error.what, error.where, error.got) == ("saves go into a directory", str(path), "a file")
    assert refused(path / "below", small_state(), STEP).got == "Not a directory"
    assert path.read_text() == "mine"


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc, whose folders not even root may write")
def test_a_directory_that_nobody_may_write():
    error = refused("/proc/self/task", small_state(), STEP)
    assert error.what == "the file system refuses this save" and error.where.startswith("/proc/self/task")
    assert error.got and refused("/proc/run/below", small_state(), STEP).got


def test_a_directory_without_write_permission(tmp_path):
    fds.save(tmp_path, small_state(1), STEP)
    locked = subprocess.run(["chattr", "+i", tmp_path], capture_output=True, check=False).returncode == 0
    if os.getuid() == 0 and not locked:
        pytest.skip("root may write everywhere on this file system")
    tmp_path.chmod(0o555) if not locked else None
    try:
        error = refused(tmp_path, small_state(2), STEP)
    finally:
        subprocess.run(["chattr", "-i", tmp_path], check=True) if locked else tmp_path.chmod(0o755)
    assert error.got in ("Operation not permitted", "Permission denied")
    assert num_calls(fds.load(tmp_path, STEP, {})[0]) == 1


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", ".hidden", "a/b", "/etc", "..\\up", "a\0b", "a\n", " a", "-rf", "latest", "LATEST", "a:b", 3, b"a"],
)
def test_a_tag_that_is_no_name_of_a_folder(tmp_path, tag):
    assert refused(tmp_path / "run", small_state(), STEP, tag).got == repr(tag)
    assert not (tmp_path / "run").exists()


def test_a_tag_too_long_for_the_file_system(tmp_path):
    assert refused(tmp_path, small_state(), STEP, "a" * 300).got == "File name too long"
    assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ([1], "extra"),
        ("text", "extra"),
        ({"a": (1, 2)}, "extra.a"),
        ({"a": {1: 2}}, "extra.a"),
        ({"a": [0, {"b": torch.ones(1)}]}, "extra.a.1.b"),
        ({"a": float("nan")}, "extra.a"),
        ({"a": {"b": float("-inf")}}, "extra.a.b"),
        ({"a": b"x"}, "extra.a"),
        ({"a": {1, 2}}, "extra.a"),
        ({"a": 10**5000}, "extra"),
    ],
)
def test_extra_that_json_would_not_give_back(tmp_path, extra, where):
    assert refused(tmp_path / "run", small_state(), STEP, extra=extra).where == where
    assert not (tmp_path / "run").exists()


def test_extra_that_holds_itself(tmp_path):
    extra = {"a": []}
    extra["a"].append(extra)
    assert refused(tmp_path / "run", small_state(), STEP, extra=extra).what == "extra is nested too deeply"


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (3.5, "3.5"),
        (None, "None"),
        (torch.empty(2, device="meta"), "a meta tensor"),
        (torch.ones(2, dtype=torch.complex128), "torch.complex128, torch.strided"),
        (torch.eye(3).to_sparse(), "torch.float32, torch.sparse_coo"),
    ],
)
def test_a_leaf_that_no_file_can_hold(tmp_path, leaf, got):
    error = refused(tmp_path / "run", state_of({"ok": torch.ones(1)}, slots={"mine": [leaf]}), STEP)
    assert (error.where, error.got) == ("slots.mine.0", got)
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_no_unicode(tmp_path):
    assert refused(tmp_path, state_of({"a\ud800": torch.ones(1)}), STEP).where == "'params.a\\ud800'"


def test_something_else_than_a_state(tmp_path):
    assert "Template" in refused(tmp_path, STEP, small_state()).got
    assert "dict" in refused(tmp_path, {}, STEP).got


def test_a_state_of_another_step(tmp_path):
    loss = lambda params, batch: (params * batch).sum()
    state = fds.compose(fds.adamw(0.1))(loss).init(torch.ones(3))
    for save in (fds.save, fds.save_async):
        with pytest.raises(StateError, match="the state is another composition's"):
            save(tmp_path / "run", state, fds.compose(fds.sgd(0.1))(loss))
    assert not (tmp_path / "run").exists()


def test_a_state_that_was_given_up(tmp_path):
    step = fds.compose(fds.donate(), fds.sgd(0.1))(lambda params, batch: (params * batch).sum())
    state = step.init(torch.ones(3))
    new, _ = step(state, torch.ones(3))
    with pytest.raises(DonatedStateError, match="save: this state was donated"):
        fds.save(tmp_path / "run", state, step)
    assert not (tmp_path / "run").exists()
    fds.save(tmp_path / "run", new, step)


def test_what_is_no_save_is_not_replaced(tmp_path):
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("mine")
    fds.save(tmp_path, small_state(1), STEP, "best")
    (tmp_path / "best" / "thoughts.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "src")
    for tag, got in (("notes", "a file"), ("src", "main.py"), ("best", "thoughts.txt"), ("link", "a file")):
        error = refused(tmp_path, small_state(2), STEP, tag)
        assert got in error.got and error.where == str(tmp_path / tag)
    assert (tmp_path / "notes").read_text() == (tmp_path / "src" / "main.py").read_text() == "mine"
    assert (tmp_path / "best" / "thoughts.txt").read_text() == "mine"
    assert num_calls(fds.load(tmp_path, STEP, {})[0]) == 1


def test_the_state_is_as_it_was_after_a_refused_save(tmp_path):
    state = small_state(4)
    kept = attrs.evolve(state, params=tree.map(torch.clone, state.params))
    refused(tmp_path, state, STEP, "..")
    fds.save(tmp_path, state, STEP)
    assert num_calls(kept) == num_calls(state) == 4
