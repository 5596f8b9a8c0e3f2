"""Batches of easy samples first: a function of key, number and size, in distribution DeepSpeed's."""

import json
import math
import pickle
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import fds
from fds.data import CurriculumSampler, DistributedLoader
from fds.errors import DataError
from tests.data.loaders import Numbers, stream_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/curriculum_samples.json").read_text())
LENGTHS, RARITIES = map(np.array, GOLDEN["values"].values())


def sampler_of(sections, key=0, metrics=GOLDEN["values"]):
    configs = {name: section["schedule_config"] for name, section in sections.items()}
    return CurriculumSampler(
        {name: metrics[name] for name in sections},
        {name: fds.schedules.fixed_discrete(c["difficulty"], c["max_step"]) for name, c in configs.items()},
        key=key,
        difficulty={name: section["difficulty_type"] for name, section in sections.items()},
        clustering={name: section["clustering_type"] for name, section in sections.items()},
    )


CASES = {case["name"]: case for case in GOLDEN["cases"]}


def differs(first, second):
    """Return by how many standard deviations chi-squared of two samples is above its mean."""
    first, second = np.asarray(first, float), np.asarray(second, float)
    both = first + second
    few = both < 10  # of rare numbers a bin together
    first, second = ([*x[~few], x[few].sum()] for x in (first, second))
    both = np.add(first, second)
    first, second, both = (np.asarray(x)[both > 0] for x in (first, second, both))
    shares = math.sqrt(second.sum() / first.sum())
    chi, freedom = ((first * shares - second / shares) ** 2 / both).sum(), len(both) - 1
    return (chi - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


@pytest.mark.parametrize("name", CASES)
def test_samples_are_drawn_as_often_as_by_deepspeed(name):
    """Where it draws none neither do we; chi-squared of the others, and of the rows of a batch in the first cluster."""
    case, size, times, keys = CASES[name], GOLDEN["rows"], 10, 6  # rows of a batch are draws of which any 16 are alike
    phases = GOLDEN["phases"]
    drawn, easiest = np.zeros((3, 100), int), np.zeros((3, size + 1), int)
    for key in range(keys):
        sampler = sampler_of(case["metrics"], key)
        first = sampler.rows(0, 4000)
        for phase, (begin, end) in enumerate(pairwise(phases)):
            for batch in range(begin, end):
                rows = sampler.rows(batch, size * times)
                drawn[phase] += np.bincount(rows, minlength=100)
                easiest[phase] += np.bincount(np.isin(rows, first).reshape(times, size).sum(1), minlength=size + 1)
    for ours, theirs in zip([*drawn, *easiest], [*case["drawn"], *case["easiest"]], strict=True):
        assert ((ours > 0) == (np.array(theirs) > 0))[np.array(theirs) + ours > 9].all()
        assert differs(ours, theirs) < 4


def test_chi_squared_sees_other_draws():
    assert differs([90, 110, 100], [300, 300, 300]) < 1 < 10 < differs([60, 140, 100], [300, 300, 300])


@pytest.mark.parametrize("name", ["value", "percentile", "intersection", "whole"])
def test_a_batch_does_not_depend_on_those_that_were_asked_for_before(name, monkeypatch):
    monkeypatch.setattr("fds.data.curriculum._BLOCK", 64)  # so that there are many
    sections = CASES[name]["metrics"]
    in_order = sampler_of(sections)
    batches = [in_order.rows(batch, 16).tolist() for batch in range(40)]
    for batch in (39, 3, 13, 14, 0, 25):
        assert sampler_of(sections).rows(batch, 16).tolist() == batches[batch]
        assert in_order.rows(batch, 16).tolist() == batches[batch]
    in_order.rows(2, 5)  # another size disturbs nothing
    assert pickle.loads(pickle.dumps(in_order)).rows(30, 16).tolist() == batches[30]
    assert sampler_of(sections, key=1).rows(39, 16).tolist() != batches[39]


@pytest.mark.parametrize("name", ["value", "intersection"])
def test_a_cluster_is_used_up_before_any_of_it_comes_again(name, monkeypatch):
    monkeypatch.setattr("fds.data.curriculum._BLOCK", 64)
    sampler = sampler_of(CASES[name]["metrics"])
    counts, seen = np.zeros(100, int), []
    for batch in range(60):
        if batch in GOLDEN["phases"]:
            now = set(sampler.rows(batch, 4000))
            seen.append(sorted(now - set(chain(*seen))))
        counts += np.bincount(sampler.rows(batch, 16), minlength=100)
        assert all(np.ptp(counts[cluster]) <= 1 for cluster in seen if cluster)
    assert sum(map(len, seen)) == 100


def test_orders_never_change():
    sampler = CurriculumSampler({"length": LENGTHS}, {"length": lambda step: 3 + step}, key=1)
    assert sampler.rows(20, 6).tolist() == ORDER


ORDER = [80, 39, 92, 68, 30, 73]


def test_difficulties_are_those_of_the_next_step_and_what_came_in_stays():
    falling = lambda step: [5, 9, 2][min(step, 3) - 1]
    sampler = CurriculumSampler({"length": LENGTHS}, {"length": falling})
    assert [sampler.difficulties(batch) for batch in (0, 1, torch.tensor(2))] == [{"length": x} for x in (5, 9, 2)]
    assert [LENGTHS[sampler.rows(batch, 500)].max() for batch in range(3)] == [5, 9, 9]


def test_hundredths_are_exact_and_of_any_number_of_samples():
    values = np.arange(7.0)
    for percent, count in ((15, 1), (28, 1), (28.6, 2), (100, 7), (400, 7), (float("inf"), 7), (np.float32(28.5), 1)):
        sampler = CurriculumSampler({"x": values}, {"x": lambda step, p=percent: p}, difficulty="percentile")
        assert sorted(set(sampler.rows(0, 300))) == list(range(count))


def test_metrics_are_read_from_what_was_analysed_and_stay_there(tmp_path):
    fds.data.analyse(LENGTHS, {"length": int}, tmp_path)
    schedules = {"length": lambda step: step}
    sampler = CurriculumSampler(tmp_path, schedules)
    assert isinstance(sampler._samples, np.memmap) and len(pickle.dumps(sampler.metrics)) < 300
    expected = CurriculumSampler({"length": torch.tensor(LENGTHS)}, schedules).rows(9, 50).tolist()
    read = {"length": fds.data.read_metric(tmp_path, "length")}
    for other in (sampler, CurriculumSampler(read, schedules)):
        assert other.rows(9, 50).tolist() == expected


@pytest.mark.parametrize("name", ["value", "intersection"])
def test_a_loader_gives_the_same_rows_on_any_number_of_ranks_and_by_workers(name):
    sampler = sampler_of(CASES[name]["metrics"])
    loader = DistributedLoader(Numbers(100), 12, sampler=sampler)
    rows = stream_of(loader, 20)
    assert rows == [sampler.rows(batch, 12).tolist() for batch in range(20)]
    assert (len(loader), loader.starting(10).epoch, loader.next_epoch().start) == (8, 1, 8)
    shares = fds.simulate(
        lambda: stream_of(DistributedLoader(Numbers(100), 12, fds.mesh(dp=-1)["dp"], sampler=sampler), 20), 3
    )
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == rows
    working = DistributedLoader(Numbers(100), 12, sampler=sampler, num_workers=2, start=3)
    assert [batch.tolist() for batch in working] == rows[3:8]


GOOD = {"metrics": {"x": [1, 2, 3]}, "schedules": {"x": lambda step: 2}}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"metrics": {"y": [1, 2]}}, "metrics"),
        ({"metrics": None}, "metrics"),
        ({"metrics": {"x": [[1, 2]]}}, "metrics['x']"),
        ({"metrics": {"x": []}}, "metrics['x']"),
        ({"metrics": {"x": ["a"]}}, "metrics['x']"),
        ({"metrics": {"x": [1.0, float("nan")]}}, "metrics['x']"),
        ({"metrics": "/nowhere"}, "metrics['x']"),
        ({"schedules": {}}, "schedules"),
        ({"schedules": {"x": 2}}, "schedules"),
        ({"schedules": {"x": lambda step: None}}, "schedules['x']"),
        ({"schedules": {"x": lambda step: "hard"}}, "schedules['x']"),
        ({"schedules": {"x": lambda step: float("nan")}}, "schedules['x']"),
        ({"schedules": {"x": lambda step: torch.ones(2)}}, "schedules['x']"),
        ({"schedules": {"x": lambda step: 0}}, "schedules"),
        ({"schedules": {"x": lambda step: -float("inf")}, "difficulty": "percentile"}, "schedules"),
        ({"difficulty": "values"}, "difficulty"),
        ({"difficulty": {"y": "value"}}, "difficulty"),
        ({"clustering": 3}, "clustering"),
        (
            {
                "metrics": {"x": [1, 2], "y": [1, 2]},
                "schedules": dict.fromkeys("xy", lambda step: 2),
                "folder": "/nowhere",
            },
            "folder",
        ),
        ({"metrics": {"x": [1, 2], "y": [1]}, "schedules": dict.fromkeys("xy", lambda step: 2)}, "metrics"),
        ({"metrics": {"x": [1, 9], "y": [9, 1]}, "schedules": dict.fromkeys("xy", lambda step: 2)}, "schedules"),
    ],
)
def test_what_is_no_curriculum_is_refused(wrong, where):
    with pytest.raises(DataError) as refused:
        CurriculumSampler(**{**GOOD, **wrong})
    assert refused.value.where == where


def test_a_schedule_that_fails_later_is_refused_then():
    sampler = CurriculumSampler({"x": [1, 2]}, {"x": lambda step: 2 if step < 3 else None})
    with pytest.raises(DataError, match="None at step 3"):
        sampler.rows(2, 4)
    assert len(sampler.rows(1, 4)) == 4


def test_a_schedule_that_failed_once_leaves_nothing_half_done():
    fails = [True]

    def second(step):
        if step == 2 and fails:
            raise RuntimeError(fails.pop())
        return 9

    def sampler():
        return CurriculumSampler({"a": range(9), "b": range(9)}, {"a": lambda step: 4 * step, "b": second})

    interrupted = sampler()
    with pytest.raises(RuntimeError):
        interrupted.rows(1, 40)
    assert interrupted.rows(1, 40).tolist() == sampler().rows(1, 40).tolist()
    assert set(interrupted.rows(1, 400)) == set(range(9))


@pytest.mark.parametrize(("level", "want"), [(np.float32(50), 2), (math.inf, 5), (torch.tensor(60.0), 3)])
def test_hundredths_may_be_any_number(level, want):
    sampler = CurriculumSampler({"x": [3, 1, 2, 5, 4]}, {"x": lambda step: level}, difficulty="percentile")
    assert len(set(sampler.rows(0, 50).tolist())) == want


@pytest.mark.parametrize("level", [-math.inf, 10**400])
def test_difficulties_without_end_are_refused(level):
    with pytest.raises(DataError):
        CurriculumSampler({"x": [3, 1, 2]}, {"x": lambda step: level}, difficulty="percentile")


def test_what_are_no_counts_is_refused_and_so_is_a_damaged_order(tmp_path):
    sampler = CurriculumSampler({"x": [3, 1, 2]}, {"x": lambda step: 9})
    for wrong in (lambda: sampler.rows(0, 0), lambda: sampler.rows(-1, 2), lambda: sampler.num_batches(0)):
        with pytest.raises(DataError, match="not a count"):
            wrong()
    fds.data.analyse([[1], [1, 2], [1, 2, 3]], {"x": len}, tmp_path, show=False)
    order = np.load(tmp_path / "x.order.npy", mmap_mode="r+")
    order[:] = 90
    order.flush()
    with pytest.raises(DataError, match="the order is damaged"):
        CurriculumSampler(tmp_path, {"x": lambda step: 9}).rows(0, 4)
