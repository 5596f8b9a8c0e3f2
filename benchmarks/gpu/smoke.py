"""A minute that decides whether the others are worth it: one case of each thing that the rest of a run stands on.

A call ends where one of them fails: what a lent machine lacks is then known after a minute, and not after thirty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fds
from benchmarks.gpu import counters
from benchmarks.gpu.records import Case, Failed
from benchmarks.kernel_works import WITHIN, Setting, distance
from fds import kernels, tree
from fds.kernels.choice import only
from fds.media.medium import make_page_locked


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the cases, quick ones first; what a CPU has not on a GPU alone."""
    on_gpu = setting.device.type == "cuda"
    yield Case("layer_norm", lambda: layer_norm(setting))
    yield Case("flash_attention by descriptors", lambda: attention(setting))
    yield Case("linear_cross_entropy", lambda: linear_cross_entropy(setting))
    if on_gpu:
        yield Case("page-locked memory", lambda: page_locked(setting))
        yield Case("one rank of NCCL", lambda: one_rank(setting))
    yield Case("a step with dropout, captured and replayed", lambda: captured(setting))
    yield Case("torch.compile", lambda: compiled(setting))
    if on_gpu:
        yield Case("compute-sanitizer", sanitized, limit_s=120)


def drawn(setting: Setting, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return numbers of which a gradient is wanted."""
    x = torch.randn(shape)
    return x.to(setting.device, dtype).requires_grad_()


def compare(ours: Callable[..., Tensor], torchs: Callable[..., Tensor], *inputs: Tensor) -> dict[str, float]:
    """Compare a kernel's output and gradients in bfloat16 with torch's in float32. Raises `Failed`."""
    with only("triton"):
        out = ours(*inputs)
        above = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, above)
    whole = [x.detach().float().requires_grad_() for x in inputs]
    ref = torchs(*whole)
    refs = torch.autograd.grad(ref, whole, above.float())
    apart = [distance(x, y) for x, y in zip((out, *grads), (ref, *refs), strict=True)]
    figures = {f"result {i}": float(f"{x:.2g}") for i, x in enumerate(apart)}
    if not all(x <= WITHIN[torch.bfloat16] for x in apart):  # NaN too
        raise Failed(f"further from torch's in float32 than {WITHIN[torch.bfloat16]:g}", figures)
    return figures


def layer_norm(setting: Setting) -> dict[str, float]:
    """Normalize rows."""
    width = setting.size(4096, 64)
    x, weight, bias = drawn(setting, 64, width), drawn(setting, width), drawn(setting, width)
    return compare(kernels.layer_norm, lambda x, w, b: F.layer_norm(x, (width,), w, b), x, weight, bias)


def attention(setting: Setting) -> dict[str, float]:
    """Attend with heads of 128, whose blocks Hopper's kernels load by descriptors (TMA)."""
    tokens, size = setting.size(512, 16), setting.size(128, 16)
    q, k, v = (drawn(setting, 2, 4, tokens, size) for _ in range(3))
    ours = lambda q, k, v: kernels.flash_attention(q, k, v, causal=True)
    return compare(ours, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)


def linear_cross_entropy(setting: Setting) -> dict[str, float]:
    """Take the loss of chunks of logits, whose weight gradients are summed by `addmm` into float32."""
    tokens, width, classes = setting.size(2048, 16), setting.size(768, 16), setting.size(50257, 131)
    hidden, weight = drawn(setting, tokens, width), drawn(setting, classes, width)
    targets = torch.arange(tokens, device=setting.device) % classes
    ours = lambda hidden, weight: kernels.linear_cross_entropy(hidden, weight, targets)
    return compare(ours, lambda hidden, weight: F.cross_entropy(hidden @ weight.T, targets), hidden, weight)


def page_locked(setting: Setting) -> dict[str, int]:
    """Copy through memory that the driver has locked."""
    host = make_page_locked(1 << 20, setting.device)
    host.copy_(torch.arange(1 << 20, device=setting.device).to(torch.uint8), non_blocking=True)
    torch.cuda.synchronize()
    if not host.is_pinned() or int(host[77]) != 77:
        raise Failed("torch does not see that it is pinned, or other bytes came")
    return {"bytes": host.numel()}


def network(setting: Setting) -> fds.Layers:
    """Return a small loss with dropout."""
    parts = [nn.Linear(8, 32), nn.Dropout(0.3), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)]
    return fds.Layers(parts, lambda out, targets: F.mse_loss(out.float(), targets))


def trained(setting: Setting, *transforms: Callable) -> list[Tensor]:
    """Return the losses and parameters of six calls of a step with these transforms."""
    torch.manual_seed(0)
    loss = network(setting)
    step = fds.compose(*transforms, fds.adamw(1e-2))(loss)
    state = step.init(loss.init(fds.random.key(1)))
    on_device = lambda x: x if x is state.calls or x is state.key else x.to(setting.device)
    state, losses = tree.map(on_device, state), []
    torch.manual_seed(1)
    batch = tuple(drawn(setting, 16, n, dtype=torch.float32).detach() for n in (8, 4))
    for _ in range(6):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].clone())
    return [*losses, *tree.leaves(step.params(state))]


def same(ours: list[Tensor], plain: list[Tensor]) -> None:
    """Raise `Failed` where bits differ from those of the plain step."""
    if not all(torch.equal(x, y) for x, y in zip(ours, plain, strict=True)):
        raise Failed(f"losses {[float(x) for x in ours[:6]]} where the plain step has {[float(x) for x in plain[:6]]}")


def captured(setting: Setting) -> None:
    """Capture a step that draws masks, and replay it."""
    same(trained(setting, fds.donate(), fds.cuda_graph()), trained(setting, fds.donate()))


def one_rank(setting: Setting) -> None:
    """Send what fds sends, through a group of this process alone."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = fds.mesh(dp=-1)
        axis = attrs.evolve(mesh["dp"], link=mesh.world.link((0,)))  # an axis of one rank has none
        x = torch.arange(1000.0, device=setting.device)
        for start in (axis.start_all_gather, axis.start_reduce_scatter, axis.start_all_to_all):
            out = torch.zeros_like(x)
            start(out, x).wait()
            axis.start_all_reduce(out).wait()
            if not torch.equal(out, x):
                raise Failed(f"{start.__name__} of one rank is not what it was given")
    finally:
        dist.destroy_process_group()


def compiled(setting: Setting) -> dict[str, float]:
    """Compile a function and its gradient."""
    f = setting.compiled(lambda x: F.gelu(x).square().sum(-1))
    x = drawn(setting, 16, 64, dtype=torch.float32)
    apart = distance(torch.autograd.grad(f(x).sum(), x)[0], torch.autograd.grad(F.gelu(x).square().sum(), x)[0])
    if not apart <= WITHIN[torch.float32]:
        raise Failed(f"the gradient is {apart:.2g} apart")
    return {"apart": apart}


def sanitized() -> dict[str, object]:
    """Run one small kernel under memcheck."""
    tool = counters.sanitizer()
    return counters.not_installed() if tool is None else counters.program("swiglu", [tool, *counters.MEMCHECK], "cuda")
