"""`TransformerLayer`: self-attention and feed-forward, built from kernels.

With n and m the layer norms with weights `norm_*` and `attn_n*`, and x (B, S, h)::

    pre layer norm:    u = x + D(attention(n(x)) Wo + bo)         y = u + D(gelu(m(u) Wi + bi) Wf + bf)
    post layer norm:   u = m(x + D(attention(x) Wo + bo))         y = n(u + D(gelu(u Wi + bi) Wf + bf))

attention(z) is D(softmax(Q K^T / sqrt(h / heads) + mask)) V with (Q, K, V) = z Wqkv + bqkv; D is dropout. The three
dropouts of a call share one seed from torch's generator, at the offsets 0, 1 and 2. On a GPU where the kernels are not
chosen (`fds.kernels.chosen`), torch's own dropout draws their masks from its generator.

Saved for backward, in elements: with pre layer norm x, n(x), Q, K, V, the output of attention, u, m(u), the derivative
of gelu and its output: 8BSh + 2BSi; with post layer norm the same, with the input of the last norm instead of n(x).
Attention adds one float32 per row of scores or, with dropout, 2 B heads S S (`TransformerConfig` can reduce this).
Sources:
1. Vaswani et al. 2017, arXiv:1706.03762 (post); Xiong et al. 2020, arXiv:2002.04745 (pre).
2. Devlin et al. 2018, arXiv:1810.04805: sizes, gelu and initial values.
3. DeepSpeed 0.19, ops/transformer/transformer.py: names and shapes of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds.errors import KernelError
from fds.kernels import (
    arguments,
    attention,
    bias_dropout_add,
    bias_gelu,
    bias_gelu_linear,
    flash_attention,
    layer_norm,
    masked_softmax,
)
from fds.kernels.choice import is_left_to_torch
from fds.kernels.flash_blocks import LEAST_BIAS
from fds.kernels.scaled_dot_product import scaled_dot_product
from fds.loss import LayerSpec
from fds.nn.parallel.tokens import check_alone
from fds.nn.transformer_config import TransformerConfig

ATTENTION, AFTER_ATTENTION, AFTER_FEED_FORWARD = range(3)  # offsets of the dropouts


class TransformerLayer(nn.Module):
    """A layer of a transformer encoder, or of a decoder if `config.causal`.

    Parameters are named and laid out as in DeepSpeed's layer: attn_qkvw (3h, h), attn_qkvb (3h), attn_ow (h, h),
    attn_ob, attn_nw, attn_nb (h), inter_w (i, h), inter_b (i), output_w (h, i), output_b, norm_w, norm_b (h). The norm
    `attn_n*` follows attention; `norm_*` comes first with pre layer norm and last with post layer norm.

    >>> config = TransformerConfig(hidden_size=64, heads=4, num_hidden_layers=2)
    >>> layer = TransformerLayer(config)
    >>> layer(torch.zeros(2, 7, 64)).shape
    torch.Size([2, 7, 64])
    """

    def __init__(self, config: TransformerConfig):
        if not isinstance(config, TransformerConfig):
            raise KernelError(
                "the argument is not a TransformerConfig",
                where="config",
                got=type(config).__name__,
                want="fds.nn.TransformerConfig",
            )
        super().__init__()
        self.config = config
        h, i = config.hidden_size, config.intermediate_size
        self.attn_qkvw, self.attn_qkvb = _empty(3 * h, h), _empty(3 * h)
        self.attn_ow, self.attn_ob = _empty(h, h), _empty(h)
        self.attn_nw, self.attn_nb = _empty(h), _empty(h)
        self.inter_w, self.inter_b = _empty(i, h), _empty(i)
        self.output_w, self.output_b = _empty(h, i), _empty(h)
        self.norm_w, self.norm_b = _empty(h), _empty(h)
        self.reset_parameters()
        self.train(config.training)

    @staticmethod
    def spec(config: TransformerConfig) -> LayerSpec:
        """Return the layer for `fds.Layers`; of (hidden_states, attention_mask) it returns such a pair.

        Raises `KernelError` with `return_tuple`, since the next layer does not take such a tuple.
        """
        if config.return_tuple:
            raise KernelError(
                "the next layer does not take a tuple of one",
                where="return_tuple",
                got="True",
                want="return_tuple=False",
            )
        return LayerSpec(TransformerLayer, config)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial values."""
        ranges = {
            "attn_qkvw": self.config.initializer_range,
            "inter_w": self.config.initializer_range,
            "attn_ow": self.config.output_range,
            "output_w": self.config.output_range,
        }
        for name, p in self.named_parameters():
            if name in ranges:
                p.normal_(0.0, ranges[name])
            else:
                p.fill_(1.0 if name in ("attn_nw", "norm_w") else 0.0)

    def extra_repr(self) -> str:
        """Return the config's repr."""
        return repr(self.config)

    def forward(self, hidden_states: Any, attention_mask: Tensor | None = None) -> Any:
        """Return the layer's output, (B, S, h) in the dtype of the input.

        Args:
            hidden_states: (B, S, h) floating, or a pair of it and the mask, as layers of a stack pass it: then the
                result is such a pair.
            attention_mask: (B, S) bool, true where a token is attended to, or floating and added to the scores,
                broadcastable to (B, heads, S, S): (B, 1, 1, S) as Hugging Face extends it. It gets no gradient.

        If all keys of a query are masked (false, -inf or the smallest number), its attention output is zero.
        Raises `KernelError` for other shapes and dtypes, and for a batch beyond `config.batch_size`.
        """
        if isinstance(hidden_states, tuple):
            x, mask = _pair(hidden_states, attention_mask)
            return self._run(x, mask), mask
        y = self._run(hidden_states, attention_mask)
        return (y,) if self.config.return_tuple else y

    def _run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        pre = self.config.pre_layer_norm
        self._check(x, mask)
        seed = self._seed(x)
        z = self._norm(x, self.norm_w, self.norm_b) if pre else x
        a = F.linear(self._attend(z, mask, seed), self.attn_ow)
        u = self._add(a, self.attn_ob, x, seed, AFTER_ATTENTION)
        m = self._norm(u, self.attn_nw, self.attn_nb)
        y = self._add(self._feed_forward(m), self.output_b, u if pre else m, seed, AFTER_FEED_FORWARD)
        return y if pre else self._norm(y, self.norm_w, self.norm_b)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        config = self.config
        return layer_norm(x, weight, bias, eps=config.layer_norm_eps, invertible=config.normalize_invertible)

    def _attend(self, x: Tensor, mask: Tensor | None, seed: Tensor | None) -> Tensor:
        """Return the output of attention before the projection, (B, S, h)."""
        config, (b, s, h) = self.config, x.shape
        qkv = F.linear(x, self.attn_qkvw, self.attn_qkvb).view(b, s, 3, config.heads, h // config.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # their gradients are stacked in one copy
        out = self._attention(q, k, v, *_masks(mask), seed)
        return out.transpose(1, 2).reshape(b, s, h)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, bias: Tensor | None, seed: Tensor | None
    ) -> Tensor:
        config = self.config
        check_alone(q, k)
        p = config.attn_dropout_ratio if self.training else 0.0
        if p and is_left_to_torch("flash_attention", q):
            return scaled_dot_product(q, k, v, causal=config.causal, key_padding=padding, bias=bias, p=p)
        function = _select_attention(config, p)
        if function is masked_softmax:
            mask = bias if padding is None else padding[:, None, None, :]
            scores, scale = q @ k.transpose(-1, -2), q.shape[-1] ** -0.5
            options = {"scale": scale, "causal": config.causal, "p": p, "seed": seed if p else None}
            return masked_softmax(scores, mask, **options, offset=ATTENTION) @ v
        options = {"causal": config.causal, "key_padding": padding, "bias": bias, "p": p, "seed": seed if p else None}
        return function(q, k, v, **options, offset=ATTENTION)

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Return the second projection, without its bias."""
        z, approximate = F.linear(x, self.inter_w), self.config.approximate
        if self.config.gelu_checkpoint:
            return bias_gelu_linear(z, self.inter_b, self.output_w, approximate=approximate)
        return F.linear(bias_gelu(z, self.inter_b, approximate=approximate), self.output_w)

    def _add(self, x: Tensor, bias: Tensor, residual: Tensor, seed: Tensor | None, offset: int) -> Tensor:
        """Return residual + dropout(x + bias)."""
        p = self.config.hidden_dropout_ratio if self.training else 0.0
        if p and is_left_to_torch("bias_dropout_add", x):
            return residual + F.dropout(x + bias, p)
        return bias_dropout_add(x, bias, residual, p=p, seed=seed if p else None, offset=offset)

    def _seed(self, x: Tensor) -> Tensor | None:
        """Draw the seed of this call's dropouts, if any is active."""
        draws = self.training and (self.config.attn_dropout_ratio or self.config.hidden_dropout_ratio)
        return torch.randint(2**62, (), device=x.device) if draws else None

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        config = self.config
        arguments.floating(attn_qkvw=self.attn_qkvw, hidden_states=x)
        arguments.required(hidden_states=x)
        if not torch.is_autocast_enabled(x.device.type):
            arguments.same_dtype(attn_qkvw=self.attn_qkvw, hidden_states=x)
        arguments.shape((None, None, config.hidden_size), hidden_states=x)
        if config.batch_size is not None and x.shape[0] > config.batch_size:
            raise KernelError(
                "the batch is larger than config.batch_size",
                where="batch_size",
                got=f"{x.shape[0]} sequences",
                want=f"at most {config.batch_size}",
                hint="batch_size=None allows any",
            )
        if mask is not None:
            _check_mask(mask, x, config.heads)


def _select_attention(config: TransformerConfig, p: float) -> Callable[..., Tensor]:
    """Return the function for attention with dropout p."""
    if p:
        return flash_attention if config.attn_dropout_checkpoint else masked_softmax
    return attention


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def _pair(pair: tuple, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if len(pair) != 2 or mask is not None:
        raise KernelError(
            "the hidden states are not a pair with the mask",
            where="hidden_states",
            got=f"a tuple of {len(pair)}{'' if mask is None else ', and a mask beside it'}",
            want="a tensor, or (hidden_states, attention_mask)",
        )
    return pair


def _masks(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask as key padding and as bias, one of which is None."""
    if mask is None or mask.dim() == 2:
        return mask, None
    if mask.dtype == torch.bool:
        return None, torch.where(mask, 0.0, -torch.inf)
    mask = mask.detach()  # after a pipeline message it requires a gradient
    never = max(torch.finfo(mask.dtype).min, LEAST_BIAS)  # the smallest number of any dtype means -inf
    return None, mask.masked_fill(mask <= never, -torch.inf)


def _check_mask(mask: Tensor, x: Tensor, heads: int) -> None:
    b, s, _ = x.shape
    is_tensor = isinstance(mask, Tensor)
    is_bool = is_tensor and mask.dtype == torch.bool
    is_padding = is_bool and mask.shape == (b, s)
    is_bias = (
        is_tensor
        and (is_bool or mask.is_floating_point())
        and mask.dim() == 4
        and all(m in (1, n) for m, n in zip(mask.shape, (b, heads, s, s), strict=True))
    )
    if not (is_padding or is_bias):
        raise KernelError(
            "attention_mask does not fit the hidden states",
            where="attention_mask",
            got=f"{mask.dtype} {tuple(mask.shape)}" if is_tensor else type(mask).__name__,
            want=f"bool ({b}, {s}); or of four dimensions, bool or floating, broadcastable to ({b}, {heads}, {s}, {s})",
            hint="for a mask of zeros and ones pass mask.bool(), for a floating (B, S) mask mask[:, None, None, :]",
        )
    if mask.device != x.device:
        raise KernelError(
            "attention_mask is on another device than hidden_states",
            where="attention_mask",
            got=str(mask.device),
            want=str(x.device),
        )


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
