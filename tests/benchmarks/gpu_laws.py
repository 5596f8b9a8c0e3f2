"""Tests for the runner itself, which pytest collects by this name alone: one passes, a law fails, one sleeps."""

import os
import time

from hypothesis import given, settings, strategies as st


def test_that_passes():
    pass


@settings(max_examples=50)
@given(st.lists(st.integers(), min_size=20))
def test_a_law_that_fails(numbers):
    time.sleep(0.02)  # shrinking this takes minutes
    assert sum(numbers) < 10, "the words of the law"


def test_that_sleeps():
    time.sleep(float(os.environ["FDS_GPU_TEST_SLEEPS"]))
