"""`ListedDifference`: what DeepSpeed does that the same JSON does not bring back."""

from __future__ import annotations

import attrs


@attrs.frozen
class ListedDifference:
    """A defect of DeepSpeed that fds does not have.

    Attributes:
        deepspeed: what it does.
        here: what fds does.
        test: the test that checks it, `path::name`; it would fail if fds did the same as DeepSpeed.
    """

    deepspeed: str
    here: str
    test: str
