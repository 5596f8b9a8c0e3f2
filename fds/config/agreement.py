"""Agreement: ranks that train together have one configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fds.collectives import Mesh
from fds.config.training import TrainingConfig
from fds.errors import ConfigError, FdsError


def agreed(mesh: Mesh, resolved: Callable[[], TrainingConfig], key: int) -> TrainingConfig:
    """Return the configuration that every rank of the mesh has; all of them call this.

    Raises `ConfigError` on every rank where one could not resolve its own, and, with the JSON paths, where they differ.
    """
    config = error = None
    try:
        config = resolved()
    except FdsError as caught:
        error = caught
    mine = None if config is None else {**dict(_flat(config.to_dict(full=True))), "key": key}
    heard = mesh[tuple(mesh.shape)].exchange([mine, error and error.what, error and error.where], "configuration")
    if error is not None:
        raise error
    assert config is not None and mine is not None
    for rank, (theirs, what, where) in enumerate(heard):
        if theirs is None:
            raise ConfigError(f"rank {rank}: {what}", where=where)
    for rank, (theirs, _, _) in enumerate(heard):
        other = [path for path in sorted({*mine, *theirs}) if mine.get(path) != theirs.get(path)]
        if other:
            raise ConfigError("the ranks have different configurations", where=", ".join(other[:8]),
                              got=f"{theirs.get(other[0])!r} on rank {rank}", want=f"{mine.get(other[0])!r}, as here")
    return config


def _flat(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield path + name, json.loads(json.dumps(value, default=repr))
