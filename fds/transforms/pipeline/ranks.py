"""The ranks' interpreter: each rank does its row, and what other ranks need of it travels along the axis.

A row is lowered: it says when a message is sent, and from when on it may be received. Both only begin there; a send is
waited for when its buffer is needed again, a receive when what it brings is used.

A rank on which an action fails goes on through its row without computing: it receives what is sent to it and sends
zeros, so that no other rank waits for it, and at the end all ranks learn what happened.
"""

from __future__ import annotations

from fds.errors import RankError
from fds.plans import Action, Op
from fds.plans.plan import COMPUTE
from fds.transforms.pipeline.computations import Computations
from fds.transforms.pipeline.failure import Failure
from fds.transforms.pipeline.lowered import Lowered
from fds.transforms.pipeline.post import Post


def run(plan: Lowered, work: Computations, post: Post, failure: Failure | None) -> Failure | None:
    """Do this rank's row; return what failed first on it, where something did. Raises `RankError` for a lost rank."""
    for action in plan.row:
        if failure is None:
            try:
                _do(action, work, post)
                continue
            except RankError:
                raise
            except Exception as error:
                failure = Failure.of(error, plan.places[action], action)
        if action.op in COMPUTE:
            post.forgo(action)
            work.skip(action)
        else:
            _do(action, work, post, hollow=True)
    post.close()
    return failure


def _do(action: Action, work: Computations, post: Post, *, hollow: bool = False) -> None:
    if action.op in COMPUTE:
        work.do(action, post)
    elif action.op in (Op.SEND_ACTIVATION, Op.SEND_GRAD):
        post.send(action, hollow=hollow)
    elif action.op in (Op.RECV_ACTIVATION, Op.RECV_GRAD):
        post.receive(action)
