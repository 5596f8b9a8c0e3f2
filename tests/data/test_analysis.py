"""What `analyse` writes, beside NumPy by hand: by workers and ranks, after a SIGKILL; and what it refuses."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import fds
from fds.data import (
    Accumulated,
    PerSample,
    SequenceLength,
    TokenCounts,
    TokenFile,
    VocabularyRarity,
    analyse,
    analysis,
    import_metric,
    metric_files,
    metrics,
    read_metric,
    read_total,
    write_tokens,
)
from fds.errors import DataError, FdsError, StorageError

WORDS = 50


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(analysis, "LEAST", 1024)


def corpus(length=3000, seed=0):
    """Return texts of 0 to 19 words, of which small ones are frequent."""
    draws = np.random.default_rng(seed)
    return [np.minimum(draws.geometric(0.1, size=n), WORDS - 1) for n in draws.integers(0, 20, size=length)]


def total(text):
    return int(text.sum())


def ends(text):
    return np.array([len(text), text[-1] if len(text) else 0.5])


METRICS = {
    "length": SequenceLength(),
    "rarity": VocabularyRarity(WORDS),
    "total": total,
    "counts": TokenCounts(WORDS),
    "ends": Accumulated(ends),
}


def by_hand(texts):
    counts = np.bincount(np.concatenate(texts), minlength=WORDS)
    p = counts / counts.sum()
    return {
        "length": np.array([len(text) for text in texts]),
        "rarity": np.array([-np.sum(np.log(p[text])) for text in texts]),
        "total": np.array([text.sum() for text in texts], int),
        "counts": counts,
        "ends": sum(ends(text) for text in texts),
    }


def check(folder, want):
    """Compare the files of a directory with what they should say."""
    for name in ("length", "rarity", "total"):
        files = read_metric(folder, name)
        np.testing.assert_allclose(files.values, want[name], rtol=1e-12)
        order = np.argsort(files.values, kind="stable")
        distinct, starts = np.unique(files.values[order], return_index=True)
        np.testing.assert_array_equal(files.order, order)
        np.testing.assert_array_equal(files.distinct, distinct)
        np.testing.assert_array_equal(files.starts, [*starts, len(order)])
    for name in ("counts", "ends"):
        np.testing.assert_array_equal(read_total(folder, name), want[name])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".npy"}


def test_files_say_what_numpy_does_by_hand(tmp_path, capsys):
    texts = corpus()
    results = analyse(texts, METRICS, tmp_path / "a")
    assert list(results) == list(METRICS) and results["length"].values.dtype == np.uint8
    check(tmp_path / "a", by_hand(texts))
    assert results["length"].count_upto(7) == sum(len(text) <= 7 for text in texts)
    with pytest.raises(DataError):
        results["length"].count_upto(float("nan"))
    assert results["length"].count_upto(-1) == 0 and results["length"].count_upto(99.5) == len(texts)
    said = capsys.readouterr()
    assert not said.out and "step 3/3" in said.err and "pass 2 of 2" in said.err
    assert {path.suffix for path in (tmp_path / "a").iterdir()} == {".npy", ".json", ""}  # the lock


def test_workers_ranks_and_kinds_of_data_set_change_no_bit(tmp_path):
    texts = corpus()
    analyse(texts, METRICS, tmp_path / "one", show=False)
    analyse(texts, METRICS, tmp_path / "workers", workers=2, show=False)
    fds.simulate(lambda: analyse(texts, METRICS, tmp_path / "ranks", axis=fds.mesh(dp=-1)["dp"], show=False), 2)
    file = write_tokens(tmp_path / "tokens", texts)
    tensors = {"total": total, "ends": Accumulated(lambda row: ends(row.numpy()))}
    analyse(file.documents(), METRICS | tensors, tmp_path / "file", show=False)
    one = contents(tmp_path / "one")
    assert len(one) == 3 * 4 + 2
    for other in ("workers", "ranks", "file"):
        assert contents(tmp_path / other) == one, other


def test_windows_are_measured_where_they_lie(tmp_path):
    file = write_tokens(tmp_path / "tokens", corpus())
    windows, metrics = file.windows(16), {"rarity": VocabularyRarity(WORDS), "length": SequenceLength()}
    analyse(windows, metrics, tmp_path / "a", show=False)
    analyse([row.numpy() for row in windows], metrics, tmp_path / "b", show=False)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert read_metric(tmp_path / "a", "length").distinct.tolist() == [17]


@pytest.mark.parametrize("kind", ["floats", "few integers", "one value", "mostly one value"])
def test_sorting_by_buckets_is_a_stable_sort(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(metric_files, "BLOCK", 100)
    monkeypatch.setattr(metric_files, "BUCKET", 128)
    draws = np.random.default_rng(0)
    values = {
        "floats": draws.normal(size=5001),
        "few integers": draws.integers(-3, 4, 5001),
        "one value": np.full(5001, 7),
        "mostly one value": np.where(draws.random(5001) < 0.9, 2.5, draws.normal(size=5001)),
    }[kind]
    blocks = lambda: iter(np.array_split(values, 7))
    record = metric_files.write_metric(tmp_path, "x", blocks, len(values))
    order = np.load(tmp_path / "x.order.npy", mmap_mode="r")
    distinct, starts = np.unique(np.sort(values), return_index=True)
    np.testing.assert_array_equal(order, np.argsort(values, kind="stable"))
    np.testing.assert_array_equal(np.load(tmp_path / "x.distinct.npy"), distinct)
    np.testing.assert_array_equal(np.load(tmp_path / "x.starts.npy"), [*starts, len(values)])
    assert (record["distinct"], record["least"], record["most"]) == (len(distinct), values.min(), values.max())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"x.{n}.npy" for n in sorted(metric_files.PARTS)]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([0, 255], "uint8"), ([-1, 5], "int8"), ([0, 2**16], "uint32"), ([-(2**40), 0], "int64"), ([1, 0.5], "float64")],
)
def test_values_are_kept_in_the_smallest_dtype_that_holds_them(values, dtype, tmp_path):
    files = analyse(values, {"x": PerSample(lambda value: value)}, tmp_path / "a", show=False)["x"]
    assert files.values.dtype == dtype and files.values.tolist() == values
    tensors = analyse(torch.tensor(values), {"x": lambda x: x}, tmp_path / "b", show=False)["x"]
    assert tensors.values.tolist() == values


def killed(number):
    """Kill the process at sample 2500 the first time; afterwards, no chunk that was done may be measured again."""
    flag = os.environ["FDS_KILLED"]
    if os.path.exists(flag):
        if flag.endswith("once") and number < 2048 and number not in {k * 4095 // 63 for k in range(64)}:
            raise ValueError("again")
    elif number == 2500:
        open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return number % 7


def test_a_run_goes_on_after_a_sigkill(tmp_path, monkeypatch):
    monkeypatch.setenv("FDS_KILLED", str(tmp_path / "once"))
    run = lambda: analyse(range(4096), {"x": killed}, tmp_path / "a", show=False)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list((tmp_path / "a").glob(".analysing/*/*.npz"))) == 2
    with pytest.raises(DataError, match="no analysis here"):
        read_metric(tmp_path / "a", "x")
    assert run()["x"].values.tolist() == [i % 7 for i in range(4096)]
    assert not (tmp_path / "a" / ".analysing").exists()


def test_a_worker_that_ends_is_an_error_after_which_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("FDS_KILLED", str(tmp_path / "flag"))
    with pytest.raises(DataError, match="a worker process ended"):
        analyse(range(4096), {"x": killed}, tmp_path / "a", workers=1, show=False)
    files = analyse(range(4096), {"x": killed}, tmp_path / "a", workers=1, show=False)["x"]
    assert files.values.tolist() == [i % 7 for i in range(4096)]


def is_running(pid):
    """Tell whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_end_after_a_sigkill_of_their_parent_who_has_not_read_what_they_measured(tmp_path, monkeypatch):
    def killed_at_the_first_result(*_):
        workers = [process.pid for process in multiprocessing.active_children()]
        (tmp_path / "workers").write_text(json.dumps(workers))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(analysis, "LEAST", 1 << 14)  # more than a pipe holds
    monkeypatch.setattr(analysis, "_keep", killed_at_the_first_result)
    run = lambda: analyse(range(1 << 16), {"x": float}, tmp_path / "a", workers=2, show=False)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    workers = json.loads((tmp_path / "workers").read_text())
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


def test_ctrl_c_ends_after_a_chunk_which_is_kept(tmp_path):
    def interrupted(number):
        if number == 1500:
            os.kill(os.getpid(), signal.SIGINT)
        return number

    with pytest.raises(KeyboardInterrupt):
        analyse(range(4096), {"x": interrupted}, tmp_path / "a", show=False)
    assert len(list((tmp_path / "a").glob(".analysing/*/*.npz"))) == 2


def test_metrics_that_are_there_are_not_measured_again_and_others_join_them(tmp_path):
    texts = corpus(100)
    analyse(texts, {"length": SequenceLength()}, tmp_path / "a", show=False)
    analyse(texts, METRICS, tmp_path / "a", show=False)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.npy")}
    analyse(texts, METRICS, tmp_path / "a", show=False)
    check(tmp_path / "a", by_hand(texts))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.npy")}
    with pytest.raises(DataError, match="another metric has this name here"):
        analyse(texts, {"length": lambda text: len(text)}, tmp_path / "a", show=False)
    with pytest.raises(DataError, match="the analysis of another data set"):
        analyse(corpus(101), METRICS, tmp_path / "a", show=False)
    with pytest.raises(DataError, match="the analysis of another data set"):
        analyse(corpus(100, seed=1), METRICS, tmp_path / "a", show=False)
    check(tmp_path / "a", by_hand(texts))


def test_two_runs_in_one_directory_at_once_are_refused(tmp_path):
    second = pytest.raises(StorageError, match="another analysis is writing here")
    with metric_files.open_analysis(tmp_path, {"length": 9, "digest": ""}), second:
        analyse(range(9), {"x": float}, tmp_path, show=False)
    assert analyse(range(9), {"x": float}, tmp_path, show=False)["x"].values.tolist() == list(range(9))


def test_what_a_data_set_draws_follows_from_the_chunk(tmp_path):
    class Noisy:
        __len__ = lambda self: 2100
        __getitem__ = lambda self, i: float(torch.rand(())) + np.random.rand()

    for name, workers in (("a", 0), ("b", 2)):
        torch.manual_seed(workers)
        analyse(Noisy(), {"x": lambda x: x}, tmp_path / name, workers=workers, show=False)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_texts_without_words_are_measured(tmp_path):
    file = write_tokens(tmp_path / "empty", [[], []])
    for name, texts in (("a", [[], []]), ("b", file), ("c", [torch.zeros(0, dtype=torch.int64)] * 2)):
        results = analyse(texts, {k: METRICS[k] for k in ("length", "rarity", "counts")}, tmp_path / name, show=False)
        assert results["length"].values.tolist() == results["rarity"].values.tolist() == [0, 0]
        assert not results["counts"].any() and len(results["counts"]) == WORDS


def test_long_windows_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "raw")
    windows = TokenFile(tmp_path / "raw", "uint16").windows(100)
    monkeypatch.setattr(metrics, "MOST_TOKENS", 150)
    results = analyse(windows, {"x": VocabularyRarity(1000), "y": TokenCounts(1000)}, tmp_path / "a", show=False)
    want = np.bincount(np.concatenate([row.numpy() for row in windows]), minlength=1000)
    np.testing.assert_array_equal(results["y"], want)
    np.testing.assert_allclose(results["x"].values, [-np.log(want[row] / want.sum()).sum() for row in windows])


def raises(text):
    return {}["lost"] if len(text) == 7 else 0


class Broken(list):
    def __getitem__(self, i):
        if i == 4:
            raise OSError("no such shard")
        return super().__getitem__(i)


TEXTS = [[1], [2, 3], [4] * 7, [5, 6], [7]]
REFUSED = {
    "a metric that raises": ({"x": raises}, TEXTS, ["metric 'x', sample 2", "KeyError: 'lost'", "raises raised"]),
    "a sample that cannot be read": ({"x": len}, Broken(TEXTS), ["sample 4", "OSError: no such shard"]),
    "nan": ({"x": lambda text: float("nan") if text[0] == 5 else 1}, TEXTS, ["sample 3", "got:   nan"]),
    "infinity": ({"x": lambda text: torch.tensor(float("inf"))}, TEXTS, ["sample 0", "got:   inf"]),
    "a large integer": ({"x": lambda text: 2**63}, TEXTS, ["sample 0", "64 bits"]),
    "no number": ({"x": str}, TEXTS, ["got:   str", "one int or float"]),
    "several numbers": ({"x": lambda text: torch.ones(2)}, TEXTS, ["Tensor of shape (2,)"]),
    "an integer that floats lack": (
        {"x": lambda text: 2**53 + 1 if text[0] == 1 else 0.5},
        TEXTS,
        ["sample 0", "9007199254740993 beside floats"],
    ),
    "nan in a sum": ({"x": Accumulated(lambda text: [np.nan])}, TEXTS, ["sample 0", "nothing to sum"]),
    "ragged sums": ({"x": Accumulated(lambda text: text)}, TEXTS, ["sample 1", "got:   shape (2,)", "want:  (1,)"]),
    "text in a sum": ({"x": Accumulated(str)}, TEXTS, ["sample 0", "array of finite numbers"]),
    "sums that overflow": ({"x": Accumulated(lambda text: [2**62])}, TEXTS, ["sample 1", "overflows"]),
    "a token beyond the vocabulary": ({"x": TokenCounts(7)}, TEXTS, ["metric 'x', sample 4", "got:   token 7"]),
    "one below 0": ({"x": TokenCounts(9)}, [[1], [], [3, -2]], ["sample 2", "got:   token -2"]),
    "the same for rarity": ({"x": VocabularyRarity(7)}, TEXTS, ["sample 4", "token 7"]),
    "no tokens": ({"x": SequenceLength()}, ["abc"], ["sample 0", "tokens=lambda sample"]),
    "a function that gives none": ({"x": SequenceLength(lambda text: None)}, TEXTS, ["sample 0", "not a sequence"]),
    "no samples": ({"x": len}, [], ["no samples"]),
    "columns": ({"x": len}, {"a": 1}, ["got:   dict"]),
    "no data set": ({"x": len}, iter([1]), ["no random access"]),
    "no metrics": ({}, TEXTS, ["no metrics by name"]),
    "a list of metrics": ([len], TEXTS, ["no metrics by name"]),
    "a name of a folder": ({"../x": len}, TEXTS, ["not the name of a metric", "'../x'"]),
    "no metric": ({"x": 3}, TEXTS, ["not a metric"]),
    "a class": ({"x": SequenceLength}, TEXTS, ["SequenceLength(...)"]),
}


@pytest.mark.parametrize(("metrics", "dataset", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("workers", [0, pytest.param(1, id="in a worker")])
def test_what_is_refused_is_named(metrics, dataset, words, workers, tmp_path):
    with pytest.raises(DataError) as caught:
        analyse(dataset, metrics, tmp_path / "a", workers=workers, show=False)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "a" / "analysis.json").exists()


def test_a_refusal_on_one_rank_ends_all(tmp_path):
    def run():
        with pytest.raises(StorageError, match=r"rank 1: (?s:.)*sample 3000") as caught:
            analyse(range(4096), {"x": lambda i: 1 / (i - 3000)}, tmp_path, axis=fds.mesh(dp=-1)["dp"], show=False)
        return str(caught.value)

    first, second = fds.simulate(run, 2)
    assert first == second


def test_other_arguments_are_checked(tmp_path):
    for options in ({"workers": -1}, {"workers": True}, {"axis": 2}, {"out": 3}, {"metrics": {"x": PerSample}}):
        with pytest.raises(FdsError):
            analyse(**{"dataset": TEXTS, "metrics": {"x": len}, "out": tmp_path / "a", "show": False} | options)
    for metric in (lambda: TokenCounts(0), lambda: VocabularyRarity(9, tokens=3), lambda: PerSample(None)):
        with pytest.raises(DataError):
            metric()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="refuses this analysis"):
        analyse(TEXTS, {"x": len}, tmp_path / "file" / "a", show=False)


def test_directories_that_are_damaged_are_refused(tmp_path):
    folder = tmp_path / "a"
    analyse(TEXTS, {"x": len, "all": Accumulated(len)}, folder, show=False)
    for call in (
        lambda: read_metric(folder, "y"),
        lambda: read_metric(folder, "all"),
        lambda: read_total(folder, "x"),
        lambda: read_metric(tmp_path, "x"),
    ):
        with pytest.raises(DataError):
            call()
    (folder / "x.order.npy").write_bytes((folder / "x.order.npy").read_bytes()[:-1])
    (folder / "x.order.npy").with_name("x.starts.npy").unlink()
    with pytest.raises(FdsError, match=r"x\.order\.npy"):
        read_metric(folder, "x")
    (folder / "analysis.json").write_text('{"format": 2}')
    with pytest.raises(DataError, match="not an analysis"):
        read_metric(folder, "x")


def test_sparse_and_nested_samples_are_told_by_their_kind(tmp_path):
    samples = [
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ]
    metric = analyse(samples, {"x": lambda sample: sample.is_sparse}, tmp_path, show=False)["x"]
    assert metric.values.tolist() == [1, 0]
    assert metric.count_upto(10**400) == 2 and metric.count_upto(-(10**400)) == 0


def write_index(folder, rows, values):
    write_tokens(folder / "to_sample", rows, dtype="uint8", codes="deepspeed")
    write_tokens(folder / "to_metric", values, dtype="uint16", codes="deepspeed")
    return folder / "to_sample", folder / "to_metric"


def test_an_index_of_deepspeed_is_taken_over(tmp_path):
    paths = write_index(tmp_path, [[2, 0], [1, 4], [3]], [[5], [9], [300]])
    files = import_metric(*paths, tmp_path / "a", name="seqlen")
    assert files.values.tolist() == [5, 9, 5, 300, 9] and files.order.tolist() == [0, 2, 1, 4, 3]
    assert files.distinct.tolist() == [5, 9, 300] and files.starts.tolist() == [0, 2, 4, 5]
    ranks = import_metric(paths[0], None, tmp_path / "a", name="rank")
    assert ranks.values.tolist() == [0, 1, 0, 2, 1]
    with pytest.raises(DataError, match="there already"):
        import_metric(*paths, tmp_path / "a", name="seqlen")
    with pytest.raises(DataError, match="another data set"):
        import_metric(*write_index(tmp_path, [[0]], [[1]]), tmp_path / "a", name="other")


@pytest.mark.parametrize(
    ("rows", "values", "words"),
    [
        ([[0, 0]], [[1]], "every sample from 0 once"),
        ([[0, 2]], [[1]], "every sample from 0 once"),
        ([[]], [[1]], "every sample from 0 once"),
        ([[0], [1]], [[1]], "one value in each of 2"),
        ([[0], [1]], [[1, 2], []], "one value in each of 2"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(rows, values, words, tmp_path):
    with pytest.raises(DataError, match=words):
        import_metric(*write_index(tmp_path, rows, values), tmp_path / "a", name="x")
    assert not (tmp_path / "a" / "analysis.json").exists()


@pytest.mark.peers
def test_deepspeeds_analyser_finds_the_same(tmp_path):
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    texts = [torch.as_tensor(text) for text in corpus(300)]
    length = lambda batch: torch.tensor([len(text) for text in batch])
    counts = lambda batch: torch.bincount(torch.cat(batch), minlength=WORDS)
    theirs = DataAnalyzer(
        texts,
        batch_size=7,
        metric_names=["length", "counts"],
        metric_functions=[length, counts],
        metric_types=["single_value_per_sample", "accumulate_value_over_samples"],
        metric_dtypes=[torch.int64, torch.int64],
        save_path=str(tmp_path / "theirs"),
        collate_fn=list,
    )
    theirs.run_map()
    theirs.run_reduce()
    ours = analyse(texts, {"length": SequenceLength(), "counts": TokenCounts(WORDS)}, tmp_path / "ours", show=False)
    stem = tmp_path / "theirs" / "length" / "length"
    imported = import_metric(f"{stem}_index_to_sample", f"{stem}_index_to_metric", tmp_path / "taken", name="length")
    for part in metric_files.PARTS:
        np.testing.assert_array_equal(getattr(imported, part), getattr(ours["length"], part))
    np.testing.assert_array_equal(TokenFile(f"{stem}_sample_to_metric").tokens, ours["length"].values)
    their_counts = TokenFile(tmp_path / "theirs" / "counts" / "counts_metric_value").tokens
    np.testing.assert_array_equal(their_counts, ours["counts"])


def test_rarities_by_functions_of_one_name_have_counts_of_their_own(tmp_path):
    of = lambda key: lambda sample: sample[key]
    metrics = {key: VocabularyRarity(4, of(key)) for key in "ab"}
    measured = analyse([{"a": [1, 1], "b": [2, 3]}] * 5, metrics, tmp_path, show=False)
    want = {"a": [0.0] * 5, "b": [2 * np.log(2)] * 5}
    for key in "ab":
        np.testing.assert_allclose(measured[key].values, want[key], rtol=1e-14)


def test_integers_that_floats_of_the_same_chunk_would_round_are_refused(tmp_path):
    with pytest.raises(DataError, match="float64 does not have"):
        analyse(range(600), {"x": lambda i: 2**53 + 1 if i < 256 else 0.5}, tmp_path, show=False)
