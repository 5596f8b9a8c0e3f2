"""Arguments of a program that name its configuration."""

from __future__ import annotations

import argparse
from typing import Any

from fds.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--fds` and `--fds_config PATH` to a parser, and `--deepspeed`, `--deepspeed_config` as other names of them.

    `args.fds` says only that it was asked for; `args.fds_config` is what `fds.initialize(..., args=args)` reads.

    >>> parser = add_config_arguments(argparse.ArgumentParser())
    >>> parser.parse_args(["--deepspeed", "--deepspeed_config", "ds_config.json"])
    Namespace(fds=True, fds_config='ds_config.json')
    """
    group = parser.add_argument_group("fds", "training by fds")
    group.add_argument("--fds", "--deepspeed", dest="fds", action="store_true", help="train with fds")
    group.add_argument("--fds_config", "--fds-config", "--deepspeed_config", dest="fds_config", metavar="PATH",
                       help="DeepSpeed's configuration, a file of JSON")
    return parser


def config_of(args: Any, config: Any) -> Any:
    """Return the one configuration that there is. Raises `ConfigError` for none, and for two."""
    named = [value for name in ("fds_config", "deepspeed_config") if (value := getattr(args, name, None)) is not None]
    given = [config] * (config is not None) + named[:1]
    if len(given) != 1:
        raise ConfigError("a training has one configuration", where="config, args.fds_config",
                          got="both" if given else "neither", want="one of them: a TrainingConfig, a dict or a path")
    return given[0]
