"""Debugging a run: what is not finite first, which ranks differ where they must not, and all that a state holds."""

from fds.debugging._watch import NonFinite, Watch, watch
from fds.debugging.checking import Statistics
from fds.debugging.states import RankDifference, check_ranks, dump_state, rank_differences
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
