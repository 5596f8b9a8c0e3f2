"""Rows of launch tables follow the shared memory of the device; test_ahead_of_time holds that the rows fit."""

from types import SimpleNamespace

import pytest
import torch

from fds.kernels.language import LEAST, MOST, fitting, shared_memory

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that makes cuda:0 a GPU with so many bytes of shared memory for a block."""
    asked = []

    def has(count: int) -> torch.device:
        shared_memory.cache_clear()
        properties = SimpleNamespace(shared_memory_per_block_optin=count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or properties)
        return torch.device("cuda", 0)

    has.asked = asked
    yield has
    shared_memory.cache_clear()


@pytest.mark.parametrize(
    ("count", "row"), [(232448, "hopper"), (166912, "ampere"), (101376, "ada"), (229376, "ampere"), (65536, "ada")]
)
def test_the_row_is_that_for_the_most_shared_memory_that_the_device_has(gpu, count, row):
    assert fitting({227: "hopper", 99: "ada", 163: "ampere"}, gpu(count)) == row


def test_a_device_is_asked_once_and_not_at_all_for_a_row_that_fits_everywhere(gpu):
    device = gpu(101376)
    assert fitting({99: "any"}, device) == "any" and not gpu.asked
    assert [fitting({227: 1, 99: 2}, device) for _ in range(3)] == [2, 2, 2]
    assert gpu.asked == [device]


def test_the_cpu_interprets_what_hopper_runs():
    assert shared_memory(CPU) == MOST > LEAST
    assert fitting({LEAST: 1, MOST: 2}, CPU) == 2
