"""`Interrupt`: Ctrl-C and SIGTERM end a run after the same step on every rank."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

import torch

from fds.collectives import Axis

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Ctrl-C and SIGTERM: the first asks the loop to end after its step, a second one ends the program at once.

    `with Interrupt(axis) as interrupt:` puts the earlier handlers back at the end. Python hands signals to the main
    thread alone: elsewhere, as on simulated ranks, nothing is handled and `asked` stays False.

    Args:
        axis: the ranks that end together; None for one rank.
    """

    asked = False  # whether this rank was interrupted

    def __init__(self, axis: Axis | None = None):
        self._axis = axis
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Return whether any rank was interrupted, the same on all ranks: one message of 4 bytes between hosts."""
        if self._axis is None or self._axis.size == 1:
            return self.asked
        return bool(self._axis.all_reduce(torch.tensor(float(self.asked))))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
