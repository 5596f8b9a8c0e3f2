"""Save in the background: a process of its own reads the state's memory and writes it, while the steps go on.

The thread that waits for it sleeps. Ranks do not meet again before somebody waits for the save: each tells the first
one through a small file in `.saving/told` that its part is written, and while it writes it holds the lock of another,
which the kernel opens if it dies.
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
from fds.state import State
from fds.step import Step
from fds.storage.disk import aside, writer
from fds.storage.disk.folders import refusing, told
from fds.storage.disk.locks import lock_file
from fds.storage.ranks.draft import Draft, Record, TagValidation
from fds.storage.ranks.together import Ranks

POLL = 0.005  # seconds between looks at what other ranks have told

_unheard: set[Saving] = set()  # that nobody has waited for
_begun = threading.local()  # the save of this thread that nobody has waited for; simulated ranks are threads


@attrs.define(eq=False)
class Saving:
    """A save that is being written. Leaving its context waits for it, and so does the next save of this thread."""

    folder: Path
    ranks: Ranks
    forget: Callable[[], None] | None = attrs.field(repr=False)  # what is left to do when all ranks have written theirs
    thread: threading.Thread | None = attrs.field(init=False, repr=False, default=None)
    error: BaseException | None = attrs.field(init=False, default=None)  # that this rank met with
    pid: int = attrs.field(init=False, repr=False, factory=os.getpid)

    def done(self) -> bool:
        """Return whether this rank has nothing to do for it any more; on the first rank, whether it has ended."""
        assert self.thread is not None
        return not self.thread.is_alive()

    def wait(self) -> Path:
        """Wait until the save is complete and return the folder of its tag; where ranks share it, all call this.

        Raises, on every rank, the `StorageError` of whatever went wrong, and `RankError` if a rank is lost.
        """
        with self.ranks.together():
            self._join()
            _unheard.discard(self)
            if getattr(_begun, "saving", None) is self:
                _begun.saving = None
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
        self.wait() if kind is None else self._join()  # where one rank fails, others may never come to wait

    def _join(self) -> None:
        if os.getpid() != self.pid:
            raise StorageError("a process that was forked cannot wait for its parent's save", where=str(self.folder),
                               got=f"process {os.getpid()}", want=f"process {self.pid}")  # fmt: skip
        assert self.thread is not None
        self.thread.join()


def save_async(
    dir: str | os.PathLike,
    state: State,
    step: Step,
    tag: str | None = None,
    extra: dict[str, Any] | None = None,
    *,
    keep: int | None = None,
    tag_validation: TagValidation = "fail",
    local: bool = False,
) -> Saving:
    """Begin what `save` does and return at once; the state's memory is read while the next steps run.

    Takes what `save` takes. Nothing is copied first: until the state is read it is held, so that it costs the memory
    of one further state, and a donating step that is given it writes into other memory. The copies from a GPU go into
    pinned host memory, on a stream of their own. Nobody may write into the state meanwhile: that is found, where
    torch counts it, and the save fails.

    The save is complete when the returned `Saving` says so: `saving.wait()`, the end of `with saving:`, the next save,
    or the end of the program wait for it. Until then the last save is the one before. What cannot be saved raises here
    what it raises in `save`; what goes wrong later, `saving.wait()` and the next save do.
    """
    await_previous()
    draft = Draft.of(
        dir, state, step, tag, extra, doing="save_async", keep=keep, tag_validation=tag_validation, local=local
    )
    saving = Saving(draft.folder, draft.ranks, draft.forget if draft.forgets_later else None)
    refused = threading.Event()
    with contextlib.ExitStack() as beginning:
        with draft.ranks.together():
            draft.begin(beginning)
        with draft.ranks.together(), refusing(draft.dir):
            if not draft.leads:
                beginning.enter_context(lock_file(_path(draft, draft.ranks.index, "lock")))  # says that it lives
        try:
            # The thread starts before any rank may wait for it, for simulated ranks take turns; so it may have to
            # learn that another rank could not start its own.
            with draft.ranks.together():
                _start(saving, draft, state.token.readers, beginning, refused)
        except BaseException:
            refused.set()
            if saving.thread is not None:
                saving.thread.join()
            raise
    _unheard.add(saving)
    _begun.saving = saving
    return saving


def await_previous() -> None:
    """Wait for the save that this thread has begun and not waited for. Raises what it failed with.

    Of a process group that has ended this rank waits for its own part alone, since the others cannot be asked any
    more; what went wrong with it is told at the end of the program.
    """
    saving: Saving | None = getattr(_begun, "saving", None)
    if saving is None:
        return
    everyone = saving.ranks.everyone
    if everyone is None or everyone.is_current:
        saving.wait()
    else:
        saving._join()
        _begun.saving = None


@atexit.register
def _say_unheard() -> None:
    """Tell of saves that failed while nobody waited: the program has ended, and so have they."""
    for saving in _unheard:
        if saving.error is not None and saving.pid == os.getpid():
            print(f"fds: a save in the background failed, and nobody waited for it\n{saving.error}", file=sys.stderr)


def _start(
    saving: Saving, draft: Draft, readers: set, beginning: contextlib.ExitStack, refused: threading.Event
) -> None:
    """Start the thread that writes; it ends what has begun."""
    begun = beginning.pop_all()
    readers.add(saving)
    try:
        thread = threading.Thread(target=_work, args=(saving, draft, readers, begun, refused), name="fds-save")
        thread.start()
    except BaseException:
        readers.discard(saving)
        beginning.push(begun)
        raise
    saving.thread = thread


def _work(
    saving: Saving, draft: Draft, readers: set, begun: contextlib.ExitStack, refused: threading.Event
) -> None:
    """Write this rank's part; then tell of it, or give the whole its name."""
    try:
        with refusing(draft.dir), begun:
            if not draft.leads:
                _follow(saving, draft, readers)
            elif draft.local:
                draft.finish(begun, [_write(saving, draft, readers)])
            else:
                _lead(saving, draft, readers, begun, refused)
    except _Elsewhere:
        pass  # the rank that failed says why
    except BaseException as error:
        saving.error = error


def _write(saving: Saving, draft: Draft, readers: set) -> Record:
    """Write this rank's part, and let go of the state's memory."""
    try:
        # pinned memory is the driver's, and no other process may read it
        return draft.write(_write_aside if draft.reached is None else writer.write)
    finally:
        readers.discard(saving)
        draft.parts.clear()


def _write_aside(path: str, head: bytes, spans: list[tuple[int, int]]) -> Any:
    with aside.process() as process:
        return process.write(path, head, spans)


class _Elsewhere(Exception):
    """Another rank's part of the save failed."""


def _follow(saving: Saving, draft: Draft, readers: set) -> None:
    """Write this rank's part and tell the first rank of it. Raises `OSError`."""
    path = _path(draft, draft.ranks.index, "json")
    unfinished = path.with_suffix(".new")
    try:
        unfinished.write_text(json.dumps(_write(saving, draft, readers)))
        os.rename(unfinished, path)
    except BaseException:  # told before the lock opens, or this rank would count as lost
        with contextlib.suppress(OSError):
            os.rename(_path(draft, draft.ranks.index, "lock"), path)
        raise


def _lead(
    saving: Saving, draft: Draft, readers: set, begun: contextlib.ExitStack, refused: threading.Event
) -> None:
    """Write this rank's part and give the whole its name, or remove it, when no other rank is writing any more.

    Raises `RankError` for a rank that has not written its part when the time that ranks wait for each other is over.
    """
    try:
        record = _write(saving, draft, readers)
    finally:
        end = time.monotonic() + draft.ranks.timeout
        for rank in range(1, draft.ranks.size):
            while not (_path(draft, rank, "json").exists() or _died(_path(draft, rank, "lock"))):
                if refused.is_set():
                    raise _Elsewhere
                if time.monotonic() >= end:
                    raise RankError(
                        f"rank {rank} did not write its part of the save in time", where=str(draft.folder),
                        got=f"nothing from it in {draft.ranks.timeout:g} s", want="all ranks to go on",
                        hint="what was saved before is as it was",
                    )  # fmt: skip
                time.sleep(POLL)
    draft.finish(begun, [record, *map(functools.partial(_heard, draft), range(1, draft.ranks.size))])


def _heard(draft: Draft, rank: int) -> Record:
    """Return what a rank told. Raises `StorageError` for one that died."""
    path = _path(draft, rank, "json")
    if not path.exists():
        raise StorageError("a rank was lost before its part of the save was written", where=f"rank {rank}")
    text = path.read_text()
    if not text:  # the lock's file under this name: on a full disk nothing else can be told
        raise _Elsewhere
    return json.loads(text)


def _died(path: Path) -> bool:
    """Return whether nobody holds the lock of a rank that has not told yet."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # it is held, or has just told that it failed
    return True


def _path(draft: Draft, rank: int, kind: str) -> Path:
    return told(draft.dir) / f"rank{rank}.{kind}"
