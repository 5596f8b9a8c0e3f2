"""Check the numbers of ranks and microbatches that a schedule is called with."""

from __future__ import annotations

from fds.errors import PlanError, is_int


def check_sizes(schedule: str, num_ranks: object, num_microbatches: object, *, least: int = 1) -> None:
    """Raise `PlanError` unless these are counts, with at least `least` microbatches."""
    for name, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        check_count(schedule, name, value)
    if isinstance(num_microbatches, int) and num_microbatches < least:
        raise PlanError(
            "too few microbatches for this schedule",
            where=schedule,
            got=f"num_ranks={num_ranks}, num_microbatches={num_microbatches}",
            want=f"num_microbatches >= {least}",
        )


def check_count(schedule: str, name: str, value: object) -> None:
    """Raise `PlanError` unless this is an int of at least 1."""
    if not is_int(value, 1):
        raise PlanError("not a count", where=schedule, got=f"{name}={value!r}", want=f"{name} >= 1")
