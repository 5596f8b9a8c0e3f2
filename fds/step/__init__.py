"""The step: its program of stations, transforms that fill them, and what composing means."""

from fds.step.batch import Split, Whole, rows, whole
from fds.step.composition import Composition, Transform, compose, fill, transform
from fds.step.describe import Description
from fds.step.gather import Gather
from fds.step.gradients import Gradients, Measure, global_norm
from fds.step.program import Step
from fds.step.reduce import Reduce
from fds.step.shard import Shard
from fds.step.stations import After, Commit, Place, Scale
from fds.step.sums import Sum

__all__ = [
    "After", "Commit", "Composition", "Description", "Gather", "Gradients", "Measure", "Place", "Reduce", "Scale",
    "Shard", "Split", "Step", "Sum", "Transform", "Whole", "compose", "fill", "global_norm", "rows", "transform",
    "whole",
]  # fmt: skip
