"""Save, and resume bit for bit, dropout included.

A save is a folder: tensors as safetensors, the rest as JSON, renamed into place when it is complete. All randomness
comes from `state.key` and `state.calls`, so the resumed run draws what the uninterrupted one would have drawn.
"""

import inspect
import tempfile
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
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        x = self.embed(context).flatten(1)
        return self.head(self.drop(self.norm(F.gelu(self.hidden(x)))))


torch.manual_seed(0)
apply, params, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def new_step():
    return fds.compose(
        fds.accumulate(4),
        fds.clip_by_global_norm(0.5),
        fds.adamw(lr=fds.schedules.warmup_cosine(3e-3, warmup_steps=10, total_steps=60)),
        fds.ema(0.98),
    )(loss_fn)


def run(step, state, start, stop):
    for i in range(start, stop):
        state, metrics = step(state, batch(i))
    print(f"calls {start:2} to {stop}: loss {metrics['loss']:.6f}")
    return state


with tempfile.TemporaryDirectory() as folder:
    step = new_step()
    straight = run(step, step.init(params, key=0), 0, 60)

    half = run(step, step.init(params, key=0), 0, 30)
    path = fds.save(folder, half, step, extra={"next_batch": 30})
    print(f"saved {sorted(p.name for p in path.iterdir())} in {path.name}")

    step = new_step()  # as in another process; only the structure of params is read
    state, extra = fds.load(folder, step, params)
    resumed = run(step, state, extra["next_batch"], 60)

    names = fds.tree.paths(straight)
    assert all(torch.equal(x, fds.tree.paths(resumed)[name]) for name, x in names.items())
    print(f"{len(names)} tensors are equal bit for bit")

    # Loading a save of another model is an error that names the first parameter that differs.
    try:
        fds.load(folder, step, {**params, "head.weight": torch.empty(300, 128)})
    except fds.FdsError as error:
        print(str(error).replace(folder, "run"))
    else:
        raise AssertionError
