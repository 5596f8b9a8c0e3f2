"""What a monitor writes, and where to."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fds.collectives import worlds
from fds.errors import FdsError, expanded, is_int


class Event(NamedTuple):
    """A number of a run: its tag, its value, and where on the x axis it belongs, mostly samples or calls."""

    tag: str
    value: float
    x: float


class Sink(Protocol):
    """Something that takes events: any object with this method.

    It may also have `every`, so that it takes the metrics of every so many calls (1 without it), and `close()`, which
    is called once at the end. A run that was resumed begins again behind its save: what another process gave to its
    sinks from the first `x` on comes a second time.
    """

    def write(self, events: Sequence[Event]) -> None:
        """Take events, all with the same `x`."""
        ...


def checked_every(every: object, where: str) -> int:
    """Return a number of calls. Raises `FdsError` for any other value."""
    if not is_int(every, 1):
        raise FdsError("not a number of calls", where=f"{where}, every", got=repr(every), want="1 or more")
    return every


def checked_path(path: object, where: str) -> str:
    """Return a path as a text. Raises `FdsError` for what is none."""
    text = path.__fspath__() if hasattr(path, "__fspath__") else path  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(text, str) or not text:
        raise FdsError("not a path", where=where, got=repr(path), want='"runs/one"')
    return expanded(text)


def writable_directory(path: str | Path, where: str) -> Path:
    """Make a directory, on the first rank, which alone writes. Raises `FdsError` where nothing can be written there."""
    directory = Path(path)
    if worlds.current().rank == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise FdsError(
                "nothing can be written there", where=where, got=str(error), want="a directory that this user may write"
            ) from error
    return directory


def checked_texts(where: str, **texts: object) -> dict[str, Any]:
    """Return arguments that are texts or None. Raises `FdsError` for others."""
    for name, text in texts.items():
        if not isinstance(text, str | None):
            raise FdsError("not a text", where=f"{where}, {name}", got=repr(text)[:80], want="a text or None")
    return texts


def needs(package: str, extra: str, where: str) -> None:
    """Raise `FdsError` if a package is not installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise FdsError(f"it needs {package}", where=where, got="not installed", hint=f"pip install 'fds[{extra}]'")
