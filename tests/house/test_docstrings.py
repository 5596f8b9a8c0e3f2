"""Every public name says what it does, and every transform opens with its card (STYLE.md, 2 and 8)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARD = ["Fills", "State", "Law", "Cost", "Source"]
TORCHS = {"forward", "backward", "setup_context", "vmap", "jvp"}  # torch's hooks: the class speaks
NOT_VERBS = {"a", "an", "the", "this", "it"}
NOT_IMPERATIVE = re.compile(r".*(s|ing|ed)")  # returns, returning, returned
IMPERATIVE = re.compile(r".*(ss|us|as|eed)|bring|string|ping|embed|shed")  # pass, focus, bias, seed


def missing(tree: ast.Module) -> Iterator[str]:
    """Say of every public function, class and method what its docstring lacks."""
    if not ast.get_docstring(tree):
        yield "the module has no docstring"
    for node in public(tree.body):
        yield from wrong_docstring(node, node.name)
        if isinstance(node, ast.ClassDef):
            for method in public(node.body):
                if method.name not in TORCHS:
                    yield from wrong_docstring(method, f"{node.name}.{method.name}")


def public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            once = not any(re.search(r"overload$|\.setter$", ast.unparse(it)) for it in node.decorator_list)
            if once and not node.name.startswith("_"):
                yield node


def wrong_docstring(node, name: str) -> Iterator[str]:
    first = (ast.get_docstring(node) or "").partition("\n")[0]
    what = f"line {node.lineno}, {name}"
    if not first:
        yield f"{what}: no docstring"
    elif not first.endswith("."):
        yield f"{what}: the first line does not end with a period: {first}"
    elif is_action(node) and not imperative(first):
        yield f"{what}: the first line is not an imperative: {first}"


def is_action(node) -> bool:
    """Tell whether `node` does something, which classes and properties do not: a noun may name them."""
    is_property = any("property" in ast.unparse(it) for it in getattr(node, "decorator_list", []))
    return not isinstance(node, ast.ClassDef) and not is_property


def imperative(sentence: str) -> bool:
    word = sentence.split()[0].strip(",:.`").lower()
    return word not in NOT_VERBS and (not NOT_IMPERATIVE.fullmatch(word) or bool(IMPERATIVE.fullmatch(word)))


def wrong_card(doc: str) -> Iterator[str]:
    """Say what is not as it should be in the docstring of a transform."""
    first, _, rest = doc.partition("\n")
    if not first.endswith(".") or not imperative(first):
        yield f"the card opens with: {first}"
    if not rest.startswith("\nFills:"):
        yield "the card has no blank line and 'Fills:' after its first line"
    fields = re.findall(r"(?:^|[ ]{2,})([A-Z][a-z]+):[ ]+\S", rest.partition("\n\n")[0].strip(), re.MULTILINE)
    if fields != CARD:
        yield f"the card has the fields {fields}, not {CARD}"


def modules(pattern: str) -> list[str]:
    paths = sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))
    return [str(p) for p in paths if not any(part.startswith("_") for part in p.with_suffix("").parts[:-1])]


def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), path)


@pytest.mark.parametrize("path", [p for p in modules("fds/**/*.py") if not re.search(r"/_(?!_init__)", p)])
def test_public_names_say_what_they_do(path):
    assert not list(missing(parse(path)))


def test_there_are_transforms():
    assert transforms()


def transforms() -> list[str]:
    """List the files that hold a transform each; of a folder, its `__init__.py`."""
    return modules("fds/transforms/[!_]*.py") + modules("fds/transforms/*/__init__.py")


@pytest.mark.parametrize("path", transforms())
def test_a_file_of_transforms_opens_with_their_cards(path):
    module = parse(path)
    doc = ast.get_docstring(module) or ""
    names = [node.name for node in module.body if isinstance(node, ast.FunctionDef) and is_transform(node)]
    cards = dict(re.findall(r"^`(\w+)`: (.*?)(?=\n\n`|\Z)", doc, re.MULTILINE | re.DOTALL))
    assert not list(wrong_card(doc)) and len(cards) >= len(names) - 1 and cards.keys() <= set(names)
    assert not [fault for card in cards.values() for fault in wrong_card(card[0].upper() + card[1:])]


def is_transform(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(it).partition("(")[0] == "transform" for it in node.decorator_list)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "the module has no docstring"),
        ("def f(): pass", "f: no docstring"),
        ("class A:\n '''One.'''\n def f(self): pass", "A.f: no docstring"),
        ("def f():\n '''Add'''", "does not end with a period"),
        ("def f():\n '''Returns a tree.'''", "not an imperative"),
        ("def f():\n '''The tree.'''", "not an imperative"),
        ("def f():\n '''Computing it.'''", "not an imperative"),
    ],
)
def test_a_missing_word_is_seen(source, words):
    assert words in "\n".join(missing(ast.parse(source)))


def test_what_needs_no_docstring():
    source = '''"""Say it."""
class A:
    """A thing."""
    def _f(self): pass
    def forward(self): pass
    @property
    def size(self):
        """The number of elements."""
def bring():
    """Bring, pass, seed and embed are verbs."""
def _private(): pass
'''
    assert not list(missing(ast.parse(source)))
    for sentence in ["Pass it on.", "Seed it.", "Focus.", "Embed x.", "Bring it.", "`fold` x."]:
        assert imperative(sentence)


@pytest.mark.parametrize("without", CARD)
def test_a_card_needs_every_field(without):
    card = "Average.\n\nFills:  split, sum     State:  none\nLaw:    a\n        b\nCost:   c\nSource: d"
    assert not list(wrong_card(card))
    assert list(wrong_card(card.replace(f"{without}:", "     ")))
