"""GPT-2 124M as nanoGPT trains it, in plain PyTorch and made of fds's kernels, and batches of random tokens.

B sequences of T tokens, W width, H heads, D = W / H, V vocabulary: `x_BTW` is a tensor of shape (B, T, W).
"""

from __future__ import annotations

import math

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds import kernels


@attrs.frozen
class Sizes:
    """GPT-2 124M; 50257 tokens are padded to a multiple of 128."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    context: int = 1024

    def flops_per_token(self, model: nn.Module) -> int:
        """Return 6 N + 12 layers W T (forward and backward; N without position embeddings; Chowdhery et al. 2022, B).

        Attention counts in full, as if nothing were masked, and what is computed again does not count.
        """
        parameters = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("positions"))
        return 6 * parameters + 12 * self.layers * self.width * self.context


GPT2, TINY = Sizes(), Sizes(layers=2, width=32, heads=2, vocabulary=128, context=16)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and with a residual connection; no biases."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.merge = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return the output (B, T, W)."""
        x_BTW = x_BTW + self.merge(joined(causal(*self.split(self.norm_attention(x_BTW)))))
        return x_BTW + self.down(F.gelu(self.up(self.norm_mlp(x_BTW))))

    def split(self, x_BTW: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, (B, H, T, D) each."""
        qkv_BTHD = self.qkv(x_BTW).unflatten(-1, (3 * self.heads, -1))
        return qkv_BTHD.transpose(1, 2).chunk(3, dim=1)


def causal(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """Return causal attention by torch, (B, H, T, D)."""
    return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)


def joined(y_BHTD: Tensor) -> Tensor:
    """Return heads side by side, (B, T, W)."""
    return y_BHTD.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """The model in plain PyTorch: `model(tokens, targets)`, both (B, T) int64, is the mean cross-entropy in nats."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)  # the output projection too
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                inward = not name.endswith(("merge.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 if inward else 0.02 / math.sqrt(2 * sizes.layers))

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the sum of both embeddings, (B, T, W)."""
        return self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss, ()."""
        x_BTW = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        logits_BTV = F.linear(self.norm(x_BTW), self.tokens.weight)
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


class FusedGPT(GPT):
    """The same parameters and the same function, made of `fds.kernels`: an addition goes with the norm after it."""

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss, ()."""
        x_BTW, branch_BTW = self.embed(tokens_BT), None
        for block in self.blocks:
            y_BTW, x_BTW = added(branch_BTW, x_BTW, block.norm_attention)
            heads_BHTD = kernels.attention(*block.split(y_BTW), causal=True)
            y_BTW, x_BTW = added(block.merge(joined(heads_BHTD)), x_BTW, block.norm_mlp)
            branch_BTW = block.down(kernels.bias_gelu(block.up(y_BTW), None, approximate="none"))
        y_BTW, _ = added(branch_BTW, x_BTW, self.norm)
        return kernels.linear_cross_entropy(y_BTW.flatten(0, 1), self.tokens.weight, targets_BT.flatten())


def added(branch_BTW: Tensor | None, x_BTW: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return the norm of x and a branch, and their sum."""
    if branch_BTW is None:
        return kernels.layer_norm(x_BTW, norm.weight, eps=norm.eps), x_BTW
    return kernels.add_layer_norm(branch_BTW, x_BTW, norm.weight, eps=norm.eps)


def batches(sizes: Sizes, rows: int, device: torch.device, *, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return batches of random tokens, the same everywhere: (tokens, targets), both (rows, T).

    Small ones are frequent, so that there is something to learn: a contender that does not train is seen by its loss.
    """
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(count, rows, sizes.context + 1, generator=generator, dtype=torch.float64)
    tokens = (chance.pow(8) * sizes.vocabulary).long().to(device)
    return [(some[:, :-1].contiguous(), some[:, 1:].contiguous()) for some in tokens]
