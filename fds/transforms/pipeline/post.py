"""The post: packets and gradients as messages between the ranks of an axis, begun early and waited for late.

Between two stages of different ranks there are two lines, one for activations and one for gradients the other way,
each with an order of messages of its own. Ahead of the first packet of a step goes a header that says what all of them
are (ahead of every packet, where shapes may differ); before it is known nothing can be received, after it a receive
begins as soon as the plan says so. Gradients need no header: they are like what they are the gradients of.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis, Work
from fds.collectives.links import dry
from fds.collectives.traffic import Expected
from fds.errors import LossError
from fds.plans import Action, Op
from fds.transforms.pipeline.packets import Packet, Shape, other_shape, text_of

Item = tuple[str, int, int]  # ("activation" or "gradient", the stage that needs it, microbatch)


@attrs.define(eq=False)
class Line:
    """The messages of one kind between two stages, as one of their ranks sees them."""

    axis: Axis  # a channel of its own
    peer: int  # coordinate of the other rank
    device: torch.device
    pool: Any  # of memory for what is received, None for fresh memory
    expected: deque[int] = tree.new(deque)  # microbatches that may be received, not begun yet
    begun: dict[int, tuple[list[Tensor], list[Work]]] = tree.new(dict)

    def send(self, messages: Sequence[Tensor]) -> list[tuple[Work, Tensor]]:
        """Begin to send what `_bytes` made."""
        return [(self.axis.start_send(x, self.peer), x) for x in messages]

    def receive(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return a message to the host (numel,)."""
        x = torch.empty(numel, dtype=dtype, device="cpu")
        self.axis.start_recv(x.view(torch.uint8), self.peer).wait()
        return x

    def begin(self, i: int, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Begin to receive the tensors of a microbatch."""
        tensors: list[Tensor] = []
        works: list[Work] = []
        for dtype, shape in kinds:
            numel = torch.Size(shape).numel()
            if self.pool is None:
                flat = torch.empty(numel, dtype=dtype, device=self.device)
            else:
                flat = self.pool.take(numel, dtype, self.device)
            if numel:
                works.append(self.axis.start_recv(flat.view(torch.uint8), self.peer))
            tensors.append(flat.view(shape))
        self.begun[i] = tensors, works

    def end(self, i: int) -> list[Tensor]:
        """Return what has arrived of a microbatch."""
        tensors, works = self.begun.pop(i)
        for work in works:
            work.wait()
        return tensors


@attrs.define(eq=False)
class Border:
    """What goes between a stage and the next, on another rank: activations one way, gradients the other."""

    stage: int  # the one before
    here: bool  # this rank has that one
    activations: Line
    gradients: Line
    dynamic: bool
    early: bool  # whether the plan has receives before they are needed, so that none may hold up the rank
    shares: bool = False  # whether a number () float64 goes with the gradients by every packet
    last: dict[str, Any] | None = None  # the header of the call before, for a dry run
    header: dict[str, Any] | None = None  # the header that holds for all packets
    shape: Shape | None = None
    shapes: dict[int, Shape | None] = tree.new(dict)  # by microbatch; None: there is nothing to send

    def send_activation(self, i: int, packet: Packet | None) -> list[tuple[Work, Tensor]]:
        """Begin to send a packet; in place of None, which is for what failed, zeros if anything is expected."""
        announces = self.dynamic or self.header is None
        if packet is None:
            header: dict[str, Any] = {"failed": True} if self.dynamic or self.header is None else self.header
        else:
            header = packet.header("")
            if not announces and text_of(header) != text_of(self.header):
                raise other_shape(header, self.header)
        shape = Shape.of(header) if announces else self.shape
        if packet is not None:
            tensors = [x for x in packet.leaves if isinstance(x, Tensor)]
        else:
            kinds = [] if shape is None else [kind for kind in shape.tensors if kind is not None]
            tensors = [torch.zeros(s, dtype=dtype, device=self.activations.device) for dtype, s, _ in kinds]
        messages = _bytes(tensors)  # from here on nothing of ours can fail, and leave the other rank waiting
        if announces:
            self.header, self.shape = header, shape
            text = torch.frombuffer(bytearray(text_of(header).encode()), dtype=torch.uint8)
            messages = [*_bytes([torch.tensor([len(text)], dtype=torch.int64, device="cpu"), text]), *messages]
        self.shapes[i] = self.shape
        return self.activations.send(messages)

    def send_gradient(self, i: int, grads: Sequence[Tensor | None] | None) -> list[tuple[Work, Tensor]]:
        """Begin to send the gradients by a packet, zeros for those that are not there."""
        shape = self.shapes.get(i)
        if shape is None:
            return []
        tensors: list[Tensor] = []
        for at, kind in self._gradients(shape):
            grad = None if grads is None else grads[at]
            tensors.append(self._zeros(*kind) if grad is None else grad.to(kind[0]))
        messages = _bytes(tensors)
        del self.shapes[i]
        return self.gradients.send(messages)

    def _zeros(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.gradients.device)

    def receive_activation(self, i: int) -> None:
        """Expect a packet; begin to receive it if it is known what it will be."""
        self.activations.expected.append(i)
        if not self.early or (self.header is not None and not self.dynamic):
            self._begin(i)

    def receive_gradient(self, i: int) -> None:
        """Begin to receive the gradients by a packet that was sent."""
        shape = self.shapes.setdefault(i, None)
        self.gradients.begin(i, [] if shape is None else [kind for _, kind in self._gradients(shape)])

    def activation(self, i: int) -> Packet | None:
        """Return the packet, once it is there; None where the stage before has failed."""
        self._begin(i)
        tensors = self.activations.end(i)
        shape = self.shapes[i]
        return None if shape is None else shape.packet(tensors)

    def gradient(self, i: int) -> list[Tensor | None]:
        """Return the gradients by leaf of the packet, once they are there."""
        tensors, shape = iter(self.gradients.end(i)), self.shapes.pop(i)
        if shape is None:
            return []
        grads: list[Tensor | None] = [None] * (len(shape.tensors) + self.shares)
        for (at, _), x in zip(self._gradients(shape), tensors, strict=True):
            grads[at] = x
        return grads

    def _gradients(self, shape: Shape) -> list[tuple[int, tuple[torch.dtype, tuple[int, ...]]]]:
        """Return the index and the kind of every gradient by a packet, and of the number that goes with them."""
        kinds = [(at, kind[:2]) for at, kind in enumerate(shape.tensors) if kind is not None and kind[2]]
        return kinds + [(len(shape.tensors), (torch.float64, ()))] * self.shares

    def _begin(self, i: int) -> None:
        """Begin to receive what is expected, in order, up to a microbatch."""
        while i not in self.activations.begun:
            j = self.activations.expected.popleft()
            if self.dynamic or self.header is None:
                self.header = self._header()
                self.shape = Shape.of(self.header)
            self.shapes[j] = self.shape
            kinds = [] if self.shape is None else [(t[0], t[1]) for t in self.shape.tensors if t is not None]
            self.activations.begin(j, kinds)

    def _header(self) -> dict[str, Any]:
        if dry.get() is not None:
            if self.dynamic or self.last is None:
                raise LossError("what another stage sends is not known in a dry run", where=f"stage {self.stage}")
            return self.last
        length = int(self.activations.receive(torch.int64, 1))
        return json.loads(bytes(tree.values_of(self.activations.receive(torch.uint8, length))))


class Post:
    """The mail of one rank for one pass through a plan: by hand inside the rank, else by message."""

    def __init__(
        self,
        pool: Any,
        placement: Mapping[int, int],
        channels: Mapping[Any, Axis],
        index: int,
        *,
        dynamic: bool,
        early: bool,
        last: Mapping[int, dict[str, Any] | None],
        shares: bool = False,
    ):
        self.box: dict[Item, Any] = {}
        self.sending: dict[tuple[Any, ...], list[tuple[Work, Tensor]]] = {}
        self.borders: dict[int, Border] = {}
        for stage, number in numbered(placement).items():
            ends = placement[stage], placement[stage + 1]
            if index in ends:
                here = ends[0] == index
                both = [channels[kind, number] for kind in ("activation", "gradient")]
                to, back = (Line(axis, ends[here], axis.device, pool) for axis in both)
                self.borders[stage] = Border(stage, here, to, back, dynamic, early, shares, last.get(stage))

    def give(self, item: Item, value: Any) -> None:
        """Keep what was made, until it is taken here or sent."""
        self.box[item] = value

    def take(self, item: Item) -> Any:
        """Return what is needed. Raises `LossError` where the stage that makes it has failed."""
        border = self._border(item)
        if border is None:
            return self.box.pop(item)
        kind, _, i = item
        value = border.activation(i) if kind == "activation" else border.gradient(i)
        if value is None:
            raise LossError("the stage before has failed", where=f"stage {border.stage}")
        return value

    def forgo(self, action: Action) -> None:
        """Let what a computation needs come, and drop it."""
        s, i = action.stage, action.microbatch
        assert s is not None and i is not None
        kinds = {Op.FORWARD: "activation", Op.BACKWARD: "gradient", Op.BACKWARD_INPUT: "gradient"}
        item = (kinds.get(action.op, ""), s, i)
        self.box.pop(item, None)
        border = self._border(item)
        if border is None or not item[0]:
            return
        line = border.activations if item[0] == "activation" else border.gradients
        if i in line.begun or i in line.expected:
            _ = border.activation(i) if item[0] == "activation" else border.gradient(i)

    def send(self, action: Action, *, hollow: bool) -> None:
        """Begin to send what was made; where nothing was, and `hollow` allows it, what stands for it."""
        s, i = action.stage, action.microbatch
        assert s is not None and i is not None
        forward = action.op is Op.SEND_ACTIVATION
        item = ("activation", s + 1, i) if forward else ("gradient", s - 1, i)
        assert hollow or item in self.box, item
        border, value = self.borders[s if forward else s - 1], self.box.pop(item, None)
        key = (action.op, s, i if action.buffer is None else action.buffer)
        self._wait(key)
        self.sending[key] = border.send_activation(i, value) if forward else border.send_gradient(i, value)

    def receive(self, action: Action) -> None:
        """Begin to receive."""
        s, i = action.stage, action.microbatch
        assert s is not None and i is not None
        if action.op is Op.RECV_ACTIVATION:
            self.borders[s - 1].receive_activation(i)
        else:
            self.borders[s].receive_gradient(i)

    def close(self) -> None:
        """Wait for all that was sent."""
        for key in list(self.sending):
            self._wait(key)

    def _wait(self, key: tuple[Any, ...]) -> None:
        for work, _ in self.sending.pop(key, ()):
            work.wait()

    def _border(self, item: Item) -> Border | None:
        kind, s, _ = item
        border = self.borders.get(s - 1 if kind == "activation" else s)
        return None if border is None or border.here == (kind == "activation") else border


def numbered(placement: Mapping[int, int]) -> dict[int, int]:
    """Return the stages whose next one is on another rank, numbered among those between the same two ranks."""
    seen: dict[tuple[int, int], int] = {}
    numbers: dict[int, int] = {}
    for stage in range(len(placement) - 1):
        ends = placement[stage], placement[stage + 1]
        if ends[0] != ends[1]:
            pair = min(ends), max(ends)
            numbers[stage] = seen.setdefault(pair, 0)
            seen[pair] += 1
    return numbers


def _bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the elements of tensors one after another, as they are to be read: not sparse, no lazy conjugate."""
    strided = [x if x.layout is torch.strided else x.to_dense() for x in (x.detach() for x in tensors) if x.numel()]
    return [x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for x in strided]


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
