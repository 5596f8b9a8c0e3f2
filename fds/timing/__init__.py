"""How long the parts of a step take: `fds.timed` in every so many calls, `fds.trace` all of one call on all ranks.

`fds.messages` logs what ranks send each other, `fds.memory_breakdown` what memory is in use in the parts of a step.
`fds.watch_ranks` warns of a rank that is slower than the others.
"""

from fds.timing._memory_breakdown import MemoryBreakdown, MemoryParts, PartMemory, memory_breakdown
from fds.timing._messages import OPERATIONS, Message, Messages, messages
from fds.timing._stragglers import RankPace, RankWatch, Straggler, watch_ranks
from fds.timing._timed import LayerTimes, PartSpread, RankTimes, Timed, Times, peak_flops, timed, trace
from fds.timing.message_table import MessageRow, MessageTable, RankWaits, Spread

__all__ = [
    "OPERATIONS",
    "LayerTimes",
    "MemoryBreakdown",
    "MemoryParts",
    "Message",
    "MessageRow",
    "MessageTable",
    "Messages",
    "PartMemory",
    "PartSpread",
    "RankPace",
    "RankTimes",
    "RankWaits",
    "RankWatch",
    "Spread",
    "Straggler",
    "Timed",
    "Times",
    "memory_breakdown",
    "messages",
    "peak_flops",
    "timed",
    "trace",
    "watch_ranks",
]
