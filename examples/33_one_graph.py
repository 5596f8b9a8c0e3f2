"""Record the step: as one graph that a compiler takes (`compile(whole=True)`), or as a CUDA graph that is replayed.

A model this small keeps the host busier than the device. Both ways leave the host one call a step, from the batch to
the update: `fds.compile(whole=True)` on any device, by torch.compile's backends; `fds.cuda_graph()` on a GPU, without
any compiler, by replaying what the step did. What a graph cannot hold is refused, with its line.
"""

import inspect
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
text = torch.tensor(list(inspect.getsource(textwrap).encode()), device=device)
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
        return self.head(F.dropout(self.norm(F.gelu(self.hidden(x))), 0.1))


torch.manual_seed(0)
apply, params, _ = fds.functional(Model().to(device))


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def trained(*transforms, loss=loss_fn, calls=5):
    step = fds.compose(*transforms, fds.clip_by_global_norm(1.0), fds.adamw(lr=3e-3), fds.donate())(loss)
    state = step.init(params, key=0)
    for i in range(calls):
        state, metrics = step(state, batch(i))
    return state, metrics


plain, metrics = trained()

# "aot_eager" runs the graph as it was recorded, without a compiler: the same bits, dropout included. The default,
# "inductor", fuses operators, and rounds otherwise.
whole, again = trained(fds.compile(whole=True, backend="aot_eager"))
if device.type == "cpu":
    assert all(torch.equal(plain.params[name], whole.params[name]) for name in params)
print(f"one graph: 5 steps, loss {again['loss']:.3f}; plain {metrics['loss']:.3f}")

# A CUDA graph is captured on a GPU. On a CPU every call is run at once: `describe` says so, and the bits are the same.
replayed, again = trained(fds.cuda_graph())
said = fds.compose(fds.cuda_graph(), fds.adamw(lr=3e-3), fds.donate())(loss_fn).describe().stations["run"]
if device.type == "cpu":
    assert all(torch.equal(plain.params[name], replayed.params[name]) for name in params)
print(f"{said}: 5 steps on a {device.type}, loss {again['loss']:.3f}")


# Neither can hold what reads a number on the host: the next call would read another one.
def reads(params, batch):
    loss = loss_fn(params, batch)
    return loss * (1.0 if loss > 3 else 0.5)


try:
    trained(fds.compile(whole=True, backend="aot_eager"), loss=reads)
except fds.FdsError as error:
    print(error)
    assert "in reads" in error.where
else:
    raise AssertionError
