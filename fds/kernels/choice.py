"""Which runs: CUDA tensors take the Triton kernel, others the reference. Nothing else decides."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fds.errors import KernelError
from fds.kernels.language import is_interpreted, is_there

TRITON, REFERENCE = "triton", "reference"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that the kernels take; references take float64 too


class _Asked:
    """The scopes that are open, of all threads: backward runs in threads of torch's and must choose as forward did.

    A plain attribute, since torch.compile guards on one and not on a context variable or a thread's own.
    """

    kinds: tuple[str, ...] = ()


_asked = _Asked()
_changing = threading.Lock()


def _renew() -> None:
    """Let the child of a fork have the lock: the thread that held it is not in it."""
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def only(kind: str) -> Iterator[None]:
    """Run only "reference"s, or only "triton" kernels, inside.

    It holds for all threads of the process. On CPU tensors "triton" needs Triton's interpreter (TRITON_INTERPRET=1
    before fds is imported). Raises `KernelError` for another word.
    """
    if kind not in (TRITON, REFERENCE):
        raise KernelError("there is no such kernel", where="kind", got=repr(kind), want="'triton' or 'reference'")
    with _changing:
        _asked.kinds = (*_asked.kinds, kind)
    try:
        yield
    finally:
        with _changing:
            last = len(_asked.kinds) - 1 - _asked.kinds[::-1].index(kind)  # scopes of threads may close in any order
            _asked.kinds = _asked.kinds[:last] + _asked.kinds[last + 1 :]


def chosen(device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Return which kind runs on tensors like this: "triton" or "reference"."""
    if _asked.kinds:
        return _asked.kinds[-1]
    return TRITON if device.type == "cuda" and is_there and dtype in DTYPES else REFERENCE


def runs_triton(x: Tensor) -> bool:
    """Say whether the Triton kernel runs on `x`.

    Raises `KernelError` where Triton was asked for and cannot.
    """
    if chosen(x.device, x.dtype) == REFERENCE:
        return False
    if not is_there or (x.device.type != "cuda" and not is_interpreted):
        raise KernelError(
            "Triton kernels were asked for, and cannot run here", where="kernels.only('triton')",
            got=f"a tensor on {x.device}" if is_there else "no triton", want="a tensor on a GPU, or TRITON_INTERPRET=1",
            hint="references run everywhere: leave only('triton') out",
        )  # fmt: skip
    if x.dtype not in DTYPES:
        raise KernelError(
            "Triton kernels were asked for, and do not take this dtype", where="kernels.only('triton')",
            got=str(x.dtype), want="float32, float16 or bfloat16", hint="the reference takes float64",
        )  # fmt: skip
    return True


def all_run_triton(tensors: Sequence[Tensor]) -> bool:
    """Say whether the Triton kernel runs on all of some tensors on one device; one of each dtype is asked about.

    Raises as `runs_triton` does.
    """
    return all(map(runs_triton, {x.dtype: x for x in tensors}.values()))
