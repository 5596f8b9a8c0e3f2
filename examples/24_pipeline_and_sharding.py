"""Pipeline x sharding x accumulation: stages on one axis, each of them sharded over the ranks of another.

The microbatches of a pipeline are the accumulation. Ranks that differ along `pp` pass the same rows, those that differ
along `dp` each their own, and a stage's parameters, gradients and optimizer state lie in slices on its data ranks.

    python examples/24_pipeline_and_sharding.py
    torchrun --nproc-per-node 4 examples/24_pipeline_and_sharding.py
"""

import inspect
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)  # eight bytes, and the one that follows them


def batch(i, rows=64):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :8], windows[at, 8]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


def project(embedding, x):
    return x @ embedding.weight.T


loss_fn = fds.Layers(
    [
        fds.TiedLayerSpec("bytes", nn.Embedding, 256, 32),  # on the first stage
        fds.LayerSpec(nn.Flatten),
        fds.LayerSpec(nn.Linear, 8 * 32, 128),
        *[fds.LayerSpec(Block, 128) for _ in range(6)],
        fds.LayerSpec(nn.Linear, 128, 32),
        fds.TiedLayerSpec("bytes", nn.Embedding, 256, 32, forward_fn=project),  # on the last: their gradients are added
    ],
    criterion=F.cross_entropy,
)


def train(transforms, rows_of=lambda rows: rows):
    step = fds.compose(*transforms, fds.clip_by_global_norm(0.5), fds.adamw(lr=3e-3))(loss_fn)
    state = step.init(loss_fn.init, key=0)
    for i in range(4):
        with fds.collectives.counted() as traffic:  # after the loop, that of the last step
            state, metrics = step(state, [rows_of(x) for x in batch(i)])
    return step.params(state), metrics, step.describe(state), traffic


def pipelined(stage, num_microbatches=4):
    mesh = fds.mesh(pp=2, dp=2)  # the last axis varies fastest: ranks 0 and 1 have the first stage
    pp, dp = mesh["pp"], mesh["dp"]
    transforms = [
        fds.pipeline(plans.zb_h1, pp, num_microbatches=num_microbatches),
        fds.shard_optimizer(dp, stage=stage),
    ]
    return train(transforms, lambda rows: rows.chunk(dp.size)[dp.index])


def on_ranks(stage):
    return [pipelined(stage)] if world.size > 1 else fds.simulate(lambda: pipelined(stage), 4)


def apart(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


fds.init_distributed()
world = fds.mesh(dp=-1)

# Two stages x two data ranks x four microbatches of eight rows: what one process computes with eight microbatches.
expected, plain_metrics, plain_told, _ = train([fds.accumulate(8)])
whole = plain_told.num_bytes["params"]
sent = {}
for stage in range(4):
    results = on_ranks(stage)
    for after, metrics, _, _ in results:
        assert apart(after, expected) < 1e-3
        assert abs(metrics["loss"] - plain_metrics["loss"]) < 1e-5
        assert abs(metrics["grad_norm"] - plain_metrics["grad_norm"]) < 1e-4  # tied parameters are counted once
    _, _, told, traffic = results[0]
    held = {name: told.num_bytes[name] for name in ("params", "opt", "gradients")}
    sent[stage] = {"pp": 0, "dp": 0}
    for (_, axis), count in traffic.counts.items():
        if axis in sent[stage]:  # the rest are small messages among all ranks
            sent[stage][axis] += count.bytes_sent
    if world.rank == 0:
        text_held = ", ".join(f"{name} {n:,}" for name, n in held.items())
        print(f"stage {stage}: rank 0 holds {text_held} bytes; sends in a step {sent[stage]}")
if world.rank == 0:
    print(told)

# Each axis divides the parameters: a stage has some of the layers, a slice half of those.
if len(results) == 4:
    parts = [told.num_bytes["params"] for _, _, told, _ in results]
    tied = 4 * 256 * 32
    assert whole + tied <= sum(parts) <= 1.01 * (whole + tied)  # the tied table is on both stages, once each

# Along `pp` go the outputs of a stage, or the gradients with respect to them: 4 microbatches of 8 rows of 128 floats;
# and the slice of the tied table's gradient, summed over the ranks that hold it. The rest are headers.
outputs, table = 4 * 8 * 128 * 4, 256 * 32 * 4
assert outputs + table // 2 <= sent[1]["pp"] < 1.02 * (outputs + table // 2)

# Stages 2 and 3 reduce once per backward of a stage, so they send as often as there are microbatches.
assert sent[2]["dp"] > 1.5 * sent[1]["dp"]

# For more microbatches there is no second transform: pipeline takes their number.
try:
    fds.compose(fds.accumulate(2), fds.pipeline(plans.zb_h1, 2, num_microbatches=4), fds.adamw())(loss_fn)
except fds.errors.ComposeError as error:
    if world.rank == 0:
        print(error)
else:
    raise AssertionError
