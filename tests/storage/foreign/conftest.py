"""The recorded checkpoints of DeepSpeed, unpacked once."""

import tarfile
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).parents[2] / "golden" / "deepspeed_checkpoints.tar.xz"


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """Return the directory of the cases of tests/golden/deepspeed_checkpoints.py."""
    into = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # none before Python 3.11.4
        archive.extractall(into)
    return into
