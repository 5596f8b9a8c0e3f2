"""Go on with other ranks: the batch, the order of samples and the losses stay those of the run that nobody disturbed.

Under torchrun a rank that is lost, or one that joins, ends all ranks, and torchrun starts those that are there again:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --max-restarts 100 --rdzv-backend c10d \
        --rdzv-endpoint node1:29500 --rdzv-id job1 train.py

Here simulated ranks are stopped after a call, four, then two, then three of which one waits.
"""

import inspect
import tempfile
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)  # eight bytes, and the one that follows them
rows = torch.utils.data.TensorDataset(windows[:, :8], windows[:, 8])
batches = fds.elastic.batches(
    {"elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [8, 16], "max_gpus": 4}}
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.hidden = nn.Linear(8 * 32, 128)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        return self.head(F.gelu(self.hidden(self.embed(context).flatten(1))))


apply, _, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def compose(ranks):
    """At each start, on the ranks that train."""
    dp = fds.mesh(dp=-1)["dp"]
    lr = fds.schedules.warmup_cosine(3e-3, warmup_steps=5, total_steps=30)
    step = fds.compose(
        fds.accumulate(batches.at(ranks).num_microbatches), fds.shard_optimizer(dp, stage=1), fds.adamw(lr)
    )(loss_fn)
    return step, fds.DistributedLoader(rows, batches.rows, dp, seed=0)


class Stopped(Exception):
    """What ends a start here, in the place of a lost rank."""


def start(directory, until=None):
    losses = {}

    def watch(state, metrics):
        losses[int(state.calls)] = float(metrics["loss"])
        if int(state.calls) == until:
            raise Stopped

    try:
        fds.elastic.run(
            directory / "run", compose, fds.recipe(Model), calls=30, ranks=batches.ranks, save_every=10, watch=watch,
            shelf=directory / "shelf",
        )  # fmt: skip
    except Stopped:
        pass  # what each rank held is on the shelf
    return losses


with tempfile.TemporaryDirectory() as folder:
    undisturbed = start(Path(folder) / "undisturbed")
    resized = {}
    for ranks, until in ((4, 8), (2, 17), (3, None)):
        resized |= fds.simulate(lambda until=until: start(Path(folder), until), ranks)[0]
    print(fds.elastic.read_history(Path(folder) / "run"))
    starts = fds.elastic.read_history(Path(folder) / "run").starts

for calls in (1, 9, 18, 30):
    print(f"call {calls:>2}: loss {undisturbed[calls]:.6f} on one rank, {resized[calls]:.6f} on those that were there")
assert [(e.ranks, e.idle, e.calls, e.source) for e in starts] == [
    (4, 0, 0, "init"),
    (2, 0, 8, "memory"),
    (2, 1, 17, "memory"),
]
assert resized.keys() == undisturbed.keys()
assert max(abs(resized[calls] - undisturbed[calls]) for calls in undisturbed) < 1e-4
