"""The pool: memory that a pure step writes its results into. A cache: dropping it changes nothing."""

from __future__ import annotations

import ctypes
import functools
import threading

import attrs
import torch
from torch import Tensor

from fds.autodiff import is_alone


@functools.cache
def keep_heap() -> None:
    """Let malloc keep the memory that every step gives back and takes again, for the whole process; once.

    From the first block of 32 MiB that is freed glibc learns that such sizes come again (mallopt(3), the dynamic
    M_MMAP_THRESHOLD), and gives less of its heap back. This one is never touched, so it costs nothing. A pipeline of
    two stages by ZB-H1 took 25,000 page faults and 1510 ms a step without, 5 and 1270 with it. Elsewhere it does
    nothing.
    """
    libc = ctypes.CDLL(None)
    malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", libc))
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", libc))
    free(malloc(2**25 - 2**13))


@attrs.define(eq=False)
class Pool:
    """Buffers by shape, dtype and device, handed out again only when nobody else shares their storage.

    Fresh memory is what makes a pure step slow: an Adam update of 50M float32 parameters takes 57 ms in place,
    58 to 80 into memory already touched, 890 to 980 into fresh pages (two cores).
    """

    buffers: dict[tuple, list[Tensor]] = attrs.field(factory=dict)
    # The last gradients (CPU only), until the next call begins: freed at the end of a step they would let malloc give
    # the top of its heap back, 560 page faults a step of the example; a hand-written loop keeps them in `.grad` too.
    ballast: list[Tensor] = attrs.field(factory=list)
    # Flat buckets, CPU only and for the same reason: what one step gathers and reduces in, the next one does too.
    scratch: dict[tuple, list[Tensor]] = attrs.field(factory=dict)
    taken: set[int] = attrs.field(factory=set)  # ids of those that were taken since the last sweep
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        keep_heap()

    def copies(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return contiguous copies of `tensors`; buffers that are free and not needed are let go."""
        outs, busy = [], {}
        with self.lock:  # two threads that step at once get two buffers
            free = {key: [b for b in held if is_alone(b)] for key, held in self.buffers.items()}
            for key, held in self.buffers.items():
                busy[key] = [b for b in held if not any(b is f for f in free[key])]
            for x in tensors:
                key = (x.shape, x.dtype, x.device)
                base = free[key].pop() if free.get(key) else torch.empty(x.shape, dtype=x.dtype, device=x.device)
                busy.setdefault(key, []).append(base)
                outs.append(base.detach())
            self.buffers = busy
        if outs:
            torch._foreach_copy_(outs, tensors)
        return outs

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory (numel,) with anything in it, for as long as somebody holds it."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        with self.lock:
            held = self.scratch.setdefault((numel, dtype), [])
            base = next((b for b in held if is_alone(b)), None)
            if base is None:
                with torch.inference_mode(False):
                    base = torch.empty(numel, dtype=dtype, device=device)
                held.append(base)
            self.taken.add(id(base))
            return base.detach()

    def sweep(self) -> None:
        """Let go of the flat buckets that nobody took since the last sweep."""
        with self.lock:
            self.scratch = {
                key: [b for b in held if id(b) in self.taken or not is_alone(b)] for key, held in self.scratch.items()
            }
            self.taken.clear()

    def __reduce__(self) -> tuple:
        return (Pool, ())


