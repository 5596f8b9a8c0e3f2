"""Who trains GPT-2: loops in torch, and fds's step in several compositions, all from the same weights and batches.

All keep parameters, moments and gradients' norms in float32, clip to a norm of 1, and take AdamW's steps with weight
decay on matrices alone. What is made anew each time returns a call that makes one step and returns its loss, unread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch
from torch import Tensor, nn

import fds
from benchmarks.gpu.step_model import GPT, GPT2, TINY, FusedGPT, Sizes, batches
from benchmarks.harness import Call
from benchmarks.kernel_works import Setting

LR, BETAS, WEIGHT_DECAY, MAX_NORM = 6e-4, (0.9, 0.95), 0.1, 1.0
EAGER, COMPILED = "torch eager", "torch.compile"
CAPTURED = ("fds, captured", "fds, compiled and captured")


@attrs.frozen
class Contender:
    """A way to train; `what` says exactly what it does, for the table."""

    name: str
    what: str
    make: Callable[[Setting, int], Call]  # (setting, rows of a batch)


def sizes_of(setting: Setting) -> Sizes:
    """Return the model's sizes."""
    return TINY if setting.tiny else GPT2


def model(kind: type[GPT], setting: Setting) -> GPT:
    """Return a model with the weights from which all start."""
    torch.manual_seed(0)
    return kind(sizes_of(setting)).to(setting.device)


def in_turn(setting: Setting, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end."""
    some = batches(sizes_of(setting), rows, setting.device)
    while True:
        yield from some


def loop(setting: Setting, rows: int, compiled: Callable[[nn.Module], Callable[..., Tensor]]) -> Call:
    """Return one turn of the training loop of nanoGPT, without what it does every hundred steps."""
    module, batch_of = model(GPT, setting), in_turn(setting, rows)
    decayed, others = ([p for p in module.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    run = compiled(module)

    def call() -> Tensor:
        tokens, targets = next(batch_of)
        with torch.autocast(setting.device.type, torch.bfloat16):
            loss = run(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return call


def step(setting: Setting, rows: int, kind: type[GPT], *parts: fds.Transform) -> Call:
    """Return one step of fds."""
    apply, params, _ = fds.functional(model(kind, setting))
    decays = {"*norm*": 0.0, "*": WEIGHT_DECAY}
    adamw = fds.by_name({pattern: fds.adamw(LR, BETAS, weight_decay=decay) for pattern, decay in decays.items()})
    transforms = (*parts, fds.clip_by_global_norm(MAX_NORM), adamw, fds.donate())
    made = fds.compose(*transforms)(lambda p, batch: apply(p, *batch))
    state, batch_of = made.init(params, key=0), in_turn(setting, rows)
    del params

    def call() -> Tensor:
        nonlocal state
        state, metrics = made(state, next(batch_of))
        return metrics["loss"]

    return call


def compiling(setting: Setting, *, whole: bool = False) -> fds.Transform:
    """Return the transform that compiles; without its code generator at tiny sizes, which takes minutes on a CPU."""
    return fds.compile(backend="aot_eager", whole=whole) if setting.tiny else fds.compile(whole=whole)


def contenders() -> list[Contender]:
    """Return everybody, the most important first."""
    low = lambda: fds.precision(torch.bfloat16)
    autocast = "autocast to bfloat16: residuals, norms and the loss in float32, as nanoGPT has it"
    precision = "parameters cast to bfloat16 once a step, all activations in bfloat16, the loss in float32"
    donated = "fds.donate()"
    return [
        Contender(
            COMPILED,
            f"{autocast}; torch.compile(model), AdamW(fused=True), clip_grad_norm_",
            lambda s, rows: loop(s, rows, s.compiled),
        ),
        Contender(EAGER, f"{autocast}; AdamW(fused=True), clip_grad_norm_", lambda s, rows: loop(s, rows, lambda m: m)),
        Contender(
            "fds, compiled",
            f"{precision}; fds.compile() of the plain model, fds.triton_kernels() in the update, {donated}",
            lambda s, rows: step(s, rows, GPT, low(), compiling(s), fds.triton_kernels()),
        ),
        Contender(
            "fds, whole step compiled",
            f"{precision}; fds.compile(whole=True) of the plain model, one graph to the update, {donated}",
            lambda s, rows: step(s, rows, GPT, low(), compiling(s, whole=True)),
        ),
        Contender(
            "fds, captured",
            f"{precision}; the model of fds.kernels, fds.triton_kernels(), fds.cuda_graph(), {donated}",
            lambda s, rows: step(s, rows, FusedGPT, low(), fds.triton_kernels(), fds.cuda_graph()),
        ),
        Contender(
            "fds, compiled and captured",
            "as compiled, and fds.cuda_graph()",
            lambda s, rows: step(s, rows, GPT, low(), compiling(s), fds.triton_kernels(), fds.cuda_graph()),
        ),
        Contender(
            "fds, kernels",
            f"{precision}; the model of fds.kernels, fds.triton_kernels(), {donated}",
            lambda s, rows: step(s, rows, FusedGPT, low(), fds.triton_kernels()),
        ),
        Contender(
            "fds, torch's operators",
            f"{precision}; the plain model, fds.reference_kernels(), {donated}",
            lambda s, rows: step(s, rows, GPT, low(), fds.reference_kernels()),
        ),
        Contender(
            "fds, autocast",
            f"{autocast}; the plain model, fds.reference_kernels(), {donated}",
            lambda s, rows: step(s, rows, GPT, fds.autocast(torch.bfloat16), fds.reference_kernels()),
        ),
        Contender(
            "fds, autocast, compiled",
            f"as torch.compile: {autocast}; fds.compile() of the plain model, fds.reference_kernels(), {donated}",
            lambda s, rows: step(s, rows, GPT, fds.autocast(torch.bfloat16), compiling(s), fds.reference_kernels()),
        ),
    ]
