"""Check that all ranks of a mesh have the same configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fds.collectives import Mesh
from fds.config.training import TrainingConfig
from fds.errors import ConfigError, FdsError


def resolve_on_all_ranks(mesh: Mesh, resolve: Callable[[], TrainingConfig], key: int) -> TrainingConfig:
    """Return the result of `resolve`, once it and `key` are known to be equal on all ranks. Collective.

    Raises `ConfigError` on every rank if one cannot resolve its configuration, and if they differ, with the JSON
    paths.
    """
    config = error = None
    try:
        config = resolve()
    except FdsError as caught:
        error = caught
    mine = None if config is None else {**dict(_flat(config.to_dict(full=True))), "key": key}
    replies = mesh[tuple(mesh.shape)].exchange([mine, error and error.what, error and error.where], "configuration")
    if error is not None:
        raise error
    assert config is not None and mine is not None
    for rank, (other, what, where) in enumerate(replies):
        if other is None:
            raise ConfigError(f"rank {rank}: {what}", where=where)
    for rank, (other, _, _) in enumerate(replies):
        paths = [path for path in sorted({*mine, *other}) if mine.get(path) != other.get(path)]
        if paths:
            raise ConfigError(
                "the ranks have different configurations",
                where=", ".join(paths[:8]),
                got=f"{other.get(paths[0])!r} on rank {rank}",
                want=f"{mine.get(paths[0])!r}, as here",
            )
    return config


def _flat(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield path + name, json.loads(json.dumps(value, default=repr))
