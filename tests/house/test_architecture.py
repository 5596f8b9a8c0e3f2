"""ARCHITECTURE.md: its picture is drawn from the code as it is."""

import functools
import re
from pathlib import Path

from tests.scripts import loaded

ROOT = Path(__file__).parents[2]


@functools.cache
def script():
    """Load docs/draw_architecture.py, which parses all files once."""
    drawing = loaded(ROOT / "docs" / "draw_architecture.py")
    drawing.rooms = functools.cache(drawing.rooms)
    return drawing


def test_the_picture_is_up_to_date():
    kept = (ROOT / "docs" / "architecture.svg").read_text()
    assert kept == script().svg(), "draw it again: make architecture"


def test_every_room_is_drawn_above_what_it_imports():
    drawing = script()
    graph, texts = drawing.rooms()
    floor = drawing.floors(graph)
    assert {"step", "transforms", "kernels", "errors"} <= graph.keys() == texts.keys() == floor.keys()
    assert graph["transforms"] >= {"step", "plans"}
    assert graph["errors"] == set()
    assert all(floor[room] > floor[used] for room in graph for used in graph[room])
    drawn = set(re.findall(r'<text class="name"[^>]*>(\w+)</text>', drawing.svg()))
    assert drawn == graph.keys()


def test_a_door_that_follows_from_others_is_left_out():
    assert script().doors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [("a", "b"), ("b", "c")]


def test_the_files_that_the_page_names_are_there():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    links = re.findall(r"\]\(([^)#]+)\)", page)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
