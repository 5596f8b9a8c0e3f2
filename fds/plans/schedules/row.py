"""`Row`: builds the actions of one rank, with the microbatches of every stage in order."""

from __future__ import annotations

from collections import Counter

from fds.plans.actions import Action, Op

F, B, W, BW = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD


class Row:
    """The actions of one rank so far; the next microbatch of each operation is counted here.

    Gradients are summed by W and BW. Every schedule does them in the order 0, 1, 2, ... at every stage, so that all
    schedules are bit-equal.

    >>> row = Row()
    >>> row.do(3, F, F, BW, B, W)
    >>> row.actions
    [3F0, 3F1, 3BW0, 3B1, 3W1]
    """

    def __init__(self):
        self.actions: list[Action] = []
        self._counts: Counter[tuple[int, Op]] = Counter()

    def do(self, stage: int, *ops: Op) -> None:
        """Append these operations of a stage, each for its next microbatch."""
        for op in ops:
            if op is BW:
                microbatch = self._take(stage, W)
                assert microbatch == self._take(stage, B), "a W is pending: BW would sum gradients out of order"
            else:
                microbatch = self._take(stage, op)
            self.actions.append(Action(stage, op, microbatch))

    def done(self, stage: int, op: Op) -> int:
        """Return the number of microbatches of a stage for which this operation is in the row."""
        return self._counts[stage, op]

    def _take(self, stage: int, op: Op) -> int:
        microbatch = self._counts[stage, op]
        self._counts[stage, op] = microbatch + 1
        return microbatch
