"""Choose between kernel and reference: CUDA tensors take the Triton kernel, others the reference.

Triton is loaded (by `fds.kernels.language`) where it may run, not where this is imported: it takes 70 ms.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fds.errors import KernelError

TRITON, REFERENCE = "triton", "reference"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the kernels; references take float64 too


class _Scopes:
    """The open scopes of `only`, of all threads: backward runs in threads of torch and must choose as forward did.

    A plain attribute, on which torch.compile guards, unlike a context variable or thread-local data.
    """

    kinds: tuple[str, ...] = ()


_scopes = _Scopes()
_changing = threading.Lock()


def _renew() -> None:
    """Renew the lock in the child of a fork, where the thread that held it does not exist."""
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def only(kind: str) -> Iterator[None]:
    """Run only "reference" implementations, or only "triton" kernels, inside the block.

    It applies to all threads of the process. On CPU tensors "triton" needs Triton's interpreter (TRITON_INTERPRET=1
    before a kernel is first used). Raises `KernelError` for any other `kind`.
    """
    if kind not in (TRITON, REFERENCE):
        raise KernelError("there is no such kernel", where="kind", got=repr(kind), want="'triton' or 'reference'")
    with _changing:
        _scopes.kinds = (*_scopes.kinds, kind)
    try:
        yield
    finally:
        with _changing:
            last = len(_scopes.kinds) - 1 - _scopes.kinds[::-1].index(kind)  # threads close scopes in any order
            _scopes.kinds = _scopes.kinds[:last] + _scopes.kinds[last + 1 :]


def chosen(device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Return which implementation runs on such tensors: "triton" on a CUDA device, else "reference".

    Inside `only(kind)` it is that kind. `dtype` is that of the tensors: the kernels take float32, float16 and bfloat16.
    """
    if _scopes.kinds:
        return _scopes.kinds[-1]
    if device.type != "cuda" or dtype not in DTYPES:
        return REFERENCE
    from fds.kernels import language

    return TRITON if language.is_there else REFERENCE


def runs_triton(x: Tensor) -> bool:
    """Return whether the Triton kernel runs on `x`.

    Raises `KernelError` where Triton was requested and cannot run.
    """
    if chosen(x.device, x.dtype) == REFERENCE:
        return False
    from fds.kernels import language

    if not language.is_there or (x.device.type != "cuda" and not language.is_interpreted):
        raise KernelError(
            "Triton kernels were requested, and cannot run here", where="kernels.only('triton')",
            got=f"a tensor on {x.device}" if language.is_there else "no triton",
            want="a tensor on a GPU, or TRITON_INTERPRET=1",
            hint="references run everywhere: leave only('triton') out",
        )
    if x.dtype not in DTYPES:
        raise KernelError(
            "Triton kernels were requested, and do not take this dtype", where="kernels.only('triton')",
            got=str(x.dtype), want="float32, float16 or bfloat16", hint="the reference takes float64",
        )
    return True


def all_run_triton(tensors: Sequence[Tensor]) -> bool:
    """Return whether the Triton kernel runs on all of some tensors on one device; one of each dtype is checked.

    Raises `KernelError` as `runs_triton` does.
    """
    if not _scopes.kinds and tensors and tensors[0].device.type != "cuda":
        return False
    return all(map(runs_triton, {x.dtype: x for x in tensors}.values()))
