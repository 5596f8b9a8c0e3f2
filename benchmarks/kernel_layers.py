"""One transformer layer of BERT in several ways, from the same weights, all trained in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.kernel_works import Setting, Way
from fds.nn import TransformerConfig, TransformerLayer, from_bert

EPS = 1e-12
# in this order everywhere, so that results can be compared
TRAINED = [
    "inter_w",
    "inter_b",
    "output_w",
    "output_b",
    "norm_w",
    "norm_b",
    "attn_nw",
    "attn_nb",
    "attn_ow",
    "attn_ob",
    "attn_qkvw",
    "attn_qkvb",
]
COMPARED = 2 + 6  # the output, the input's gradient, and those of the first six, which Hugging Face's layer has too


class Plain(nn.Module):
    """The layer as PyTorch users write it, post layer norm, with the parameters of fds's under their names."""

    def __init__(self, like: TransformerLayer, heads: int, dropout: float, *, sdpa: bool = False):
        super().__init__()
        self.heads, self.dropout, self.sdpa = heads, dropout, sdpa
        for name, p in like.named_parameters():
            self.register_parameter(name, nn.Parameter(p.detach().clone()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, h = x.shape
        p = self.dropout if self.training else 0.0
        qkv = F.linear(x, self.attn_qkvw, self.attn_qkvb).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.sdpa:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(-1, 1, s, s), dropout_p=p)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask
            attended = F.dropout(scores.softmax(-1), p) @ v
        a = F.linear(attended.transpose(1, 2).reshape(b, s, h), self.attn_ow, self.attn_ob)
        u = F.layer_norm(x + F.dropout(a, p), (h,), self.attn_nw, self.attn_nb, EPS)
        f = F.linear(F.gelu(F.linear(u, self.inter_w, self.inter_b)), self.output_w, self.output_b)
        return F.layer_norm(u + F.dropout(f, p), (h,), self.norm_w, self.norm_b, EPS)


def layers(setting: Setting, *, hidden: int, heads: int, dropout: float) -> tuple[list[Way], Way]:
    """Return the layer in every way there is here, and the one to compare with, in float32."""
    make = lambda **options: TransformerConfig(
        hidden_size=hidden,
        heads=heads,
        attn_dropout_ratio=dropout,
        hidden_dropout_ratio=dropout,
        adjust_init_range=False,
        pre_layer_norm=False,
        activation="gelu_erf",
        **options,
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        first, bert = TransformerLayer(make()), hugging_face(hidden, heads, dropout)
    if bert is not None:
        first.load_state_dict(from_bert(bert.state_dict()))
    ours = {
        "fds": make(attn_dropout_checkpoint=True),
        "fds, probabilities kept": make(),
        "fds, all recomputed": make(attn_dropout_checkpoint=True, gelu_checkpoint=True, normalize_invertible=True),
    }
    ways = []
    for name, config in ours.items():
        with torch.device(setting.device):
            layer = TransformerLayer(config)
        layer.load_state_dict(first.state_dict())
        ways.append(_way(setting, name, layer))
    plain = lambda **more: Plain(first, heads, dropout, **more)
    if bert is None:
        ways.append(_way(setting, "torch eager", plain()))
    else:
        ways.append(attrs.evolve(_way(setting, "torch eager", bert), compared=COMPARED))
        ways.append(_way(setting, "torch eager, plain", plain()))
    ways.append(_way(setting, "torch eager, SDPA", plain(sdpa=True)))
    ways.append(_way(setting, "torch.compile", plain(), setting.compiled))
    ways.append(_way(setting, "torch.compile, SDPA", plain(sdpa=True), setting.compiled))
    oracle = Plain(first, heads, dropout).to(setting.device, torch.bfloat16).float()  # the same rounded weights
    return ways, Way("oracle", _call(oracle, oracle), _trained(oracle))


def hugging_face(hidden: int, heads: int, dropout: float) -> nn.Module | None:
    """Return Hugging Face's layer, None where transformers is not installed."""
    try:
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer
    except ImportError:
        return None
    config = BertConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        layer_norm_eps=EPS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config._attn_implementation = "eager"
    return BertLayer(config)


def _way(setting: Setting, name: str, layer: nn.Module, compiled: Callable = lambda f: f) -> Way:
    layer = layer.to(setting.device, torch.bfloat16)
    return Way(name, _call(compiled(layer), layer), _trained(layer))


def _call(run: Callable, layer: nn.Module) -> Callable:
    """Return a call that drops out as told: with the ratio that the layer was made with, or not at all."""

    def call(x: Tensor, mask: Tensor, p: float) -> Any:
        if layer.training != (p > 0):
            layer.train(p > 0)
        out = run(x, mask)
        return out[0] if isinstance(out, tuple) else out

    return call


def _trained(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return the parameters in the order of `TRAINED`; of Hugging Face's layer, the first six so."""
    named = dict(layer.named_parameters())
    if "inter_w" in named:
        return tuple(named[name] for name in TRAINED)
    places = ("intermediate.dense", "output.dense", "output.LayerNorm")
    first = [f"{place}.{kind}" for place in places for kind in ("weight", "bias")]
    return tuple(named[name] for name in [*first, *(name for name in named if name not in first)])
