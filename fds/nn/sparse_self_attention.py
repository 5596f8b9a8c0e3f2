"""`SparseSelfAttention`: attention over the blocks of a layout, with masks as DeepSpeed has them; and BERT's.

    out = softmax(q k^T / sqrt(D) + rpe + key_padding_mask + attn_mask) v  over the blocks that are listed

where a mask of mode "mul" adds -inf in the place of 0 and nothing elsewhere. The softmax is computed in float32.
Source: DeepSpeed 0.19.6, ops/sparse_attention: names, modes and defaults.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fds.attention_layouts import AttentionLayout, LayoutByLength, fixed
from fds.attention_layouts.by_length import Rule
from fds.collectives import Axis
from fds.errors import KernelError, is_a, is_int
from fds.kernels import arguments
from fds.nn.parallel import checking
from fds.nn.parallel.sparse_attention import sparse_attention

Mode = Literal["add", "mul"]
MODES = ("add", "mul")


class SparseSelfAttention(nn.Module):
    """Attention of each head to the blocks that a layout lists. It has no parameters.

    Args:
        sparsity_config: a layout, which is cropped to shorter sequences; or a rule such as
            `fds.attention_layouts.bigbird`, a function of heads and blocks.
        key_padding_mask_mode: whether a key padding mask is added to scores, "add", or says by 0 what is not seen.
        attn_mask_mode: likewise of an attention mask.
        max_seq_length: the longest sequences: a rule makes one layout for them, which is cropped to shorter ones, as in
            DeepSpeed. None makes a layout for each length. Of a layout it says nothing.
        axis: of `fds.context_parallel`, whose ranks pass parts of the same rows; see `fds.nn.sparse_attention`.

    Any length runs: the last block may be partly empty. Raises `KernelError` for other modes, and
    `AttentionLayoutError` for what is neither a layout nor a rule.

    >>> from fds.attention_layouts import bslongformer
    >>> attention = SparseSelfAttention(bslongformer, max_seq_length=None)
    >>> attention(*torch.zeros(3, 2, 4, 100, 8)).shape
    torch.Size([2, 4, 100, 8])
    """

    def __init__(
        self,
        sparsity_config: AttentionLayout | Rule = fixed,
        key_padding_mask_mode: Mode = "add",
        attn_mask_mode: Mode = "mul",
        max_seq_length: int | None = 2048,
        *,
        axis: Axis | None = None,
    ):
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in MODES:
                raise KernelError(
                    "there is no such mode of a mask",
                    where=name,
                    got=repr(mode)[:80],
                    want=" or ".join(map(repr, MODES)),
                )
        if axis is not None:
            checking.axis("SparseSelfAttention", axis, KernelError)
        super().__init__()
        most = None if is_a(sparsity_config, AttentionLayout) else max_seq_length
        self.layouts = LayoutByLength(sparsity_config, most)
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.axis = axis

    def extra_repr(self) -> str:
        """Return the layouts and modes as text."""
        return f"{self.layouts}, {self.key_padding_mask_mode!r}, {self.attn_mask_mode!r}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Return what each query attends to, (B, H, S, D); zeros where it sees no key.

        Args:
            query: (B, H, S, D) floating.
            key: (B, G, S, D), where G divides H.
            value: as key.
            rpe: floating, broadcastable to (B, H, S, S), added to the scores: a relative position embedding, which gets
                a gradient where it requires one.
            key_padding_mask: (B, S), or (B, 1, 1, S) as transformers extends it: of mode "add" floating, or bool, True
                where a key is seen; of mode "mul" of any dtype, 0 where it is not.
            attn_mask: (S, S), or such a shape with dims of 1 before it, likewise.

        Masks get no gradient. Raises `KernelError` for other shapes and dtypes, `AttentionLayoutError` for more tokens
        than the layout has.
        """
        arguments.required(query=query, key=key, value=value)
        arguments.floating(query=query, key=key, value=value, rpe=rpe)
        arguments.shape((None, None, None, None), query=query)
        b, _, s, _ = query.shape
        wide = arguments.width(query)
        padding, added = None, rpe
        if key_padding_mask is not None:
            mask = _masked("key_padding_mask", key_padding_mask, (b, s), self.key_padding_mask_mode)
            padding, mask = (mask, None) if mask.dtype == torch.bool else (None, mask[:, None, None, :])
            added = _sum(added, mask, wide)
        if attn_mask is not None:
            added = _sum(added, _masked("attn_mask", attn_mask, (s, s), self.attn_mask_mode), wide)
        return sparse_attention(query, key, value, self.layouts, axis=self.axis, key_padding=padding, bias=added)


def _masked(name: str, mask: Tensor, shape: tuple[int, int], mode: str) -> Tensor:
    """Return a mask of this shape: bool, True where a key is seen; or floating, added to scores."""
    if not is_a(mask, Tensor) or tuple(n for n in mask.shape if n != 1) != tuple(n for n in shape if n != 1):
        raise KernelError(
            f"{name} has another shape",
            where=name,
            got=str(tuple(mask.shape)) if is_a(mask, Tensor) else type(mask).__name__,
            want=f"{shape}, or with dims of 1",
        )
    mask = mask.detach().reshape(shape)
    if mask.dtype == torch.bool or mode == "mul":
        return mask != 0
    if not mask.is_floating_point():
        raise KernelError(
            f"{name} of integers is not added to scores",
            where=name,
            got=str(mask.dtype),
            want="floating-point numbers, or bool",
            hint=f'{name}.bool() of a mask of ones and zeros, or {name}_mode="mul"',
        )
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -math.inf)  # of float16 the smallest means it too


def _sum(bias: Tensor | None, mask: Tensor | None, wide: torch.dtype) -> Tensor | None:
    """Return a bias and a mask as one that is added to scores."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == torch.bool:
        return bias.to(wide).masked_fill(~mask, -math.inf)
    return bias.to(wide) + mask.to(wide)


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention over the blocks of a layout, with the parameters of transformers' `BertSelfAttention`.

    They are `query`, `key` and `value`, linear layers of width h = `hidden_size`:
    `layer.load_state_dict(bert_self_attention.state_dict())` takes weights, and `of` shares them. Dropout of weights is
    DeepSpeed's: none.

    Args:
        config: has `hidden_size` and `num_attention_heads`, as a `BertConfig`.
        sparsity_config: as of `SparseSelfAttention`.
        max_seq_length: likewise.
        axis: likewise.

    Raises `KernelError` for a config without such sizes, and heads that do not divide the width.
    """

    def __init__(
        self,
        config: Any,
        sparsity_config: AttentionLayout | Rule = fixed,
        *,
        max_seq_length: int | None = 2048,
        axis: Axis | None = None,
    ):
        width, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
        if not is_int(width, 1) or not is_int(heads, 1) or width % heads:
            raise KernelError(
                "config does not say how wide BERT is, or its heads do not divide the width",
                where="config",
                got=f"hidden_size={width!r:.20}, num_attention_heads={heads!r:.20}",
                want="such as transformers.BertConfig(), hidden_size a multiple of num_attention_heads",
            )
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, width // heads, width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=max_seq_length, axis=axis)

    @classmethod
    def of(
        cls, attention: nn.Module, sparsity_config: AttentionLayout | Rule = fixed, **options: Any
    ) -> BertSparseSelfAttention:
        """Return sparse attention that shares the parameters of a `BertSelfAttention`, or of one of RoBERTa.

        Raises `KernelError` for another module.
        """
        config, names = getattr(attention, "config", None), ("query", "key", "value")
        if not all(type(getattr(attention, name, None)) is nn.Linear for name in names):
            raise KernelError(
                "not the self-attention of BERT",
                where="attention",
                got=type(attention).__name__,
                want="a BertSelfAttention of transformers: model.encoder.layer[0].attention.self",
            )
        with torch.device("meta"):
            sparse = cls(config, sparsity_config, **options)
        for name in names:
            setattr(sparse, name, getattr(attention, name))
        return sparse.train(attention.training)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the heads' outputs side by side, (B, S, h).

        Args:
            hidden_states: (B, S, h) floating.
            attention_mask: of keys, as `SparseSelfAttention` takes it by mode "add": (B, S) or (B, 1, 1, S).

        Raises `KernelError` for other shapes and dtypes.
        """
        arguments.required(hidden_states=hidden_states)
        arguments.floating(hidden_states=hidden_states)
        arguments.shape((None, None, self.query.in_features), hidden_states=hidden_states)
        q, k, v = (
            layer(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.sparse_self_attention(q, k, v, key_padding_mask=attention_mask).transpose(1, 2).flatten(2)
