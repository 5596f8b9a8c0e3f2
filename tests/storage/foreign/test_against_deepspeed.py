"""Asks the installed DeepSpeed again: two ranks of it train, save and go on, and fds goes on from the same files."""

import sys
from pathlib import Path

import pytest

from fds.storage.importing import import_deepspeed
from tests.scripts import loaded
from tests.storage.foreign.test_deepspeed import assert_continues, expected, go_on, make_step

GENERATOR = Path(__file__).parents[2] / "golden" / "deepspeed_checkpoints.py"
CASES = ["zero1_ranks2", "zero2_ranks2", "zero3_ranks2", "pipe_zero1"]


@pytest.fixture(scope="module")
def trained_now(tmp_path_factory):
    """Return the directory of cases that DeepSpeed has just trained."""
    generator = loaded(GENERATOR)
    root = tmp_path_factory.mktemp("now")
    before = "deepspeed" in sys.modules  # other tests of this group may have asked it already
    generator.launch(root, CASES[:3], 2)
    generator.launch(root, CASES[3:], 2)
    assert ("deepspeed" in sys.modules) == before
    return root


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES)
def test_fds_goes_on_where_deepspeed_saved(trained_now, case):
    compose, params = make_step(case)
    step = compose()
    state, _ = import_deepspeed(trained_now / case, step, params)
    assert_continues(*go_on(step, state), expected(trained_now / case))


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES)
def test_deepspeed_trains_as_it_did_when_it_was_recorded(trained_now, golden, case):
    want = expected(golden / case)
    assert expected(trained_now / case)["losses"] == pytest.approx(want["losses"], rel=1e-5)
