"""A residency for tests: leaves in memory-mapped files, read and written by a thread, a few slices at a time."""

from __future__ import annotations

import itertools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fds.step import fill, transform


class Mapped:
    """Leaves of some kinds, or `some` of these, in files of a folder; remembers what it was asked for."""

    def __init__(self, folder, kinds=("opt",), size=1, some=lambda leaf: True):
        self.folder, self.kinds, self.size, self.some = Path(folder), kinds, size, some
        self.threads, self.count = ThreadPoolExecutor(2), itertools.count()
        self.made: list[tuple[str, int]] = []  # kind and bytes of every leaf
        self.places: set[int] = set()  # addresses of those
        self.log: list[str] = []

    def __repr__(self):
        return f"Mapped({self.folder.name!r})"

    updates_on = "device"

    def medium(self, leaf):
        return "files"

    def holds(self, leaf):
        assert leaf.kind in self.kinds and leaf.index < leaf.count
        return self.some(leaf)

    def chunks(self, structure):
        """Return slices in pairs, or so many, the last ones first."""
        indices = list(range(len(structure.segments)))[::-1]
        return [indices[i : i + self.size] for i in range(0, len(indices), self.size)]

    def make(self, x, leaf):
        assert not x.is_meta and x.numel() and self.holds(leaf)
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:  # its name goes, the mapping keeps its memory
            out = torch.from_file(file.name, shared=True, size=x.numel(), dtype=x.dtype)
        self.made.append((leaf.kind, x.numel() * x.element_size()))
        self.places.add(out.data_ptr())
        out.fill_(7)  # anything
        return out.view(x.shape)

    def check(self, what):
        """Raise what a disk may raise; see `Failing`."""

    def read(self, old, device):
        n = next(self.count)
        self.log.append(f"read {n}")

        def copied():
            self.check("read")
            out = [x.to(device, copy=True) for x in old]
            self.log.append(f"has read {n}")
            return out

        return self.threads.submit(copied).result

    def write(self, worked, new):
        self.log.append("write")

        def put():
            self.check("write")
            for x, y in zip(new, worked, strict=True):
                x.copy_(y)
            self.log.append("has written")

        return self.threads.submit(put).result


@transform
def mapped(residency):
    return lambda step: fill(step, place={"residency": residency})
