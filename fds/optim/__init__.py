"""Optimizers: pairs of functions over flat slices. Arguments are torch.optim's, any of them a schedule f(t)."""

from fds.optim.adam_family import adam, adamw
from fds.optim.base import Optimizer, Schedule, Segment, Values
from fds.optim.groups import by_name
from fds.optim.heavy_ball import sgd
from fds.optim.layerwise import lamb
from fds.optim.orthogonal import muon
from fds.optim.sign_momentum import lion
from fds.optim.sum_of_squares import adagrad

__all__ = [
    "Optimizer", "Schedule", "Segment", "Values", "adagrad", "adam", "adamw", "by_name", "lamb", "lion", "muon", "sgd",
]  # fmt: skip
