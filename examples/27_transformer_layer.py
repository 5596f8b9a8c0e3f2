"""A transformer layer made of fused kernels: `fds.nn.TransformerLayer`, in a stack of `LayerSpec`s.

It has the parameters of DeepSpeed's transformer kernel, and three options that keep less for backward: each one is
measured here. Triton kernels run on a GPU where they are chosen, else plain torch; both keep the same. Dropout draws
its masks from the step's key and stores none. Layers hand on (hidden states, mask), for lines of different lengths.
"""

import inspect
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.nn import TransformerConfig, TransformerLayer

torch.set_num_threads(1)  # a model this small is fastest on one
lines = [line.encode()[:32] for line in inspect.getsource(textwrap).splitlines() if line.strip()]
text = torch.tensor([list(line.ljust(33, b"\0")) for line in lines])  # 0 is padding


def batch(i, rows=32):
    at = torch.randint(len(text), (rows,), generator=torch.Generator().manual_seed(i))
    return text[at, :-1], text[at, 1:]


class Embed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(32, width)

    def forward(self, tokens):
        mask = tokens != 0
        return self.bytes(tokens) + self.places.weight, mask


class Project(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, pair):
        return self.linear(self.norm(pair[0]))


def criterion(logits, targets):
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return fds.Mean(losses, (targets != 0).sum())


def model(**options):
    config = TransformerConfig(hidden_size=64, heads=4, num_hidden_layers=2, causal=True, **options)
    layers = [TransformerLayer.spec(config)] * 2
    return fds.Layers([fds.LayerSpec(Embed, 64), *layers, fds.LayerSpec(Project, 64)], criterion)


def kept_bytes(loss_fn, params, batch):
    """Return the bytes that autograd saves for backward, without parameters."""
    held = {}

    def pack(x):
        held[x.untyped_storage().data_ptr()] = x  # kept alive, so that addresses are unique
        return x

    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss_fn(leaves, batch)
    own = {p.untyped_storage().data_ptr() for p in leaves.values()}
    return sum(x.untyped_storage().nbytes() for at, x in held.items() if at not in own)


# What the options save: of B sequences of S tokens, h wide, i inside the feed-forward part, in two layers of float32.
B, S, h, i, heads = 32, 32, 64, 256, 4
options = {
    "normalize_invertible": 2 * B * S * h,  # the inputs of both layer norms, recomputed from their outputs
    "gelu_checkpoint": B * S * i,  # the output of GELU, recomputed
    "attn_dropout_checkpoint": 2 * B * heads * S * S,  # attention's probabilities before and after dropout
}
plain = model()
params = plain.init(fds.random.key(0))
before = kept_bytes(plain, params, batch(0))
print(f"{'nothing':<24} keeps {before:>11,} bytes")
for name, elements in options.items():
    spared = before - kept_bytes(model(**{name: True}), params, batch(0))
    print(f"{name:<24} keeps {before - spared:>11,} bytes, {spared:>10,} fewer (formula {2 * 4 * elements:,})")
    assert abs(spared - 2 * 4 * elements) < 0.02 * before

# A step with all three equals the step without, up to rounding: the dropout masks are the same.
loss_fn = model(**dict.fromkeys(options, True))
transforms = fds.clip_by_global_norm(1.0), fds.adamw(lr=3e-3)
step, other = fds.compose(*transforms)(loss_fn), fds.compose(*transforms)(plain)
state, metrics = step(step.init(loss_fn.init, key=0), batch(0))
_, same = other(other.init(plain.init, key=0), batch(0))
assert abs(metrics["loss"] - same["loss"]) < 1e-5 and abs(metrics["grad_norm"] - same["grad_norm"]) < 1e-4

for n in range(1, 60):
    state, metrics = step(state, batch(n))
loss = step.evaluate(state, batch(0))["loss"]
print(f"loss {same['loss']:.3f} -> {loss:.3f}")
assert loss < 3.0
