"""Data loaders whose batches are a function of a seed and a position, which is `state.calls`; files of tokens."""

from fds.data.curriculum import CurriculumSampler
from fds.data.loaders import DistributedLoader, RepeatingLoader
from fds.data.orders import BatchOrder, permute
from fds.data.shares import Coordinate, per_microbatch
from fds.data.tokens import TokenFile, write_tokens

__all__ = [
    "BatchOrder",
    "Coordinate",
    "CurriculumSampler",
    "DistributedLoader",
    "RepeatingLoader",
    "TokenFile",
    "per_microbatch",
    "permute",
    "write_tokens",
]
