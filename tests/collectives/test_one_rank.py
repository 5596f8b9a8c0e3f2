"""One rank in a real process group: every collective goes through it, and sharded training with it.

An axis of one rank has no link, since there is nothing to send; here it gets the one that it would have with more. So
one GPU is enough to see NCCL take what fds gives it: buffers, views, dtypes and their order.
"""

from types import SimpleNamespace

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fds
from fds import tree
from fds.collectives import worlds
from fds.collectives.axis import Axis
from fds.collectives.meshes import Mesh
from fds.collectives.nccl import NcclLink
from fds.errors import MeshError
from fds.step import fill, transform
from fds.step.sharding.shard import Shard
from fds.step.topology import Dimension
from tests import ranks
from tests.bits import assert_same_bits

BACKENDS = [
    pytest.param("gloo", "cpu", id="gloo"),
    pytest.param("cpu:gloo,cuda:nccl", "cuda", id="nccl", marks=pytest.mark.gpu),
]
EXPECTED = {0: {"all_reduce"}, 1: {"reduce_scatter", "all_gather"}, 2: {"reduce_scatter", "all_gather"}}
EXPECTED[3] = EXPECTED[2]


@attrs.frozen(eq=False)
class Counted:
    """The link of a GPU's axis, which notes what goes through it; a group of gloo carries tensors of the CPU alike."""

    link: NcclLink
    ops: list[str] = attrs.field(factory=list)

    def start(self, collective, out, x):
        self.ops.append(collective.op)
        return self.link.start_in_group(collective, out, x)

    def exchange(self, collective, text):
        return self.link.exchange(collective, text)


def joined(backend: str) -> None:
    """Make a process group of this process alone."""
    if "nccl" in backend:
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def linked(mesh: Mesh) -> tuple[Axis, list[str]]:
    """Return the axis of the only rank with the link that axes of several have, and what goes through it."""
    link = mesh.world.link((0,))
    assert isinstance(link, NcclLink) is (mesh.world.device.type == "cuda")
    link = Counted(link if isinstance(link, NcclLink) else NcclLink(mesh.world.group, link))
    axis = mesh.axes["dp",] = attrs.evolve(mesh["dp"], link=link)
    return axis, link.ops


def collectives(backend: str, device: str) -> None:
    joined(backend)
    axis, ops = linked(fds.mesh(dp=-1))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = torch.arange(1, 9, device=device).to(dtype)
        kept = x.clone()
        for op in ("sum", "max", "min"):
            axis.start_all_reduce(x, op).wait()
            assert torch.equal(x, kept)
        wide = torch.zeros(10, dtype=dtype, device=device)
        for start in (axis.start_all_gather, axis.start_reduce_scatter, axis.start_all_to_all):
            wide.zero_()
            start(wide[1:9], x).wait()  # into a view at an odd address
            assert torch.equal(wide[1:9], kept) and not wide[0] and not wide[9]
        axis.start_broadcast(x, 0).wait()
        assert torch.equal(x, kept)
    assert axis.exchange("hello") == ["hello"]
    assert len(ops) == 4 * 7 and set(ops) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}
    dist.destroy_process_group()


@transform
def sharded(axis: Axis, stage: int):
    """Do as `shard_optimizer` does, which leaves an axis of one rank alone."""
    shard = Shard(axis, stage, axis, bucket_bytes=400, max_live_bytes=2500 if stage == 3 else None)
    return lambda step: fill(step, topology=Dimension(axis, "data", shard))


def trained(shard: list, device: str, dtype: torch.dtype | None) -> tuple:
    """Return the parameters and losses of three steps."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 24), nn.LayerNorm(24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 3)]
    loss = fds.Layers(layers, lambda out, y: (out.float() - y).square().mean())
    params = tree.map(lambda x: x.to(device), loss.init(fds.random.key(0)))
    precision = [] if dtype is None else [fds.precision(dtype)]
    clip = fds.clip_by_global_norm(1.0)
    step = fds.compose(fds.accumulate(2), *precision, *shard, clip, fds.checkpoint_activations(), fds.adamw(1e-2))(loss)
    state, losses = step.init(params, key=0), []
    for _ in range(3):
        batch = (torch.randn(8, 12).to(device), torch.randn(8, 3).to(device))
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return step.params(state), torch.stack(losses)


def training(backend: str, device: str) -> None:
    joined(backend)
    for dtype in (None, torch.bfloat16):
        alone = trained([], device, dtype)
        for stage in range(4):
            axis, ops = linked(fds.mesh(dp=-1))
            got = trained([sharded(axis, stage)], device, dtype)
            assert set(ops) >= EXPECTED[stage], (stage, ops)
            assert_same_bits(got, alone)
    dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("job", [collectives, training], ids=lambda job: job.__name__)
def test_one_rank_goes_through_a_real_group(job, backend, device):
    status, output = ranks.alone(job, backend, device)
    assert status == 0, output


def test_groups_of_nccl_wait_as_long_as_the_job_and_in_another_order_need_a_torch_that_can(monkeypatch):
    asked = []
    host = SimpleNamespace(rank=lambda: 0, size=lambda: 4)
    world = worlds.TorchWorld(host, host, torch.device("cuda"))
    monkeypatch.setattr(worlds.TorchWorld, "timeout", 77.0)

    def of_torch_211(ranks=None, timeout=None, backend=None, pg_options=None, use_local_synchronization=False):
        asked.append((ranks, timeout.total_seconds(), backend))

    monkeypatch.setattr(dist, "new_group", of_torch_211)
    world._nccl((0, 2), "")
    assert asked == [([0, 2], 77.0, "nccl")]
    with pytest.raises(MeshError, match="another order than those of the job"):
        world._nccl((2, 0), "")
    monkeypatch.setattr(dist, "new_group", lambda *_, sort_ranks=True, **__: asked.append(sort_ranks))
    world._nccl((2, 0), "")
    assert asked[1:] == [False]
