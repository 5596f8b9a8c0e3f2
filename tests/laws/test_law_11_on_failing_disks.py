"""Law 11 on ranks of which one has a disk that fails: all say so, and go on from the state before, bit for bit."""

import contextlib
import errno
import math
import os

import pytest
import torch

import fds
from fds.errors import DiskError, DiskFullError, DonatedStateError, FdsError
from fds.media.arena import Arena
from fds.step import fill, transform
from tests import ranks
from tests.bits import assert_same_bits, snapshot
from tests.laws import problems
from tests.laws.mapped import Mapped
from tests.laws.test_law_4_sharding import batch_of, share
from tests.laws.test_law_11_residency import ALL


@contextlib.contextmanager
def opened_as(disk, flags):
    """Let a disk read, or write, its file no more."""
    fd = disk._open[0].arena.file.fd
    good, bad = os.dup(fd), os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT)
    os.dup2(bad, fd)
    try:
        yield
    finally:
        os.dup2(good, fd)
        os.close(good)
        os.close(bad)


@contextlib.contextmanager
def full(disk):
    """Let the disk be full."""

    def refuse(arena, nbytes):
        raise DiskFullError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "take", refuse)
        yield


FAILS = {
    "read": lambda disk: opened_as(disk, os.O_WRONLY),
    "write": lambda disk: opened_as(disk, os.O_RDONLY),
    "full": full,
}


def train(directory, stage, optimizer):
    """Return what each failure raised on a rank, and the parameters of a run that met all and of one that met none."""
    axis, problem = fds.mesh(dp=-1)["dp"], problems.layers(5, torch.float32, 0.0, False)
    parts = [fds.shard_optimizer(axis, stage=stage, bucket_bytes=64), fds.ema(0.9), ALL[optimizer]()]
    disk, told = fds.disk(directory), []
    plain = fds.compose(*parts)(problem.loss)
    step = fds.compose(fds.offload(disk, masters=disk, gradients=disk), *parts)(problem.loss)
    batch = share(batch_of(problem, 2 * axis.size), axis.index, axis.size)
    want, state, held = plain.init(problem.params), step.init(problem.params), []
    for fails in FAILS.values():
        want, state = plain(want, batch)[0], step(state, batch)[0]
        held.append(state)  # so that the next one needs room
        before = snapshot(state)
        with fails(disk) if axis.index == axis.size - 1 else contextlib.nullcontext():
            for call in (step, step.evaluate, lambda state, batch: step.params(state)):
                try:
                    call(state, batch)
                except DiskError as error:
                    told.append(str(error))
                else:
                    told.append("")
        assert_same_bits(state, before)
    return told, step.params(state), plain.params(want)


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "adamw"), (1, "lamb"), (3, "muon")])
def test_all_ranks_say_which_disk_failed_and_go_on(tmp_path, stage, optimizer):
    """Real ranks: one that waited for another would wait for as long as the test may take."""
    (other, found, want), (own, _, _) = ranks.run(train, tmp_path, stage, optimizer)
    assert_same_bits(found, want)
    read = ["failed to read"] * 3
    for texts in (own, other):  # of step, evaluate and params
        assert [word in text for word, text in zip([*read, "failed to write"], texts, strict=False)] == [True] * 4
        assert "the disk is full" in texts[6] and texts[4:6] == texts[7:] == ["", ""]
    assert all(text.startswith("another rank could not") and "rank 1 of dp" in text for text in other if text)


def begin(directory, kind):
    """Return what `init` raises where a rank has no room, and a step where a rank cannot write what it has updated."""
    axis, problem = fds.mesh(dp=-1)["dp"], problems.layers(5, torch.float32, 0.0, False)
    disk = fds.disk(directory)
    shard = fds.shard_optimizer(axis, stage=2, bucket_bytes=64)
    step = fds.compose(fds.offload(**{kind: disk}), shard, fds.adamw(0.01))(problem.loss)
    kept = disk.make(torch.zeros(1))
    with full(disk) if axis.index else contextlib.nullcontext(), pytest.raises(FdsError) as caught:
        step.init(problem.params)
    del kept
    state, batch = step.init(problem.params), share(batch_of(problem, 2 * axis.size), axis.index, axis.size)
    before = snapshot(state)
    with (
        opened_as(disk, os.O_RDONLY) if axis.index else contextlib.nullcontext(),
        pytest.raises(DiskError) as unwritten,
    ):
        step(state, batch)
    assert_same_bits(state, before)
    step(state, batch)
    return str(caught.value), str(unwritten.value)


@pytest.mark.parametrize("kind", ["moments", "masters"])
def test_all_ranks_say_where_there_is_no_room_and_whose_update_was_not_written(tmp_path, kind):
    (other, theirs), (own, mine) = ranks.run(begin, tmp_path, kind)
    assert own == "the disk is full" and own in other and "where: rank 1" in other
    assert "failed to write" in mine and "failed to write" in theirs and "rank 1 of dp" in theirs


class Failing(Mapped):
    """Fail at the n-th of what it is asked to make, read or write."""

    fails = ("", 0)

    def check(self, what):
        name, rest = self.fails
        self.fails = (name, rest - (name == what))
        if self.fails == (what, -1):
            raise OSError("the disk is full")

    def make(self, x, leaf):
        self.check("make")
        return super().make(x, leaf)


AXES = {
    "stage 0": ({"dp": 2}, lambda mesh: [fds.shard_optimizer(mesh["dp"], stage=0, bucket_bytes=64)]),
    "stage 1": ({"dp": 2}, lambda mesh: [fds.shard_optimizer(mesh["dp"], stage=1, bucket_bytes=64)]),
    "stage 3": ({"dp": 2}, lambda mesh: [fds.shard_optimizer(mesh["dp"], stage=3, bucket_bytes=64)]),
    "pipeline": ({"pp": 2}, lambda mesh: [fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=2)]),
    "local updates": (
        {"replica": 2, "dp": 2},
        lambda mesh: [
            fds.local_updates(mesh["replica"], every=2),
            fds.shard_optimizer(mesh["dp"], stage=1, bucket_bytes=64),
        ],
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("what", "n"), [("make", 0), ("make", 9), ("read", 0), ("read", 5), ("write", 0)])
@pytest.mark.parametrize(("axes", "early"), [*((x, False) for x in AXES), ("stage 1", True), ("stage 3", True)])
def test_whatever_fails_on_one_rank_is_raised_on_all_and_the_state_goes_on(tmp_path, axes, early, what, n):
    shape, parts = AXES[axes]
    local = "replica" in shape
    problem, kinds = problems.layers(5, torch.float32, 0.0, False), ("params", "opt", "gradients")
    fails = (what, n % 2 if local else n)

    def body():
        mesh, residency = fds.mesh(**shape), Failing(tmp_path, ("slots",) if local else kinds)
        step = fds.compose(
            placed(residency, early), *parts(mesh), fds.clip_by_global_norm(0.1), fds.ema(0.9), fds.adamw(0.01)
        )(problem.loss)
        state = step.init(problem.params)
        batch = problem.batch
        if "pp" not in shape:
            batch = share(batch_of(problem, 2 * math.prod(shape.values())), mesh.rank, math.prod(shape.values()))
        state, _ = step(state, batch)
        want, _ = step(state, batch)
        before = snapshot(state)
        residency.fails = fails if mesh.rank == math.prod(shape.values()) - 1 else ("", 0)
        with pytest.raises((OSError, DiskError), match="the disk is full") as caught:
            step(state, batch)
        residency.fails = ("", 0)
        assert_same_bits(state, before)
        assert_same_bits(step(state, batch)[0], want)
        return caught.type

    *others, own = fds.simulate(body, math.prod(shape.values()))
    assert own is OSError and set(others) == {DiskError}


@transform
def placed(residency, early):
    return lambda step: fill(step, place={"residency": residency, "speculate": early})


def spend(directory):
    """Return what a donated step raises where a rank cannot write what it has updated, and then one with its state."""
    axis, problem = fds.mesh(dp=-1)["dp"], problems.layers(5, torch.float32, 0.0, False)
    disk, shard = fds.disk(directory), fds.shard_optimizer(axis, stage=2, bucket_bytes=64)
    step = fds.compose(fds.offload(moments=disk), shard, fds.donate(), fds.adamw(0.01))(problem.loss)
    state, batch = step.init(problem.params), share(batch_of(problem, 2 * axis.size), axis.index, axis.size)
    fails = opened_as(disk, os.O_RDONLY) if axis.index else contextlib.nullcontext()
    with fails, pytest.raises(DiskError) as caught:
        step(state, batch)
    with pytest.raises(DonatedStateError) as after:
        step(state, batch)
    return [*caught.value.__notes__, str(after.value)]


def test_a_donated_state_that_is_lost_is_said_to_be_on_all_ranks(tmp_path):
    for note, after in ranks.run(spend, tmp_path):
        assert "written over parts of it: load the last save" in note and "if it failed, load the last save" in after


@pytest.mark.parametrize("donated", [False, True])
def test_a_disk_that_is_full_is_said_to_need_what_describe_says(tmp_path, monkeypatch, donated):
    problem = problems.layers(5, torch.float32, 0.0, False)
    disk, parts = fds.disk(tmp_path), [*[fds.donate()] * donated, fds.adamw(0.01)]
    step = fds.compose(fds.offload(moments=disk, gradients=disk), *parts)(problem.loss)

    def refuse(fd, start, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DiskFullError) as caught:
        step.init(problem.params)
    monkeypatch.undo()
    told = step.describe(step.structure(problem.params))
    place, (note,) = f"disk {tmp_path}", caught.value.__notes__
    state, sums = (
        f"{told.places[place]:,} bytes in {place} for the state",
        f"{told.num_bytes['gradients']:,} in {place}",
    )
    state += ", twice unless steps donate it" * (not donated)
    assert note == f"in all a run needs {state}; {sums} for sums of gradients"
    state = step.init(problem.params)
    with full(disk), pytest.raises(DiskFullError) as caught:
        step(state, problem.batch)
    assert caught.value.__notes__ == [note]
