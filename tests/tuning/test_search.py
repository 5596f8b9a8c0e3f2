"""A search on two ranks, each process of it real; what came of it is read again from its journal."""

import json
import math
import random

import pytest

import fds
from fds.errors import FdsError
from fds.tuning import Budget, Report, Row, Space
from fds.tuning.places import Here
from fds.tuning.prediction import Prediction, fit
from fds.tuning.processes import Ended
from fds.tuning.search import room_of
from tests.tuning.problem import allows, batch, fail, layers, recipe, sleep

KINDS = ["whole", "sharded", "killed", "refused", "less", "piped"]
UNNAMED = lambda: 0  # which no process finds by its name
MEMORY = 60_000  # above what the sharded one holds, below the whole one


def search(journal, **kwargs):
    loss = layers()
    space = Space(recipe, [{"dp": 2}, {"pp": 2}], {"kind": KINDS}, allows)
    options = {"budget": Budget(measure=0.01, limit=120.0), "memory": MEMORY, "show": None, **kwargs}
    return fds.tune(loss, loss.init, batch(), space=space, journal=journal, **options)


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    """Return the journal of a search that has tried all that can be."""
    path = tmp_path_factory.mktemp("tune") / "journal.jsonl"
    search(path, order="ranking")
    search(path, order="grid")
    return path


def outcomes(report):
    return {row.candidate.choices["kind"]: row.outcome for row in report.rows}


def test_what_does_not_fit_or_run_is_a_result(journal):
    report = search(journal, order="grid")
    assert outcomes(report) == {
        "whole": "does not fit", "sharded": "tried", "killed": "died", "refused": "refused", "less": "tried",
        "piped": "tried",
    }  # fmt: skip
    why = {row.candidate.choices["kind"]: row.why for row in report.rows}
    assert "bytes, and a rank has 60,000" in why["whole"] and "no such kind" in why["refused"]
    assert why["killed"] == "rank 1: ended by SIGKILL (out of memory?)"


def test_bytes_and_seconds_are_predicted(journal):
    """Also of what the ranking does not try, since it is expected to be slower."""
    measured = {row.candidate.key: row.num_bytes for row in search(journal, order="grid").rows}
    rows = [row for row in search(journal).rows if measured[row.candidate.key]]
    assert len(rows) == 3
    for row in rows:
        assert row.footprint is not None and row.prediction is not None
        assert row.footprint.is_whole and row.footprint.num_bytes == measured[row.candidate.key]
        assert min(row.prediction.computed, row.prediction.messages) > 0


def test_a_journal_takes_the_place_of_trials(journal, monkeypatch):
    monkeypatch.setattr(Here, "run", None)  # which would raise
    before = journal.read_text()
    report = search(journal, order="grid")
    assert report.best.measured == min(row.measured for row in report.rows if row.measured)
    assert json.loads(report.to_json())["choices"] == report.best.candidate.choices
    assert "2, kind=" in str(report).splitlines()[1] and "does not fit" in report._repr_html_()
    assert journal.read_text() == before


def test_what_is_told_of_a_candidate_last_counts(journal, monkeypatch, tmp_path):
    answers = [[1.0, 9.0], [2.0, 9.0], [3.0, 0.1], [1.0, 0.5], "refused later"]  # of a third there is nothing later
    space = Space(recipe, {"dp": 2}, {"kind": ["whole", "sharded", "less"]})
    weighed = {"num_bytes": 1, "is_whole": True, "unknown": ""}
    ends = {"weigh": Ended(((weighed,) * 3,), "done"), "rehearse": Ended((tuple(answers),), "done")}
    monkeypatch.setattr(Here, "run", lambda self, work, *_, **__: ends[work.__name__])
    options = {"space": space, "budget": Budget(seconds=1e-9), "show": None}
    report = fds.tune(layers(), layers().init, batch(), **options)
    rows = {row.candidate.choices["kind"]: row for row in report.rows}
    assert rows["whole"].prediction == Prediction(1.0, 0.5) and rows["less"].prediction == Prediction(3.0, 0.1)
    assert (rows["sharded"].outcome, rows["sharded"].why) == ("refused", "refused later")


def test_a_line_that_was_not_written_whole_is_done_again(journal, tmp_path):
    torn = tmp_path / "torn.jsonl"
    text = journal.read_text()
    torn.write_text(text + '{"of": "try ')
    assert outcomes(search(torn)) == outcomes(search(journal))
    assert torn.read_text() == text


def test_a_journal_of_another_search_is_refused(journal, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(journal.read_text().replace('"problem": "', '"problem": "0'))
    with pytest.raises(FdsError, match="another search"):
        search(other)
    other.write_text("{}\n")
    with pytest.raises(FdsError, match="another search"):
        search(other)


def test_orders_try_as_many_as_the_budget_says(journal):
    one = Budget(trials=1, measure=0.01)
    of_grid = search(journal, order="grid", budget=one)
    assert outcomes(of_grid)["sharded"] == "tried" and outcomes(of_grid)["less"] == "not tried"
    tried = {
        key: [
            k
            for k, v in outcomes(search(journal, order="random", key=key, budget=one)).items()
            if v in ("tried", "died")
        ]
        for key in range(8)
    }
    assert {len(kinds) for kinds in tried.values()} == {1} and len({kinds[0] for kinds in tried.values()}) > 1
    patient = Budget(patience=1, measure=0.01)  # of the trials in the order of a grid the second dies
    assert outcomes(search(journal, order="grid", budget=patient))["less"] == "not tried"
    none = search(journal, budget=Budget(seconds=1e-9, measure=0.01))
    with pytest.raises(FdsError, match="no candidate has run"):
        _ = none.best


class Study:
    """What Optuna's study is asked and told, drawing at random."""

    def __init__(self):
        self.random, self.told = random.Random(0), []

    def ask(self):
        return self

    def suggest_categorical(self, name, values):
        return self.random.choice(values)

    def tell(self, trial, seconds):
        self.told.append(seconds)


def test_a_study_says_what_to_try(journal):
    study = Study()
    report = search(journal, order=study)
    assert min(study.told) == report.best.measured and math.inf in study.told
    assert outcomes(report)["killed"] == "died"


@pytest.mark.peers
def test_a_study_of_optuna_says_what_to_try(journal):
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    report = search(journal, order=study)
    assert study.best_value == report.best.measured
    assert study.best_params["kind"] == report.best.candidate.choices["kind"]
    assert outcomes(report)["killed"] == "died"


def test_ranks_that_hang_are_ended():
    ended = Here(1).run(sleep, (), num_ranks=1, limit=2.0)
    assert (ended.how, ended.why) == ("hung", "rank 0: 0 of 1 ranks not done after 2 s")


def test_the_error_of_the_rank_that_failed_first_is_told(fresh):
    ended = Here(2).run(fail, (), num_ranks=2, limit=120.0)
    assert (ended.how, ended.why) == ("failed", "rank 1: ValueError: of the second")


def test_what_does_not_pickle_is_refused():
    for value in (lambda: 0, UNNAMED):
        with pytest.raises(FdsError, match="does not pickle"):
            Here(1).run(sleep, (value,), num_ranks=1, limit=1.0)


def test_what_was_not_tried_is_ranked_by_the_factors_of_the_trials():
    space = Space(recipe, {"dp": 2}, {"kind": KINDS[:2]})
    first, second = space
    rows = (
        Row(first, "not tried", prediction=Prediction(1.0, 3.0)),
        Row(second, "not tried", prediction=Prediction(3.0, 0.0)),
    )
    assert Report(rows, (1.0, 1.0), 8, 1.0, space).rows[0] is rows[1]
    assert Report(rows, (1.0, 0.1), 8, 1.0, space).rows[0] is rows[0]


def test_a_container_bounds_what_ranks_may_hold(monkeypatch, tmp_path):
    monkeypatch.setattr("fds.tuning.search.CGROUP", tmp_path)
    free = room_of("cpu", 1)
    (tmp_path / "memory.max").write_text("max\n")
    assert room_of("cpu", 1) == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("2000000\n")
    assert room_of("cpu", 2) == 1_000_000


def test_factors_stay_near_one_with_few_trials():
    a, b = fit([(Prediction(1.0, 1.0), 3.0)])
    assert 1 < a < 1.5 and a == pytest.approx(b)
    assert fit([]) == (1.0, 1.0)
