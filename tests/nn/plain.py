"""A transformer layer in plain torch, with the dropout masks of fds's kernels: what the layer is compared with."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.kernels import philox
from fds.nn import TransformerConfig, TransformerLayer


def plain_layer(
    params: dict[str, Tensor],
    config: TransformerConfig,
    x: Tensor,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """Return the layer's output; with a seed dropout is on."""
    w, gelu = params, {"gelu_tanh": "tanh", "gelu_erf": "none"}[config.activation]
    norm = lambda x, name: F.layer_norm(
        x, (config.hidden_size,), w[f"{name}w"], w[f"{name}b"], eps=config.layer_norm_eps
    )
    drop = lambda x, offset: dropped(x, config.hidden_dropout_ratio, seed, offset)
    pre = config.pre_layer_norm

    z = norm(x, "norm_") if pre else x
    a = F.linear(plain_attention(w, config, z, mask, seed), w["attn_ow"], w["attn_ob"])
    u = x + drop(a, 1)
    m = norm(u, "attn_n")
    f = F.linear(F.gelu(F.linear(m, w["inter_w"], w["inter_b"]), approximate=gelu), w["output_w"], w["output_b"])
    y = (u if pre else m) + drop(f, 2)
    return y if pre else norm(y, "norm_")


def plain_attention(w: dict, config: TransformerConfig, x: Tensor, mask: Tensor | None, seed: Tensor | None) -> Tensor:
    b, s, h = x.shape
    heads = config.heads
    q, k, v = (
        F.linear(x, part, bias).view(b, s, heads, h // heads).transpose(1, 2)
        for part, bias in zip(w["attn_qkvw"].chunk(3), w["attn_qkvb"].chunk(3), strict=True)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(h // heads)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask[:, None, None], -math.inf)
    if config.causal:
        scores = scores.masked_fill(torch.ones(s, s).tril() == 0, -math.inf)
    probs = dropped(scores.softmax(-1).nan_to_num(0.0), config.attn_dropout_ratio, seed, 0)
    return (probs @ v).transpose(1, 2).reshape(b, s, h)


def dropped(x: Tensor, p: float, seed: Tensor | None, offset: int) -> Tensor:
    if seed is None or not p:
        return x
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    return x * philox.reference(seed, offset, rows, columns, p).view(x.shape) / (1 - p)


def build(dtype: torch.dtype = torch.float32, **settings) -> TransformerLayer:
    """Return a layer whose parameters are all of a size that matters, the same ones each time."""
    config = TransformerConfig(**{"hidden_size": 12, "heads": 3, "adjust_init_range": False} | settings)
    layer = TransformerLayer(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in layer.parameters():
            values = torch.randn(p.shape, generator=generator)
            p.copy_(values * 1.5 / math.sqrt(p.shape[-1]) if p.dim() == 2 else p + values / 3)
    return layer.to(dtype)


def inputs(config: TransformerConfig, batch: int = 2, tokens: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return hidden states."""
    return torch.randn(batch, tokens, config.hidden_size, generator=torch.Generator().manual_seed(3)).to(dtype)


def padding(batch: int, tokens: int) -> Tensor:
    """Return a mask (B, S) bool: sequences of other lengths."""
    return torch.arange(tokens) < tokens - torch.arange(batch)[:, None] % max(tokens - 1, 1)


def drawn(torch_seed: int) -> Tensor:
    """Return the seed that a layer draws first after `torch.manual_seed(torch_seed)`, and set that."""
    torch.manual_seed(torch_seed)
    seed = torch.randint(2**62, ())
    torch.manual_seed(torch_seed)
    return seed


def gradients(f, params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return f(params, x) and the gradients of a weighted sum of it, with respect to all, by name."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    leaves["x"] = x.detach().clone().requires_grad_()
    out = f({name: p for name, p in leaves.items() if name != "x"}, leaves["x"])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    found = torch.autograd.grad((out * weights).sum(), list(leaves.values()))
    return out.detach(), dict(zip(leaves, found, strict=True))
