"""How an optimizer adds numbers up over ranks by itself, in signs: in which calls (`Phases`), and by what messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs
import torch
from torch import Tensor

from fds import kernels
from fds.collectives import Axis

WORKER, SERVER = "worker_error", "server_error"
ERRORS = (WORKER, SERVER)
LOCAL_MOMENTUM, LOCAL_UPDATE, LOCAL_LR = "local_momentum", "local_update", "local_lr"


class Phases(Protocol):
    """In which calls of a step an optimizer gets the gradients of its own rank, and what it then sends.

    Optimizers of one step (`by_name`) have equal ones.

    Attributes:
        apart: whether ranks take steps of their own: each sees the parameters and what it has itself moved them by.
    """

    apart: ClassVar[bool]

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of float32 numbers, one for each parameter's, that the step has for an optimizer."""
        return (*ERRORS, LOCAL_MOMENTUM, LOCAL_UPDATE) if self.apart else ERRORS

    def local(self, calls: int) -> bool:
        """Say so of the call after so many, skipped ones included: the same on all ranks, known on the host."""
        ...

    def begins(self, calls: int) -> bool:
        """Say whether what the step remembers of other calls is 0 to that one."""
        return False

    def bytes_sent(self, lengths: Sequence[int], size: int) -> int:
        """Return the bytes that each of `size` ranks sends in such a call, if any, for parameters of these lengths."""
        return signed_bytes(lengths, size)


@attrs.frozen
class AfterWarmUp(Phases):
    """The phases of an optimizer that sends signs from some call on."""

    apart: ClassVar[bool] = False
    freeze_step: int

    def local(self, calls: int) -> bool:
        """Say whether warm-up is over."""
        return calls >= self.freeze_step


@attrs.frozen
class GrowingIntervals(Phases):
    """The phases of 0/1 Adam. Calls are counted from 1 here; those of an interval of k are the multiples of k."""

    apart: ClassVar[bool] = True
    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def local(self, calls: int) -> bool:
        """Say whether gradients stay on their ranks: in all calls but those that update the variance."""
        if calls >= self.var_freeze_step:
            return True
        last, interval = 0, 1
        while calls + 1 > (last := (last // interval + self.var_update_scaler) * interval):  # the last of this interval
            interval *= 2
        return (calls + 1) % interval > 0

    def begins(self, calls: int) -> bool:
        """Say whether local steps begin: what messages of gradients have lost is nothing to those of updates."""
        return calls == self.var_freeze_step

    def agrees(self, calls: int) -> bool:
        """Say whether, where ranks take steps of their own, they agree in the end."""
        doublings = (calls - self.var_freeze_step) // self.local_step_scaler
        clipper = self.local_step_clipper
        return (calls + 1) % min(clipper, 1 << min(doublings, clipper.bit_length())) == 0


def add_update(x: Tensor, update: Tensor, size: int) -> Tensor:
    """Return a parameter as one of `size` ranks sees it, given this rank's share of the mean of their updates."""
    return torch.add(x.float() if x.dtype.itemsize < 4 else x, update, alpha=size).to(x.dtype)


BLOCK = 2**16  # numbers that a CPU works on at a time: what it makes of them stays in a cache


def blocks(x: Tensor) -> Iterator[slice]:
    """Yield parts of x (n,), one after the other: on a CPU small ones, elsewhere all of it."""
    length = BLOCK if x.device.type == "cpu" else max(len(x), 1)
    for start in range(0, len(x), length):
        yield slice(start, min(start + length, len(x)))


@attrs.frozen(eq=False)
class Exchange:
    """What an optimizer is given in a call in which gradients stay on their ranks.

    The gradients of all data ranks then add up to the gradient.

    Attributes:
        calls: calls of the step before this one.
        axis: the data ranks, None for one alone.
        slots: slot -> one tensor per slice, of its shape, float32, which the update writes over: `worker_error` and
            `server_error`, what the messages of this rank have lost so far; with `Phases.apart` also `local_momentum`
            and `local_update`, its shares of the means over ranks.
        lr: () float64, which the update writes over: the sum of learning rates since ranks agreed; of `by_name` those
            of its groups, by pattern; with `Phases.apart`.
    """

    calls: int
    axis: Axis | None
    slots: Mapping[str, list[Tensor]]
    lr: Any = None

    @property
    def size(self) -> int:
        """The number of data ranks."""
        return 1 if self.axis is None else self.axis.size

    def for_group(self, pattern: str, pick: Callable[[list[Tensor]], list[Tensor]]) -> Exchange:
        """Return the same for some of the slices, which an optimizer under this pattern updates."""
        slots = {slot: pick(tensors) for slot, tensors in self.slots.items()}
        return attrs.evolve(self, slots=slots, lr=None if self.lr is None else self.lr[pattern])


def signed_sums(
    axis: Axis | None, terms: Iterable[Tensor], worker: list[Tensor], server: list[Tensor]
) -> Iterable[Tensor]:
    """Return the sums (n,) over ranks of each of the tensors `terms` (n,), sent as signs; all ranks get the same bits.

    For every tensor, with rms the root of the mean square, and sgn(0) = 1::

        x = term + worker               on every rank
        worker = x - rms(x) sgn(x)      rms(x) sgn(x) is sent, a chunk of it to each rank
        c = sum of what came + server   on every rank, of its chunk
        server = c - rms(c) sgn(c)      rms(c) sgn(c) is sent, to all

    Two messages, each of all tensors. `terms` is read once, and the sums are made as they are asked for: neither needs
    to be whole at any time. `worker` and `server` (n,) float32 are written over; of `server` a rank has its own chunk,
    and what else is there (after a change of the number of ranks) goes into its next message. One rank sends and loses
    nothing.

    Source: Tang et al. 2021 (1-bit Adam), arXiv:2102.02888, section 4; the root of the mean square, and a scale for
    each tensor, are DeepSpeed's, with whose optimizers these agree bit for bit. `fds.transports.onebit` has the mean
    absolute value of a group, loses nothing of a rank's own slice, and keeps both errors in one slot.
    """
    if axis is None:
        totals = [x + w + s for x, w, s in zip(terms, worker, server, strict=True)]
        for error in (*worker, *server):
            error.zero_()
        return totals
    chunks = [_chunk(len(w), axis.size) for w in worker]
    owned = [slice(axis.index * n, (axis.index + 1) * n) for n in chunks]
    sent = torch.zeros(axis.size, _num_bytes(chunks), dtype=torch.uint8, device=worker[0].device)
    dtypes = []
    for x, w, s, chunk, scale, bits in zip(terms, worker, server, owned, *_opened(sent, chunks), strict=True):
        for other in (slice(chunk.start), slice(chunk.stop, None)):
            w[other] += s[other]
            s[other] = 0
        scale[:] = _send(w.add_(x), bits)
        dtypes.append(x.dtype)
    arrived = torch.empty_like(sent)
    axis.start_all_to_all(arrived, sent).wait()

    own_sent = torch.zeros(1, sent.shape[1], dtype=torch.uint8, device=sent.device)
    theirs, mine = _opened(arrived, chunks), _opened(own_sent, chunks)
    for s, chunk, scales, codes, scale, bits in zip(server, owned, *theirs, *mine, strict=True):
        total = s[chunk]
        for at in blocks(total):
            signs = [kernels.signs_of(code[at.start // 8 : -(-at.stop // 8)]) for code in codes]
            sums = signs[0].mul_(scales[0])
            for term, scale_of in zip(signs[1:], scales[1:], strict=True):
                sums += term.mul_(scale_of)
            total[at] += sums[: at.stop - at.start]
        scale[:] = _send(total, bits)
    everything = own_sent.new_empty(axis.size * own_sent.shape[1])
    axis.start_all_gather(everything, own_sent[0]).wait()
    sums_of = _opened(everything.view(axis.size, -1), chunks)
    return (
        kernels.signs_of(codes).mul_(scales[:, None]).view(-1)[: len(w)].to(dtype)
        for w, dtype, scales, codes in zip(worker, dtypes, *sums_of, strict=True)
    )


def signed_bytes(lengths: Sequence[int], size: int) -> int:
    """Return the bytes that each of `size` ranks sends for the sums of tensors of these lengths."""
    return 2 * (size - 1) * _num_bytes([_chunk(n, size) for n in lengths])


def _chunk(n: int, size: int) -> int:
    """Return how many of n numbers are one rank's, in whole bytes of signs."""
    return -(-n // (8 * size)) * 8


def _num_bytes(chunks: Sequence[int]) -> int:
    """Return the bytes of a message of one chunk of each tensor: the scales, then the signs."""
    return 4 * len(chunks) + -(-sum(chunks) // 32) * 4


def _opened(messages: Tensor, chunks: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the scales (k,) float32 and the signs (k, chunk / 8) uint8 of each tensor in messages (k, m)."""
    start, scales = 4 * len(chunks), messages[:, : 4 * len(chunks)].view(torch.float32)
    codes: list[Tensor] = []
    for n in chunks:
        codes.append(messages[:, start : start + n // 8])
        start += n // 8
    return list(scales.unbind(1)), codes


def _send(x: Tensor, bits: Tensor) -> Tensor:
    """Write the signs of x (n,) to the rows of `bits` (k, m), leave in x what that loses, and return its scale ()."""
    scale = torch.linalg.vector_norm(x) / math.sqrt(max(len(x), 1))
    for row, part in zip(bits, x.split(8 * bits.shape[1]), strict=False):
        for at in blocks(part):
            block, codes = part[at], row[at.start // 8 : -(-at.stop // 8)]
            codes.copy_(kernels.sign_bits(torch.nn.functional.pad(block, (0, -len(block) % 8))))
            block.sub_(torch.copysign(scale, block.add_(0.0)))  # the sign of -0 is that of 0
    return scale
