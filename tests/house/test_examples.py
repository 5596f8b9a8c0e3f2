"""Every rung of the ladder runs, as a reader would run it."""

from pathlib import Path

import pytest

from tests import programs

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[0-9][0-9]_*.py"))
OF_PEERS = {"44_hugging_face.py", "46_trainer.py", "49_long_rows.py"}  # which need transformers


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name not in OF_PEERS], ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path):
    code, said = programs.run(path, cwd=tmp_path)
    assert code == 0, said


@pytest.mark.peers
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name in OF_PEERS], ids=lambda path: path.name)
def test_an_example_of_transformers_runs(path, tmp_path):
    test_an_example_runs(path, tmp_path)
