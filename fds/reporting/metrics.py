"""What a metric is by its name: the section of the page that shows it, its unit, and whether it is noise to smooth."""

from __future__ import annotations

import re

import attrs

CURVES, SPEED, TIME, MEMORY, MESSAGES = "curves", "speed", "time", "memory", "messages"
TIMES = "elapsed_time_ms_"  # before the names of what fds.timed measures
EVALUATED = ("eval_", "val_", "test_", "held_out_")  # before the name of a metric: it is drawn beside that


@attrs.frozen
class Kind:
    """What metrics of some name are.

    Attributes:
        section: where they are shown.
        unit: of their values: "ms", "/s", "B", "%" of what is a share of 1, or none.
        smooth: whether their values are noisy.
        rank: of the section's metrics, smaller ones come first.
    """

    section: str
    unit: str = ""
    smooth: bool = True
    rank: int = 50


_KINDS = {  # a name that matches is of that kind; the first counts
    r"messages.*_bytes_sent": Kind(MESSAGES, "B"),
    r"messages.*_ms": Kind(MESSAGES, "ms"),
    r"messages(_.*)?": Kind(MESSAGES),
    rf"{TIMES}.*": Kind(TIME, "ms"),
    r"tokens_per_s": Kind(SPEED, "/s", rank=10),
    r"samples_per_s": Kind(SPEED, "/s", rank=20),
    r".*_per_s": Kind(SPEED, "/s", rank=30),
    r"mfu": Kind(SPEED, "%", rank=5),
    r".*(bytes|memory).*": Kind(MEMORY, "B"),
    r"loss": Kind(CURVES, rank=0),
    r"(eval|val|test|held_out).*": Kind(CURVES, smooth=False, rank=10),
    r"grad_norm": Kind(CURVES, rank=60),
    r"lr(/.*)?": Kind(CURVES, smooth=False, rank=70),
    r"loss_scale|skipped|at_minimum_scale|rolled_back": Kind(CURVES, smooth=False, rank=80),
    r".*": Kind(CURVES),
}


def kind_of(name: str) -> Kind:
    """Return what a metric is.

    >>> kind_of("elapsed_time_ms_wait").unit, kind_of("lr/*norm*").smooth, kind_of("accuracy").section
    ('ms', False, 'curves')
    """
    return next(kind for pattern, kind in _KINDS.items() if re.fullmatch(pattern, name, re.DOTALL))


def evaluates(name: str) -> str:
    """Return the metric beside which this one is drawn; empty where it is not of an evaluation.

    >>> evaluates("eval_loss"), evaluates("loss")
    ('loss', '')
    """
    return next((name.removeprefix(word) for word in EVALUATED if name.startswith(word)), "")


PARTS = {  # part of a call -> what fds.timed measures of it, less what else is in that; and its colour
    "gather": (("gather",), "#8c6d31"),
    "forward": (("forward",), "#56b4e9"),
    "backward": (("backward_inner",), "#cc79a7"),
    "reduce": (("backward_allreduce", "wait"), "#e69f00"),
    "wait": (("wait",), "#d55e00"),
    "optimizer": (("step",), "#009e73"),
    "other": (("other",), "#999999"),
}
