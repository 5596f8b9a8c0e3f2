"""The files of metrics: a number for each sample, and the samples in the order of their numbers, mapped into memory.

    analysis.json        what was analysed: `format`, `fds`, `length`, `data`, `digest`, and of each metric its record
    NAME.values.npy      (N,) the number of each sample, in the smallest integer dtype that holds them, or float64
    NAME.order.npy       (N,) the numbers of the samples, sorted by value and then by number, uint32 or int64
    NAME.distinct.npy    (K,) the values that there are, ascending, in the dtype of the values
    NAME.starts.npy      (K + 1,) int64: samples order[starts[k]:starts[k + 1]] have the value distinct[k]
    NAME.total.npy       of a metric over all samples, in the place of these four: its sum

Sorting takes memory for some `BUCKET` samples, not for all: samples are distributed to buckets between splitters, which
a draw of the values gives, and each bucket is sorted by itself. A value that is a splitter has a bucket of its own,
which needs no sorting, so that a frequent one makes no bucket large.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from fds import __version__
from fds.data.tokens import TokenFile
from fds.errors import DataError, FdsError, nearest
from fds.media.locks import lock_file
from fds.storage.disk.files import check_path, hold_alone, parse_json, read_errors, read_small, sync, write_errors

MANIFEST, FORMAT = "analysis.json", 1
LOCK, ASIDE = ".lock", ".analysing"
PARTS = ("values", "order", "distinct", "starts")
KEYS = {"sample": {"dtype", "distinct", "least", "most"}, "total": {"dtype", "shape"}}  # of a metric's record
BLOCK = 1 << 20  # samples that are read at once
BUCKET = 1 << 20  # samples of a bucket, on average
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")


@attrs.frozen(eq=False)
class SampleMetric:
    """A metric of samples, of N samples and K distinct values, mapped into memory: opened in a time and memory of O(1).

    Attributes:
        name: of the metric.
        values: `(N,)`, the number of each sample.
        order: `(N,)`, the numbers of the samples, sorted by value and then by number.
        distinct: `(K,)`, the values that there are, ascending.
        starts: `(K + 1,) int64`: samples `order[starts[k]:starts[k + 1]]` have the value `distinct[k]`.
    """

    name: str
    values: np.ndarray = attrs.field(repr=lambda x: f"({len(x)},) {x.dtype}")
    order: np.ndarray = attrs.field(repr=False)
    distinct: np.ndarray = attrs.field(repr=lambda x: f"({len(x)},)")
    starts: np.ndarray = attrs.field(repr=False)

    def count_upto(self, value: float) -> int:
        """Return how many samples have at most this value: `order[count_upto(a):count_upto(b)]` are those in (a, b].

        Raises `DataError` for what is no number.
        """
        if isinstance(value, int) and abs(value) >= 1 << 64:  # NumPy compares no larger ones
            value = math.inf if value > 0 else -math.inf
        if not isinstance(value, int | float | np.number) or math.isnan(value):
            raise DataError("not a value", where=f"count_upto, {self.name!r}", got=repr(value)[:80], want="a number")
        if not self.distinct[0] <= value < self.distinct[-1]:
            return 0 if value < self.distinct[0] else len(self.order)
        value = math.floor(value) if self.distinct.dtype.kind in "iu" else value
        return int(self.starts[np.searchsorted(self.distinct, self.distinct.dtype.type(value), "right")])


def read_metric(dir: str | os.PathLike[str], name: str) -> SampleMetric:
    """Return a metric of samples that `analyse` or `import_metric` wrote, mapped into memory.

    Raises `DataError` for a directory without it, and for one over all samples; `StorageError` for unreadable files.
    """
    folder = check_path(dir, "dir")
    record = _record(folder, name)
    if record["kind"] != "sample":
        hint = f"numpy.load({str(folder / name)!r} + '.total.npy')"
        raise DataError("this metric is one array over all samples", where=f"{folder}, {name!r}", hint=hint)
    return SampleMetric(name, *(_mapped(folder / f"{name}.{part}.npy") for part in PARTS))


def read_total(dir: str | os.PathLike[str], name: str) -> np.ndarray:
    """Return the sum of a metric over all samples, mapped into memory.

    Raises `DataError` for a directory without it, and for a metric of samples; `StorageError` for unreadable files.
    """
    folder = check_path(dir, "dir")
    if _record(folder, name)["kind"] != "total":
        raise DataError("this metric has a number for each sample", where=f"{folder}, {name!r}", hint="read_metric")
    return _mapped(folder / f"{name}.total.npy")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what a directory says of its analysis. Raises `DataError` where there is none; `StorageError`."""
    path = folder / MANIFEST
    if not path.exists():
        want = "a directory that fds.data.analyse or import_metric wrote"
        raise DataError("there is no analysis here", where=str(folder), want=want)
    with read_errors("analysis", path):
        content = read_small(path, 1 << 26)
    try:
        manifest = parse_json(content)
        fine = manifest["format"] == FORMAT and isinstance(manifest["length"], int)
        fine = fine and all(KEYS[record["kind"]] <= record.keys() for record in manifest["metrics"].values())
    except (ValueError, TypeError, KeyError, AttributeError):
        fine = False
    if not fine:
        want = f"an analysis of format {FORMAT}"
        raise DataError("not an analysis", where=str(path), got=repr(content[:60])[1:], want=want)
    return manifest


def _record(folder: Path, name: str) -> dict[str, Any]:
    metrics = read_manifest(folder)["metrics"]
    if name not in metrics:
        want, hint = ", ".join(map(repr, metrics)) or "none is here", nearest(str(name), metrics)
        raise DataError("no such metric", where=str(folder), got=repr(name), want=want, hint=hint)
    return metrics[name]


def _mapped(path: Path) -> np.ndarray:
    try:
        with read_errors("metric", path):
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FdsError:
        raise
    except (ValueError, EOFError) as error:
        raise DataError("a file of the analysis is damaged", where=str(path), got=str(error)[:200]) from error


def write_metric(folder: Path, name: str, blocks: Callable[[], Iterator[np.ndarray]], length: int) -> dict[str, Any]:
    """Write the files of a metric of `length` samples into a folder without such files, and return its record.

    `blocks` gives the values of all samples, int64 or float64; it is called twice, to choose the dtype and to write.
    Raises `OSError`, and `DataError` for integers beside floats that float64 does not have.
    """
    lows, highs = {"i": [], "f": []}, {"i": [], "f": []}
    for block in blocks():
        lows[block.dtype.kind].append(block.min().item())
        highs[block.dtype.kind].append(block.max().item())
    least, most = min(lows["i"] + lows["f"]), max(highs["i"] + highs["f"])
    if not lows["f"]:
        dtype = next(it for it in INTEGERS if np.iinfo(it).min <= least and most <= np.iinfo(it).max)
    elif max(map(abs, lows["i"] + highs["i"]), default=0) > 2**53:
        got, want = f"ints up to {max(highs['i'])} beside floats", "ints up to 2**53 beside floats"
        raise DataError("numbers that float64 does not have", where=f"metric {name!r}", got=got, want=want)
    else:
        dtype = "float64"
    with NpyFile(folder / f"{name}.values.npy", dtype, length) as file:
        for block in blocks():
            file.write(block)
    distinct = write_order(folder, name, _mapped(folder / f"{name}.values.npy"))
    return {"kind": "sample", "dtype": dtype, "distinct": distinct, "least": least, "most": most}


def write_total(folder: Path, name: str, total: np.ndarray) -> dict[str, Any]:
    """Write the file of a metric over all samples, and return its record. Raises `OSError`."""
    with open(folder / f"{name}.total.npy", "xb") as file:
        np.save(file, total)
        file.flush()
        os.fsync(file.fileno())
    return {"kind": "total", "dtype": str(total.dtype), "shape": list(total.shape)}


def publish(folder: Path, aside: Path, manifest: dict[str, Any], records: dict[str, dict[str, Any]]) -> None:
    """Move the files of metrics from a folder aside, and then say of them in the manifest. Raises `OSError`."""
    for name, record in records.items():
        for part in PARTS if record["kind"] == "sample" else ["total"]:
            os.replace(aside / f"{name}.{part}.npy", folder / f"{name}.{part}.npy")
    sync(folder)
    content = json.dumps(manifest | {"metrics": manifest["metrics"] | records}, indent=1).encode()
    with open(aside / MANIFEST, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside / MANIFEST, folder / MANIFEST)
    sync(folder)


class NpyFile:
    """A file of a one-dimensional array that is written piece by piece.

    Args:
        path: the file, which must not exist.
        dtype: of the array.
        length: the most elements that it may have; the header says in the end how many were written.
    """

    def __init__(self, path: Path, dtype: Any, length: int):
        self.file = open(path, "xb")  # noqa: SIM115  (closed by `__exit__`)
        self.dtype, self.length = np.dtype(dtype), 0
        self._header(length)
        self.begin = self.file.tell()

    def _header(self, length: int) -> None:
        about = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(self.file, about)  # it leaves room for another length

    def write(self, array: np.ndarray) -> None:
        """Append elements."""
        array.astype(self.dtype).tofile(self.file)
        self.length += len(array)

    def __enter__(self) -> NpyFile:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with self.file:
            if error is None:
                self.file.seek(0)
                self._header(self.length)
                assert self.file.tell() == self.begin
                self.file.flush()
                os.fsync(self.file.fileno())


def write_order(folder: Path, name: str, values: np.ndarray) -> int:
    """Write order, distinct values and starts of values, and return the number of distinct values. Raises `OSError`."""
    dtype = np.dtype("uint32" if len(values) <= 1 << 32 else "int64")
    with (
        NpyFile(folder / f"{name}.order.npy", dtype, len(values)) as order,
        NpyFile(folder / f"{name}.distinct.npy", values.dtype, len(values)) as distinct,
        NpyFile(folder / f"{name}.starts.npy", "int64", len(values) + 1) as starts,
    ):
        start, last = 0, None
        for samples, theirs in _buckets(folder / f".{name}.buckets", values, dtype):
            changes = np.flatnonzero(theirs[1:] != theirs[:-1]) + 1
            firsts = changes if theirs[0] == last else np.concatenate([[0], changes])
            order.write(samples)
            distinct.write(theirs[firsts])
            starts.write(start + firsts)
            start, last = start + len(samples), theirs[-1]
        starts.write(np.array([start]))
    return distinct.length


def _buckets(path: Path, values: np.ndarray, dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the samples in their order, and their values, piece by piece."""
    if len(values) <= 2 * BUCKET:
        order = np.argsort(values, kind="stable")
        yield order, values[order]
        return
    drawn = np.random.Generator(np.random.Philox(0)).integers(len(values), size=1 << 16)
    drawn = np.sort(values[np.sort(drawn)])
    splitters = np.unique(drawn[:: max(1, len(drawn) * BUCKET // len(values))])
    blocks = [(begin, values[begin : begin + BLOCK]) for begin in range(0, len(values), BLOCK)]
    counts = np.zeros(2 * len(splitters) + 1, np.int64)
    for _, block in blocks:
        counts += np.bincount(_bucket_of(block, splitters), minlength=len(counts))
    ends = np.cumsum(counts)
    places = ends - counts
    with open(path, "x+b", buffering=0) as file:
        os.unlink(path)  # it goes when it is closed, also by SIGKILL
        for begin, block in blocks:
            bucket = _bucket_of(block, splitters)
            samples = (begin + np.argsort(bucket, kind="stable")).astype(dtype)
            stops = np.cumsum(np.bincount(bucket, minlength=len(counts)))
            for i in np.flatnonzero(np.diff(stops, prepend=0)):
                piece = samples[stops[i - 1] if i else 0 : stops[i]]
                file.seek(int(places[i]) * dtype.itemsize)
                piece.tofile(file)
                places[i] += len(piece)
        file.seek(0)
        for i in np.flatnonzero(counts):
            left = int(counts[i])
            while left:  # one value, however often, takes no more memory than a block
                samples = np.fromfile(file, dtype, min(left, BLOCK) if i % 2 else left)
                left -= len(samples)
                if i % 2:
                    yield samples, splitters[i // 2].repeat(len(samples))
                else:
                    theirs = values[samples]
                    order = np.argsort(theirs, kind="stable")
                    yield samples[order], theirs[order]


def _bucket_of(block: np.ndarray, splitters: np.ndarray) -> np.ndarray:
    """Return bucket 2 i for values below splitter i and above the one before, 2 i + 1 for those equal to it."""
    place = np.searchsorted(splitters, block, "left")
    bucket = 2 * place + (splitters[np.minimum(place, len(splitters) - 1)] == block)
    return bucket.astype(np.uint16) if len(splitters) < 1 << 15 else bucket  # which radix sort takes


def import_metric(
    index_to_sample: str | os.PathLike[str],
    index_to_metric: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    name: str,
) -> SampleMetric:
    """Take over a metric that DeepSpeed's analyser left, and return it: the files that its configuration names.

    Some 30 bytes a sample are held in memory.

    Args:
        index_to_sample: `index_to_sample_path`: sequence k has the samples of value k.
        index_to_metric: `index_to_metric_path`: sequence k is value k; None where only the order of the values counts,
            as by percentiles, and then they are 0, 1, ...
        out: a directory for this metric, and others of the same data set.
        name: of the metric.

    Raises `DataError` for files that do not list every sample once, and for another data set's directory.
    """
    folder = check_path(out, "out")
    check_name(name)
    index = TokenFile(index_to_sample)
    samples, places = index.rows(0, len(index))
    if index_to_metric is None:
        distinct = np.arange(len(index))
    else:
        metric = TokenFile(index_to_metric)
        distinct, ones = metric.rows(0, len(metric))
        if len(metric) != len(index) or not np.array_equal(ones, np.arange(len(index) + 1)):
            got, want = f"{len(metric)} sequences, {len(distinct)} values", f"one value in each of {len(index)}"
            raise DataError("the values do not fit the samples", where=str(index_to_metric), got=got, want=want)
    length, seen = len(samples), np.zeros(len(samples), bool)
    if length and 0 <= int(samples.min()) <= int(samples.max()) < length:
        seen[samples] = True
    if not seen.all() or not length:
        got, want = f"{length} numbers, {int(seen.sum())} of the samples", "every sample from 0 once"
        raise DataError(
            "the samples of the index are not those of a data set", where=str(index.path), got=got, want=want
        )
    values = np.empty(length, np.int64)
    values[samples] = distinct.astype(np.int64).repeat(np.diff(places))
    with open_analysis(folder, {"length": length, "data": "DeepSpeed's analyser", "digest": ""}) as manifest:
        if name in manifest["metrics"]:
            raise DataError("this metric is there already", where=f"{folder}, {name!r}", want="another name")
        with aside_in(folder) as aside:
            record = write_metric(aside, name, lambda: iter([values]), length)
            publish(folder, aside, manifest, {name: {**record, "metric": f"import_metric({str(index.path)!r})"}})
    return read_metric(folder, name)


def check_name(name: object) -> None:
    """Raise `DataError` unless this can name a metric and its files."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+=,@-]*", name):
        want = "letters, digits and any of _.+=,@- after the first"
        raise DataError("not the name of a metric", where="metrics", got=repr(name)[:80], want=want)


@contextlib.contextmanager
def open_analysis(folder: Path, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Hold the lock of a directory, made if it is missing, and yield its manifest, or the one that it begins with.

    `about` are the length of the data set, what it is and its digest. Raises `StorageError` where another process has
    the lock, `DataError` for another data set's directory.
    """
    with write_errors(folder, "analysis"):
        folder.mkdir(parents=True, exist_ok=True)
        with hold_alone(lock_file(folder / LOCK), "analysis", folder):
            manifest = {"format": FORMAT, "fds": __version__, **about, "metrics": {}}
            if (folder / MANIFEST).exists():
                manifest = read_manifest(folder)
                theirs = {name: manifest.get(name) for name in about}
                if any(theirs[name] != about[name] for name in ("length", "digest")):
                    got, want = (", ".join(f"{k} {v}" for k, v in it.items()) for it in (theirs, about))
                    hint = "a directory for each data set"
                    what = "this directory has the analysis of another data set"
                    raise DataError(what, where=str(folder), got=got, want=want, hint=hint)
            yield manifest


@contextlib.contextmanager
def aside_in(folder: Path) -> Iterator[Path]:
    """Yield an empty folder in one for files that are not published yet; it is removed in the end."""
    aside = folder / ASIDE / "new"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # chunks of an analysis that goes on
            aside.parent.rmdir()
