"""The rows of ZB-H1 and ZB-H2: forwards ahead of the backward, weight gradients behind it."""

from __future__ import annotations

from fds.plans.schedules.row import B, F, Row, W


def late_weights(stage: int, num_microbatches: int, *, ahead: int, behind: int) -> Row:
    """Return the row F, B, W, F, B, W, ... in which F is `ahead` microbatches before B, and W `behind` after it.

    >>> late_weights(0, 4, ahead=1, behind=1).actions
    [0F0, 0F1, 0B0, 0F2, 0B1, 0W0, 0F3, 0B2, 0W1, 0B3, 0W2, 0W3]
    """
    row = Row()
    for turn in range(-ahead, num_microbatches + behind):
        if turn + ahead < num_microbatches:
            row.do(stage, F)
        if 0 <= turn < num_microbatches:
            row.do(stage, B)
        if 0 <= turn - behind < num_microbatches:
            row.do(stage, W)
    return row
