"""Every rung of the ladder runs, as a reader would run it."""

from pathlib import Path

import pytest

from tests import programs

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[0-9][0-9]_*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path):
    code, said = programs.run(path, cwd=tmp_path)
    assert code == 0, said
