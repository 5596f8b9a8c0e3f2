"""Draw docs/architecture.svg: the rooms of fds and the doors between them, as the code's imports have them.

A room stands on the lowest floor above all rooms that it imports, and then as near below its users as it can. An arrow
runs from a room to one that it imports; one that follows from others
(a imports b, b imports c, a imports c) is left out.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from pathlib import Path
from statistics import mean
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
WIDTH, BOX, GAP, LINE, SPACE = 1180, 196, 18, 15, 58  # pixels: of all, a box, between boxes, a line, between floors
STYLE = """
  .ground { fill: #fbfbfd } .box { fill: #fff; stroke: #5c6bc0; stroke-width: 1.2 }
  .step { fill: #e8eaf6; stroke-width: 2.4 }
  .name { font: bold 15px sans-serif; fill: #1a237e } .what { font: 11px sans-serif; fill: #333 }
  .door { fill: none; stroke: #9fa8da; stroke-width: 1.4 } .head { fill: #9fa8da }
"""

Graph = dict[str, set[str]]


def rooms() -> tuple[Graph, dict[str, str]]:
    """Return what each room imports, and what each room is: the first sentence of its docstring."""
    graph: Graph = {}
    texts: dict[str, str] = {}
    for path in sorted((ROOT / "fds").glob("**/*.py")):
        parts = path.relative_to(ROOT / "fds").with_suffix("").parts
        room = parts[0]
        if room.startswith("__") or parts[-1] == "__main__":  # programs stand above all rooms
            continue
        tree = ast.parse(path.read_text())
        if len(parts) == 1 or parts[1:] == ("__init__",):
            texts[room] = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
        names = (
            [f"{node.module}.{alias.name}"] if isinstance(node, ast.ImportFrom) else [alias.name]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        )
        used = {name.split(".")[1] for (name,) in names if name.startswith("fds.")}
        graph.setdefault(room, set()).update(used - {room})
    known = set(graph)
    return {room: used & known for room, used in graph.items()}, texts


def floors(graph: Graph) -> dict[str, int]:
    """Return the floor of every room: above what it imports, right below its lowest user."""
    lowest: dict[str, int] = {}
    while len(lowest) < len(graph):  # acyclic, as tests/house/test_doors.py holds
        ready = [room for room in graph if room not in lowest and graph[room] <= lowest.keys()]
        lowest |= {room: 1 + max((lowest[below] for below in graph[room]), default=-1) for room in ready}
    floor: dict[str, int] = {}
    for room in sorted(graph, key=lambda room: -lowest[room]):
        users = [floor[user] for user in graph if room in graph[user]]
        floor[room] = min(users, default=max(lowest.values()) + 1) - 1
    return floor


def doors(graph: Graph) -> list[tuple[str, str]]:
    """Return the imports that do not follow from others."""

    def below(room: str) -> set[str]:
        return graph[room].union(*map(below, graph[room]))

    return sorted(
        (room, used) for room in graph for used in graph[room] if used not in set().union(*map(below, graph[room]))
    )


def rows(graph: Graph, floor: dict[str, int]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the boxes of each floor from left to right, and the way of each door from floor to floor.

    A door that passes a floor has a place there too, named "room>used@floor". Places are sorted by the mean of their
    neighbours' positions, down and up in turn.
    """
    ways = [
        [room, *(f"{room}>{used}@{i}" for i in range(floor[room] - 1, floor[used], -1)), used]
        for room, used in doors(graph)
    ]
    at = floor | {place: int(place.rpartition("@")[2]) for way in ways for place in way[1:-1]}
    order = [sorted(place for place in at if at[place] == i) for i in range(max(at.values()) + 1)]
    near: dict[str, set[str]] = {place: set() for place in at}
    for way in ways:
        for upper, lower in itertools.pairwise(way):
            near[upper].add(lower)
            near[lower].add(upper)
    for turn in range(24):
        levels = range(len(order)) if turn % 2 else range(len(order) - 1, -1, -1)
        for i in levels:
            beside = i - 1 if turn % 2 else i + 1
            if 0 <= beside < len(order):
                x = {place: (j + 0.5) / len(order[beside]) for j, place in enumerate(order[beside])}
                own = {place: (j + 0.5) / len(order[i]) for j, place in enumerate(order[i])}
                means = {p: [x[q] for q in near[p] if q in x] or [own[p]] for p in order[i]}
                order[i] = [place for _, _, place in sorted((mean(means[p]), j, p) for j, p in enumerate(order[i]))]
    return order, ways


def svg() -> str:
    """Return the picture."""
    graph, texts = rooms()
    order, ways = rows(graph, floors(graph))
    lines = {room: textwrap.wrap(sentence(room, texts[room]), 31) for room in graph}
    middle: dict[str, float] = {}  # of a place, from the left
    top: dict[str, float] = {}
    tall: dict[str, float] = {}
    y = 24.0
    for row in reversed(order):
        height = 34 + LINE * max((len(lines[place]) for place in row if place in graph), default=0)
        wide = [BOX if place in graph else 0 for place in row]
        gap = min(GAP * 4, (WIDTH - sum(wide)) / (len(row) + 1))
        x = (WIDTH - sum(wide) - gap * (len(row) - 1)) / 2
        for place, width in zip(row, wide, strict=True):
            middle[place], top[place], tall[place] = x + width / 2, y, height
            x += width + gap
        y += height + SPACE
    total = y - SPACE + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:.0f}" role="img">',
        "<title>The rooms of fds; an arrow is an import</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect class="ground" width="{WIDTH}" height="{total:.0f}" rx="8"/>',
    ]
    out += [f'<path class="door" marker-end="url(#head)" d="{curve(way, middle, top, tall)}"/>' for way in ways]
    for room in sorted(graph):
        x, y = middle[room] - BOX / 2, top[room]
        kind = "box step" if room == "step" else "box"
        out.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{BOX}" height="{tall[room]:.1f}" rx="6"/>')
        out.append(f'<text class="name" x="{x + 10:.1f}" y="{y + 20:.1f}">{escape(room)}</text>')
        for i, text in enumerate(lines[room]):
            out.append(f'<text class="what" x="{x + 10:.1f}" y="{y + 37 + LINE * i:.1f}">{escape(text)}</text>')
    return "\n".join([*out, "</svg>", ""])


def sentence(room: str, text: str) -> str:
    """Return what a box says of its room: the first clause, without the room's own name in front."""
    first = text.split("; ")[0].partition(". ")[0].rstrip(".").replace("`", "")
    name, colon, rest = first.partition(": ")
    return rest[0].upper() + rest[1:] if colon and name.lower() == room else first


def curve(way: list[str], middle: dict[str, float], top: dict[str, float], tall: dict[str, float]) -> str:
    """Return the path of a door, straight down past floors and bent between them."""
    x, y = middle[way[0]], top[way[0]] + tall[way[0]]
    path = f"M{x:.1f} {y:.1f}"
    for place in way[1:]:
        to, above = middle[place], top[place]
        path += f"C{x:.1f} {y + SPACE / 2:.1f} {to:.1f} {above - SPACE / 2:.1f} {to:.1f} {above:.1f}"
        x, y = to, above + tall[place]
        if place is not way[-1]:
            path += f"V{y:.1f}"
    return path


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.svg").write_text(svg())
