"""Saves of format 2 go on loading; tests/golden/format_2.py says what of them."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

import fds
from fds import tree
from tests.scripts import loaded

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The archive's directory, and the module that wrote it."""
    folder = tmp_path_factory.mktemp("format_2")
    with tarfile.open(GOLDEN / "format_2.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder, loaded(GOLDEN / "format_2.py")


@pytest.mark.parametrize(("run", "local"), [("whole", False), ("local", True)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_of_format_2_loads(recorded, run, local, ranks):
    folder, module = recorded
    want = json.loads((folder / "expected.json").read_text())

    def body():
        step = module.step()
        state, extra = fds.load(folder / run, step, module.params(), local=local)
        return tree.paths(step.params(state)), {n: x for n, x in tree.paths(state).items() if x.dim() == 0}, extra

    for params, scalars, extra in fds.simulate(body, ranks):
        assert extra == {"from": "format 2"}
        for name, x in params.items():
            assert torch.equal(x, torch.tensor(want[f"params.{name}"]))
        assert scalars["step"] == want["step"] == 1 and scalars["calls"] == want["calls"]


def test_a_save_of_format_2_is_verified_and_shown(recorded):
    folder, _ = recorded
    for run in ("whole", "local/rank0"):
        assert json.loads((folder / run / "best" / "manifest.json").read_text())["format"] == 2
        assert fds.storage.verify(folder / run) == []
