"""The bytes that each option says it saves, as autograd's saved tensors show them."""

import itertools

import pytest
import torch
from torch import Tensor

from fds.kernels.choice import only
from tests.nn.plain import build, inputs

B, S, H, HEADS, INTER = 2, 16, 32, 4, 48
OPTIONS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")


def kept_bytes(layer, x: Tensor) -> int:
    """Return the bytes that a call keeps for backward: of storages, without parameters and what the layer returns.

    The output is the next layer's input, and counts there.
    """
    held: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = layer(x)
    own = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), y)}
    return sum(t.untyped_storage().nbytes() for at, t in held.items() if at not in own)


def measure(dtype: torch.dtype, attn: float, pre: bool, chosen: tuple[str, ...] = ()) -> int:
    settings = dict.fromkeys(chosen, True)
    layer = build(
        dtype,
        hidden_size=H,
        heads=HEADS,
        intermediate_size=INTER,
        attn_dropout_ratio=attn,
        hidden_dropout_ratio=0.1,
        pre_layer_norm=pre,
        **settings,
    )
    return kept_bytes(layer, inputs(layer.config, B, S, dtype).requires_grad_())


def saved_by(chosen: tuple[str, ...], attn: float) -> int:
    """Return the elements that the documentation of `TransformerConfig` says are not kept."""
    amounts = {
        "normalize_invertible": 2 * B * S * H,
        "gelu_checkpoint": B * S * INTER,
        "attn_dropout_checkpoint": 2 * B * HEADS * S * S if attn else 0,
    }
    return sum(amounts[name] for name in chosen)


def statistics(dtype: torch.dtype) -> int:
    """Return the most bytes of what is kept a row: mean and deviation of two norms, the sums of softmax, a seed."""
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return (4 + HEADS) * B * S * wide + 8


@pytest.mark.parametrize("chosen", [c for n in range(4) for c in itertools.combinations(OPTIONS, n)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pre", [True, False])
def test_each_option_saves_the_bytes_that_it_says(chosen, dtype, pre):
    before, after = measure(dtype, 0.1, pre), measure(dtype, 0.1, pre, chosen)
    assert abs(before - after - saved_by(chosen, 0.1) * dtype.itemsize) <= statistics(dtype)


@pytest.mark.parametrize("attn", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pre", [True, False])
def test_a_layer_keeps_what_its_docstring_says(attn, dtype, pre):
    elements = 8 * B * S * H + 2 * B * S * INTER + (2 * B * HEADS * S * S if attn else 0)
    got = measure(dtype, attn, pre)
    assert elements * dtype.itemsize <= got <= elements * dtype.itemsize + statistics(dtype)


@pytest.mark.parametrize("attn", [0.0, 0.1])
def test_kernels_keep_no_more_than_references(attn):
    small = measure(torch.float32, attn, True, OPTIONS)
    with only("triton"):
        assert measure(torch.float32, attn, True, OPTIONS) <= small + statistics(torch.float32)
