"""The pipeline schedules, their numbers of ranks and microbatches, and checks of the options."""

from __future__ import annotations

import argparse
import math

import fds
from fds.errors import FdsError
from fds.plans import PipelineSchedule

NONE = "none"
SCHEDULES: dict[str, tuple[PipelineSchedule, int]] = {  # and the number of stages per rank
    "one_f_one_b": (fds.plans.one_f_one_b, 1),
    "gpipe": (fds.plans.gpipe, 1),
    "zb_h1": (fds.plans.zb_h1, 1),
    "zb_h2": (fds.plans.zb_h2, 1),
    "interleaved": (fds.plans.interleaved(2), 2),
    "zb_v": (fds.plans.zb_v, 2),
    "dualpipe_v": (fds.plans.dualpipe_v, 2),
}


def num_ranks(options: argparse.Namespace) -> int:
    """Return the number of ranks along the pipeline; 1 without one."""
    return 1 if options.pipeline == NONE else options.stages // SCHEDULES[options.pipeline][1]


def num_microbatches(options: argparse.Namespace) -> int:
    """Return the number of microbatches of a rank's rows.

    Where --accumulate leaves it open that is one, and in a pipeline four for each of its ranks, or as many fewer as
    divide the rows.
    """
    if options.accumulate or options.pipeline == NONE:
        return options.accumulate or 1
    stages, rows = num_ranks(options), options.batch * num_ranks(options) // options.ranks
    return max(n for n in range(1, 4 * stages + 1) if rows % n == 0)


def rows_together(options: argparse.Namespace) -> int:
    """Return the smallest number of rows of a data rank that the options allow."""
    if options.accumulate or options.pipeline == NONE:
        return options.accumulate or 1
    return math.gcd(options.batch, 2 * num_ranks(options))  # with fewer microbatches ranks would be idle


def refuse_stages(options: argparse.Namespace) -> None:
    """Raise `FdsError` for stages without a pipeline, and for a number of stages that its ranks cannot hold."""
    if options.pipeline == NONE:
        if options.stages:
            raise FdsError(
                "only a pipeline has stages",
                where="--stages",
                got=f"--stages {options.stages} alone",
                want=f"--pipeline one_f_one_b --stages {options.stages}",
                hint="sharding by ranks is --stage",
            )
        return
    _, each = SCHEDULES[options.pipeline]
    if options.stages < 1 or options.stages % each:
        raise FdsError(
            "the stages do not divide among the ranks of a pipeline",
            where="--stages",
            got=f"--pipeline {options.pipeline}, which gives every rank {each}, --stages {options.stages}",
            want=f"a positive multiple of {each}",
        )


def refuse_ranks(options: argparse.Namespace) -> None:
    """Raise `FdsError` if the ranks are not a multiple of those of a pipeline."""
    if options.ranks % num_ranks(options):
        raise FdsError(
            "the ranks do not divide into pipelines",
            where="--ranks",
            got=f"--ranks {options.ranks} --pipeline {options.pipeline} --stages {options.stages}",
            want=f"a multiple of {num_ranks(options)} ranks",
        )


def refuse(options: argparse.Namespace, loss: fds.Layers) -> None:
    """Raise `FdsError` if layers or microbatches do not fit the pipeline of these options."""
    if options.pipeline == NONE:
        return
    ranks, n = num_ranks(options), num_microbatches(options)
    rows = options.batch * ranks // options.ranks
    if rows % n:
        raise FdsError(
            "the microbatches do not divide the rows of a rank",
            where="--accumulate",
            got=f"{n} microbatches of {rows} rows",
            want=f"a divisor of {rows}",
            hint="left out, it is one of them",
        )
    schedule, _ = SCHEDULES[options.pipeline]
    fds.compose(fds.pipeline(schedule, ranks, num_microbatches=n), fds.adamw())(loss)
