"""Data: loaders whose batches are a function of a seed and of a position, which is `state.calls`."""

from fds.data.distributed import DistributedLoader
from fds.data.padding import per_microbatch
from fds.data.places import Place
from fds.data.repeating import RepeatingLoader

__all__ = ["DistributedLoader", "RepeatingLoader", "Place", "per_microbatch"]
