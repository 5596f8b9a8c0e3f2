"""`keep=n`: older tags go, and only when the newer one is complete."""

import datetime
import errno
import json
import os

import pytest
import torch

import fds
from fds.errors import StorageError
from fds.storage.disk import folders
from tests import sweeps
from tests.storage.faults import at_request
from tests.storage.holding import held
from tests.storage.states import Template, num_calls, rewrite, small_state
from tests.storage.topologies import Topology

STEP = Template(small_state())


def save(dir, calls, tag=None, **kwargs):
    return fds.save(dir, small_state(calls), STEP, tag, **kwargs)


def found(dir, tag=None):
    return num_calls(fds.load(dir, STEP, {}, tag=tag)[0])


def test_the_newest_are_kept_and_without_it_all_are(tmp_path):
    for calls in (1, 2, 3):
        save(tmp_path, calls)
    assert len(folders.tags(tmp_path)) == 3
    save(tmp_path, 4, keep=2)
    assert folders.tags(tmp_path) == ["step00000003", "step00000004"] and found(tmp_path) == 4
    save(tmp_path, 5, keep=7)
    assert len(folders.tags(tmp_path)) == 3
    save(tmp_path, 6, keep=1)
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step00000006"]


def test_the_age_of_a_save_is_when_it_was_made_and_not_its_name(tmp_path):
    a, b, m, z = (f"step{calls:08d}" for calls in (1, 2, 5, 9))
    for calls, tag in ((1, z), (2, a), (3, m)):
        save(tmp_path, calls, tag)
    save(tmp_path, 4, b, keep=3)
    assert folders.tags(tmp_path) == [a, b, m]
    save(tmp_path, 5, a, keep=2)  # replaced: now it is the newest
    assert folders.tags(tmp_path) == [a, b] and found(tmp_path, a) == 5


def test_saves_with_a_name_are_not_counted_and_stay(tmp_path):
    for calls in range(1, 6):
        save(tmp_path, calls, keep=2)
        if calls in (1, 3):
            save(tmp_path, calls, "best", keep=2)
            save(tmp_path, calls, f"epoch{calls}", keep=1)
    assert folders.tags(tmp_path) == ["best", "epoch1", "epoch3", "step00000004", "step00000005"]
    assert found(tmp_path, "best") == 3 and found(tmp_path) == 5


def set_clock(monkeypatch, year):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz).replace(year=year)

    monkeypatch.setattr(datetime, "datetime", Clock)


@pytest.mark.parametrize("local", [False, True])
def test_a_clock_that_is_set_back_costs_no_save_its_place(tmp_path, monkeypatch, local):
    """The order of saves is that in which they were made, whatever the clocks of the machines said."""
    for calls, year in enumerate((2040, 2026, 2050, 2030, 2029), 1):
        with monkeypatch.context() as patch:
            set_clock(patch, year)
            save(tmp_path, calls, keep=3, local=local)
        kept = [int(tag[4:]) for tag in folders.tags(tmp_path / "rank0" if local else tmp_path)]
        assert kept == list(range(max(calls - 2, 1), calls + 1))
        assert num_calls(fds.load(tmp_path, STEP, {}, local=local)[0]) == calls


def test_a_save_of_the_future_that_was_copied_here_does_not_cost_the_last_one_its_place(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    rewrite(tmp_path / "step00000001", lambda record: record.update(saved="2099-01-01T00:00:00.000000+00:00"))
    save(tmp_path, 3, keep=2)
    assert folders.tags(tmp_path) == ["step00000002", "step00000003"]


def test_a_tag_that_is_replaced_counts_once(tmp_path):
    first, again = "step00000001", "step00000009"
    save(tmp_path, 1)
    for calls in (2, 3, 4):
        save(tmp_path, calls, again, keep=2)
        assert folders.tags(tmp_path) == [first, again] and found(tmp_path) == calls
    save(tmp_path, 5, again, keep=1)
    assert folders.tags(tmp_path) == [again]


def test_what_cannot_be_read_is_nobodys_to_remove(tmp_path):
    save(tmp_path, 1, "broken")
    (tmp_path / "broken" / "manifest.json").write_text("{")
    save(tmp_path, 2, "newer")
    rewrite(tmp_path / "newer", lambda record: {"format": 4})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / "notes").write_text("mine")
    for calls in (3, 4, 5):
        save(tmp_path, calls, keep=2)
    assert folders.tags(tmp_path) == ["broken", "newer", "step00000004", "step00000005"]
    assert (tmp_path / "mine" / "notes").read_text() == (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("date", ["", "~~~", "\U0010ffff", "9999"])
def test_no_date_of_another_save_costs_the_new_one_its_place(tmp_path, date):
    save(tmp_path, 1)
    rewrite(tmp_path / "step00000001", lambda record: record.update(saved=date))
    save(tmp_path, 2, keep=1)
    assert folders.tags(tmp_path) == ["step00000002"] and found(tmp_path) == 2


@pytest.mark.parametrize("keep", [0, -1, True, False, "3", 1.0, [1]])
def test_what_is_no_number_of_saves_is_refused(tmp_path, keep):
    for begin in (fds.save, fds.save_async):
        with pytest.raises(StorageError) as error:
            begin(tmp_path / "run", small_state(), STEP, keep=keep)
        assert (error.value.where, error.value.got) == ("keep", repr(keep))
    assert not os.listdir(tmp_path)


@pytest.mark.sweep
def test_an_error_at_any_request_leaves_the_last_complete_save(tmp_path):

    def fail(request):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    n, refused = 0, 0
    while True:
        dir = tmp_path / str(n)
        save(dir, 1)
        save(dir, 2)
        try:
            with at_request(n, fail) as made:
                save(dir, 3, keep=1)
        except StorageError:
            refused += 1
            if "replace" not in made[:n]:
                assert found(dir) == 2 and folders.tags(dir) == ["step00000001", "step00000002"]
            assert found(dir) in (2, 3)
        else:
            assert found(dir) == 3
            if len(made) <= n:
                break  # there was no such request
        save(dir, 4, keep=1)
        assert sorted(os.listdir(dir)) == [".lock", "latest", "step00000004"]
        n += sweeps.STRIDE
    assert folders.tags(dir) == ["step00000003"] and refused >= 20 // sweeps.STRIDE


def test_while_a_save_runs_in_the_background_the_older_ones_are_there(tmp_path):
    save(tmp_path, 1)
    with held(after=True) as go:
        saving = fds.save_async(tmp_path, small_state(2), STEP, keep=1)
        assert folders.tags(tmp_path) == ["step00000001"] and found(tmp_path) == 1
        go.set()
        saving.wait()
    assert folders.tags(tmp_path) == ["step00000002"] and found(tmp_path) == 2


def test_a_save_in_the_background_that_fails_costs_no_older_one(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def fail(path, head, spans):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fds.storage.saving, "_write_aside", fail)
    saving = fds.save_async(tmp_path, small_state(2), STEP, keep=1)
    with pytest.raises(StorageError, match="No space left"):
        saving.wait()
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step00000001"] and found(tmp_path) == 1


def test_ranks_keep_as_many_and_agree_on_the_number(tmp_path):
    def body(keep):
        step = fds.compose(Topology(2, 1).shard(), fds.sgd(0.1))(lambda params, batch: (params * batch).sum())
        state = step.init(torch.ones(40))
        for _ in range(3):
            state, _ = step(state, torch.ones(()))
            fds.save(tmp_path, state, step, keep=2)
        try:
            fds.save(tmp_path, state, step, keep=keep())
        except StorageError as error:
            return str(error)

    told = fds.simulate(lambda: body(lambda: 1 + fds.mesh(dp=-1).rank), 2)
    assert told[0] == told[1] and "the ranks do not agree on the options" in told[0] and "keep=2" in told[0]
    assert folders.tags(tmp_path) == ["step00000002", "step00000003"]
    assert json.loads((tmp_path / "step00000003" / "manifest.json").read_text())["files"].keys() == {
        "rank0.safetensors",
        "rank1.safetensors",
    }
