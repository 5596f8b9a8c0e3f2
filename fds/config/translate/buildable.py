"""Values that each key allows and that no function of fds takes: refused with the JSON, not when a step is made.

What the keys come to is made once, as far as it needs neither a mesh nor a batch size, and an error names the keys that
became the arguments in question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fds.config.auto import autos
from fds.config.keys.groups import Groups
from fds.config.meaning import Argument
from fds.config.record import Config
from fds.config.translate.composition import clip, scale
from fds.config.translate.function_call import Call
from fds.config.translate.optimizer import optimizer, schedule
from fds.errors import ConfigError, FdsError

_MADE = (  # what makes a call, and the groups that it reads
    (lambda config: optimizer(config) or schedule(config), ("optimizer", "scheduler")),
    (scale, ("fp16", "amp", "torch_autocast")), (clip, ("clipping",)),
)  # fmt: skip


def refuse_what_cannot_be_made(config: Groups) -> None:
    """Raise `ConfigError`, with the JSON paths, for values that an optimizer, a schedule or a loss scale refuses.

    Groups in which something is `"auto"` are left until that is filled in.
    """
    for make, groups in _MADE:
        if any(group is not None and autos(group.to_dict()) for group in (getattr(config, name) for name in groups)):
            continue
        try:
            call = make(config)
        except ConfigError:
            continue  # it lacks an argument of `initialize`, which nobody has given yet
        _make(config, call)


def _make(config: Groups, call: Any) -> None:
    """Make a call, those among its arguments first."""
    if isinstance(call, tuple):
        for one in call:
            _make(config, one)
    if not isinstance(call, Call):
        return
    for one in (*call.args, *call.kwargs.values()):
        _make(config, one)
    try:
        call.build(None)
    except FdsError as error:
        paths = list(_paths(config, call.path, str(error)))
        raise ConfigError(error.what, where=", ".join(paths), got=error.got, want=error.want,
                          hint=error.hint) from error  # fmt: skip


def _paths(config: Groups, function: str, words: str) -> Iterator[str]:
    """Yield the keys that became the arguments of a function that an error speaks of; all that were given otherwise."""
    keys = [(path, known.meaning.name, given) for path, value, known, given in config.walk()
            if isinstance(known.meaning, Argument) and function in known.meaning.of and not isinstance(value, Config)
            and not _is_off(config, path.rpartition(".")[0])]
    named = [path for path, name, _ in keys if name and re.search(rf"\b{name}\b", words)]
    yield from named or [path for path, _, given in keys if given]


def _is_off(config: Groups, group: str) -> bool:
    return group in ("fp16", "amp", "torch_autocast") and config[f"{group}.enabled"] is False
