"""Files that were tampered with are refused, or read as they were written; more of them with `make faults`."""

import os

import pytest

from tests import sweeps
from tests.storage.campaign import __main__ as campaign, fuzz

INPUTS = 10_000 if os.environ.get("FDS_HYPOTHESIS_PROFILE") == "full" else 250 if sweeps.WHOLE else 100


@pytest.mark.sweep
def test_what_was_tampered_with_is_refused_or_read_as_it_was_written(tmp_path):
    rows = list(campaign.tampered(tmp_path / "fuzz", 1, INPUTS))
    assert len(rows) == len(fuzz.SHARES) and sum(row.count for row in rows) >= 0.9 * INPUTS
    for row in rows:
        assert row.outcomes["refused"] and row.outcomes["read"], row
