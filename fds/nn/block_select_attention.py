"""`BlockSelectAttention`: self-attention in which each token chooses the blocks of keys that it sees, as in MoBA.

    q, k, v = qkv(x)        k_t += silu(sum_w weight_w * k_(t-w))        w from 0 to key_convolution - 1
    y = out(softmax(q k^T / sqrt(d)) v  over the blocks that q and k choose)

The short convolution of keys, a weight for each feature, lets tokens side by side be found together. It is zero at
first. Positions turn q and k after it.
Sources: those of fds.kernels.block_selection; the convolution: Xiao et al. 2025, arXiv:2511.11571, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds.errors import LossError, is_int
from fds.kernels import BlockSelection, arguments, select_blocks, sparse_attention
from fds.nn.parallel import checking, tokens
from fds.nn.parallel.layers import check_heads, turned
from fds.nn.parallel.region import heads_around


class BlockSelectAttention(nn.Module):
    """Attention of a sequence to its own block and to those that each token, or row of tokens, chooses.

    Args:
        width: of its input and output.
        num_heads: of queries, each of which chooses.
        top: blocks that are chosen beside the own one. All of them make it dense attention.
        block: tokens of a block.
        together: tokens that choose as one; a divisor of `block`.
        num_kv_heads: of keys and values, by which the heads of queries are grouped; as many as those if None.
        causal: whether a token sees none that follow it.
        bias: whether the projections `qkv` ((heads + 2 * groups) * d, width) and `out` (width, width) have biases.
        theta: base of rotary positions (10000.0); None for none.
        key_convolution: tokens that the convolution of keys covers, with `key_weight` (groups * d, key_convolution); 0
            for none.

    Neither a tensor axis nor a sequence axis divides it. Raises `LossError` for heads that do not divide the width,
    groups that do not divide the heads, and numbers out of range.

    >>> attention = BlockSelectAttention(32, 4, top=2, block=16, key_convolution=3)
    >>> y, selection = attention(torch.zeros(2, 100, 32))
    >>> y.shape, selection.chosen.shape
    (torch.Size([2, 100, 32]), torch.Size([2, 4, 100, 3]))
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        top: int,
        block: int = 64,
        together: int = 1,
        num_kv_heads: int | None = None,
        causal: bool = True,
        bias: bool = True,
        theta: float | None = None,
        key_convolution: int = 0,
        **factory: Any,
    ):
        name = "BlockSelectAttention"
        checking.sizes(name, block=block, together=together)
        checking.flags(name, LossError, causal=causal, bias=bias)
        checking.factory(name, factory)
        for what, number in (("top", top), ("key_convolution", key_convolution)):
            if not is_int(number, 0):
                raise LossError(f"{name}: {what} is a number", where=what, got=repr(number)[:80], want="an int >= 0")
        if block % together:
            got, want = f"{together} of blocks of {block}", f"a divisor of {block}"
            raise LossError(f"{name}: tokens that choose as one divide a block", where="together", got=got, want=want)
        super().__init__()
        groups, d = check_heads(name, width, num_heads, num_kv_heads, theta)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, groups, d
        self.top, self.block, self.together, self.causal, self.theta = top, block, together, causal, theta
        self.qkv = nn.Linear(width, (num_heads + 2 * groups) * d, bias, **factory)
        self.out = nn.Linear(width, width, bias, **factory)
        self.key_weight = nn.Parameter(torch.zeros(groups * d, key_convolution, **factory)) if key_convolution else None

    def forward(
        self,
        x: Tensor,
        *,
        selection: BlockSelection | None = None,
        key_padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, BlockSelection]:
        """Return what each token attends to (B, S, width), given (B, S, width), and which blocks were chosen.

        Args:
            x: (B, S, width).
            selection: of an earlier call, to be taken in the place of a choice.
            key_padding: (B, S) bool, False where a token is padding.
            documents: (B, S) int32 or int64, side by side: a token sees those of the same number alone.

        Raises `KernelError` for inputs, masks and selections of other shapes or dtypes, and `LossError` where this rank
        has a part of a row's tokens, or of the heads.
        """
        if (region := heads_around()) is not None and region.axis.size > 1:
            raise LossError(
                "the rows of qkv are queries, keys and values, and a part of them is not those of some heads",
                where="BlockSelectAttention, in a module that tensor_parallel divides by heads",
                got=f"{region.axis.size} ranks", want="a plan that leaves it whole",
            )  # fmt: skip
        arguments.required(x=x)
        arguments.floating(x=x)
        arguments.shape((None, None, self.qkv.in_features), x=x)
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(counts, 1)
        arguments.attention(q, k, v, key_padding, None, None, 0.0, documents)
        tokens.check_alone(q, k)
        if self.key_weight is not None:
            near = _convolved(k, self.key_weight.view(self.num_kv_heads, self.head_dim, -1), documents)
            k = (k + F.silu(near)).to(k.dtype)  # under autocast the weight is wider than k
        if self.theta is not None:
            q, k = turned(q, self.theta), turned(k, self.theta)
        masks = {"key_padding": key_padding, "documents": documents, "causal": self.causal}
        if selection is None:
            selection = select_blocks(q, k, top=self.top, block=self.block, together=self.together, **masks)
        y = sparse_attention(q, k, v, selection, **masks)
        return self.out(y.transpose(1, 2).flatten(2)), selection


def _convolved(k: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    """Return sums of keys (B, G, S, D) with those before them, of the same document, by weights (G, D, taps)."""
    total = k * weight[..., 0][:, None]
    for w in range(1, weight.shape[2]):
        before = F.pad(k, (0, 0, w, 0))[:, :, : k.shape[2]]
        if documents is not None:
            is_same = documents == F.pad(documents, (w, 0))[:, : k.shape[2]]
            before = before * is_same[:, None, :, None]
        total = total + before * weight[..., w][:, None]
    return total
