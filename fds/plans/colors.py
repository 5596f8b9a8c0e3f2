"""The colours of computations in pictures: Okabe and Ito's palette, which the colour-blind can tell apart."""

from __future__ import annotations

from collections.abc import Iterable

from fds.plans.actions import COMPUTE, Action, Op

COLORS = {  # red, green, blue, from 0 to 1
    Op.FORWARD: (0.34, 0.71, 0.91),
    Op.BACKWARD_INPUT: (0.90, 0.62, 0.00),
    Op.BACKWARD_WEIGHT: (0.00, 0.62, 0.45),
    Op.BACKWARD: (0.80, 0.47, 0.65),
}
LABELS = {
    Op.FORWARD: "F: forward",
    Op.BACKWARD_INPUT: "B: input gradients",
    Op.BACKWARD_WEIGHT: "W: weight gradients",
    Op.BACKWARD: "BW: both",
}
OTHER = (0.7, 0.7, 0.7)  # messages, and what happens once a step


def color(action: Action, stages: tuple[int, ...]) -> tuple[float, float, float]:
    """Return the colour of an action; of the stages of its rank, later ones are paler."""
    if action.op not in COMPUTE:
        return OTHER
    place = stages.index(action.stage) if action.stage in stages else 0  # type: ignore[arg-type]
    white = 0.6 * place / max(len(stages) - 1, 1)
    red, green, blue = (c + (1 - c) * white for c in COLORS[action.op])
    return red, green, blue


def legend(actions: Iterable[Action]) -> list[tuple[str, str]]:
    """Return the colour, as hexadecimal digits, and the meaning of each kind of computation among the actions."""
    used = {action.op for action in actions}
    return [(digits(COLORS[op]), LABELS[op]) for op in COLORS if op in used]


def digits(rgb: tuple[float, float, float]) -> str:
    """Return a colour as six hexadecimal digits.

    >>> digits((1.0, 0.5, 0.0))
    'ff8000'
    """
    return "".join(f"{round(255 * c):02x}" for c in rgb)
