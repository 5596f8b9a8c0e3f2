"""What holds for every test: few threads, Triton interpreted without a GPU, how hard Hypothesis tries, no flushing."""

import gc
import os
import signal
from pathlib import Path
from unittest import mock

# Set before torch and triton are imported, and inherited by the processes that tests start.
# One thread each: small tensors gain nothing from two, and on a busy machine threads that wait for each other
# made a suite of 16 s last 110 to 220.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".pytest_cache" / "hypothesis"))

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import Phase, settings

from fds.collectives.turns import ProcessFlags
from tests import devices, sweeps

AS_TORCH_BEGINS = ProcessFlags.now()

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
os.environ.setdefault("TRITON_INTERPRET", "0" if devices.NAME == "cuda" else "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import interpreting

    interpreting.remember()

settings.register_profile("fast", max_examples=8, deadline=None, derandomize=True)
settings.register_profile("sweeps", max_examples=16, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=250, deadline=None, print_blob=True)
# `make mutants` asks only whether a test fails, of the same examples as "sweeps"
settings.register_profile("unshrunk", settings.get_profile("sweeps"), phases=set(Phase) - {Phase.shrink, Phase.explain})
settings.load_profile(os.environ.get("FDS_HYPOTHESIS_PROFILE", "sweeps" if sweeps.WHOLE else "fast"))


def pytest_configure(config):
    """Make all tensors of the tests where FDS_TEST_DEVICE says, from their import on, and let interrupts come."""
    config.add_cleanup(devices.begin())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for what a shell starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what `make sweeps` has beside what runs here."""
    if not sweeps.WHOLE and (out := sweeps.left_out(items)):
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Take what all tests share, 600,000 objects, from the garbage collector, which takes 0.3 s to walk over them.

    It does not walk over them while they are made either, where it would take a third of the time, and seldom later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)  # of 700, 10, 10: tests make many objects, and few cycles
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Look for no examples in docstrings here, of which there are none: it would import what no test does."""
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


@pytest.fixture(autouse=True)
def no_flag_is_left():
    """Fail the test that leaves a flag of torch set, of modes or the compiler, after which it compiles nothing."""
    yield
    left = ProcessFlags.now()
    AS_TORCH_BEGINS.restore()
    assert left == AS_TORCH_BEGINS


@pytest.fixture(scope="module")
def few_objects():
    """Leave little to the garbage collector, for tests that call it each: late in a run that takes it 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_power_fails_here():
    """Flush nothing in this process, where it would take most of the time of saves; other processes flush as ever."""
    with mock.patch.object(os, "fsync", unflushed):
        yield


def unflushed(fd: int) -> None:
    """Leave a file in memory. A `MagicMock` would keep every call."""
