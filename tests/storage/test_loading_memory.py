"""A load takes the memory of the state and a bounded piece more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.loading_memory import WAYS

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc that forgets a peak")
def test_a_load_takes_the_memory_of_the_state_and_32_mib_at_most(tmp_path):
    run = lambda what: subprocess.run(
        [sys.executable, "-m", "tests.storage.loading_memory", tmp_path, what],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    for what in ("save", "load"):
        done = run(what)
        assert done.returncode == 0, done.stderr
    beyond = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(beyond) == len(WAYS) and max(beyond) <= 2**25, done.stdout
