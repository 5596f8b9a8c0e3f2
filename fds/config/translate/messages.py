"""From a configuration to the log of messages: which operations `prof_ops` names."""

from __future__ import annotations

import re

from fds.config.keys import Groups
from fds.errors import ConfigError, nearest
from fds.timing import OPERATIONS

# DeepSpeed's names of what has another name here, and of what is never sent.
_SAME = {"isend": "send", "irecv": "recv", "monitored_barrier": "barrier", "broadcast_object_list": "exchange"}
_SAME |= {"all_gather_object": "exchange", "inference_all_reduce": "all_reduce"}
_NEVER = ("gather", "reduce", "scatter")
_ENDINGS = r"(_into_tensor|_tensor|_base|_coalesced|_single|_fn)+$"


def operations(config: Groups) -> list[str] | None:
    """Return the operations that a configuration has logged, None for all.

    Raises `ConfigError` for a name that is no operation.
    """
    asked = config.comms_logger
    return None if asked.prof_all else list(dict.fromkeys(op for name in asked.prof_ops for op in _named(name)))


def _named(name: str) -> list[str]:
    """Return the operation of this name, nothing for one that is never sent.

    >>> _named("all_gather_into_tensor"), _named("isend"), _named("scatter")
    (['all_gather'], ['send'], [])
    """
    short = re.sub(_ENDINGS, "", name)
    found = _SAME.get(short, short)
    if found not in OPERATIONS and found not in _NEVER:
        raise ConfigError(
            "no such operation",
            where="comms_logger.prof_ops",
            got=repr(name),
            want=", ".join(OPERATIONS),
            hint=nearest(short, OPERATIONS),
        )
    return [found] if found in OPERATIONS else []
