"""What a mutant is, and all that there are."""

from __future__ import annotations

import importlib
import pkgutil
import shlex
from pathlib import Path

import attrs

from tests.mutants import rooms


@attrs.frozen
class Mutant:
    """A fault that a person could have made: one text of one file replaced by another.

    The tests that are to notice it are named by folder or file, so that a test may move within them; `-k` and a word
    of its name keep a selection short.
    """

    name: str
    file: str  # relative to the root of the repository
    old: str  # occurs once in the file
    new: str
    breaks: str  # in one sentence, what is wrong then
    tests: str  # arguments of pytest

    def applied(self, text: str) -> str | None:
        """Return the text of the file with the fault in it; None where `old` is not in it exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None

    def paths(self) -> list[Path]:
        """Return the files and folders that its tests are in, relative to the root."""
        words = shlex.split(self.tests)
        return [Path(w.partition("::")[0]) for i, w in enumerate(words) if w != "-k" and words[i - 1 : i] != ["-k"]]


def all_mutants() -> list[Mutant]:
    """Return the mutants of all tables, room by room."""
    names = sorted(module.name for module in pkgutil.iter_modules(rooms.__path__))
    return [one for name in names for one in importlib.import_module(f"{rooms.__name__}.{name}").MUTANTS]
