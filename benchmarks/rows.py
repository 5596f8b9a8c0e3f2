"""One row of 128k tokens of a Llama of transformers on two gloo ranks of one thread: resident bytes, and time.

    make bench-rows                              # half an hour and more: attention of 128k tokens
    make bench-rows ARGS="--quick"               # short rows, nothing written: does it all run?
    make bench-rows ARGS="--parts time"          # of time, memory

The recipe is that of docs/long-rows.md: `fds.hf.context_parallel`, layers that are computed again, `fds.tile`, the loss
in chunks of logits, and slices of the state at stage 3. Without tiles it is the same recipe, whose feed-forward layers
and logits are made for all tokens of a rank at once. Resident bytes are all of a process, of the rank that has most:
torch, transformers and the model are in them. Needs transformers.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]  # as a module and as a file, from anywhere

import attrs
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import fds
from benchmarks import ranks, report
from benchmarks.harness import Call

TIME_AT_MOST, BYTES_AT_MOST = 1.05, 2 * 10**9
TILED, WHOLE = "tiles", "no tiles"
GB = 10**9


@attrs.frozen
class Case:
    """A Llama, the tokens of its one row, and those of a tile and of a chunk of logits."""

    tokens: int
    width: int = 64
    layers: int = 2
    vocabulary: int = 8192
    tile: int = 1024


def make(case: Case, name: str) -> Call:
    """Return a call that takes a step on this rank's part of the same row."""
    transformers = importlib.import_module("transformers")
    axis = fds.mesh(sp=-1)["sp"]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=4 * case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.width // 32,
        num_key_value_heads=max(case.width // 64, 1),
        max_position_embeddings=case.tokens,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    chunk = case.tile if name == TILED else case.tokens
    model = fds.hf.context_parallel(model, axis, chunk_tokens=chunk)
    apply, params, _ = fds.functional(model)
    step = fds.compose(
        fds.shard_optimizer(axis, stage=3),
        fds.context_parallel(axis),
        *([fds.tile("model.layers.*.mlp", tokens=case.tile)] if name == TILED else []),
        fds.adamw(1e-3),
        fds.donate(),
    )(lambda params, part: apply(params, **part))
    state = step.init(params)
    del params, model
    rows = torch.randint(case.vocabulary, (1, case.tokens), generator=torch.Generator().manual_seed(0))
    part = fds.hf.part({"input_ids": rows}, axis)

    def call() -> Tensor:
        nonlocal state
        state, metrics = step(state, part)
        return metrics["loss"]

    return call


def compete(case: Case, names: list[str], rounds: int) -> ranks.Turns:
    """Run on every rank: time these contenders in turns; the same one twice is told apart by its number."""
    makers: dict[str, Callable[[], Call]] = {
        f"{i} {name}": functools.partial(make, case, name) for i, name in enumerate(names)
    }
    return ranks.take_turns(makers, rounds=rounds, first_calls=1, turn=0)


def weigh(case: Case, name: str) -> tuple[float, float, float]:
    """Run on every rank: resident bytes at the peak of one call, of the rank that has most, its loss and seconds."""
    call = make(case, name)
    ranks.high_water(reset=True)
    dist.barrier()
    start = time.perf_counter()
    loss = float(call())
    seconds = time.perf_counter() - start
    most = torch.tensor([float(ranks.high_water(reset=False)), seconds], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most[0]), loss, float(most[1])


def _ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the median of paired ratios, and its 95% interval by bootstrap."""
    ratios = np.array(ours) / np.array(theirs)
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def time_table(case: Case, rounds: int) -> tuple[report.Rows, bool]:
    """Return the table of times, and whether the claim is met."""
    rows, met = [], True
    for ours, theirs in ((TILED, WHOLE), (WHOLE, WHOLE)):
        one, other = ranks.launch(compete, case, [ours, theirs], rounds)[0].seconds.values()
        ratio, low, high = _ratio(one, other)
        beside = theirs if ours != theirs else "itself anew (A/A)"
        met = met and (ours == theirs or low <= TIME_AT_MOST)
        ms = [f"{1000 * float(np.median(x)):.0f}" for x in (one, other)]
        claim = report.verdict(TIME_AT_MOST, low <= TIME_AT_MOST) if ours != theirs else ""
        rows.append([ours, beside, *ms, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", claim])
    header = ["contender", "beside", "ms", "ms beside", "ratio", "95% interval", "claim"]
    return (f"A step of {case.tokens:,} tokens on two ranks ({rounds} rounds)", header, rows), met


def memory_table(cases: list[tuple[Case, str]]) -> tuple[report.Rows, bool]:
    """Return the table of resident bytes, and whether the claim is met."""
    rows, met = [], True
    for case, name in cases:
        peak, loss, seconds = ranks.launch(weigh, case, name)[0]
        print(f"{case.tokens:,} {name}: {peak / GB:.3f} GB, {seconds:.0f} s", file=sys.stderr)
        is_claim = case == cases[0][0]
        met = met and (not is_claim or peak <= BYTES_AT_MOST)
        claim = f"2 GB: {'yes' if peak <= BYTES_AT_MOST else 'NO'}" if is_claim else ""
        rows.append([f"{case.tokens:,}", name, f"{peak / GB:.3f}", f"{seconds:.0f}", f"{loss:.4f}", claim])
    header = ["tokens", "contender", "GB of a rank", "s", "loss", "claim"]
    return ("One step, all that is resident of the rank that has most", header, rows), met


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="of timing (%(default)s)")
    parser.add_argument("--tokens", type=int, default=131072, help="of the longest row (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model (%(default)s)")
    parser.add_argument("--parts", default="memory;time", help="of memory, time (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="short rows, two rounds, nothing written")
    options = parser.parse_args()
    console, parts = Console(), options.parts.split(";")
    ranks.prepare(["transformers.models.llama.modeling_llama", "fds.hf", "fds.transforms", "benchmarks.rows"])
    small = {"vocabulary": 256, "tile": 32}
    longest = Case(256, **small) if options.quick else Case(options.tokens, options.width)
    short = [attrs.evolve(longest, tokens=longest.tokens // n) for n in (16, 4)]
    cases = [(longest, TILED)] + [(case, name) for case in short for name in (TILED, WHOLE)]
    tables, met = list[report.Rows](), True
    if "memory" in parts:
        table, met = memory_table(cases)
        tables.append(table)
    if "time" in parts:
        table, fast = time_table(short[0], 2 if options.quick else options.rounds)
        tables, met = [*tables, table], met and fast
    report.show_tables(tables, console)
    if not options.quick:
        facts = {"what ran": f"a Llama of {longest.layers} layers of width {longest.width} with "
                 f"{longest.vocabulary} words, float32; tiles and chunks of {longest.tile} tokens"}  # fmt: skip
        console.print(f"written: {report.write_tables(tables, 'rows', facts)}")
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
