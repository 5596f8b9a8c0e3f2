"""What deserves a look: found where it is, and not found where it is not."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fds.reporting.charts import parts
from fds.reporting.findings import findings, spikes
from fds.reporting.record import FORMAT, Record
from fds.reporting.run import RankWait, Run, Table, slices_of
from fds.reporting.series import Points, Series, thin

STEPS = np.arange(1.0, 201.0)


def series(y, x=None, axis="steps"):
    y = np.asarray(y, dtype=float)
    return Series(axis, STEPS[: len(y)] if x is None else x, y, np.full(len(y), np.nan))


def run(plan=(), traces=None, **metrics):
    record = Record(FORMAT, (), schedule="mine", plan=plan)
    found = Run("run", Path("run"), {name: series(y) for name, y in metrics.items()}, record)
    found.traces = {file: slices_of(events) for file, events in (traces or {}).items()}
    return found


def falling(seed=0):
    """Return a loss that falls with noise."""
    return 4 * np.exp(-STEPS / 60) + 1 + 0.1 * np.random.default_rng(seed).normal(size=len(STEPS))


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_no_spike_and_a_jump_is_one(seed):
    loss = falling(seed)
    assert list(spikes(series(loss))) == []
    loss[120:124] += 5.0
    loss[150] += 5.0
    assert list(spikes(series(loss))) == [121.0, 151.0]
    loss[160] = np.nan
    assert list(spikes(series(loss))) == [121.0, 151.0]


def test_a_short_or_constant_loss_has_no_spikes():
    assert list(spikes(series([1.0, 100.0]))) == [] and list(spikes(series(np.ones(200)))) == []


def test_windows_are_cut_and_joined_without_a_seam():
    y = np.ones(80_000)
    at = [100, 32 + (1 << 15) - 1, 32 + (1 << 15), 70_000]
    y[at] = 9.0
    assert list(spikes(series(y, x=np.arange(80_000.0)))) == [100, at[1], 70_000]  # two in a row are one


WAITING = {"elapsed_time_ms_call": [10.0] * 4, "elapsed_time_ms_wait": [3.0] * 4}
SLICE = {"ph": "X", "ts": 0.0}


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (run(loss=[1.0, np.nan, np.inf]), "problem: loss is not finite at 2 steps: 2, 3"),
        (run(grad_norm=[np.inf, 1.0]), "note: grad_norm is not finite at step 1"),
        (run(skipped=[0.0, 1.0, 0.0, 1.0]), "note: the update was skipped at 2 steps: 2, 4 (50.0% of those logged)"),
        (run(at_minimum_scale=[0.0, 1.0]), "problem: the loss scale is as small as it may be at step 2 (50.0%"),
        (run(loss=[*np.ones(60), 3.0]), "problem: the loss jumps at step 61"),
        (run(eval_loss=[3.0, 2.0, 2.5]), "note: eval_loss was lowest with 2 at step 2, and is 2.5 now"),
        (run(tokens_per_s=[100.0] * 150 + [50.0] * 50), "note: tokens_per_s fell: 50 in the last quarter"),
        (run(**WAITING), "note: the first rank waits for messages, and so for other ranks, 30% of a call"),
        (run(plan=("0F0 0BW0", "1F0 1BW0")), "note: the bubble of mine is 50% of the time"),
        (
            run(
                traces={
                    "t.json": [
                        {**SLICE, "name": "step", "pid": rank, "dur": 1e3 + 500.0 * (rank == 2)} for rank in range(4)
                    ]
                }
            ),
            "note: by t.json these ranks work longer than the typical one: rank 2 (1.50 times)",
        ),
    ],
    ids=lambda one: "" if isinstance(one, Run) else one[:24],
)
def test_it_is_found(one, words):
    [found] = findings(one)
    assert f"{found.level}: {found.what}".startswith(words)


@pytest.mark.parametrize(
    "one",
    [
        run(loss=falling()),
        run(skipped=[0.0] * 9),
        run(eval_loss=[3.0, 2.0, 2.01]),
        run(tokens_per_s=[100.0, 90.0] * 100),
        run(elapsed_time_ms_call=[10.0], elapsed_time_ms_wait=[1.0]),
        run(elapsed_time_ms_call=[0.0], elapsed_time_ms_wait=[0.0]),
        run(plan=("nonsense",)),
        run(traces={"t.json": [{**SLICE, "name": "step", "pid": rank, "dur": 1e3 + rank} for rank in range(4)]}),
        run(traces={"t.json": ["x", {}]}),
        run(),
    ],
)
def test_nothing_is_found(one):
    assert findings(one) == []


def test_the_ranks_that_others_wait_for_are_named():
    one = run()
    one.messages = Table(3, (), tuple(RankWait(rank, 9.0, 1.0 if rank == 2 else 8.0) for rank in range(4)))
    assert [found.what for found in findings(one)] == ["the others wait for rank 2: 8.0 ms in the messages compared"]
    one.messages = Table(3, (), tuple(RankWait(rank, 9.0, 7.0 + rank) for rank in range(4)))
    assert findings(one) == []


def test_a_wait_for_messages_is_no_part_of_reducing():
    one = run(elapsed_time_ms_backward_allreduce=[5.0, 7.0], elapsed_time_ms_wait=[3.0, 8.0])
    assert {part: series.y.tolist() for part, series in parts(one).items()} == {
        "reduce": [2.0, 0.0],
        "wait": [3.0, 8.0],
    }


def test_waits_are_no_work_of_a_rank():
    step = [{**SLICE, "name": "step", "pid": rank, "dur": 1e4} for rank in range(3)]
    waits = [{**SLICE, "name": "wait/all_reduce", "pid": rank, "dur": 8e3} for rank in (0, 2)]
    [found] = findings(run(traces={"t.json": step + waits}))
    assert "rank 1 (5.00 times)" in found.what


numbers = st.one_of(st.floats(-1e6, 1e6), st.just(float("nan")), st.just(float("inf")))


@given(st.lists(numbers, min_size=1, max_size=60), st.integers(1, 30))
def test_thinned_points_lose_no_extreme_and_no_mean(y, most):
    made = thin(series(y), most)
    known = np.array(y)[np.isfinite(y)]
    assert len(made["x"]) == len(made["y"]) == min(most, len(y)) and made["x"][-1] == len(y)
    if len(y) > most and len(known):
        low, high = ([v for v in made[name] if v is not None] for name in ("lo", "hi"))
        assert min(low) == pytest.approx(known.min(), rel=1e-5) and max(high) == pytest.approx(known.max(), rel=1e-5)
        ends = np.linspace(0, len(y), most + 1).astype(int)
        parts = [np.array(y)[a:b] for a, b in itertools.pairwise(ends)]
        want = [part[np.isfinite(part)].mean() if np.isfinite(part).any() else None for part in parts]
        assert [v is None for v in made["y"]] == [v is None for v in want]
        pairs = [(v, w) for v, w in zip(made["y"], want, strict=True) if v is not None]
        assert [v for v, _ in pairs] == pytest.approx([w for _, w in pairs], rel=1e-4, abs=1e-4)


@given(st.lists(st.integers(0, 20), max_size=40))
def test_points_that_are_read_again_are_there_once_as_they_were_last(steps):
    points, want = Points("steps"), dict[int, int]()
    for number, x in enumerate(steps):
        points.add(x, number, 0.0)
        want = {**{at: value for at, value in want.items() if at < x}, x: number}
    made = points.series()
    assert dict(zip(made.x.tolist(), made.y.tolist(), strict=True)) == want and list(made.x) == sorted(made.x)
