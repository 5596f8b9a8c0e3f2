"""How long the parts of a step take: `fds.timed` in every so many calls, `fds.trace` all of one call on all ranks.

`fds.messages` logs what ranks send each other.
"""

from fds.timing._messages import OPERATIONS, Message, Messages, messages
from fds.timing._timed import Timed, Times, timed
from fds.timing._trace import trace
from fds.timing.message_table import MessageRow, MessageTable, RankWaits, Spread

__all__ = [
    "OPERATIONS",
    "Message",
    "MessageRow",
    "MessageTable",
    "Messages",
    "RankWaits",
    "Spread",
    "Timed",
    "Times",
    "messages",
    "timed",
    "trace",
]
