"""The gallery: `make gallery` draws what docs/pipelines.md shows, all of it and nothing else."""

import re
from pathlib import Path

from tests.scripts import loaded

ROOT = Path(__file__).parents[2]
PAGE, IMAGES = ROOT / "docs" / "pipelines.md", ROOT / "docs" / "images"


def script():
    """Load docs/draw_schedules.py."""
    return loaded(ROOT / "docs" / "draw_schedules.py")


def test_the_pictures_are_those_that_are_drawn_and_shown(tmp_path):
    gallery = script()
    gallery.main(tmp_path / "images")
    drawn = {path.name for path in (tmp_path / "images").iterdir()}
    kept = {path.name: path.stat().st_size for path in IMAGES.iterdir()}
    assert drawn == kept.keys() == set(re.findall(r"!\[[^]]+\]\(images/([^)]+)\)", PAGE.read_text()))
    assert all(10_000 < size < 100_000 for size in kept.values())


def test_the_pictures_say_what_the_page_prints():
    text = PAGE.read_text()
    gallery = script()
    for name in gallery.SCHEDULES:
        line = gallery.simulated(name)
        bubble, idle = f"{line.bubble_fraction:.1%}", f"{line.idle_fraction:.1%}"
        facts = rf"^{name}\S* +time {line.makespan:g} +bubble {bubble} +idle {idle} "
        assert re.search(facts, text, re.MULTILINE), facts
