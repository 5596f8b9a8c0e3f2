"""Debugging a run: what is not finite first, which ranks differ where they must not, and all that a state holds."""

from fds.debugging._check_ranks import RankDifference, check_ranks, rank_differences
from fds.debugging._dump_state import dump_state
from fds.debugging._watch import Watch, watch
from fds.debugging.replay import NonFinite
from fds.debugging.statistics import Statistics
from fds.step import Comparison, compare_with_one_rank

__all__ = [
    "Comparison",
    "NonFinite",
    "RankDifference",
    "Statistics",
    "Watch",
    "check_ranks",
    "compare_with_one_rank",
    "dump_state",
    "rank_differences",
    "watch",
]
