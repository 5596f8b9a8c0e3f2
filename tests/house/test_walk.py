"""docs/design/walk.md: its lines are those of the code, and its functions are called in its order."""

import re
import sys
from pathlib import Path

import fds
from tests.scripts import loaded

ROOT = Path(__file__).parents[2]
CODE = f"{ROOT / 'fds'}/"


def script():
    """Load docs/number_walk.py."""
    return loaded(ROOT / "docs" / "number_walk.py")


def called(work):
    """Return what work returns, and which functions of fds it calls on the first rank: files and names."""
    names = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(CODE):
            names.append((code.co_filename.removeprefix(CODE), code.co_qualname))

    sys.setprofile(note)
    try:
        return work(), names
    finally:
        sys.setprofile(None)


def missing(walk, names):
    """Return the first entry of a walk that is not called after those before it, None where all are."""
    rest = iter(names)
    return next((entry for entry in walk if entry not in rest), None)


def test_the_lines_are_those_of_the_code():
    walk = script()
    page = walk.PAGE.read_text()
    assert len(walk.ENTRY.findall(page)) == page.count("](../../fds/") > 50
    assert page == walk.numbered(page), "write them anew: make architecture"


def test_the_functions_are_called_in_the_order_of_the_page(tmp_path):
    walk = script()
    page = walk.PAGE.read_text()
    batch, state = (walk.ENTRY.findall(part) for part in page.split("\n## ")[1:])
    source = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    names = {}
    exec(compile(source.replace("return step(state, ", "return step, state, ("), str(walk.PAGE), "exec"), names)

    def run():
        (step, first, arguments), began = called(names["run"])
        (second, _), ran = called(lambda: step(first, arguments))
        _, kept = called(lambda: (step.params(second), fds.save(tmp_path, second, step)))
        params = {"w": names["torch"].ones(4, 4)}
        _, read = called(lambda: fds.load(tmp_path, step, params))
        return missing(batch, ran), missing(state, began + ran + kept + read)

    assert fds.simulate(run, 2)[0] == (None, None)
