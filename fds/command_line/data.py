"""`fds data`: measure the samples of a file of tokens, and show what was measured of a data set."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from fds.command_line import Parser, count
from fds.data import SampleMetric, SequenceLength, TokenCounts, TokenFile, VocabularyRarity, analyse as measure
from fds.data.metric_files import read_manifest, read_metric, read_total
from fds.display.screens import short
from fds.errors import DataError, did_you_mean, escaped
from fds.storage.showing import show as print_parts, table

Options = argparse.Namespace
AFTER = "docs/corpora.md is the guide."
METRICS = ("length", "rarity", "counts")
BINS, WIDTH, TOP = 20, 40, 10  # of a histogram, and how many tokens of a total are shown
PERCENTILES = (5, 25, 50, 75, 95)


def fill(parser: Parser) -> None:
    """Give the parser of `fds data` its commands."""
    parser.teach(
        "Measure the samples of a file of tokens, and look at what was measured.",
        examples={
            "fds data analyse corpus measured --metrics length,rarity --vocabulary 50257": "of corpus.bin, corpus.idx",
            "fds data show measured": "a table, and a histogram of each metric",
        },
        after=AFTER,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    commands.add_parser("analyse", help="measure the samples of a file of tokens", fill=_fill_analyse)
    commands.add_parser("show", help="show metrics: a table, and a histogram of each", fill=_fill_show)


def _fill_analyse(parser: Parser) -> None:
    parser.teach(
        "Measure the samples of a file of tokens, and show them. Started again, it goes on where it was.",
        examples={
            "fds data analyse corpus measured": "the lengths of the sequences of corpus.bin and corpus.idx",
            "fds data analyse corpus measured --metrics length,rarity,counts --vocabulary 50257 --workers 8": "more",
            "fds data analyse train.bin measured --dtype uint16 --rows 1024 --metrics rarity --vocabulary 50257": (
                "windows of nanoGPT's"
            ),
        },
        after="fds.data.analyse takes any data set and any function. " + AFTER,
    )
    parser.add_argument("file", metavar="FILE", help="of tokens: Megatron's and DeepSpeed's two, or a raw stream")
    parser.add_argument("out", metavar="DIR", help="a directory for what is measured of it")
    parser.add_argument("--metrics", default="length", help=f"of {', '.join(METRICS)}, with commas (%(default)s)")
    parser.add_argument("--vocabulary", type=count, metavar="N", help="its size, for rarity and counts")
    parser.add_argument(
        "--rows",
        default="sequences",
        help="what a sample is: sequences, documents, or N: windows of N + 1 tokens (%(default)s)",
    )
    parser.add_argument("--dtype", help="of a raw stream: uint16, uint32, ...")
    parser.add_argument("--workers", type=count, metavar="N", help="processes that measure (this one)")
    parser.add_argument("--json", action="store_true", help="print what was measured for a program")
    parser.set_defaults(run=_analyse)


def _fill_show(parser: Parser) -> None:
    parser.teach(
        "Show what was measured of a data set: a table, and a histogram of each metric.",
        examples={
            "fds data show measured": "all metrics",
            "fds data show measured --metric length": "one of them",
            "fds data show measured --json": "for a program",
        },
        after=AFTER,
    )
    parser.add_argument("dir", metavar="DIR", help="a directory that fds.data.analyse or import_metric wrote")
    parser.add_argument("--metric", metavar="NAME", help="which (all)")
    parser.add_argument("--json", action="store_true", help="print it for a program")
    parser.set_defaults(run=lambda options: _show(options.dir, options.metric, as_json=options.json))


def _analyse(options: Options) -> int:
    file = TokenFile(options.file, options.dtype)
    names = options.metrics.split(",")
    metrics = {name: _metric(name, options.vocabulary) for name in names}
    if options.rows in ("sequences", "documents"):
        dataset = file if options.rows == "sequences" else file.documents()
    else:
        try:
            dataset = file.windows(int(options.rows))
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            want = "sequences, documents, or a number of tokens"
            raise DataError("unknown rows", where="--rows", got=repr(options.rows), want=want) from error
    measure(dataset, metrics, options.out, workers=options.workers or 0)
    return _show(options.out, None, as_json=options.json)


def _metric(name: str, vocabulary: int | None) -> Any:
    if name not in METRICS:
        want = ", ".join(METRICS)
        raise DataError(
            "no such metric", where="--metrics", got=repr(name), want=want, hint=did_you_mean(name, METRICS)
        )
    if name == "length":
        return SequenceLength()
    if vocabulary is None:
        raise DataError("this metric needs the size of the vocabulary", where=name, want="--vocabulary N")
    return (VocabularyRarity if name == "rarity" else TokenCounts)(vocabulary)


def _show(dir: str, name: str | None, *, as_json: bool) -> int:
    folder = Path(dir).expanduser()
    manifest = read_manifest(folder)
    if name is not None and name not in manifest["metrics"]:
        read_metric(folder, name)  # raises
    records = manifest["metrics"] if name is None else {name: manifest["metrics"][name]}
    about = {it: manifest[it] for it in ("length", "data", "digest")}
    facts = {
        it: record | (_total(read_total(folder, it)) if record["kind"] == "total" else _sample(read_metric(folder, it)))
        for it, record in records.items()
    }
    if as_json:
        print(json.dumps({**about, "metrics": facts}, indent=1))
    else:
        print_parts(_parts(about, facts))
    return 0


def _sample(metric: SampleMetric) -> dict[str, Any]:
    """Return mean, percentiles and histogram of a metric of samples: of N samples and K values, in O(K)."""
    length, distinct = len(metric.order), metric.distinct.astype(np.float64)
    counts = np.diff(metric.starts)
    # the lowest value that at least p hundredths of the samples do not exceed
    ranks = [max(0, -(-length * p // 100) - 1) for p in PERCENTILES]
    at = np.searchsorted(metric.starts, ranks, "right") - 1
    edges = np.unique(np.linspace(distinct[0], distinct[-1], BINS + 1))
    if metric.distinct.dtype.kind in "iu" and distinct[-1] - distinct[0] < BINS:
        edges = np.arange(distinct[0], distinct[-1] + 2)  # a bin a value
    histogram = np.histogram(distinct, edges if len(edges) > 1 else 1, weights=counts)
    return {
        "mean": float((distinct * (counts / length)).sum()),
        "percentiles": dict(zip(map(str, PERCENTILES), metric.distinct[at].tolist(), strict=True)),
        "histogram": {"edges": histogram[1].tolist(), "counts": histogram[0].astype(int).tolist()},
    }


def _total(total: np.ndarray) -> dict[str, Any]:
    """Return the sum of a metric over all samples and, of one dimension, where it is largest."""
    flat = total.reshape(-1)
    facts: dict[str, Any] = {"sum": flat.sum().item(), "zeros": int((flat == 0).sum())}
    if total.ndim == 1:
        largest = np.argsort(-flat, kind="stable")[:TOP]
        facts["largest"] = [[int(i), flat[i].item()] for i in largest]
    return facts


def _parts(about: dict[str, Any], facts: dict[str, dict[str, Any]]) -> Iterator[RenderableType]:
    yield f"{about['length']:,} samples of {escaped(str(about['data']))}\n"
    samples = {name: it for name, it in facts.items() if it["kind"] == "sample"}
    if samples:
        head = ["metric", "dtype", "values >", "least >", *(f"{p}% >" for p in PERCENTILES), "most >", "mean >"]
        rows = []
        for name, it in samples.items():
            numbers = [it["least"], *it["percentiles"].values(), it["most"], it["mean"]]
            rows.append([name, it["dtype"], f"{it['distinct']:,}", *map(short, numbers)])
        yield table(head, rows)
    for name, it in facts.items():
        yield f"\n{escaped(name)}"
        if it["kind"] == "sample":
            yield _histogram(**it["histogram"])
        else:
            yield f"a total of shape {tuple(it['shape'])}, {it['dtype']}: sum {it['sum']:,}, {it['zeros']:,} zeros"
            if it["sum"] > 0 and "largest" in it:
                rows = [
                    [str(i), f"{n:,}", f"{n / it['sum']:.2%}", _bar(n / it["largest"][0][1])] for i, n in it["largest"]
                ]
                yield table(["place >", "total >", "share >", ""], rows)


def _histogram(edges: list[float], counts: list[int]) -> RenderableType:
    most = max(counts)
    rows = [[short(low), f"{n:,}", _bar(n / most)] for low, n in zip(edges, counts, strict=False)]
    return table(["from >", "samples >", ""], rows)


def _bar(share: float) -> str:
    eighths = round(max(0.0, share) * WIDTH * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
