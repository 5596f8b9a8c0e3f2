"""What all tests of layers have in common: dropout masks that are a function of a seed, on a GPU too."""

import pytest

from fds.kernels import only


@pytest.fixture(autouse=True)
def references():
    """Run references unless a test asks for kernels: on a GPU torch's own dropout would draw other masks."""
    with only("reference"):
        yield
