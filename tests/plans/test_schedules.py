"""Schedules: what they print, what torch's tables say, and what their papers promise."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st
from torch.distributed.pipelining import schedules as torchs

from fds import plans
from fds.errors import PlanError
from fds.plans import Op, Plan
from tests.plans.cases import SCHEDULES, TRAINING, made_by, peaks, sizes, spans

GOLDEN = sorted(Path(__file__).with_name("golden").glob("*.txt"))
CASES = [case for path in GOLDEN for case in path.read_text().split("\n\n")]
SMALL = [(p, m) for p in (1, 2, 3, 4, 6) for m in range(1, 17)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.partition("\n")[0])
def test_it_prints_as_it_did(case):
    call, _, text = case.strip().partition("\n")
    name, p, m = re.fullmatch(r"(.+)\((\d+), (\d+)\)", call).groups()
    plan = SCHEDULES[name](int(p), int(m))
    assert str(plan) == text
    assert Plan.parse(text) == plan


def test_every_schedule_has_its_golden_file():
    seen = {case.strip().partition("\n")[0].rpartition("(")[0] for case in CASES}
    assert seen == set(SCHEDULES) - {"interleaved(1)"}


@given(made_by(SCHEDULES))
def test_stages_take_microbatches_in_order(plan):
    sums = lambda op: op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    carries = lambda op: op in (Op.BACKWARD, Op.BACKWARD_INPUT)
    for stage in range(plan.num_stages):
        row = [a for row in plan.rows for a in row if a.stage == stage]
        everything = list(range(plan.num_microbatches))
        assert [a.microbatch for a in row if a.op is Op.FORWARD] == everything
        assert [a.microbatch for a in row if sums(a.op)] == (everything if plan.trains else [])
        assert [a.microbatch for a in row if carries(a.op)] == (everything if plan.trains else [])


@given(made_by(["zb_v", "dualpipe_v"]))
def test_a_v_turns_at_the_last_rank(plan):
    p = plan.num_ranks
    assert [plan.stages_of(rank) for rank in range(p)] == [(r, 2 * p - 1 - r) for r in range(p)]


@given(made_by(["interleaved(3)"]))
def test_interleaved_goes_round_and_round(plan):
    p = plan.num_ranks
    assert [plan.stages_of(rank) for rank in range(p)] == [(r, p + r, 2 * p + r) for r in range(p)]


def test_of_one_chunk_interleaved_is_1f1b():
    assert plans.interleaved(1)(4, 8) == plans.one_f_one_b(4, 8)


# torch's tables


def theirs(rows) -> list[list[str]]:
    """Return torch's rows in our letters: its I is our B, its B our BW; a pair that overlaps is two actions."""
    ours = {"F": "F", "I": "B", "W": "W", "B": "BW"}
    flat = lambda action: action.sub_actions or [action]
    return [
        [f"{a.stage_index}{ours[a.computation_type.value]}{a.microbatch_index}" for x in row if x for a in flat(x)]
        for row in rows
    ]


def ours(plan: Plan) -> list[list[str]]:
    return [list(map(str, row)) for row in plan.rows]


def asked(schedule, p: int, m: int, chunks: int = 2, **more):
    me = SimpleNamespace(pp_group_size=p, n_local_stages=chunks, num_stages=chunks * p, _n_microbatches=m, **more)
    return theirs(schedule._calculate_single_rank_operations(me, rank) for rank in range(p))


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_is_torchs(chunks):
    schedule = torchs.ScheduleInterleaved1F1B
    for p, m in sizes("interleaved", range(1, 6), range(1, 17)):
        assert ours(plans.interleaved(chunks)(p, m)) == asked(schedule, p, m, chunks, microbatches_per_round=p), (p, m)


def test_one_f_one_b_is_torchs():
    for p, m in SMALL:
        rows = []
        for rank in range(p):
            warm, here = min(m, p - rank - 1), lambda _, rank=rank: rank
            rows.append(torchs._get_1f1b_rank_ops(1, p, warm, m - warm, warm, rank, here, here))
        assert ours(plans.one_f_one_b(p, m)) == theirs(rows), (p, m)


def test_zb_h1_is_torchs_zero_bubble_of_one_chunk():
    for p, m in SMALL:
        schedule = torchs.ScheduleInterleavedZeroBubble
        assert ours(plans.zb_h1(p, m)) == asked(schedule, p, m, 1, microbatches_per_round=m), (p, m)


def test_zb_v_is_torchs():
    for p, m in SMALL:
        assert ours(plans.zb_v(p, m)) == asked(torchs.ScheduleZBVZeroBubble, p, m), (p, m)


def test_dualpipe_v_is_torchs():
    for p, m in sizes("dualpipe_v", range(1, 6), range(1, 17)):
        assert ours(plans.dualpipe_v(p, m)) == asked(torchs.ScheduleDualPipeV, p, m), (p, m)


# what the papers promise

ranks, rounds = st.integers(1, 6), st.integers(1, 3)
times = st.integers(1, 5)


@given(ranks, st.integers(1, 15))
def test_peaks_of_live_microbatches(p, m):
    every = range(p)
    assert peaks(plans.gpipe(p, m), "W") == [m for _ in every]
    assert peaks(plans.one_f_one_b(p, m), "W") == [min(m, p - r) for r in every]
    assert peaks(plans.zb_h1(p, m), "W") == [min(m, p) for _ in every]
    assert peaks(plans.zb_h1(p, m), "B") == peaks(plans.one_f_one_b(p, m), "B")
    assert peaks(plans.zb_h2(p, m), "W") == [min(m, 2 * p - 1) for _ in every]
    assert peaks(plans.zb_h2(p, m), "B") == [min(m, 2 * (p - r) - 1) for r in every]
    assert max(peaks(plans.zb_v(p, m), "W")) <= min(2 * m, 2 * p)


@given(ranks, rounds)
def test_peaks_of_those_that_need_more_microbatches(p, n):
    assert peaks(plans.zb_v(p, 2 * p - 2 + n), "W") == [2 * p] * p
    assert peaks(plans.dualpipe_v(p, 2 * p - 1 + n), "W") == [2 * p + 1] * p
    for v in (2, 3):
        most = [min(v * n * p, (v - 1) * p + 2 * (p - r - 1) + 1) for r in range(p)]
        assert peaks(plans.interleaved(v)(p, n * p), "W") == most


@given(ranks, rounds, times, times, times)
def test_bubbles_of_unequal_times(p, n, f, b, w):
    m = n * p
    for schedule in (plans.gpipe, plans.one_f_one_b, plans.interleaved(2), plans.interleaved(3)):
        assert spans(schedule(p, m), f, b, w)[0] == (p - 1) * (f + b + w)


@given(ranks, rounds, times, times)
def test_the_bubble_of_zb_h1(p, n, f, more):
    m, b = n * p, f + more - 1
    for w in range(1, f + 1):  # as in the paper, W takes no longer than F and B
        assert spans(plans.zb_h1(p, m), f, b, w)[0] == (p - 1) * (f + b - w)


@given(ranks, st.integers(0, 6))
def test_zero_bubble_is_zero(p, more):
    for schedule in (plans.zb_h2, plans.zb_v):
        assert spans(schedule(p, 2 * p - 1 + more))[1] == 0


@given(ranks, st.integers(0, 6))
def test_the_bubble_of_dualpipe_v(p, more):
    assert spans(plans.dualpipe_v(p, 2 * p + more))[1] == p - 1


def test_zero_bubble_is_not_zero_for_fewer_microbatches():
    assert spans(plans.zb_h2(4, 6))[1] > 0


# what is refused


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "2", None])
def test_what_is_no_count_is_refused(name, bad):
    for arguments, culprit in (((bad, 4), "num_ranks"), ((1, bad), "num_microbatches")):
        with pytest.raises(PlanError) as refused:
            SCHEDULES[name](*arguments)
        assert refused.value.where == name
        assert refused.value.got == f"{culprit}={bad!r}"
        assert refused.value.want == f"{culprit} >= 1"


@pytest.mark.parametrize(
    ("schedule", "arguments", "got", "want"),
    [
        (plans.dualpipe_v, (3, 5), "num_ranks=3, num_microbatches=5", "num_microbatches >= 6"),
        (plans.interleaved(2), (3, 4), "num_ranks=3, num_microbatches=4", "a multiple of 3 microbatches"),
        (plans.data_parallel, (2, 4), "num_ranks=2", "num_ranks=1"),
        (plans.interleaved, (0,), "chunks=0", "chunks >= 1"),
    ],
)
def test_sizes_that_a_schedule_does_not_take(schedule, arguments, got, want):
    with pytest.raises(PlanError) as refused:
        schedule(*arguments)
    assert (refused.value.got, refused.value.want) == (got, want)
    assert (getattr(schedule, "__name__", None) or repr(schedule)) == refused.value.where


def test_an_interleaved_schedule_is_a_value():
    assert plans.interleaved(2) == plans.interleaved(2) != plans.interleaved(3)
    assert repr(plans.interleaved(2)) == "interleaved(2)"


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_schedule_trains(name):
    assert SCHEDULES[name](1, 2).trains
