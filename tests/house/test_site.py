"""The documentation's site: every public name has its place in it, and every link between pages leads somewhere.

What is held here needs no mkdocs; `make docs` holds it again on the site as built, where any warning is an error.
"""

import functools
import importlib
import itertools
import re
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import fds

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))
try:
    docstrings, ladder, links, public, reference, results = map(
        importlib.import_module, ["docstrings", "ladder", "links", "public", "reference", "results"]
    )
finally:
    sys.path.pop(0)

PAGES = [
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md", "benchmarks/results/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def attribute(path):
    """Return the object of a dotted path."""
    value = fds
    for part in path.split(".")[1:]:
        value = getattr(value, part)
    return value


def rooms():
    return ["fds", *(room for room in public.ROOMS if room != "fds.transforms")]


def test_the_names_read_from_the_sources_are_those_that_python_finds():
    for name in public.names():
        assert attribute(name.path) is getattr(importlib.import_module(name.module), name.name), name


@pytest.mark.parametrize("room", rooms())
def test_every_public_name_is_in_the_reference(room):
    module = importlib.import_module(room)
    described = "\n".join(reference.pages().values())
    modules = {name for name in public.exported(room) if isinstance(getattr(module, name), type(sys))}
    assert modules <= {path.rpartition(".")[2] for path in public.ROOMS}
    for name in set(public.exported(room)) - modules:
        home = docstrings.paths()[f"{room}.{name}"]
        assert described.count(f"::: {home}\n") == 1, f"{room}.{name}"


def test_every_room_is_described():
    """A package or module of fds that others import is a room of the reference, or stands below one."""
    tops = {f"fds.{path.stem}" for path in (ROOT / "fds").iterdir() if re.fullmatch(r"[a-z]\w*(\.py)?", path.name)}
    assert tops - set(public.ROOMS) == {
        "fds.containers",
        "fds.lazy",
        "fds.reading",
    }  # what `fds.tree` knows of containers, how `fds` loads names, what may be read while a step is recorded


@functools.cache
def parsed(path):
    return MarkdownIt("commonmark").enable("table").parse((ROOT / path).read_text())


@functools.cache
def anchors(path):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    tokens = parsed(path)
    for token, text in itertools.pairwise(tokens):
        if token.type == "heading_open":
            words = "".join(it.content for it in text.children if it.type in ("text", "code_inline"))
            found.add(re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-"))
    return found


def linked(path):
    """Yield the targets of the links and pictures of a page."""
    for token in parsed(path):
        for part in token.children or []:
            target = part.attrs.get("href") or part.attrs.get("src")
            if target and not re.match(r"https?:", target):
                yield target


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_links_lead_somewhere(path):
    for target in linked(path):
        file, _, anchor = target.partition("#")
        there = (ROOT / path.parent / file).resolve() if file else ROOT / path
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there.relative_to(ROOT)), target


def test_every_page_has_its_place():
    """A page of docs/ that no one can reach from the navigation is lost; one that is listed exists, or is generated."""
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\n\n")[0])
    assert len(listed) == len(set(listed))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    generated = {"gallery.md", *links.ROOT_PAGES.values(), *reference.pages(), *ladder.pages(), *results.pages()}
    assert written <= set(listed)
    assert set(listed) <= written | generated


def test_a_link_on_disk_is_a_link_on_the_site():
    text = "[a](../fds/tree.py), [b](data.md#x), [c](../examples/04_clip.py), [d](#e)\n```\n[f](../fds/tree.py)\n```\n"
    assert links.rewrite(text, "docs/guide.md", "guide.md") == (
        "[a](source/fds/tree.py.md), [b](data.md#x), [c](examples/04_clip.md), [d](#e)\n```\n[f](../fds/tree.py)\n```\n"
    )


def test_a_docstring_is_shown_as_it_is_meant():
    text = "Do `it`.\n\nFor <x>::\n\n    a * b\n\nRaises `StateError`.\nSource: A 2020.\n\n>>> 1 + 1\n2"
    assert docstrings.markdown(text).split("\n") == [
        "Do `it`.",
        "",
        "For &lt;x>:",
        "",
        "```text",
        "a * b",
        "```",
        "",
        "**Raises** [`StateError`][fds.errors.StateError].",
        "",
        "**Source**: A 2020.",
        "",
        "",
        "```pycon",
        ">>> 1 + 1",
        "2",
        "```",
    ]


def test_claims_are_read_as_the_tables_say_them():
    table = "| case | claim |\n| --- | --- |\n| a | ≤ 1: yes |\n| b | ≤ 1.5: NO |\n| c |  |\n"
    assert [(claim.row["case"], claim.met) for claim in results.claims(table)] == [("a", True), ("b", False)]


def test_what_a_rung_adds_is_marked():
    assert ladder.new_lines("a\nb\nc", "a\nx\n\nc\ny") == [2, 5]
