"""`local=True`: ranks without a common file system, each with a directory of its own."""

import errno
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

import fds
from fds import plans
from fds.errors import StorageError
from fds.storage.disk import folders, writer
from tests.bits import assert_same_bits
from tests.storage import test_pipelines as pipelines
from tests.storage.holding import until
from tests.storage.states import rewrite
from tests.storage.test_load_options import ADAM, EMA, SCALE, make
from tests.storage.topologies import Stages, Topology, plain

TOPOLOGIES = {
    "plain": None,
    "stage 0": Topology(2, 0),
    "stage 1": Topology(3, 1, 300),
    "stage 3, copies": Topology(4, 3, 300, replicas=2),
    "pp2": Stages(2, partition=[0, 3, 8]),
    "pp2 x dp2, stage 2": Stages(2, plans.zb_h1, 2, 2),
}
BEGIN = {"save": fds.save, "save_async": lambda *args, **kwargs: fds.save_async(*args, **kwargs).wait()}
begun = pytest.mark.parametrize("save", BEGIN.values(), ids=BEGIN)
each = pytest.mark.parametrize("name", TOPOLOGIES)


def rank() -> int:
    return fds.mesh(all=-1).rank


def machine(dir: Path, index: int) -> Path:
    """Return the directory that only one rank sees."""
    return dir / f"machine{index}"


def on(topology, body):
    return [body(0)] if topology is None else topology.run(lambda: body(rank()))


def state_on(topology, key=3):
    step = make(topology, ADAM, EMA, SCALE)
    return step, step.init(step.loss.init, key=key)


def saved(dir: Path, topology, save, *, key=3, **kwargs):
    """Save on each rank's machine; return every rank's state, and the plain leaves."""

    def body(index):
        step, state = state_on(topology, key)
        folder = save(machine(dir, index), state, step, extra={"rank": index}, local=True, **kwargs)
        assert folder.parent == machine(dir, index) / f"rank{index}"
        return state, plain(state, step)

    states, leaves = zip(*on(topology, body), strict=True)
    return list(states), pipelines.in_order(pipelines.joined(list(leaves)))


def loaded(dir: Path, topology, **kwargs):
    def body(index):
        step, _ = state_on(topology)
        return fds.load(machine(dir, index), step, step.loss.init, local=True, **kwargs)

    return list(on(topology, body))


def told(dir: Path, topology, at=machine, **kwargs) -> StorageError:
    """Return what every rank raises on loading, the same text on all."""

    def body(index):
        step, _ = state_on(topology)
        with pytest.raises(StorageError) as error:
            fds.load(at(dir, index), step, step.loss.init, local=True, **kwargs)
        return error.value

    errors = on(topology, body)
    assert len({str(one) for one in errors}) == 1, errors
    return errors[0]


def brought_together(dir: Path) -> Path:
    for path in dir.glob("machine*/rank*"):
        shutil.copytree(path, dir / "all" / path.name)
    return dir / "all"


@pytest.mark.sweep
@begun
@each
def test_the_same_ranks_read_each_what_it_wrote(tmp_path, name, save):
    topology = TOPOLOGIES[name]
    states, _ = saved(tmp_path, topology, save)
    found = loaded(tmp_path, topology)
    assert_same_bits([state for state, _ in found], states)  # padding included
    assert [extra for _, extra in found] == [{"rank": i} for i in range(len(states))]
    for i in range(len(states)):
        assert sorted(os.listdir(machine(tmp_path, i))) == [f"rank{i}"]
        files = {path.name for path in (machine(tmp_path, i) / f"rank{i}" / "step00000000").iterdir()}
        assert files == {"manifest.json", f"rank{i}.safetensors"}


@each
def test_brought_together_any_topology_reads_them(tmp_path, name):
    _, want = saved(tmp_path, TOPOLOGIES[name], fds.save)
    dir, names = brought_together(tmp_path), list(TOPOLOGIES)
    for i in (0, 1, 3):
        other = TOPOLOGIES[names[(names.index(name) + i) % len(names)]]

        def body(index, other=other):
            step, _ = state_on(other)
            return plain(fds.load(dir, step, step.loss.init, local=True)[0], step)

        assert_same_bits(pipelines.in_order(pipelines.joined(on(other, body))), want)


def test_ranks_that_see_each_other_may_be_any_topology_at_once(tmp_path):
    """In one directory the ranks' own lie side by side, as on a file system that is common after all."""

    def save(index):
        step, state = state_on(TOPOLOGIES["pp2"])
        fds.save(tmp_path, state, step, local=True)
        return plain(state, step)

    want = pipelines.in_order(pipelines.joined(on(TOPOLOGIES["pp2"], save)))

    def load(index):
        step, _ = state_on(TOPOLOGIES["stage 1"])
        return plain(fds.load(tmp_path, step, step.loss.init, local=True)[0], step)

    step, _ = state_on(None)
    assert_same_bits(pipelines.in_order(pipelines.joined(on(TOPOLOGIES["stage 1"], load))), want)
    assert_same_bits(plain(fds.load(tmp_path, step, step.loss.init, local=True)[0], step), want)


@pytest.mark.parametrize("other", ["plain", "stage 0", "pp2"])
def test_a_part_that_another_rank_has_is_refused_with_the_way_out(tmp_path, other):
    saved(tmp_path, TOPOLOGIES["stage 1"], fds.save)
    error = told(tmp_path, TOPOLOGIES[other])
    assert error.what.endswith("this part of the save belongs to another rank")
    assert "bring the folders rank0, rank1, ... together" in error.hint and error.got.endswith("of 3")


@each
def test_a_rank_without_its_directory_is_an_error_on_all(tmp_path, name):
    topology = TOPOLOGIES[name]
    states, _ = saved(tmp_path, topology, fds.save)
    shutil.rmtree(machine(tmp_path, len(states) - 1))
    assert "there is no save that all ranks have" in told(tmp_path, topology).what


def test_the_last_save_is_the_last_that_all_have(tmp_path):
    topology = TOPOLOGIES["stage 1"]
    for tag in ("c", "b", "a"):
        saved(tmp_path, topology, fds.save, key=ord(tag), tag=tag)
    states, _ = on(topology, lambda index: state_on(topology, ord("b"))[1]), None
    shutil.rmtree(machine(tmp_path, 1) / "rank1" / "a")
    assert_same_bits([state for state, _ in loaded(tmp_path, topology)], states)
    error = told(tmp_path, topology, tag="a")
    assert "there is no save that all ranks have under 'a'" in error.what and error.want == "b, c"
    assert_same_bits(
        [s for s, _ in loaded(tmp_path, topology, tag="c")], on(topology, lambda index: state_on(topology, ord("c"))[1])
    )


def test_a_tag_of_another_save_under_the_same_name_is_none_that_all_have(tmp_path):
    topology = TOPOLOGIES["stage 0"]
    saved(tmp_path / "one", topology, fds.save, tag="best")
    saved(tmp_path / "two", topology, fds.save, tag="best", key=4)
    shutil.rmtree(machine(tmp_path / "one", 1))
    shutil.copytree(machine(tmp_path / "two", 1), machine(tmp_path / "one", 1))
    assert "there is no save that all ranks have" in told(tmp_path / "one", topology).what


def test_a_tag_that_a_killed_save_had_moved_away_is_found(tmp_path):
    topology = TOPOLOGIES["stage 0"]
    states, _ = saved(tmp_path, topology, fds.save, tag="best")
    run = machine(tmp_path, 1) / "rank1"
    (run / ".saving" / "old").mkdir(parents=True)
    os.rename(run / "best", run / ".saving" / "old" / "best")
    assert_same_bits([state for state, _ in loaded(tmp_path, topology)], states)


class Killed(BaseException):
    """What stands for a signal that ends one rank."""


@pytest.mark.sweep
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("keep", [None, 1])
def test_one_rank_is_lost_when_others_have_published(tmp_path, keep, which):
    """Then what all ranks have is the save before, and no rank has removed it."""
    topology = TOPOLOGIES["stage 1"]
    states, _ = saved(tmp_path, topology, fds.save, tag="step00000001", keep=keep)
    plain_rename = os.rename

    def rename(old, new):
        if str(new) == str(machine(tmp_path, which) / f"rank{which}" / "step00000002"):
            raise Killed
        plain_rename(old, new)

    with mock.patch.object(os, "rename", rename):

        def body(index):
            step, state = state_on(topology, 4)
            with pytest.raises(Killed if index == which else StorageError):
                fds.save(machine(tmp_path, index), state, step, "step00000002", local=True, keep=keep)

        on(topology, body)
    have = [folders.tags(machine(tmp_path, i) / f"rank{i}") for i in range(3)]
    assert have == [["step00000001"] if i == which else ["step00000001", "step00000002"] for i in range(3)]
    assert_same_bits([state for state, _ in loaded(tmp_path, topology)], states)
    after, _ = saved(tmp_path, topology, fds.save, tag="step00000003", key=5, keep=keep)
    assert_same_bits([state for state, _ in loaded(tmp_path, topology)], after)
    if keep:
        assert [folders.tags(machine(tmp_path, i) / f"rank{i}") for i in range(3)] == [["step00000003"]] * 3


@begun
def test_every_rank_keeps_as_many_once_all_have_the_newest(tmp_path, save):
    topology = TOPOLOGIES["stage 1"]
    for key, tag in enumerate(("step00000001", "step00000002", "step00000003")):
        saved(tmp_path, topology, save, key=key, tag=tag, keep=2)
    assert {tuple(folders.tags(machine(tmp_path, i) / f"rank{i}")) for i in range(3)} == {
        ("step00000002", "step00000003")
    }
    assert all(not (machine(tmp_path, i) / f"rank{i}" / ".saving").exists() for i in range(3))


def test_in_the_background_older_saves_go_when_somebody_has_waited_and_once(tmp_path):
    topology = TOPOLOGIES["stage 1"]
    saved(tmp_path, topology, fds.save, tag="step00000001")

    def body(index):
        step, state = state_on(topology)
        run = machine(tmp_path, index) / f"rank{index}"
        first = fds.save_async(machine(tmp_path, index), state, step, "step00000002", local=True, keep=1)
        until(first.done)
        before = folders.tags(run)
        first.wait()
        middle = folders.tags(run)
        fds.save_async(machine(tmp_path, index), state, step, "step00000003", local=True).wait()
        first.wait()
        return before, middle, folders.tags(run)

    assert (
        on(topology, body)
        == [(["step00000001", "step00000002"], ["step00000002"], ["step00000002", "step00000003"])] * 3
    )


@pytest.mark.parametrize("which", range(3))
def test_a_rank_that_cannot_write_is_an_error_on_all(tmp_path, which):
    topology = TOPOLOGIES["stage 1"]
    states, _ = saved(tmp_path, topology, fds.save, tag="one")
    plain_write = writer.write

    def write(path, head, spans):
        if f"machine{which}" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return plain_write(path, head, spans)

    def body(index):
        step, state = state_on(topology, 4)
        with pytest.raises(StorageError) as error:
            fds.save(machine(tmp_path, index), state, step, "two", local=True)
        return error.value.what, error.value.got

    with mock.patch.object(writer, "write", write):
        assert set(on(topology, body)) == {
            (f"rank {which}: the file system refuses this save", os.strerror(errno.ENOSPC))
        }
    for i in range(3):
        assert sorted(os.listdir(machine(tmp_path, i) / f"rank{i}")) == [".lock", "latest", "one"]
    assert_same_bits([state for state, _ in loaded(tmp_path, topology)], states)


@pytest.mark.parametrize("which", range(3))
def test_of_what_is_brought_together_the_last_complete_save_is_read(tmp_path, which):
    _, want = saved(tmp_path, TOPOLOGIES["stage 1"], fds.save, tag="one")
    saved(tmp_path, TOPOLOGIES["stage 1"], fds.save, key=4, tag="two")
    dir = brought_together(tmp_path)
    shutil.rmtree(dir / f"rank{which}" / "two")  # it was killed before it could publish it
    for other in ("plain", "stage 1", "pp2"):

        def body(index, other=other):
            step, _ = state_on(TOPOLOGIES[other])
            return plain(fds.load(dir, step, step.loss.init, local=True)[0], step)

        assert_same_bits(pipelines.in_order(pipelines.joined(on(TOPOLOGIES[other], body))), want)


def test_one_save_for_all_and_local_ones_are_not_taken_for_each_other(tmp_path):
    topology = TOPOLOGIES["stage 0"]
    saved(tmp_path, topology, fds.save)

    def body(index):
        step, _ = state_on(topology)
        with pytest.raises(StorageError) as error:
            fds.load(machine(tmp_path, index), step, step.loss.init)
        return error.value

    error = on(topology, body)[0]
    assert "there is no save here" in error.what and "there are saves in" in error.hint and "rank0" in error.hint

    def other(index):
        step, state = state_on(topology)
        fds.save(tmp_path / "common", state, step)

    on(topology, other)
    assert "there is no save that all ranks have" in told(tmp_path / "common", topology, at=lambda dir, _: dir).what


def test_ranks_that_do_not_agree_on_it_are_refused(tmp_path):
    def body(index):
        step, state = state_on(TOPOLOGIES["stage 0"])
        with pytest.raises(StorageError, match="the ranks do not agree on the options"):
            fds.save(tmp_path, state, step, local=index == 1)

    on(TOPOLOGIES["stage 0"], body)
    assert not os.listdir(tmp_path)


@pytest.mark.sweep(2)
@begun
@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("error", [OSError(errno.EIO, "it fails"), Killed()], ids=["error", "killed"])
def test_a_tag_that_not_all_ranks_replaced_loads_as_it_was(tmp_path, save, which, error):
    """Again and again, until it is replaced on all."""
    topology = TOPOLOGIES["stage 0"]
    states, _ = saved(tmp_path, topology, save, tag="last")
    plain_rename = os.rename

    def rename(old, new):
        if str(new) == str(machine(tmp_path, which) / f"rank{which}" / "last") and "new" in str(old):
            raise error
        plain_rename(old, new)

    def body(index):
        step, state = state_on(topology, 4)
        with pytest.raises((StorageError, Killed)):
            save(machine(tmp_path, index), state, step, "last", local=True, keep=1)

    for _ in range(2):
        with mock.patch.object(os, "rename", rename):
            on(topology, body)
        assert_same_bits([state for state, _ in loaded(tmp_path, topology)], states)
        assert_same_bits([state for state, _ in loaded(tmp_path, topology, tag="last")], states)
    after, _ = saved(tmp_path, topology, save, tag="last", key=5)
    assert_same_bits([state for state, _ in loaded(tmp_path, topology)], after)
    for i in range(2):
        assert sorted(os.listdir(machine(tmp_path, i) / f"rank{i}")) == [".lock", "last", "latest"]


def damaged(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"calls": 0', '"calls": 1'))


@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("together", [False, True])
def test_a_damaged_manifest_of_the_last_save_is_no_older_save_in_silence(tmp_path, which, together):
    topology = TOPOLOGIES["stage 0"]
    states, _ = saved(tmp_path, topology, fds.save, tag="one")
    saved(tmp_path, topology, fds.save, tag="two", key=4)
    dir, at = (brought_together(tmp_path), lambda dir, _: dir) if together else (tmp_path, machine)
    damaged(at(dir, which) / f"rank{which}" / "two")
    for tag in (None, "two"):
        assert "the manifest was changed after it was written" in told(dir, topology, at=at, tag=tag).what

    def body(index):
        step, _ = state_on(topology)
        return fds.load(at(dir, index), step, step.loss.init, tag="one", local=True)[0]

    assert_same_bits(list(on(topology, body)), states)


def test_a_damaged_manifest_of_an_older_save_of_another_rank_is_passed_over(tmp_path):
    topology = TOPOLOGIES["stage 0"]
    saved(tmp_path, topology, fds.save, tag="one")
    _, want = saved(tmp_path, topology, fds.save, tag="two", key=4)
    dir = brought_together(tmp_path)
    damaged(dir / "rank1" / "one")
    step, _ = state_on(None)
    assert_same_bits(plain(fds.load(dir, step, step.loss.init, local=True)[0], step), want)


TAMPERED = {
    "calls": (lambda record: record.update(calls=7), "calls of the save", "7"),
    "number of ranks": (lambda record: record.update(part=[1, 5]), "ranks of the save", "5"),
    "a leaf less": (lambda record: record["leaves"].pop("calls") and None, "leaves of the save", ""),
    "shape": (lambda record: record["leaves"]["key"].update(shape=[2, 1]), "leaf key of the save", "int64 (2, 1)"),
    "dtype": (lambda record: record["leaves"]["key"].update(dtype="float64"), "leaf key of the save", "float64 (2,)"),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("what", TAMPERED)
def test_parts_that_are_not_of_one_save_are_refused_on_every_rank(tmp_path, what, together):
    edit, names, got = TAMPERED[what]
    topology = Topology(2, 1)

    def save(index):
        step, state = state_on(topology)
        fds.save(tmp_path if together else machine(tmp_path, index), state, step, "one", local=True)

    def load(index):
        step, _ = state_on(topology)
        with pytest.raises(StorageError) as error:
            fds.load(tmp_path if together else machine(tmp_path, index), step, step.loss.init, local=True)
        return error.value

    on(topology, save)
    rewrite((tmp_path if together else machine(tmp_path, 1)) / "rank1/one", edit)
    errors = on(topology, load)
    assert len({str(error) for error in errors}) == 1
    assert names in errors[0].what and got in errors[0].got, errors[0]
