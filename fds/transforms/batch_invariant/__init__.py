"""Compute every row with the same bits, whatever other rows there are, in which order, and however they are padded.

Fills:  context                  State:  none
Law:    a row alone, in any batch, at any place and with any padding after it: the same bits; the plain loss to rounding
Cost:   tiles of one shape, padded: measured in docs/rollouts.md; attention holds its scores
Source: He et al. 2025, "Defeating nondeterminism in LLM inference", thinkingmachines.ai/blog
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import attrs
from torch.nn.attention import SDPBackend, sdpa_kernel

from fds.step import Call, Step, fill, transform
from fds.transforms.batch_invariant.operators import Invariant

_math: Any = sdpa_kernel


@attrs.frozen(repr=False)
class InvariantForward:
    """The context in which the loss runs forward, in training and in evaluation."""

    draws: ClassVar = False
    in_one_graph: ClassVar = False  # compiled, elementwise functions have other bits than in an evaluation

    def __call__(self, call: Call) -> contextlib.ExitStack:
        """Return the context for the device of a call."""
        stack = contextlib.ExitStack()
        if call.device.type != "cpu":  # kernels of other devices are several; this one is made of products and softmax
            stack.enter_context(_math(SDPBackend.MATH))
        invariant: Any = Invariant()
        stack.enter_context(invariant)
        return stack

    def __repr__(self) -> str:
        return "batch_invariant()"


@transform
def batch_invariant():
    """Run the loss forward so that what it computes of a row does not depend on the rest of the batch.

    The number of other rows, their order, and padding after a row change no bit of its activations, logits and
    log-probabilities: what a row is given alone, it is given in every batch, in evaluations and in training. So a
    policy's ratio to itself is 1 exactly. Backward is torch's own, whose sums over rows depend on all of them.

    Matrix products, attention, softmax, norms and sums are computed in tiles and trees of fixed shape; convolutions a
    row at a time; functions such as exp in blocks of fixed size. On one machine with one number of threads: another
    CPU or GPU rounds otherwise. A mask, or causal attention, must hide what stands after a row; padding before a row
    moves its sums. Draws of dropout are those of places in a batch.

    Raises `LossError` for an operator of which nothing is known, such as fused layers of torch's fast path, and for
    batch norm in training, and instance norm that tracks statistics; `ComposeError` together with
    `compile(whole=True)`.
    """

    def apply(step: Step) -> Step:
        return fill(step, context=InvariantForward())

    return apply
