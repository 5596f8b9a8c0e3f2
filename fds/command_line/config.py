"""`fds config` and `fds explain`: what a DeepSpeed configuration comes to, its schema, and the table of its keys."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any, get_args

from fds.command_line import Parser, count
from fds.config.composition import axes_of, data_ranks
from fds.config.explain import explanation
from fds.config.field import EDITIONS
from fds.config.reading import Unknown
from fds.config.schema import schema, table
from fds.config.training import TrainingConfig
from fds.errors import ConfigError, MeshError

Options = argparse.Namespace


def fill(parser: Parser) -> None:
    """Give the parser of `fds config` its commands."""
    parser.teach(
        "All about DeepSpeed's configurations.",
        examples={
            "fds config explain ds_config.json": "the same as fds explain",
            "fds config schema > ds_config.schema.json": "for an editor that completes keys",
            "fds config table | less": "every key, and what fds makes of it",
        },
        after="docs/config.md is the guide; fds.initialize(config=...) trains by a configuration.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    commands.add_parser("explain", help="say what a file comes to", fill=fill_explain)
    commands.add_parser("schema", help="print a JSON Schema for editors", fill=_fill_schema)
    commands.add_parser("table", help="print the table of all keys, docs/config-keys.md", fill=_fill_table)


def fill_explain(parser: Parser) -> None:
    """Give the parser of `fds explain` its options."""
    parser.teach(
        "Print what a configuration comes to: the composition as Python, batch sizes, memory, keys without effect.",
        examples={
            "fds explain ds_config.json": "on one rank",
            "fds explain ds_config.json --world-size 8 --parameters 7e9": "on eight, with bytes for 7B parameters",
            "fds explain ds_config.json --world-size 16 --mesh pp=2": "on eight ranks in each of two stages",
            "fds explain ds_config.json --auto optimizer.params.lr=3e-4": 'with a value for a key that is "auto"',
            "fds explain ds_config.json --json": "for a program to read",
        },
        after="What is printed runs: paste it, or call fds.initialize(config=...), which composes the same.\n"
        "docs/config.md is the guide, docs/config-keys.md lists every key.",
    )
    parser.add_argument("config", metavar="FILE", help="a JSON file, or JSON in base64")
    parser.add_argument("--world-size", type=count, metavar="N", help="number of ranks (default: of --mesh, or 1)")
    parser.add_argument(
        "--mesh",
        type=_mesh,
        default={},
        metavar="AXES",
        help="sizes of the axes: pp=2,dp=4; dp takes the remaining ranks (default: what the file says of them)",
    )
    parser.add_argument("--parameters", type=count, metavar="P", help="parameters of the model, to show bytes: 7e9")
    parser.add_argument(
        "--defaults",
        choices=EDITIONS,
        default=EDITIONS[0],
        help="edition of the defaults (%(default)s): DeepSpeed's code or its docs",
    )
    parser.add_argument(
        "--unknown", choices=get_args(Unknown), default="error", help="how unknown keys are treated (%(default)s)"
    )
    parser.add_argument(
        "--auto",
        type=_auto,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='value of a key that is "auto": optimizer.params.lr=3e-4; may be repeated',
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the program and each part under its name")
    parser.set_defaults(run=_printing(_explain))


def _fill_schema(parser: Parser) -> None:
    parser.teach(
        "Print a JSON Schema, by which an editor completes keys, shows what they do and underlines what is wrong.",
        examples={"fds config schema > .vscode/ds_config.schema.json": "for VS Code"},
        after="docs/config.md, In an editor, has the setting that goes with it.",
    )
    parser.set_defaults(run=_printing(lambda _: json.dumps(schema(), indent=2)))


def _fill_table(parser: Parser) -> None:
    parser.teach(
        "Print the table of all keys as Markdown: type, default, what it does, and what fds makes of it.",
        examples={"fds config table > docs/config-keys.md": "as that page was made"},
    )
    parser.set_defaults(run=_printing(lambda _: table()))


def _printing(text_of: Callable[[Options], str]) -> Callable[[Options], int]:
    """Return a command that prints a text, and on stderr what Python warned of meanwhile."""

    def run(options: Options) -> int:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always", FutureWarning)
            warnings.simplefilter("always", UserWarning)
            text = text_of(options)
        for warning in recorded:
            print(f"{warning.category.__name__}: {warning.message}", file=sys.stderr)
        print(text.rstrip("\n"))
        return 0

    return run


def _explain(options: Options) -> str:
    try:
        return _explained(options)
    except ConfigError as error:
        hint = in_options(error.hint)
        raise type(error)(error.what, where=error.where, got=error.got, want=error.want, hint=hint) from None


def in_options(hint: str) -> str:
    """Return the hint of a `ConfigError` with options of this command in place of arguments in Python."""
    missing, separator, _ = hint.partition("; pass auto=")
    return (
        f"{missing}; pass --auto KEY=VALUE for each" if separator else hint.replace('unknown="warn"', "--unknown warn")
    )


def _explained(options: Options) -> str:
    config = TrainingConfig.of(options.config, defaults=options.defaults, unknown=options.unknown)
    auto, sizes, world_size = dict(options.auto), options.mesh, options.world_size
    axes = _axes(sizes, world_size) if sizes else axes_of(config.filled(auto), world_size or 1)
    if auto:
        config = config.resolve(world_size=data_ranks(axes), auto=auto)
    explained = explanation(config, axes, options.parameters)
    return json.dumps(explained.to_dict(), indent=2) if options.json else str(explained)


def _axes(sizes: dict[str, int], world_size: int | None) -> dict[str, int]:
    """Return the sizes of the mesh's axes; `dp` takes the ranks that the others leave."""
    others = math.prod(size for name, size in sizes.items() if name != "dp")
    ranks = others * max(sizes.get("dp", 1), 1) if world_size is None else world_size
    axes = sizes if sizes.get("dp", -1) != -1 else {**sizes, "dp": ranks // others}
    if math.prod(axes.values()) != ranks:
        raise MeshError(
            "the axes of the mesh do not multiply to the number of ranks",
            where="--mesh, --world-size",
            got=f"{', '.join(f'{name}={size}' for name, size in sizes.items())} of {ranks} ranks",
            want="sizes whose product is the number of ranks",
        )
    return axes


def _mesh(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.replace(" ", "").split(",")]
    axes = {name: int(size) for name, _, size in pairs if size.removeprefix("-").isdecimal()}
    valid = all(name.isidentifier() and (size > 0 or (name, size) == ("dp", -1)) for name, size in axes.items())
    if not valid or len(axes) != len(pairs):
        raise argparse.ArgumentTypeError(f"not sizes of axes, such as pp=2,dp=4: {text!r}")
    return axes


def _auto(text: str) -> tuple[str, Any]:
    """Parse the path and value of a key: `optimizer.params.lr=3e-4`. A value that is not JSON is a string."""
    path, _, value = text.partition("=")
    if not path or not value:
        raise argparse.ArgumentTypeError(f"not the value of a key, such as optimizer.params.lr=3e-4: {text!r}")
    try:
        return path, json.loads(value)
    except json.JSONDecodeError:
        return path, value
