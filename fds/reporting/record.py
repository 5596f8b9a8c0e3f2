"""`run.json`: what a run says of itself once, when it begins: configuration, composition, bytes, plan, environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs
import cattrs

from fds.errors import FdsError

NAME = "run.json"
FORMAT = 1  # incremented when a reader of the previous format could misread a file


@attrs.frozen
class Start:
    """A process that began the run, or went on with it."""

    at: str  # ISO 8601, in UTC
    calls: int  # of the state that it began with
    topology: str = ""  # its ranks and axes, as text; a record of an older fds does not say


@attrs.frozen
class Record:
    """What a run says of itself.

    Attributes:
        starts: of its processes, in order, also of those that a later one went back behind.
        configuration: as the user wrote it.
        explain: what the configuration came to, a text.
        stations: station of the step -> what fills it.
        describe: the step in words, those of `step.describe(state)`.
        num_bytes: part -> bytes that the first rank holds.
        places: place -> bytes of the state that live there, where some live elsewhere than on the device.
        sent: station -> bytes that a rank sends in a step, predicted.
        schedule: name of the pipeline's; empty where there is none.
        plan: of the pipeline: a row of actions for each rank, as text.
        environment: name -> versions, machine, ranks, program, commit.
    """

    format: int
    starts: tuple[Start, ...]
    configuration: dict[str, Any] = attrs.field(factory=dict)
    explain: str = ""
    stations: dict[str, str] = attrs.field(factory=dict)
    describe: str = ""
    num_bytes: dict[str, int] = attrs.field(factory=dict)
    places: dict[str, int] = attrs.field(factory=dict)
    sent: dict[str, int] = attrs.field(factory=dict)
    schedule: str = ""
    plan: tuple[str, ...] = ()
    environment: dict[str, str] = attrs.field(factory=dict)


def write_record(directory: Path, record: Record) -> None:
    """Write the record of a run, whole or not at all. Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    half = directory / f".{NAME}.half"
    half.write_text(json.dumps(cattrs.unstructure(record), indent=1) + "\n")
    os.replace(half, directory / NAME)


def read_record(path: Path) -> Record:
    """Read the record of a run. Raises `FdsError` for anything else, and `OSError`."""
    try:
        record = cattrs.structure(json.loads(path.read_bytes()), Record)
    except (ValueError, TypeError, cattrs.BaseValidationError) as error:
        raise FdsError("this is not the record of a run", where=str(path), got=_first(error), want=_WANT) from None
    if record.format != FORMAT:
        raise FdsError("a record of another format", where=str(path), got=str(record.format), want=str(FORMAT))
    return record


_WANT = "what fds.record_run writes"


def _first(error: Exception) -> str:
    return next(iter(cattrs.transform_error(error))) if isinstance(error, cattrs.BaseValidationError) else str(error)
