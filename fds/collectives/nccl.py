"""NCCL: torch's own collectives on a group per axis; values of Python go over gloo."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch.distributed as dist
from torch import Tensor

from fds.collectives.calls import Call, Work
from fds.collectives.gloo import GlooLink, naming

# torch 2.13 renames them, and warns of the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@attrs.frozen(eq=False)
class NcclLink:
    """One axis over its own NCCL group, whose ranks are the axis' in order."""

    group: dist.ProcessGroup
    host: GlooLink

    def start(self, call: Call, out: Tensor, x: Tensor) -> Work:
        """Start a collective on NCCL's stream; tensors of the CPU go over gloo."""
        if x.device.type == "cpu":
            return self.host.start(call, out, x)
        to = {"group": self.group, "async_op": True}
        with _named(self.host, call):
            match call.op:
                case "all_gather":
                    work = _all_gather(out, x, **to)
                case "reduce_scatter":
                    work = _reduce_scatter(out, x, **to)
                case "all_reduce":
                    work = dist.all_reduce(x, _OPS[call.how], **to)
                case "all_to_all":
                    work = dist.all_to_all_single(out, x, **to)
                case "broadcast":
                    work = dist.broadcast(x, self.host.ranks[call.peer], **to)
                case "send":
                    work = dist.isend(x, self.host.ranks[call.peer], self.group)
                case _:
                    assert call.op == "recv", call
                    work = dist.irecv(out, self.host.ranks[call.peer], self.group)
        return NcclWork(self.host, call, work, (out, x))

    def exchange(self, call: Call, text: str) -> list[str]:
        """Send a text to every rank, over gloo."""
        return self.host.exchange(call, text)


@attrs.define(eq=False)
class NcclWork:
    """Torch's work, and the tensors that it reads and writes."""

    host: GlooLink
    call: Call
    work: Any
    held: tuple[Tensor, ...]

    def wait(self) -> None:
        """Make the current stream wait. Raises `RankError`."""
        if self.held:
            with _named(self.host, self.call):
                self.work.wait()
            self.held = ()

    def done(self) -> bool:
        """Say whether NCCL has finished, or the current stream waits for it."""
        return not self.held or self.work.is_completed()


def _named(host: GlooLink, call: Call) -> AbstractContextManager:
    return naming(call, host.ranks, host.index, None)
