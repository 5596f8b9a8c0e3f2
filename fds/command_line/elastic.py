"""`fds elastic`: the batch of an elastic configuration, and the numbers of ranks that share it."""

from __future__ import annotations

import argparse
import json
import textwrap

import attrs

from fds.command_line import Parser, count
from fds.elastic import Batches, batches

WIDTH = 84  # columns of the list of numbers

Options = argparse.Namespace


def fill(parser: Parser) -> None:
    """Give the parser of `fds elastic` its options."""
    parser.teach(
        "Print the batch that `elasticity` chooses, and the numbers of ranks that share it; for a number of them the\n"
        "microbatch too. It exits with 2 where that number has no batch, which is what a scheduler asks.",
        examples={
            "fds elastic ds_config.json": "the batch, and how many ranks may run",
            "fds elastic ds_config.json --ranks 64": "what each of 64 ranks computes",
            "fds elastic ds_config.json --ranks 64 --json": "for a program to read",
        },
        after="docs/elastic.md is the guide; fds.elastic.batches(config) is the function.",
    )
    parser.add_argument("config", metavar="FILE", help="a JSON file, or JSON in base64; only `elasticity` is read")
    parser.add_argument("--ranks", type=count, metavar="N", help="number of ranks, model parallel ones included")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_elastic)


def _elastic(options: Options) -> int:
    chosen = batches(options.config)
    batch = None if options.ranks is None else chosen.at(options.ranks)
    if options.json:
        asked = {} if batch is None else {"at": {"ranks": options.ranks, **attrs.asdict(batch)}}
        print(json.dumps({"rows": chosen.rows, "ranks": chosen.ranks, "data_ranks": chosen.data_ranks, **asked}))
        return 0
    print("\n".join(_lines(chosen)))
    if batch is not None:
        alone = "" if batch.rows == chosen.rows else f", not the {chosen.rows} that others share"
        sizes = f"{batch.microbatch} rows x {batch.num_microbatches} microbatches x {batch.data_ranks} data ranks"
        print(f"on {options.ranks} ranks: {batch.rows} = {sizes}{alone}")
    return 0


def _lines(chosen: Batches) -> list[str]:
    config, numbers = chosen.config, chosen.ranks
    copies = config.model_parallel_size
    of_model = f", {copies} for each copy of the model" if copies > 1 else ""
    return [
        f"{chosen.rows} rows in a batch, of at most {config.max_train_batch_size}",
        f"{len(numbers)} numbers of ranks share it{of_model}:",
        *textwrap.wrap(" ".join(map(str, numbers)), WIDTH, initial_indent="  ", subsequent_indent="  "),
    ]
