"""Compile the loss by torch.compile, `Layers` layer by layer, other losses whole; or all of a step as one graph.

Fills:  loss, or run             State:  none
Law:    the composition without it: bit for bit with `backend="aot_eager"`, to rounding with inductor, and in
        gradients of dropout in 16 bits, which torch rounds otherwise where it compiles
Cost:   compile time in the first steps, once for all equal layers; each layer, or the loss, also runs once uncompiled
Source: Ansel et al. 2024, "PyTorch 2", doi:10.1145/3620665.3640366

`cuda_graph`: capture the work of a step on a GPU once, and launch all of it at once in every later call.

Fills:  run                      State:  none
Law:    the identity, bit for bit, random numbers included
Cost:   host time: one launch for a call's thousands; memory: activations and gradients stay, the batch twice
Source: CUDA graphs through torch.cuda.CUDAGraph; Paszke et al., "Accelerating PyTorch with CUDA Graphs", 2021
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from fds import loss as losses
from fds.errors import ComposeError, nearest
from fds.step import Step, fill, transform
from fds.step.recorded.cuda_graphs import CudaGraphs
from fds.step.recorded.one_graph import OneGraph

_BACKENDS = ("inductor", "aot_eager", "eager")  # those that need not be asked for, which takes torch seconds
# Each takes CUDA graphs of torch's own, whose outputs lie in memory that the next replay writes over: a gradient that
# torch keeps as it came, to add those of the next microbatch to it, would change.
_GRAPHS = {"reduce-overhead": "fds.cuda_graph()", "max-autotune": 'mode="max-autotune-no-cudagraphs"'}


@transform
def compile(
    *misplaced: Any,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = True,
    options: dict[str, Any] | None = None,
    whole: bool = False,
):
    """Run the loss through `torch.compile` inside the step, in training and in evaluation; or all of a training step.

    Of `fds.Layers` each layer and the criterion is a function of its own, and equal layers share one; any other loss is
    one function. Views, contexts, layer maps and the executor run around them, and see the loss as it was.

    With `whole=True` one graph goes from the batch to the next state: forward, backward, sums, norms, gradient maps,
    update, what is skipped and averaged. Of every structure and shapes of a batch, at most 16, the first call is run as
    it is, the second is recorded and compiled, which takes the memory of another state, and from then on the graph
    runs. Python runs when it is recorded alone. What torch draws is drawn before the graph, from the same seeds.
    Evaluations are not compiled. Where a backend fuses operators, updates are by the optimizer's formula, else by what
    updates uncompiled steps; only where a beta, momentum or weight decay follows a schedule, and in SGD with
    dampening, is it always the formula, which rounds otherwise.

    Args:
        backend: as in `torch.compile`: `"inductor"`, which needs a C++ compiler on a CPU and Triton on a GPU,
            `"aot_eager"`, which needs neither and computes what uncompiled code does, or a function.
        mode: as in `torch.compile`: `"max-autotune-no-cudagraphs"` and the like, without CUDA graphs.
        dynamic: as in `torch.compile`: None compiles for the first shapes, and for all where they change.
        fullgraph: whether code that torch cannot trace is a `LossError`, not a part that runs uncompiled.
        options: of the backend. `{"fallback_random": True}` lets inductor draw the random numbers that uncompiled code
            draws; without it others, which follow from state and batch all the same.
        whole: whether to compile all of a step.

    Raises `ComposeError` for `mode` and `options` together, of which `torch.compile` takes one, for those with CUDA
    graphs of torch's own, for a loss that is compiled already, and for arguments by position; in a step for other
    arguments that torch refuses, and `LossError` for code that it refuses. With `whole` also `ComposeError` for
    `dynamic` or no `fullgraph`, for ranks that share a step and for leaves that live elsewhere; from the second call on
    `LossError`, `ScheduleError` or `ComposeError`, with the line that is at fault, for code that reads a number from
    a tensor, needs shapes that depend on values, draws numbers that depend on values, writes to tensors outside of
    the step, or asks for `call.calls` or `call.key`; the state is then as it was.
    """
    if misplaced:
        raise ComposeError(
            "compile takes arguments by keyword",
            where="compile",
            got=", ".join(repr(x) if isinstance(x, str) else type(x).__name__ for x in misplaced),
            want="fds.compile(), fds.compile(backend=...)",
            hint="it is a transform and stands in compose: fds.compose(fds.compile(), fds.adamw(3e-4))(loss_fn)",
        )
    if mode is not None and options is not None:
        raise ComposeError(
            "compile takes a mode or options",
            got=f"mode={mode!r}, options={options!r}",
            want="one of them",
            hint="torch._inductor.list_mode_options(mode) says which options a mode is",
        )
    _check_backend(backend)
    graphs = _graphs_of_torch(backend, mode, options or {})
    if graphs:
        raise ComposeError(
            "CUDA graphs of torch's own would write over gradients that the step keeps",
            where="compile",
            got=graphs,
            want="a mode, options and a backend without CUDA graphs",
            hint=_GRAPHS.get(mode or "", "fds.cuda_graph()"),
        )
    if whole and (dynamic or not fullgraph):
        raise ComposeError(
            "a step in one graph is compiled for each shape of a batch, all of it",
            where="compile",
            got=f"dynamic={dynamic!r}, fullgraph={fullgraph!r}",
            want="fds.compile(whole=True)",
            hint="fds.compile() compiles the loss alone, and takes both",
        )
    settings = {"backend": backend, "mode": mode, "dynamic": dynamic, "fullgraph": fullgraph, "options": options}
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)

    def apply_to_all(step: Step) -> Step:
        _check_uncompiled(step)
        run = OneGraph(backend, mode, options, f"torch.compile's {name}")
        return fill(step, run=run, instead=None, hint="one of the two runs a step")

    def apply(step: Step) -> Step:
        filled = fill(step, loss=step.loss)
        _check_uncompiled(step)
        compiled = functools.partial(losses.compiled_with, settings, f"torch.compile by {name}")
        loss = compiled(step.loss)
        return attrs.evolve(
            filled, loss=loss, eval_loss=loss if step.eval_loss is step.loss else compiled(step.eval_loss)
        )

    return apply_to_all if whole else apply


def _check_uncompiled(step: Step) -> None:
    if losses.is_compiled(step.loss) or losses.is_compiled(step.eval_loss):
        raise ComposeError(
            "the loss is compiled already",
            where="compile",
            got=f"{losses.name(step.loss)}, which torch.compile returned",
            want="the function itself",
        )


def _check_backend(backend: Any) -> None:
    if not isinstance(backend, str) or backend in _BACKENDS:
        return
    from torch import _dynamo  # slow to import

    listed: Any = _dynamo
    names: list[str] = listed.list_backends(exclude_tags=())
    if backend not in names:
        raise ComposeError(
            "torch.compile has no such backend",
            where="compile, backend",
            got=repr(backend),
            want=", ".join(sorted({*names, *_BACKENDS})),
            hint=nearest(backend, names),
        )


def _graphs_of_torch(backend: Any, mode: str | None, options: dict[str, Any]) -> str:
    """Return the argument that asks for CUDA graphs of torch's own; empty where none does."""
    if backend == "cudagraphs":
        return "backend='cudagraphs'"
    if backend == "inductor" and mode in _GRAPHS:
        return f"mode={mode!r}"
    return "options={'triton.cudagraphs': True}" if options.get("triton.cudagraphs") else ""


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
