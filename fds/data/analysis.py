"""`analyse`: measure every sample of a data set, over processes and ranks, and keep the results as files.

The samples are cut into chunks, by their number alone. A chunk that is done is a file, durable, in a hidden folder of
the directory; a run that is started again after a SIGKILL goes on with the others. In the end the first rank puts the
chunks together, in their order, so that no number of workers or ranks, and no interruption, changes a bit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from fds import __version__, random, tree
from fds.collectives import Axis, alone
from fds.data.metric_files import (
    ASIDE,
    aside_in,
    check_name,
    open_analysis,
    publish,
    read_metric,
    read_total,
    write_metric,
    write_total,
)
from fds.data.metrics import Metric, PerSample, Samples, add, named
from fds.data.orders import check_count
from fds.data.tokens import TokenDocuments, TokenFile, TokenWindows
from fds.display.progress import Interrupt
from fds.display.screens import View, screen_for
from fds.errors import DataError, FdsError
from fds.storage.disk.files import check_path
from fds.storage.ranks.exchange import Ranks

BLOCK = 1 << 10  # samples that are read at once, at most
CHUNKS, LEAST, MOST = 256, 1 << 12, 1 << 18  # of chunks: how many there are to be, and their samples
LOOKED_AT = 64  # samples by which a data set is known again


def analyse(
    dataset: Any,
    metrics: Mapping[str, Metric | Callable[[Any], Any]],
    out: str | os.PathLike[str],
    *,
    workers: int = 0,
    axis: Axis | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Measure every sample of a data set, and return the metrics by name, mapped into memory.

    They are as `read_metric` returns those of samples, and `read_total` those over all samples.

    What is done is kept: called again after a SIGKILL or Ctrl-C it goes on, and metrics that the directory has already
    are not measured again. The results are the same bits for any number of workers and ranks. Random numbers that a
    data set draws follow from the sample's chunk.

    Args:
        dataset: has `len` and `[i]`; of a `TokenFile`, its windows and documents the built-in metrics read the tokens
            where they lie.
        metrics: by name, `SequenceLength`, `VocabularyRarity`, `TokenCounts`, `PerSample`, `Accumulated`, or a function
            of a sample that returns a number.
        out: a directory, which all ranks see, of this data set alone. `fds.data.read_metric` reads it.
        workers: processes of each rank that measure; 0 is this one.
        axis: the ranks that share the work, all of which call this; None is one rank.
        show: whether the first rank shows how far it is, on standard error.

    A data set is known again by its length and 64 of its samples, a function by its name: change the directory with
    what they compute. Raises `DataError` that names metric and sample where one of them raises, or gives what is no
    finite number; for another data set's directory; `StorageError` where another analysis is writing there, for errors
    of the file system, and on several ranks for all of these, with the rank.

    >>> import tempfile
    >>> from fds.data import SequenceLength
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     length = analyse([[5, 6], [7], [8, 9]], {"length": SequenceLength()}, folder, show=False)["length"]
    >>> length.values.tolist(), length.order.tolist(), length.distinct.tolist(), length.starts.tolist()
    ([2, 1, 2], [1, 0, 2], [1, 2], [0, 1, 3])
    """
    if not (axis is None or isinstance(axis, Axis)):
        raise DataError("not an axis", where="axis", got=repr(axis)[:80], want="an axis of a mesh, or None")
    with alone() if axis is None else contextlib.nullcontext():
        if axis is not None:
            axis.check_current()
        ranks = Ranks(
            axis if axis is not None and axis.size > 1 else None, "analysis", 0 if axis is None else axis.index
        )
        with contextlib.ExitStack() as directory:
            return _Analysis.of(dataset, metrics, out, workers, ranks, show).run(directory)


@attrs.frozen(eq=False)
class _Chunks:
    """What is measured of each chunk: a mapping from its number to arrays by metric, or the error."""

    dataset: Any
    length: int  # of the data set
    metrics: dict[str, Metric]
    totals: dict[str, np.ndarray]  # what metrics need, by their names

    @property
    def size(self) -> int:
        """Number of samples of a chunk."""
        return min(max(-(-self.length // CHUNKS), LEAST), MOST)

    @property
    def block(self) -> int:
        """Number of samples that are read at once: those of files are views, and windows a copy of 2^22 tokens."""
        if isinstance(self.dataset, TokenWindows):
            return min(BLOCK, max(1, (1 << 22) // self.dataset.length))
        return BLOCK if isinstance(self.dataset, TokenFile | TokenDocuments) else BLOCK // 4

    def __len__(self) -> int:
        return -(-self.length // self.size)

    def __getitem__(self, number: int) -> dict[str, np.ndarray] | FdsError:
        devices = random.in_use() if get_worker_info() is None else []  # a forked worker cannot use a GPU
        key = random.key(0)
        with random.scope(devices), random.python_seeded(random.fold_in(key, "chunk", number)):
            random.reseed(random.seed(key, "chunk", number), devices)
            try:
                return self._measure(number * self.size, min((number + 1) * self.size, self.length))
            except FdsError as error:  # a worker's would lose its fields
                return error

    def _measure(self, begin: int, end: int) -> dict[str, np.ndarray]:
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self.metrics}
        for first in range(begin, end, self.block):
            samples = Samples(self.dataset, first, min(first + self.block, end))
            for name, metric in self.metrics.items():
                with naming(name):
                    value = metric.measure(samples, self.totals.get(name))
                    parts[name].append(value)
                    if metric.accumulates and len(parts[name]) > 1:
                        parts[name] = [add(*parts[name], where=samples.where(0))]
        return {name: p[0] if self.metrics[name].accumulates else _joined(name, p, begin) for name, p in parts.items()}


def _joined(name: str, parts: list[np.ndarray], begin: int) -> np.ndarray:
    """Return numbers of samples, one after another. Raises `DataError` for integers that floats beside them round."""
    whole = np.concatenate(parts)
    for part in parts if whole.dtype.kind == "f" else ():
        if part.dtype.kind == "i" and max(int(part.max()), -int(part.min())) > 2**53:
            where, got = f"metric {name!r}, samples from {begin} on", f"{part.max()} beside floats"
            want = "ints up to 2**53 beside floats"
            raise DataError("a number that float64 does not have", where=where, got=got, want=want)
    return whole


@contextlib.contextmanager
def naming(metric: str) -> Iterator[None]:
    """Say in an error of the block which metric it is about."""
    try:
        yield
    except FdsError as error:
        where = f"metric {metric!r}, {error.where}"
        raise DataError(error.what, where=where, got=error.got, want=error.want, hint=error.hint) from error


@attrs.frozen(eq=False)
class _Analysis:
    """One call of `analyse`."""

    dataset: Any
    metrics: dict[str, Metric]
    folder: Path
    workers: int
    ranks: Ranks
    show: bool
    about: dict[str, Any]  # the data set

    @classmethod
    def of(cls, dataset: Any, metrics: Any, out: Any, workers: Any, ranks: Ranks, show: bool) -> _Analysis:
        with ranks.together() as exchange:
            folder = check_path(out, "out").absolute()
            check_count("workers", workers, 0)
            analysis = cls(dataset, _checked(metrics), folder, workers, ranks, show, _about(dataset))
            exchange.mine = {"data set": str(analysis.about), "metrics": str(analysis.metrics)}
        ranks.check_equal(exchange.all)
        return analysis

    def run(self, directory: contextlib.ExitStack) -> dict[str, Any]:
        manifest: dict[str, Any] = {}
        with self.ranks.together() as exchange:
            if self.leads:
                manifest = directory.enter_context(open_analysis(self.folder, self.about))
                exchange.mine = self._missing(manifest)
        missing = {name: self.metrics[name] for name in exchange.all[0]}
        if missing:
            self._measure_all(missing, manifest)
        if self.leads:  # also of a run that was killed when all was published
            shutil.rmtree(self.folder / ASIDE, ignore_errors=True)
        read = lambda name: (read_total if self.metrics[name].accumulates else read_metric)(self.folder, name)
        return {name: read(name) for name in self.metrics}

    @property
    def leads(self) -> bool:
        return self.ranks.index == 0

    def _missing(self, manifest: dict[str, Any]) -> list[str]:
        for name, metric in self.metrics.items():
            there = manifest["metrics"].get(name, {"metric": repr(metric)}).get("metric")
            if there != repr(metric):
                where, hint = f"{self.folder}, {name!r}", "another name or another directory"
                raise DataError(
                    "another metric has this name here", where=where, got=repr(metric), want=str(there), hint=hint
                )
        return [name for name in self.metrics if name not in manifest["metrics"]]

    def _measure_all(self, missing: dict[str, Metric], manifest: dict[str, Any]) -> None:
        needs = {name: metric.needs for name, metric in missing.items() if metric.needs is not None}
        of = {name: next(f"for {it}" for it in needs if needs[it] == metric) for name, metric in needs.items()}
        counted = {of[name]: metric for name, metric in needs.items()}  # equal ones once; alike are also other lambdas
        first = {**{name: metric for name, metric in missing.items() if name not in needs}, **counted}
        passes = [_Chunks(self.dataset, self.about["length"], first, {})]
        results = [self._measure(passes[0], f"pass 1 of {1 + bool(needs)}")]
        if needs:
            with self.ranks.together():
                totals = {need: _total(results[0], need) for need in counted}
            theirs = {name: totals[of[name]] for name in needs}
            passes.append(attrs.evolve(passes[0], metrics={name: missing[name] for name in needs}, totals=theirs))
            results.append(self._measure(passes[1], "pass 2 of 2"))
        with self.ranks.together():
            if self.leads:
                self._put_together({name: results[name in needs] for name in missing}, manifest)

    def _measure(self, chunks: _Chunks, title: str) -> list[Path]:
        """Measure all chunks that are not there, together, and return the files of all of them."""
        key = [self.about, __version__, chunks.size, {name: repr(metric) for name, metric in chunks.metrics.items()}]
        folder = self.folder / ASIDE / hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()
        files = [folder / f"{number:08}.npz" for number in range(len(chunks))]
        with self.ranks.together() as exchange:
            if self.leads:
                folder.mkdir(parents=True, exist_ok=True)
                exchange.mine = [number for number, path in enumerate(files) if not path.exists()]
        todo, count = exchange.all[0], self.ranks.size
        mine = todo[len(todo) * self.ranks.index // count : len(todo) * (self.ranks.index + 1) // count]
        screen = screen_for(Console(stderr=True)) if self.show and self.leads and sys.stderr is not None else None
        began = shown = time.perf_counter()
        with Interrupt(self.ranks.everyone) as interrupt, contextlib.ExitStack() as closing:
            results = closing.enter_context(contextlib.closing(_measured(chunks, mine, self.workers)))
            if screen is not None:
                closing.callback(screen.close)
            for turn in range(-(-len(todo) // count)):  # ranks stay together: one that fails ends all at once
                with self.ranks.together():
                    if turn < len(mine):
                        _keep(files[mine[turn]], _result(results))
                now, done = time.perf_counter(), min((turn + 1) * count, len(todo))
                if screen is not None and (now - shown > screen.interval or done in (count, len(todo))):
                    shown, rate = now, done * chunks.size / (now - began)
                    left = f"{(len(todo) - done) * chunks.size / rate:,.0f} s"
                    numbers = {"samples/s": f"{rate:,.0f}", "time left": left}
                    screen.show(View(f"{self.folder}: {title}", len(files) - len(todo) + done, len(files), numbers))
                if interrupt.agreed():
                    raise KeyboardInterrupt  # with all that is done
        return files

    def _put_together(self, files: dict[str, list[Path]], manifest: dict[str, Any]) -> None:
        records = {}
        with aside_in(self.folder) as aside:
            for name, paths in files.items():
                if self.metrics[name].accumulates:
                    record = write_total(aside, name, _total(paths, name))
                else:
                    blocks = functools.partial(_loaded, paths, name)
                    record = write_metric(aside, name, blocks, self.about["length"])
                records[name] = {**record, "metric": repr(self.metrics[name])}
            publish(self.folder, aside, manifest, records)


def _checked(metrics: Any) -> dict[str, Metric]:
    if not isinstance(metrics, Mapping) or not metrics:
        want = '{"length": fds.data.SequenceLength(), ...}'
        raise DataError("no metrics by name", where="metrics", got=repr(metrics)[:80], want=want)
    checked = {}
    for name, metric in metrics.items():
        check_name(name)
        is_class = isinstance(metric, type) and hasattr(metric, "measure")
        if is_class or not (hasattr(metric, "measure") or callable(metric)):
            hint = f"{metric.__name__}(...)" if is_class else ""
            want = "a metric, or a function of a sample"
            raise DataError("not a metric", where=f"metrics, {name!r}", got=repr(metric)[:80], want=want, hint=hint)
        checked[name] = metric if hasattr(metric, "measure") else PerSample(metric)
    return checked


def _about(dataset: Any) -> dict[str, Any]:
    """Return what a data set is: its length, its class, and a digest of some of its samples."""
    try:
        length = len(dataset)
        dataset.__getitem__  # noqa: B018
    except (TypeError, NotImplementedError, AttributeError):
        want = "a data set with len(dataset) and dataset[i]"
        raise DataError("the data set has no random access", got=type(dataset).__name__, want=want) from None
    if not length or isinstance(dataset, Mapping):
        got = "no samples" if not length else type(dataset).__name__
        raise DataError("the data set has no samples under the numbers from 0", got=got, want="samples")
    digest = hashlib.blake2b(digest_size=16)
    with random.seeded(random.key(0)), random.python_seeded(random.key(0)):
        for i in sorted({k * (length - 1) // (LOOKED_AT - 1) for k in range(LOOKED_AT)}):
            for leaf in tree.leaves(Samples(dataset, i, i + 1).each(None)):
                digest.update(_content(leaf))
    return {"length": length, "data": named(type(dataset)), "digest": digest.hexdigest()}


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
        leaf = leaf.detach().cpu().float().numpy() if leaf.is_floating_point() else leaf.detach().cpu().numpy()
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes()
    return repr(leaf).encode() if isinstance(leaf, int | float | str | bytes | None) else type(leaf).__name__.encode()


def _measured(chunks: _Chunks, numbers: list[int], workers: int) -> Generator[dict[str, np.ndarray] | FdsError]:
    """Yield the results of chunks. Closed, it ends its workers at once, where an error would keep them."""
    yield from DataLoader(
        chunks,  # type: ignore[arg-type]  # a mapping from numbers
        batch_size=None,
        sampler=numbers,
        collate_fn=_itself,
        num_workers=min(workers, len(numbers)),
        worker_init_fn=functools.partial(_end_after, os.getpid()),
    )


def _end_after(parent: int, worker: int) -> None:
    """End this worker soon after its parent: torch's waits for ever where nobody reads what it has measured."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _itself(result: Any) -> Any:
    return result


def _result(results: Iterator[Any]) -> dict[str, np.ndarray]:
    """Return the next chunk that was measured. Raises its error, and `DataError` where a worker process ended."""
    result, ended = None, ""
    try:
        result = next(results)
    except RuntimeError as error:
        ended = str(error)[:300]  # the error itself would keep the other workers
    if result is None:
        hint = "out of memory? fewer workers=; or workers=0, which shows what ends it"
        raise DataError("a worker process ended", where="workers", got=ended, hint=hint)
    if isinstance(result, FdsError):
        raise result
    return result


def _keep(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the file of a chunk, at once: what has its name is whole. Raises `OSError`."""
    aside = path.with_suffix(".writing")
    with open(aside, "wb") as file:
        named_arrays: dict[str, Any] = {f"of {name}": array for name, array in arrays.items()}
        np.savez(file, **named_arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _loaded(paths: list[Path], name: str) -> Iterator[np.ndarray]:
    return (_load(path, name) for path in paths)


def _total(paths: list[Path], name: str) -> np.ndarray:
    """Return the sum of a metric over all chunks. Raises `DataError` for chunks that cannot be summed."""
    total = _load(paths[0], name)
    for path in paths[1:]:
        with naming(name):
            total = add(total, _load(path, name), f"chunk {path.stem}")
    return total


def _load(path: Path, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays[f"of {name}"]
    except FileNotFoundError:
        hint = "out= names a directory that all ranks see, and that nobody clears meanwhile"
        raise DataError("a chunk that was measured is not there", where=str(path), hint=hint) from None
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise DataError("a chunk that was measured is damaged", where=str(path), hint="remove it, and go on") from error
