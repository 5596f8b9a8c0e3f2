"""A load takes the memory of the state and a bounded piece more."""

import os

import pytest

from tests import ranks
from tests.storage.loading_memory import WAYS, load_each, save_both


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc that forgets a peak")
def test_a_load_takes_the_memory_of_the_state_and_32_mib_at_most(tmp_path):
    for what in (save_both, load_each):
        status, told = ranks.alone(what, tmp_path)
        assert status == 0, told
    beyond = [int(line.split()[0]) for line in told.splitlines()]
    assert len(beyond) == len(WAYS) and max(beyond) <= 2**25, told
