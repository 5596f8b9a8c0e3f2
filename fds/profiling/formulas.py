"""How many floating-point operations an operator takes: torch's formulas, and those of what torch does not count.

Counted are the multiplications and additions of products of matrices, of convolutions and of attention, two for each
pair of numbers. Torch has no formula for attention on the CPU, none for the operators of fds, and one for the backward
of grouped convolutions that is too large by the number of groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

Shape = Sequence[int]


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Scores, and their product with v."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


def _attention_backward(dout: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Scores again; the gradients of v, of the probabilities, of q and of k."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])


def _flash_backward(dout: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """As above, where both of its kernels compute scores and the gradients of the probabilities."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (4 * q[3] + 3 * v[3])


def _linear_cross_entropy(
    hidden: Shape, weight: Shape, targets: Any, bias: Any, wants: Sequence[bool], *_: Any, **__: Any
) -> int:  # fmt: skip
    """Logits, and what is wanted of the gradients of hidden and of weight, which forward computes."""
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + wants[0] + wants[1])


def _conv_backward(
    grad: Shape, x: Shape, w: Shape, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, mask: Sequence[bool], *_: Any, **__: Any,
) -> int:  # fmt: skip
    """As many as forward for each of the gradients of x and w that is wanted: the pairs are the same."""
    return conv_flop_count(list(x), list(w), list(grad), transposed=transposed) * (mask[0] + mask[1])


_FORMULAS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten.convolution_backward": _conv_backward,
    "fds.flash_attention": _attention,
    "fds.flash_attention_backward": _flash_backward,
    "fds.linear_cross_entropy": _linear_cross_entropy,
}


@functools.cache
def formula(packet: Any) -> Callable[..., int] | None:
    """Return the formula of an operator, a function of its arguments and `out_val`; None where it has none."""
    own = _FORMULAS.get(str(packet))
    counter = FlopCounterMode(display=False, custom_mapping={} if own is None else {packet: own})
    return counter.flop_registry.get(packet)


def unmasked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return how many pairs of a query and a key an operator leaves, of how many, where it masks them causally."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    if not (given.get("is_causal") or given.get("causal")):
        return 1, 1
    queries, keys = (given[long if long in given else long[0]].shape[-2] for long in ("query", "key"))
    return sum(min(i + 1, keys) for i in range(queries)), queries * keys
