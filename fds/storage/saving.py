"""Save a state."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from fds.state import State
from fds.step import Step
from fds.storage import background
from fds.storage.disk import writer
from fds.storage.disk.folders import write_errors
from fds.storage.ranks.draft import Draft, TagValidation


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
    background.await_previous()
    draft = Draft.of(
        dir,
        state,
        step,
        tag,
        extra,
        doing="save",
        keep=keep,
        tag_validation=tag_validation,
        local=local,
        take_over=take_over,
    )
    with contextlib.ExitStack() as saving:
        draft.begin(saving)
        with draft.ranks.together() as exchange, write_errors(draft.dir):
            exchange.mine = draft.write(writer.write)
        with draft.ranks.together(), write_errors(draft.dir):
            draft.finish(saving, [exchange.mine] if local else exchange.all)
    if draft.forgets_later:
        with draft.ranks.together():
            draft.forget()
    return draft.folder
