"""`Parser`: argparse's, filled when its command is chosen, whose help has examples and says what to do next."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that `fill` gives its arguments and help before it parses for the first time.

    Attributes:
        examples: the command lines that its help shows.
    """

    def __init__(self, *args: Any, fill: Callable[[Parser], None] | None = None, **kwargs: Any):
        super().__init__(*args, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.examples: tuple[str, ...] = ()
        self._fill = fill

    def teach(self, description: str, *, examples: Mapping[str, str], after: str = "") -> None:
        """Set the text of the help.

        Args:
            description: what the command does.
            examples: command line -> what it is for.
            after: what to read or do next.
        """
        self.description, self.examples = description, tuple(examples)
        width = max(map(len, examples))
        lines = (f"  {line:<{width}}  {meaning}".rstrip() for line, meaning in examples.items())
        self.epilog = "\n".join(["examples:", *lines, *(["", after] if after else [])])

    def filled(self) -> Parser:
        """Return this parser with its arguments."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse what is known, as argparse does."""
        return argparse.ArgumentParser.parse_known_args(self.filled(), args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2, the usage and the message, and say where help is."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\nhelp: {self.prog} --help\n")


def count(text: str) -> int:
    """Parse an integer, 1 or more, which may be written as 7e9. Raises `ArgumentTypeError`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if number.is_integer() and number >= 1:
        return int(number)
    units = re.fullmatch(r"([0-9.]+) *([kmbt])", text, re.IGNORECASE)  # 7B
    instead = f"; write {units[1]}e{3 + 3 * 'kmbt'.index(units[2].lower())}" if units else ""
    raise argparse.ArgumentTypeError(f"not an integer, 1 or more: {text!r}{instead}")
