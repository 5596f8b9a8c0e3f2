"""Saves of formats 2 and 3 go on loading; tests/golden/format_2.py and format_3.py say what of them."""

import json
from pathlib import Path

import pytest
import torch

import fds
from fds import tree
from fds.errors import StorageError
from tests.scripts import loaded, unpack

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """By format, the archive's directory and the module that wrote it."""

    def unpacked(name):
        folder = tmp_path_factory.mktemp(name)
        unpack(GOLDEN / f"{name}.tar.xz", folder)
        return folder, loaded(GOLDEN / f"{name}.py")

    return {number: unpacked(f"format_{number}") for number in (2, 3)}


@pytest.mark.parametrize(("number", "run", "local"), [(2, "whole", False), (2, "local", True), (3, "whole", False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_of_an_older_format_loads(recorded, number, run, local, ranks):
    folder, module = recorded[number]
    want = json.loads((folder / "expected.json").read_text())

    def body():
        step = module.step()
        slots = ("init", "drop") if number == 3 else ()
        state, extra = fds.load(folder / run, step, module.params(), local=local, slots=slots)
        return tree.paths(step.params(state)), tree.paths((state.step, state.calls, state.slots)), extra

    for params, (step, calls, *slots), extra in ((x, y.values(), z) for x, y, z in fds.simulate(body, ranks)):
        assert extra == {"from": f"format {number}"}
        for name, x in params.items():
            assert torch.equal(x, torch.tensor(want[f"params.{name}"]))
        assert step == want["step"] == 1 and calls == want["calls"]
        assert number == 2 or not any(x.any() for x in slots)


def test_what_messages_of_format_3_had_lost_is_refused_with_what_to_write(recorded):
    folder, module = recorded[3]

    def body():
        with pytest.raises(StorageError) as caught:
            fds.load(folder / "whole", module.step(), module.params())
        return caught.value

    for error in fds.simulate(body, 2):
        assert "slots.kept" in error.what and "format 3" in error.got
        assert "mean gradient" in error.want and 'slots="init"' in error.hint


def test_a_save_of_an_older_format_is_verified_and_shown(recorded):
    for number, run in ((2, "whole"), (2, "local/rank0"), (3, "whole")):
        folder, _ = recorded[number]
        assert json.loads((folder / run / "best" / "manifest.json").read_text())["format"] == number
        assert fds.storage.verify(folder / run) == []
