"""Batches of easy samples first: `CurriculumSampler`, by metrics of each sample and schedules of difficulty."""

from __future__ import annotations

import bisect
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from fds import random
from fds.data.metric_files import SampleMetric
from fds.data.orders import check_count, key_words, permutation, permute_each
from fds.errors import DataError, checked_call, did_you_mean, expanded

DIFFICULTIES, CLUSTERINGS = ("value", "percentile"), ("schedule_based", "single_cluster")
_BLOCK = 2**16  # rows whose clusters are drawn together, in 4 ms


@attrs.frozen(eq=False)
class SortedSamples:
    """A metric: the numbers of all samples, from the easiest on, and the metric of the sample at a position there."""

    order: np.ndarray  # (N,) integers
    value_at: Callable[[int], Any]

    def count(self, bound: float) -> int:
        """Return how many samples have a metric of at most `bound`; reads log N of them."""
        return bisect.bisect_right(range(len(self.order)), bound, key=self.value_at)


class CurriculumSampler:
    """Draws batches from the samples that are easy enough by now: a `BatchOrder` of a `DistributedLoader`.

    Batch i is drawn from the samples that all metrics let in at the difficulties f(i + 1) of their schedules, or let in
    before. Those that came in together are a cluster. Each row of a batch is of a cluster drawn in proportion to their
    sizes, and is the next sample of that cluster, which has another order each time it was used up.

    Any rank computes any batch from the key, the number of the batch and its size: the position is `state.calls`, and
    the order is the same on any number of ranks. To begin at batch t costs a question to each schedule for every batch
    before (0.5 us), and a draw for every 2^16 rows before (0.03 ms).

    The samples in the order of one metric stay on disk, where they are read a batch at a time. With several metrics the
    samples that all let in are written to a file of 9 bytes a sample, which has no name.

    Args:
        metrics: for each name a metric of all samples, in their order: an array `(N,)` of integers or floats, which is
            sorted here, in memory; the path of a `.npy` file of one; or a `SampleMetric`. Or the directory that
            `fds.data.analyse` wrote, where nothing is sorted any more.
        schedules: for each name of a metric a function of the step, 1 for the first batch, that returns a difficulty:
            those of `fds.schedules`, or any other.
        key: an int or a key of `fds.random.key`, the same on every rank.
        difficulty: of all metrics, or by name. "value" lets in samples whose metric is at most the difficulty,
            "percentile" as many hundredths of all samples, the easiest.
        clustering: of all metrics, or by name. "schedule_based" is as above. "single_cluster" lets in everything: the
            program asks for `difficulties(state.calls)` and makes rows easier itself.
        folder: directory for the file of several metrics; None is that of temporary files.

    Raises `DataError`.

    Source: Li et al. 2022, arXiv:2212.03597, section 3.1; in distribution that of DeepSpeed 0.19.6's sampler.

    >>> lengths = [5, 1, 4, 2, 3, 6]
    >>> sampler = CurriculumSampler({"length": lengths}, {"length": lambda step: 2 * step})
    >>> [sorted({lengths[i] for i in sampler.rows(batch, 100)}) for batch in range(3)]
    [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    """

    @checked_call
    def __init__(
        self,
        metrics: Mapping[str, Any] | str | os.PathLike[str],
        schedules: Mapping[str, Callable[[int], Any]],
        *,
        key: int | Tensor = 0,
        difficulty: str | Mapping[str, str] = "value",
        clustering: str | Mapping[str, str] = "schedule_based",
        folder: str | os.PathLike[str] | None = None,
    ):
        self.schedules = _checked_schedules(schedules)
        if isinstance(metrics, str | os.PathLike):
            metrics = {name: os.path.join(metrics, f"{name}.values.npy") for name in schedules}
        if not isinstance(metrics, Mapping) or metrics.keys() != schedules.keys():
            got = ", ".join(map(str, metrics)) if isinstance(metrics, Mapping) else repr(metrics)[:60]
            want = f"those of the schedules: {', '.join(schedules)}"
            raise DataError("each schedule is of a metric", where="metrics", got=got or "none", want=want)
        self.key = random.key(key)
        self.difficulty = _by_name("difficulty", difficulty, schedules, DIFFICULTIES)
        self.clustering = _by_name("clustering", clustering, schedules, CLUSTERINGS)
        self.folder = None if folder is None else expanded(folder)
        self.metrics = dict(metrics)
        self._restart()
        self._advance(0)

    def __repr__(self) -> str:
        return f"CurriculumSampler({', '.join(self.schedules)}: {self.num_samples} samples)"

    def __getstate__(self) -> dict[str, Any]:  # files are mapped again, where a worker process reads them
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._restart()

    def num_batches(self, size: int) -> int:
        """Return the number of batches of `size` rows after which as many rows were drawn as there are samples."""
        check_count("size", size, 1)
        return max(self.num_samples // size, 1)

    def difficulties(self, batch: int | Tensor) -> dict[str, Any]:
        """Return the difficulty of each metric in a batch, by its schedule. Raises `DataError` for what is none."""
        return {name: _difficulty(name, schedule, int(batch) + 1) for name, schedule in self.schedules.items()}

    def rows(self, batch: int, size: int) -> np.ndarray:
        """Return the samples of a batch, `(size,) int64`. Raises `DataError` for no counts, and for damaged files."""
        check_count("batch", batch, 0)
        check_count("size", size, 1)
        if self._pid != os.getpid() and self._arrivals is not None:  # a fork writes its own file
            self._restart()
        self._advance(batch)
        stretch = bisect.bisect_right(self._begins, batch) - 1
        block, place = divmod(batch - self._begins[stretch], _batches_of_block(size))
        clusters, numbers = self._block(stretch, block, size)
        cluster, number = clusters[place * size :][:size], numbers[place * size :][:size]
        sizes = np.array(self._sizes)[cluster]
        rounds, at = np.divmod(number, sizes)
        words = key_words(random.fold_in(self.key, "clusters"), cluster, rounds)
        position = np.array(self._firsts)[cluster] + permute_each(words, sizes, at)
        samples = position if self._samples is None else self._samples[position].astype(np.int64)
        if samples.min() < 0 or samples.max() >= self.num_samples:
            got, want = f"sample {samples.min()} or {samples.max()}", f"0 to {self.num_samples - 1}"
            raise DataError("the order is damaged", where=", ".join(self._sorted), got=got, want=want)
        return samples

    def _restart(self) -> None:
        """Forget what was computed of the past: all of it follows from the arguments."""
        self._pid = os.getpid()
        self._sorted = {
            name: _sorted(name, x, self.clustering[name] == "schedule_based") for name, x in self.metrics.items()
        }
        self.num_samples = _same_length(self._sorted)
        clustered = {name: x for name, x in self._sorted.items() if self.clustering[name] == "schedule_based"}
        self._sorted = clustered
        self._arrivals = _Arrivals.of(self.num_samples, self.folder) if len(clustered) > 1 else None
        # numbers of samples, those of a cluster one after another; None where they are all, in their order
        single = next(iter(clustered.values())).order if len(clustered) == 1 else None
        self._samples = single if self._arrivals is None else self._arrivals.samples
        self._next = 0  # the first batch of which the schedules were not asked
        self._levels: dict[str, tuple[Any, int]] = dict.fromkeys(clustered, (None, 0))  # difficulty, samples let in
        self._begins: list[int] = []  # the batch at which each cluster begins to be drawn from
        self._firsts: list[int] = []  # where each cluster begins in `_samples`
        self._sizes: list[int] = []
        self._before: dict[int, list[np.ndarray]] = {}  # by size of batches: draws from the clusters before each begins
        self._running: tuple[Any, int, np.ndarray] | None = None  # a stretch and size, a block, the draws before it
        self._last_block: tuple[Any, Any] = (None, None)

    def _advance(self, batch: int) -> None:
        """Ask the schedules of all batches up to this one, and note the clusters that they begin."""
        for step in range(self._next + 1, batch + 2):
            new = {}
            asked = {
                name: _difficulty(name, self.schedules[name], step) for name in self._levels
            }  # all, or none counts
            for name, difficulty in asked.items():
                level, count = self._levels[name]
                if difficulty != level:
                    now = max(count, self._let_in(name, difficulty))
                    self._levels[name] = difficulty, now
                    if now > count:
                        new[name] = self._sorted[name].order[count:now]
            if new or step == 1:
                self._add_cluster(step - 1, new)
            self._next = step

    def _let_in(self, name: str, difficulty: Any) -> int:
        if self.difficulty[name] == "value":
            return self._sorted[name].count(difficulty)
        share = (
            Fraction(difficulty if isinstance(difficulty, int | Fraction) else min(max(float(difficulty), 0), 100))
            / 100
        )
        return math.floor(self.num_samples * min(max(share, 0), 1))

    def _add_cluster(self, batch: int, new: Mapping[str, np.ndarray]) -> None:
        first = self._firsts[-1] + self._sizes[-1] if self._sizes else 0
        if self._arrivals is not None:
            size = self._arrivals.add(first, new, len(self._sorted))
        else:
            size = len(next(iter(new.values()), ())) if self._sorted else self.num_samples
        if size:
            self._begins.append(batch)
            self._firsts.append(first)
            self._sizes.append(size)
        elif batch == 0:
            got = ", ".join(f"{name} {level}" for name, (level, _) in self._levels.items())
            least = ", ".join(f"{name} {x.value_at(0)}" for name, x in self._sorted.items())
            raise DataError(
                "no sample is as easy as the first batch asks for",
                where="schedules",
                got=f"at step 1: {got}",
                want=f"at least the easiest sample: {least}" + ", and in one and the same" * (len(self._sorted) > 1),
            )

    def _block(self, stretch: int, block: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cluster of each row of some batches, and how many rows of that cluster were drawn before it.

        A stretch is the batches from where a cluster begins to where the next one does. Rows are independent draws. So
        those of a block may be drawn as totals first, and then put in any order: blocks are reached without the rows of
        those before them.
        """
        of = stretch, block, size
        if self._last_block[0] != of:
            before, totals = self._draws_before(stretch, block, size)
            clusters = self._clusters(stretch, block, totals)
            by_cluster = np.argsort(clusters, kind="stable")
            numbers = np.empty(len(clusters), np.int64)
            firsts = np.cumsum(totals) - totals
            numbers[by_cluster] = np.arange(len(clusters)) + np.repeat(before - firsts, totals)
            self._last_block = of, (clusters, numbers)
        return self._last_block[1]

    def _clusters(self, stretch: int, block: int, totals: np.ndarray) -> np.ndarray:
        order = permutation(random.fold_in(self.key, "rows", stretch, block), int(totals.sum()))
        return np.repeat(np.arange(len(totals), dtype=np.min_scalar_type(len(totals))), totals)[order]

    def _draws_before(self, stretch: int, block: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how many rows of each cluster were drawn before a block, and how many are in it, `(clusters,)`."""
        weights = np.array(self._sizes[: stretch + 1])
        rows = _batches_of_block(size) * size

        def totals(block: int) -> np.ndarray:
            key = random.fold_in(self.key, "totals", stretch, block)
            # NumPy keeps the stream of RandomState for ever (NEP 19), of Generator not
            source = np.random.RandomState(np.random.Philox(key=key.numpy().view(np.uint64)))
            return source.multinomial(rows, weights / weights.sum())

        start, before = 0, None
        if self._running is not None and self._running[0] == (stretch, size) and self._running[1] <= block:
            _, start, before = self._running
        before = self._draws_before_stretch(stretch, size) if before is None else before
        for past in range(start, block):
            before = before + totals(past)
        self._running = (stretch, size), block, before
        return before, totals(block)

    def _draws_before_stretch(self, stretch: int, size: int) -> np.ndarray:
        before_each = self._before.setdefault(size, [np.zeros(1, np.int64)])
        while len(before_each) <= stretch:
            number = len(before_each)
            batches = self._begins[number] - self._begins[number - 1]
            block, rest = divmod(batches, _batches_of_block(size))
            before, totals = self._draws_before(number - 1, block, size)
            clusters = self._clusters(number - 1, block, totals)[: rest * size]
            before_each.append(np.append(before + np.bincount(clusters, minlength=number), 0))
        return before_each[stretch]


@attrs.frozen(eq=False)
class _Arrivals:
    """The samples that all of several metrics have let in, in the order in which they came, in an unnamed file."""

    samples: np.ndarray  # (N,) int64
    metrics: np.ndarray  # (N,) uint8: how many metrics let in each sample

    @staticmethod
    def of(length: int, folder: str | None) -> _Arrivals:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, 9 * length)  # or a full disk would end the process later
                samples = np.memmap(file, np.int64, "r+", 0, (length,))
                return _Arrivals(samples, np.memmap(file, np.uint8, "r+", 8 * length, (length,)))
        except OSError as error:
            got, want = str(error), f"a directory with {9 * length:,} bytes free"
            raise DataError("no room for the samples of several metrics", where="folder", got=got, want=want) from error

    def add(self, first: int, new: Mapping[str, np.ndarray], number: int) -> int:
        """Count that each metric lets in some more, and write those that all `number` of them do. Return how many."""
        complete = []
        for samples in new.values():
            self.metrics[samples] += 1
            complete.append(samples[self.metrics[samples] == number])
        cluster = np.sort(np.concatenate(complete)) if complete else np.empty(0, np.int64)
        self.samples[first : first + len(cluster)] = cluster
        return len(cluster)


def _batches_of_block(size: int) -> int:
    return max(_BLOCK // size, 1)


def _difficulty(name: str, schedule: Callable[[int], Any], step: int) -> Any:
    value = schedule(step)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        if not math.isnan(value):
            return value
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    where = f"schedules[{name!r}]"
    raise DataError("not a difficulty", where=where, got=f"{value!r:.60} at step {step}", want="a number")


def _checked_schedules(schedules: Any) -> dict[str, Callable[[int], Any]]:
    if isinstance(schedules, Mapping) and schedules and all(callable(x) for x in schedules.values()):
        return dict(schedules)
    want = '{"seqlen": fds.schedules.fixed_linear(...)}, a function of the step for each metric'
    raise DataError("no schedules of difficulty", where="schedules", got=repr(schedules)[:80], want=want)


def _by_name(argument: str, value: Any, names: Mapping[str, Any], words: tuple[str, ...]) -> dict[str, str]:
    chosen = dict.fromkeys(names, value) if isinstance(value, str) else value
    if not isinstance(chosen, Mapping) or chosen.keys() != names.keys():
        want = f"a word for all, or a dict with {', '.join(names)}"
        raise DataError(f"{argument} is by metric", where=argument, got=repr(value)[:80], want=want)
    for word in chosen.values():
        if word not in words:
            want, hint = " or ".join(map(repr, words)), did_you_mean(str(word), words)
            raise DataError(f"unknown {argument}", where=argument, got=repr(word), want=want, hint=hint)
    return dict(chosen)


def _sorted(name: str, metric: Any, needed: bool) -> SortedSamples:
    """Return a metric with its order, but where that is not needed."""
    if isinstance(metric, SortedSamples):
        return metric
    where, order = f"metrics[{name!r}]", None
    if isinstance(metric, SampleMetric):
        metric, order = metric.values, metric.order
    if isinstance(metric, str | os.PathLike):
        path = expanded(metric)
        metric = _mapped(path, where)
        beside = path.removesuffix(".values.npy") + ".order.npy"
        order = _mapped(beside, where) if path.endswith(".values.npy") and os.path.exists(beside) else None
    try:
        values = metric.numpy(force=True) if isinstance(metric, torch.Tensor) else np.asanyarray(metric)
    except (ValueError, TypeError):
        values = np.empty(())
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iuf":
        got = f"{values.dtype} {values.shape}"
        raise DataError("not a metric of samples", where=where, got=got, want="a number for each sample, (N,)")
    if not needed:
        return SortedSamples(np.broadcast_to(np.uint8(0), len(values)), lambda position: values[position])
    order = np.argsort(values, kind="stable") if order is None else order
    if order.shape != values.shape or order.dtype.kind not in "iu":
        got, want = f"{order.dtype} {order.shape}", f"integers {values.shape}"
        raise DataError("the order is not of these samples", where=where, got=got, want=want)

    def value_at(position: int) -> Any:
        sample = int(order[position])
        if not 0 <= sample < len(values):
            raise DataError("the order is damaged", where=where, got=f"sample {sample}", want=f"0 to {len(values) - 1}")
        return values[sample]

    if values.dtype.kind == "f" and np.isnan(value_at(-1)):  # NaN is sorted last
        raise DataError("a sample's metric is NaN", where=where, got=f"sample {order[-1]}", want="numbers")
    return SortedSamples(order, value_at)


def _mapped(path: str, where: str) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        got = f"{path}: {error}"[:200]
        hint = "fds.data.analyse writes them"
        raise DataError("not a file of a metric", where=where, got=got, want="a .npy file", hint=hint) from error


def _same_length(metrics: Mapping[str, SortedSamples]) -> int:
    lengths = {name: len(metric.order) for name, metric in metrics.items()}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError(
            "the metrics are of different numbers of samples", where="metrics", got=got, want="one data set"
        )
    return next(iter(lengths.values()))
