"""What kernels take of the host: launches that stop where the driver would be called, one call and one step at a time.

    python -m benchmarks.launches                         # or: make bench-launches
    python -m benchmarks.launches --beside ../before      # in alternation with another checkout of this repository
    python -m benchmarks.launches --quick                 # few calls, nothing written: does it all run?

No GPU is needed. Triton's driver is told of one, tensors lie on the CPU, and `JITFunction._do_compile` returns an
object whose `run` does nothing. So all is done that Triton does at a launch (binding, specialisation, the look-up of
the compiled kernel) but for the call of the driver, and nothing is computed. What else the host does where there is a
GPU is not measured: making its device the current one, and copying tables of addresses to it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("FDS_BENCHMARK_OF", str(Path(__file__).parent.parent)))  # a worker's may be another

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from benchmarks import report
from benchmarks.report import Rows
from fds import kernels

HERE = Path(__file__).resolve().parent.parent
SLICES = 148  # of 64 elements; as many parameters as GPT-2 124M has
Call = Callable[[], object]


class Launched:
    """A compiled kernel that was not compiled; `count` is of all launches."""

    count, function, packed_metadata = 0, 0, ()

    def launch_metadata(self, *args: Any) -> None:
        """Return nothing, as without a hook."""

    def run(self, *args: Any) -> None:
        """Count, and do nothing."""
        Launched.count += 1


@contextlib.contextmanager
def without_a_device() -> Iterator[None]:
    """Launch kernels inside on CPU tensors, up to the call of the driver."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from benchmarks.absent_gpu import AbsentGpu
    from fds.kernels import language

    def compiled(self: Any, key: Any, signature: Any, device: Any, *args: Any) -> Launched:
        return self.device_caches[device][0].setdefault(key, Launched())

    absent: Any = AbsentGpu()
    driver.set_active(absent)
    function: Any = JITFunction
    plain, function._do_compile, language.is_interpreted = function._do_compile, compiled, True
    try:
        with kernels.only("triton"):
            yield
    finally:
        function._do_compile, language.is_interpreted = plain, False


class Calls(TorchDispatchMode):
    """Count the operators that torch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def functions() -> Iterator[tuple[str, Call, Call | None]]:
    """Yield a function's name, a forward and a backward; an optimizer has no backward."""
    x, y = (torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    row, second = (torch.randn(64, requires_grad=True) for _ in range(2))
    low = torch.randn(64, dtype=torch.bfloat16, requires_grad=True)
    targets, seed = torch.arange(8), torch.tensor(3)
    made: dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]] = {
        "layer_norm": (lambda: kernels.layer_norm(x, row, second), (x, row, second)),
        "rms_norm": (lambda: kernels.rms_norm(x, row), (x, row)),
        "swiglu": (lambda: kernels.swiglu(x, y), (x, y)),
        "bias_gelu": (lambda: kernels.bias_gelu(x, low), (x, low)),
        "bias_dropout_add": (lambda: kernels.bias_dropout_add(x, low, y, p=0.1, seed=seed), (x, low, y)),
        "cross_entropy": (lambda: kernels.cross_entropy(x, targets), (x,)),
    }
    for name, (forward, inputs) in made.items():
        out = forward()
        dout = torch.ones_like(out)
        back = lambda out=out, inputs=inputs, dout=dout: torch.autograd.grad(out, inputs, dout, retain_graph=True)
        yield name, forward, back
    yield from ((f"{name}, {SLICES} slices", call, None) for name, call in updates())


def updates() -> Iterator[tuple[str, Call]]:
    """Yield the optimizers' kernels over many slices; `new addresses` are those of a pure step."""
    many = lambda dtype=torch.float32: [torch.randn(64).to(dtype) for _ in range(SLICES)]
    p, g, m, v, low = many(), many(torch.bfloat16), many(), many(), many(torch.bfloat16)
    step, lr = torch.tensor(3), torch.tensor(1e-3, dtype=torch.float64)
    adam = {"step": step, "lr": lr, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    sets = [[many(), many(torch.bfloat16), many(), many()] for _ in range(100)]  # more than are kept
    turn = iter(range(10**9))
    yield "adamw", lambda: kernels.adamw(p, g, m, v, out=low, **adam)
    yield "adamw, new addresses", lambda: kernels.adamw(*sets[next(turn) % len(sets)], **adam)
    yield "lion", lambda: kernels.lion(p, g, m, lr=lr, beta1=0.9, beta2=0.99, weight_decay=0.1)
    yield "sgd", lambda: kernels.sgd(p, g, m, step=step, lr=lr, momentum=0.9)


def steps() -> Iterator[tuple[str, Call]]:
    """Yield whole steps of as many parameters."""
    for label, optimizer in (("adamw", fds.adamw(1e-3)), ("lamb", fds.lamb(1e-3))):
        for donated in (False, True):
            module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(SLICES // 2)))
            apply, params, _ = fds.functional(module)
            parts = (fds.precision(torch.bfloat16), *([fds.donate()] if donated else []), optimizer)
            step = fds.compose(*parts)(lambda p, x, apply=apply: apply(p, x).float().square().mean())
            yield f"step, {label}, {'donated' if donated else 'pure'}", turn_of(step, step.init(params))


def turn_of(step: fds.Step, state: fds.State) -> Call:
    """Return a call that makes one step, from the state of the one before."""
    batch = torch.randn(8, 8)

    def call() -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return call


def all_calls(calls: int) -> Iterator[tuple[str, Call, int]]:
    """Yield every call with its name, and how often it is made in a round."""
    for name, forward, backward in functions():
        yield f"{name}, forward" if backward else name, forward, calls if backward else max(calls // 20, 1)
        if backward:
            yield f"{name}, backward", backward, calls
    for name, call in steps():
        yield name, call, max(calls // 200, 1)


def measure(todo: Iterable[tuple[str, Call, int]], rounds: int) -> dict[str, list[float]]:
    """Return name -> microseconds of the host, launches, operators of torch and casts, of one call each."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    with without_a_device():
        for name, call, repeat in todo:
            for _ in range(3):
                call()
            before = Launched.count
            with Calls() as seen:
                call()
            counts = [Launched.count - before, seen.counts.total(), seen.counts["aten::_to_copy"]]
            gc.collect()
            gc.disable()
            found[name] = [statistics.median(timed(call, repeat) for _ in range(rounds)), *map(float, counts)]
            gc.enable()
    return found


def timed(call: Call, repeat: int) -> float:
    """Return the microseconds of one call, which this process spent on it, of as many."""
    start = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - start) / repeat * 1e6


def worker(of: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the fds of a checkout in a process of its own."""
    command = [sys.executable, __file__, "--worker", f"--rounds={options.rounds}", f"--calls={options.calls}"]
    environment = {**os.environ, "FDS_BENCHMARK_OF": str(of), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout)


def tables(runs: dict[str, list[dict[str, list[float]]]]) -> list[Rows]:
    """Return a table of times and one of counts: medians over the processes of each checkout, the first's first."""
    labels, names = list(runs), list(next(iter(runs.values()))[0])
    medians = lambda name, k: [statistics.median(run[name][k] for run in runs[x]) for x in labels]
    times: list[list[str]] = []
    for name in names:
        took = medians(name, 0)
        times.append([name, *(f"{us:.1f}" for us in took), *[f"{took[-1] / took[0]:.2f}"] * (len(labels) > 1)])
    counts = [[name, *(f"{n:.0f}" for k in (1, 2, 3) for n in medians(name, k))] for name in names]
    whats = [f"{what}, {x}" for what in ("launches", "operators", "_to_copy") for x in labels]
    return [
        ("Microseconds of the host", ["call", *labels, *["ratio"] * (len(labels) > 1)], times),
        ("What is called", ["call", *whats], counts),
    ]


def main() -> int:
    """Run from the command line."""
    options = parse()
    if options.worker:
        print(json.dumps(measure(all_calls(options.calls), options.rounds)))
        return 0
    checkouts = {"before": options.beside.resolve(), "now": HERE} if options.beside else {"now": HERE}
    runs: dict[str, list[dict[str, list[float]]]] = {label: [] for label in checkouts}
    for _ in range(options.processes):
        for label, path in checkouts.items():
            runs[label].append(worker(path, options))
    found, console = tables(runs), Console()
    report.show_tables(found, console)
    if not options.quick:
        console.print(f"written: {report.write_tables(found, 'launches', facts(checkouts, options))}")
    return 0


def facts(checkouts: dict[str, Path], options: argparse.Namespace) -> dict[str, str]:
    """Return what ran, for the file."""
    revision = lambda path: subprocess.run(
        ["git", "-C", path, "describe", "--always", "--dirty"], check=True, capture_output=True, text=True
    ).stdout.strip()
    return {
        "what ran": "launches up to the call of the driver, which is left out, as is all that kernels would compute "
        f"(see benchmarks/launches.py); one thread; tensors (8, 64), {SLICES} slices of 64 elements, steps of "
        f"{SLICES // 2} nn.Linear(8, 8), {SLICES} parameters, under fds.precision(torch.bfloat16)",
        "how": f"CPU time; the median of {options.processes} processes of each checkout, in alternation, each the "
        f"median of {options.rounds} rounds; operators are those that torch dispatches below autograd",
        **{label: revision(path) for label, path in checkouts.items()},
    }


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout, measured in alternation with this one")
    parser.add_argument("--processes", type=int, default=5, help="of each checkout (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each process (%(default)s)")
    parser.add_argument("--calls", type=int, default=1000, help="in a round (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one process, few calls, nothing written")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.processes, options.rounds, options.calls = 1, 1, 20
    return options


if __name__ == "__main__":
    sys.exit(main())
