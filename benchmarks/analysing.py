"""`fds.data.analyse` beside DeepSpeed's `DataAnalyzer`, of the same file of tokens; and of ten million samples alone.

    python -m benchmarks.analysing             # or: make bench-analysing (needs .venv-peers, 2 GB of disk, minutes)
    python -m benchmarks.analysing --quick     # a tiny file, nothing written: does it all run?

Both find the length of every sample, sorted, and the counts of all tokens, and agree. Every run is a process of its
own, forked, and takes turns with the other; its peak is of memory that is no file's, read every 10 ms. Claim: at most
0.5 of DeepSpeed's time.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import attrs
import numpy as np
import torch
from rich.console import Console

from benchmarks import report
from benchmarks.harness import Series
from fds.data import SequenceLength, TokenCounts, TokenFile, VocabularyRarity, analyse, read_metric, read_total
from fds.data.tokens import HEAD, MAGIC

VOCABULARY, MOST = 50_000, 128  # tokens: frequent ones are small; of a sample: 1 to 128, so 64.5 on average
AT_MOST = 0.5


@attrs.frozen
class Tensors:
    """The sequences of a file, a tensor each, as any data set of torch gives them."""

    file: TokenFile

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.file[int(i)]


def ours(file: TokenFile, out: str, workers: int) -> None:
    """Analyse a file of tokens."""
    metrics = {"length": SequenceLength(), "counts": TokenCounts(VOCABULARY)}
    analyse(file, metrics, out, workers=workers, show=False)


def of_tensors(file: TokenFile, out: str, workers: int) -> None:
    """Analyse the same samples, each a tensor."""
    metrics = {"length": SequenceLength(), "counts": TokenCounts(VOCABULARY)}
    analyse(Tensors(file), metrics, out, workers=workers, show=False)


def deepspeeds(file: TokenFile, out: str, workers: int) -> None:
    """Let DeepSpeed analyse them, in batches of 1,024, by functions of a batch."""
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    analyzer = DataAnalyzer(
        Tensors(file),
        num_threads=max(1, workers),
        num_threads_reduce=max(1, workers),
        batch_size=1024,
        metric_names=["length", "counts"],
        metric_functions=[
            lambda batch: torch.tensor([len(row) for row in batch]),
            lambda batch: torch.bincount(torch.cat(batch), minlength=VOCABULARY),
        ],
        metric_types=["single_value_per_sample", "accumulate_value_over_samples"],
        metric_dtypes=[torch.int64, torch.int64],
        save_path=out,
        collate_fn=list,
    )
    analyzer.run_map()
    analyzer.run_reduce()


def all_metrics(file: TokenFile, out: str, workers: int) -> None:
    """Analyse by length, rarity and counts: two passes."""
    metrics = {"length": SequenceLength(), "rarity": VocabularyRarity(VOCABULARY), "counts": TokenCounts(VOCABULARY)}
    analyse(file, metrics, out, workers=workers, show=False)


def make_corpus(stem: Path, samples: int) -> TokenFile:
    """Write a corpus of random tokens piece by piece, and return it."""
    draws = np.random.default_rng(0)
    lengths = draws.integers(1, MOST + 1, samples, dtype=np.int32)
    total = int(lengths.sum(dtype=np.int64))
    with open(f"{stem}.bin", "wb") as file:
        for begin in range(0, total, 1 << 22):
            (VOCABULARY * draws.random(min(1 << 22, total - begin)) ** 3).astype("<u2").tofile(file)
    with open(f"{stem}.idx", "wb") as file:
        counts = np.array([samples, samples + 1], "<u8").tobytes()
        file.write(MAGIC + (1).to_bytes(8, "little") + bytes([8]) + counts)
        assert file.tell() == HEAD
        lengths.astype("<i4").tofile(file)
        (2 * (np.cumsum(lengths, dtype="<i8") - lengths)).tofile(file)
        np.arange(samples + 1, dtype="<i8").tofile(file)
    return TokenFile(stem)


def measure(
    work: Callable[[TokenFile, str, int], None], file: TokenFile, out: str, workers: int
) -> tuple[float, float]:
    """Run in a forked process; return the seconds that it took, and the most MB of memory that it had more."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)
        peak, ends = [anonymous()], threading.Event()

        def watch() -> None:
            while not ends.wait(0.01):
                peak.append(max(peak[-1], anonymous()))

        watching = threading.Thread(target=watch)
        watching.start()
        began = time.perf_counter()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # DeepSpeed's index prints much
            work(file, out, workers)
        seconds = time.perf_counter() - began
        ends.set()
        watching.join()
        sending.send((seconds, (peak[-1] - peak[0]) / 1e6))

    process = context.Process(target=run)
    process.start()
    sending.close()
    try:
        return receiving.recv()
    finally:
        process.join()


def anonymous() -> int:
    """Return the bytes of this process's memory that are no file's."""
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def check(out: str, theirs: str) -> None:
    """Assert that what both found is the same."""
    stem = f"{theirs}/length/length"
    metric = read_metric(out, "length")
    assert np.array_equal(metric.values, TokenFile(f"{stem}_sample_to_metric").tokens)
    assert np.array_equal(metric.distinct, TokenFile(f"{stem}_index_to_metric").tokens)
    assert np.array_equal(np.diff(metric.starts), TokenFile(f"{stem}_index_to_sample").lengths)
    assert np.array_equal(read_total(out, "counts"), TokenFile(f"{theirs}/counts/counts_metric_value").tokens)


def compare(folder: Path, samples: int, rounds: int, progress: Callable[[str], None]) -> report.Rows:
    """Return the table of both, in turns."""
    file = make_corpus(folder / "small", samples)
    cases = {
        "a file of tokens": (ours, 0),
        "a tensor for each sample": (of_tensors, 0),
        "the same, two processes": (of_tensors, 2),
    }
    rows = []
    for name, (work, workers) in cases.items():
        times: dict[str, list[float]] = {"fds": [], "DeepSpeed": []}
        peaks: dict[str, list[float]] = {"fds": [], "DeepSpeed": []}
        for turn in range(rounds):
            contenders = [("fds", work), ("DeepSpeed", deepspeeds)]
            for who, function in contenders[:: 1 - 2 * (turn % 2)]:
                shutil.rmtree(folder / who, ignore_errors=True)
                seconds, peak = measure(function, file, str(folder / who), workers)
                times[who].append(seconds)
                peaks[who].append(peak)
                progress(f"{name}, turn {turn}: {who} {seconds:.2f} s, {peak:.0f} MB")
            check(str(folder / "fds"), str(folder / "DeepSpeed"))
        series = Series(tuple(times["fds"]), tuple(times["DeepSpeed"]))
        low, high = series.interval()
        verdict = "yes" if series.ratio <= AT_MOST else "NO"
        seconds = [f"{np.median(times[who]):.2f}" for who in times]
        most = [f"{max(peaks[who]):.0f}" for who in peaks]
        rows.append([name, *seconds, f"{series.ratio:.3f} [{low:.3f}, {high:.3f}]", *most, f"≤ {AT_MOST}: {verdict}"])
    header = ["contender", "fds, s", "DeepSpeed, s", "ratio", "fds, MB", "DeepSpeed, MB", "claim"]
    return f"{samples:,} samples: length and counts of tokens", header, rows


def alone(folder: Path, samples: int, progress: Callable[[str], None]) -> report.Rows:
    """Return the table of fds on a corpus of many samples."""
    file = make_corpus(folder / "large", samples)
    rows = []
    for name, work, workers in (
        ("length, counts", ours, 0),
        ("length, rarity, counts", all_metrics, 0),
        ("the same, two processes", all_metrics, 2),
    ):
        shutil.rmtree(folder / "out", ignore_errors=True)
        seconds, peak = measure(work, file, str(folder / "out"), workers)
        progress(f"{name}: {seconds:.1f} s, {peak:.0f} MB")
        size = sum(path.stat().st_size for path in (folder / "out").glob("*.npy"))
        rows.append([name, f"{seconds:.1f}", f"{samples / seconds:,.0f}", f"{peak:.0f}", f"{size / 1e6:,.0f}"])
    title = f"{samples:,} samples, {len(file.tokens):,} tokens of uint16, fds alone"
    return title, ["contender", "s", "samples/s", "peak, MB", "files, MB"], rows


def main() -> int:
    """Run from the command line; the exit code says whether the claim is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000, help="of both (%(default)s)")
    parser.add_argument("--alone", type=int, default=10_000_000, help="of fds alone (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (%(default)s)")
    parser.add_argument("--only", choices=["fds"], help="without DeepSpeed")
    parser.add_argument("--quick", action="store_true", help="a tiny file, nothing written")
    parser.add_argument("--dir", help="where the files lie (a temporary folder)")
    parser.add_argument("--out", default=report.RESULTS, help="where the table goes (%(default)s)")
    options = parser.parse_args()
    samples, many, rounds = (2000, 5000, 2) if options.quick else (options.samples, options.alone, options.rounds)
    console = Console()
    progress: Any = lambda text: console.print(f"[dim]{text}[/]", highlight=False)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        tables = []
        if options.only is None:
            import deepspeed.utils

            deepspeed.utils.logger.setLevel(logging.ERROR)
            tables = [compare(Path(folder), samples, rounds, progress)]
        tables.append(alone(Path(folder), many, progress))
    report.show_tables(tables, console)
    if options.quick or options.only:
        return 0
    facts = {
        "what": "the samples of a file of tokens measured and sorted; both find the same",
        "corpus": f"1 to {MOST} tokens a sample, {VOCABULARY:,} words, uint16, in the page cache",
        "beside": "DeepSpeed 0.19.6's DataAnalyzer, batches of 1,024; its threads, which are processes, as our workers",
        "rounds": f"{rounds}, in turned order, each in a forked process; medians; interval: 95%, of the median ratio",
        "peak": "of the process's memory that is no file's, above where it began; workers' not included",
    }
    console.print(f"written: {report.write_tables(tables, 'analysing', facts, folder=Path(options.out))}")
    return 0 if all("NO" not in row[-1] for row in tables[0][2]) else 1


if __name__ == "__main__":
    sys.exit(main())
