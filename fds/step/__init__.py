"""The step: its program of stations, transforms that fill them, and what composing means."""

from fds.step.added import Adds, with_added
from fds.step.all_stations import Program, Run
from fds.step.batch import Split, SplitBatch, Whole, check_tree, rows, whole
from fds.step.call import Call
from fds.step.checks.agreement import same_composition
from fds.step.composition import Composition, Transform, compose, transform
from fds.step.describe import Description
from fds.step.evaluation import evaluate, seen_parameters
from fds.step.execution import Executor, InTurn, LocalGradients, Microbatch, Pass, PassResult
from fds.step.filling import fill, first_call_compared
from fds.step.gradients import Gradients, Measure, global_norm
from fds.step.initial import beginning, encoded_leaves
from fds.step.memory import Memory
from fds.step.one_rank import Comparison, compare_with_one_rank
from fds.step.placements import LocalCopies, Owned, Placement, Replicated, SplitDim
from fds.step.program import Step
from fds.step.ranges import profiled
from fds.step.residency.contract import OnDevice, Residency, Resident
from fds.step.seeds import Seeds
from fds.step.sharding.footprint import PredictedMessages
from fds.step.sharding.gather import Gather
from fds.step.sharding.handles import materialize
from fds.step.sharding.kept import Kept
from fds.step.sharding.order import Order
from fds.step.sharding.reduce import Reduce
from fds.step.sharding.shard import Shard
from fds.step.sharding.transport import Leg, Named, Pending, Relay, Transport
from fds.step.stations import After, Place, Runtime, Scale
from fds.step.structure import AllBut, Structure
from fds.step.sums import Sum
from fds.step.topology import Dimension, Dimensions
from fds.step.totals import Totals
from fds.step.views import Cut, encode

__all__ = [
    "Adds",
    "After",
    "AllBut",
    "Call",
    "Comparison",
    "Composition",
    "Cut",
    "Description",
    "Dimension",
    "Dimensions",
    "Executor",
    "Gather",
    "Gradients",
    "InTurn",
    "Kept",
    "Leg",
    "LocalCopies",
    "LocalGradients",
    "Measure",
    "Memory",
    "Microbatch",
    "Named",
    "OnDevice",
    "Order",
    "Owned",
    "Pass",
    "PassResult",
    "Pending",
    "Place",
    "Placement",
    "PredictedMessages",
    "Program",
    "Reduce",
    "Relay",
    "Replicated",
    "Residency",
    "Resident",
    "Run",
    "Runtime",
    "Scale",
    "Seeds",
    "Shard",
    "Split",
    "SplitBatch",
    "SplitDim",
    "Step",
    "Structure",
    "Sum",
    "Totals",
    "Transform",
    "Transport",
    "Whole",
    "beginning",
    "check_tree",
    "compare_with_one_rank",
    "compose",
    "encode",
    "encoded_leaves",
    "evaluate",
    "fill",
    "first_call_compared",
    "global_norm",
    "materialize",
    "profiled",
    "rows",
    "same_composition",
    "seen_parameters",
    "transform",
    "whole",
    "with_added",
]
