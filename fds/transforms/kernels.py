"""Run the Triton kernels of fds wherever they can run, whether a run on such a GPU is recorded or not.

Fills:  kernels                  State:  none
Law:    the plain step to the rounding of its dtypes; on a CPU the identity, bit for bit
Cost:   on a GPU less time and memory, as far as the kernels keep what they were written for; on a CPU nothing
Source: fds/kernels/choice.py, the one place that decides which runs

`reference_kernels`: run the references of all kernels, in plain torch, wherever the tensors are.

Fills:  kernels                  State:  none
Law:    on the CPU the identity, bit for bit; on a GPU, where kernels are chosen, the same to rounding
Cost:   on a GPU what chosen kernels save; on a CPU nothing
Source: fds/kernels/choice.py, the one place that decides which runs
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import attrs

from fds.kernels import only, prefer_triton
from fds.step import Step, fill, transform


@attrs.frozen(repr=False)
class KernelScope:
    """The scope in which a step, its evaluation and its first state run."""

    open: Callable[[], AbstractContextManager[None]]
    text: str

    def __call__(self) -> AbstractContextManager[None]:
        """Return a scope that is open once."""
        return self.open()

    def __repr__(self) -> str:
        return self.text


_TRITON = KernelScope(prefer_triton, "Triton kernels where they can run, else torch's operators")
_REFERENCES = KernelScope(lambda: only("reference"), "references only")


@transform
def triton_kernels():
    """Run Triton kernels: in forward, recomputation, backward, the optimizer, evaluation, `init` and `describe`.

    Without it a kernel runs only on a GPU for which `fds/kernels/passed.json` records that its cases passed. Tensors
    that no kernel takes (float64, and all on a CPU without Triton's interpreter) are computed by torch's operators, so
    the same composition trains anywhere; `fds.kernels.only("triton")` is an error there. While a step runs, the choice
    holds for all threads of the process: those of torch's backward, and others.
    """

    def apply(step: Step) -> Step:
        return fill(step, kernels=_TRITON)

    return apply


@transform
def reference_kernels():
    """Run references only: in forward, recomputation, backward, the optimizer, evaluation, `init` and `describe`.

    For comparing a kernel with its reference, and for derivatives of higher order, which kernels do not have.
    While a step runs, the choice holds for all threads of the process: those of torch's backward, and others.
    """

    def apply(step: Step) -> Step:
        return fill(step, kernels=_REFERENCES)

    return apply
