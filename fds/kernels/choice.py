"""Choose between a kernel and torch's own operators: on a GPU by evidence, elsewhere always torch's.

A kernel is chosen where the repository records that its cases passed on a GPU of the same architecture, as they are
written now (`fds.kernels.evidence`); a scope overrules that. What was decided once is a look-up afterwards.

Triton is loaded (by `fds.kernels.language`) where it may run, not where this is imported: it takes 70 ms.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from fds.errors import KernelError

TRITON, REFERENCE = "triton", "reference"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the kernels; references take float64 too
_PREFERRED = "preferred"  # the kind of scope that `prefer_triton` opens


class _Scopes:
    """The open scopes of `only` and `prefer_triton`, of all threads: backward, in threads of torch, chooses as forward.

    A plain attribute, on which torch.compile guards, unlike a context variable or thread-local data; of the instance
    from the start, or code compiled before the first scope would be compiled anew after it.
    """

    def __init__(self) -> None:
        self.kinds: tuple[str, ...] = ()


_scopes = _Scopes()
_changing = threading.Lock()


def _renew() -> None:
    """Renew the lock in the child of a fork, where the thread that held it does not exist."""
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def _scope(kind: str) -> Iterator[None]:
    with _changing:
        _scopes.kinds = (*_scopes.kinds, kind)
    try:
        yield
    finally:
        with _changing:
            last = len(_scopes.kinds) - 1 - _scopes.kinds[::-1].index(kind)  # threads close scopes in any order
            _scopes.kinds = _scopes.kinds[:last] + _scopes.kinds[last + 1 :]


def only(kind: str) -> contextlib.AbstractContextManager[None]:
    """Run only "reference" implementations, or only "triton" kernels, inside the block.

    It applies to all threads of the process. Inside `only("triton")` a call that no kernel can take raises an error
    (`prefer_triton` runs the reference): on CPU tensors it needs Triton's interpreter (TRITON_INTERPRET=1 before a
    kernel is first used). Raises `KernelError` for any other `kind`.
    """
    if kind not in (TRITON, REFERENCE):
        raise KernelError("there is no such kind", where="kind", got=repr(kind), want="'triton' or 'reference'")
    return _scope(kind)


def prefer_triton() -> contextlib.AbstractContextManager[None]:
    """Run Triton kernels inside the block wherever they can run, whether they passed on such a GPU or not.

    That is on CUDA tensors of float32, float16 and bfloat16, and in Triton's interpreter on those of the CPU.
    References run on all others. It applies to all threads of the process.
    """
    return _scope(_PREFERRED)


def chosen(kernel: str, device: torch.device | str, dtype: torch.dtype = torch.float32) -> str:
    """Return which implementation runs for such tensors: "triton" or "reference"; inside `only`, that kind.

    Args:
        kernel: the name of a function of `fds.kernels`, such as "layer_norm".
        device: that of the tensors, such as torch.device("cuda") or "cuda".
        dtype: that of the tensors; the kernels take float32, float16 and bfloat16.

    Raises `KernelError` for a function that `fds.kernels` does not have.
    """
    return REFERENCE if _decide(kernel, torch.device(device), dtype, _kind()) == REFERENCE else TRITON


def runs_triton(kernel: str, x: Tensor) -> bool:
    """Return whether the Triton kernel of this name runs on `x`.

    Raises `KernelError` where Triton was requested by `only` and cannot run.
    """
    device, kinds = x.device, _scopes.kinds
    if not kinds and device.type != "cuda":
        return False
    decision = _decide(kernel, device, x.dtype, kinds[-1] if kinds else "")
    if decision == TRITON:
        return True
    if decision == REFERENCE:
        return False
    raise KernelError(
        f"Triton kernels were requested, and {decision}", where="kernels.only('triton')",
        got=f"a tensor on {device}, {x.dtype}",
        want="float32, float16 or bfloat16 on a GPU, or on a CPU with TRITON_INTERPRET=1",
        hint="references take any: leave only('triton') out, or take prefer_triton()",
    )


def all_run_triton(kernel: str, tensors: Sequence[Tensor]) -> bool:
    """Return whether the Triton kernel runs on all of some tensors on one device; one of each dtype is checked.

    Raises `KernelError` as `runs_triton` does.
    """
    if not _scopes.kinds and tensors and tensors[0].device.type != "cuda":
        return False
    return all(runs_triton(kernel, x) for x in {x.dtype: x for x in tensors}.values())


def is_left_to_torch(kernel: str, x: Tensor) -> bool:
    """Return whether torch's own operator may take the place of a kernel's function: on a GPU, where nobody asked.

    References, which are asked for, give what the kernels give; torch's dropout draws other masks.
    """
    return x.is_cuda and not _scopes.kinds and not runs_triton(kernel, x)


def is_demanded() -> bool:
    """Return whether `only("triton")` holds here: what a kernel cannot take is then an error."""
    return _kind() == TRITON


def _kind() -> str:
    """Return the kind of the innermost scope; empty without one."""
    return _scopes.kinds[-1] if _scopes.kinds else ""


_decided: dict[tuple[str, torch.device, torch.dtype, str], str] = {}


def _decide(kernel: str, device: torch.device, dtype: torch.dtype, kind: str) -> str:
    """Return "triton", "reference", or why Triton cannot run although `only` demands it."""
    key = (kernel, device, dtype, kind)
    decision = _decided.get(key)
    if decision is None:
        decision = _decided[key] = _reasons(kernel, device, dtype, kind)[0]
    return decision


# What torch.compiler.assume_constant_result sets, which loads all of torch._dynamo (1 s): a decision is constant in a
# process, so torch.compile calls this while it traces, and traces past it.
_decide._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def explained(kernel: str, device: torch.device | str, dtype: torch.dtype = torch.float32) -> str:
    """Return why that runs which `chosen` returns, in words."""
    return _reasons(kernel, torch.device(device), dtype, _kind())[1]


def _reasons(kernel: str, device: torch.device, dtype: torch.dtype, kind: str) -> tuple[str, str]:
    """Return what `_decide` does, and why, in words."""
    from fds.kernels import evidence

    evidence.check(kernel)
    if kind == REFERENCE:
        return REFERENCE, "references were requested"
    if not kind and device.type != "cuda":
        return REFERENCE, "kernels run on GPUs"
    if not kind:
        is_chosen, words = evidence.judge(kernel, _architecture(device), dtype)
        if not is_chosen:
            return REFERENCE, words
    obstacle = _obstacle(device, dtype)
    if obstacle:
        return obstacle if kind == TRITON else REFERENCE, f"kernels {obstacle}"
    return TRITON, "kernels were requested" if kind else words


def _obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Return why no kernel can run on such tensors; empty where kernels can."""
    from fds.kernels import language

    if not language.is_there:
        return "cannot run here: Triton is not installed"
    if device.type != "cuda" and not language.is_interpreted:
        return f"cannot run here: kernels run on GPUs, and this is {device.type}"
    return "" if dtype in DTYPES else f"do not take this dtype: {dtype}".replace("torch.", "")


def _architecture(device: torch.device) -> str:
    """Return the architecture of a GPU, such as "sm_90"; empty where torch sees no such GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


_RUNS = {TRITON: "Triton kernel", REFERENCE: "torch's operators"}


def explanations(device: torch.device | str, more: Collection[torch.dtype] = ()) -> dict[str, str]:
    """Return for every kernel what runs on a device, and why, for the dtypes of kernels and `more`, told apart."""
    from fds.kernels.evidence import HOMES

    texts = {}
    for kernel in HOMES:
        dtypes_of: dict[str, list[str]] = {}
        for dtype in dict.fromkeys((*DTYPES, *more)):
            text = f"{_RUNS[chosen(kernel, device, dtype)]} ({explained(kernel, device, dtype)})"
            dtypes_of.setdefault(text, []).append(str(dtype).removeprefix("torch."))
        if len(dtypes_of) == 1:
            texts[kernel] = next(iter(dtypes_of))
        else:
            texts[kernel] = "; ".join(f"{text} in {', '.join(dtypes)}" for text, dtypes in dtypes_of.items())
    return texts


def summary(device: torch.device, more: Collection[torch.dtype] = ()) -> str:
    """Return the same as one text: one line if it is the same for all kernels, else one for each text."""
    kernels: dict[str, list[str]] = {}
    for kernel, text in explanations(device, more).items():
        kernels.setdefault(text, []).append(kernel)
    if len(kernels) == 1:
        return next(iter(kernels))
    return "\n".join(f"{', '.join(names)}: {text}" for text, names in kernels.items())
