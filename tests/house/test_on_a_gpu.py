"""Which tests run on a GPU: of every file it is said, and of those that do not, why."""

from pathlib import Path

import pytest

from tests.on_a_gpu import NOT_ON_A_GPU, ON_A_GPU, runs_on_a_gpu

ROOT = Path(__file__).parents[2]
FILES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def test_of_every_file_of_tests_it_is_said_whether_it_runs_on_a_gpu():
    assert not set(ON_A_GPU) & NOT_ON_A_GPU.keys() and all(NOT_ON_A_GPU.values())
    assert {runs_on_a_gpu(path) for path in FILES} == {True, False}
    with pytest.raises(KeyError):
        runs_on_a_gpu("tests/new/test_new.py")


def test_nothing_is_named_that_is_not_there():
    assert [name for name in (*ON_A_GPU, *NOT_ON_A_GPU) if not (ROOT / name).exists()] == []
    in_folders = [name for name in NOT_ON_A_GPU if name.endswith(".py")]  # these are what pytest is told to ignore
    assert all(any(name.startswith(f"{folder}/") for folder in ON_A_GPU) for name in in_folders)
