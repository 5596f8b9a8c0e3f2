"""Train apart and agree now and then: an outer optimizer steps on how far ranks went (DiLoCo).

Gradients that are summed in every step cross the network in every step. With `local_updates` each rank takes steps of
its own, and what crosses is one message in eight steps, here in 4 bits for a number.
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
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        return self.head(F.gelu(self.hidden(self.embed(context).flatten(1))))


apply, _, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def train(every, calls=120):
    axis = fds.mesh(replica=2)["replica"]
    if every > 1:
        outer = fds.sgd(0.9, momentum=0.5)  # the default, with momentum 0.9, is for more turns than these 15
        share = fds.local_updates(axis, every=every, outer=outer, transport=fds.transports.quantized(4))
    else:
        share = fds.shard_optimizer(axis, stage=0)
    step = fds.compose(share, fds.adamw(lr=3e-3))(loss_fn)
    state = step.init(fds.recipe(Model), key=0)
    for i in range(calls):
        state, _ = step(state, [x.chunk(2)[axis.index] for x in batch(i)])
    held_out = step.evaluate(state, batch(1000, rows=512))["loss"]
    return state, float(held_out), sum(step.describe(state).sent.values())


every_step, apart, never = (fds.simulate(lambda every=every: train(every), 2) for every in (1, 8, 1000))
for name, ((_, loss, sent), _) in (("every step", every_step), ("every 8", apart), ("never", never)):
    print(f"ranks agree {name:<11} loss {loss:.3f}, {sent:>9,} bytes a step")

# Call 120 was a turn: all ranks have the same parameters, and those are the anchor.
(one, loss, sent), (other, _, _) = apart
assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)
assert all(torch.equal(one.params[name], one.opt["anchor"][name]) for name in one.params)
assert sent < every_step[0][2] / 50
assert loss < every_step[0][1] + 0.05 < never[0][1] - 0.1
