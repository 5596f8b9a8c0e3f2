"""A row under construction, which takes the microbatches of every stage in order."""

from __future__ import annotations

from collections import Counter

from fds.plans.actions import Action, Op

F, B, W, BW = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD


class Row:
    """The actions of one rank so far; which microbatch comes next is counted here.

    Gradients are summed where W or BW are done. Counting here makes every schedule do them in the order 0, 1, 2, ...
    at every stage, so that all of them compute the same bits.

    >>> row = Row()
    >>> row.do(3, F, F, BW, B, W)
    >>> row.actions
    [3F0, 3F1, 3BW0, 3B1, 3W1]
    """

    def __init__(self):
        self.actions: list[Action] = []
        self._counts: Counter[tuple[int, Op]] = Counter()

    def do(self, stage: int, *ops: Op) -> None:
        """Append these operations of a stage, each for the microbatch that it has not yet been done for."""
        for op in ops:
            if op is BW:
                microbatch = self._take(stage, W)
                assert microbatch == self._take(stage, B), "a W is pending: BW would sum gradients out of order"
            else:
                microbatch = self._take(stage, op)
            self.actions.append(Action(stage, op, microbatch))

    def done(self, stage: int, op: Op) -> int:
        """Return how many microbatches of a stage this operation was done for."""
        return self._counts[stage, op]

    def _take(self, stage: int, op: Op) -> int:
        microbatch = self._counts[stage, op]
        self._counts[stage, op] = microbatch + 1
        return microbatch
