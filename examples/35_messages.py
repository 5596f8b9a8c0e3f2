"""Watch what ranks send each other: every message of a step, what it was for, and what was predicted of it.

`fds.messages` counts messages and bytes, and times how long each took and how long this rank stood waiting for it. It
changes no bit of the run and waits for nothing that the step does not wait for. `step.describe` predicts the same
messages from the layout and from what earlier calls have learned.
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
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        x = self.embed(context).flatten(1)
        return self.head(self.norm(F.gelu(self.hidden(x))))


torch.manual_seed(0)
apply, params, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def train(stage, watched):
    dp = fds.mesh(dp=-1)["dp"]
    shard = fds.shard_optimizer(dp, stage=stage, bucket_bytes=64 * 1024)
    step = fds.compose(fds.accumulate(2), shard, fds.clip_by_global_norm(1.0), fds.adamw(lr=3e-3))(loss_fn)
    state = step.init(params, key=0)
    messages = fds.messages(every=5 if watched else None)  # calls 5 and 10
    for i in range(10):
        rows = [x.chunk(dp.size)[dp.index] for x in batch(i)]
        with messages(state):
            state, _ = step(state, rows)
        # monitor(state, {**metrics, **messages.metrics()})
    return messages.summary(step.describe(state)), step.params(state)  # collectives: all ranks call them


for stage in (1, 2, 3):
    table, trained = fds.simulate(lambda stage=stage: train(stage, watched=True), 4)[0]
    print(f"stage {stage}: {table}\n")
    for row in table.rows:
        assert row.count == row.predicted_count
        assert row.bytes_sent == row.predicted_bytes or row.kind.op == "exchange"  # texts, whose length differs

    # What is watched is bit for bit what is not.
    nothing, plain = fds.simulate(lambda stage=stage: train(stage, watched=False), 4)[0]
    assert nothing.count == 0 and all(plain[name].equal(trained[name]) for name in params)

# Stage 3 gathers what it uses when it uses it, stage 1 everything once.
gathers = [row for row in table.rows if row.kind.what == "gather"]
assert sum(row.count for row in gathers) > 2 * len({i for row in gathers for i in row.buckets})
print(gathers[0].to_dict())
