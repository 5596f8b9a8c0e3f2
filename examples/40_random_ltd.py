"""Fewer tokens in the middle layers, and fewer layers: positions that belong to them, the same run on two ranks.

Which tokens a layer keeps follows from the state's key, the call, the microbatch and the layer: it is nowhere but in
the state. So two ranks keep what one rank keeps, and an evaluation keeps all.
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
WIDTH, HEADS, LAYERS, TOKENS, CALLS = 32, 2, 4, 32, 40


def batch(i, rows=16):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :-1], windows[at, 1:]


class Block(nn.Module):
    """Attention and a hidden layer. The angles of rotary positions come with the tokens: a layer cannot count them."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.hidden = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU())
        self.last = nn.Linear(64, WIDTH)

    def forward(self, x, position_angles):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        cos, sin = position_angles.cos()[:, None], position_angles.sin()[:, None]
        turn = lambda x: torch.cat([x[..., ::2] * cos - x[..., 1::2] * sin, x[..., ::2] * sin + x[..., 1::2] * cos], -1)
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.last(self.hidden(x))


class Model(nn.Module):
    rates: torch.Tensor

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.register_buffer("rates", 100.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2), persistent=False)

    def forward(self, x):
        angles = torch.arange(x.shape[1])[None, :, None] * self.rates  # (1, tokens, features)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(x)


apply, _, _ = fds.functional(Model())


def loss_fn(params, batch):
    return F.cross_entropy(apply(params, batch[0]).flatten(0, 1), batch[1].flatten())


kept = fds.schedules.fixed_linear(TOKENS // 4, TOKENS, CALLS, difficulty_step=4)
middle = range(1, LAYERS - 1)  # all but the first and the last of `blocks`
rate = fds.schedules.warmup_cosine(1e-2, warmup_steps=5, total_steps=CALLS)
followed = fds.schedules.by_layer_tokens(rate, kept, TOKENS, layers=len(middle), total=LAYERS)


def train(*transforms, lr, ranks=1):
    """Return loss on held-out text, state and rates, in as many microbatches whatever the number of ranks."""

    def body():
        dp = fds.mesh(dp=ranks)["dp"]
        step = fds.compose(*transforms, fds.accumulate(4 // ranks), fds.shard_optimizer(dp, stage=2), fds.adamw(lr))(
            loss_fn
        )
        state, rates = step.init(fds.recipe(Model), key=0), []
        for call in range(CALLS):
            state, metrics = step(state, [x.chunk(ranks)[dp.index] for x in batch(call)])
            rates.append(float(metrics["lr"]))
        return float(step.evaluate(state, batch(10_000, rows=64))["loss"]), state, rates

    return fds.simulate(body, ranks)[0]


ltd = fds.random_ltd(middle, kept)
plain, _, _ = train(lr=rate)
loss, state, rates = train(ltd, lr=followed)
computed = {name: int(x) for name, x in state.slots["random_ltd"].items()}
share = computed["kept"] / sum(computed.values())
print(f"all tokens        loss {plain:.3f}")
print(
    f"{share:.0%} in the middle  loss {loss:.3f}   lr at the end {rates[-1]:.5f}, for {rate(CALLS - 1):.5f} by updates"
)
assert 0.5 < share < 0.7 and rates[-1] > rate(CALLS - 1)

again, _, _ = train(ltd, lr=followed, ranks=2)
print(f"on two ranks      loss {again:.3f}")
assert abs(again - loss) < 0.05  # the same tokens, added up in another order

skipped, _, _ = train(fds.layer_drop(theta=0.5, gamma=0.05), lr=rate)
print(f"fewer layers      loss {skipped:.3f}")
assert max(plain, loss, skipped) < 3.3
