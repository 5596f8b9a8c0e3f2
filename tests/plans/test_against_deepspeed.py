"""Ticks, buffers and partitions against values recorded from DeepSpeed; tests/golden/generate.py says how."""

import itertools
import json
from pathlib import Path

import pytest

from fds.errors import PlanError
from fds.plans.deepspeed import EDITIONS, in_ticks, num_buffers, words
from fds.plans.partition import partition_balanced, partition_uniform
from fds.plans.plan import Op, Plan
from fds.plans.schedules import data_parallel, gpipe, inference, one_f_one_b
from tests.scripts import loaded

GOLDEN = Path(__file__).parents[1] / "golden"
STREAMS = json.loads((GOLDEN / "pipeline_schedules.json").read_text())["cases"]
PARTITIONS = json.loads((GOLDEN / "partitions.json").read_text())["cases"]
OURS = {"TrainSchedule": one_f_one_b, "InferenceSchedule": inference, "DataParallelSchedule": data_parallel}
LETTERS = {
    "LoadMicroBatch": "L",
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "S",
    "RecvActivation": "R",
    "SendGrad": "s",
    "RecvGrad": "r",
    "ReduceTiedGrads": "T",
    "ReduceGrads": "G",
    "OptimizerStep": "O",
}


def cases(edition: str, schedule: str) -> list[dict]:
    return [case for case in STREAMS if case["class"] == schedule and edition in case["editions"]]


def letter(word: str) -> str:
    """Turn 'SendGrad(buffer_id=3)' into 's3', and refuse a word that DeepSpeed does not print."""
    name, _, rest = word.removesuffix(")").partition("(")
    assert rest.startswith("buffer_id=") or name in ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")
    return LETTERS[name] + rest.removeprefix("buffer_id=")


def spell(ticks) -> str:
    return " ".join("".join(letter(words(action)) for action in tick) or "." for tick in ticks)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", OURS)
@pytest.mark.parametrize("edition", EDITIONS)
def test_every_stage_does_what_deepspeeds_does_in_every_tick(edition, schedule):
    for case in cases(edition, schedule):
        plan = OURS[schedule](case["num_stages"], case["num_microbatches"])
        streams = in_ticks(plan, edition=edition, schedule=schedule)
        assert [spell(ticks) for ticks in streams] == case["ticks"], case
        assert list(num_buffers(plan, edition=edition, schedule=schedule)) == case["buffers"], case


@pytest.mark.parametrize("edition", EDITIONS)
def test_the_recorded_sizes_are_all_up_to_eight_stages_and_24_microbatches(edition):
    sizes = {(s, m) for s in range(1, 9) for m in range(1, 25)}
    of = lambda schedule: {(case["num_stages"], case["num_microbatches"]) for case in cases(edition, schedule)}
    assert of("TrainSchedule") == of("InferenceSchedule") == sizes
    assert of("DataParallelSchedule") == {(s, m) for s, m in sizes if s == 1}


def test_the_editions_differ_in_the_order_of_exchange_and_in_a_buffer():
    plan = one_f_one_b(2, 4)
    new, old = ([words(action) for action in in_ticks(plan, edition=name)[0][3]] for name in ("0.19.6", "0.3.0"))
    assert new == ["RecvGrad(buffer_id=0)", "SendActivation(buffer_id=1)", "BackwardPass(buffer_id=0)"]
    assert old == ["SendActivation(buffer_id=1)", "RecvGrad(buffer_id=0)", "BackwardPass(buffer_id=0)"]
    assert (num_buffers(plan), num_buffers(plan, edition="0.3.0")) == ((2, 2), (3, 2))


def test_a_plan_says_which_class_gives_it_unless_it_has_one_stage():
    assert in_ticks(inference(3, 2)) == in_ticks(inference(3, 2), schedule="InferenceSchedule")
    assert in_ticks(one_f_one_b(3, 2)) == in_ticks(one_f_one_b(3, 2), schedule="TrainSchedule")
    assert data_parallel(1, 2) == one_f_one_b(1, 2)
    (train,), (data,) = (in_ticks(data_parallel(1, 2), schedule=s) for s in ("TrainSchedule", "DataParallelSchedule"))
    assert (len(train), len(data)) == (4, 2)


def test_another_plan_goes_through_the_same_lowering():
    plan = gpipe(2, 3)
    assert num_buffers(plan) == (3, 3)  # it keeps every microbatch
    streams = in_ticks(plan)
    assert spell(streams[0]) == "L0F0 S0 L1F1 S1 L2F2 S2 . r0B0 . r1B1 . r2B2TGO"
    assert len({len(stream) for stream in streams}) == 1


@pytest.mark.parametrize("plan", [one_f_one_b(5, 7), inference(4, 6), gpipe(3, 5)], ids=["1f1b", "inference", "gpipe"])
def test_every_message_is_received_in_the_tick_in_which_it_is_sent(plan):
    streams = in_ticks(plan)
    for before, after in itertools.pairwise(streams):
        for mine, yours in zip(before, after, strict=True):
            assert those(mine, Op.SEND_ACTIVATION) == those(yours, Op.RECV_ACTIVATION)
            assert those(yours, Op.SEND_GRAD) == those(mine, Op.RECV_GRAD)


def those(tick, op: Op) -> list[int]:
    return [action.microbatch for action in tick if action.op is op]


def test_communication_that_a_plan_already_has_is_made_anew():
    plain = one_f_one_b(2, 2)
    lowered = Plan.of([["0LOAD0", "0F0@3", "0SEND_ACT0", "0F1", "0BW0", "0BW1", "STEP"], plain.rows[1]])
    assert in_ticks(lowered) == in_ticks(plain)


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([["0F0", "0BW0"]], {"edition": "0.4"}, "unknown edition"),
        ([["0F0", "0BW0"]], {"schedule": "TrainSchedul"}, "did you mean 'TrainSchedule'"),
        ([["0F0", "0BW0"]], {"schedule": "InferenceSchedule"}, "does not fit this schedule"),
        ([["0F0"]], {"schedule": "TrainSchedule"}, "does not fit this schedule"),
        ([["0F0"], ["1F0"]], {"schedule": "DataParallelSchedule"}, "does not fit this schedule"),
        ([["0F0", "0B0", "0W0"]], {}, "no split backward"),
        ([["0F0", "1F0"]], {}, "one stage each"),
        ([["1F0"], ["0F0"]], {}, "one stage each"),
        ([["0F0", "0F0"]], {}, "in the plan twice"),
        ([["0F0"], ["1F1", "1F0"]], {}, "rank 1 at 1F1"),
    ],
)
def test_what_deepspeed_cannot_say_is_refused(rows, options, says):
    with pytest.raises(PlanError, match=says):
        in_ticks(Plan.of(rows), **options)


def test_half_a_backward_has_no_word():
    with pytest.raises(PlanError, match="no such instruction"):
        words(Plan.of([["0W0"]]).rows[0][0])


def test_an_empty_plan_has_no_ticks():
    assert in_ticks(Plan.of([[]])) == ((),)


def test_uniform_partitions_are_deepspeeds():
    uniform = [case for case in PARTITIONS if "uniform" in case]
    assert len(uniform) == 300
    for case in uniform:
        assert partition_uniform(case["num_items"], case["num_parts"]) == case["uniform"], case


@pytest.mark.parametrize("minimise", ["spread", "bottleneck"])
def test_balanced_partitions_are_those_of_the_edition(minimise):
    balanced = [case for case in PARTITIONS if "weights" in case]
    assert sum(case["spread"] != case["bottleneck"] for case in balanced) > 1000
    for case in balanced:
        ours = partition_balanced(case["weights"], case["num_parts"], minimise=minimise)
        assert ours == case[minimise], case


@pytest.mark.peers
def test_the_golden_values_are_what_deepspeed_says_now(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    generate = loaded(GOLDEN / "generate.py")
    assert generate.pipeline_cases() == STREAMS
    assert generate.partition_cases() == PARTITIONS
