"""A loop of reinforcement learning: an engine samples, the trainer weighs what it sampled, and sends new weights back.

The policy learns to write the letters that a reward counts. The engine is a module of its own, in bfloat16, as servers
have it; two ranks hold the trainer's parameters in slices. Log-probabilities of a row have the same bits in every
batch, so the first update of a batch has ratios of exactly 1.
"""

import torch
import torch.nn.functional as F
from torch import nn

import fds

LETTERS, LENGTH, ROWS = 27, 12, 32
GOOD = torch.tensor([1, 5, 9, 15, 21])  # the vowels


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 48)
        self.head = nn.Linear(48, LETTERS)

    def forward(self, tokens):
        x = self.embed(tokens)
        steps = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(F.gelu(x + x.cumsum(1) / steps))  # each token, and the mean of those before


def sample(engine, key):
    """Return rows that the engine writes, (ROWS, LENGTH)."""
    generator = torch.Generator().manual_seed(key)
    tokens = torch.zeros(ROWS, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(LENGTH - 1):
            probabilities = engine(tokens)[:, -1].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
    return tokens


torch.manual_seed(0)
model = Policy()
apply, params, _ = fds.functional(model)


def log_probs(params, tokens):
    return fds.nn.log_probs(apply(params, tokens)[:, :-1], tokens[:, 1:])


def loss_fn(params, batch):
    ratio = (log_probs(params, batch["tokens"]) - batch["old"]).exp()
    gain = torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
    return -gain.mean(), {"not_one": (ratio != 1).sum()}


def train():
    axis = fds.mesh(dp=-1)["dp"]
    step = fds.compose(fds.batch_invariant(), fds.shard_optimizer(axis, stage=3), fds.adamw(1e-2))(
        loss_fn, eval_fn=lambda params, tokens: -log_probs(params, tokens).mean()
    )
    state = step.init(params, key=0)
    engine, rewards = Policy().bfloat16(), []
    for i in range(9):
        served = dict(engine.named_parameters())
        with step.weights(state, dtype=torch.bfloat16) as weights, torch.no_grad():
            for name, weight in weights:
                served[name].copy_(weight)

        tokens = sample(engine, i).chunk(axis.size)[axis.index]  # each rank trains on its rows
        reward = torch.isin(tokens[:, 1:], GOOD).float().mean(1, keepdim=True)
        old = torch.cat([step.evaluate(state, row[None], outputs=True)["outputs"] for row in tokens])  # one by one
        batch = {"tokens": tokens, "old": old, "advantage": reward - 0.2}
        for update in range(3):
            state, metrics = step(state, batch)
            if update == 0:
                assert metrics["not_one"] == 0  # all rows together, bit for bit
        rewards.append(float(axis.all_reduce(reward.mean())) / axis.size)
    return rewards


rewards, _ = fds.simulate(train, 2)  # under torchrun: train()
print("vowels among the letters:", " ".join(f"{reward:.2f}" for reward in rewards))
assert rewards[-1] > 2 * rewards[0]
