"""Variables are called what they are: words that say nothing of a thing are names of nothing."""

import ast
from collections.abc import Iterator

from tests.house.parsed import trees

WORDS = {"found", "one", "own", "held", "known", "given", "every", "some", "told"}


def words_of(tree: ast.AST) -> set[str]:
    """Return the words that are bound as variables, which the attributes that a class declares are not."""
    attributes = {id(target) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for target in _targets(node)}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {node.id for node in names if id(node) not in attributes} & WORDS


def _targets(declaring: ast.ClassDef) -> Iterator[ast.expr]:
    for line in declaring.body:
        if isinstance(line, ast.AnnAssign):
            yield line.target
        elif isinstance(line, ast.Assign):
            yield from line.targets


def test_variables_are_called_what_they_are():
    assert not {str(path): words for path, tree in trees().items() if (words := words_of(tree))}


def test_this_test_sees_a_variable_and_no_argument_or_attribute():
    assert words_of(ast.parse("def f(given):\n found = given.known\n return [one for one in found]")) == {
        "found",
        "one",
    }
    assert words_of(ast.parse("class A:\n held: int = 1\n known = 2\n def f(self):\n  own: int = 1")) == {"own"}
