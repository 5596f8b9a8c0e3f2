"""`fds.elastic.run`: runs that stop and go on with other ranks are the run that nothing disturbed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import fds
from fds.collectives import mesh
from fds.elastic._start import Start
from fds.errors import ElasticityError, FdsError, RankError, ResizeError
from fds.media.locks import lock_file
from fds.storage import shelf
from tests.elastic import job
from tests.elastic.agents import undisturbed

CALLS, SAVE_EVERY = 12, 5
EPS = 2.0**-52


class Lost(Exception):
    """What ends a rank."""


class Run:
    """A run in a directory, on simulated ranks, that may be ended after a call."""

    def __init__(self, root: Path, kind: str = "dp0"):
        self.root, self.kind = root, kind
        self.calls: dict[int, tuple[float, float]] = {}  # loss and rate of each call, as it was seen first
        self.again: list[tuple[int, float]] = []  # losses of calls that were made again

    def start(self, count: int, /, *, until: int = 0, nodes: tuple[int, ...] = (), **more: Any) -> list[Any]:
        """Run on so many ranks; `until` is the call after which all raise, `nodes` the shelf of each rank."""

        def on_rank() -> Any:
            rank = mesh(ranks=-1).rank

            def watch(state: fds.State, metrics: dict[str, Any]) -> None:
                calls, loss = int(state.calls), float(metrics["loss"])
                if rank == 0 and calls in self.calls:
                    self.again.append((calls, loss))
                elif rank == 0:
                    self.calls[calls] = loss, float(metrics["lr"])
                if calls == until:
                    raise Lost

            arguments: dict[str, Any] = {"calls": CALLS, "key": 3, "save_every": SAVE_EVERY, "watch": watch}
            arguments["shelf"] = self.root / "shelves" / f"{nodes[rank] if nodes else 0}"
            compose = lambda ranks: job.compose(self.kind, ranks)
            try:
                return fds.elastic.run(self.root / "run", compose, job.model().init, **(arguments | more))
            except Lost:
                return "lost"

        results = fds.simulate(on_rank, count)
        for thread in threading.enumerate():
            if thread.name == "fds-save":  # for which the end of a process waits
                thread.join(5)
        return results

    @property
    def sources(self) -> list[tuple[int, str, int]]:
        """Of each start: calls, where its state was from, ranks."""
        return [(e.calls, e.source, e.ranks) for e in fds.elastic.read_history(self.root / "run").starts]

    def check(self) -> None:
        """Losses and rates are those of the run that nothing disturbed, to rounding."""
        want = undisturbed(self.kind, CALLS)
        assert self.calls.keys() == want.keys()
        additions = 16 * job.BATCH * CALLS  # of each loss and gradient, in another order, once a call
        for calls, (loss, rate) in self.calls.items():
            assert rate == want[calls][1]
            assert abs(loss - want[calls][0]) <= additions * EPS * abs(want[calls][0])
        assert all(abs(loss - want[calls][0]) <= additions * EPS * abs(loss) for calls, loss in self.again)


@pytest.mark.parametrize("kind", job.KINDS)
def test_a_run_goes_on_with_other_ranks_from_memory(tmp_path, kind):
    run = Run(tmp_path, kind)
    for ranks, until in ((4, 3), (2, 7), (3, 8), (1, 0)):
        run.start(ranks, until=until)
    assert run.sources == [(0, "init", 4), (3, "memory", 2), (7, "memory", 3), (8, "memory", 1)]
    run.check()
    assert [calls for calls, _ in run.again] == [3, 7, 8]  # with which starts began


@pytest.mark.parametrize("kind", ["dp2", "pp1", "tp0"])
def test_pieces_come_from_other_nodes_to_those_that_need_them(tmp_path, kind):
    run = Run(tmp_path, kind)
    run.start(4, until=3, nodes=(0, 1, 2, 3))
    run.start(4, nodes=(3, 2, 1, 0), ranks=(1, 3))  # the last rank does not train, and its node has pieces
    assert run.sources[-1] == (3, "memory", 3)
    run.check()


def test_copies_suffice_and_else_the_last_save_is_taken(tmp_path):
    for kind, want in (("dp0", (7, "memory", 2)), ("dp1", (5, "save", 2)), ("hybrid", (7, "memory", 2))):
        run = Run(tmp_path / kind, kind)
        run.start(4, until=7, nodes=(0, 1, 2, 3))
        shutil.rmtree(tmp_path / kind / "shelves" / "0")
        run.start(2, nodes=(1, 2) if kind == "dp0" else (2, 3))
        assert run.sources == [(0, "init", 4), want], kind
        run.check()
        assert [calls for calls, _ in run.again] == ([6, 7] if kind == "dp1" else [7])


def test_a_save_that_is_newer_than_memory_is_taken(tmp_path):
    run = Run(tmp_path)
    run.start(2, until=3)
    shutil.copytree(tmp_path / "shelves", tmp_path / "old")
    run.start(2, until=6)
    shutil.rmtree(tmp_path / "shelves")
    shutil.copytree(tmp_path / "old", tmp_path / "shelves")
    run.start(1)
    assert run.sources == [(0, "init", 2), (3, "memory", 2), (5, "save", 1)]
    run.check()


def test_pieces_of_two_starts_are_not_put_together(tmp_path):
    run = Run(tmp_path, "dp1")
    run.start(4, until=3, nodes=(0, 1, 2, 3))
    shutil.copytree(tmp_path / "shelves" / "0", tmp_path / "old")
    shutil.rmtree(tmp_path / "shelves")
    run.start(4, until=3, nodes=(0, 1, 2, 3))
    new, old = (next((tmp_path / place).glob("*/*/*.00000003")) for place in ("shelves/0", "old"))
    shutil.rmtree(new)
    shutil.copytree(old, new.with_name(old.name))
    run.start(2, nodes=(0, 1))
    assert run.sources[-1] == (0, "init", 2)
    run.check()


def test_ranks_beyond_those_that_share_the_batch_wait(tmp_path):
    run = Run(tmp_path)
    finished = run.start(3, ranks=(1, 2, 4))
    assert [each.state is not None for each in finished] == [True, True, False]
    (event,) = fds.elastic.read_history(tmp_path / "run").starts
    assert (event.ranks, event.idle) == (2, 1)
    run.check()


def test_the_ranks_that_trained_go_on_with_what_the_run_returns(tmp_path):
    def on_rank() -> Any:
        finished = fds.elastic.run(
            tmp_path / "run", lambda ranks: job.compose("dp1", ranks), job.model().init, calls=2, ranks=(2,)
        )
        if finished.state is None:
            return None
        axis = finished.step.everyone
        loader = fds.DistributedLoader(job.DATA, 4, axis, collate=job.double)
        loss = finished.step.evaluate(finished.state, next(iter(loader)))["loss"]
        fds.save(tmp_path / "other", finished.state, finished.step)
        return axis.exchange(float(loss))

    first, second, idle = fds.simulate(on_rank, 3)
    assert first == second and first[0] == first[1] and idle is None


def test_a_finished_run_gives_its_state_and_makes_no_call(tmp_path):
    run = Run(tmp_path)
    (first,) = run.start(1)
    seen = dict(run.calls)
    (second,) = run.start(1)
    assert int(second.state.calls) == CALLS and run.calls == seen and not run.again
    want = first.step.params(first.state)
    for name, x in second.step.params(second.state).items():
        assert x.equal(want[name])
    assert not list((tmp_path / "shelves").glob("0/*"))


def alone(root: Path, name: str = "run", **more: Any) -> fds.elastic.Finished:
    arguments: dict[str, Any] = {"calls": CALLS, "key": 3, "shelf": root / "shelf"}
    compose = lambda count: job.compose("dp0", count)
    return fds.elastic.run(root / name, compose, job.model().init, **(arguments | more))


def test_sigterm_is_noticed_in_every_start_and_the_handler_is_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    for calls in (2, 4, 7):

        def ask(state: fds.State, metrics: Any, calls: int = calls) -> None:
            if int(state.calls) == calls:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(ResizeError, match="rank 0 of 1 were asked to stop"):
            alone(tmp_path, watch=ask)
        assert signal.getsignal(signal.SIGTERM) is before
    assert int(alone(tmp_path).state.calls) == CALLS
    assert [e.calls for e in fds.elastic.read_history(tmp_path / "run").starts] == [0, 3, 5, 8]


def donating(count: int) -> tuple[fds.Step, Any]:
    data = mesh(dp=-1)["dp"]
    loader = job.compose("dp0", count)[1]
    return fds.compose(fds.shard_optimizer(data, stage=0), fds.adamw(1e-3), fds.donate())(job.model()), loader


@pytest.mark.parametrize(("compose", "left"), [(lambda count: job.compose("dp0", count), [4, 3]), (donating, [4])])
def test_a_rank_that_is_lost_at_a_boundary_leaves_this_state_and_the_one_before_unless_it_was_donated(
    tmp_path, monkeypatch, compose, left
):
    passed = Start.boundary

    def boundary(start: Start, asked: Any, calls: int) -> int:
        if calls == 4:
            raise RankError("rank 1 was lost", where="rank 0")
        return passed(start, asked, calls)

    arguments: dict[str, Any] = {"calls": 6, "shelf": tmp_path / "shelf"}
    monkeypatch.setattr(Start, "boundary", boundary)
    with pytest.raises(ResizeError, match="rank 1 was lost") as caught:
        fds.elastic.run(tmp_path / "run", compose, job.model().init, **arguments)
    monkeypatch.undo()
    assert caught.value.hint.startswith(f"what this rank has of the state after call {' and '.join(map(str, left))} is")
    entries = {int(path.suffix[1:]) for path in (tmp_path / "shelf").glob("*/*/*.????????")}
    assert entries == set(left)
    fds.elastic.run(tmp_path / "run", compose, job.model().init, **arguments)
    assert [e.calls for e in fds.elastic.read_history(tmp_path / "run").starts] == [0, 4]


@pytest.mark.parametrize(("leaving", "want"), [((1, 2), (4, "save", 1)), ((0, 1, 2), (0, "init", 1))])
def test_all_save_before_some_nodes_leave_of_which_each_has_a_part(tmp_path, monkeypatch, leaving, want):
    passed = Start.boundary

    def boundary(start: Start, asked: Any, calls: int) -> int:
        asked.now = calls == 4 and start.everyone.index in leaving
        return passed(start, asked, calls)

    run = Run(tmp_path, "dp2")
    with monkeypatch.context() as patch:
        patch.setattr(Start, "boundary", boundary)
        with pytest.raises(ResizeError, match="were asked to stop"):
            run.start(3, nodes=(0, 1, 2))
    run.start(1)
    assert run.sources == [(0, "init", 3), want]
    run.check()


def test_a_step_that_fails_leaves_the_state_before_it(tmp_path):
    step, loader = job.compose("dp0", 1)
    fails = [True]

    def batch(state: fds.State) -> Any:
        x, y = next(iter(loader.starting(state.calls)))
        return (x[:, :5], y) if int(state.calls) == 4 and fails else (x, y)

    arguments: dict[str, Any] = {"calls": 6, "shelf": tmp_path / "shelf"}
    for _ in range(2):  # the second time what was left is left again
        with pytest.raises(Exception, match="shapes"):
            fds.elastic.run(tmp_path / "run", lambda count: (step, batch), job.model().init, **arguments)
    fails.clear()
    fds.elastic.run(tmp_path / "run", lambda count: (step, batch), job.model().init, **arguments)
    assert [e.calls for e in fds.elastic.read_history(tmp_path / "run").starts] == [0, 4, 4]


def test_a_shelf_that_cannot_be_written_costs_the_state_and_not_the_error(tmp_path, capsys):
    def fill(state: fds.State, metrics: Any) -> None:
        if int(state.calls) == 3:
            shutil.rmtree(tmp_path / "shelf")
            (tmp_path / "shelf").write_text("not a folder")
            raise Lost

    with pytest.raises(Lost):
        alone(tmp_path, watch=fill)
    assert "could not leave its state" in capsys.readouterr().err
    (tmp_path / "shelf").unlink()
    assert int(alone(tmp_path).state.calls) == CALLS


def spoil(kind: str, shelf: Path) -> None:
    name = "*.json" if kind == "manifest" else "*.safetensors"
    path = next(path for path in shelf.rglob(name) if path.is_file())
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data if kind == "byte" else data[: len(data) // 2])


@pytest.mark.parametrize("kind", ["manifest", "byte", "half"])
def test_the_last_save_is_taken_where_memory_cannot_be_read(tmp_path, capsys, kind):
    run = Run(tmp_path)
    run.start(2, until=7)
    spoil(kind, tmp_path / "shelves")
    run.start(3, ranks=(2,))
    assert run.sources == [(0, "init", 2), (5, "save", 2)]
    assert "in memory" in capsys.readouterr().err
    run.check()


def test_memory_that_cannot_be_read_is_not_forgotten_without_a_save(tmp_path):
    run = Run(tmp_path)
    run.start(2, until=3)
    spoil("byte", tmp_path / "shelves")
    for _ in range(2):
        with pytest.raises(FdsError, match="changed after it was written"):
            run.start(2)


def test_the_last_save_is_taken_where_no_memory_is_left_for_pieces(tmp_path, monkeypatch, capsys):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = Run(tmp_path, "dp1")
    run.start(2, until=7, nodes=(0, 1))
    with monkeypatch.context() as patch:
        patch.setattr("fds.storage.shelf.write_at", full)
        run.start(3, nodes=(2, 0, 1), ranks=(2,))
    assert run.sources == [(0, "init", 2), (5, "save", 2)]
    assert "No space left" in capsys.readouterr().err
    run.check()


def end(state: fds.State, metrics: Any) -> None:
    """What ends a run after its third call."""
    if int(state.calls) == 3:
        raise Lost


def test_a_new_run_in_the_directory_of_another_takes_nothing_of_its_memory(tmp_path):
    with pytest.raises(Lost):
        alone(tmp_path, watch=end)
    shutil.rmtree(tmp_path / "run")
    alone(tmp_path, calls=4)
    assert [e.source for e in fds.elastic.read_history(tmp_path / "run").starts] == ["init"]


def test_ranks_of_a_node_leave_what_is_the_same_once(tmp_path):
    Run(tmp_path).start(3, until=3)
    assert len([*(tmp_path / "shelves").rglob("*.safetensors")]) == 1


@pytest.mark.parametrize("times", [3, 10**9])
def test_a_copy_is_left_though_the_rank_that_was_to_write_it_was_lost_or_hangs(tmp_path, monkeypatch, times):
    tries = []

    def taken(path: Path) -> Any:
        tries.append(path)
        if len(tries) <= times:
            raise BlockingIOError
        return lock_file(path)

    monkeypatch.setattr(shelf, "lock_file", taken)
    monkeypatch.setattr(shelf, "PATIENCE", 0.2)
    for calls in (CALLS, 3):
        with pytest.raises(Lost):
            alone(tmp_path, watch=end, calls=calls)
    assert [e.source for e in fds.elastic.read_history(tmp_path / "run").starts] == ["init", "memory"]
    assert len(tries) > 3


def test_two_jobs_do_not_train_in_one_directory(tmp_path, monkeypatch):
    run = Run(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    run.start(2, until=3)
    with lock_file(tmp_path / "run" / ".running"):  # as a rank that hangs has it
        run.start(1, until=5)  # of the same job
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
        with pytest.raises(FdsError, match="another job trains in this directory"):
            run.start(2)
    run.start(2)
    assert [e.job for e in fds.elastic.read_history(tmp_path / "run").starts] == ["first", "first", "second"]


def test_a_night_between_two_jobs_is_not_lost_and_a_start_again_is(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    run = Run(tmp_path)
    run.start(1, until=3)
    run.start(1, until=5)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # of torchrun's without a rendezvous
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run.start(1)
    starts = fds.elastic.read_history(tmp_path / "run").starts
    assert starts[0].job != starts[1].job == starts[2].job
    assert [event.lost_seconds > 0 for event in starts] == [False, False, True]


def test_memory_is_not_kept_for_a_directory_that_is_gone(tmp_path):
    for name in ("run", "other"):
        with pytest.raises(Lost):
            alone(tmp_path, name=name, watch=end)
    places = {*(tmp_path / "shelf").iterdir()}
    shutil.rmtree(tmp_path / "other")
    alone(tmp_path, calls=3)
    assert len(places) == 2 and not [*(tmp_path / "shelf").iterdir()]


def test_a_foreign_shelf_is_refused(tmp_path):
    with pytest.raises(Lost):
        alone(tmp_path, watch=end)
    (place,) = (tmp_path / "shelf").iterdir()
    shutil.rmtree(place)
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FdsError, match="not a folder of this user"):
        alone(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"calls": -1}, "calls"),
        ({"calls": 2.5}, "calls"),
        ({"ranks": ()}, "ranks"),
        ({"ranks": (1, 0)}, "ranks"),
        ({"ranks": "4"}, "ranks"),
        ({"save_every": 0}, "save_every"),
        ({"keep": 0}, "keep"),
        ({"watch": 3}, "watch"),
        ({"timeout": 0}, "timeout"),
        ({"ranks": (2, 4)}, ""),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, where):
    with pytest.raises(ElasticityError) as caught:
        alone(tmp_path, **arguments)
    assert caught.value.where == where
    assert not (tmp_path / "run").exists()


def test_what_compose_returns_is_checked(tmp_path):
    step, loader = job.compose("dp0", 1)
    composed: Any
    for composed in (step, (loader, step), (step, [1, 2])):
        compose: Any = lambda count, it=composed: it
        with pytest.raises(ElasticityError):
            fds.elastic.run(tmp_path / "run", compose, job.model().init, calls=1, shelf=tmp_path)


def test_a_history_is_what_was_lost_of_the_time():
    event = fds.elastic.Event
    history = fds.elastic.History(
        (
            event("start", 100.0, 0, "a", ranks=2, source="init"),
            event("stop", 150.0, 40, "a", reason="rank 1 was lost"),
            event("start", 160.0, 40, "a", ranks=1, source="memory", lost_seconds=10.0),
            event("end", 200.0, 80, "a"),
            event("start", 1000.0, 80, "b", ranks=1, source="save"),
            event("end", 1100.0, 180, "b"),
        )
    )
    assert (history.seconds, history.lost_seconds, history.goodput) == (200.0, 10.0, 0.95)
    assert str(history).startswith("3 starts, 10.0 s lost, goodput 95.0%\nstart call 0, 2 ranks, from init")
    with pytest.raises(FdsError, match="no elastic run"):
        fds.elastic.read_history("/nowhere")
