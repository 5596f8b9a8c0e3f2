"""`record_run`: what a run says of itself, on every rank, or an error on every rank."""

import json
import math

import pytest
import torch

import fds
from fds.errors import FdsError
from fds.reporting import record as records
from fds.reporting.record import read_record
from tests.reporting.runs import plain_step


def test_a_record_says_what_the_step_says(tmp_path):
    step, state = plain_step()
    options = {"lr": 0.1, "betas": (0.9, 0.95), "dtype": torch.float16, "deep": {1: {"nan": math.nan}}}
    fds.record_run(tmp_path / "a" / "b", step, state, config=options, explain="text")
    record, said = read_record(tmp_path / "a" / "b" / "run.json"), step.describe(state)
    assert record.stations == said.stations and record.describe == str(said) and record.num_bytes == said.num_bytes
    assert record.configuration["betas"] == [0.9, 0.95] and record.configuration["dtype"] == "torch.float16"
    assert math.isnan(record.configuration["deep"]["1"]["nan"]) and record.explain == "text"
    assert record.plan == () and record.environment["torch"] == torch.__version__
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["run.json"]


def test_every_start_is_kept_also_one_that_a_later_one_went_back_behind(tmp_path):
    step, state = plain_step()
    for calls in (0, 7, 3, 3):
        fds.record_run(tmp_path, step, fds.State(**{**vars_of(state), "calls": torch.tensor(calls)}))
    assert [start.calls for start in read_record(tmp_path / "run.json").starts] == [0, 7, 3, 3]


def vars_of(state):
    return {name: getattr(state, name) for name in ("step", "calls", "params", "opt", "buffers", "slots", "key")}


def test_one_rank_writes_and_a_directory_that_it_cannot_write_is_an_error_of_all(tmp_path):
    (tmp_path / "file").write_text("")

    def rank(folder):
        step, state = plain_step()
        try:
            fds.record_run(folder, step, state)
        except FdsError as error:
            return error.what, error.where
        return json.loads((folder / "run.json").read_text())["environment"]["ranks"]

    assert fds.simulate(lambda: rank(tmp_path / "run"), 3) == ["3"] * 3
    where = f"record_run, {tmp_path / 'file'}"
    assert fds.simulate(lambda: rank(tmp_path / "file"), 3) == [("the run cannot be recorded", where)] * 3


def test_a_file_of_that_name_that_is_no_record_stays_as_it_is(tmp_path):
    (tmp_path / "run.json").write_text('{"mine": 1}')
    with pytest.raises(FdsError, match="not the record of a run"):
        fds.record_run(tmp_path, *plain_step())
    assert (tmp_path / "run.json").read_text() == '{"mine": 1}'


LOOP: dict = {}
LOOP["loop"] = LOOP


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 3}, "not a step"),
        ({"state": None}, "not a state"),
        ({"directory": 3}, "not a directory"),
        ({"config": [1]}, "not options"),
        ({"config": LOOP}, "options that JSON cannot hold"),
        ({"explain": None}, "not a text"),
        ({"confg": {}}, "confg"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else one,
)
def test_arguments_of_another_kind_are_refused(change, words, tmp_path):
    step, state = plain_step()
    with pytest.raises(FdsError, match=words):
        fds.record_run(**{"directory": tmp_path / "run", "step": step, "state": state, **change})
    assert not (tmp_path / "run").exists()


def test_the_environment_says_less_where_less_can_be_found(tmp_path, monkeypatch):
    monkeypatch.setattr(records.sys, "argv", [str(tmp_path / "train.py"), "--lr", "a b"])
    found = records.describe_environment(torch.device("cpu"), {}, 1)
    assert "commit" not in found and "axes" not in found and found["program"].endswith("train.py --lr 'a b'")
    monkeypatch.setenv("PATH", "")
    assert records.describe_environment(torch.device("cpu"), {"dp": 2}, 2)["axes"] == "dp=2"
