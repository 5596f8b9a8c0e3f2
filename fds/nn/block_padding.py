"""`pad_to_block` and `unpad`: sequences whose length is a multiple of a block, as other sparse attention needs them.

That of fds takes any length. Source: DeepSpeed 0.19.6, ops/sparse_attention/sparse_attention_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.errors import KernelError, is_a, is_int


class Padded(NamedTuple):
    """What `pad_to_block` returns: by how many tokens it padded, and what it was given, padded."""

    pad_len: int
    input_ids: Tensor | None
    attention_mask: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    inputs_embeds: Tensor | None


def pad_to_block(
    block_size: int,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    pad_token_id: int = 0,
    model_embeddings: Callable[[Tensor], Tensor] | None = None,
) -> Padded:
    """Return the inputs of a model, padded at the end to a multiple of a block, as a named tuple.

    Args:
        block_size: tokens of a block.
        input_ids: (B, S) integers, padded with `pad_token_id`.
        attention_mask: (B, S), 0 or False where a token is padding, as what is added is. Where it is None and tokens
            are added, one of int64 is made.
        token_type_ids: (B, S) integers, padded with 0.
        position_ids: (B, S) or (1, S) integers, padded with `pad_token_id`, which has a position in any table.
        inputs_embeds: (B, S, h), padded with the embeddings of `pad_token_id`.
        pad_token_id: of the model's configuration.
        model_embeddings: a function of ids (B, n) to embeddings (B, n, h), which `inputs_embeds` needs.

    Raises `KernelError` for neither ids nor embeddings, other shapes, and embeddings without a function.

    >>> pad_to_block(4, torch.tensor([[5, 6, 7, 8, 9]]), pad_token_id=1)[:3]
    (3, tensor([[5, 6, 7, 8, 9, 1, 1, 1]]), tensor([[1, 1, 1, 1, 1, 0, 0, 0]]))
    """
    for name, value, least in (("block_size", block_size, 1), ("pad_token_id", pad_token_id, 0)):
        if not is_int(value, least):
            raise KernelError(f"{name} is a number", where=name, got=repr(value)[:80], want=f"an int >= {least}")
    first: Any = inputs_embeds if input_ids is None else input_ids
    if not is_a(first, Tensor) or first.dim() < 2:
        raise KernelError(
            "there is nothing to pad",
            where="input_ids, inputs_embeds",
            got="neither" if first is None else repr(getattr(first, "shape", first))[:80],
            want="(B, S), or (B, S, h)",
        )
    b, s = first.shape[:2]
    named = {
        "input_ids": (input_ids, 2), "attention_mask": (attention_mask, 2), "token_type_ids": (token_type_ids, 2),
        "position_ids": (position_ids, 2), "inputs_embeds": (inputs_embeds, 3),
    }  # fmt: skip
    for name, (x, dims) in named.items():
        _check_inputs(name, x, dims, b, s)
    n = -s % block_size
    if not n:
        return Padded(0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
    if attention_mask is None:
        attention_mask = torch.ones(b, s, dtype=torch.int64, device=first.device)
    if inputs_embeds is not None:
        if not callable(model_embeddings):
            raise KernelError(
                "embeddings are padded with those of a token",
                where="model_embeddings",
                got=repr(model_embeddings)[:80],
                want="the model's: model.get_input_embeddings()",
            )
        ids = torch.full((b, n), pad_token_id, dtype=torch.int64, device=inputs_embeds.device)
        added, shape = model_embeddings(ids), (b, n, inputs_embeds.shape[2])
        if not is_a(added, Tensor) or tuple(added.shape) != shape:
            raise KernelError(
                "a function returns no embeddings of ids",
                where="model_embeddings",
                got=str(tuple(added.shape)) if is_a(added, Tensor) else type(added).__name__,
                want=str(shape),
            )
        inputs_embeds = torch.cat([inputs_embeds, added.to(inputs_embeds.dtype)], 1)
    padded = lambda x, value: None if x is None else F.pad(x, (0, n), value=value)
    return Padded(
        n, padded(input_ids, pad_token_id), padded(attention_mask, 0), padded(token_type_ids, 0),
        padded(position_ids, pad_token_id), inputs_embeds,
    )  # fmt: skip


def _check_inputs(name: str, x: Any, dims: int, b: int, s: int) -> None:
    if x is None:
        return
    rows = (1, b) if name == "position_ids" else (b,)
    if not is_a(x, Tensor) or x.dim() != dims or x.shape[0] not in rows or x.shape[1] != s:
        raise KernelError(
            f"{name} has another shape",
            where=name,
            got=str(tuple(x.shape)) if is_a(x, Tensor) else type(x).__name__,
            want=f"({b}, {s}{', h' * (dims == 3)})",
        )


def unpad(pad_len: int, sequence_output: Tensor) -> Tensor:
    """Return (B, S, ...) without the last `pad_len` tokens. Raises `KernelError` for more than there are."""
    if not is_a(sequence_output, Tensor) or sequence_output.dim() < 2:
        raise KernelError(
            "not the outputs of a sequence",
            where="sequence_output",
            got=repr(getattr(sequence_output, "shape", sequence_output))[:80],
            want="(B, S, ...)",
        )
    if not is_int(pad_len, 0) or pad_len > sequence_output.shape[1]:
        raise KernelError(
            "pad_len is how many tokens were added",
            where="pad_len",
            got=repr(pad_len)[:80],
            want=f"0 to {sequence_output.shape[1]}: the first of what pad_to_block returns",
        )
    return sequence_output[:, : sequence_output.shape[1] - pad_len]
