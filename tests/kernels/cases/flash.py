"""Launches of attention, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.flash import flash_attention


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    seen, bias = torch.empty(2, 1024, dtype=torch.bool), torch.empty(4, 1, 1024, dtype=dtype)
    documents = torch.empty(2, 1024, dtype=torch.int32)
    dropped = {"p": 0.1, "seed": torch.empty((), dtype=torch.int64)}
    everything = {"causal": True, "key_padding": seen, "bias": bias, **dropped}
    each = {"causal": True, "bias": torch.empty(4, 1024, 1024, dtype=dtype)}  # a bias for each query and key
    all_of = {  # each row of the launch tables; columns of 80 end inside a block; float16 compiles as bfloat16 does
        torch.bfloat16: [
            *[(64, {}), (64, dropped), (64, everything)],
            *[(128, {"causal": True}), (128, dropped), (128, everything), (128, each)],
            *[(256, {"causal": True}), (256, dropped), (256, everything)],
        ],
        torch.float16: [(80, {"causal": True, "key_padding": seen}), (128, {"causal": True, "documents": documents})],
        torch.float32: [(64, {"causal": True}), (64, everything), (128, {}), (128, everything)],
    }
    for d, options in all_of[dtype]:
        yield f"{d} {' '.join(options)}", lambda d=d, options=options: _run(dtype, d, options)


def _run(dtype: torch.dtype, d: int, options: dict) -> None:
    q, k, v = torch.empty(2, 1024, 3, 4, d, dtype=dtype, requires_grad=True).transpose(1, 3).unbind(2)
    out = flash_attention(q, k, v, **options)
    out.backward(out)
