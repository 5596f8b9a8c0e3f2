"""Optimizers: pairs of functions over flat slices. Arguments are torch.optim's, any of them a schedule f(t)."""

from fds.optim._by_name import by_name
from fds.optim._elementwise import adagrad, adam, adamw, lion, sgd
from fds.optim._lamb import lamb
from fds.optim._muon import muon
from fds.optim._onebit import onebit_adam, onebit_lamb, zero_one_adam
from fds.optim.as_torch import torch_groups
from fds.optim.base import LRSchedule, Optimizer, Segment, Values

__all__ = [
    "LRSchedule",
    "Optimizer",
    "Segment",
    "Values",
    "adagrad",
    "adam",
    "adamw",
    "by_name",
    "lamb",
    "lion",
    "muon",
    "onebit_adam",
    "onebit_lamb",
    "sgd",
    "torch_groups",
    "zero_one_adam",
]
