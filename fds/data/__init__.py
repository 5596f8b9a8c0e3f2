"""Data loaders whose batches are a function of a seed and a position, which is `state.calls`."""

from fds.data.coordinate import Coordinate
from fds.data.distributed import DistributedLoader
from fds.data.padding import per_microbatch
from fds.data.repeating import RepeatingLoader

__all__ = ["Coordinate", "DistributedLoader", "RepeatingLoader", "per_microbatch"]
