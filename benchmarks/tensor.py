"""Tensor parallelism beside torch's `parallelize_module` and DDP: two gloo ranks of one thread each.

    make bench-tensor                                     # a quarter of an hour, quiet
    make bench-tensor ARGS="--cases GPT --parts time"     # of time, memory, host; nothing written
    make bench-tensor ARGS="--runs /tmp/runs.json ..."    # part by part: the table is of all that is in the file

Claims: CLAIMS below, of time; fewer bytes of tensors at their peak than DTensor in the same variant; of the host, above
plain layers and the messages, half of what DTensor takes; and the bytes that the formula says.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import torch
from rich.console import Console

from benchmarks import ranks, report
from benchmarks.harness import PAIRS_PER_MAKING, Series
from benchmarks.report import Rows
from benchmarks.tensor_contenders import AGAIN, PAIRS, Case, compete, host, send, weigh

CASES = [
    Case("GPT 57M", width=512, layers=13, vocabulary=16384, rows=2, context=128),
    Case("Llama 110M", width=768, layers=13, vocabulary=18432, rows=2, context=128, groups=4),
]
TINY = Case("tiny", width=128, layers=1, vocabulary=64, rows=2, context=16, groups=2)
NUM_RANKS, MEMORY_CALLS, HOST_WIDTH, HOST_ROUNDS = ranks.NUM_RANKS, 3, 16, 100
BYTES = "Bytes sent by a rank in a step"  # which no clock decides
VARIANTS = ["", ", sequence", ", loss", ", sequence, loss"]
CLAIMS = {(f"fds{v}", f"DTensor{v}"): 0.85 for v in VARIANTS}
GROUPS: list[dict[tuple[str, str], float | None]] = [
    {("fds", "DTensor"): 0.85, ("fds", "DDP"): None},
    *({pair: claim} for pair, claim in list(CLAIMS.items())[1:]),
    {("fds, overlap 1", "fds"): None},
    {("fds, sequence, overlap 1", "fds, sequence"): None, ("fds, sequence, overlap 4", "fds, sequence"): None},
]


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and with it the ranks
    ranks.prepare(["benchmarks.tensor_contenders"])
    console = Console()
    tell = lambda text: console.print(f"[dim]{text}[/]", highlight=False, soft_wrap=True)
    kept: dict[str, Any] = json.loads(options.runs.read_text()) if options.runs and options.runs.exists() else {}
    for case in options.cases:
        for group in GROUPS:
            if "time" in options.parts and wanted(group, options):
                kept[f"time/{case}/{name_of(group)}"] = timed(case, group, options)
                keep(kept, options)
        for name in ["fds", "DTensor", *(f"{who}{v}" for v in VARIANTS[1:] for who in ("fds", "DTensor")), "DDP"]:
            if "memory" in options.parts and (not options.only or name in options.only):
                kept[f"memory/{case}/{name}"] = ranks.launch(weigh, case, name, MEMORY_CALLS)[0]
                tell(f"{case}: {name} has {kept[f'memory/{case}/{name}'][0] / 1e6:.0f} MB of tensors at its peak")
                if name.startswith("fds"):
                    kept[f"sent/{case}/{name}"] = ranks.launch(send, case, name)[0]
                keep(kept, options)
    if "host" in options.parts:
        kept["host"] = ranks.launch(host, HOST_WIDTH, 2 if options.quick else HOST_ROUNDS)[0].seconds
        keep(kept, options)
    tables = tables_of(kept, [*CASES, TINY])
    report.show_tables(tables, console)
    if options.out:
        console.print(f"written: {report.write_tables(tables, 'tensor', facts(), folder=Path(options.out))}")
    counting = [rows for title, _, rows in tables if title == BYTES or not options.quick]
    return 1 if any("NO" in row[-1] for rows in counting for row in rows) else 0


def name_of(group: dict[tuple[str, str], float | None]) -> str:
    """Return who is timed beside whom."""
    return "; ".join(" beside ".join(pair) for pair in group)


def wanted(group: dict[tuple[str, str], float | None], options: argparse.Namespace) -> bool:
    """Tell whether `--only` names a contender of these."""
    return not options.only or any(one in options.only for one, _ in group)


def keep(kept: dict[str, Any], options: argparse.Namespace) -> None:
    """Write what was measured, where a file for it is named."""
    if options.runs:
        options.runs.write_text(json.dumps(kept))


def timed(case: Case, group: dict[tuple[str, str], float | None], options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each contender, round by round. Raises `AssertionError` where losses differ."""
    names = [*dict.fromkeys(name for pair in group for name in pair)]
    names.append(names[0] + AGAIN)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    apart = 0.0
    for turn in range(0, options.rounds, PAIRS_PER_MAKING):
        rounds = min(PAIRS_PER_MAKING, options.rounds - turn)
        turns = ranks.launch(compete, case, tuple(names), rounds, 3, turn)[0]
        some = [max(v) / min(v) - 1 for v in zip(*turns.losses.values(), strict=True)]
        apart = max(apart, *some)
        assert apart <= 1e-4, f"{case}: the losses do not agree: {turns.losses}"
        for name in names:
            seconds[name] += turns.seconds[name]
    return {"seconds": seconds, "apart": apart}


def formula(case: Case, name: str) -> int:
    """Return the bytes that a rank sends in a step, of float32.

    Per block two activations are summed in forward and two gradients in backward; with parts of sequences each of these
    four is gathered once and scattered once, which is as much. Besides: the embedding, the gradient of the head's
    input, and the logits, or three numbers a token.
    """
    tokens = case.rows * case.context
    activation, cross = 4 * tokens * case.width, NUM_RANKS - 1
    once = 2 * activation * cross // NUM_RANKS  # an all_reduce: a reduce_scatter and an all_gather
    total = (4 * case.layers + 2) * once
    if "sequence" in name:
        total += once  # gradients of the first block's parts, and what the last block's parts become: each half of one
        norms = 2 * (1 if case.groups else 2) * case.width
        rest = 0 if case.groups else 2 * case.width
        total += 2 * 4 * case.layers * (norms + rest) * cross // NUM_RANKS
    logits = 4 * tokens * case.vocabulary * cross // NUM_RANKS
    return total + (2 * 4 * tokens * 3 * cross // NUM_RANKS if "loss" in name else logits)


def tables_of(kept: dict[str, Any], cases: list[Case]) -> list[Rows]:
    """Return the tables of all that was measured."""
    times, medians, memory, sent = [], [], [], []
    for key, one in kept.items():
        if not key.startswith("time/"):
            continue
        case = next(c for c in cases if str(c) == key.split("/")[1])
        seconds = one["seconds"]
        group = next(g for g in GROUPS if name_of(g) == key.split("/")[2])
        itself = next(iter(seconds))
        for (mine, other), at_most in [*group.items(), ((itself + AGAIN, itself), None)]:
            series = Series(tuple(seconds[mine]), tuple(seconds[other]))
            beside = other + (" (A/A)" if mine.endswith(AGAIN) else "")
            verdict = report.verdict(at_most, series.reaches(at_most))
            times.append([mine, str(case), beside, str(len(series.ratios)), *report.timed(series), verdict])
        medians += [
            [n, str(case), *(f"{1e3 * f(s):.4g}" for f in (statistics.median, min)), f"{one['apart']:.1g}"]
            for n, s in seconds.items()
        ]
    for case in cases:
        for mine, other in [*CLAIMS, ("fds", "DDP")]:
            a, b = (kept.get(f"memory/{case}/{n}") for n in (mine, other))
            if a and b:
                claim = report.verdict(1, a[0] < b[0]) if other != "DDP" else ""
                of_step = [f"{a[0] / 1e6:.1f}", f"{b[0] / 1e6:.1f}", f"{a[0] / b[0]:.3f}"]
                memory.append([mine, str(case), other, *of_step, f"{a[1] / 1e6:.1f}", f"{b[1] / 1e6:.1f}", claim])
        for name in (f"fds{v}" for v in VARIANTS):
            if (bytes_sent := kept.get(f"sent/{case}/{name}")) is not None:
                told = formula(case, name)
                met = abs(bytes_sent / told - 1) <= 1e-3
                sent.append(
                    [name, str(case), f"{bytes_sent:,}", f"{told:,}", "within 0.1%: " + ("yes" if met else "NO")]
                )
    tables: list[Rows] = [
        ("Time", ["contender", "case", "beside", "rounds", "ms", "ms beside", "ratio", "95% interval", "claim"], times),
        ("A step (ms of the slowest rank)", ["contender", "case", "median", "least", "losses apart"], medians),
        (
            "Tensors at the peak of a step, and from the making of a whole model on (MB a rank)",
            ["contender", "case", "beside", "MB", "MB beside", "ratio", "making", "making beside", "claim"],
            memory,
        ),
        (BYTES, ["contender", "case", "bytes", "formula", "claim"], sent),
    ]
    return [*tables, table_of_host(kept["host"])] if "host" in kept else tables


def table_of_host(seconds: dict[str, list[float]]) -> Rows:
    """Return what a column and a row take of the host, above plain layers and the messages."""
    us = {name: 1e6 * statistics.median(some) / PAIRS for name, some in seconds.items()}
    floor = us["messages"] + us["plain"]
    above = {name: us[name] - floor for name in ("fds", "DTensor")}
    rows = [[n, f"{x:.0f}", f"{above[n]:.0f}" if n in above else "", ""] for n, x in us.items()]
    rows[0][-1] = report.verdict(0.5, above["fds"] <= 0.5 * above["DTensor"])
    title = f"A column and a row, forward and backward (us of the slowest rank; 4 tokens of {HOST_WIDTH} features)"
    return title, ["contender", "us", "above plain layers and messages", "claim"], rows


def facts() -> dict[str, str]:
    """Return what ran, for the file."""
    return {
        "what ran": "one training step, float32, on 2 gloo ranks of one thread each, which compute one loss of rows x "
        "tokens; DDP has half of the rows on each",
        "models": "GPT: width 512, 13 layers, a vocabulary of 16,384, LayerNorm, GELU, biases; Llama: width 768, "
        "13 layers, 12 heads of queries and 4 of keys and values, a vocabulary of 18,432, RMSNorm, rotary, SwiGLU; "
        "heads of their own",
        "all": "AdamW (torch's, fused; fds's own) with lr 3e-4, betas (0.9, 0.999), eps 1e-8, weight decay 0.01",
        "fds": "tensor_parallel, adamw, donate",
        "DTensor": "parallelize_module: ColwiseParallel, RowwiseParallel, attention and perceptron each take their "
        "input in once (PrepareModuleInput); sequence: SequenceParallel for every norm; loss: loss_parallel()",
        "plain, messages": "the same layers of half of the weights, without messages; and torch's all_reduce alone",
    }


def parse() -> argparse.Namespace:
    """Return the options, `cases` as a list of `Case`."""
    words = lambda text: [word.strip() for word in text.split(";")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=words, default=["GPT", "Llama"], help="of GPT;Llama (both)")
    parser.add_argument(
        "--only", type=words, default=[], help="these of fds's, and DTensor's beside: 'fds, sequence;fds'"
    )
    parser.add_argument("--parts", type=words, default=["time", "memory", "host"], help="of time;memory;host (all)")
    parser.add_argument("--rounds", type=int, default=20, help="each a step of every contender (%(default)s)")
    parser.add_argument("--runs", type=Path, help="a file to which what is measured is added")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds, nothing written")
    parser.add_argument("--out", help="where the table goes (nowhere)")
    options = parser.parse_args()
    options.cases = [case for case in CASES if case.name.split()[0] in options.cases]
    if options.quick:
        options.cases, options.rounds = [TINY], min(options.rounds, 2)
    return options


if __name__ == "__main__":
    sys.exit(main())
