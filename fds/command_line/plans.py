"""`fds plans`: draw a pipeline schedule, simulated, and print its time and memory."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable

from fds.command_line import Parser, count
from fds.errors import PlanError, nearest
from fds.plans.lowering import assign_buffers, communicate, overlap
from fds.plans.pictures import draw_png, draw_text, to_chrome
from fds.plans.plan import PipelineSchedule, Plan
from fds.plans.schedules import (
    data_parallel,
    dualpipe_v,
    gpipe,
    inference,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from fds.plans.search import searched
from fds.plans.simulator import Costs, simulate
from fds.plans.timeline import Timeline

Options = argparse.Namespace

SCHEDULES: dict[str, Callable[[Options, Costs], tuple[PipelineSchedule, int]]] = {  # and the number of stages per rank
    "gpipe": lambda options, costs: (gpipe, 1),
    "one_f_one_b": lambda options, costs: (one_f_one_b, 1),
    "interleaved": lambda options, costs: (interleaved(options.chunks), options.chunks),
    "zb_h1": lambda options, costs: (zb_h1, 1),
    "zb_h2": lambda options, costs: (zb_h2, 1),
    "zb_v": lambda options, costs: (zb_v, 2),
    "dualpipe_v": lambda options, costs: (dualpipe_v, 2),
    "searched": lambda options, costs: (searched(costs, _bound(options)), 1),
    "inference": lambda options, costs: (inference, 1),
    "data_parallel": lambda options, costs: (data_parallel, 1),
}
_OTHER_NAMES = {  # of papers and of torch.distributed.pipelining, in lower case without separators
    "1f1b": "one_f_one_b",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb_v",
    "dualpipe": "dualpipe_v",
    **{name.replace("_", ""): name for name in SCHEDULES},
}


def fill(parser: Parser) -> None:
    """Give the parser of `fds plans` its options."""
    parser.teach(
        "Draw a pipeline schedule, simulated, and print how long it takes, how long ranks wait, and what they hold.",
        examples={
            "fds plans one_f_one_b --stages 4 --microbatches 8": "time runs to the right, a rank per line",
            "fds plans zb_h1 --stages 4 --forward 1 --backward-input 1.2": "with the costs of your layers",
            "fds plans searched --stages 2 --memory-bound 6": "the fastest schedule within a bound",
            "fds plans interleaved --stages 8 --chunks 2 --png plan.png": "as a picture",
            "fds plans gpipe --stages 2 --microbatches 2 --lower": "every action, with messages and buffers",
        },
        after="fds.pipeline(fds.plans.zb_h1, mesh['pp'], num_microbatches=8) trains by one.\n"
        "docs/pipelines.md is the guide.",
    )
    parser.add_argument("schedule", metavar="SCHEDULE", help=", ".join(SCHEDULES))
    parser.add_argument("--stages", type=count, default=4, metavar="N", help="of all ranks together (%(default)s)")
    parser.add_argument("--microbatches", type=count, default=8, metavar="N", help="of a step (%(default)s)")
    parser.add_argument(
        "--chunks", type=count, default=2, metavar="N", help="stages a rank, for interleaved (%(default)s)"
    )
    parser.add_argument("--memory-bound", metavar="BYTES", help="a number or one per rank, for searched (none)")
    for name in ("--forward", "--backward-input", "--backward-weight", "--activation-bytes"):
        parser.add_argument(name, metavar="COST", default="1", help="one, or one per stage: 1,2,1.5,1 (%(default)s)")
    parser.add_argument(
        "--latency", type=float, default=0.0, metavar="COST", help="of a message between ranks (%(default)s)"
    )
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="of the drawing (the terminal's, or all it needs)")
    parser.add_argument("--plan", action="store_true", help="print the rows")
    parser.add_argument("--lower", action="store_true", help="print them with messages and buffers")
    parser.add_argument("--png", metavar="PATH", help="draw it there too (needs matplotlib)")
    parser.add_argument("--chrome", metavar="PATH", help="write a trace for https://ui.perfetto.dev there")
    parser.set_defaults(run=_show)


def _show(options: Options) -> int:
    costs = Costs(
        forward=_numbers("--forward", options.forward),
        backward_input=_numbers("--backward-input", options.backward_input),
        backward_weight=_numbers("--backward-weight", options.backward_weight),
        activation_bytes=_numbers("--activation-bytes", options.activation_bytes),
        latency=options.latency,
    )
    plan = _plan(options, costs)
    if options.lower:
        plan = assign_buffers(overlap(communicate(plan)))
    line = simulate(plan, costs)
    sizes = f"{plan.num_stages} stages on {plan.num_ranks} ranks, {plan.num_microbatches} microbatches"
    title = f"{options.schedule}: {sizes}"
    print(f"{title}\n{draw_text(line, width=_columns(options.width))}\n{_facts(line)}")
    if options.plan or options.lower:
        print(f"\n{plan}")
    if options.png:
        draw_png(line, options.png, title=f"{title}, bubble {line.bubble_fraction:.1%}")
    if options.chrome:
        to_chrome(line, options.chrome)
    return 0


def _plan(options: Options, costs: Costs) -> Plan:
    if options.schedule not in SCHEDULES:
        raise PlanError(
            "unknown schedule", got=repr(options.schedule), want=", ".join(SCHEDULES), hint=_hint(options.schedule)
        )
    if options.memory_bound is not None and options.schedule != "searched":
        raise PlanError(
            "only the schedule searched has a memory bound",
            got=f"{options.schedule} --memory-bound",
            want="searched --memory-bound",
        )
    schedule, per_rank = SCHEDULES[options.schedule](options, costs)
    ranks, rest = divmod(options.stages, per_rank)
    if rest:
        raise PlanError(
            "the number of stages is not a multiple of the stages per rank",
            where=options.schedule,
            got=f"--stages {options.stages}",
            want=f"a multiple of {per_rank}",
        )
    return Plan.of(schedule(ranks, options.microbatches))


def _hint(schedule: str) -> str:
    """Return the name here of a schedule that is spelled as elsewhere: 1F1B, zb-h1, ScheduleDualPipeV."""
    plain = "".join(filter(str.isalnum, schedule.lower())).removeprefix("schedule")
    return f"did you mean {_OTHER_NAMES[plain]!r}?" if plain in _OTHER_NAMES else nearest(schedule, SCHEDULES)


def _bound(options: Options) -> float | tuple[float, ...] | None:
    return None if options.memory_bound is None else _numbers("--memory-bound", options.memory_bound)


def _numbers(option: str, text: str) -> float | tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError as error:
        raise PlanError("not a list of numbers", where=option, got=repr(text), want="1.5, or 1,2,1.5,1") from error
    return numbers[0] if len(numbers) == 1 else numbers


def _columns(width: int | None) -> int | None:
    if width is not None and width < 1:
        raise PlanError("the width is not positive", where="--width", got=str(width), want="1 or more")
    if width is not None:
        return width
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _facts(line: Timeline) -> str:
    live = " ".join(map(str, line.peak_live))
    most = " ".join(f"{x:g}" for x in line.peak_bytes)
    memory = f"peak live {live}" if most == live else f"peak live {live}, bytes {most}"
    lost = f"bubble {line.bubble_fraction:.1%}, idle {line.idle_fraction:.1%}"
    return f"time {line.makespan:g}, {lost}, {memory} (per rank)"
