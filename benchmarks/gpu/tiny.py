"""Each kernel on small and awkward shapes, forward and backward: `python -m benchmarks.gpu.tiny KERNEL DEVICE DTYPE`.

What compute-sanitizer watches: some hundred times slower than the kernel, so that nothing here is larger than it must
be to reach every branch: a row that is no multiple of a vector, one of several blocks, masks, dropout, odd addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fds import kernels
from fds.attention_layouts import local_sliding_window
from fds.kernels.choice import only


class Inputs:
    """Random tensors of one dtype on one device."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator().manual_seed(0)

    def given(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return numbers between -1 and 1."""
        x = 2 * torch.rand(shape, generator=self.generator) - 1
        return x.to(self.device, dtype or self.dtype)

    def trained(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return numbers of which a gradient is wanted."""
        return self.given(*shape, dtype=dtype).requires_grad_()

    def targets(self, rows: int, classes: int) -> Tensor:
        """Return classes, one of them ignored."""
        found = torch.randint(classes, (rows,), generator=self.generator)
        found[0] = -100
        return found.to(self.device)

    def scalar(self, value: float, dtype: torch.dtype) -> Tensor:
        """Return a number on the device."""
        return torch.tensor(value, dtype=dtype, device=self.device)


def backward(*outs: Tensor) -> None:
    """Take all gradients, of outputs that are themselves what arrives from above."""
    torch.autograd.backward(outs, [x.detach() for x in outs])


def _norms(bias: bool, norm: Callable, added: Callable) -> Callable[[Inputs], None]:
    def run(make: Inputs) -> None:
        for rows, columns in ((3, 42), (5, 1000), (2, 9000)):
            more = [make.trained(columns, dtype=torch.float32)] if bias else []
            x, residual, weight = make.trained(rows, columns), make.trained(rows, columns), make.trained(columns)
            backward(norm(x, weight.detach().float().requires_grad_(), *more))
            backward(*added(x, residual, weight.detach().float().requires_grad_(), *more, invertible=columns == 1000))

    return run


def _swiglu(make: Inputs) -> None:
    backward(kernels.swiglu(make.trained(3, 431), make.trained(3, 431)))


def _gelu(make: Inputs) -> None:
    for approximate in ("tanh", "none"):
        for recompute in (False, True):
            x, bias = make.trained(5, 123), make.trained(123)
            backward(kernels.bias_gelu(x, bias, approximate=approximate, recompute=recompute))
        backward(kernels.bias_gelu_linear(make.trained(5, 48), make.trained(48), make.trained(16, 48), None))


def _dropout(make: Inputs) -> None:
    for rows, columns in ((5, 123), (2, 3000)):
        x, bias, residual = make.trained(rows, columns), make.trained(columns), make.trained(rows, columns)
        backward(kernels.bias_dropout_add(x, bias, residual, p=0.3, seed=make.scalar(7, torch.int64)))
        backward(kernels.dropout(x, p=0.6, seed=7, offset=1))


def _rotary(make: Inputs) -> None:
    for interleaved in (False, True):
        x = make.trained(2, 5, 3, 24).transpose(1, 2)
        angles = make.given(5, 6, dtype=torch.float32)
        backward(kernels.rotary(x, angles.cos(), angles.sin(), interleaved=interleaved))


def _softmax(make: Inputs) -> None:
    for columns in (9, 431, 9000):
        scores, mask = make.trained(1, 2, 3, columns), make.given(1, 1, 3, columns) > 0
        mask[..., 0] = True
        backward(kernels.masked_softmax(scores, mask, p=0.3, seed=7))
        backward(kernels.masked_softmax(scores, causal=True))


def _flash(make: Inputs) -> None:
    for m, n, d in ((5, 70, 16), (150, 140, 40), (33, 33, 128)):
        q, k, v = make.trained(1, 2, m, d), make.trained(1, 1, n, d), make.trained(1, 1, n, d)
        seen = make.given(1, n) > 0
        seen[:, 0] = True
        backward(kernels.flash_attention(q, k, v, causal=True))
        bias = make.given(2, 1, n)
        backward(kernels.flash_attention(q, k, v, key_padding=seen, bias=bias, p=0.3, seed=7))


def _sparse(make: Inputs) -> None:
    for block, blocks, d in ((16, 5, 24), (64, 2, 128)):
        q = make.trained(1, 2, block * blocks - 7, d)
        k, v = make.trained(1, 1, block * blocks - 7, d), make.trained(1, 1, block * blocks - 7, d)
        layout = local_sliding_window(1, blocks, num_sliding_window_blocks=min(blocks, 3), block=block)
        backward(kernels.sparse_attention(q, k, v, layout, causal=True))
        seen = make.given(1, q.shape[2]) > 0
        backward(kernels.sparse_attention(q, k, v, layout, key_padding=seen, bias=make.given(2, 1, 1), p=0.3, seed=7))
        selection = kernels.select_blocks(q, k, top=1, block=block)
        backward(kernels.sparse_attention(q, k, v, selection, causal=True))


def _cross_entropy(make: Inputs) -> None:
    for classes in (10, 1000, 9001):
        logits, targets = make.trained(5, classes), make.targets(5, classes)
        kernels.cross_entropy(logits, targets, label_smoothing=0.1, z_loss=1e-4).backward()


def _linear_cross_entropy(make: Inputs) -> None:
    hidden, weight, bias = make.trained(70, 24), make.trained(431, 24), make.trained(431)
    kernels.linear_cross_entropy(hidden, weight, make.targets(70, 431), bias, chunk_tokens=32).backward()


def _updates(make: Inputs) -> Iterator[tuple[list[Tensor], dict]]:
    """Yield a float32 parameter, its gradient and two moments, of lengths and addresses that are no multiples of 16."""
    scalars = {
        "grad_scale": make.scalar(2.0, torch.float32),
        "skip": make.scalar(0, torch.bool),
        "lr": make.scalar(1e-2, torch.float64),
        "weight_decay": 0.1,
    }
    for n in (1, 77, 5000):
        slices = [make.given(n + 1, dtype=torch.float32)[1:], make.given(n + 1)[1:]]
        yield slices + [make.given(n, dtype=torch.float32).abs() for _ in range(2)], scalars


def _adamw(make: Inputs) -> None:
    step = make.scalar(3, torch.int64)
    for (p, g, m, v), scalars in _updates(make):
        more = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": step, **scalars}
        kernels.adamw(p, g, m, v, **more)
        kernels.adamw([p, p[:1].clone()], [g, g[:1]], [m, m[:1].clone()], [v, v[:1].clone()], **more)


def _lamb(make: Inputs) -> None:
    more = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "step": make.scalar(3, torch.int64)}
    for (p, g, m, v), scalars in _updates(make):
        pieces = [(0, 1)] if len(p) == 1 else [(0, 10), (10, len(p) - 10)]
        kernels.lamb(p, g, m, v, segments=pieces, min_coeff=0.01, max_coeff=10.0, **more, **scalars)


def _lion(make: Inputs) -> None:
    for (p, g, m, _), scalars in _updates(make):
        kernels.lion(p, g, m, beta1=0.9, beta2=0.99, **scalars)
        kernels.lion([p, p[:1].clone()], [g, g[:1]], [m, m[:1].clone()], beta1=0.9, beta2=0.99, **scalars)


def _sgd(make: Inputs) -> None:
    step = make.scalar(3, torch.int64)
    for (p, g, m, _), scalars in _updates(make):
        kernels.sgd(p, g, m, momentum=0.9, step=step, **scalars)
        kernels.sgd([p, p[:1].clone()], [g, g[:1]], step=step, **scalars)


def _messages(make: Inputs) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Yield rows of numbers, and room for them in messages, of some bits in groups."""
    for bits, group, n in ((8, 40, 1001), (4, 256, 1001), (1, 96, 1001), (8, 8, 3)):
        yield (
            make.given(3, n),
            torch.zeros(3, -(-n // group) * (4 + group * bits // 8), dtype=torch.uint8, device=make.device),
            bits,
            group,
        )


def _quantize(make: Inputs) -> None:
    for x, messages, bits, group in _messages(make):
        if bits > 1:
            kernels.quantize(x, messages, bits=bits, group=group)
            kernels.quantize(x, messages, bits=bits, group=group, seed=7, kept=torch.zeros_like(x, dtype=torch.float32))


def _pack_signs(make: Inputs) -> None:
    for x, messages, bits, group in _messages(make):
        if bits == 1:
            kernels.pack_signs(x, messages, group=group)
            kernels.pack_signs(x, messages, group=group, kept=torch.zeros_like(x, dtype=torch.float32))


def _sum_messages(make: Inputs) -> None:
    for x, messages, bits, group in _messages(make):
        kernels.sum_messages(messages, torch.empty_like(x[0]), bits=bits, group=group)
        kernels.sum_messages(messages, torch.empty_like(x[0]), bits=bits, group=group, own=x[1], index=1)


def _fake_quantize(make: Inputs) -> None:
    for groups, numbers in ((3, 40), (2, 9000)):
        for scheme in ("deepspeed", "torchao"):
            x = make.trained(groups, numbers)
            kernels.fake_quantize(x, 4, scheme=scheme).sum().backward()
            kernels.fake_quantize(x, 8, scheme=scheme, symmetric=False)


RUNS: dict[str, Callable[[Inputs], None]] = {
    "layer_norm": _norms(True, kernels.layer_norm, kernels.add_layer_norm),
    "rms_norm": _norms(False, kernels.rms_norm, kernels.add_rms_norm),
    "swiglu": _swiglu,
    "bias_gelu": _gelu,
    "bias_dropout_add": _dropout,
    "rotary": _rotary,
    "masked_softmax": _softmax,
    "flash_attention": _flash,
    "sparse_attention": _sparse,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "adamw": _adamw,
    "lamb": _lamb,
    "lion": _lion,
    "sgd": _sgd,
    "fake_quantize": _fake_quantize,
    "quantize": _quantize,
    "pack_signs": _pack_signs,
    "sum_messages": _sum_messages,
}


def main(kernel: str, device: str, dtype: str) -> None:
    """Run a kernel in a dtype."""
    with only("triton"):
        RUNS[kernel](Inputs(device, getattr(torch, dtype)))
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{kernel}: all ran", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
