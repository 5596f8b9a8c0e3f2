"""Numbers that the host reads from tensors: in a graph of a step's work they would stay as they are.

On a CPU to read a number costs nothing, and fds does so where that saves work. While the work of a step is recorded in
a graph (`fds.compile(whole=True)`) only constants may be read; the rest is computed as on an accelerator.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  (torch has no public one)


@attrs.define(eq=False)
class Recording:
    """A graph in the making.

    Attributes:
        fuses: whether what compiles the graph fuses operators, so that formulas serve better than fused functions.
        host: tensors that may be read, since they are the same in every call or never in the graph.
    """

    fuses: bool
    host: list[Tensor]


class _Now(threading.local):
    recording: Recording | None = None  # None where nothing is recorded


now = _Now()


@contextlib.contextmanager
def recording(graph: Recording) -> Iterator[None]:
    """Have the work inside be recorded in a graph."""
    before, now.recording = now.recording, graph
    try:
        yield
    finally:
        now.recording = before


def is_free(x: Tensor) -> bool:
    """Say whether reading this tensor costs nothing: it is on a CPU, and in no graph."""
    if x.device.type != "cpu":
        return False
    return now.recording is None or any(x is tensor for tensor in now.recording.host)


def constant(value: float, device: torch.device) -> Tensor:
    """Return a number as a tensor, () float64, which may be read while work is recorded."""
    assert now.recording is not None
    with _disable_current_modes():
        x = torch.full((), value, dtype=torch.float64, device=device)
    now.recording.host.append(x)
    return x
