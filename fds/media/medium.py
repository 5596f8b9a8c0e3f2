"""Media: what they do, which of them a tensor lives on, and reading and writing leaves that live on several.

The device is ordinary memory, the host page-locked memory where a GPU copies from it and to it. Such a copy begins when
the computing stream is done with what was asked of it so far: only then is the memory on the GPU, which is that
stream's, free to be read or written. So no more of it is taken than if nothing went on at once, and nobody has to tell
torch's allocator of the streams of copies, one for each direction.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds.media.mapping import Leaf, leaf_of, leaves, map_memory, nbytes_of, over, own, pages, unmap

Pairs = tuple[list[Tensor], list[Tensor]]  # what is written, and its values


class Medium(Protocol):
    """Where leaves live between steps. What is read is what was written, bit for bit. Threads may use it at once."""

    @property
    def name(self) -> str:
        """Its kind: "device", "host" or "disk"."""
        ...

    def make(self, x: Tensor) -> Tensor:
        """Return contiguous memory of the shape and dtype of `x`, with anything in it; `x` is not read.

        It has a storage of its own, and is given back when nobody holds that any more.
        """
        ...

    def read(self, leaves: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Begin to copy leaves that live here to `device`.

        Return the function that waits, and returns the copies, which may be written over. The leaves must not change
        until then.
        """
        ...

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], Any]:
        """Begin to copy `worked` (on any device) to leaves `new` that live here, of the same shapes and dtypes.

        Return the function that waits. Until then, `worked` must not change, and nobody may read `new`.
        """
        ...


def medium_of(x: Tensor) -> Medium | None:
    """Return the medium that made the memory of a tensor; None for an ordinary tensor.

    >>> medium_of(torch.zeros(2)) is None
    True
    """
    leaf = leaf_of(x)
    return None if leaf is None else leaf.medium


def read(leaves: Sequence[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
    """Begin to copy leaves to `device`, each from where it lives; ordinary tensors are copied as well.

    Return the function that waits, and returns the copies, which may be written over.

    >>> read([torch.arange(3)], torch.device("cpu"))()
    [tensor([0, 1, 2])]
    """
    groups = _groups(leaves)
    waits = [medium.read([leaves[i] for i in indices], device) for medium, indices in groups]

    def wait() -> list[Tensor]:
        by_index: dict[int, Tensor] = {}
        for (_, indices), copies in zip(groups, _all(waits), strict=True):
            by_index.update(zip(indices, copies, strict=True))
        return [by_index[i] for i in range(len(leaves))]

    return wait


def write(worked: Sequence[Tensor], new: Sequence[Tensor]) -> Callable[[], None]:
    """Begin to copy `worked` to the leaves `new`, each to where it lives; ordinary tensors are written at once.

    Return the function that waits.
    """
    waits = [medium.write([worked[i] for i in group], [new[i] for i in group]) for medium, group in _groups(new)]

    def wait() -> None:
        _all(waits)

    return wait


def _groups(leaves: Sequence[Tensor]) -> list[tuple[Medium, list[int]]]:
    """Return the media of leaves, each with the indices of those that live there."""
    groups: dict[int, tuple[Medium, list[int]]] = {}
    for i, x in enumerate(leaves):
        medium = medium_of(x) or DEVICE
        groups.setdefault(id(medium), (medium, []))[1].append(i)
    return list(groups.values())


def _all(waits: list[Callable[[], Any]]) -> list[Any]:
    """Wait for all, even if one fails: nobody may write into this memory from here on. Raises the first error."""
    done: list[Any] = []
    failed: BaseException | None = None
    for wait in waits:
        try:
            done.append(wait())
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return done


@attrs.frozen
class Device:
    """The memory that a step computes in."""

    name = "device"

    def make(self, x: Tensor) -> Tensor:
        """Return fresh memory on the device of `x`."""
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def read(self, leaves: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Return copies; those between the host and a GPU are begun at once."""
        cuda = device.type == "cuda"
        if not any(x.is_cuda != cuda for x in leaves):
            return lambda: [x.to(device, copy=True) for x in leaves]
        copies = [torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=x.is_cuda and not cuda) for x in leaves]
        wait = start_copies(copies, leaves)

        def done() -> list[Tensor]:
            wait()
            return copies

        return done

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], None]:
        """Write at once, or begin to write between the host and a GPU."""
        return start_copies(new, worked)


DEVICE = Device()


@attrs.frozen
class Host(Device):
    """Memory of the CPU, of exact sizes; for tensors of a GPU page-locked, and copied beside what that computes.

    Attributes:
        cached: whether it is torch's pinned memory instead: taken and given back in no time, in powers of two.
    """

    cached: bool = False
    name = "host"

    def make(self, x: Tensor) -> Tensor:
        """Return memory on the CPU."""
        if not (nbytes := nbytes_of(x)):
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")
        if x.is_cuda and not self.cached:
            base = make_page_locked(nbytes, x.device)
        else:
            base = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=x.is_cuda)
        address = base.data_ptr()
        leaf = over(own(address, nbytes, _free, address, base), x)
        leaves[address] = Leaf(self)
        return leaf


def _free(address: int, base: Tensor) -> None:
    """Let memory go, once no GPU copies from it, or to it, any more."""
    leaf = leaves.pop(address, None)
    if leaf is not None and leaf.copied is not None:
        done, pid = leaf.copied
        if pid == os.getpid():
            done.synchronize()


_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs


def make_page_locked(nbytes: int, gpu: torch.device) -> Tensor:
    """Return memory (nbytes,) uint8, of whole pages, that is unlocked and unmapped when nobody holds it.

    torch's own pinned memory is rounded up to powers of two, and never given back to the system. Where the driver
    refuses it is not locked, so that copies wait, and a warning says why. Raises `OSError`, and `RuntimeError` in a
    forked process, where there is no driver.
    """
    driver: Any = torch.cuda.cudart()
    here, size = torch.cuda.device(gpu), pages(nbytes)
    address = map_memory(size)
    with here:
        code = int(driver.cudaHostRegister(address, size, _PORTABLE))
    if code:
        with contextlib.suppress(RuntimeError):  # the driver remembers the error, and the next kernel would raise it
            torch.empty(1, device=gpu).fill_(0)
        warnings.warn(
            f"memory of the host is not page-locked, so copies wait for {gpu}: the driver refused {size:,} bytes "
            f"({driver.cudaGetErrorString(driver.cudaError(code))})",
            RuntimeWarning,
            stacklevel=2,
        )
    owner = own(address, size, _unlock, address, size, None if code else driver, here, os.getpid())
    return over(owner, torch.empty(nbytes, dtype=torch.uint8, device="meta"))


def _unlock(address: int, size: int, driver: Any, here: torch.cuda.device, pid: int) -> None:
    if driver is not None and pid == os.getpid():  # a forked process has none
        with here:  # in whichever thread this is
            if int(driver.cudaHostUnregister(address)):
                return  # it stays the driver's
    unmap(address, size)


def start_copies(new: Sequence[Tensor], old: Sequence[Tensor]) -> Callable[[], None]:
    """Begin to copy `old` to `new`, on any devices; what does not pass between the host and a GPU is copied at once.

    Return the function after which `new` may be used: the computing stream waits for what goes to a GPU, and the host
    goes on; it waits for what comes from one. Until then nobody may write to `old`, or use `new`; nor may the host
    write later to memory that a GPU copies from before it has waited for the computing stream.
    """
    by_gpu: dict[torch.device | None, tuple[Pairs, Pairs]] = {}  # what goes there, what comes from there
    for x, y in zip(new, old, strict=True):
        gpu = (x if x.is_cuda else y).device if x.is_cuda != y.is_cuda else None
        to, values = by_gpu.setdefault(gpu, (([], []), ([], [])))[y.is_cuda]
        to.append(x)
        values.append(y)
    waits: list[Callable[[], None]] = []
    for gpu, directions in by_gpu.items():
        for (to, values), comes in zip(directions, (False, True), strict=True):
            if to and gpu is None:
                torch._foreach_copy_(to, values)
            elif to and gpu is not None:
                waits.append(_start_on_stream(gpu, to, values, comes=comes))

    def wait() -> None:
        for wait_for_one in waits:
            wait_for_one()

    return wait


def _start_on_stream(gpu: torch.device, new: list[Tensor], old: list[Tensor], *, comes: bool) -> Callable[[], None]:
    """Begin a copy from the GPU, or to it, on its stream; return what waits, and holds the tensors until then."""
    side, done = _stream(gpu, comes), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side), torch.no_grad():
        for x, y in zip(new, old, strict=True):
            x.copy_(y, non_blocking=True)
        done.record(side)
    for y in new if comes else old:
        if (leaf := leaf_of(y)) is not None:
            leaf.copied = done, os.getpid()  # that memory is given back after it

    return functools.partial(_wait_for, gpu, done, new, old, comes=comes)


def _wait_for(gpu: torch.device, done: torch.cuda.Event, *tensors: list[Tensor], comes: bool) -> None:
    if comes:
        done.synchronize()
    else:
        torch.cuda.current_stream(gpu).wait_event(done)


@functools.cache
def _stream(gpu: torch.device, comes: bool) -> torch.cuda.Stream:
    """Return the stream of a direction, of which a GPU has an engine each."""
    return torch.cuda.Stream(gpu)
