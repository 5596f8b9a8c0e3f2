"""Rename the parameters and buffers of a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
from torch import Tensor

from fds.errors import StorageError, did_you_mean
from fds.storage.source import Source


def renamed(source: Source, rename: Mapping[str, str] | Callable[[str], str]) -> Source:
    """Return a source with other names of parameters and buffers, in the optimizer's state too.

    Args:
        source: leaves "params.<name>", "opt.<slot>.<name>" and "buffers.<name>" are renamed; others stay.
        rename: new names by old ones, where others stay the same; or a function from old to new name.

    Raises `StorageError` for an unknown old name, a new name that is not a string, and two leaves with the same new
    name.
    """
    places = {path: place for path in source.leaves if (place := _place(path)) is not None}
    names = dict.fromkeys(name for _, name in places.values())
    if isinstance(rename, Mapping):
        for name in rename:
            if name not in names:
                raise StorageError(
                    "there is nothing of this name to rename",
                    where=source.where,
                    got=repr(name)[:80],
                    hint=did_you_mean(str(name), names),
                )
        new = {name: rename.get(name, name) for name in names}
    else:
        new = {name: rename(name) for name in names}
    for name, other in new.items():
        if not isinstance(other, str) or not other:
            raise StorageError(
                "a new name is not a string", where=f"{source.where}: {name}", got=repr(other)[:80], want="a name"
            )
    old: dict[str, str] = {}
    for path in source.leaves:
        prefix, name = places.get(path, (path, ""))
        path_new = prefix + new[name] if path in places else path
        if path_new in old:
            raise StorageError(
                "two leaves would have one name",
                where=source.where,
                got=f"{old[path_new]} and {path}",
                want=f"one of them as {path_new}",
            )
        old[path_new] = path

    def read(path: str, start: int, out: Tensor) -> None:
        source.read(old[path], start, out)

    now = {was: path for path, was in old.items()}
    return attrs.evolve(
        source,
        leaves={path: source.leaves[was] for path, was in old.items()},
        read=read,
        read_box=None,
        aliases={now[name]: now[first] for name, first in source.aliases.items()},
    )


def _place(path: str) -> tuple[str, str] | None:
    """Split a key path before the name in it; None if it has no name."""
    num_parts = {"params": 1, "buffers": 1, "opt": 2}.get(path.split(".")[0], 0)
    parts = path.split(".", num_parts)
    return (path.removesuffix(parts[-1]), parts[-1]) if num_parts and len(parts) > num_parts else None
