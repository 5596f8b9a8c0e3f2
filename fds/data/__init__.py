"""Data loaders whose batches are a function of a seed and a position, which is `state.calls`; files of tokens."""

from fds.data.loaders import DistributedLoader, RepeatingLoader
from fds.data.shares import Coordinate, per_microbatch
from fds.data.tokens import TokenFile, write_tokens

__all__ = ["Coordinate", "DistributedLoader", "RepeatingLoader", "TokenFile", "per_microbatch", "write_tokens"]
