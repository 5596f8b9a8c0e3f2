"""Debugging a run: what is not finite first, which ranks differ where they must not, and all that a state holds."""

from fds.debugging._check_ranks import RankDifference, check_ranks, rank_differences
from fds.debugging._dump_state import dump_state
from fds.debugging._watch import Watch, watch
from fds.debugging.replay import NonFinite
from fds.debugging.statistics import Statistics

__all__ = [
    "NonFinite",
    "RankDifference",
    "Statistics",
    "Watch",
    "check_ranks",
    "dump_state",
    "rank_differences",
    "watch",
]
