"""Work that memory bounds: updates, norms and elementwise fusions, beside torch's ways to do it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.goals import ADAMW_BESIDE_FUSED, COMPILED, COPY_ELEMENTWISE, COPY_FORWARD, COPY_NORM_BACKWARD
from benchmarks.kernel_peers import EPS, peers
from benchmarks.kernel_works import Goals, Setting, Way, Work, ways_beside
from fds.kernels._rotary import rotary
from fds.kernels._swiglu import swiglu
from fds.kernels.dropout_add import bias_dropout_add
from fds.kernels.elementwise import adamw, lion, lion_reference, sgd, sgd_reference
from fds.kernels.gelu import bias_gelu
from fds.kernels.normalization import add_layer_norm, layer_norm, rms_norm

BF16, F32 = torch.bfloat16, torch.float32
HYPER = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
LR = 1e-3


def drawn(*shape: int, dtype: torch.dtype, trained: bool = True) -> Callable[[torch.Generator], Tensor]:
    """Return what draws a tensor."""
    return lambda g: torch.randn(shape, generator=g, device=g.device).to(dtype).requires_grad_(trained)


def together(**draws: Callable[[torch.Generator], Tensor]) -> Callable[[torch.Generator], dict[str, Tensor]]:
    """Return what draws several, by name."""
    return lambda g: {name: draw(g) for name, draw in draws.items()}


def words(*sizes: int, dtype: torch.dtype = BF16) -> str:
    """Return a size as tables say it."""
    return f"{' x '.join(map(str, sizes))}, {str(dtype).removeprefix('torch.')}"


def updates(setting: Setting) -> Iterator[Work]:
    """Yield the updates of a bucket: float32 masters; gradients in float32, or bfloat16 with a copy of the new ones."""
    n = setting.size(2**26, 1234)
    scalars: dict[str, Any] = {
        "step": lambda g: torch.full((), 10, dtype=torch.int64, device=g.device),
        "count": lambda g: torch.full((), 11.0, device=g.device),  # torch's, which counts this update
        "lr": lambda g: torch.full((), LR, dtype=torch.float64, device=g.device),
    }
    state = {name: drawn(n, dtype=F32, trained=False) for name in ("param", "exp_avg")}
    positive = {"exp_avg_sq": lambda g: torch.rand(n, generator=g, device=g.device)}
    low = {name: drawn(n, dtype=BF16, trained=False) for name in ("grad", "out")}
    full = {"grad": drawn(n, dtype=F32, trained=False)}
    at_speed = Goals(COPY_FORWARD)
    goals = attrs.evolve(at_speed, time_at_most={"torch fused": ADAMW_BESIDE_FUSED})
    for text, more, each in (("float32 gradients", full, 28), ("bfloat16 gradients and copy", low, 28)):
        ways = [
            Way("fds", lambda count, **rest: adamw(**rest, **HYPER)),
            Way("torch eager", plain_adamw),
            Way("torch fused", fused_adamw),
            Way("torch.compile", setting.compiled(plain_adamw)),
        ]
        yield Work(
            "adamw",
            f"{n} in float32, {text}",
            "update",
            together(**state, **positive, **more, **scalars),
            ways,
            ways[1],
            n * each,
            goals,
        )
    given = together(**state, **low, lr=scalars["lr"])
    few = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    with_few = lambda f: lambda **x: f(**x, **few)
    ways = [Way("fds", with_few(lion)), Way("torch eager", with_few(lion_reference))]
    yield Work("lion", f"{n} in float32, bfloat16 gradients and copy", "update", given, ways, ways[1], n * 20, at_speed)
    step = lambda f: lambda exp_avg, **x: f(momentum_buffer=exp_avg, momentum=0.9, weight_decay=0.1, **x)
    ways = [Way("fds", step(sgd)), Way("torch eager", step(sgd_reference))]
    given = together(**state, **low, lr=scalars["lr"], step=scalars["step"])
    yield Work(
        "sgd, momentum",
        f"{n} in float32, bfloat16 gradients and copy",
        "update",
        given,
        ways,
        ways[1],
        n * 20,
        at_speed,
    )


def plain_adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    count: Tensor,
    out: Tensor | None = None,
    **_: Tensor,
) -> None:
    """Update as the paper says, in torch's operators."""
    beta1, beta2 = HYPER["beta1"], HYPER["beta2"]
    g = grad.to(param.dtype)
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (exp_avg_sq / (1 - beta2**count)).sqrt() + HYPER["eps"]
    param.mul_(1 - LR * HYPER["weight_decay"]).sub_(LR / (1 - beta1**count) * exp_avg / denominator)
    if out is not None:
        out.copy_(param)


def fused_adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    count: Tensor,
    out: Tensor | None = None,
    **_: Tensor,
) -> None:
    """Update as `torch.optim.AdamW(fused=True)` does, without what it does in Python before."""
    torch._fused_adamw_(
        [param],
        [grad.to(param.dtype)],
        [exp_avg],
        [exp_avg_sq],
        [],
        [count],
        lr=LR,
        beta1=HYPER["beta1"],
        beta2=HYPER["beta2"],
        weight_decay=HYPER["weight_decay"],
        eps=HYPER["eps"],
        amsgrad=False,
        maximize=False,
    )
    if out is not None:
        out.copy_(param)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise by torch."""
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalise by torch."""
    return F.rms_norm(x, weight.shape, weight, EPS)


def torch_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise a sum by torch, and return both."""
    total = x + residual
    return torch_layer_norm(total, weight, bias), total


def norms(setting: Setting) -> Iterator[Work]:
    """Yield norms at hidden sizes of models; times `both` count beside torch.compile."""
    ours = lambda x, weight, bias: layer_norm(x, weight, bias, eps=EPS)
    ours_rms = lambda x, weight: rms_norm(x, weight, eps=EPS)
    ours_add = lambda **given: add_layer_norm(**given, eps=EPS)
    sizes = [(8, 40), (3, 123)] if setting.tiny else [(32768, 4096), (65536, 1024), (16384, 8192)]
    for rows, n in sizes:
        x, w = drawn(rows, n, dtype=BF16), drawn(n, dtype=BF16)
        ways = ways_beside(setting, ours, torch_layer_norm, *peers(setting, "layer_norm"))
        yield from phases("layer_norm", rows, n, together(x=x, weight=w, bias=w), ways, (2, 3), compiled=COMPILED)
        ways = ways_beside(setting, ours_rms, torch_rms_norm, *peers(setting, "rms_norm"))
        yield from phases("rms_norm", rows, n, together(x=x, weight=w), ways, (2, 3), compiled=COMPILED)
    rows, n = sizes[0]
    x, w = drawn(rows, n, dtype=BF16), drawn(n, dtype=BF16)
    given, ways = together(x=x, residual=x, weight=w, bias=w), ways_beside(setting, ours_add, torch_add_layer_norm)
    yield from phases("add_layer_norm", rows, n, given, ways, (4, 4), compiled=COMPILED)


def columns(setting: Setting) -> Iterator[Work]:
    """Yield norms of rows of every length, of as many elements each: is there a cliff?"""
    ours = Way("fds", lambda x, weight, bias: layer_norm(x, weight, bias, eps=EPS))
    ours_rms = Way("fds", lambda x, weight: rms_norm(x, weight, eps=EPS))
    spread = (2**14, 2**16, 2**18, 2**8, 50257, 2**10, 2**15, 2**17, 2**12, 100000, 2**9, 2**13, 2**11)
    lengths = (16, 300) if setting.tiny else spread  # in this order, if time runs out
    for n in lengths:
        rows = 5 if setting.tiny else 2**27 // n
        x, w = drawn(rows, n, dtype=BF16), drawn(n, dtype=BF16)
        ways = [ours, Way("torch eager", torch_layer_norm)]
        yield from phases("columns, layer_norm", rows, n, together(x=x, weight=w, bias=w), ways, (2, 3))
        ways = [ours_rms, Way("torch eager", torch_rms_norm)]
        yield from phases("columns, rms_norm", rows, n, together(x=x, weight=w), ways, (2, 3))


def phases(
    family: str,
    rows: int,
    columns: int,
    inputs: Callable,
    ways: list[Way],
    tensors: tuple[int, int],
    *,
    goals: tuple[float | None, float | None] = (COPY_FORWARD, COPY_NORM_BACKWARD),
    compiled: float | None = None,
    dropout: float = 0.0,
) -> Iterator[Work]:
    """Yield forward and backward of what reads and writes so many whole tensors in the two.

    Where something is claimed beside torch.compile, it is of both together.
    """
    each = rows * columns * BF16.itemsize
    forward = Work(
        family, words(rows, columns), "forward", inputs, ways, ways[1], tensors[0] * each, Goals(goals[0]), dropout
    )
    yield forward
    yield attrs.evolve(forward, phase="backward", moved_bytes=tensors[1] * each, goals=Goals(goals[1]))
    if compiled is not None:
        both = Goals(None, {"torch.compile": compiled})
        yield attrs.evolve(forward, phase="both", moved_bytes=sum(tensors) * each, goals=both)


def torch_bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Apply GELU by torch."""
    return F.gelu(x + bias, approximate="tanh")


def torch_bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
    """Drop by torch's own generator."""
    return residual + F.dropout(x + bias, p)


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gate by torch."""
    return F.silu(gate) * up


def torch_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by torch, as models have it."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def elementwise(setting: Setting) -> Iterator[Work]:
    """Yield the fusions; forward and backward are to run at the speed of a copy."""
    rows, n = (6, 42) if setting.tiny else (32768, 4096)
    x, w = drawn(rows, n, dtype=BF16), drawn(n, dtype=BF16)
    at_speed = (COPY_ELEMENTWISE, COPY_ELEMENTWISE)
    for text, recompute, moved in (("bias_gelu", False, (3, 3)), ("bias_gelu, recompute", True, (2, 3))):
        ours = functools.partial(bias_gelu, recompute=recompute)
        ways = ways_beside(setting, ours, torch_bias_gelu)
        yield from phases(text, rows, n, together(x=x, bias=w), ways, moved, goals=at_speed)
    ways = ways_beside(setting, lambda **given: bias_dropout_add(**given, seed=1), torch_bias_dropout_add)
    given = together(x=x, bias=w, residual=x)
    yield from phases("bias_dropout_add", rows, n, given, ways, (3, 2), goals=at_speed, dropout=0.1)
    ways = ways_beside(setting, swiglu, torch_swiglu)
    yield from phases("swiglu", rows, n, together(gate=x, up=x), ways, (3, 5), goals=at_speed)
    b, heads, t, d = (2, 3, 6, 8) if setting.tiny else (8, 32, 4096, 128)
    tables = {name: drawn(t, d // 2, dtype=F32, trained=False) for name in ("cos", "sin")}
    ways = ways_beside(setting, rotary, torch_rotary)
    given = together(x=drawn(b, heads, t, d, dtype=BF16), **tables)
    yield from phases("rotary", b * heads * t, d, given, ways, (2, 2), goals=at_speed)
