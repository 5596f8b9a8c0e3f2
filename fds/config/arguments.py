"""Command-line arguments that name a configuration."""

from __future__ import annotations

import argparse
from typing import Any

from fds.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--fds` and `--fds_config PATH` to a parser, and their aliases `--deepspeed` and `--deepspeed_config`.

    `fds.initialize(..., args=args)` reads `args.fds_config`; `args.fds` is only a flag.

    >>> parser = add_config_arguments(argparse.ArgumentParser())
    >>> parser.parse_args(["--deepspeed", "--deepspeed_config", "ds_config.json"])
    Namespace(fds=True, fds_config='ds_config.json')
    """
    group = parser.add_argument_group("fds", "training by fds")
    group.add_argument("--fds", "--deepspeed", dest="fds", action="store_true", help="train with fds")
    group.add_argument(
        "--fds_config",
        "--fds-config",
        "--deepspeed_config",
        dest="fds_config",
        metavar="PATH",
        help="DeepSpeed's configuration, a JSON file",
    )
    return parser


def config_of(args: Any, config: Any) -> Any:
    """Return the configuration, from one of the two. Raises `ConfigError` if both or neither are given."""
    paths = [value for name in ("fds_config", "deepspeed_config") if (value := getattr(args, name, None)) is not None]
    configs = [config] * (config is not None) + paths[:1]
    if len(configs) != 1:
        raise ConfigError(
            "exactly one configuration is needed",
            where="config, args.fds_config",
            got="both" if configs else "neither",
            want="one of them: config=, a TrainingConfig, a dict or a path, or --fds_config on the command line",
        )
    return configs[0]
