"""Variables are called what they are: words that say nothing of a thing are names of nothing, and become fewer."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = {"found", "one", "own", "held", "known", "given", "every", "some", "told"}
# files that still have such a variable, by room: a room that is not here has none, and no number may grow
LEFT = {
    "command_line": 3,
    "containers.py": 1,
    "curvature.py": 1,
    "errors.py": 1,
    "kernels": 4,
    "layout.py": 1,
    "media": 2,
    "nn": 3,
    "optim": 2,
    "plans": 3,
    "profiling": 1,
    "random.py": 1,
    "reading.py": 1,
    "reporting": 2,
    "state.py": 1,
    "step": 28,
    "storage": 8,
    "transports": 1,
    "tree.py": 1,
}


def words_of(tree: ast.AST) -> set[str]:
    """Return the words that are bound as variables, which the attributes that a class declares are not."""
    declared = {id(line.target) for line in _lines_of_classes(tree) if isinstance(line, ast.AnnAssign)}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {node.id for node in names if id(node) not in declared} & WORDS


def _lines_of_classes(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        yield from node.body if isinstance(node, ast.ClassDef) else ()


def test_variables_are_called_what_they_are_in_ever_more_files():
    files = [path for path in (ROOT / "fds").rglob("*.py") if words_of(ast.parse(path.read_text()))]
    counts = Counter(path.relative_to(ROOT / "fds").parts[0] for path in files)
    assert counts == LEFT, "fewer: lower the number; more: " + ", ".join(str(path) for path in files)[:2000]


def test_this_test_sees_a_variable_and_no_argument_or_attribute():
    assert words_of(ast.parse("def f(given):\n found = given.known\n return [one for one in found]")) == {
        "found",
        "one",
    }
    assert words_of(ast.parse("class A:\n held: int = 1\n def f(self):\n  own: int = 1")) == {"own"}
