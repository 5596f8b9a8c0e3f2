"""The serial interpreter: one process does all rows of a plan, in one order that gives each action what it needs.

It sends nothing and cannot deadlock: what every other way of running a plan must equal.
"""

from __future__ import annotations

from fds.errors import RankError
from fds.plans import Plan, linear
from fds.transforms.pipeline.computations import Computations, Local
from fds.transforms.pipeline.failure import Failure


def run(plan: Plan, work: Computations, failure: Failure | None) -> Failure | None:
    """Do the computations of a plan; return what failed first, where something did. Raises what a lost rank raises."""
    mail = Local()
    for place, (_, action) in enumerate(linear(plan)):
        if failure is None:
            try:
                work.do(action, mail)
                continue
            except RankError:
                raise
            except Exception as error:
                failure = Failure.of(error, place, action)
        work.skip(action)  # data ranks still meet
    return failure
