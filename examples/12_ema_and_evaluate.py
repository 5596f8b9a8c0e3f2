"""Average the parameters, and evaluate the average on held-out text.

`ema` keeps its average in a slot of the state, under its name. To evaluate it, replace the parameters by it: a state is
a value. An `eval_fn` of your own may return more metrics than the loss.
"""

import inspect
import textwrap

import attrs
import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)  # eight bytes, and the one that follows them
windows, held_out = windows[:-2048], windows[-2048:]


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


def eval_fn(params, batch):
    context, following = batch
    logits = apply(params, context)
    right = (logits.argmax(-1) == following).float().mean()
    return F.cross_entropy(logits, following), {"accuracy": right}


step = fds.compose(fds.adamw(lr=1e-2), fds.ema(0.98))(loss_fn, eval_fn)
state = step.init(params, key=0)
for i in range(300):
    state, metrics = step(state, batch(i))
averaged = attrs.evolve(state, params=state.slots["ema"])

scores = {}
for name, one in (("last", state), ("averaged", averaged)):
    evaluate = step.evaluator(one)  # gathers the parameters once, for many batches
    batches = [evaluate((part[:, :8], part[:, 8])) for part in held_out.split(256)]
    scores[name] = sum(float(m["loss"]) for m in batches) / len(batches)
    accuracy = sum(float(m["accuracy"]) for m in batches) / len(batches)
    print(f"{name:<9} held-out loss {scores[name]:.3f}, accuracy {accuracy:.1%}")
assert scores["averaged"] < scores["last"]

# The last output is returned on request.
outputs = step.evaluate(averaged, (held_out[:5, :8], held_out[:5, 8]), outputs=True)["outputs"]
assert outputs.shape == (5, 256)
