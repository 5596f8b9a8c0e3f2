"""The fuzzer itself: cases are functions of their numbers, what differs is told, and what is listed is decided."""

import attrs
import pytest

import fds
from fds.config import TrainingConfig
from fds.config.decisions import INTENDED
from tests.fuzzing.cases import STEPS, drawn
from tests.fuzzing.comparing import Listed, differences
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


def test_a_listed_difference_excuses_its_fields_behind_the_step_that_it_strikes_and_no_others():
    case = attrs.evolve(drawn(0), saved=0)
    run = Run([1.0] * STEPS, [0.1] * STEPS, [1.0] * STEPS, [None] * (STEPS + 1), [False] * STEPS, {"w": [1.0]})
    listed = (Listed("at step 3", lambda case, run: [3], frozenset(("losses", "norms"))),)

    def told(listed=listed, **changes):
        return [one.split()[0] for one in differences(case, attrs.evolve(run, **changes), run, listed)]

    for step in range(STEPS):
        other = [2.0 if i == step else 1.0 for i in range(STEPS)]
        assert told(losses=other) == ([] if step > 3 else ["losses"])  # that of step 3 is known before its update
        assert told(norms=other) == ([] if step >= 3 else ["norms"])
        assert told((attrs.evolve(listed[0], lasting=False),), norms=other) == ([] if step == 3 else ["norms"])
    assert told(lrs=[0.2] * STEPS) == ["lrs"] and told(params={"w": [2.0]}) == ["parameter"]


@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
def test_a_mean_of_gradients_that_cancel_is_as_inexact_in_16_bits_as_they_are(wanted):
    case = next(
        case
        for case in map(drawn, NUMBERS)
        if kind(case) == wanted and "communication_data_type" not in case.json and STEPS - 1 not in case.loud
    )
    run = Run([1.0] * STEPS, [0.1] * STEPS, [1.0] * STEPS, [None] * (STEPS + 1), [False] * STEPS, {})
    one, other = ([*run.norms[:-1], norm] for norm in (0.1, 0.102))
    told = list(differences(case, attrs.evolve(run, norms=one), attrs.evolve(run, norms=other), ()))
    assert bool(told) == (wanted == "fp32")
