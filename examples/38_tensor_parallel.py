"""Divide a model's matrices over ranks that compute one loss, and what lies between them along the sequence.

The module is one that knows of no ranks. A plan says which of its matrices are divided, and how: each rank then
holds and multiplies a part. Four ranks are four threads here; with torchrun the same lines are four processes.
"""

import inspect
import textwrap

import torch
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 33, 1)  # 32 bytes, and the ones that follow them


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, norm_first=True, batch_first=True)
        self.tokens, self.places = nn.Embedding(256, 64), nn.Embedding(32, 64)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.tokens(x) + self.places.weight
        return self.head(self.blocks(x, mask, is_causal=True))


def train(tp):
    axis = fds.mesh(tp=tp)["tp"]
    torch.manual_seed(0)
    apply, params, _ = fds.functional(Model())

    def loss_fn(params, rows):
        logits = apply(params, rows[:, :-1])  # of this rank's rows of the vocabulary
        return fds.nn.vocab_cross_entropy(logits, rows[:, 1:], axis)

    plan = fds.nn.auto_plan(Model()) | {"head": fds.nn.vocab(gather=False)}  # torch's layers are known
    step = fds.compose(
        fds.tensor_parallel(axis, plan, sequence=True), fds.clip_by_global_norm(1.0), fds.adamw(lr=3e-3)
    )(loss_fn)
    state = step.init(params, key=0)
    for i in range(10):
        at = torch.randint(len(windows), (8,), generator=torch.Generator().manual_seed(i))
        state, metrics = step(state, windows[at])
    held = sum(x.numel() for x in fds.tree.leaves(state.params))
    return f"loss {float(metrics['loss']):.4f}, {held:,} parameters held by a rank"


print("one rank  ", train(1))
print("four ranks", fds.simulate(lambda: train(4), 4)[0])
