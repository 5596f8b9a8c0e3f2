"""Save a state, at once or in the background: then a process of its own reads its memory, while training goes on.

The thread that waits for that process sleeps. Ranks do not communicate again before the save is waited for. Each
reports to the first rank through a small file in `.saving/reports` that its part is written, and meanwhile holds a file
lock, which the kernel releases if the rank dies.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from fds.errors import RankError, StorageError
from fds.media.locks import lock_file
from fds.state import State
from fds.step import Step
from fds.storage.disk import aside, writer
from fds.storage.disk.files import refusal, write_errors
from fds.storage.disk.folders import reports_folder
from fds.storage.ranks.draft import Draft, RankRecord, SaveOptions, TagValidation
from fds.storage.ranks.exchange import Ranks


def save(
    dir: str | os.PathLike[str],
    state: State,
    step: Step,
    tag: str | None = None,
    extra: dict[str, Any] | None = None,
    *,
    keep: int | None = None,
    tag_validation: TagValidation = "fail",
    local: bool = False,
    take_over: bool = False,
) -> Path:
    """Write a state to a folder in `dir`, completely and durably or not at all, and return that folder.

    Where ranks share the state, all of them call this with the same `dir` on a common file system, and each writes its
    share. What is written is the plain state, which any number of ranks can load, in any pipeline and ZeRO stage.

    Args:
        dir: the run's directory, created if it is missing.
        state: a result of `step.init` or of a step.
        step: the step of that state; its composition is written too, for people to read.
        tag: the name of this save, by default `step00000012` after 12 calls; an existing one is replaced.
        extra: other data for resuming the run (a loader's position): a dict that survives JSON unchanged. The first
            rank's is written, with `local` each rank's own.
        keep: how many unnamed saves to keep, this one included; older ones are removed once this one is complete. Saves
            with a `tag` of another form than `step00000012` stay.
        tag_validation: what to do if ranks pass different tags: "fail", or "warn" or "ignore" and use the first rank's.
        local: for ranks without a common file system: each writes what it holds to a separate directory, `dir/rank0`,
            `dir/rank1`, ..., which `load(..., local=True)` reads. A tag that is replaced is kept until all ranks have
            the new one.
        take_over: whether to save where the last save is of another run, which is refused otherwise. A process goes on
            with the run that it began or loaded in `dir`; `keep` removes no save of another.

    Waits for an earlier `save_async` of this thread. Raises, on every rank if on any, `StorageError` for what cannot be
    written and for errors of the file system; `DonatedStateError` for a donated state and `StateError` for a state that
    `step` does not accept (with several ranks, a `StorageError` that says so); `RankError` if a rank is lost. After an
    error earlier saves, and which of them is the last, are unchanged, unless the error says that the new one is in its
    place.
    """
    await_previous()
    options = SaveOptions(keep, tag_validation, local, take_over)
    draft = Draft.of(dir, state, step, tag, extra, options, doing="save")
    with contextlib.ExitStack() as saving:
        draft.begin(saving)
        with draft.ranks.together() as exchange, write_errors(draft.dir):
            exchange.mine = draft.write(writer.write)
        with draft.ranks.together(), write_errors(draft.dir):
            draft.finish(saving, [exchange.mine] if local else exchange.all)
    if local:
        with draft.ranks.together():
            draft.forget()
    return draft.folder


POLL = 0.005  # seconds between checks for the reports of other ranks

_unawaited: set[Saving] = set()  # saves that were not waited for
_latest = threading.local()  # this thread's save that was not waited for; simulated ranks are threads


@attrs.define(eq=False)
class Saving:
    """A save that is being written. The end of its `with` block waits for it, and so does this thread's next save."""

    folder: Path
    ranks: Ranks
    forget: Callable[[], None] | None = attrs.field(repr=False)  # called when all ranks have written their parts
    thread: threading.Thread | None = attrs.field(init=False, repr=False, default=None)
    error: BaseException | None = attrs.field(init=False, default=None)  # of this rank
    pid: int = attrs.field(init=False, repr=False, factory=os.getpid)

    def done(self) -> bool:
        """Return whether this rank has finished its part; on the first rank, whether the save has ended."""
        assert self.thread is not None
        return not self.thread.is_alive()

    def wait(self) -> Path:
        """Wait until the save is complete and return the folder of its tag; where ranks share it, all call this.

        Raises, on every rank, the `StorageError` of whatever went wrong, and `RankError` if a rank is lost.
        """
        with self.ranks.together():
            self._join()
            _unawaited.discard(self)
            if getattr(_latest, "saving", None) is self:
                _latest.saving = None
            if self.error is not None:
                raise self.error
        if self.forget is not None:
            forget, self.forget = self.forget, None
            with self.ranks.together():
                forget()
        return self.folder

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.wait() if kind is None else self._join()  # after an error here, other ranks may never wait

    def _join(self) -> None:
        if os.getpid() != self.pid:
            got, want = f"process {os.getpid()}", f"process {self.pid}"
            raise refusal("a process that was forked cannot wait for its parent's save", str(self.folder), got, want)
        assert self.thread is not None
        self.thread.join()


def save_async(
    dir: str | os.PathLike[str],
    state: State,
    step: Step,
    tag: str | None = None,
    extra: dict[str, Any] | None = None,
    *,
    keep: int | None = None,
    tag_validation: TagValidation = "fail",
    local: bool = False,
    take_over: bool = False,
) -> Saving:
    """Begin what `save` does and return at once; the state's memory is read while the next steps run.

    Takes the arguments of `save`. The state is not copied first, but kept until it is read. That costs the memory of
    one further state, and a donating step writes into other memory. A GPU's tensors are copied into pinned host memory,
    on a separate stream. The state must not be modified meanwhile: the save fails where torch's version counters show
    it.

    `saving.wait()`, the end of `with saving:`, the next save and the end of the program wait for the save to complete.
    Until then the previous save is the last one. Invalid arguments raise here as in `save`; later errors are raised by
    `saving.wait()` or the next save.
    """
    await_previous()
    options = SaveOptions(keep, tag_validation, local, take_over)
    draft = Draft.of(dir, state, step, tag, extra, options, doing="save_async")
    saving = Saving(draft.folder, draft.ranks, draft.forget if local else None)
    start_failed = threading.Event()
    with contextlib.ExitStack() as resources:
        draft.begin(resources)
        with draft.ranks.together(), write_errors(draft.dir):
            if not draft.leads:
                resources.enter_context(lock_file(_path(draft, draft.ranks.index, "lock")))  # this rank is alive
        try:
            # The thread starts before any rank waits for it, because simulated ranks take turns. So `start_failed` may
            # have to tell it that another rank could not start its thread.
            with draft.ranks.together():
                _start(saving, draft, state.token.readers, resources, start_failed)
        except BaseException:
            start_failed.set()
            if saving.thread is not None:
                saving.thread.join()
            raise
    _unawaited.add(saving)
    _latest.saving = saving
    return saving


def await_previous() -> None:
    """Wait for this thread's previous save, if nothing has waited for it yet. Raises the error that it failed with.

    If its process group has ended, only this rank's part is waited for, because other ranks cannot be reached; an
    error in it is printed at the end of the program.
    """
    saving: Saving | None = getattr(_latest, "saving", None)
    if saving is None:
        return
    everyone = saving.ranks.everyone
    if everyone is None or everyone.is_current:
        saving.wait()
    else:
        saving._join()
        _latest.saving = None


@atexit.register
def _print_unawaited() -> None:
    """Print the errors of saves that were never waited for, at the end of the program."""
    for saving in _unawaited:
        if saving.error is not None and saving.pid == os.getpid():
            print(f"fds: a save in the background failed, and was not waited for\n{saving.error}", file=sys.stderr)


def _start(
    saving: Saving, draft: Draft, readers: set, resources: contextlib.ExitStack, start_failed: threading.Event
) -> None:
    """Start the thread that writes; it closes `resources` in the end."""
    owned = resources.pop_all()
    readers.add(saving)
    try:
        thread = threading.Thread(target=_run, args=(saving, draft, readers, owned, start_failed), name="fds-save")
        thread.start()
    except BaseException:
        readers.discard(saving)
        resources.push(owned)
        raise
    saving.thread = thread


def _run(
    saving: Saving, draft: Draft, readers: set, resources: contextlib.ExitStack, start_failed: threading.Event
) -> None:
    try:
        with write_errors(draft.dir), resources:
            if not draft.leads:
                _write_part(saving, draft, readers)
            elif draft.options.local:
                draft.finish(resources, [_write(saving, draft, readers)])
            else:
                _write_and_publish(saving, draft, readers, resources, start_failed)
    except _FailedElsewhere:
        pass  # that rank raises the error
    except BaseException as error:
        saving.error = error


def _write(saving: Saving, draft: Draft, readers: set) -> RankRecord:
    """Write this rank's part, and release the state's memory."""
    try:
        # pinned memory is mapped by the driver, and other processes cannot read it
        return draft.write(_write_aside if draft.reached is None else writer.write)
    finally:
        readers.discard(saving)
        draft.parts.clear()


def _write_aside(path: str, head: bytes, spans: list[writer.Span]) -> Any:
    with aside.process() as process:
        return process.write(path, head, spans)


class _FailedElsewhere(Exception):
    """Another rank's part of the save failed."""


def _write_part(saving: Saving, draft: Draft, readers: set) -> None:
    path = _path(draft, draft.ranks.index, "json")
    unfinished = path.with_suffix(".new")
    try:
        unfinished.write_text(json.dumps(_write(saving, draft, readers)))
        os.rename(unfinished, path)
    except BaseException:  # reported before the lock is released, or this rank would count as lost
        with contextlib.suppress(OSError):
            os.rename(_path(draft, draft.ranks.index, "lock"), path)
        raise


def _write_and_publish(
    saving: Saving, draft: Draft, readers: set, resources: contextlib.ExitStack, start_failed: threading.Event
) -> None:
    """Write this rank's part, wait for the other ranks, and publish the save, or remove it after an error.

    Raises `RankError` for a rank that has not written its part within the timeout.
    """
    try:
        record = _write(saving, draft, readers)
    finally:
        end = time.monotonic() + draft.ranks.timeout
        for rank in range(1, draft.ranks.size):
            while not (_path(draft, rank, "json").exists() or _died(_path(draft, rank, "lock"))):
                if start_failed.is_set():
                    raise _FailedElsewhere
                if time.monotonic() >= end:
                    raise RankError(
                        f"rank {rank} did not write its part of the save in time",
                        where=str(draft.folder),
                        got=f"nothing from it in {draft.ranks.timeout:g} s",
                        want="all ranks to go on",
                        hint="earlier saves are unchanged",
                    )
                time.sleep(POLL)
    draft.finish(resources, [record, *map(functools.partial(_report_of, draft), range(1, draft.ranks.size))])


def _report_of(draft: Draft, rank: int) -> RankRecord:
    path = _path(draft, rank, "json")
    if not path.exists():
        raise StorageError("a rank was lost before its part of the save was written", where=f"rank {rank}")
    text = path.read_text()
    if not text:  # the renamed lock file: on a full disk nothing else can be written
        raise _FailedElsewhere
    return json.loads(text)


def _died(path: Path) -> bool:
    """Return whether the lock of a rank that has not reported yet is free."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # it is held, or was just renamed because the rank failed
    return True


def _path(draft: Draft, rank: int, kind: str) -> Path:
    return reports_folder(draft.dir) / f"rank{rank}.{kind}"
