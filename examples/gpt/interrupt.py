"""Handle Ctrl-C and SIGTERM: end a run after the same step on every rank."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self

import torch

from fds.collectives import Axis


class Interrupt:
    """Ctrl-C and SIGTERM: the first asks the loop to end after its step, a second one ends the program at once."""

    asked = False

    def __init__(self, axis: Axis):
        self._axis = axis

    def __enter__(self) -> Self:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Return whether any rank was interrupted, the same on all ranks: one message of 4 bytes."""
        return bool(self._axis.all_reduce(torch.tensor(float(self.asked))))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
