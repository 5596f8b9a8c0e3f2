"""A copy of an `nn.MultiheadAttention` of which every rank of a tensor axis has some of the heads.

q, k, v = enter(x) @ W_r^T + b_r          for this rank's heads
y = leave(attention(q, k, v) @ W_out_r^T) + b_out
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds.nn.parallel import mappings
from fds.nn.parallel.dropout import attention
from fds.nn.parallel.linear import Piece


class PartAttention(Piece, nn.MultiheadAttention):
    """A copy of an `nn.MultiheadAttention` of this rank's heads; arguments and results are those of torch."""

    cross: bool = False  # whether keys and values are whole where queries are parts of sequences

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention over all heads, and, with `need_weights`, the weights of all of them, or their mean."""
        region = self.region
        assert region is not None
        batched = query.dim() == 3
        given = (query, key, value)
        q, k, v = self._projected(given)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(key_padding_mask, attn_mask, q)
        causal = is_causal and key_padding_mask is None and not need_weights
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            out, weights = self._with_weights(q, k, v, mask, p, average=average_attn_weights)
        else:
            out = attention(region, q, k, v, None if causal else mask, p, causal)
        out = out.permute(2, 0, 1, 3).flatten(2)  # (sequence, batch, features), as torch has it
        out = region.leave(F.linear(out, self.out_proj.weight), run=self.run, dim=-3)
        if self.out_proj.bias is not None:
            out = out + self.out_proj.bias
        if not batched:
            out = out.squeeze(1)
        elif self.batch_first:
            out = out.transpose(0, 1)
        return out, weights if weights is None or batched else weights.squeeze(0)

    def _projected(self, given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Return queries, keys and values of this rank's heads."""
        region, run = self.region, self.run
        assert region is not None
        bias = self.in_proj_bias
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif given[0] is given[1] is given[2]:
            entered = region.enter(given[0], run=run)
            return [*F.linear(entered, self.in_proj_weight, bias).chunk(3, -1)]
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        runs = {id(x): None if self.cross else run for x in given} | {id(given[0]): run}
        entered = {id(x): region.enter(x, run=runs[id(x)]) for x in given}
        return [F.linear(entered[id(x)], w, b) for x, w, b in zip(given, weights, biases, strict=True)]

    def _mask(self, padding: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Return both masks as one that is added, for this rank's heads."""
        assert self.region is not None
        found, axis = None, self.region.axis  # learned ones have a term of their gradient on every rank
        if mask is not None:
            mask = mappings.copied(mask, axis) if mask.requires_grad else mask
            found = _added(mask, q)
            if found.dim() == 3:  # of every head of every sequence
                per = found.unflatten(0, (q.shape[0], -1))
                found = per if per.shape[1] == q.shape[1] else per.narrow(1, self._first_head(q), q.shape[1])
        if padding is not None:
            padding = mappings.copied(padding, axis) if padding.requires_grad else padding
            padding = _added(padding, q)
            padding = padding[None] if padding.dim() == 1 else padding
            found = padding[:, None, None, :] if found is None else found + padding[:, None, None, :]
        return found

    def _first_head(self, q: Tensor) -> int:
        assert self.region is not None
        return self.region.axis.index * q.shape[1]

    def _with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, *, average: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the result, and the weights of all ranks' heads, after dropout as torch's are."""
        region = self.region
        assert region is not None
        identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
        weights = attention(region, q, k, identity, mask, p)
        if average:
            all_weights = mappings.summed(weights.sum(1), region.axis) / (weights.shape[1] * region.axis.size)
        else:
            all_weights = mappings.joined(weights, region.axis, 1)
        return weights @ v, all_weights


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask, of which True stands for what is not attended to, as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf)
