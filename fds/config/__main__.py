"""Explain configurations from the command line: `python -m fds.config explain FILE`, `schema`, `table`."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any, get_args

from fds.config.field import EDITIONS
from fds.config.schema import schema
from fds.config.table import table
from fds.config.training import TrainingConfig
from fds.config.translate.composition import data_ranks
from fds.config.unknown import Unknown
from fds.errors import FdsError, MeshError, run_command

Options = argparse.Namespace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line. Returns the exit code, 2 for an error."""
    options = _parse(arguments)
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always", FutureWarning)
            warnings.simplefilter("always", UserWarning)
            text = options.run(options)
    except FdsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for warning in recorded:
        print(f"{warning.category.__name__}: {warning.message}", file=sys.stderr)
    print(text.rstrip("\n"))
    return 0


def _explain(options: Options) -> str:
    config = TrainingConfig.of(options.config, defaults=options.defaults, unknown=options.unknown)
    axes = _axes(options.mesh, options.world_size)
    if options.auto:
        config = config.resolve(world_size=data_ranks(axes), auto=dict(options.auto))
    return config.explain(axes, num_parameters=options.parameters)


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
    """Parse sizes of axes: `pp=2,dp=4`."""
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


def _count(text: str) -> int:
    """Parse an integer, 1 or more, which may be written as 7e9."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer() or number < 1:
        raise argparse.ArgumentTypeError(f"not an integer, 1 or more: {text!r}")
    return int(number)


def _parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m fds.config",
        description="Explain configurations of DeepSpeed.",
        epilog="Every key: docs/config-keys.md.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    explain = commands.add_parser(
        "explain",
        help="explain a file",
        description="Print the composition as Python, batch sizes, memory, and keys without effect.",
    )
    explain.add_argument("config", metavar="FILE", help="a JSON file, or JSON in base64")
    explain.add_argument("--world-size", type=_count, metavar="N", help="number of ranks (default: of --mesh, or 1)")
    explain.add_argument(
        "--mesh",
        type=_mesh,
        default={},
        metavar="AXES",
        help="sizes of the axes: pp=2,dp=4; dp takes the remaining ranks",
    )
    explain.add_argument("--parameters", type=_count, metavar="P", help="parameters of the model, to show bytes: 7e9")
    explain.add_argument(
        "--defaults",
        choices=EDITIONS,
        default=EDITIONS[0],
        help="edition of the defaults (%(default)s): DeepSpeed's code or its docs",
    )
    explain.add_argument(
        "--unknown", choices=get_args(Unknown), default="error", help="how unknown keys are treated (%(default)s)"
    )
    explain.add_argument(
        "--auto",
        type=_auto,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='value of a key that is "auto": optimizer.params.lr=3e-4; may be repeated',
    )
    explain.set_defaults(run=_explain)

    outputs = (
        ("schema", "print a JSON Schema for editors", lambda _: json.dumps(schema(), indent=2)),
        ("table", "print docs/config-keys.md", lambda _: table()),
    )
    for name, text, run in outputs:
        commands.add_parser(name, help=text, description=f"{text.capitalize()}.").set_defaults(run=run)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
