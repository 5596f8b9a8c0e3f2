"""Run the references of all kernels, in plain torch, wherever the tensors are.

Fills:  kernels                  State:  none
Law:    on the CPU the identity, bit for bit; on a GPU, where kernels are chosen, the same to rounding
Cost:   on a GPU what chosen kernels save; on a CPU nothing
Source: fds/kernels/choice.py, the one place that decides which runs
"""

from contextlib import AbstractContextManager

import attrs

from fds.kernels import only
from fds.step import Step, fill, transform


@attrs.frozen(repr=False)
class ReferenceKernels:
    """The scope in which a step, its evaluation and its first state run."""

    def __call__(self) -> AbstractContextManager[None]:
        """Return a scope that is open once."""
        return only("reference")

    def __repr__(self) -> str:
        return "references only"


@transform
def reference_kernels():
    """Run references only: in forward, recomputation, backward, the optimizer, evaluation, `init` and `describe`.

    For comparing a kernel with its reference, and for derivatives of higher order, which kernels do not have.
    While a step runs, the choice holds for all threads of the process: those of torch's backward, and others.
    """

    def apply(step: Step) -> Step:
        return fill(step, kernels=ReferenceKernels())

    return apply
