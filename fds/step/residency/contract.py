"""`Residency`, of the station `place`: where leaves of a state live, what holds them to it, who hears errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.errors import ComposeError, DiskError, is_a
from fds.optim.returned import in_words
from fds.step import foreach
from fds.step.agreement import Agreement
from fds.step.ranges import in_range
from fds.step.structure import Structure

WHAT = "what lives elsewhere"  # of messages
Slice = int | tuple[int, int, int]  # by its index, or its first and last + 1 element too


@attrs.frozen
class Resident:
    """A leaf of a state, as a residency knows it.

    Attributes:
        kind: "params" (a master), "opt" (the optimizer's), "slots" (what follows an update, as averages do), or
            "gradients": summed ones, from when they are final to the update. They are of no state.
        names: of the parameters of its slice; none for a leaf of "slots" that is no parameter's.
        index: which slice, of all that the state holds, not trained ones too.
        count: how many these are.
        in_place: whether what follows an update writes it where it is, all of it at once (see `After`).
    """

    kind: str
    names: tuple[str, ...]
    index: int
    count: int
    in_place: bool = False


class Residency(Protocol):
    """Where leaves live between steps, and how an update gets at them: it reads a chunk ahead and writes one back.

    What is read and written are the bits that were given, so no number depends on it. Several threads may step at once.
    """

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of which some leaves live here: "params", "opt", "slots", "gradients" (see `Resident`)."""
        ...

    def holds(self, leaf: Resident) -> bool:
        """Say whether a leaf of one of these kinds lives here, every time the same; others are on the device."""
        ...

    @property
    def updates_on(self) -> str:
        """Where chunks with leaves that live here are updated: "device", where the step runs, or "host", the CPU.

        What lives on the device then comes over and goes back, as gradients come. An update that communicates, or
        draws, runs on the device. The CPU and a GPU round differently: bits are those of where the update runs.
        """
        ...

    def medium(self, leaf: Resident) -> str:
        """Return where a leaf that lives here is, in a word: "host", or any other but "device".

        "host" is ordinary memory of the CPU: updates that run there write into it. All others are read and written.
        """
        ...

    def chunks(self, structure: Structure) -> Sequence[Sequence[Slice]]:
        """Return which slices are visited together, each once, in the order of the visits.

        A slice is its index in `structure.segments`; or several pieces of it, one after another from its first element
        to its last, are each (index, start, end), cut at multiples of 64 elements. Slices of optimizers that are not
        elementwise are visited whole, where their first piece is. Ranks that hold slices of the same parameters return
        the same.
        """
        ...

    def make(self, x: Tensor, leaf: Resident) -> Tensor:
        """Return memory for a leaf like `x`, of its shape and dtype, contiguous, with anything in it.

        Nobody else may hold it, and it is given back when nobody holds it any more. It may be on any device, since
        losses and updates are given copies; but a leaf that is written `in_place` is on the device of `x`. Nothing is
        to be read from `x`, which may have no memory of its own.
        """
        ...

    def read(self, old: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Begin to copy flat leaves, or pieces of them, to `device`, where they are computed with.

        Return the function that waits, and returns the copies. Where the update runs on the host, leaves and gradients
        that live on the device are read as well, and leaves are written there.
        """
        ...

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], Any]:
        """Begin to write values, which may be on another device, to flat leaves or pieces of them.

        Return the function that waits.
        """
        ...


@attrs.frozen
class OnDevice:
    """Every leaf lives where the step runs, in memory that the update writes into: one chunk, nothing to read."""

    kinds = ()
    updates_on = "device"

    def holds(self, leaf: Resident) -> bool:
        """Return False."""
        return False

    def medium(self, leaf: Resident) -> str:
        """Return the host, though it holds nothing."""
        return "host"

    def chunks(self, structure: Structure) -> list[list[int]]:
        """Return all slices."""
        return [list(range(len(structure.segments)))]

    def make(self, x: Tensor, leaf: Resident) -> Tensor:
        """Return fresh memory."""
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def read(self, old: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Return copies."""
        return lambda: [x.to(device, copy=True) for x in old]

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], Any]:
        """Write at once."""
        foreach.copy_(new, worked)
        return lambda: None


def is_held(residency: Residency, leaf: Resident | None, numel: int) -> bool:
    """Say whether a leaf of so many elements lives in a residency; None is one that never does.

    Raises `ComposeError` where `holds` returns anything but a boolean.
    """
    if leaf is None or not numel or leaf.kind not in residency.kinds:
        return False
    holds = residency.holds(leaf)
    if not is_a(holds, bool):
        raise broken(residency, f"holds({leaf})", in_words(holds), "True or False")
    return holds


def made(residency: Residency, x: Tensor, leaf: Resident | None, device: torch.device | None = None) -> Tensor:
    """Return memory for a leaf like `x` where it lives, with anything in it.

    `device` is that of an `x` that is not on it, but on `meta` or where it lives.

    Raises `ComposeError` for other memory.
    """
    if leaf is None or not is_held(residency, leaf, x.numel()):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device if device is None else device)
    like = x if device is None else torch.empty((), dtype=x.dtype, device=device).expand(x.shape)
    memory = residency.make(like, leaf)
    same = is_a(memory, Tensor) and (memory.shape, memory.dtype) == (x.shape, x.dtype) and memory.is_contiguous()
    if not same or memory.is_meta:
        raise broken(residency, f"make(x, {leaf})", in_words(memory), f"contiguous memory {tuple(x.shape)} {x.dtype}")
    if leaf.in_place and memory.device != like.device:
        want = f"{in_words(like)}: it follows an update all at once"
        raise broken(residency, f"make(x, {leaf})", in_words(memory), want)
    return memory.detach()


def check_apart(residency: Residency, made: Iterable[Tensor], others: Iterable[Tensor] = ()) -> None:
    """Raise `ComposeError` where memory that a residency made is another leaf's: one that it made or of `others`."""
    both = [(x, True) for x in made] + [(x, False) for x in others]
    places = [(str(x.device), x.data_ptr(), x.nbytes, is_made) for x, is_made in both if x.numel() and not x.is_meta]
    ends: dict[tuple[str, bool], int] = {}
    for device, start, size, is_made in sorted(places):
        if start < max(ends.get((device, True), 0), is_made * ends.get((device, False), 0)):
            raise broken(
                residency,
                "make(x, leaf)",
                "memory that another leaf has",
                "memory of its own for each leaf, which nobody else holds",
            )
        ends[device, is_made] = max(ends.get((device, is_made), 0), start + size)


def text_of(residency: Residency) -> str:
    """Return a residency as text."""
    text = repr(residency)
    return type(residency).__name__ if text.startswith("<") else text


def waiting(residency: Residency, method: str, wait: Any) -> Callable[[], Any]:
    """Return what `read` or `write` returned. Raises `ComposeError` for anything but a function that waits."""
    if not callable(wait):
        raise broken(residency, method, in_words(wait), "a function () that waits until it is done")
    return in_range("offload")(wait)


def read_back(residency: Residency, copies: Any, old: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return what a residency read. Raises `ComposeError` for anything but copies on the device."""

    def is_like(x: object, y: Tensor) -> bool:
        return isinstance(x, Tensor) and (x.shape, x.dtype, x.device) == (y.shape, y.dtype, device)

    if not (tree.is_sequence(copies) and len(copies) == len(old) and all(map(is_like, copies, old))):
        raise broken(residency, "read", in_words(copies), f"{in_words(old)}, copied to {device}")
    if any(x.data_ptr() == y.data_ptr() for x, y in zip(copies, old, strict=True)):
        raise broken(residency, "read", "memory of the old state", "copies, which the update may write over")
    return list(copies)


def broken(residency: Residency, method: str, got: str, want: str) -> ComposeError:
    """Return the error of a method that does not keep to this."""
    return ComposeError(
        "what fills a station did not return what it must",
        where=f"station 'place', {method} of {text_of(residency)}",
        got=got[:200],
        want=want[:200],
    )


@attrs.define(eq=False)
class Deferred:
    """A residency in one call of all ranks, which hear what fails. What it cannot read it reads as zeros.

    Once it failed it writes nothing, of a call that fails; all ranks go on until they agree that it does.
    """

    residency: Residency
    everyone: Axis
    failed: list[Exception] = tree.new(list)
    counted: Tensor | None = None  # failures of the ranks that have agreed so far, ()

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of which some leaves live there."""
        return self.residency.kinds

    @property
    def updates_on(self) -> str:
        """Where chunks with leaves that live there are updated."""
        return self.residency.updates_on

    def holds(self, leaf: Resident) -> bool:
        """Say whether a leaf lives there."""
        return self.residency.holds(leaf)

    def medium(self, leaf: Resident) -> str:
        """Return where a leaf lives, in a word."""
        return self.residency.medium(leaf)

    def chunks(self, structure: Structure) -> Sequence[Sequence[Slice]]:
        """Return which slices are visited together."""
        return self.residency.chunks(structure)

    def make(self, x: Tensor, leaf: Resident) -> Tensor:
        """Return memory for a leaf; what this raises is not put off."""
        return self.residency.make(x, leaf)

    def read(self, old: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Begin to read; return the function that waits."""
        begun = None
        if not any(x.is_meta for x in old):  # what there was no memory for
            begun = self._tried(lambda: waiting(self.residency, "read", self.residency.read(old, device)))

        def wait() -> list[Tensor]:
            copies = None if begun is None else self._tried(begun)
            return [torch.zeros(x.shape, dtype=x.dtype, device=device) for x in old] if copies is None else copies

        return wait

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], Any]:
        """Begin to write; return the function that waits."""
        begin = lambda: waiting(self.residency, "write", self.residency.write(worked, new))
        begun = None if self.failed else self._tried(begin)
        return lambda: None if begun is None else self._tried(begun)

    def _tried(self, call: Callable[[], Any]) -> Any:
        """Return what a function returns; None where it raises, which is kept."""
        try:
            return call()
        except Exception as error:
            self.failed.append(error)
            return None

    def put(self, device: torch.device, agreement: Agreement) -> Callable[[], None]:
        """Put in how often this failed; return the function that raises it, once all ranks have counted."""
        before = self.counted
        mine = torch.full((), len(self.failed), dtype=torch.float64, device=device) if before is None else before
        counts = agreement.sum(mine)

        def take() -> None:
            self.counted = counts.value
            all_have = before is not None or agreement.axis is None or agreement.axis.size == self.everyone.size
            if all_have and int(counts.value):  # read on the host: from here on memory is written over
                self.raise_on_all()

        return take

    def raise_on_all(self) -> NoReturn:
        """Raise what failed, in a call in which all ranks know that something did: on the others `DiskError`."""
        failed = self.failed
        texts = self.everyone.exchange(f"{type(failed[0]).__name__}: {failed[0]}" if failed else None, WHAT)
        if failed:
            raise failed[0]
        rank = next(i for i, text in enumerate(texts) if text is not None)
        raise DiskError(
            "another rank could not read or write what lives elsewhere",
            where=f"rank {rank} of {self.everyone.name}",
            got=texts[rank],
            want="all ranks to end the call",
        )

    def __repr__(self) -> str:
        return text_of(self.residency)


def deferred(residency: Residency, everyone: Axis | None) -> Residency:
    """Return a residency whose errors `hear` raises, for a call of the ranks that share a step; of one rank itself."""
    return residency if everyone is None or not residency.kinds else Deferred(residency, everyone)


def hear(residency: Residency) -> None:
    """Raise on all ranks what failed on one, of a residency that `deferred` returned, in a small message.

    The rank raises the error that it had, the others `DiskError`.
    """
    if isinstance(residency, Deferred):
        counts = residency.everyone.exchange_numbers([len(residency.failed)], WHAT)
        if any(count for (count,) in counts):
            residency.raise_on_all()


@contextlib.contextmanager
def put_off(residency: Residency) -> Generator[None]:
    """Run inside what meets no other ranks; where ranks are to hear of failures, what it raises is one of them."""
    try:
        yield
    except Exception as error:
        if not isinstance(residency, Deferred):
            raise
        residency.failed.append(error)
