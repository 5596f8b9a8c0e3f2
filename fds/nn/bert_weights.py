"""`from_bert`: the weights of Hugging Face's BertLayer as parameters of a `TransformerLayer`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fds.errors import KernelError

QKV = ("attention.self.query", "attention.self.key", "attention.self.value")  # stacked, in this order
NAMES = {
    "attn_ow": "attention.output.dense.weight",
    "attn_ob": "attention.output.dense.bias",
    "attn_nw": "attention.output.LayerNorm.weight",
    "attn_nb": "attention.output.LayerNorm.bias",
    "inter_w": "intermediate.dense.weight",
    "inter_b": "intermediate.dense.bias",
    "output_w": "output.dense.weight",
    "output_b": "output.dense.bias",
    "norm_w": "output.LayerNorm.weight",
    "norm_b": "output.LayerNorm.bias",
}


def from_bert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a `TransformerLayer` from those of a BertLayer: `layer.load_state_dict(from_bert(...))`.

    The layer's config has `pre_layer_norm=False`, `activation="gelu_erf"` and the sizes of the model's config. Tensors
    are shared, except attn_qkvw and attn_qkvb, which are copies; a dict of gradients can be passed too.
    Raises `KernelError` for missing and for unknown names.

    Args:
        weights: `bert_layer.state_dict()`, or the entries of a model's state_dict under "encoder.layer.3." without
            this prefix.
    """
    if not isinstance(weights, Mapping):
        raise KernelError(
            "the weights are not a mapping", where="weights", got=type(weights).__name__, want="bert_layer.state_dict()"
        )
    want = {*NAMES.values(), *(f"{name}.{kind}" for name in QKV for kind in ("weight", "bias"))}
    if weights.keys() != want:
        raise KernelError(
            "these are not the weights of one BertLayer",
            where="weights",
            got=f"missing {_some(want - weights.keys())}; unknown {_some(weights.keys() - want)}",
            want="bert_layer.state_dict()",
            hint="of a model's state_dict, the part under 'encoder.layer.3.'",
        )
    qkv = {f"attn_qkv{kind[0]}": torch.cat([weights[f"{name}.{kind}"] for name in QKV]) for kind in ("weight", "bias")}
    return qkv | {ours: weights[theirs] for ours, theirs in NAMES.items()}


def _some(names: set[str]) -> str:
    shown = sorted(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
