"""What a recording says of a step that ran: rows, live microbatches, and work without waiting."""

import attrs
import pytest

import fds
from fds import plans
from tests.pipeline.regression import X, Y, two_stages
from tests.pipeline.test_failures import MICROBATCHES, SCHEDULES, batch, piped


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_recording_has_the_rows_and_the_live_microbatches_of_the_plan(name):
    schedule, size = SCHEDULES[name]
    plan = plans.Plan.of(schedule(size, MICROBATCHES))

    def job():
        step = piped(schedule, fds.mesh(pp=size)["pp"])
        state, _ = step(step.init(step.loss.init), batch(0))
        with plans.record() as recording:
            step(state, batch(1))
        return recording.json()

    found = fds.simulate(job, size)
    timeline = plans.joined(found)
    done = [[attrs.evolve(event.action, buffer=None) for event in row] for row in timeline.rows]
    assert done == [list(row) for row in plan.rows]
    assert timeline.peak_live == plans.simulate(plan).peak_live


def test_a_recording_does_not_count_waiting_as_work():
    """Simulated ranks take turns, so no work of one lies inside work of another."""

    def run():
        _, step, state = two_stages(plans.one_f_one_b)
        with plans.record() as recording:
            step(state, (X, Y))
        return recording.rows

    first, second = fds.simulate(run, 2)
    inside = lambda one, other: one[1] < (other[1] + other[2]) / 2 < one[2]
    assert not any(inside(mine, theirs) for mine in first for theirs in second if theirs[0].op is plans.Op.FORWARD)
