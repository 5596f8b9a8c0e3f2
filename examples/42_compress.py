"""A smaller model: half of the layers of a trained one, which then learns what that one says.

The student begins with layers 0 and 2 of the teacher. Beside the next byte it learns the teacher's distribution, which
says more of each byte than the byte does. The teacher is in no state, and its parameters lie in slices on two ranks.
"""

import inspect
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 33, 1)  # 32 bytes, and for each of them the one that follows
WIDTH, HEADS, CALLS = 32, 2, 60


def batch(i, rows=16):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :-1], windows[at, 1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.hidden = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU())
        self.last = nn.Linear(128, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.last(self.hidden(x))


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(32, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight
        for block in self.h:
            x = block(x)
        return self.head(x)


large, _, _ = fds.functional(Model(4))
small, _, _ = fds.functional(Model(2))


def train(loss_fn, params, *transforms, lr, key=0):
    step = fds.compose(*transforms, fds.adamw(lr))(loss_fn)
    data, state = step.dimensions.data, step.init(params, key=key)
    for call in range(CALLS):
        rows = batch(call)
        state, _ = step(state, rows if data is None else [x.chunk(data.size)[data.index] for x in rows])
    return step.params(state)


def next_byte(apply):
    return lambda params, rows: F.cross_entropy(apply(params, rows[0]).flatten(0, 1), rows[1].flatten())


def held_out(apply, params):
    with torch.no_grad():
        return float(next_byte(apply)(params, batch(10_000, rows=64)))


def num_bytes(params):
    return sum(x.nbytes for x in params.values())


taught = train(next_byte(large), fds.recipe(lambda: Model(4)), lr=1e-2)
loss = held_out(large, taught)
print(f"teacher, 4 layers    loss {loss:.3f}   {num_bytes(taught):,} bytes")

first = fds.reduce_layers(taught, keep=[0, 2])
assert torch.equal(first["h.1.qkv.weight"], taught["h.2.qkv.weight"])
print(f"2 of its layers      loss {held_out(small, first):.3f}   {num_bytes(first):,} bytes")


def distilled():
    dp = fds.mesh(dp=2)["dp"]
    teacher = fds.distill.teacher(large, taught, fds.shard_optimizer(dp, stage=3))
    assert fds.tree.num_bytes(teacher.state.params) < 0.51 * num_bytes(taught)

    def loss_fn(params, rows):
        logits = small(params, rows[0])
        soft = fds.distill.logits(logits, teacher(rows[0]), temperature=2.0)
        hard = F.cross_entropy(logits.flatten(0, 1), rows[1].flatten(), reduction="sum")
        return fds.Mean(0.5 * soft.total + 0.5 * hard, soft.weight)

    return train(loss_fn, first, fds.shard_optimizer(dp, stage=2), lr=3e-3)


student = fds.simulate(distilled, 2)[0]
print(f"distilled            loss {held_out(small, student):.3f}")
fresh = train(next_byte(small), fds.recipe(lambda: Model(2)), lr=1e-2)
print(f"2 layers, untaught   loss {held_out(small, fresh):.3f}")
assert held_out(small, student) < held_out(small, fresh) and held_out(small, student) < held_out(small, first)
