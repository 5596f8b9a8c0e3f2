"""The main job in a pipeline: the curve of one rank, stopped and resumed with other stages, and what is refused."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.examples.runs import EXAMPLES, as_ranks, command, lines
from tests.examples.test_train_gpt_on_ranks import is_running, logged, ranks_of, until
from tests.programs import Program

sys.path.insert(0, str(EXAMPLES))

import train_gpt  # isort: skip
from gpt import pipelines, ranks  # isort: skip

QUICK = ["--quick", "--steps", 24, "--eval-every", 8, "--eval-rows", 7, "--sample", 3, "--dtype", "float32"]


def ended(run: Program, code: int = 0) -> str:
    """Wait for the end of a run, and return what it said."""
    said, _ = run.communicate(timeout=120)
    assert run.returncode == code, said
    assert "Traceback" not in said
    return said


def equal_curves(found: Path, expected: Path) -> None:
    """Assert that two logs say the same, to rounding."""
    assert [line.keys() for line in lines(found)] == [line.keys() for line in lines(expected)]
    for ours, theirs in zip(lines(found), lines(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3), (ours, theirs)


def test_a_pipeline_of_two_ranks_follows_the_curve_of_one(tmp_path: Path, book: Path):
    options = [*QUICK, "--data", book, "--accumulate", 4]
    words = ["--pipeline", "one_f_one_b", "--stages", 2]
    said, _ = map(ended, as_ranks(2, *options, *words, "--out", tmp_path / "staged"))
    assert "float32 on 2 ranks of cpu, one_f_one_b through 2 stages" in said
    assert "a sample" in said
    ended(command(*options, "--out", tmp_path / "alone"))
    equal_curves(tmp_path / "staged", tmp_path / "alone")


def test_a_run_in_stages_is_stopped_and_resumed_with_others_and_without(tmp_path: Path, book: Path):
    options = [*QUICK, "--data", book, "--accumulate", 4, "--steps", 60, "--eval-every", 20]
    out = tmp_path / "staged"
    ranks = as_ranks(2, *options, "--pipeline", "zb_h1", "--stages", 2, "--out", out)
    until(lambda: logged(out) > 0, ranks[0])
    interrupted(ranks, ranks[1:])
    assert 0 < logged(out) < 63
    begun = logged(out)
    ranks = as_ranks(2, "--resume", out, "--pipeline", "zb_v", "--stages", 4)
    until(lambda: logged(out) > begun, ranks[0])
    assert "zb_v through 4 stages" in interrupted(ranks, ranks)
    for run in (
        command("--resume", out, "--ranks", 1, "--pipeline", "none"),
        command(*options, "--out", tmp_path / "alone"),
    ):
        ended(run)
    equal_curves(out, tmp_path / "alone")


def interrupted(ranks: list[Program], asked: list[Program]) -> str:
    """Interrupt one rank, or all as a terminal does; when all have saved and ended, return what the first said."""
    for rank in asked:
        rank.send_signal(signal.SIGINT)
    said, *_ = [ended(rank, 130) for rank in ranks]
    return said


def test_stages_are_sharded_over_the_ranks_that_are_left(tmp_path: Path, book: Path):
    options = [*QUICK, "--data", book, "--batch", 8, "--steps", 8]
    words = ["--stage", 2, "--pipeline", "one_f_one_b", "--stages", 2, "--accumulate", 2]
    said, *_ = map(ended, as_ranks(4, *options, *words, "--out", tmp_path / "staged"))
    assert "4 ranks of cpu, stage 2, one_f_one_b through 2 stages" in said
    ended(command(*options, "--accumulate", 4, "--out", tmp_path / "alone"))
    equal_curves(tmp_path / "staged", tmp_path / "alone")


def test_a_run_in_stages_that_lost_ranks_is_started_again_and_equals_one_that_did_not(tmp_path: Path, book: Path):
    words = "--quick --steps 60 --save-every 12 --eval-every 30 --sample 3 --pipeline zb_h1 --stages 2"
    options = [*words.split(), "--dtype", "float32", "--data", book]  # auto: what it measures to be the fastest
    out = tmp_path / "killed"
    killed = command(*options, "--ranks", 2, "--restarts", 1, "--out", out)
    until(lambda: logged(out) > 12, killed)
    first = ranks_of(killed)
    os.kill(first[1], signal.SIGKILL)
    until(lambda: set(first).isdisjoint(then := ranks_of(killed)) and len(then) == 2, killed)
    second, begun = ranks_of(killed), logged(out)
    until(lambda: logged(out) != begun, killed)
    os.kill(second[0], signal.SIGKILL)
    said = ended(killed, 128 + signal.SIGKILL)
    assert "rank 1 was lost" in said
    assert "train_gpt, rank 1: rank 0 was lost" in said
    assert "rank 0 was ended by SIGKILL" in said
    assert not any(map(is_running, first + second))
    for rank in [*as_ranks(2, "--resume", out), *as_ranks(2, *options, "--out", tmp_path / "whole")]:
        ended(rank)
    assert lines(out) == lines(tmp_path / "whole")


PIPELINE = ["--pipeline", "one_f_one_b", "--stages", "2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stages", "2"], ["only a pipeline has stages", "--pipeline one_f_one_b --stages 2"]),
        (["--pipeline", "zb_h1"], ["do not divide among the ranks", "--stages 0", "a positive multiple of 1"]),
        (["--pipeline", "zb_v", "--stages", "3"], ["do not divide among the ranks", "a positive multiple of 2"]),
        (PIPELINE, ["the ranks do not divide into pipelines", "--ranks 1", "a multiple of 2 ranks"]),
        ([*PIPELINE, "--ranks", "3"], ["the ranks do not divide into pipelines", "--ranks 3"]),
        ([*PIPELINE, "--ranks", "6"], ["cannot share the batch evenly", "4 windows for 3 ranks"]),
        ([*PIPELINE, "--ranks", "2", "--accumulate", "3"], ["3 microbatches of 4 rows", "a divisor of 4"]),
        (["--pipeline", "gpipe", "--stages", "8", "--ranks", "8"], ["fewer layers than stages", "5 layers, 8 stages"]),
        (
            ["--pipeline", "dualpipe_v", "--stages", "4", "--ranks", "2", "--accumulate", "2"],
            ["too few microbatches", "num_microbatches >= 4"],
        ),
        (["--pipeline", "zb_h3", "--stages", "2"], ["invalid choice: 'zb_h3'", "zb_h2"]),
    ],
)
def test_what_no_pipeline_can_run_is_refused_before_ranks_are_started(
    words: list[str], said: list[str], book: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    out = tmp_path / "run"
    try:
        code = train_gpt.main(["--quick", "--data", str(book), "--out", str(out), *words])
    except SystemExit as end:
        code = end.code
    shown = capfd.readouterr().err
    assert code == 2
    assert all(part in shown for part in said), shown
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "num_ranks", "num_microbatches"),
    [
        ("--batch 8 --ranks 2 --pipeline zb_h1 --stages 2", 2, 8),
        ("--batch 8 --ranks 4 --pipeline zb_h1 --stages 2", 2, 4),
        ("--batch 12 --ranks 2 --pipeline zb_h1 --stages 2", 2, 6),
        ("--batch 12 --ranks 2 --pipeline zb_v --stages 4", 2, 6),
        ("--batch 64 --ranks 3 --pipeline interleaved --stages 6", 3, 8),
        ("--batch 64 --ranks 2 --pipeline zb_h1 --stages 2 --accumulate 1", 2, 1),
        ("--batch 64 --ranks 2", 1, 1),
        ("--batch 64 --ranks 2 --accumulate 4", 1, 4),
    ],
)
def test_a_pipeline_takes_four_microbatches_a_rank_or_what_divides_the_rows(
    words: str, num_ranks: int, num_microbatches: int
):
    options: argparse.Namespace = train_gpt.parse(words.split())
    assert (pipelines.num_ranks(options), pipelines.num_microbatches(options)) == (num_ranks, num_microbatches)


@pytest.mark.parametrize(
    ("cores", "words", "number"),
    [(1, "", 2), (2, "", 2), (3, "", 2), (4, "", 4), (8, "", 4), (8, "--batch 16", 8), (8, "--accumulate 2", 8)],
)
def test_ranks_left_open_are_whole_pipelines_of_two_microbatches_a_rank_at_least(
    cores: int, words: str, number: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ranks, "num_cores", lambda: cores)
    words = f"--ranks 0 --device cpu --batch 8 --pipeline zb_h1 --stages 2 {words}"
    assert train_gpt.parse(words.split()).ranks == number
