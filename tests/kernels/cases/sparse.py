"""Launches of sparse attention, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.attention_layouts import bigbird
from fds.kernels.block_selection import BlockSelection
from fds.kernels.sparse import sparse_attention

TOKENS = 1024


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    seen, bias = torch.empty(2, TOKENS, dtype=torch.bool), torch.empty(4, 1, TOKENS, dtype=dtype)
    documents = torch.empty(2, TOKENS, dtype=torch.int32)
    dropped = {"p": 0.1, "seed": torch.empty((), dtype=torch.int64)}
    relative = {"relative_bias": torch.empty(4, 2 * TOKENS - 1, dtype=dtype)}
    everything = {"causal": True, "key_padding": seen, "bias": bias, "documents": documents, **relative, **dropped}
    all_of = {  # each row of the launch tables, and the smallest and the largest blocks
        torch.bfloat16: [
            *[(16, 64, {}), (64, 64, {"causal": True}), (128, 64, everything)],
            *[(16, 128, everything), (64, 128, {}), (64, 128, everything)],
            *[(32, 256, {"causal": True}), (64, 256, everything)],
        ],
        torch.float16: [(64, 80, {"causal": True, "key_padding": seen})],
        torch.float32: [(16, 64, {"causal": True}), (64, 64, everything), (64, 128, {}), (128, 128, everything)],
    }
    wide = 64 if dtype == torch.float32 else 128
    for block, together, options in ((64, 1, {"causal": True}), (16, 16, everything), (128, 1, {})):
        name = f"chosen {block} {together} {' '.join(options)}"
        yield name, lambda b=block, t=together, o=options: _run_chosen(dtype, b, t, wide, o)
    for block, d, options in all_of[dtype]:
        yield f"{block} {d} {' '.join(options)}", lambda b=block, d=d, options=options: _run(dtype, b, d, options)


def _qkv(dtype: torch.dtype, d: int) -> tuple[torch.Tensor, ...]:
    return torch.empty(2, TOKENS, 3, 4, d, dtype=dtype, requires_grad=True).transpose(1, 3).unbind(2)


def _run_chosen(dtype: torch.dtype, block: int, together: int, d: int, options: dict) -> None:
    q, k, v = _qkv(dtype, d)
    chosen = torch.zeros(2, 4, TOKENS // together, 9, dtype=torch.int32)
    out = sparse_attention(q, k, v, BlockSelection(chosen, TOKENS, block, together), **options)
    out.backward(out)


def _run(dtype: torch.dtype, block: int, d: int, options: dict) -> None:
    q, k, v = _qkv(dtype, d)
    out = sparse_attention(q, k, v, bigbird(4, TOKENS // block, block=block), **options)
    out.backward(out)
