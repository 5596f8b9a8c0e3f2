"""ZeRO stage 2: a rank also keeps only one slice of the gradients.

As soon as backward has filled a bucket, its gradients are summed over the ranks and only the slice is kept. So there is
no buffer of whole gradients, and they are sent once per microbatch instead of once per step: `accumulate(n)` costs n
times the traffic.
"""

import functools
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


def train(stage, num_microbatches):
    dp = fds.mesh(dp=-1)["dp"]
    step = fds.compose(
        fds.accumulate(num_microbatches),
        fds.shard_optimizer(dp, stage=stage, bucket_bytes=64 * 1024),  # the default suits larger models
        fds.adamw(lr=3e-3),
    )(loss_fn)
    state = step.init(params, key=0)
    for i in range(4):
        rows = [x.chunk(dp.size)[dp.index] for x in batch(i)]
        with fds.collectives.counted() as traffic:
            state, _ = step(state, rows)
    return step.params(state), step.describe(state), traffic


def apart(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in params)


results = {(stage, n): fds.simulate(functools.partial(train, stage, n), 4)[0] for stage in (1, 2) for n in (1, 4)}
print("stage  microbatches  gradients  two buckets  gradients sent")
for (stage, n), (_, told, traffic) in results.items():
    held = told.num_bytes
    print(f"{stage:>5}  {n:>12}  {held['gradients']:>9,}  {held.get('buckets', 0):>11,}  {told.sent['reduce']:>14,}")
    # The formula of `describe` gives the bytes that were sent.
    assert traffic["reduce_scatter", "dp"].bytes_sent == told.sent["reduce"]
    assert traffic["all_gather", "dp"].bytes_sent == told.sent["gather"]

_, once, _ = results[1, 4]
_, every, _ = results[2, 4]
assert every.num_bytes["gradients"] == once.num_bytes["gradients"] / 4
assert every.sent["reduce"] == once.sent["reduce"] * 4 and every.sent["gather"] == once.sent["gather"]

# With one microbatch the stages take the same sums in the same order. With several, stage 1 sums a rank's microbatches
# first and the ranks last, stage 2 the ranks first.
assert apart(results[1, 1][0], results[2, 1][0]) == 0
assert 0 < apart(results[1, 4][0], results[2, 4][0]) < 1e-3
print(f"with 4 microbatches stages 1 and 2 differ by {apart(results[1, 4][0], results[2, 4][0]):.1e} after 4 updates")
