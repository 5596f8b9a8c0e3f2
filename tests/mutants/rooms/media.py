"""Mutants of fds/media: extents, buffers, requests, locks, forks."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "small-leaves-one-by-one",
        "fds/media/drive.py",
        "if runs and runs[-1][0] + runs[-1][2] == at and runs[-1][1] + runs[-1][2] == address:",
        "if False:",
        "500 leaves of a page each are 500 requests",
        "tests/media/test_disk.py",
    ),
    Mutant(
        "parts-of-pages-are-written-whole",
        "fds/media/drive.py",
        "return known if start % PAGE == 0 and alone else None",
        "return known",
        "a write to a part of a leaf reaches what is beside it",
        "tests/media/test_disk.py",
    ),
    Mutant(
        "buffers-are-given-back-early",
        "fds/media/drive.py",
        "request = Request(len(cuts), pairs, self.backend.clock)",
        "request = Request(len(cuts), None, self.backend.clock)",
        "memory that a disk may still write to is used again",
        "tests/media/test_failing_disks.py",
    ),
    Mutant(
        "space-is-lost",
        "fds/media/arena.py",
        "            self._free.give(*self._dropped.popleft())",
        "            self._dropped.popleft()",
        "extents that nobody holds are not used again",
        "tests/media/test_disk.py",
    ),
    Mutant(
        "ranges-are-not-joined",
        "fds/media/ranges.py",
        "if i and self._ends[i - 1] == start:",
        "if False:",
        "free neighbours do not become one range",
        "tests/media/test_ranges.py",
    ),
    Mutant(
        "children-write-to-their-parents-leaves",
        "fds/media/files.py",
        "        map_private(self.fd, self.base, self.span)\n",
        "",
        "what a forked process writes changes the state of its parent",
        "tests/media/test_failing_disks.py",
    ),
    Mutant(
        "locks-are-not-compared",
        "fds/media/locks.py",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "two runs have their leaves in one directory",
        "tests/media/test_failing_disks.py",
    ),
    Mutant(
        "what-was-looked-at-stays",
        "fds/media/drive.py",
        "            drop(at, nbytes)  # what somebody looked at through the mapping",
        "            pass",
        "pages of leaves on disk stay in memory when they were looked at once",
        "tests/media/test_disk.py",
    ),
)
