"""Optimizers: pairs of functions over flat slices. Arguments are torch.optim's, any of them a schedule f(t)."""

from fds.optim._adagrad import adagrad
from fds.optim._adam import adam, adamw
from fds.optim._by_name import by_name
from fds.optim._lamb import lamb
from fds.optim._lion import lion
from fds.optim._muon import muon
from fds.optim._onebit_adam import onebit_adam
from fds.optim._onebit_lamb import onebit_lamb
from fds.optim._sgd import sgd
from fds.optim._zero_one_adam import zero_one_adam
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
    "zero_one_adam",
]
