"""Models of transformers whose attention computes the blocks of a layout, by transformers' own attention interface.

An implementation named `fds_sparse` is registered, of attention and of its masks. The modules of a model say by an
attribute of their own which layouts they have, so that models of one process may have different ones.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds.attention_layouts import AttentionLayout, LayoutByLength
from fds.attention_layouts.by_length import Rule
from fds.collectives import Axis
from fds.errors import ComposeError, KernelError, is_a
from fds.hf._families import family_of, parts_of, sharing_copy
from fds.nn import sparse_attention

NAME = "fds_sparse"  # of the implementation
_SPARSITY = "fds_sparsity"  # of the attribute


@attrs.frozen(eq=False)
class Sparsity:
    """What a module of attention is told: its layouts, and the axis whose ranks pass parts of the same rows."""

    layouts: LayoutByLength
    axis: Axis | None


def sparsify(
    model: Any, layout: AttentionLayout | Rule, *, max_tokens: int | None = None, axis: Axis | None = None
) -> Any:
    """Return a copy of a model of transformers whose attention computes the blocks that a layout lists.

    Parameters and buffers are shared with the model, which stays as it is: what one trains the other has. Names in
    saves are the same; a model that is loaded again is made sparse again. With a layout of all blocks it computes what
    the model does. Decoders stay causal; padding masks, packed rows, masks of four dims and dropout mean what they do
    there. Any length runs that the model takes.

    Args:
        model: of BERT, RoBERTa, GPT-2 or Llama, with any head, without cross-attention.
        layout: of the model's heads or of one for all, and of the longest sequences, cropped to others; or a rule such
            as `fds.attention_layouts.bigbird`, or a configuration's `sparse_attention`: a function of heads and blocks.
        max_tokens: of a rule: it makes one layout, for so many tokens, which is cropped. Generation with a cache of
            keys needs this, or a layout.
        axis: whose ranks pass parts of the same rows, with `fds.context_parallel`; positions are to be passed.

    Raises `ComposeError` for a model of another family, with cross-attention, with `output_attentions`, or without
    attention; `AttentionLayoutError` for what is neither a layout nor a rule.
    """
    family = family_of(model, "sparsify")
    if axis is not None and not is_a(axis, Axis):
        raise ComposeError(
            "axis is not an axis", where="axis", got=repr(axis)[:80], want='fds.mesh(sp=-1)["sp"], or None'
        )
    sparsity = Sparsity(LayoutByLength(layout, max_tokens), axis)
    copied = sharing_copy(model)
    modules = [part for _, part in parts_of(copied, family.attention)]
    refused = [name for name in ("add_cross_attention", "output_attentions") if getattr(model.config, name, False)]
    if refused or not modules:
        raise ComposeError(
            "a layout is of a sequence's attention to itself, of which there are no weights to return",
            where="model",
            got=f"{type(model).__name__} with {', '.join(refused) or 'no attention'}",
            want=f"modules of class {family.attention}" + "".join(f", config.{x}=False" for x in refused),
        )
    _register()
    copied.set_attn_implementation(NAME)
    for part in modules:
        setattr(part, _SPARSITY, sparsity)
    return copied


def is_sparse(model: nn.Module) -> bool:
    """Return whether a model has modules of attention that `sparsify` made sparse."""
    return any(_SPARSITY in vars(part) for part in model.modules())


def _register() -> None:
    try:
        attention = importlib.import_module("transformers").AttentionInterface
        masking = importlib.import_module("transformers.masking_utils")
        masks = masking.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        want = "transformers 4.53 or later"
        raise ComposeError("attention cannot be registered", where="sparsify", got=str(error), want=want) from error
    attention.register(NAME, attend)
    masks.register(NAME, functools.partial(mask_of, masking))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention (B, S, H, D) as transformers calls it; without weights, which are never all there.

    The mask is what `mask_of` returns, or of four dims and the user's. Raises `KernelError` for what sparse attention
    does not compute.
    """
    sparsity: Sparsity | None = getattr(module, _SPARSITY, None)
    if sparsity is None:
        raise KernelError(
            "a module has no layout",
            where=f"{type(module).__name__}, attn_implementation={NAME!r}",
            want="a model that fds.hf.sparsify(model, layout) returns",
        )
    refused = [name for name in ("output_attentions", "position_bias", "softcap", "s_aux") if options.get(name)]
    if refused:
        raise KernelError("sparse attention has no such thing", where=type(module).__name__, got=", ".join(refused))
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    causal = bool(causal) and getattr(getattr(module, "config", None), "is_causal", True) is not False
    masks: dict[str, Any] = {}
    if attention_mask is not None and attention_mask.dim() == 4:
        causal, masks = False, {"bias": _as_bias(attention_mask)}
    elif attention_mask is not None:
        masks = {"key_padding" if attention_mask.dtype == torch.bool else "documents": attention_mask}
    if query.shape[2] != key.shape[2]:
        out = _with_cache(sparsity.layouts, query, key, value, masks, causal, scaling, dropout)
        return out.transpose(1, 2), None
    seed = torch.randint(2**62, (), device=query.device) if dropout else None
    out = sparse_attention(
        query, key, value, sparsity.layouts, axis=sparsity.axis, causal=causal, scale=scaling, p=dropout, seed=seed,
        **masks,
    )  # fmt: skip
    return out.transpose(1, 2), None


def _as_bias(mask: Tensor) -> Tensor:
    """Return a mask of four dims as a bias: -inf where it has the smallest number of its dtype."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise KernelError(
            "a mask of integers is not added to scores", where="attention_mask",
            got=f"{tuple(mask.shape)} {mask.dtype}", want="bool, True where a key is seen, or floating-point numbers",
            hint="attention_mask.bool() of a mask of ones and zeros",
        )  # fmt: skip
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -math.inf)


def _with_cache(
    layouts: LayoutByLength,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: dict[str, Any],
    causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Return attention of the last tokens to all of them, whose keys were cached: over all keys, with a mask.

    Raises `KernelError` where tokens before would see other keys by now than they did.
    """
    m, n = query.shape[2], key.shape[2]
    if not layouts.is_cropped or masks.keys() - {"key_padding"}:
        raise KernelError(
            "keys were cached under the layout of a shorter sequence, or a mask does not say of which tokens they are",
            where="past_key_values",
            got=f"{n - m} keys, and {m} more" + f", {', '.join(masks)}" * bool(masks),
            want="a layout that is cropped, so that a token sees the same however long the sequence is; a mask (B, S)",
            hint="sparsify(model, rule, max_tokens=...), or use_cache=False",
        )
    seen = _rows(layouts.at(query.shape[1], n), m, n, causal).to(query.device)
    if (padding := masks.get("key_padding")) is not None:
        seen = seen & padding[:, None, None, -n:]
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )


def _rows(layout: AttentionLayout, m: int, n: int, causal: bool) -> Tensor:
    """Return which of n keys the last m queries see, (H or 1, m, n)."""
    tokens = np.arange(n - m, n)
    blocks, which = np.unique(tokens // layout.block, return_inverse=True)
    listed = np.zeros((len(layout.patterns), len(blocks), layout.blocks), np.bool_)
    for i, pattern in enumerate(layout.patterns):
        for r, row in enumerate(blocks.tolist()):
            listed[i, r, pattern.row(row)] = True
    seen = listed[list(layout.heads)][:, which].repeat(layout.block, axis=2)[:, :, :n]
    return torch.from_numpy(seen & (np.arange(n) <= tokens[:, None]) if causal else seen)


def mask_of(
    masking: Any,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Return what attention needs to know beside the layout: key padding (B, S) bool, documents (B, S), or None.

    `masking` is transformers' module of masks. A mask that says more is one of four dims, of tokens by tokens. Raises
    `KernelError` for a cache of fixed size, or of a window.
    """
    if isinstance(q_offset, Tensor) or kv_offset or kv_length != q_offset + q_length:
        raise KernelError(
            "a cache has other keys than those of the tokens so far",
            where="past_key_values",
            got=f"{kv_length} keys from {kv_offset} on, {q_length} queries",
            want="a DynamicCache",
        )
    if mask_function in (masking.causal_mask_function, masking.bidirectional_mask_function):
        return attention_mask
    if attention_mask is None and (documents := _documents(mask_function, masking.causal_mask_function)) is not None:
        return documents
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking.sdpa_mask(
        batch_size, q_length, kv_length, mask_function=mask_function, attention_mask=attention_mask, **options
    )


def _documents(mask_function: Any, causal: Any) -> Tensor | None:
    """Return the documents (B, S) of packed rows, where a mask keeps these apart and is causal, and says no more.

    transformers makes such a mask where positions begin anew in a row; None for any other mask, and in torch.compile.
    """
    if torch.compiler.is_compiling():
        return None
    closure = lambda function: inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    both = closure(mask_function).get("mask_functions", ())
    if len(both) != 2:
        return None
    packed, remapped = map(closure, both)
    documents = packed.get("packed_sequence_mask")
    is_plain = packed.keys() == {"packed_sequence_mask"} and remapped.get("mask_function") is causal
    return documents if is_plain and remapped.keys() == {"mask_function", "position_ids"} else None
