"""What goes over the borders between stages in a call, given the header of what an earlier call has sent there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fds.collectives import Axis
from fds.collectives.traffic import Expected
from fds.plans import Action, Op
from fds.transforms.pipeline.packet import Shape
from fds.transforms.pipeline.post import numbered

# action -> whether it sends, what, and over which border of its stage: that after it, or that before
_POSTED = {
    Op.SEND_ACTIVATION: ("send", "activation", 0),
    Op.RECV_ACTIVATION: ("recv", "activation", -1),
    Op.SEND_GRAD: ("send", "gradient", -1),
    Op.RECV_GRAD: ("recv", "gradient", 0),
}


def expected(
    row: Sequence[Action],
    placement: Mapping[int, int],
    channels: Mapping[Any, Axis],
    headers: Mapping[int, dict[str, Any] | None],
    shares: bool,
) -> Iterator[Expected]:
    """Yield the messages of a rank's row, of the borders whose header is known, by the stage before each.

    `shares` says whether a number goes with the gradients by every packet.
    """
    numbers, announced = numbered(placement), set[int]()
    for action in row:
        if action.op not in _POSTED or action.stage is None:
            continue
        op, kind, shift = _POSTED[action.op]
        border = action.stage + shift
        header = headers.get(border)
        shape = None if header is None else Shape.of(header)
        if shape is None:
            continue
        axis = channels[kind, numbers[border]]
        sizes = [
            torch.Size(dims).numel() * dtype.itemsize
            for dtype, dims, wants in filter(None, shape.tensors)
            if wants or kind == "activation"
        ]
        if kind == "gradient" and shares:
            sizes.append(torch.float64.itemsize)
        if kind == "activation" and border not in announced:
            announced.add(border)
            sizes = [torch.int64.itemsize, len(json.dumps(header).encode()), *sizes]
        yield from (Expected.of(axis, op, size) for size in sizes if size)
