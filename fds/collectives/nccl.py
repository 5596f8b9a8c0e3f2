"""Links over NCCL: collectives are torch's own, with one process group per axis; the CPU's tensors go over gloo."""

from __future__ import annotations

from typing import Any

import attrs
import torch.distributed as dist
from torch import Tensor

from fds.collectives.gloo import GlooLink, naming
from fds.collectives.links import Collective, Work, on_one_rank

# renamed in torch 2.13, which warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@attrs.frozen(eq=False)
class NcclLink:
    """The link of one axis over its own NCCL group, whose ranks are in the order of the axis."""

    group: dist.ProcessGroup
    host: GlooLink

    def start(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Start a collective on NCCL's stream; tensors of the CPU go over gloo."""
        return (
            self.host.start(collective, out, x) if x.device.type == "cpu" else self.start_in_group(collective, out, x)
        )

    def rehearse(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Do on this rank what `start` does, without the others; NCCL's own memory is not known."""
        if x.device.type == "cpu":
            return self.host.rehearse(collective, out, x)
        return on_one_rank(collective, out, x, self.host.index, self.host.size)

    def start_in_group(self, collective: Collective, out: Tensor, x: Tensor) -> Work:
        """Start a collective of tensors that the group carries."""
        to = {"group": self.group, "async_op": True}
        with naming(self.host, collective):
            match collective.op:
                case "all_gather":
                    work = _all_gather(out, x, **to)
                case "reduce_scatter":
                    work = _reduce_scatter(out, x, **to)
                case "all_reduce":
                    work = dist.all_reduce(x, _OPS[collective.how], **to)
                case "all_to_all":
                    work = dist.all_to_all_single(out, x, **to)
                case "broadcast":
                    work = dist.broadcast(x, self.host.ranks[collective.peer], **to)
                case "send":
                    work = dist.isend(x, self.host.ranks[collective.peer], self.group)
                case _:
                    assert collective.op == "recv", collective
                    work = dist.irecv(out, self.host.ranks[collective.peer], self.group)
        return _NcclWork(self.host, collective, work, (out, x))

    def exchange(self, collective: Collective, text: str) -> list[str]:
        """Return the texts of all ranks, sent over gloo."""
        return self.host.exchange(collective, text)


@attrs.define(eq=False)
class _NcclWork:
    """Torch's work, for which the current stream waits, and the tensors that are kept alive for it."""

    host: GlooLink
    collective: Collective
    work: Any
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        if self.tensors:
            with naming(self.host, self.collective):
                self.work.wait()
            self.tensors = ()

    def done(self) -> bool:
        return not self.tensors or self.work.is_completed()
