"""The commands of `fds`, and what happens to their results and errors."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from typing import NoReturn

from fds import __version__
from fds.command_line.parser import Parser
from fds.errors import FdsError, escaped

COMMANDS = {  # name -> module and function that fill its parser, and its line in the help
    "doctor": ("doctor:fill", "check whether this machine can train, and say what to change"),
    "explain": ("config:fill_explain", "say what a DeepSpeed configuration comes to, as Python"),
    "config": ("config:fill", "all about such configurations: explain, schema, table"),
    "plans": ("plans:fill", "draw a pipeline schedule, its time and its memory"),
    "report": ("report:fill", "write one page about a run, or about several beside each other"),
    "storage": ("storage:fill", "look into saves: show, verify, export, diff"),
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
        commands.add_parser(name, help=summary, fill=functools.partial(_fill, place))
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


def _fill(place: str, parser: Parser) -> None:
    module, _, function = place.partition(":")
    getattr(importlib.import_module(f"fds.command_line.{module}"), function)(parser)
