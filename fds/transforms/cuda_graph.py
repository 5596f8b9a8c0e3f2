"""Capture the work of a step on a GPU once, and launch all of it at once in every later call.

Fills:  run                      State:  none
Law:    the identity, bit for bit, random numbers included
Cost:   host time: one launch for a call's thousands; memory: activations and gradients stay, the batch twice
Source: CUDA graphs through torch.cuda.CUDAGraph; Paszke et al., "Accelerating PyTorch with CUDA Graphs", 2021
"""

from fds.step import Step, fill, transform
from fds.step.recorded.cuda_graphs import CudaGraphs


@transform
def cuda_graph():
    """Replay one CUDA graph of the whole step, from the batch to the update, in the place of its launches.

    It stands beside `fds.donate()`: a graph writes to the same memory in every replay, so the state is given up. The
    first two calls with batches of some structure and shapes are run, the second of them under the rules of a capture,
    and the third is captured. Tensors of a batch are on the device; each is copied to where the graph reads it. Seeds
    follow from the key and `calls` in every replay, so the numbers are those of the step without this.

    On a CPU every call is run, and nothing is captured. `step.evaluate` and `fds.evaluate` never are.

    Raises `ComposeError` without `donate`, for leaves and for activations that live elsewhere
    (`checkpoint_activations(store=...)`), and for ranks that share a step.
    From the second call on the step raises `LossError`, `ScheduleError` or
    `ComposeError`, with the line that is at fault, for code that reads a number from the device, needs shapes that
    depend on values, draws from the generator of the CPU, or asks for `call.calls` or `call.key`; and `BatchError` for
    a batch on another device, or one of more than 16 shapes.
    """

    def apply(step: Step) -> Step:
        return fill(step, run=CudaGraphs(), instead=None, hint="one of the two runs a step")

    return apply
