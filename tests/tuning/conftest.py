"""What a search starts is forked, but for the tests that ask for fresh interpreters."""

import multiprocessing
import subprocess

import pytest

from tests.tuning import starting


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Fork what a search starts."""
    with pytest.MonkeyPatch.context() as patch:
        starting.warm(patch)
        yield


@pytest.fixture
def fresh(warm, monkeypatch):
    """Start fresh interpreters, as a user's search does."""
    monkeypatch.setattr("fds.tuning.processes.multiprocessing", multiprocessing)
    monkeypatch.setattr("fds.tuning.scripts.subprocess", subprocess)
