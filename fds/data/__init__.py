"""Data loaders whose batches are a function of a seed and a position, which is `state.calls`."""

from fds.data.loaders import DistributedLoader, RepeatingLoader
from fds.data.shares import Coordinate, per_microbatch

__all__ = ["Coordinate", "DistributedLoader", "RepeatingLoader", "per_microbatch"]
