"""Check that functions of fds accept the values of a configuration when it is read, not when a step is composed.

The optimizer, the schedule, the loss scale and the clipping, which need neither a mesh nor batch sizes, are built once.
An error names the keys that became the refused arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fds.config.auto import auto_paths
from fds.config.composition import clipping_call, loss_scale_call
from fds.config.field import Argument
from fds.config.function_call import FunctionCall
from fds.config.keys import Groups
from fds.config.record import Config
from fds.config.updates import optimizer_call, schedule_call
from fds.errors import ConfigError, FdsError

_CALLS = (  # function that returns a call, and the groups that it reads
    (lambda config: optimizer_call(config) or schedule_call(config), ("optimizer", "scheduler")),
    (loss_scale_call, ("fp16", "amp", "torch_autocast")),
    (clipping_call, ("clipping",)),
)


def check_buildable(config: Groups) -> None:
    """Raise `ConfigError`, with the JSON paths, for values that an optimizer, a schedule or a loss scale refuses.

    Groups that contain `"auto"` are checked once it is filled in.
    """
    for call_of, names in _CALLS:
        groups = [getattr(config, name) for name in names]
        if any(group is not None and auto_paths(group.to_dict()) for group in groups):
            continue
        try:
            call = call_of(config)
        except ConfigError:
            continue  # it needs an argument of `initialize`
        _check(config, call)


def _check(config: Groups, call: Any) -> None:
    """Build a call, after the calls among its arguments."""
    if isinstance(call, tuple):
        for one in call:
            _check(config, one)
    if not isinstance(call, FunctionCall):
        return
    for one in (*call.args, *call.kwargs.values()):
        _check(config, one)
    try:
        call.build(None)
    except FdsError as error:
        paths = list(_paths(config, call.path, str(error)))
        raise ConfigError(
            error.what, where=", ".join(paths), got=error.got, want=error.want, hint=error.hint
        ) from error


def _paths(config: Groups, function: str, message: str) -> Iterator[str]:
    """Yield the keys whose arguments of a function an error message mentions; if none, all that were given."""
    keys = [
        (path, key.meaning.name, given)
        for path, value, key, given in config.walk()
        if isinstance(key.meaning, Argument)
        and function in key.meaning.of
        and not isinstance(value, Config)
        and not _is_off(config, path.rpartition(".")[0])
    ]
    named = [path for path, name, _ in keys if name and re.search(rf"\b{name}\b", message)]
    yield from named or [path for path, _, given in keys if given]


def _is_off(config: Groups, group: str) -> bool:
    return group in ("fp16", "amp", "torch_autocast") and config[f"{group}.enabled"] is False
