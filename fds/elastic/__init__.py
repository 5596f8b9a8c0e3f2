"""Runs whose number of ranks changes: the batch that all of these numbers share, by DeepSpeed's elasticity."""

from fds.config.elasticity import Batch, Batches
from fds.elastic._batches import batches, check_unchanged

__all__ = ["Batch", "Batches", "batches", "check_unchanged"]
