"""How long a call of a candidate takes, from what its ranks compute and what its messages take by themselves.

    seconds = a * computed + b * messages

`computed` is what a call takes without messages, `messages` what they add, both by `fds.tuning.replay`; a and b are 1
where that is right. They are found again after each trial, by least squares over all trials so far, of ratios, held
near 1 as by one trial of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Prediction:
    """What is expected of a candidate.

    Attributes:
        computed: seconds of a call without messages.
        messages: seconds that messages add.
    """

    computed: float
    messages: float

    def seconds(self, factors: tuple[float, float] = (1.0, 1.0)) -> float:
        """Return the seconds of a call."""
        return factors[0] * self.computed + factors[1] * self.messages


def fit(trials: Sequence[tuple[Prediction, float]]) -> tuple[float, float]:
    """Return the factors of computing and of messages that fit trials: predictions, and the seconds that were measured.

    >>> cases = [Prediction(1.0, m) for m in (0.0, 0.5, 1.0, 2.0)]
    >>> a, b = fit([(p, 1.1 * p.computed + 0.6 * p.messages) for p in cases for _ in range(100)])
    >>> round(a, 1), round(b, 1)
    (1.1, 0.6)
    """
    # rows (x, y) with a x + b y = 1, in units of what was measured; two more hold a and b near 1
    rows = [(p.computed / t, p.messages / t, 1.0) for p, t in trials] + [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
    xx, xy, yy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x1, y1 = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy  # above 0: the last two rows are independent
    return (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
