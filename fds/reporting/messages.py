"""`messages.json`: the table of a run's messages, by kind and by rank, as `MessageTable.to_dict` has it."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import cattrs

from fds.errors import FdsError

NAME = "messages.json"


@attrs.frozen
class Row:
    """Messages of one kind: those of all calls that were watched, this rank's."""

    op: str
    what: str = ""
    axis: str = ""
    ranks: int = 0
    num_bytes: int = 0  # of one
    count: int = 0
    bytes_sent: int = 0
    predicted_count: int | None = None
    predicted_bytes: int | None = None
    timed: int = 0  # how many of them have times
    latency_ms: float = 0.0  # of all that have
    waited_ms: float = 0.0
    bus_gb_per_s: float | None = None


@attrs.frozen
class RankWait:
    """How long a rank waited for messages, and how long of it other ranks had not come yet, in milliseconds."""

    rank: int
    waited_ms: float = 0.0
    for_others_ms: float = 0.0


@attrs.frozen
class Table:
    """Messages of so many calls."""

    calls: int
    rows: tuple[Row, ...] = ()
    ranks: tuple[RankWait, ...] = ()


def read_messages(path: Path) -> Table:
    """Read a table of messages. Raises `FdsError` for anything else, and `OSError`."""
    try:
        return cattrs.structure(json.loads(path.read_bytes()), Table)
    except (ValueError, TypeError, cattrs.BaseValidationError) as error:
        raise FdsError("this is not a table of messages", where=str(path), got=str(error).splitlines()[0]) from None
