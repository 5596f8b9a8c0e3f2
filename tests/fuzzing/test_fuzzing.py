"""The fuzzer itself: cases are functions of their numbers, what differs is told, and what is listed is decided."""

import attrs
import pytest

import fds
from fds.config import TrainingConfig
from fds.config.decisions import INTENDED
from tests.fuzzing.cases import STEPS, drawn
from tests.fuzzing.comparing import differences
from tests.fuzzing.listed import LISTED, kind, stage
from tests.fuzzing.training import Run, by_fds

NUMBERS = range(300)


def test_a_case_is_a_function_of_its_number_and_is_taken():
    for number in NUMBERS[:30]:
        case = drawn(number)
        assert case == drawn(number)
        batch = TrainingConfig.of(case.json).resolve(world_size=case.ranks).batch
        sizes = batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps
        assert sizes == (case.rows, case.microbatches)


def test_every_stage_meets_every_dtype_on_one_rank_and_on_two():
    met = {(stage(case), kind(case), case.ranks) for case in map(drawn, NUMBERS)}
    assert len(met) == 4 * 4 * 2


@pytest.mark.parametrize("listed", sorted({one.name for one in LISTED}))
def test_what_is_listed_is_decided(listed):
    assert [one for one in INTENDED if one.deepspeed.startswith(listed)]


def test_what_differs_is_told_and_the_same_is_not():
    case = next(case for case in map(drawn, NUMBERS) if kind(case) == "fp32" and case.ranks == 1 and not case.saved)
    run = fds.simulate(lambda: by_fds(case, None), 1)[0]
    assert len(run.losses) == STEPS and not list(differences(case, run, run, LISTED))
    for field in ("losses", "lrs"):
        values = [*getattr(run, field)[:-1], getattr(run, field)[-1] * 1.01 + 1e-3]
        told = list(differences(case, run, attrs.evolve(run, **{field: values}), LISTED))
        assert [one.split()[0] for one in told] == [field]
    moved = {name: [x + 0.01 for x in values] for name, values in run.params.items()}
    assert len(list(differences(case, run, attrs.evolve(run, params=moved), LISTED))) == len(moved)
    failed = Run([], [], [], [], [], {}, error="it failed")
    assert "it failed" in next(differences(case, run, failed, LISTED))
