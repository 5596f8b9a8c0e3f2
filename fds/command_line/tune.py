"""`fds tune`: run a script with one configuration after another, and write down the fastest."""

from __future__ import annotations

import argparse
import json
import os
from typing import get_args

import torch

from fds.collectives.launch import launched
from fds.command_line import Parser, count
from fds.config.reading import Unknown
from fds.tuning.scripts import Tuned, tune_script

Options = argparse.Namespace


def fill(parser: Parser) -> None:
    """Give the parser of `fds tune` its options."""
    parser.teach(
        "Run a script that trains by `fds.initialize` with the experiments of `autotuning`, in DeepSpeed's order.",
        examples={
            "fds tune ds_config.json train.py": "on one rank",
            "fds tune ds_config.json --ranks 4 train.py --epochs 1": "on four; what follows the script is its own",
            "torchrun --nnodes 2 ... -m fds tune ds_config.json train.py": "on the ranks of two machines",
        },
        after="docs/tuning.md is the guide; fds.tune searches compositions in Python.",
    )
    parser.add_argument("config", metavar="FILE", help="a JSON file with the section autotuning")
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="processes of each run (1; under a launcher as many as it started)"
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="after which a run is ended (%(default)g)"
    )
    parser.add_argument("--memory", type=count, metavar="BYTES", help="that a rank may hold (default: its share)")
    parser.add_argument(
        "--seed", type=int, default=0, help='of the order, where "tuner_type" is "random" (%(default)s)'
    )
    parser.add_argument(
        "--unknown", choices=get_args(Unknown), default="error", help="how unknown keys are treated (%(default)s)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script is given")
    parser.set_defaults(run=_tune)


def _tune(options: Options) -> int:
    device, launch = "cuda" if torch.cuda.is_available() else "cpu", launched(os.environ)
    ranks = options.ranks or (launch.world_size if launch else 1)
    tuned = tune_script(
        options.config,
        [options.script, *options.arguments],
        ranks=ranks,
        limit=options.limit,
        memory=options.memory,
        device=device,
        seed=options.seed,
        unknown=options.unknown,
    )
    if launch is None or launch.rank == 0:
        print("\n".join(_lines(tuned)))
    return 0


def _lines(tuned: Tuned) -> list[str]:
    ran = sum(trial.value is not None for trial in tuned.trials)
    return [
        f"{len(tuned.trials)} experiments, of which {ran} have run",
        f"best: {tuned.best.experiment.name}, {json.dumps(tuned.best.value)}",
        f"written: {tuned.file}, and the program that it comes to: {tuned.file.with_suffix('.py').name}",
    ]
