"""Read a model of transformers into the slices of two ranks: time beside a raw read of as many bytes, memory, bytes.

A Llama in safetensors shards, 1 GB by default, is read at stage 3 by `fds.hf.init` on two ranks, which both have looked
at the names before. The contender beside it reads as many bytes in blocks of 8 MiB into new memory, from where the
share of the rank begins. Files are locked in the page cache while both are timed, by the clock and by the seconds of
the CPU, of which neighbours take none: such reads are copies. `from_pretrained` and `step.init` after it inform: what
everybody does without this. Peaks are resident bytes above those before, bytes are those that the kernel counts.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]  # as a module and as a file, from anywhere

import numpy as np
from rich.console import Console

from benchmarks import ranks, report
from benchmarks.loading_contenders import INIT, RAW, WAYS, make, time_in_turns, weigh

MIB = 2**20
TIME_AT_MOST, BEYOND_AT_MOST = 1.2, 64 * MIB


def _ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the median of paired ratios, and its 95% interval by bootstrap.

    A pair is two rounds, one in each order: who comes second takes the memory that the first gave back.
    """
    ratios = np.divide(*(np.array(x).reshape(-1, 2).sum(axis=1) for x in (ours, theirs)))
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Keep the files of a folder in the page cache. Raises `OSError` where so much memory may not be locked."""
    libc, maps = ctypes.CDLL(None, use_errno=True), list[mmap.mmap]()
    for path in Path(folder).glob("*.safetensors"):
        with path.open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), 0))
        address = ctypes.addressof(ctypes.c_char.from_buffer(maps[-1]))
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(maps[-1]))):
            raise OSError(ctypes.get_errno(), "the kernel locks no pages", str(path))
    yield
    gc.collect()  # of the buffers, without which no map can be closed
    for pages in maps:
        pages.close()


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="of timing, an even number (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds, nothing written")
    options = parser.parse_args()
    layers, width, rounds = (2, 128, 2) if options.quick else (16, 1024, options.rounds + options.rounds % 2)
    console = Console()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # larger memory is given back at once, and so is new each time
    ranks.prepare(
        ["benchmarks.loading_contenders", "transformers.models.llama.modeling_llama", "fds.hf", "fds.transforms"]
    )
    with tempfile.TemporaryDirectory() as folder:
        ranks.launch(make, folder, layers, width)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        with _locked(folder):
            ours, theirs = ranks.launch(time_in_turns, folder, (INIT, RAW), rounds)[0]
            one, same = ranks.launch(time_in_turns, folder, (RAW, RAW), rounds)[0]
            cpu, raw_cpu = ranks.launch(time_in_turns, folder, (INIT, RAW), rounds, True)[0]
        weighed = {name: ranks.launch(weigh, folder, name)[0] for name in WAYS}
    ratio, low, high = _ratio(ours, theirs)
    again, low_again, high_again = _ratio(one, same)
    of_cpu, low_cpu, high_cpu = _ratio(cpu, raw_cpu)
    interval = lambda low, high: f"{low:.3f} to {high:.3f}"
    ms = lambda seconds: f"{1000 * float(np.median(seconds)):.1f}"
    verdict = report.verdict(TIME_AT_MOST, low <= TIME_AT_MOST)
    times = [
        [INIT, RAW, ms(ours), ms(theirs), f"{ratio:.3f}", interval(low, high), verdict],
        [RAW, "itself anew (A/A)", ms(one), ms(same), f"{again:.3f}", interval(low_again, high_again), ""],
        [f"{INIT}, CPU", RAW, ms(cpu), ms(raw_cpu), f"{of_cpu:.3f}", interval(low_cpu, high_cpu), ""],
    ]
    memory = []
    for name, x in weighed.items():
        met = x.beyond_bytes <= BEYOND_AT_MOST
        claim = "" if name != INIT else f"64 MiB: {'yes' if met else 'NO'}"
        cells = [f"{n / MIB:.1f}" for n in (x.held_bytes, x.beyond_bytes, x.read_bytes)]
        memory.append([name, *cells, claim])
    header = ["contender", "beside", "ms", "ms beside", "ratio", "95% interval", "claim"]
    tables: list[report.Rows] = [
        (f"Time of {size / 1e9:.2f} GB on two ranks ({rounds} rounds)", header, times),
        ("Rank that takes most, MiB", ["contender", "held", "peak above it", "read", "at most"], memory),
    ]
    report.show_tables(tables, console)
    if not options.quick:
        facts = {
            "what ran": f"a Llama of {layers} layers of width {width}, float32, in shards of 300 MB, in the page cache"
        }
        console.print(f"written: {report.write_tables(tables, 'loading', facts)}")
    return 0 if options.quick or (low <= TIME_AT_MOST and weighed[INIT].beyond_bytes <= BEYOND_AT_MOST) else 1


if __name__ == "__main__":
    sys.exit(main())
