"""The table of mutants does not rot: every fault can still be made where it says, and its tests are still there."""

import ast
from collections import Counter
from pathlib import Path

from tests.house.test_doors import ROOMS
from tests.mutants.mutant import Mutant, all_mutants

ROOT = Path(__file__).parents[2]
ALCOVES = ["fds/step/sharding", "fds/step/checks", "fds/transforms/pipeline", "fds/storage/disk", "fds/storage/ranks"]
ALCOVES += ["fds/storage/format", "fds/storage/foreign", "fds/plans/schedules", "fds/config/keys", "examples"]


def wrong(mutant: Mutant) -> str:
    """Say what is wrong with a mutant in the tree as it is; "" for nothing."""
    text = (ROOT / mutant.file).read_text() if (ROOT / mutant.file).exists() else ""
    broken = mutant.applied(text)
    if broken is None:
        return f"its text is in {mutant.file} {text.count(mutant.old)} times"
    try:
        ast.parse(broken)
    except SyntaxError as error:
        return f"it is no Python: {error}"
    lost = [str(path) for path in mutant.paths() if not (ROOT / path).exists()]
    return f"there are no tests in {', '.join(lost)}" if lost else "" if mutant.paths() else "it has no tests"


def test_every_mutant_is_one_place_of_a_file_and_its_tests_are_there():
    faults = [f"{one.name}: {fault}" for one in all_mutants() if (fault := wrong(one))]
    assert not faults, "\n".join(faults)


def test_every_room_has_mutants_and_every_mutant_a_name_of_its_own():
    mutants = all_mutants()
    assert len(mutants) >= 60
    places = [*(f"fds/{room}" for room in ROOMS), *ALCOVES]
    assert [
        at for at in places if not any(f"{one.file.removesuffix('.py')}/".startswith(f"{at}/") for one in mutants)
    ] == []
    assert [name for name, count in Counter(one.name for one in mutants).items() if count > 1] == []


def test_what_is_wrong_with_a_mutant_is_said():
    good = {
        "name": "name",
        "file": "fds/state.py",
        "old": "weakref.ref(old)",
        "new": "old",
        "breaks": "",
        "tests": "tests",
    }
    assert wrong(Mutant(**good)) == ""
    assert "0 times" in wrong(Mutant(**good | {"old": "no such text"}))
    assert "no Python" in wrong(Mutant(**good | {"new": "("}))
    assert "no tests in tests/lost.py" in wrong(Mutant(**good | {"tests": "tests/lost.py::test -k 'one or two'"}))
