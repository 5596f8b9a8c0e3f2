"""Give each parameter an optimizer, that of the first pattern which its name matches.

Muon for the matrices inside, AdamW for the rest, and no weight decay on biases and norms.
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


optimizer = fds.by_name(
    {
        "hidden.weight": fds.muon(lr=0.02),
        "*.bias": fds.adamw(lr=3e-3, weight_decay=0.0),
        "norm.*": fds.adamw(lr=3e-3, weight_decay=0.0),
        "*": fds.adamw(lr=3e-3, weight_decay=0.1),
    }
)
step = fds.compose(fds.accumulate(4), fds.clip_by_global_norm(0.5), optimizer)(loss_fn)
state = step.init(params, key=0)
for i in range(40):
    state, metrics = step(state, batch(i))
print(f"loss {metrics['loss']:.3f}")

# The optimizer state is in `state.opt`, by slot and parameter name; Muon keeps half as much as Adam.
for slot, tensors in state.opt.items():
    print(f"{slot:<16} {', '.join(tensors)}")
assert list(state.opt["momentum_buffer"]) == ["hidden.weight"]
assert "hidden.weight" not in state.opt["exp_avg_sq"]
adam = fds.compose(fds.adamw())(loss_fn).init(params)
saved = fds.tree.num_bytes(adam.opt) - fds.tree.num_bytes(state.opt)
print(f"{fds.tree.num_bytes(state.opt):,} bytes of optimizer state, {saved:,} fewer than AdamW alone")
assert saved == params["hidden.weight"].nbytes

# A pattern that matches nothing is an error.
try:
    fds.compose(fds.by_name({"hiden.*": fds.muon(), "*": fds.adamw()}))(loss_fn).init(params)
except fds.FdsError as error:
    print(error)
else:
    raise AssertionError
