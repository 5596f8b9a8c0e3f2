"""The whole training step of GPT-2 124M, in bfloat16 with float32 masters: fds beside loops in torch.

    make gpu-step            # on an idle GPU

Each contender first runs alone in a process of its own: the losses of its first steps, which must agree with the torch
loop's, its peak of memory and its launches. Several do that at once, which also fills the compilers' caches. Then each
is timed in alternating pairs beside the compiled loop, which is nanoGPT's, with the machine to themselves.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo.config

from benchmarks import kernel_units
from benchmarks.children import Outcome, Pool, Task
from benchmarks.gpu import step_measure as measure
from benchmarks.gpu.records import Case, Failed
from benchmarks.gpu.step_contenders import COMPILED, EAGER, Contender, contenders, sizes_of
from benchmarks.gpu.step_model import GPT
from benchmarks.gpu.step_tables import tables as tables  # which the part offers beside its cases
from benchmarks.harness import Call, compare
from benchmarks.kernel_works import Setting

PART = "step"
ROWS, TINY_ROWS = (8, 32), (2, 3)
AT_ONCE = {8: 4, 32: 2}  # processes that run alone at the same time: what fits into 139 GiB, and 16 cores
PAIRS, MOST_PAIRS = 20, 40
LOSSES_WITHIN = torch.finfo(torch.bfloat16).eps  # of a loss, relative: one rounding to bfloat16
MAIN = 6  # contenders that run with the larger batch too: the others inform
ALONE_S, TRY_S, BESIDE_S = 480.0, 240.0, 300.0  # of a case that runs several alone; of each of them; of a timing
PRODUCT, EXAMPLE = "matrix product", "the example's GPT in float32"

_alone: dict[tuple[int, str], Outcome] = {}  # by this process's children
_beside: dict[int, tuple[str, Call]] = {}  # of one batch: the reference that is alive


def cases(setting: Setting) -> Iterator[Case]:
    """Yield for each batch everybody alone, then everybody beside the compiled loop."""
    yield Case(PRODUCT, lambda: matrix_product(setting), limit_s=60)
    for rows in TINY_ROWS if setting.tiny else ROWS:
        for one in running(rows):
            yield Case(name_of(one.name, rows, setting, "alone"), functools.partial(alone, setting, one, rows), ALONE_S)
        for one in running(rows):
            name = name_of(one.name, rows, setting, "timed")
            yield Case(name, functools.partial(beside, setting, one, rows), BESIDE_S)
    yield Case(EXAMPLE, lambda: example(setting), limit_s=BESIDE_S)


def running(rows: int) -> list[Contender]:
    """Return who runs with a batch."""
    return contenders()[: MAIN if rows in (ROWS[1], TINY_ROWS[1]) else None]


def name_of(contender: str, rows: int, setting: Setting, what: str) -> str:
    """Return the name of a case."""
    return f"{contender}, {rows} x {sizes_of(setting).context}, {what}"


def matrix_product(setting: Setting) -> dict[str, float]:
    """Measure what a large product reaches, which is what MFU can be at the most."""
    return {"flops": measure.product_flops(setting.device, setting.size(8192, 64))}


def example(setting: Setting) -> dict[str, Any]:
    """Time fds's step of the example beside the plain loop, as benchmarks/plain.py does: small, so the host counts."""
    from benchmarks import plain  # it imports the example

    options = plain.parse(["--device", str(setting.device), *(["--quick"] if setting.tiny else [])])
    rows = plain.contenders(options, plain.draw_batches(options, setting.device), setting.device)
    least, most = (2, 2) if setting.tiny else (PAIRS, MOST_PAIRS)
    found = compare(rows, device=setting.device, pairs=least, most=most)
    series = lambda times: {"seconds": list(times.contender), "beside_seconds": list(times.beside)}
    each = [(r.row.contender.name, r.row.beside.name, r.time, r.agreement, r.memory_ratio) for r in found.results]
    each += [(one.name, one.name, times, "", 1.0) for one, times in found.itself]
    return {
        "pairs": [
            {"contender": name, "beside": other, "agree": agree, "memory": memory, **series(times)}
            for name, other, times, agree, memory in each
        ]
    }


def alone(setting: Setting, one: Contender, rows: int) -> dict[str, Any]:
    """Return what one contender is alone. The next ones run at the same time, and the eager loop, to compare with."""
    if (rows, one.name) not in _alone:
        cores = os.cpu_count() or 1
        at_once = min(AT_ONCE.get(rows, 2), cores)
        done = {other.name for other in running(rows) if name_of(other.name, rows, setting, "alone") in setting.done}
        over = {name for batch, name in _alone if batch == rows} | done
        left = [other.name for other in running(rows) if other.name not in over | {one.name, EAGER}]
        eager = [] if (rows, EAGER) in _alone else [EAGER]
        names = list(dict.fromkeys([one.name, *eager, *left]))[: max(at_once, 2)]
        tasks = [Task(name, run_alone, (str(setting.device), setting.tiny, name, rows), TRY_S) for name in names]
        pool = Pool(at_once, fresh=True, compile_threads=cores // at_once)
        _alone.update({(rows, name): outcome for name, outcome in pool.run(tasks).items()})
    outcome = _alone[rows, one.name]
    if outcome.error:
        raise Failed(outcome.error)
    tokens = rows * sizes_of(setting).context
    figures = {**outcome.result, "contender": one.name, "rows": rows, "tokens": tokens, "what": one.what}
    if wrong := apart(rows, one.name):
        raise Failed(wrong, figures)
    return figures


def apart(rows: int, name: str) -> str:
    """Return how the losses of a contender differ from the eager loop's, "" where they agree or that has none."""
    mine, eager = _alone[rows, name], _alone.get((rows, EAGER), Outcome(error="not run"))
    if eager.error:
        return ""
    losses, wanted = mine.result["losses"], eager.result["losses"]
    far = max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in zip(losses, wanted, strict=True))
    return "" if far <= LOSSES_WITHIN else f"losses {losses} are {far:.2g} from {wanted}, more than {LOSSES_WITHIN:.2g}"


def run_alone(
    device: str, tiny: bool, name: str, rows: int, *, skip: Mapping[str, str], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run one contender, in a child of its own."""
    setting = kernel_units.setting_of(device, tiny)
    torch.set_float32_matmul_precision("high")  # as nanoGPT has it
    return measure.alone(lambda: named(name).make(setting, rows), setting.device)


def named(name: str) -> Contender:
    """Return a contender."""
    return next(one for one in contenders() if one.name == name)


def beside(setting: Setting, one: Contender, rows: int) -> dict[str, Any]:
    """Time one contender in pairs beside the compiled loop, and that beside itself made anew."""
    torch.set_float32_matmul_precision("high")
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=256):
        reference, other = reference_of(setting, rows)
        try:
            call = one.make(setting, rows)
            for _ in range(measure.WARM_UP):
                call()
            wall_us, work_us = measure.host_us(call, setting.device)
            least, most = (2, 2) if setting.tiny else (PAIRS, MOST_PAIRS)
            series = measure.pairs(call, other, setting.device, least=least, most=most)
        finally:
            call = None
            released(setting.device)
    sizes = sizes_of(setting)
    with torch.device("meta"):
        flops = sizes.flops_per_token(GPT(sizes))
    return {
        "contender": one.name,
        "rows": rows,
        "what": one.what,
        "beside": reference,
        "seconds": list(series.contender),
        "beside_seconds": list(series.beside),
        "host_us": round(wall_us, 1),
        "cpu_us": round(work_us, 1),
        "tokens": rows * sizes.context,
        "flops_per_token": flops,
    }


def reference_of(setting: Setting, rows: int) -> tuple[str, Call]:
    """Return the compiled loop, warm; one of them lives at a time. Where it does not run here, the eager loop."""
    if rows not in _beside:
        _beside.clear()
        released(setting.device)
        for name in (COMPILED, EAGER):
            try:
                call = named(name).make(setting, rows)
                for _ in range(measure.WARM_UP):
                    call()
                _beside[rows] = (name, call)
                break
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            raise Failed(f"neither {COMPILED} nor {EAGER} runs, so there is nothing to be beside")
    return _beside[rows]


def released(device: torch.device) -> None:
    """Give back what nobody holds."""
    gc.collect()
    kernel_units.clock_of(device, True).release()
