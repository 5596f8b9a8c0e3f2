"""The fastest composition that fits: spaces, what is known before anything runs, trials, and their report."""

from fds.tuning.report import Report, Row
from fds.tuning.search import Budget, tune
from fds.tuning.spaces import Candidate, Space, standard

__all__ = ["Budget", "Candidate", "Report", "Row", "Space", "standard", "tune"]
