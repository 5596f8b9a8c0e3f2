"""Two runs in one directory: the second is refused, one that is started again and loads goes on, each keeps its own."""

import json
import os
import shutil

import pytest
import torch

import fds
from fds.errors import StorageError
from fds.storage.disk import folders
from fds.storage.ranks import draft
from tests import ranks
from tests.storage.faults import at_request
from tests.storage.killing import die, in_a_child
from tests.storage.killing_ranks import make_step, state_at
from tests.storage.states import Template, num_calls, rewrite, small_state

STEP, OTHER = Template(small_state()), "0f" * 16


def save(dir, calls, tag=None, *, begin=fds.save, **options):
    saved = begin(dir, small_state(calls), STEP, tag, **options)
    return saved if begin is fds.save else saved.wait()


def load(dir, **options):
    return num_calls(fds.load(dir, STEP, {}, **options)[0])


def run_of(folder):
    return json.loads((folder / "manifest.json").read_text())["run"]


def of_another_run(folder):
    rewrite(folder, lambda record: record.update(run=OTHER))


def work(dir, *doings):
    """What a process of its own does, one after another; it says what it was told."""
    for doing, calls, options in doings:
        try:
            save(dir, calls, **options) if doing == "save" else load(dir, **options)
        except StorageError as error:
            print("REFUSED", error.what)


def alone(dir, *doings):
    status, told = ranks.alone(work, dir, *doings)
    assert status == 0, told
    return [line.removeprefix("REFUSED ") for line in told.splitlines() if line.startswith("REFUSED")]


def test_a_second_run_is_refused_at_its_first_save_and_changes_nothing(tmp_path):
    save(tmp_path, 10)
    folder = save(tmp_path, 20, keep=2)
    before = sorted(os.listdir(tmp_path))
    blind = [("save", 7, {"keep": 1}), ("save", 8, {"begin": fds.save_async}), ("save", 9, {"tag": "best"})]
    assert alone(tmp_path, *blind) == ["another run has saved here"] * 3
    assert sorted(os.listdir(tmp_path)) == before
    assert save(tmp_path, 30).name == "step00000030" and run_of(folder) == run_of(tmp_path / "step00000010")


def test_the_error_says_which_run_when_saved_and_how_composed(tmp_path):
    folder = save(tmp_path, 3)
    of_another_run(folder)
    with pytest.raises(StorageError) as caught:
        save(tmp_path, 4)
    saved = json.loads((folder / "manifest.json").read_text())["saved"]
    assert all(text in caught.value.got for text in ("step00000003", OTHER, saved, "adamw(0.1)"))
    assert "fds.load" in caught.value.hint and "take_over=True" in caught.value.hint
    assert caught.value.where == str(tmp_path)


def test_a_run_that_is_started_again_loads_and_goes_on(tmp_path):
    first = save(tmp_path, 1)
    assert alone(tmp_path, ("load", 0, {}), ("save", 2, {}), ("save", 3, {"begin": fds.save_async, "keep": 2})) == []
    assert folders.tags(tmp_path) == ["step00000002", "step00000003"] and not first.exists()
    assert run_of(tmp_path / "step00000003") == folders.remembered_run(tmp_path)
    save(tmp_path, 4)  # of the same run


def test_a_run_that_another_has_taken_over_is_told_when_it_comes_back(tmp_path):
    mine = run_of(save(tmp_path, 1))
    take = {"take_over": True, "keep": 1}
    assert alone(tmp_path, ("save", 2, take), ("save", 3, take), ("save", 4, {"keep": 1})) == []
    assert folders.tags(tmp_path) == ["step00000001", "step00000004"]  # each keeps its own
    theirs = run_of(tmp_path / "step00000004")
    for options in ({}, {"keep": 1}, {"begin": fds.save_async}):
        with pytest.raises(StorageError, match="another run has saved here"):
            save(tmp_path, 5, **options)
    with pytest.raises(StorageError, match="of another run") as caught:
        load(tmp_path)
    assert theirs in caught.value.got and mine in caught.value.want
    assert load(tmp_path, tag="step00000001") == 1  # its own
    assert load(tmp_path, take_over=True) == 4 and folders.remembered_run(tmp_path) == theirs
    assert run_of(save(tmp_path, 5)) == theirs


def test_a_process_that_only_loads_goes_on_loading_and_may_not_save_elsewhere_by_it(tmp_path):
    save(tmp_path / "run", 1)
    assert load(tmp_path / "run") == 1
    assert alone(tmp_path / "run", ("load", 0, {}), ("load", 0, {})) == []
    mine = run_of(save(tmp_path / "other", 1))
    assert mine != run_of(tmp_path / "run" / "step00000001")
    os.symlink(tmp_path / "run", tmp_path / "link")
    assert run_of(save(tmp_path / "link", 2)) == run_of(tmp_path / "run" / "step00000001")


def load_and_die(dir):
    load(dir)
    with at_request(25, die):
        save(dir, 2)


def test_a_run_that_was_killed_while_it_saved_goes_on_when_it_loads(tmp_path):
    save(tmp_path, 1)
    assert ranks.alone(load_and_die, tmp_path)[0] == -9
    assert alone(tmp_path, ("save", 2, {}), ("load", 0, {}), ("save", 2, {})) == ["another run has saved here"]
    assert load(tmp_path) == 2 and not (tmp_path / ".saving").exists()


def test_a_forked_process_is_of_its_parents_run(tmp_path):
    save(tmp_path, 1)
    assert os.waitpid(in_a_child(lambda: save(tmp_path, 2)), 0)[1] == 0
    save(tmp_path, 3)
    assert len({run_of(tmp_path / tag) for tag in folders.tags(tmp_path)}) == 1


def test_two_runs_that_begin_at_once_are_not_both_the_first(tmp_path, monkeypatch):
    save(tmp_path / "other", 1)
    plain = draft.publish

    def late(dir, *more, **options):
        if dir == tmp_path / "run":
            shutil.copytree(tmp_path / "other", dir, dirs_exist_ok=True)
        return plain(dir, *more, **options)

    monkeypatch.setattr(draft, "publish", late)
    with pytest.raises(StorageError, match="another run has saved here"):
        save(tmp_path / "run", 2)
    monkeypatch.undo()
    assert folders.remembered_run(tmp_path / "run") is None and load(tmp_path / "run") == 1
    save(tmp_path / "run", 2)


def test_a_copied_tag_begins_a_directory_and_is_of_another_run_elsewhere(tmp_path):
    source = save(tmp_path / "run", 1, "best")
    shutil.copytree(source, tmp_path / "new" / "best")
    assert load(tmp_path / "new", tag="best") == 1
    assert run_of(save(tmp_path / "new", 2)) == run_of(source)
    save(tmp_path / "third", 3)
    shutil.copytree(source, tmp_path / "third" / "best")
    with pytest.raises(StorageError, match="of another run"):
        load(tmp_path / "third", tag="best")
    save(tmp_path / "third", 4, keep=1)
    assert folders.tags(tmp_path / "third") == ["best", "step00000004"]
    told = alone(tmp_path / "third", ("load", 0, {"tag": "best"}), ("save", 5, {}))
    assert told == ["another run has saved here"]


def test_saves_of_older_versions_are_of_whoever_goes_on_with_them(tmp_path):
    for calls in (1, 2, 3):
        rewrite(save(tmp_path, calls), lambda record: record.pop("run") and None)
    assert alone(tmp_path, ("load", 0, {}), ("save", 4, {"keep": 2})) == []
    assert folders.tags(tmp_path) == ["step00000003", "step00000004"]
    assert alone(tmp_path, ("load", 0, {"tag": "step00000003"}), ("save", 5, {})) == []
    shutil.rmtree(tmp_path / "step00000004")
    shutil.rmtree(tmp_path / "step00000005")
    (tmp_path / "latest").write_text("step00000003\n")
    assert alone(tmp_path, ("save", 6, {})) == []  # not refused without a load either


@pytest.mark.parametrize("run", ["", "0F" * 16, "0f" * 17, "\x1b" * 32])
def test_what_is_no_id_of_a_run_is_refused(tmp_path, run):
    rewrite(save(tmp_path, 1), lambda record: record.update(run=run))
    with pytest.raises(StorageError, match="not the id of a run"):
        load(tmp_path)


@pytest.mark.parametrize("local", [False, True])
def test_ranks_agree_on_the_run_and_are_refused_together(tmp_path, local):
    place = tmp_path / "rank1" if local else tmp_path

    def body(doing, **options):
        step = make_step(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=1))
        try:
            if doing == "load":
                return int(
                    fds.load(tmp_path, step, {"w": torch.zeros(8), "b": torch.zeros(3)}, local=local, **options)[
                        0
                    ].calls
                )
            return run_of(fds.save(tmp_path, state_at(step, doing, 8), step, local=local, **options))
        except StorageError as error:
            return error.what

    def on_ranks(doing, **options):
        (answer,) = set(fds.simulate(lambda: body(doing, **options), 2))
        return answer

    mine = on_ranks(1)
    assert on_ranks(2) == mine == folders.remembered_run(tmp_path)
    of_another_run(place / "step00000002")
    which = "rank 1" if local else "rank 0"
    assert on_ranks(3) == f"{which}: another run has saved here" == on_ranks(3, keep=1)
    assert on_ranks(3, take_over=True) == mine
    for folder in tmp_path.glob("**/step00000003"):
        of_another_run(folder)
    assert on_ranks("load") == "rank 0: this save is of another run than the one that this process began or loaded here"
    assert on_ranks("load", take_over=True) == 3 and on_ranks(4) == OTHER
    if local:
        rewrite(folder, lambda record: record.update(run=mine))
        assert "do not agree on the run of the save" in on_ranks("load", take_over=True, tag="step00000003")
