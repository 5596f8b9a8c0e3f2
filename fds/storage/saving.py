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
from fds.storage.disk.folders import refusing
from fds.storage.ranks.draft import Draft, TagValidation


def save(
    dir: str | os.PathLike,
    state: State,
    step: Step,
    tag: str | None = None,
    extra: dict[str, Any] | None = None,
    *,
    keep: int | None = None,
    tag_validation: TagValidation = "fail",
    local: bool = False,
) -> Path:
    """Write a state below `dir`, whole and durably or not at all, and return the folder of its tag.

    Where ranks share the state, all of them call this, with one `dir` of a file system that all of them see, and each
    writes its share. What is written is the plain state: any number of ranks loads it, in any pipeline and stage.

    Args:
        dir: the run's directory, made if it is missing.
        state: what `step.init` or a step returned.
        step: whose state it is; its composition is written down for people to read.
        tag: the name of this save, `step00000012` after 12 calls unless given; one that exists is replaced.
        extra: what else the run needs to go on (a loader's position): a dict that JSON gives back as it is. Of several
            ranks the first one's is written, with `local` everyone's own.
        keep: how many tags may stay, this one included; older ones are removed when this one is complete.
        tag_validation: what to do where ranks name different tags: "fail", "warn" and "ignore" take the first rank's.
        local: for ranks without a common file system: each keeps what it holds in a directory of its own,
            `dir/rank0`, `dir/rank1`, ..., which `load(..., local=True)` reads. What a tag replaces stays until all
            ranks have the new one.

    Waits for a `save_async` of this thread that is still being written. Raises `StorageError` for whatever cannot be
    written or the file system refuses, on every rank if on any; `DonatedStateError` for a state that was given up and
    `StateError` for one that `step` could not take (of several ranks, a `StorageError` that says so); `RankError` if a
    rank is lost. Then the saves that were there, and which of them is the last, are as they were, unless the error says
    that this one is in its place.
    """
    background.await_previous()
    draft = Draft.of(
        dir, state, step, tag, extra, doing="save", keep=keep, tag_validation=tag_validation, local=local
    )
    with contextlib.ExitStack() as saving:
        with draft.ranks.together():
            draft.begin(saving)
        with draft.ranks.together() as said, refusing(draft.dir):
            said.mine = draft.write(writer.write)
        with draft.ranks.together(), refusing(draft.dir):
            draft.finish(saving, [said.mine] if local else said.all)
    if draft.forgets_later:
        with draft.ranks.together():
            draft.forget()
    return draft.folder
