"""`fds`, the command. A command's own modules are imported once it is chosen, so that `fds --help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from fds import __version__
from fds.errors import FdsError, escaped

__all__ = ["main", "run"]

COMMANDS = {  # name -> module and function that fill its parser, and its line in the help
    "doctor": ("doctor:fill", "check whether this machine can train, and say what to change"),
    "explain": ("config:fill_explain", "say what a DeepSpeed configuration comes to, as Python"),
    "config": ("config:fill", "all about such configurations: explain, schema, table"),
    "data": ("data:fill", "measure the samples of a file of tokens, and show what was measured: analyse, show"),
    "elastic": ("elastic:fill", "say which numbers of ranks an elastic configuration lets run, and their batch"),
    "plans": ("plans:fill", "draw a pipeline schedule, its time and its memory"),
    "report": ("runs:fill_report", "write one page about a run, or about several beside each other"),
    "tune": ("tune:fill", "run a script with the experiments of autotuning, and write down the fastest"),
    "storage": ("runs:fill", "look into saves: show, verify, export, diff"),
}
EXAMPLES = {
    "fds doctor": "before the first run on a machine",
    "fds explain ds_config.json --world-size 8": "read a configuration as a program",
    "fds plans one_f_one_b --stages 4 --microbatches 8": "see where a pipeline waits",
    "fds storage show runs/gpt/save": "see what a run has saved",
    "fds report runs/gpt": "see how a run went: one HTML file",
}
SIGPIPE = 128 + 13  # the exit code of a process that it ends
AFTER = "`fds COMMAND --help` has the options and examples of a command; docs/command-line.md shows what they print."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, `sys.argv` by default, and return the exit code: 2 for an error.

    Raises `SystemExit` where argparse does: after a help text, and for options that it refuses.
    """
    parser = top()
    options = parser.parse_args(arguments)
    if options.version:
        print(versions())
        return 0
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return options.run(options)
    except FdsError as error:
        lines = f"{type(error).__name__}: {error}".split("\n")
        print("\n".join(map(escaped, lines)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + 2  # the exit code of a process that SIGINT ends


def run(*before: str) -> NoReturn:
    """Run the program's command line, after the words `before`, and exit; with 141 if the reader is gone (`| head`)."""
    try:
        code = main([*before, *sys.argv[1:]])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        code = SIGPIPE
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        code = SIGPIPE  # where rich writes, it exits with 1
    sys.exit(code)


def top() -> Parser:
    """Return the parser of `fds`; those of its commands are filled when they are chosen."""
    parser = Parser(prog="fds")
    parser.teach("Functional training for PyTorch, from the command line.", examples=EXAMPLES, after=AFTER)
    parser.add_argument("--version", action="store_true", help="print the versions of fds, torch and Python")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (place, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, fill=lambda parser, place=place: load(place)(parser))
    return parser


def versions() -> str:
    """Return the versions of fds, torch and Python, without importing torch."""
    return f"fds {__version__}, torch {version('torch')}, Python {platform.python_version()}"


def version(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def load(place: str) -> Callable[..., Any]:
    """Import a function of this package, named as `"module:function"`."""
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(f"fds.command_line.{module}"), function)


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
