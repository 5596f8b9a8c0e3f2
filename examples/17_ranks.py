"""Train on several ranks: every rank passes its own rows, and the step is that of all rows together.

`fds.mesh(dp=-1)` names an axis over all ranks, and `shard_optimizer(axis, stage=0)` sums gradients along it; the rest
of the step stays the same. Ranks are processes under torchrun; `fds.simulate` runs them in this process, as
threads that take turns. The function that trains is the same:

    python examples/17_ranks.py
    torchrun --nproc-per-node 2 examples/17_ranks.py
"""

import inspect
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)  # eight bytes, and the one that follows them


def batch(i, rows=64):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :8], windows[at, 8]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.hidden = nn.Linear(8 * 32, 128)
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        x = F.gelu(self.hidden(self.embed(context).flatten(1)))
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(self.norm(x))


torch.manual_seed(0)
apply, params, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def train():
    dp = fds.mesh(dp=-1)["dp"]  # all ranks; created here, where the ranks run
    step = fds.compose(fds.accumulate(2), fds.shard_optimizer(dp, stage=0), fds.adamw(lr=3e-3))(loss_fn)
    state = step.init(params, key=0)  # every rank gets rank 0's values
    for i in range(10):
        rows = [x.chunk(dp.size)[dp.index] for x in batch(i)]  # a data loader would read only these
        state, metrics = step(state, rows)
    return step.params(state), metrics


def plain(num_microbatches):
    """Train on one rank, on the rows of all ranks one after another."""
    step = fds.compose(fds.accumulate(num_microbatches), fds.adamw(lr=3e-3))(loss_fn)
    state = step.init(params, key=0)
    for i in range(10):
        state, metrics = step(state, batch(i))
    return state.params, metrics


def apart(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in params)


fds.init_distributed()  # joins the ranks that torchrun, Slurm or MPI started; without them there is one
world = fds.mesh(dp=-1)
results = [train()] if world.size > 1 else fds.simulate(train, 4)  # one result per rank
ranks = max(world.size, len(results))

expected, one_rank = plain(2 * ranks)
after, metrics = results[0]
for other, others_metrics in results:
    assert apart(after, other) == 0  # ranks agree bit for bit
    assert others_metrics["loss"] == metrics["loss"]  # the mean over all rows
assert abs(metrics["loss"] - one_rank["loss"]) < 1e-5
assert apart(after, expected) < 1e-3  # to rounding: two microbatches are summed first, then the ranks
if world.rank == 0:
    print(f"{ranks} ranks: loss {metrics['loss']:.6f}; one rank: {one_rank['loss']:.6f}")
    print(f"after 10 updates their parameters differ by {apart(after, expected):.1e} at most")

# A mesh that does not fit the ranks is an error.
try:
    fds.mesh(tp=world.size + 1, dp=-1)
except fds.errors.MeshError as error:
    if world.rank == 0:
        print(error)
else:
    raise AssertionError
