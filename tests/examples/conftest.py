"""What the tests of the main job start from."""

from pathlib import Path

import pytest


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text file large enough for tiny windows."""
    path = tmp_path / "book.txt"
    path.write_text("\n".join(f"the {i}th line of a short book" for i in range(400)))
    return path
