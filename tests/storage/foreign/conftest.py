"""The recorded checkpoints of DeepSpeed, unpacked once."""

from pathlib import Path

import pytest

from tests.scripts import unpack

ARCHIVE = Path(__file__).parents[2] / "golden" / "deepspeed_checkpoints.tar.xz"


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """Return the directory of the cases of tests/golden/deepspeed_checkpoints.py."""
    into = tmp_path_factory.mktemp("golden")
    unpack(ARCHIVE, into)
    return into
