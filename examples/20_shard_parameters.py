"""ZeRO stage 3: parameters are whole only while the loss uses them.

A bucket is gathered when an operator first touches one of its parameters, and again in backward; `max_live_bytes`
bounds what is whole at once. The loss may be any function, and may take another path on each rank: no rank hangs.
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
        spaces = (context == ord(" ")).float().mean()  # differs between ranks
        for i, block in enumerate(self.blocks):
            if i < 4 or spaces > 0.35:
                x = x + F.gelu(block(x))
        return self.head(self.norm(x))


apply, _, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def train(stage, max_live_bytes=256 * 1024):
    dp = fds.mesh(dp=-1)["dp"]
    step = fds.compose(
        fds.shard_optimizer(dp, stage=stage, bucket_bytes=64 * 1024, max_live_bytes=max_live_bytes), fds.adamw(lr=3e-3)
    )(loss_fn)
    state = step.init(fds.recipe(Model), key=0)  # layer by layer: the whole model is never in one place
    for i in range(4):
        rows = [x.chunk(dp.size)[dp.index] for x in batch(i)]
        with fds.collectives.counted() as traffic:
            state, _ = step(state, rows)
    return step.params(state), step.describe(state, rows), traffic


def apart(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


kept = fds.simulate(lambda: train(stage=2), 4)
passing = fds.simulate(lambda: train(stage=3), 4)
for name, results in (("stage 2", kept), ("stage 3", passing)):
    _, told, traffic = results[0]
    sent = traffic["all_gather", "dp"].bytes_sent
    print(f"{name}: {told.num_bytes['whole']:>7,} bytes of parameters whole at most, {sent:>9,} sent to gather them")
assert passing[0][1].num_bytes["whole"] <= 256 * 1024 < kept[0][1].num_bytes["whole"]

for rank, (_, told, _) in enumerate(passing):
    print(f"rank {rank} left {len(told.unused)} parameters unused in its last batch")
assert len({told.unused for _, told, _ in passing}) > 1

# Whatever path a rank takes, the update uses all gradients and is the same on all ranks. It is bit-equal to stage 2 if
# all ranks take one path; here a bucket's sum may begin with the ranks that do not use it.
assert all(apart(after, passing[0][0]) == 0 for after, _, _ in passing)
assert apart(passing[0][0], kept[0][0]) < 1e-3
print(f"stages 2 and 3 differ by {apart(passing[0][0], kept[0][0]):.1e} after 4 updates")

# A bound without room for a bucket and the next one in flight is an error before training starts.
try:
    fds.simulate(lambda: train(stage=3, max_live_bytes=128 * 1024), 4)
except fds.errors.StateError as error:
    print(error)
else:
    raise AssertionError
