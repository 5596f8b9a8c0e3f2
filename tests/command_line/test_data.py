"""`fds data`: a file of tokens is measured and shown, beside NumPy by hand."""

import json
import shlex

import numpy as np
import pytest

from fds.command_line import main
from fds.data import Accumulated, PerSample, analyse, import_metric, write_tokens

ROWS = [[0, 1], [1, 1, 1, 2], [], [1, 2, 0, 0], [1] * 9]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_tokens("corpus", ROWS)


def test_a_corpus_is_measured_and_shown(corpus, capsys):
    line = "data analyse corpus measured --metrics length,counts --vocabulary 4 --workers 1"
    assert main(shlex.split(line)) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["5", "samples", "of", "fds.data.tokens.TokenFile"] and "pass 1 of 1" in err
    assert lines[3] == ["length", "uint8", "4", "0", "0", "2", "4", "4", "9", "9", "3.8"]
    assert ["4", "2", "█" * 40] in lines and ["2", "1", "█" * 20] in lines and ["3", "0"] in lines
    assert "a total of shape (4,), int64: sum 19, 1 zeros" in out
    assert ["1", "14", "73.68%", "█" * 40] in lines


def test_what_was_measured_is_read_by_programs(corpus, capsys):
    lengths = [len(row) for row in ROWS]
    assert main(["data", "analyse", "corpus.bin", "measured", "--rows", "documents", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    length = facts["metrics"]["length"]
    assert (facts["length"], length["least"], length["most"], length["mean"]) == (5, 0, 9, np.mean(lengths))
    assert length["percentiles"] == {
        str(p): int(np.percentile(lengths, p, method="inverted_cdf")) for p in (5, 25, 50, 75, 95)
    }
    edges = length["histogram"]["edges"]
    assert length["histogram"]["counts"] == np.histogram(lengths, edges)[0].tolist()
    assert main(["data", "analyse", "corpus", "windows", "--rows", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["length"]["least"] == 5


def test_metrics_of_other_kinds_are_shown(tmp_path, capsys):
    draws = np.random.default_rng(0).normal(size=300)
    metrics = {"x": PerSample(lambda x: x), "same": lambda x: 2.5, "lost": Accumulated(lambda x: -1.0)}
    analyse(draws, metrics | {"none": Accumulated(lambda x: [0, 0])}, tmp_path / "a", show=False)
    assert main(["data", "show", str(tmp_path / "a"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["metrics"]
    counts, edges = np.histogram(draws, 20)
    assert facts["x"]["histogram"]["counts"] == counts.tolist()
    np.testing.assert_allclose(facts["x"]["histogram"]["edges"], edges)
    assert facts["same"]["histogram"]["counts"] == [300] and facts["lost"]["sum"] == -300
    assert main(["data", "show", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "shape (), float64: sum -300.0" in out and "sum 0, 2 zeros" in out and "2.5" in out
    index = write_tokens(tmp_path / "index", [[1], [0, 2]])
    import_metric(index.path, None, tmp_path / "b", name="rank")
    assert main(["data", "show", str(tmp_path / "b"), "--metric", "rank"]) == 0
    assert "3 samples of DeepSpeed's analyser" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("analyse corpus m --metrics lenth", "did you mean 'length'?"),
        ("analyse corpus m --metrics rarity", "--vocabulary N"),
        ("analyse corpus m --rows pages", "'pages'"),
        ("analyse corpus m --rows 99", "does not fill one window"),
        ("analyse corpus m --dtype uint16", "have an index"),
        ("analyse corpus m --metrics counts --vocabulary 2", "token 2"),
        ("analyse elsewhere m", "elsewhere.idx"),
        ("show corpus", "no analysis here"),
        ("show m --metric lenth", "did you mean 'length'?"),
    ],
)
def test_what_is_refused_is_said_in_a_few_lines(line, words, corpus, capsys):
    if line.startswith("show m"):
        main(["data", "analyse", "corpus", "m"])
    assert main(["data", *line.split()]) == 2
    assert words in capsys.readouterr().err
