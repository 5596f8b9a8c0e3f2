"""Write the model as `Layers`: a visible sequence, built from a key, with tied parameters.

A `LayerSpec` is a layer to be built later. `TiedLayerSpec`s of one key share parameters: here the embedding is also the
output projection. The result is a loss like any other, and transforms can see its layers.
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


def project(embedding, x):
    return x @ embedding.weight.T


loss_fn = fds.Layers(
    [
        fds.TiedLayerSpec("bytes", nn.Embedding, 256, 32),
        fds.LayerSpec(nn.Flatten),
        fds.LayerSpec(nn.Linear, 8 * 32, 128),
        F.gelu,
        fds.LayerSpec(nn.LayerNorm, 128),
        fds.LayerSpec(nn.Linear, 128, 32),
        fds.TiedLayerSpec("bytes", nn.Embedding, 256, 32, forward_fn=project),
    ],
    criterion=F.cross_entropy,
)

step = fds.compose(fds.accumulate(4), fds.clip_by_global_norm(0.5), fds.adamw(lr=3e-3))(loss_fn)
state = step.init(loss_fn.init, key=0)  # a recipe: parameters from the key, layer by layer
for name, x in state.params.items():
    print(f"{name:<14} {tuple(x.shape)}")
assert list(state.params).count("bytes.weight") == 1 and len(state.params) == 7

again = step.init(loss_fn.init, key=0)
other = step.init(loss_fn.init, key=1)
assert torch.equal(state.params["2.weight"], again.params["2.weight"])
assert not torch.equal(state.params["2.weight"], other.params["2.weight"])

for i in range(150):
    state, metrics = step(state, batch(i))
print(f"loss {metrics['loss']:.3f}")
assert metrics["loss"] < 3.5

# Both uses of the tied table contribute gradients: bytes outside the context are updated too, as possible outputs.
unseen = sorted(set(range(256)) - set(windows.flatten().tolist()))
assert not torch.equal(state.params["bytes.weight"][unseen], again.params["bytes.weight"][unseen])
