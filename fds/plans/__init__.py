"""Plans: what each rank of a pipeline does, in order, as values that print, parse, and can be checked and transformed.

A schedule is a pure function of the numbers of ranks and microbatches to a plan. Passes lower the plan to what an
interpreter runs. Your own schedule is a function that returns rows.

>>> plan = validate(one_f_one_b(2, 2), memory_bound=[2, 1])
>>> plan
0: 0F0 0F1 0BW0 0BW1
1: 1F0 1BW0 1F1 1BW1
>>> num_buffers(overlap(communicate(plan)))
{0: 2, 1: 2}
>>> mine = lambda num_ranks, num_microbatches: [[f"{rank}F0", f"{rank}BW0"] for rank in range(num_ranks)]
>>> validate(mine(2, 1))
0: 0F0 0BW0
1: 1F0 1BW0
"""

from fds.plans.lowering import assign_buffers, communicate, finish, num_buffers, overlap
from fds.plans.measuring import LayerCosts, measure
from fds.plans.order import linear
from fds.plans.partition import boundaries_of, partition_balanced, partition_uniform
from fds.plans.pictures import draw_png, draw_text, to_chrome
from fds.plans.plan import Action, Op, PipelineSchedule, Plan
from fds.plans.schedules import (
    data_parallel,
    dualpipe_v,
    forwards_of,
    gpipe,
    inference,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from fds.plans.search import searched
from fds.plans.simulator import Costs, simulate
from fds.plans.timeline import Event, Recording, Timeline, joined, record, recorder
from fds.plans.validation import validate

__all__ = [
    # what a plan is
    "Action",
    "Op",
    "Plan",
    "PipelineSchedule",
    # schedules
    "data_parallel",
    "dualpipe_v",
    "forwards_of",
    "gpipe",
    "inference",
    "interleaved",
    "one_f_one_b",
    "searched",
    "zb_h1",
    "zb_h2",
    "zb_v",
    # passes
    "assign_buffers",
    "communicate",
    "finish",
    "linear",
    "num_buffers",
    "overlap",
    "validate",
    # time and memory
    "Costs",
    "Event",
    "LayerCosts",
    "Recording",
    "Timeline",
    "joined",
    "measure",
    "record",
    "recorder",
    "simulate",
    # stages of layers
    "boundaries_of",
    "partition_balanced",
    "partition_uniform",
    # pictures
    "draw_png",
    "draw_text",
    "to_chrome",
]
