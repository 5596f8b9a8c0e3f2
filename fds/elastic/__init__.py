"""Runs whose number of ranks changes: they go on with the same batch, which all of these numbers share."""

from fds.config.elasticity import Batch, Batches
from fds.elastic._batches import batches, check_unchanged
from fds.elastic._history import Event, History, read_history
from fds.elastic._run import Finished, run

__all__ = [
    "Batch", "Batches", "Event", "Finished", "History", "batches", "check_unchanged", "read_history", "run"
]  # fmt: skip
