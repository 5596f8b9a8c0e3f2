"""The main job: it trains, stops and resumes without a trace, takes the user's files, and says what is wrong."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fds
from tests.examples.runs import command, fresh, lines, saved

import train_gpt  # isort: skip  (runs puts the folder of the script on the path)
from gpt import model, ranks  # isort: skip
from gpt.text import even_starts, is_held_out, random_starts, read, standard_library, windows  # isort: skip

ALONE = fds.mesh(pp=1, dp=-1)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: a second thread only waits, for seconds where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_run_leaves_a_log_a_curve_a_save_and_prints_a_sample(tmp_path: Path):
    run = fresh("--quick", "--out", tmp_path / "run")
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == list(range(1, 21))
    assert [line["step"] for line in lines(tmp_path / "run") if "held_out" in line] == [10, 20]
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "embedding.weight" in " ".join(saved(tmp_path / "run"))
    page = fds.report(tmp_path / "run").read_text()
    assert all(word in page for word in ('"bits_per_byte"', "parts of a call", "eval_every", "save/last", "optimizer"))
    for word in ("a sample", "def ", "bits per byte", "step 20/20", "tokens/s", "curve.png", "log.jsonl"):
        assert word in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_run_that_was_interrupted_and_resumed_equals_one_that_was_not(tmp_path: Path, book: Path, number: int):
    options = [
        "--quick",
        "--data",
        book,
        "--steps",
        70,
        "--eval-every",
        30,
        "--dropout",
        0.1,
        "--accumulate",
        2,
        "--dtype",
        "float16" if number == signal.SIGINT else "bfloat16",
    ]
    whole, broken = command(*options, "--out", tmp_path / "whole"), command(*options, "--out", tmp_path / "broken")
    log = tmp_path / "broken" / "log.jsonl"
    while broken.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.005)
    broken.send_signal(number)
    said, _ = broken.communicate(timeout=120)
    assert broken.returncode == 130, said
    assert f"--resume {tmp_path / 'broken'}" in said
    assert 0 < len(lines(tmp_path / "broken")) < 72
    again = fresh if number == signal.SIGINT else command  # a fresh interpreter takes seconds, and one will do
    resumed = again("--resume", tmp_path / "broken")
    said, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == whole.wait(timeout=120) == 0, said
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    first, second = saved(tmp_path / "broken"), saved(tmp_path / "whole")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_fresh_run_replaces_an_earlier_one_and_nothing_else(tmp_path: Path, book: Path, capsys):
    options = ["--quick", "--data", str(book), "--steps", "3", "--sample", "2", "--out"]
    for seed in ("0", "1"):
        assert train_gpt.main([*options, str(tmp_path / "run"), "--seed", seed]) == 0
    assert len(lines(tmp_path / "run")) == 4  # three steps and the last evaluation
    assert json.loads((tmp_path / "run" / "options.json").read_text())["seed"] == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    assert train_gpt.main([*options, str(tmp_path / "mine")]) == 2
    assert "is not replaced" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_only_ranks_that_were_started_again_go_on_by_themselves_and_only_with_their_own_run(
    tmp_path: Path, book: Path, monkeypatch
):
    def start(run: str, restarts: int, seed: int) -> list[dict]:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        options = ["--quick", "--data", str(book), "--steps", "4", "--save-every", "2", "--sample", "1"]
        assert train_gpt.main([*options, "--seed", str(seed), "--out", str(tmp_path / "run")]) == 0
        return lines(tmp_path / "run")

    first = start("a", 0, seed=0)
    assert start("a", 1, seed=1) == first
    (tmp_path / "run" / "save" / "latest").unlink()
    assert start("a", 2, seed=1) == first  # killed before its first save
    assert start("b", 1, seed=1) != first
    assert start("b", 0, seed=0) == first


@pytest.mark.parametrize(("minutes", "steps"), [(1e-9, 100), (1e9, 20_000)])
def test_the_number_of_steps_follows_the_minutes(book: Path, minutes: float, steps: int):
    tiny = ["--quick", "--data", str(book), "--steps", "0", "--width", "8", "--layers", "1", "--context", "8"]
    options = train_gpt.parse([*tiny, "--minutes", str(minutes), "--dtype", "float32"])
    assert train_gpt.steps_within(options, read(options.data, context=8), ALONE) == steps


def test_without_a_number_of_steps_the_run_finds_one_and_writes_it_down(tmp_path: Path, book: Path):
    tiny = ["--quick", "--data", str(book), "--width", "8", "--layers", "1", "--context", "8", "--sample", "1"]
    out = tmp_path / "run"
    assert train_gpt.main([*tiny, "--steps", "0", "--minutes", "0.03", "--eval-every", "1000", "--out", str(out)]) == 0
    steps = json.loads((out / "options.json").read_text())["steps"]
    assert isinstance(steps, int)
    assert steps % 100 == 0
    assert lines(out)[-1]["step"] == steps


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere.txt"], ["there is no text here", "nowhere.txt"]),
        (["--data", "empty"], ["there is no text here", "empty"]),
        (["--data", "short.txt"], ["too little text", "5 bytes", "130"]),
        (["--width", "30"], ["--width", "30 over 2 heads", "a multiple of 4"]),
        (["--resume", "nowhere"], ["no run to resume", "nowhere"]),
        (["--out", "short.txt"], ["short.txt"]),
        (["--batch", "0"], ["--batch counts from 1"]),
        (["--ranks", "-1"], ["--ranks counts from 0"]),
        (["--batch", "5", "--ranks", "2"], ["cannot share the batch evenly", "5 windows for 2 ranks"]),
        (["--batch", "4", "--accumulate", "3"], ["does not divide into 3 microbatches", "4 rows"]),
        (["--wdith", "8"], ["unrecognized arguments: --wdith 8"]),
        (["--dtype", "int8"], ["invalid choice: 'int8'"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_what_is_wrong_is_said_in_words(arguments: list[str], words: list[str], tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("short.txt").write_text("short")
    try:
        code = train_gpt.main(["--quick", *arguments])
    except SystemExit as end:  # argparse's own
        code = end.code
    said = capsys.readouterr().err
    assert code == 2
    assert all(word in said for word in words), said
    assert "Traceback" not in said


def test_a_run_does_not_go_on_with_another_text(tmp_path: Path, book: Path, capsys):
    out = str(tmp_path / "run")
    assert train_gpt.main(["--quick", "--data", str(book), "--steps", "2", "--sample", "1", "--out", out]) == 0
    book.write_text(book.read_text().upper())
    assert train_gpt.main(["--resume", out, "--steps", "4"]) == 2
    assert "the text has changed" in capsys.readouterr().err


@pytest.mark.parametrize(("cores", "rows", "number"), [(2, 8, 2), (2, 9, 1), (6, 8, 4), (64, 12, 12), (1, 8, 1)])
def test_there_is_a_rank_per_core_as_far_as_they_divide_the_rows(cores: int, rows: int, number: int, monkeypatch):
    monkeypatch.setattr(ranks, "num_cores", lambda: cores)
    assert ranks.fitting("cpu", rows=rows) == number


def test_the_standard_library_is_held_out_by_name():
    names = [name for name, _ in standard_library()]
    held_out = [name for name in names if is_held_out(name)]
    assert 0.02 < len(held_out) / len(names) < 0.1
    assert not any("test" in name.split("/") or "site-packages" in name for name in names)
    text = read(context=256)
    assert len(text.train) > 10 * len(text.held_out) > 100_000
    assert read(context=256).digest == text.digest


def test_named_files_and_folders_are_read_without_hidden_and_binary_ones(tmp_path: Path):
    files = {"a.txt": b"a" * 90, "b/c.md": b"c" * 90, ".git/x": b"x" * 90, "b/d.bin": b"d\0d" * 30}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    text = read([str(tmp_path)], context=8)
    assert set(text.train.tolist() + text.held_out.tolist()) == set(b"ac\n")
    one = read([str(tmp_path / "a.txt")], context=8)
    assert (len(one.train), len(one.held_out)) == (81, 9)


def test_windows_are_a_function_of_the_key_and_stay_inside_the_text():
    text = torch.arange(100, dtype=torch.uint8)
    key = fds.random.key(0)
    starts = random_starts(text, key, rows=5000, context=10)
    assert starts.min() == 0
    assert starts.max() == 89
    assert torch.equal(starts, random_starts(text, key, rows=5000, context=10))
    inputs, targets = windows(text, even_starts(text, rows=4, context=10), context=10)
    assert inputs[:, 0].tolist() == [0, 29, 59, 89]
    assert torch.equal(targets, inputs + 1)


def test_a_byte_sees_only_what_is_before_it():
    loss = model.gpt(width=16, layers=2, heads=2)
    step = fds.compose(fds.adamw(0.1))(loss)
    inputs = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    state, _ = step(step.init(loss.init, key=0), (inputs, inputs))  # fresh blocks are the identity
    changed = inputs.clone()
    changed[:, 7] = 255 - changed[:, 7]
    first, second = (step.evaluate(state, (x, x), outputs=True)["outputs"] for x in (inputs, changed))
    assert torch.equal(first[:, :7], second[:, :7])
    assert not torch.equal(first[:, 7:], second[:, 7:])


def test_attention_by_hand_is_torchs_own():
    q, k, v = torch.randn(3, 2, 4, 33, 8, generator=torch.Generator().manual_seed(0)).unbind()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(model.attend(q, k, v), expected)
