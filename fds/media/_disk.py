"""A directory on disk: leaves in a nameless file, read and written past the page cache."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Callable

import attrs
import torch
import xxhash
from torch import Tensor

from fds.collectives.links import dry
from fds.errors import DiskError, checked_call, expanded, is_a, is_int, is_number
from fds.media import arena
from fds.media.drive import Drive, Threads
from fds.media.mapping import PAGE, Buffers, Leaf, leaves, nbytes_of, over, own, pages, view
from fds.media.medium import Medium


@attrs.frozen(eq=False)
class Disk:
    """Leaves on disk. `fds.disk` makes it, and says what its fields mean."""

    directory: str
    buffer_bytes: int
    buffers: int
    queue_depth: int
    checksums: bool
    timeout: float
    _open: list[Drive] = attrs.field(factory=list, init=False)
    name = "disk"

    def make(self, x: Tensor) -> Tensor:
        """Return a mapped extent: a tensor on the CPU. Raises `DiskError`, also where the disk is full."""
        nbytes = nbytes_of(x)
        if not nbytes:
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")
        drive, size = self._drive(), pages(nbytes)
        address = drive.arena.take(size)
        leaf = over(own(address, nbytes, _free, drive.arena, address, size), x)
        leaves[address] = Leaf(self, drive.arena)
        return leaf

    def read(self, leaves: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Begin to read leaves into buffers; other tensors are copied. Waiting raises `DiskError`."""
        if dry.get() is not None:
            return lambda: [x.detach().clone().to(device) for x in leaves]
        drive = self._drive()
        records = {i: leaf for i, x in enumerate(leaves) if (leaf := drive.leaf(x)) is not None}
        order = sorted(records, key=lambda i: leaves[i].data_ptr())
        slots = drive.slots([pages(leaves[i].nbytes) for i in order])
        copies = {i: over(owner, leaves[i], offset) for i, (owner, offset) in zip(order, slots, strict=True)}
        request = drive.start([(leaves[i], x) for i, x in copies.items()], writes=False)

        def wait() -> list[Tensor]:
            drive.wait(request, writes=False)
            for i, x in copies.items():
                self._compare(x, leaves[i], records[i])
            values = (copies[i] if i in copies else x.detach().clone() for i, x in enumerate(leaves))
            return [x.to(device) for x in values]

        return wait

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], None]:
        """Begin to write leaves; other tensors are copied. Waiting raises `DiskError`."""
        if dry.get() is not None:
            return lambda: None
        drive = self._drive()
        ready: list[tuple[Tensor, Tensor]] = []
        staged: list[tuple[Tensor, Tensor]] = []
        for x, leaf in zip(worked, new, strict=True):
            record = drive.leaf(leaf)
            if record is None:
                _through_memory(x, leaf)
                continue
            record.wrote(*_bytes_of(leaf))
            (ready if _is_ready(x, leaf) else staged).append((leaf, x))
        if staged:
            staged.sort(key=lambda pair: pair[0].data_ptr())
            slots = drive.slots([pages(leaf.nbytes) for leaf, _ in staged])
            copies = [over(owner, leaf, at) for (leaf, _), (owner, at) in zip(staged, slots, strict=True)]
            torch._foreach_copy_(copies, [x.detach() for _, x in staged])
            ready += [(leaf, x) for (leaf, _), x in zip(staged, copies, strict=True)]
            del slots, copies
        for leaf, x in ready if self.checksums else ():
            if (record := drive.leaf(leaf)) is not None and not record.in_place:
                record.checksums[_bytes_of(leaf)] = xxhash.xxh3_64_intdigest(view(x.data_ptr(), x.nbytes))
        request = drive.start(ready, writes=True)
        if staged:
            with drive.lock:
                drive.staged.append(request)
        return lambda: drive.wait(request, writes=True)

    def __str__(self) -> str:
        direct = all(drive.arena.file.direct for drive in self._open)
        return f"disk {self.directory}{'' if direct else ', not O_DIRECT'}"

    def __repr__(self) -> str:
        args = [f"{name}={getattr(self, name)!r}" for name, value in _DEFAULTS.items() if getattr(self, name) != value]
        return f"fds.disk({', '.join([repr(self.directory), *args])})"

    def __reduce__(self) -> tuple:
        """Let a copy open its own."""
        return (Disk, tuple(getattr(self, name) for name in ("directory", *_DEFAULTS)))

    def _drive(self) -> Drive:
        with _opening:
            if not self._open:
                opened = arena.arena_of(self.directory)
                threads = Threads(self.queue_depth, direct=opened.file.direct)
                self._open.append(Drive(opened, Buffers(self.buffer_bytes, self.buffers), threads, self.timeout))
                _disks.add(self)
            return self._open[0]

    def _compare(self, x: Tensor, old: Tensor, leaf: Leaf) -> None:
        """Compare what was read with what was written: of every piece that lies in it."""
        first, last = _bytes_of(old)
        for (start, end), want in list(leaf.checksums.items()) if self.checksums else ():
            if first <= start and end <= last:
                got = xxhash.xxh3_64_intdigest(view(x.data_ptr() + start - first, end - start))
                if got != want:
                    raise DiskError(
                        "the disk returned other bytes than were written",
                        where=self.directory,
                        got=f"a checksum of {got:016x}, tensor {tuple(x.shape)} {x.dtype}",
                        want=f"{want:016x}",
                        hint="look at the disk; if a tensor of the state was written in place instead, "
                        "turn checksums off",
                    )


def place_of(medium: Medium) -> str:
    """Return where a medium is, in a word: its name, of a disk with its directory."""
    return f"disk {medium.directory}" if isinstance(medium, Disk) else medium.name


@checked_call
def disk(
    directory: str | os.PathLike[str],
    *,
    buffer_bytes: int = 2**24,
    buffers: int = 3,
    queue_depth: int = 8,
    checksums: bool = False,
    timeout: float = 60.0,
) -> Disk:
    """Return a medium: leaves of a state in a directory of a local disk, read and written past the page cache.

    Nothing is opened before the first leaf is made. Then the directory is locked: a second run in it is refused. The
    leaves are in one file without a name, so that nothing is left of them when the process ends, in whatever way. A
    leaf takes whole pages of 4096 bytes, and is a tensor that anybody may read; what nobody holds is used again. A
    forked process has changes of its own, and sees, where it made none, what its parent writes later: it must copy
    what it needs before the parent goes on.

    Memory is bounded by `buffers` times `buffer_bytes`, or times the largest set of leaves that is read at once if that
    is more, and what a caller keeps of the results beyond that. A file system without O_DIRECT is used through the page
    cache, which is told to keep nothing.

    Args:
        directory: one that exists, on a local disk, for all ranks of a run or one for each.
        buffer_bytes: what is read at once: the size of a buffer, in bytes.
        buffers: the number of buffers: one that is read, one that is updated, one that is written.
        queue_depth: the number of requests, of at most 2 MiB, that the disk has at once, each from a thread.
        checksums: whether what is read is compared with what was written (xxh3, 64 bits). Leaves must not be written in
            place then; those that follow an update all at once are, and are not compared.
        timeout: the seconds without any progress after which waiting for the disk ends with an error.

    Raises `DiskError` for a wrong argument; when it is used, for a directory that is missing, locked or full, and for a
    disk that fails, does not answer, or returns other bytes.
    """
    path = os.fspath(directory) if is_a(directory, str | os.PathLike) else None
    _check(is_a(path, str) and bool(path), "directory", directory, "a path")
    _check(is_int(buffer_bytes, PAGE), "buffer_bytes", buffer_bytes, f"bytes, at least {PAGE}")
    _check(is_int(buffers, 1), "buffers", buffers, "a positive integer")
    _check(is_int(queue_depth, 1) and queue_depth <= 1024, "queue_depth", queue_depth, "an integer from 1 to 1024")
    _check(is_a(checksums, bool), "checksums", checksums, "True or False")
    _check(
        is_number(timeout) and 0 < timeout <= threading.TIMEOUT_MAX, "timeout", timeout, "a positive number of seconds"
    )
    return Disk(os.path.abspath(expanded(str(path))), buffer_bytes, buffers, queue_depth, checksums, float(timeout))


_DEFAULTS = {
    parameter.name: parameter.default
    for parameter in inspect.signature(disk).parameters.values()
    if parameter.name != "directory"
}
_disks: weakref.WeakSet[Disk] = weakref.WeakSet()  # that are open
_opening = threading.Lock()


def _check(right: bool, name: str, got: object, want: str) -> None:
    if not right:
        raise DiskError("a wrong argument of fds.disk", where=name, got=repr(got)[:80], want=want)


def _free(home: arena.Arena, address: int, nbytes: int) -> None:
    leaves.pop(address, None)
    home.give(address, nbytes)


def _is_ready(x: Tensor, leaf: Tensor) -> bool:
    """Return whether the pages that a tensor is in can be written as they are."""
    same = x.device.type == "cpu" and x.dtype == leaf.dtype and x.shape == leaf.shape
    return same and x.data_ptr() % PAGE == 0 and x.is_contiguous() and not (x.is_conj() or x.is_neg())


def _through_memory(x: Tensor, leaf: Tensor) -> None:
    """Write a part of a leaf, or no leaf of a disk."""
    leaf.detach().copy_(x.detach())
    if (record := leaves.get(leaf.untyped_storage().data_ptr())) is not None:
        record.wrote(*_bytes_of(leaf))


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """Return the first and last + 1 byte in its storage that a tensor may reach; of one with gaps all."""
    if not x.is_contiguous():
        return 0, x.untyped_storage().nbytes()
    start = int(x.storage_offset()) * x.element_size()
    return start, start + x.nbytes


def _keep_in_child() -> None:
    """Let the child of a fork treat leaves as plain tensors, with values that it alone changes from here on."""
    global _opening
    _opening = threading.Lock()
    for address, leaf in list(leaves.items()):
        if isinstance(leaf.place, arena.Arena):
            del leaves[address]
    arena.keep_in_child()
    for medium in list(_disks):
        medium._open.clear()


os.register_at_fork(after_in_child=_keep_in_child)
