"""Inspect saves: `python -m fds.storage show|verify|export|diff DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fds.errors import FdsError, run_command
from fds.storage import showing
from fds.storage.differing import differences, locate
from fds.storage.disk.folders import tags
from fds.storage.disk.paths import read_errors
from fds.storage.exporting import export_weights
from fds.storage.format.tensors import DTYPES
from fds.storage.opening import open_source
from fds.storage.verifying import verify

Options = argparse.Namespace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line, and return the exit code: 2 for an error."""
    options = _parse(arguments)
    try:
        with read_errors("command"):
            return options.run(options)
    except FdsError as error:
        text = f"{type(error).__name__}: {error}"
        print("\n".join(map(showing.plain, text.split("\n"))), file=sys.stderr)
        return 2


def _show(options: Options) -> int:
    path, tag = locate(options.dir, options.tag)
    listed = tag is None and path.is_dir() and tags(path)
    showing.shown(showing.run(path) if listed else showing.save(open_source(path, tag)))
    return 0


def _verify(options: Options) -> int:
    path, tag = locate(options.dir, options.tag)
    wrong = 0
    for one in (options.all and tags(path)) or [tag]:
        found = verify(path, one)
        wrong += bool(found)
        named = showing.plain(str(path) if one is None else f"{path}:{one}")
        showing.shown([f"{named}: {'damaged' if found else 'whole'}", *(f"  {showing.plain(text)}" for text in found)])
    return 1 if wrong else 0


def _export(options: Options) -> int:
    path, tag = locate(options.dir, options.tag)
    dtype = None if options.dtype == "own" else DTYPES[options.dtype]
    showing.shown(showing.plain(str(p)) for p in export_weights(path, options.path, dtype, tag=tag, tree=options.tree))
    return 0


def _diff(options: Options) -> int:
    places = zip((options.a, options.b), options.tags or (None, None), strict=True)
    a, b = (open_source(*locate(text, tag)) for text, tag in places)
    found = differences(a, b)
    showing.shown(showing.comparison(found, len({*a.leaves, *b.leaves})))
    return 1 if found else 0


def _parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m fds.storage",
        description="Look into saves, and take weights out of them.",
        epilog="DIR is a run's directory, DIR:TAG or DIR/TAG one save of it; or what others saved.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="say what is in it", description="List the saves, or what is in one.")
    show.add_argument("dir", metavar="DIR")
    show.add_argument("--tag", help="which save to show leaf by leaf")
    show.set_defaults(run=_show)

    check = commands.add_parser(
        "verify",
        help="say whether it is whole",
        description="Compare every checksum; exit with 1 if anything is wrong.",
    )
    check.add_argument("dir", metavar="DIR")
    which = check.add_mutually_exclusive_group()
    which.add_argument("--tag", help="which save (the last)")
    which.add_argument("--all", action="store_true", help="all saves")
    check.set_defaults(run=_verify)

    export = commands.add_parser(
        "export",
        help="write its weights as Hugging Face safetensors",
        description="Write weights as Hugging Face safetensors.",
    )
    export.add_argument("dir", metavar="DIR")
    export.add_argument("path", metavar="PATH", help="a file that ends in .safetensors, or a directory")
    export.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float16", "float32", "own"],
        help="of floating-point weights (%(default)s); own: as they are",
    )
    export.add_argument("--tag", help="which save (the last)")
    export.add_argument("--tree", default="params", help="slots.ema: averages in the place of params")
    export.set_defaults(run=_export)

    diff = commands.add_parser(
        "diff", help="say in what two differ", description="Compare leaf by leaf; exit with 1 if they differ."
    )
    diff.add_argument("a", metavar="A", help="DIR, DIR:TAG or DIR/TAG")
    diff.add_argument("b", metavar="B", help="likewise")
    diff.add_argument("--tags", nargs=2, metavar=("TAG_A", "TAG_B"), help="which saves (the last ones)")
    diff.set_defaults(run=_diff)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
