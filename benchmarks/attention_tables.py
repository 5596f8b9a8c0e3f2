"""Time candidates for the rows of attention's launch tables on a GPU: `python -m benchmarks.attention_tables`.

For each table, head size and kind of call: candidates are compiled and held against the reference by several processes,
at a small size, then timed one after another, causal and not, with heads that fill 2,048 columns and 16,384 tokens. The
fastest is printed as the line that the table has in fds/kernels, and every time is appended to a file.
A row of the queries' or the keys' kernel is timed within the whole backward pass, of which the other kernel is a part.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.children import Pool, Task
from benchmarks.kernel_timing import Clock
from benchmarks.kernel_works import WITHIN
from fds.kernels import flash, flash_backward
from fds.kernels.choice import only
from fds.kernels.flash_blocks import blocks
from fds.kernels.language import LEAST, shared_memory

Key = tuple[int, int, str]  # of a row in a launch table, see fds.kernels.flash_blocks.kind
Row = Mapping[str, int]

TABLES = {"LAUNCH": flash.LAUNCH, "OVER_QUERIES": flash_backward.OVER_QUERIES, "OVER_KEYS": flash_backward.OVER_KEYS}
# Blocks of queries and keys, and warps: by rows of 64 for each group of four warps that multiplies.
TILES = {
    "LAUNCH": [(128, 128, 8), (128, 64, 8), (128, 32, 8), (64, 128, 4), (64, 64, 4), (64, 64, 8), (64, 32, 4)],
    "OVER_QUERIES": [(128, 128, 8), (128, 64, 8), (128, 32, 8), (64, 128, 4), (64, 64, 4), (64, 64, 8), (64, 32, 8)],
    "OVER_KEYS": [(128, 128, 8), (64, 128, 8), (32, 128, 8), (16, 128, 8), (64, 64, 4), (32, 64, 4), (64, 64, 8)],
}
STAGES = (2, 3)
DTYPES = {2: torch.bfloat16, 4: torch.float32}
ROUNDS = 5  # of which the median is taken


def candidates(name: str, key: Key) -> Iterator[Row]:
    """Yield rows to try: what the table has now first."""
    now = list(TABLES[name][key].values())
    yield from now
    for (queries, keys, warps), stages in itertools.product(TILES[name], STAGES):
        row = blocks(queries, keys, warps, stages, tma=key[1] == 2)
        if row not in now:
            yield row


def written(row: Row) -> str:
    """Return a row as a table has it in the code."""
    numbers = ", ".join(str(row[name]) for name in ("QUERIES", "KEYS", "num_warps", "num_stages"))
    return f"blocks({numbers}{', tma=True' if row['TMA'] else ''})"


@contextlib.contextmanager
def taken(name: str, key: Key, row: Row) -> Iterator[None]:
    """Let launches take this row, whatever the device."""
    table, had = TABLES[name], TABLES[name][key]
    table[key] = {LEAST: dict(row)}
    try:
        yield
    finally:
        table[key] = had


def calls(name: str, key: Key, device: torch.device, batch: int, tokens: int, heads: int) -> list[Callable[[], Any]]:
    """Return the calls to time, causal and not: forward, or backward after one forward; each returns its tensors."""
    columns, size, kind = key
    shape = batch, tokens, 3, heads, columns
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(shape, device=device, generator=generator).to(DTYPES[size]).requires_grad_()
    options: dict[str, Any] = {}
    if kind == "bias":
        options["bias"] = torch.randn(batch, 1, 1, tokens, device=device, generator=generator)
    elif kind == "masked":
        options |= {"p": 0.1, "seed": torch.full((), 7, device=device)}
    found = []
    for causal in (True, False):
        run = lambda causal=causal: flash.flash_attention(*packed.transpose(1, 3).unbind(2), causal=causal, **options)
        if name != "LAUNCH":
            out = run()
            run = lambda out=out: torch.autograd.grad(out, packed, out.detach(), retain_graph=True)[0]
        found.append(run)
    return found


def checked(
    name: str, key: Key, rows: list[Row], device: str, heads: int, *, skip: Mapping[str, str], tell: Callable
) -> dict[str, str]:
    """Compile and run candidates once; return what is wrong with each, "" where nothing is. A task of a child."""
    where, wrong = torch.device(device), {}
    with only("reference"):
        want = [call().detach() for call in calls(name, key, where, 1, 256, heads)]
    for row in rows:
        text = written(row)
        if text in skip:
            wrong[text] = skip[text]
            continue
        tell(text)
        try:
            with only("triton"), taken(name, key, row):
                got = [call().detach() for call in calls(name, key, where, 1, 256, heads)]
            wrong[text] = "" if all(map(_near, got, want)) else "computes something else"
        except Exception as error:  # a row that needs more than the GPU has
            wrong[text] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return wrong


def _near(got: Tensor, want: Tensor) -> bool:
    return bool((got.double() - want.double()).norm() <= WITHIN[got.dtype] * want.double().norm())


def timed(name: str, key: Key, rows: list[Row], clock: Clock, sizes: tuple[int, int, int]) -> dict[str, float]:
    """Return the milliseconds of each row, causal and not together: the median of some rounds over all rows."""
    with only("triton"):
        ways = calls(name, key, clock.device, *sizes)
        series: dict[str, list[float]] = {written(row): [] for row in rows}
        for _ in range(ROUNDS + 1):  # the first warms up
            for row in rows:
                with taken(name, key, row):
                    series[written(row)].append(sum(1e3 * clock.seconds(call, 3, wait_s=0.002) for call in ways))
    return {text: statistics.median(values[1:]) for text, values in series.items()}


def tuned(
    name: str, key: Key, pool: Pool, clock: Clock, sizes: tuple[int, int, int], rows: list[Row]
) -> dict[str, Any]:
    """Return the times of one entry of a table, what was left out and why, and the best line."""
    tasks = {
        f"{name} {key} {i}": (
            rows[i :: pool.jobs],
            Task(f"{name} {key} {i}", checked, (name, key, rows[i :: pool.jobs], clock.device.type, sizes[2])),
        )
        for i in range(min(pool.jobs, len(rows)))
    }
    wrong: dict[str, str] = {}
    for task, outcome in pool.run(task for _, task in tasks.values()).items():
        wrong |= outcome.result or {written(row): outcome.error for row in tasks[task][0]}
    ms = timed(name, key, [row for row in rows if not wrong[written(row)]], clock, sizes)
    best = min(ms, key=lambda text: ms[text], default="none")
    line = f"{key}: {{{shared_memory(clock.device)}: {best}}},"
    return {
        "table": name,
        "key": key,
        "line": line,
        "ms": ms,
        "refused": {text: why for text, why in wrong.items() if why},
    }


def main(given: list[str]) -> int:
    """Tune the entries that are asked for, those of 16 bits first, until time is up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="without one all")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no entry after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("attention_tables.jsonl"), help="a file to append to")
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        print("No GPU here: nothing can be timed.")
        return 1
    began, clock, pool = (
        time.monotonic(),
        Clock(torch.device("cuda", 0), 1 << 20),
        Pool(max((os.cpu_count() or 2) - 1, 1)),
    )
    done = {(line["table"], tuple(line["key"])) for line in map(json.loads, _lines(options.out))}
    wanted = [(name, key) for name in options.tables or TABLES for key in TABLES[name]]
    for name, key in sorted(wanted, key=lambda entry: entry[1][1]):
        if (name, key) in done or time.monotonic() - began > options.seconds:
            continue
        found = tuned(name, key, pool, clock, (4, 4096, 2048 // key[0]), list(candidates(name, key)))
        with options.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{name}: {found['line']}", flush=True)
        for text, ms in sorted(found["ms"].items(), key=lambda entry: entry[1]):
            print(f"    {ms:9.3f} ms  {text}")
    pool.end()
    return 0


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
