"""`save_async`: what `save` writes, while the steps go on."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fds
from fds import tree
from fds.errors import DonatedStateError, StorageError
from fds.storage import saving as background
from fds.storage.disk import folders
from tests import programs
from tests.bits import assert_same_bits, snapshot
from tests.memory import peak_bytes
from tests.storage.holding import has_a_job, held, helpers, stopped_helper, until
from tests.storage.states import Template, num_calls, small_state

ROOT = Path(__file__).parents[2]
PARAMS = {"w": torch.arange(6000.0).view(60, 100).sin(), "b": torch.ones(3), "empty": torch.ones(0, 2)}
BATCH = torch.ones(2, 60)


def make(*more):
    loss = lambda params, batch: (batch @ params["w"]).square().mean() + params["b"].sum()
    return fds.compose(*more, fds.adamw(0.1), fds.ema(0.9), fds.loss_scale(2.0**5))(loss)


def begin(dir, *more, calls=1):
    """Return a step and its state after a save of the first call, under the tag `first`."""
    step = make(*more)
    state = step.init(PARAMS)
    for _ in range(calls):
        state, _ = step(state, BATCH)
    fds.save(dir, state, step, "first", {"at": int(state.calls)})
    state, _ = step(state, BATCH)
    return step, state


def last(dir):
    return fds.load(dir, make(), PARAMS)[1]["at"]


def refused(saving):
    with pytest.raises(StorageError) as error:
        saving.wait()
    return error.value


def files(folder):
    """Return the bytes of tensor files, and the manifest without its dates and tag."""
    record = json.loads((folder / "manifest.json").read_text())
    for name in ("saved", "tag", "checksum"):
        del record[name]
    return {path.name: path.read_bytes() for path in folder.glob("rank*")}, record


def test_it_writes_the_files_that_save_writes(tmp_path):
    step, state = begin(tmp_path)
    extra = {"position": [1, {"a": None}]}
    here = fds.save(tmp_path, state, step, "here", extra)
    saving = fds.save_async(tmp_path, state, step, "aside", extra)
    assert saving.folder == saving.wait() == tmp_path / "aside"
    assert files(tmp_path / "aside") == files(here)
    assert (tmp_path / "latest").read_text() == "aside\n" and not (tmp_path / ".saving").exists()
    loaded, found = fds.load(tmp_path, step, PARAMS)
    assert_same_bits(loaded, state)
    assert found == extra


def test_leaves_without_a_contiguous_row_are_saved_as_they_read(tmp_path):
    step = fds.compose(fds.sgd(0.1))(lambda params, batch: params["w"].sum())
    state = step.init({"w": torch.ones(3, 4), "x": torch.ones(2)})
    state.params["w"] = torch.arange(12.0).view(4, 3).T
    fds.save_async(tmp_path, state, step).wait()
    assert torch.equal(fds.load(tmp_path, step, state.params)[0].params["w"], state.params["w"])


@pytest.mark.parametrize("more", [(), (fds.donate(),)], ids=["pure", "donate"])
@pytest.mark.parametrize("after", [False, True], ids=["not read yet", "read"])
def test_steps_go_on_and_the_state_that_is_saved_is_that_of_the_call(tmp_path, more, after):
    step, state = begin(tmp_path, *more)
    want = snapshot(state)
    straight, other = make(), snapshot(state)
    with held(after=after) as go:
        saving = fds.save_async(tmp_path, state, step, extra={"at": 2})
        for _ in range(3):
            state, _ = step(state, BATCH)
            other, _ = straight(other, BATCH)
        assert last(tmp_path) == 1 and not saving.done()
        go.set()
        saving.wait()
    assert saving.done()
    loaded, _ = fds.load(tmp_path, make(), PARAMS)
    assert_same_bits(loaded, want)
    assert_same_bits(state, other)  # and the steps were not disturbed either


def test_a_donated_state_that_is_being_saved_is_not_written_over_and_yet_given_up(tmp_path):
    step, state = begin(tmp_path, fds.donate())
    with held() as go:
        saving = fds.save_async(tmp_path, state, step)
        kept, want = state.params["w"], state.params["w"].clone()
        new, _ = step(state, BATCH)
        assert torch.equal(kept, want) and new.params["w"].data_ptr() != kept.data_ptr()
        with pytest.raises(DonatedStateError):
            step(state, BATCH)
        go.set()
        with pytest.raises(DonatedStateError):
            fds.save_async(tmp_path, state, step)
    assert saving.folder.exists()


def test_a_state_is_written_over_again_once_it_is_saved(tmp_path):
    step, state = begin(tmp_path, fds.donate())
    fds.save_async(tmp_path, state, step).wait()
    assert not state.token.readers
    place = state.params["w"].data_ptr()
    state, _ = step(state, BATCH)
    assert state.params["w"].data_ptr() == place


def test_many_saves_take_the_memory_of_one_further_state(tmp_path):
    step, state = begin(tmp_path, fds.donate())
    state_bytes = sum(x.numel() * x.element_size() for x in tree.leaves(state))

    def run(saves):
        nonlocal state
        for i in range(3):
            if i < saves:
                with held() as go:
                    saving = fds.save_async(tmp_path, state, step, "again")
                    state, _ = step(state, BATCH)
                    go.set()
                    saving.wait()
            state, _ = step(state, BATCH)

    run(3)  # from here on the pool has what it needs
    none, once, often = (peak_bytes(lambda n=n: run(n)) for n in (0, 1, 3))
    assert once <= none + 1.1 * state_bytes and often <= once + 0.1 * state_bytes


@pytest.mark.parametrize("leaf", ["w", "b"])
def test_a_write_into_the_state_meanwhile_is_found(tmp_path, leaf):
    step, state = begin(tmp_path)
    with held() as go:
        saving = fds.save_async(tmp_path, state, step)
        state.params[leaf].add_(1)
        go.set()
        error = refused(saving)
    assert (error.what, error.where) == ("a leaf was written over while it was being saved", f"params.{leaf}")
    assert last(tmp_path) == 1 and not (tmp_path / ".saving").exists()


def test_done_says_whether_it_has_ended(tmp_path):
    step, state = begin(tmp_path)
    with held() as go:
        saving = fds.save_async(tmp_path, state, step)
        assert not saving.done() and not saving.done()
        go.set()
        until(saving.done)
    assert folders.tags(tmp_path) == ["first", "step00000002"]
    assert saving.wait() == saving.wait() == tmp_path / "step00000002"


def release_soon(go):
    """Let the save go on once somebody waits for it."""
    main = threading.main_thread().ident

    def waits():
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code.co_name != "_join":
            frame = frame.f_back
        return frame is not None

    thread = threading.Thread(target=lambda: (until(waits), go.set()))
    thread.start()
    return thread


@pytest.mark.parametrize("second", [fds.save, fds.save_async])
def test_the_next_save_waits_for_it(tmp_path, second):
    step, state = begin(tmp_path)
    with held() as go:
        saving = fds.save_async(tmp_path, state, step, "one")
        thread = release_soon(go)
        found = second(tmp_path, state, step, "two")
        thread.join()
        assert saving.done() and "one" in folders.tags(tmp_path)
    found = found if second is fds.save else found.wait()
    assert folders.tags(tmp_path) == ["first", "one", "two"] and found == tmp_path / "two"


def test_leaving_the_context_waits_for_it(tmp_path):
    step, state = begin(tmp_path)
    with held() as go:
        with fds.save_async(tmp_path, state, step, extra={"at": 2}) as saving:
            thread = release_soon(go)
        thread.join()
        assert saving.done()
    assert last(tmp_path) == 2


def test_an_error_in_the_context_is_the_one_that_is_raised_and_the_save_is_complete(tmp_path):
    step, state = begin(tmp_path)
    with pytest.raises(ZeroDivisionError), fds.save_async(tmp_path, state, step, extra={"at": 2}):
        raise ZeroDivisionError
    assert last(tmp_path) == 2
    fds.save(tmp_path, state, step, extra={"at": 3})
    assert last(tmp_path) == 3


def no_space(path, head, spans):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def test_what_goes_wrong_is_raised_by_wait(tmp_path, monkeypatch):
    step, state = begin(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    monkeypatch.setattr(background, "_write_aside", no_space)
    saving = fds.save_async(tmp_path, state, step)
    error = refused(saving)
    assert (error.what, error.got) == ("the file system refuses this save", os.strerror(errno.ENOSPC))
    assert str(refused(saving)) == str(error) and saving.done()  # however often one asks
    monkeypatch.undo()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert not (tmp_path / ".saving").exists() and not state.token.readers
    fds.save(tmp_path, state, step, extra={"at": 2})
    assert last(tmp_path) == 2


@pytest.mark.parametrize("second", [fds.save, fds.save_async])
def test_what_nobody_waited_for_is_raised_by_the_next_save_once(tmp_path, monkeypatch, second):
    step, state = begin(tmp_path)
    monkeypatch.setattr(background, "_write_aside", no_space)
    fds.save_async(tmp_path, state, step, "lost")
    with pytest.raises(StorageError, match="No space left"):
        second(tmp_path, state, step, "two")
    assert folders.tags(tmp_path) == ["first"]
    monkeypatch.undo()
    second(tmp_path, state, step, "three")
    background.await_previous()
    assert folders.tags(tmp_path) == ["first", "three"]


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    step, state = begin(tmp_path)
    for wrong in ({"tag": "../x"}, {"extra": {"a": (1,)}}, {"keep": 0}):
        with pytest.raises(StorageError):
            fds.save_async(tmp_path, state, step, **wrong)
    assert os.listdir(tmp_path) and folders.tags(tmp_path) == ["first"] and not state.token.readers
    with folders.publish(tmp_path, "other"):  # by whoever else is at work here
        with pytest.raises(StorageError, match="another save is writing here"):
            fds.save_async(tmp_path, state, step)
        assert not state.token.readers
        (tmp_path / ".saving" / "new" / "other" / "manifest.json").write_text("{}")
    fds.save_async(tmp_path, state, step).wait()


def test_nobody_else_saves_there_meanwhile(tmp_path):
    step, state = begin(tmp_path)
    with held() as go:
        saving = fds.save_async(tmp_path, state, step, "mine")
        (tmp_path.parent / "theirs.py").write_text(
            "import sys, torch, fds\nstep = fds.compose(fds.sgd(0.1))(lambda p, b: p.sum())\n"
            "try:\n    fds.save_async(sys.argv[1], step.init(torch.ones(2)), step, 'theirs').wait()\n"
            "except fds.errors.StorageError as error:\n    print(error.what)"
        )
        told = programs.run(tmp_path.parent / "theirs.py", tmp_path, cwd=ROOT)
        assert told == (0, "another save is writing here\n")
        go.set()
        saving.wait()
    assert folders.tags(tmp_path) == ["first", "mine"]


def test_the_helper_process_is_killed_and_the_save_before_stays(tmp_path):
    step, state = begin(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    pid = stopped_helper(tmp_path)
    saving = fds.save_async(tmp_path, state, step)
    until(lambda: has_a_job(pid))  # one that is killed before is replaced
    os.kill(pid, signal.SIGKILL)
    assert "died" in refused(saving).got
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert not (tmp_path / ".saving").exists() and pid not in helpers()
    fds.save_async(tmp_path, state, step, extra={"at": 2}).wait()
    assert last(tmp_path) == 2


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.storage import test_background as t
from tests.storage.holding import stopped_helper
step, state = t.begin(sys.argv[1])
{}
"""


def started(dir, text):
    """Start a program that goes on with the save of a directory."""
    (dir.parent / "program.py").write_text(PROGRAM.format(text, root=str(ROOT)))
    return programs.Program(dir.parent / "program.py", dir, cwd=ROOT)


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise ZeroDivisionError"])
def test_the_end_of_the_program_waits_for_it(tmp_path, end):
    text = f"""
from tests.storage.holding import held
context = held()
go = context.__enter__()
saving = t.fds.save_async(sys.argv[1], state, step, extra={{"at": 2}})
t.threading.Thread(target=lambda: (t.until(lambda: not t.threading.main_thread().is_alive()), go.set())).start()
{end}
"""
    process = started(tmp_path / "run", text)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == {"pass": 0, "sys.exit(3)": 3}.get(end, 1), told
    assert last(tmp_path / "run") == 2 and not (tmp_path / "run" / ".saving").exists()


def test_the_end_of_an_interpreter_of_its_own_tells_of_a_save_that_failed(tmp_path):
    text = 't.background._write_aside = t.no_space\nt.fds.save_async(sys.argv[1], state, step, extra={"at": 2})'
    command = [sys.executable, "-c", PROGRAM.format(text, root=str(ROOT)), tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "was not waited for" in ended.stderr and "the file system refuses this save" in ended.stderr
    assert os.strerror(errno.ENOSPC) in ended.stderr and last(tmp_path) == 1


def test_a_process_that_is_killed_in_the_middle_leaves_the_last_complete_save(tmp_path):
    text = """
pid = stopped_helper(t.Path(sys.argv[1]))
saving = t.fds.save_async(sys.argv[1], state, step, extra={"at": 2})
t.Path(sys.argv[1] + ".pid").write_text(f"{pid}.")
saving.wait()
"""
    dir, told = tmp_path / "run", tmp_path / "run.pid"
    process = started(dir, text)
    until(lambda: told.exists() and told.read_text().endswith("."))
    pid = int(told.read_text()[:-1])
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert last(dir) == 1 and (dir / ".saving").exists()
    gone = lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    until(gone)  # a stopped process that nobody minds any more is sent SIGHUP by the kernel
    step, state = begin(dir)
    fds.save_async(dir, state, step, extra={"at": 3}).wait()
    assert last(dir) == 3 and not (dir / ".saving").exists()


def test_the_process_may_change_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with held() as go:
        saving = fds.save_async("run", small_state(1), Template(small_state()))
        os.chdir("other")
        go.set()
        assert saving.wait() == Path("run/step00000001")
    assert num_calls(fds.load(tmp_path / "run", Template(small_state()), {})[0]) == 1


def test_a_forked_process_cannot_wait(tmp_path):
    with held() as go:
        saving = fds.save_async(tmp_path, small_state(1), Template(small_state()))
        pid = os.fork()
        if not pid:
            try:
                saving.wait()
            except StorageError as error:
                os._exit(7 if "forked" in error.what else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        go.set()
    saving.wait()


def test_a_thread_that_cannot_start_leaves_nothing_behind(tmp_path, monkeypatch):
    state = small_state(1)

    def start(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            fds.save_async(tmp_path, state, Template(state))
    assert not state.token.readers and not (tmp_path / ".saving").exists()
    fds.save(tmp_path, state, Template(state))


def test_memory_that_is_given_up_under_another_token_is_left_alone(tmp_path):
    """A step copies what a save reads, whichever state it belongs to."""
    step = fds.compose(fds.donate(), fds.adamw(0.1))(lambda params, batch: (params * batch).sum())
    state = step.init(torch.ones(40))
    with held() as go:
        saving = fds.save_async(tmp_path, state, step)
        step(fds.tree.map(lambda x: x, state), torch.ones(40))
        go.set()
        saving.wait()
    assert_same_bits(fds.load(tmp_path, step, torch.ones(40))[0], state)
