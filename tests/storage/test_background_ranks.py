"""`save_async` on ranks that share a state: what one of them meets with, all are told; who is lost hangs nobody."""

import errno
import os
import threading
import time
from unittest import mock

import pytest

import fds
from fds import plans
from fds.errors import RankError, StorageError
from fds.storage import saving as background
from fds.storage.disk import folders
from fds.storage.format import manifest
from fds.storage.ranks import draft
from fds.storage.ranks.exchange import Ranks
from tests import ranks
from tests.bits import assert_same_bits, snapshot
from tests.storage import killing_background, test_pipelines as pipelines
from tests.storage.holding import held
from tests.storage.test_load_options import ADAM, EMA, SCALE, make
from tests.storage.topologies import Stages, Topology, plain, roll

TOPOLOGIES = {
    "stage 1": Topology(3, 1, 300),
    "stage 3, copies": Topology(4, 3, 300, replicas=2),
    "pp2": Stages(2),
    "pp2 x dp2, stage 3": Stages(2, plans.one_f_one_b, 2, 3),
}
each = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)


def begin(topology, *more):
    step = make(topology, ADAM, EMA, SCALE, *more)
    return step, step.init(step.loss.init, key=3)


def go_on(topology, step, state):
    if isinstance(topology, Stages):
        return pipelines.train(step, state, 1)
    return step(state, tuple(roll(x, step.shard.data.index) for x in pipelines.BATCH))[0]


def load(dir, topology, tag=None):
    step, _ = begin(topology)
    return plain(fds.load(dir, step, step.loss.init, tag=tag)[0], step)


@each
def test_it_writes_the_files_that_save_writes(tmp_path, topology):
    def body():
        step, state = begin(topology)
        here = fds.save(tmp_path, state, step, "here")
        return here, fds.save_async(tmp_path, state, step, "aside").wait()

    ((here, aside),) = set(topology.run(body))
    assert manifest.read_manifest(here).leaves == manifest.read_manifest(aside).leaves
    read = lambda folder: {path.name: path.read_bytes() for path in folder.glob("rank*")}
    assert read(here) == read(aside) and folders.find(tmp_path, None) == aside


@pytest.mark.sweep
@each
@pytest.mark.parametrize("more", [(), (fds.donate(),)], ids=["pure", "donate"])
def test_steps_go_on_and_the_state_that_is_saved_is_that_of_the_call(tmp_path, topology, more):
    with held() as go:

        def body():
            step, state = begin(topology, *more)
            state = go_on(topology, step, state)
            want = plain(snapshot(state), step)
            saving = fds.save_async(tmp_path, state, step)
            for _ in range(2):
                state = go_on(topology, step, state)
            assert not saving.done()
            step.everyone.exchange(None)  # all have gone on
            go.set()
            saving.wait()
            assert saving.done()
            return want

        want = topology.run(body)
    assert_same_bits(topology.run(lambda: load(tmp_path, topology)), want)


@pytest.mark.sweep
@pytest.mark.parametrize("second", [None, fds.save, fds.save_async], ids=["wait", "save", "save_async"])
@pytest.mark.parametrize("which", range(4))
def test_all_ranks_are_told_what_one_of_them_met_with(tmp_path, which, second):
    topology = TOPOLOGIES["pp2 x dp2, stage 3"]
    plain_write = background._write_aside

    def write(path, head, spans):
        if path.endswith(f"two/rank{which}.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if path.endswith("two/rank2.safetensors"):
            time.sleep(0.1)  # it makes its file when the others have ended
        return plain_write(path, head, spans)

    def body():
        step, state = begin(topology)
        fds.save(tmp_path, state, step, "one")
        saving = fds.save_async(tmp_path, state, step, "two")
        with pytest.raises(StorageError) as error:
            saving.wait() if second is None else second(tmp_path, state, step, "three")
        before = sorted(os.listdir(tmp_path))
        step.everyone.exchange(None)
        fds.save_async(tmp_path, state, step, "four").wait()
        assert not state.token.readers
        return error.value.what, error.value.got, before

    with mock.patch.object(background, "_write_aside", write):
        told = topology.run(body)
    what = f"rank {which}: the file system refuses this save"
    assert told == [(what, os.strerror(errno.ENOSPC), [".lock", "latest", "one"])] * 4
    assert folders.tags(tmp_path) == ["four", "one"] and not (tmp_path / ".saving").exists()


@each
def test_an_agreement_that_fails_begins_nothing(tmp_path, topology):
    def body():
        step, state = begin(topology)
        extra = {"bad": (1,)} if step.everyone.index == 1 else None
        with pytest.raises(StorageError) as error:
            fds.save_async(tmp_path, state, step, extra=extra)
        assert not state.token.readers
        return error.value.what

    assert set(topology.run(body)) == {"rank 1: extra has a value that JSON would change"}
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_rank_that_cannot_begin_is_an_error_on_all(tmp_path, which, monkeypatch):
    topology = TOPOLOGIES["stage 1"]
    plain_lock, plain_publish = background.lock_file, draft.publish

    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def body():
        step, state = begin(topology)
        fds.save(tmp_path, state, step, "one")
        with pytest.raises(StorageError) as error:
            fds.save_async(tmp_path, state, step, "two")
        assert not state.token.readers
        return error.value.what

    mine = f"rank{which}.lock"
    monkeypatch.setattr(background, "lock_file", lambda path: fail() if path.name == mine else plain_lock(path))
    if which == 0:
        publish = lambda dir, tag, *more, **kw: fail() if tag == "two" else plain_publish(dir, tag, *more, **kw)
        monkeypatch.setattr(draft, "publish", publish)
    (what,) = set(topology.run(body))
    assert what.startswith(f"rank {which}: ")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "one"]
    topology.run(lambda: fds.save_async(tmp_path, begin(topology)[1], begin(topology)[0], "three").wait())
    assert folders.tags(tmp_path) == ["one", "three"]


def on_gloo(dir, name):
    topology = TOPOLOGIES[name]
    step, state = begin(topology, fds.donate())
    for calls in range(3):
        state = go_on(topology, step, state)
        want = plain(snapshot(state), step)
        saving = fds.save_async(dir, state, step, f"at{calls}", keep=2)
    with saving:
        state = go_on(topology, step, state)
    assert_same_bits(load(dir, topology), want)
    try:
        fds.save_async(dir, state, step, "bad", extra={"a": (1,)} if step.everyone.index else None)
    except StorageError as error:
        return error.what


@pytest.mark.parametrize("name", ["stage 1", "pp2 x dp2, stage 3"])
def test_real_ranks_save_while_they_train(tmp_path, name):
    told = ranks.run(on_gloo, str(tmp_path), name, world_size=TOPOLOGIES[name].ranks)
    assert set(told) == {"rank 1: extra has a value that JSON would change"}
    assert folders.tags(tmp_path) == ["at0", "at1", "at2"] and not (tmp_path / ".saving").exists()


def wait_for_one_that_hangs(dir):
    """Return what the first rank is told when the time that ranks wait for each other is over."""
    topology, plain_write, over = Topology(2, 1, 300), background._write_aside, threading.Event()
    step, state = begin(topology)
    fds.save(dir, state, step, "before")
    assert step.everyone.timeout == 30

    def write(path, head, spans):
        over.wait(20)
        return plain_write(path, head, spans)

    hangs = step.everyone.index == 1
    with (
        mock.patch.object(background, "_write_aside", write if hangs else plain_write),
        mock.patch.object(Ranks, "timeout", 0.5),
    ):
        saving = fds.save_async(dir, state, step, "late")
        told = ""
        if not hangs:
            with pytest.raises(RankError) as error:
                saving.wait()
            told = error.value.what
            assert saving.done()  # nothing keeps the process from its end
        step.everyone.exchange(None)
        over.set()
        saving.thread.join()
    return told


def test_a_rank_that_hangs_is_named_when_the_time_is_over(tmp_path):
    first, _ = ranks.run(wait_for_one_that_hangs, str(tmp_path))
    assert first == "rank 1 did not write its part of the save in time"
    assert folders.tags(tmp_path) == ["before"]


def test_a_rank_that_is_killed_does_not_hang_the_others_and_the_save_before_loads(tmp_path):
    status, told = ranks.alone(killing_background.main, tmp_path)
    assert status == 0, told
    assert told.count("the last complete save loads") == 4
