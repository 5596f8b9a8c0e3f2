"""A smaller fault campaign than `make faults`: some kills, every request of some saves, real full disks."""

import errno

import pytest

import fds
from tests import ranks, sweeps
from tests.storage.campaign import __main__ as campaign, batches, errors, kills, steps


def some(scenarios, ranks, how):
    return [s for s in scenarios if (s.ranks, s.how) == (ranks, how)]


@pytest.mark.parametrize(("ranks", "how"), [(1, "save"), (1, "save_async"), (2, "save"), (2, "save_async")])
def test_after_a_kill_at_any_instant_the_last_complete_save_loads(tmp_path, ranks, how):
    for scenario in some(kills.all_scenarios(), ranks, how)[::3]:
        kills.kill(tmp_path / "kills", scenario, 1, seed=0)


@pytest.mark.parametrize("scenario", steps.all_scenarios(), ids=str)
def test_a_run_with_its_state_on_a_disk_that_is_killed_at_any_instant_goes_on_as_if_it_had_not_been(tmp_path, scenario):
    steps.kill(tmp_path / "steps", scenario, 3, seed=0)


@pytest.mark.sweep
def test_every_request_that_fails_is_told_on_all_ranks_and_changes_nothing(tmp_path):
    """In the background; those of `save` are in test_interrupted.py, test_keep.py and test_failing_ranks.py."""
    errors.fail(tmp_path, errors.Scenario(2, "save_async", anew=True, code=errno.EIO), sweeps.STRIDE)


def test_a_write_that_comes_out_short_is_continued(tmp_path):
    errors.shorten(tmp_path)


def test_full_and_read_only_disks_are_told_from_the_process_aside_too(tmp_path):
    (row,) = campaign.on_disks(tmp_path / "disks")
    if not row.count:
        pytest.skip(row.scenario)
    assert row.outcomes["refused"] >= 8


@pytest.mark.parametrize("fault", batches.all_faults()[::13], ids=str)
def test_another_batch_on_one_rank_is_told_on_all_ranks_at_once(fault):
    batches.check(fault, fds.simulate(lambda: batches.commit(fault), 4))


@pytest.mark.parametrize("how", ["tensor", "ulysses"])
def test_real_ranks_with_other_rows_are_told_so_and_go_on(how):
    fault = batches.Fault(how, "rows", 0, "evaluate")
    batches.check(fault, ranks.run(batches.commit, fault, world_size=4))
