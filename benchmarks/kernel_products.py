"""Work around matrix products: probabilities, losses, attention and the transformer layer, beside torch's ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.goals import (
    COMPILED,
    COPY_FORWARD,
    LAYER_BESIDE_COMPILED,
    LAYER_BESIDE_EAGER,
    LINEAR_LOSS_MEMORY,
    LINEAR_LOSS_TIME,
)
from benchmarks.kernel_layers import layers
from benchmarks.kernel_peers import peers
from benchmarks.kernel_streams import BF16, drawn, phases, together, words
from benchmarks.kernel_works import Goals, Setting, Way, Work, ways_beside
from fds.kernels.flash import flash_attention
from fds.kernels.head_loss import linear_cross_entropy
from fds.kernels.softmax import masked_softmax
from fds.kernels.token_loss import cross_entropy

DROPOUT = 0.1
GPT2_VOCABULARY, LLAMA_VOCABULARY = 50257, 128256
PHASES = ("forward", "backward", "both")


def padding(b: int, s: int):
    """Return what draws a mask to be added, (b, 1, 1, s): the last tokens of each row are padding."""

    def draw(g: torch.Generator) -> Tensor:
        lengths = torch.randint(s // 2, s + 1, (b, 1), generator=g, device=g.device)
        hidden = torch.arange(s, device=g.device) >= lengths
        return torch.zeros(b, 1, 1, s, device=g.device, dtype=BF16).masked_fill(hidden[:, None, None, :], -10000.0)

    return draw


def torch_softmax(scores: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return attention's probabilities by torch, as models have it."""
    return F.dropout((scores * 0.125 + mask).softmax(-1), p)


def softmaxes(setting: Setting) -> Iterator[Work]:
    """Yield attention's probabilities with mask and dropout, of which no goal speaks."""
    b, heads, s = (2, 2, 6) if setting.tiny else (16, 16, 512)
    ways = ways_beside(setting, lambda **given: masked_softmax(**given, scale=0.125, seed=1), torch_softmax)
    given = together(scores=drawn(b, heads, s, s, dtype=BF16), mask=padding(b, s))
    none = (None, None)
    yield from phases("masked_softmax", b * heads * s, s, given, ways, (3, 3), dropout=DROPOUT, goals=none)


def targets(n: int, vocabulary: int):
    """Return what draws targets, one in ten of them ignored."""

    def draw(g: torch.Generator) -> Tensor:
        drawn = torch.randint(vocabulary, (n,), generator=g, device=g.device)
        return drawn.masked_fill(torch.rand(n, generator=g, device=g.device) < 0.1, -100)

    return draw


def torch_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss by torch, in float32 as models compute it."""
    return F.cross_entropy(logits.float(), targets)


def torch_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss by torch: all logits at once."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def losses(setting: Setting) -> Iterator[Work]:
    """Yield the losses over a vocabulary, and the head's with it."""
    for n, v in [(6, 123)] if setting.tiny else [(8192, GPT2_VOCABULARY), (8192, LLAMA_VOCABULARY)]:
        ways = ways_beside(setting, cross_entropy, torch_cross_entropy, *peers(setting, "cross_entropy"))
        given = together(logits=drawn(n, v, dtype=BF16), targets=targets(n, v))
        goals = (COPY_FORWARD, COPY_FORWARD)
        yield from phases("cross_entropy", n, v, given, ways, (1, 2), goals=goals, compiled=COMPILED)
    h = setting.size(768, 16)
    goals = Goals(None, {"torch eager": LINEAR_LOSS_TIME}, {"torch eager": LINEAR_LOSS_MEMORY})
    for n, v in [(42, 123)] if setting.tiny else [(8192, GPT2_VOCABULARY), (32768, GPT2_VOCABULARY)]:
        others = peers(setting, "linear_cross_entropy")
        ways = ways_beside(setting, linear_cross_entropy, torch_linear_cross_entropy, *others)
        scaled = lambda g, v=v: (torch.randn(v, h, generator=g, device=g.device) * h**-0.5).to(BF16).requires_grad_()
        given = together(hidden=drawn(n, h, dtype=BF16), weight=scaled, targets=targets(n, v))
        oracle = Way("oracle", lambda hidden, weight, targets: F.cross_entropy(hidden @ weight.t(), targets))
        yield Work(
            "linear_cross_entropy",
            words(n, h, v),
            "both",
            given,
            ways,
            oracle,
            goals=goals,
            oracle_dtype=torch.float32,
            flops=3 * 2 * n * h * v,  # the logits, and the two gradients from theirs
        )


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Return attention by products and a softmax; causal without a mask."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is None:
        mask = torch.full(scores.shape[-2:], -math.inf, device=q.device, dtype=q.dtype).triu(1)
    return F.dropout((scores + mask).softmax(-1), p) @ v


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by torch, which chooses the backend."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_backend(backend: SDPBackend) -> Callable[..., Tensor]:
    """Return causal attention by one backend of torch; it raises where that does not run."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return causal_sdpa(q, k, v)

    return call


def attentions(setting: Setting) -> Iterator[Work]:
    """Yield attention: causal beside torch's backends, and with mask and dropout beside its parts."""
    ours = lambda **x: flash_attention(**x, causal=True)
    full = [(4, 16, 4096, 128), (8, 16, 2048, 64), (8, 12, 1024, 64)]  # the last is GPT-2's
    for b, heads, s, d in [(1, 2, 16, 16)] if setting.tiny else full:
        ways = [Way("fds", ours), Way("torch eager", eager_attention), Way("torch SDPA", causal_sdpa)]
        if setting.device.type == "cuda":
            ways += [Way("torch SDPA, cuDNN", by_backend(SDPBackend.CUDNN_ATTENTION))]
            ways += [Way("torch SDPA, flash", by_backend(SDPBackend.FLASH_ATTENTION))]
        ways += peers(setting, "flash_attention")
        qkv = together(**{name: drawn(b, heads, s, d, dtype=BF16) for name in "qkv"})
        for phase, products in zip(PHASES, (2, 5, 7), strict=True):
            yield Work(
                "flash_attention, causal",
                words(b, heads, s, d),
                phase,
                qkv,
                ways,
                ways[1],
                oracle_dtype=torch.float32,
                flops=products * 2 * b * heads * s * s * d // 2,  # half of the scores are masked
            )
    yield from masked_attentions(setting)


def masked_attentions(setting: Setting) -> Iterator[Work]:
    """Yield attention with a mask and dropout."""
    b, heads, s, d = (1, 2, 16, 16) if setting.tiny else (16, 16, 512, 64)
    qkv = {name: drawn(b, heads, s, d, dtype=BF16) for name in "qkv"}
    ours = lambda mask, **x: flash_attention(**x, bias=mask, seed=1)
    sdpa = lambda q, k, v, mask, p: F.scaled_dot_product_attention(q, k, v, mask.expand(-1, 1, s, s), dropout_p=p)
    ways = ways_beside(setting, ours, eager_attention, Way("torch SDPA", sdpa))
    given = together(**qkv, mask=padding(b, s))
    for phase, products in zip(PHASES, (2, 5, 7), strict=True):
        yield Work(
            "flash_attention, mask and dropout",
            words(b, heads, s, d),
            phase,
            given,
            ways,
            ways[1],
            dropout=DROPOUT,
            oracle_dtype=torch.float32,
            flops=products * 2 * b * heads * s * s * d,
        )


def transformer_layers(setting: Setting) -> Iterator[Work]:
    """Yield a layer of BERT-large, forward and backward as in training."""
    goals = Goals(None, {"torch eager": LAYER_BESIDE_EAGER, "torch.compile": LAYER_BESIDE_COMPILED})
    for b, s in [(2, 6)] if setting.tiny else [(64, 128), (16, 512)]:
        hidden, heads = (16, 2) if setting.tiny else (1024, 16)
        given = together(x=drawn(b, s, hidden, dtype=BF16), mask=padding(b, s))
        ways, oracle = layers(setting, hidden=hidden, heads=heads, dropout=DROPOUT)
        yield Work(
            "TransformerLayer",
            words(b, s, hidden),
            "both",
            given,
            ways,
            oracle,
            goals=goals,
            dropout=DROPOUT,
            hide_launches=False,
            oracle_dtype=torch.float32,
        )
