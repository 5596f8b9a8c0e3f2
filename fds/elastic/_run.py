"""`run`: train on the ranks that are there, and go on after some were lost or joined.

A start of the ranks is a call of `run` on each. Between two calls of the step all ranks exchange a few numbers: the
boundary. Who passes it knows that every rank has ended the call before, so only then is the older state let go: the
step is pure, and a rank that is told of a lost one in the middle of a call still has the state that the call began
with. All ranks that live have one state in common. Each leaves it on the shelf of its node, without a message, and
raises `ResizeError`. The next start puts the newest state together that the shelves cover.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import attrs
import torch

from fds.collectives import first_ranks, init_distributed, mesh
from fds.data import RepeatingLoader
from fds.elastic._history import now, seconds_of, write_event
from fds.elastic._start import Asked, Leaving, Made, Start, meet
from fds.errors import ElasticityError, FdsError, RankError, ResizeError, StorageError, is_int, is_number
from fds.state import State
from fds.step import Step
from fds.storage import save, save_async
from fds.storage.disk.files import check_path
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import parts_of
from fds.storage.ranks.sharing import AllLeaves
from fds.storage.shelf import Pieces

Compose = Callable[[int], tuple[Step, Any]]
Watch = Callable[[State, dict[str, Any]], Any]


@attrs.frozen
class Finished:
    """What a run has come to on this rank.

    Attributes:
        state: the last state, a `State`; None on a rank that had no part at the end.
        step: the step of that state; None there too.
    """

    state: Any = None
    step: Any = None


def run(
    directory: str | os.PathLike[str],
    compose: Compose,
    params: Any,
    *,
    calls: int,
    ranks: Collection[int] | None = None,
    key: int = 0,
    save_every: int | None = None,
    keep: int = 2,
    watch: Watch | None = None,
    timeout: float = 600.0,
    shelf: str | os.PathLike[str] | None = None,
) -> Finished:
    """Train until the state has made `calls` calls, from wherever the run in `directory` is, on the ranks that run.

    Every rank that torchrun started calls this. If a rank is lost, joins, or is told to end by SIGTERM, the others
    leave what they hold in the memory of their node and raise `ResizeError`; the program ends, and torchrun starts all
    ranks again. They go on from the newest state: from memory, if what is left there is all of it, else from the last
    save. An error of the step, or Ctrl-C, is raised as it is, and its state is left as well.

    Args:
        directory: of the run, on a file system that all ranks see: saves in `save`, and `resizes.jsonl`.
        compose: called at each start with the number of ranks that train, returns the step and its data: a
            `DistributedLoader`, or a function of the state that returns a batch. The mesh is made inside.
        params: the argument of `step.init`.
        calls: after how many calls of the step, counted over all starts, the run ends.
        ranks: the numbers of ranks that can share the batch, such as `batches.ranks`. The largest that is there trains;
            ranks beyond it wait until others are lost. All numbers by default.
        key: the seed of the run.
        save_every: the number of calls between saves, which are written in the background; by default only the end is
            saved.
        keep: how many saves to keep.
        watch: called with the state and metrics of every call that all ranks have ended, as `fds.monitor(...)` is. A
            start begins with the call that it goes on from, which may have been watched already.
        timeout: seconds that a rank waits for others before they count as lost: longer than a call, and all that
            `compose` and `watch` do. It has no effect if the program has called `fds.init_distributed`.
        shelf: where the ranks of a node leave what they hold, by default `/dev/shm`, its memory.

    Raises `ResizeError`, or `RankError` where a rank is lost before all have begun; `ElasticityError` for arguments of
    other kinds, and if too few ranks are there; what the step, its data, `fds.save` and `fds.load` raise.
    """
    path = check_path(directory, "directory")
    _check_arguments(compose, calls, ranks, save_every, keep, watch, timeout)
    init_distributed(timeout=timeout)
    began, everyone = time.time(), mesh(ranks=-1)["ranks"].channel("elastic")
    with contextlib.ExitStack() as locks:
        start = meet(path, None if shelf is None else check_path(shelf, "shelf"), everyone, ranks, locks)
        pieces = Pieces.newest(start.shelf, everyone, start.saved)
        if everyone.index >= start.count:
            if pieces is not None:
                try:
                    pieces.bring()
                except StorageError:
                    if start.saved < 0:
                        raise
            return _stand_by(start, calls)
        with first_ranks(start.count):
            step, data = _composed(compose, start.count)
            made, source = start.state(step, params, key, pieces)
            parts = Ranks.of(step, "fds.elastic.run")
            union = AllLeaves.of(parts_of(made.state, parts), parts)
            lost = max(0.0, time.time() - seconds_of(made.at)) if start.again else 0.0
            if everyone.index == 0:
                idle = everyone.size - start.count
                event = start.event("start", int(made.state.calls), ranks=start.count, idle=idle, source=source)
                write_event(path, attrs.evolve(event, time=time.time() if start.again else began, lost_seconds=lost))
            return Training(start, step, union, [made]).run(data, calls, save_every, keep, watch)


def _composed(compose: Compose, count: int) -> tuple[Step, Any]:
    composed = compose(count)
    if not (isinstance(composed, tuple) and len(composed) == 2 and hasattr(composed[0], "everyone")):
        raise ElasticityError(
            "compose does not return a step and its data", got=repr(composed)[:200], want="return step, loader"
        )
    return composed


@attrs.define(eq=False)
class Training:
    """A start of the ranks that train, on one of them."""

    start: Start
    step: Step
    union: AllLeaves
    held: list[Made]  # states that some rank may still need, the newest first

    def run(self, data: Any, calls: int, save_every: int | None, keep: int, watch: Watch | None) -> Finished:
        """Train until the last call; leave the state on the shelf whatever ends it earlier."""
        start, first = self.start, int(self.held[0].state.calls)
        batches = _batches(data, first)
        with Asked() as asked:
            try:
                while True:
                    state, metrics = self.held[0].state, self.held[0].metrics
                    if state.step.is_cuda:
                        torch.cuda.synchronize(state.step.device)  # a call has ended when its kernels have
                    made = start.boundary(asked, int(state.calls))
                    del self.held[1:]
                    if made == first + 1:
                        start.shelf.clear(but=start.id)  # of what this start went on from; others may leave theirs
                    if watch is not None and metrics:
                        watch(state, metrics)
                    if made >= calls:
                        break
                    if save_every is not None and made % save_every == 0 and made > max(0, start.saved):
                        save_async(start.saves, state, self.step, keep=keep)
                        self._write("save", made)
                    new, metrics = self.step(state, batches(state))
                    self.held.insert(0, Made(new, now(), metrics))
                    del new
                if made > start.saved:
                    save(start.saves, state, self.step, keep=keep)
                self._write("end", made)
            except BaseException as error:
                left = self._leave(error)
                if isinstance(error, Leaving):  # all live, and torchrun gives them 30 s
                    self._save(self.held[0], keep)
                if isinstance(error, RankError) and not isinstance(error, ResizeError):
                    raise ResizeError(
                        error.what, where=error.where, got=error.got, want=error.want, hint=left
                    ) from error
                raise
        start.shelf.remove()
        return Finished(state, self.step)

    def _write(self, kind: str, calls: int) -> None:
        if self.start.everyone.index == 0:
            write_event(self.start.path, self.start.event(kind, calls))

    def _save(self, made: Made, keep: int) -> None:
        """Save what nodes that leave would take along, if it is newer than the last save; a failure is printed."""
        calls = int(made.state.calls)
        if calls <= self.start.saved:
            return
        try:
            save(self.start.saves, made.state, self.step, keep=keep, extra=made.numbers)
            self._write("save", calls)
        except (FdsError, OSError, RuntimeError) as failed:
            print(f"fds: rank {self.start.everyone.index} could not save before it ends: {failed}", file=sys.stderr)

    def _leave(self, error: BaseException) -> str:
        """Put the states that this rank has on the shelf, and say what was done; whatever fails is printed."""
        left, rank = [], self.start.everyone.index
        for made in self.held:
            if made.state.token.spent_at is None:  # a donating step has written over others
                try:
                    self.start.shelf.leave(made.state, self.step, self.union, self.start.id, made.at, made.numbers)
                    left.append(int(made.state.calls))
                except (FdsError, OSError, RuntimeError) as failed:
                    print(f"fds: rank {rank} could not leave its state: {failed}", file=sys.stderr)
        reason = (error.what if isinstance(error, FdsError) else repr(error))[:200]
        with contextlib.suppress(StorageError):
            event = self.start.event("stop", max(left, default=-1), ranks=rank, reason=reason)
            write_event(self.start.path, event)
        return (
            f"what this rank has of the state after call {' and '.join(map(str, left))} is on the shelf" if left else ""
        )


def _batches(data: Any, first: int) -> Callable[[State], Any]:
    """Return a function of the state that returns its batch; loaders are read in order, from `first` on."""
    if hasattr(data, "starting"):
        loader = RepeatingLoader(data.starting(first))
        return lambda state: next(loader)
    if callable(data):
        return data
    raise ElasticityError(
        "not the data of an elastic run",
        where="compose",
        got=type(data).__name__,
        want="a DistributedLoader, or a function of the state that returns a batch",
        hint="a position that does not depend on the number of ranks is state.calls",
    )


def _stand_by(start: Start, calls: int) -> Finished:
    """Take part in every boundary without training, until the last call."""
    with Asked() as asked:
        try:
            first = made = start.boundary(asked, -1)
            while made < calls:
                made = start.boundary(asked, -1)
                if made == first + 1:
                    start.shelf.clear(but=start.id)
        except RankError as error:
            reason = error.what
            with contextlib.suppress(StorageError):
                write_event(start.path, start.event("stop", -1, ranks=start.everyone.index, reason=reason))
            if isinstance(error, ResizeError):
                raise
            raise ResizeError(
                reason, where=error.where, got=error.got, want=error.want, hint="this rank had no part"
            ) from error
    start.shelf.remove()
    return Finished()


def _check_arguments(
    compose: Any, calls: Any, ranks: Any, save_every: Any, keep: Any, watch: Any, timeout: Any
) -> None:
    """Raise `ElasticityError` for the first argument of another kind."""
    each = list(ranks) if isinstance(ranks, Collection) and not isinstance(ranks, str) else None
    for name, value, good, want in (
        ("compose", compose, callable(compose), "a function: number of ranks -> (step, data)"),
        ("calls", calls, is_int(calls, 0), "0 or more"),
        ("ranks", ranks, ranks is None or (each and all(is_int(n, 1) for n in each)), "numbers of ranks, or None"),
        ("save_every", save_every, save_every is None or is_int(save_every, 1), "1 or more, or None"),
        ("keep", keep, is_int(keep, 1), "1 or more"),
        ("watch", watch, watch is None or callable(watch), "a function of state and metrics, or None"),
        ("timeout", timeout, is_number(timeout) and timeout > 0, "seconds, more than 0"),
    ):
        if not good:
            raise ElasticityError(f"not {name} of an elastic run", where=name, got=repr(value)[:80], want=want)
