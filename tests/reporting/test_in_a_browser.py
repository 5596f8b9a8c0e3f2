"""The page in a headless Chromium: wide and narrow, light and dark, by pointer and by keyboard (`make test-browser`).

Pictures of it are left in .look/, to be looked at.
"""

import json
import math
from pathlib import Path

import pytest

import fds
from tests.browser import browser
from tests.reporting.runs import pipelined, train

pytestmark = pytest.mark.browser
LOOK = Path(__file__).parents[2] / ".look"
SCREENS = [(width, scheme) for width in (1280, 768, 360) for scheme in ("light", "dark")]
CONTRAST = """(() => {
  const light = (color) => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.match(/[\\d.]+/g).map(c => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (!/, 0\\)|transparent/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [], texts = "h1, h2, a, b, dt, dd, th, td, label, button, summary, pre, .readout, .plot text";
  for (const element of document.querySelectorAll(texts)) {
    if (!element.textContent.trim() || element.closest(".lanes, .skip")) continue;
    const style = getComputedStyle(element), color = element.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(color), light(ground(element))], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${element.tagName} ${element.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def tab():
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    evil = "a name that is as long as the screen is wide " * 4 + "</script><script>throw 1</script>" + "x" * 200
    train(folder / "plain", until=60, wrong=(20, 30), config={"lr": 0.01, evil: evil})
    train(folder / "other", until=40, config={"lr": 0.1})
    pipelined(folder / "stages")
    (folder / "damaged").mkdir()
    lines = [{"step": i, "loss": math.nan, "x/" + evil: math.sin(i), "seconds": i} for i in range(5000)]
    (folder / "damaged" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"st')
    runs = {name: (name,) for name in ("plain", "stages", "damaged")} | {
        "both": ("plain", "other"),
        "all": ("plain", "other", "damaged"),
    }
    LOOK.mkdir(exist_ok=True)
    return {
        name: fds.report(*(folder / one for one in some), path=folder / f"{name}.html") for name, some in runs.items()
    }


@pytest.mark.parametrize("name", ["plain", "stages", "damaged", "all"])
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_it_fits_every_screen_and_complains_of_nothing(name, width, scheme, tab, pages):
    tab.open(pages[name], width=width, scheme=scheme)
    tab.picture(LOOK / f"report-{name}-{width}-{scheme}.png", whole=True)
    assert tab.faults == [] and tab.evaluate("document.title").endswith(" · fds")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(CONTRAST) == []
    shown = "[...document.querySelectorAll('figure')].filter(one => one.checkVisibility())"
    assert tab.evaluate(f"{shown}.length > 0 && {shown}.every(one => one.querySelector('.plot svg'))")


def readout(tab, chart):
    return tab.evaluate(f"document.querySelector('#chart{chart} .readout').textContent")


def chart_of(tab, title):
    return tab.evaluate(f"charts.findIndex(one => one.title === '{title}')")


def test_the_pointer_reads_every_chart_at_one_place(tab, pages):
    tab.open(pages["both"])
    loss, lr = chart_of(tab, "loss"), chart_of(tab, "lr")
    tab.evaluate(f"document.querySelector('#chart{loss}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    x, y = tab.evaluate(
        f"(() => {{ const r = document.querySelector('#chart{loss} .plot').getBoundingClientRect();"
        "return [r.left + 54 + 0.25 * (r.width - 64), r.top + 50] })()"
    )
    before = readout(tab, lr)
    tab.move(x, y)
    assert before != readout(tab, lr) and "plain" in readout(tab, loss) and "other" in readout(tab, loss)
    tab.move(1, 1)
    assert readout(tab, lr) == before


def test_the_keyboard_reads_a_chart_point_by_point(tab, pages):
    tab.open(pages["plain"])
    loss = chart_of(tab, "loss")
    tab.evaluate(f"document.querySelector('#chart{loss} .plot').focus()")
    assert readout(tab, loss).startswith("samples 480")
    tab.press("ArrowLeft")
    assert readout(tab, loss).startswith("samples 472")
    tab.press("Home")
    assert readout(tab, loss).startswith("samples 8")
    for _ in range(20):
        tab.press("ArrowRight")
    assert readout(tab, loss).startswith("samples 168") and "not finite" in readout(tab, loss)
    tab.press("Escape")
    assert readout(tab, loss).startswith("samples 480")


def test_controls_change_what_is_drawn(tab, pages):
    tab.open(pages["both"])
    loss = chart_of(tab, "loss")
    shape = lambda: tab.evaluate(f"document.querySelector('#chart{loss} .plot').innerHTML")
    seen = [shape()]
    for code in (
        "smoothing.value = 0.9; smoothing.dispatchEvent(new Event('input'))",
        "over = document.getElementById('over'), over.value = 't', over.dispatchEvent(new Event('change'))",
        "document.getElementById('log').click()",
        "document.querySelector('button.run').click()",
        f"document.querySelector('#chart{loss} .widen').click()",
    ):
        tab.evaluate(code + "; 1")
        tab.settle()
        seen.append(shape())
    assert len({*seen}) == len(seen) and tab.faults == []
    assert tab.evaluate("smoothed.value") == "0.90"
    assert tab.evaluate("document.querySelector('button.run').getAttribute('aria-pressed')") == "false"
    assert " s" in readout(tab, loss) and "plain" not in readout(tab, loss)


def test_the_running_mean_is_that_of_the_display(tab, pages):
    tab.open(pages["plain"])
    numbers = [3.0, None, 1.0, 2.0, 8.0]
    want = fds.display.log.smooth([v for v in numbers if v is not None], decay=0.6)
    found = [v for v in tab.evaluate(f"smooth({json.dumps(numbers)}, 0.6)") if v is not None]
    assert found == pytest.approx(want)


def test_the_theme_can_be_the_other_one(tab, pages):
    tab.open(pages["plain"], scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    before = tab.evaluate(ground)
    tab.evaluate("document.getElementById('theme').click()")
    assert tab.evaluate(ground) != before and tab.evaluate("theme.textContent") == "dark"
    tab.evaluate("document.getElementById('theme').click()")
    assert tab.evaluate(ground) == before


def test_everything_can_be_reached_and_has_a_name(tab, pages):
    tab.open(pages["both"])
    unnamed = (
        "[...document.querySelectorAll('button, input, select, a, [role=img], summary')].filter(e => "
        "!(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.[0]?.textContent.trim())).length"
    )
    assert tab.evaluate(unnamed) == 0
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "to the content"
    folded = "document.querySelector('details:not([open])')"
    assert tab.evaluate(f"{folded}.querySelectorAll('svg').length") == 0
    tab.evaluate(f"{folded}.open = true")
    tab.settle()
    shown = "[...document.querySelectorAll('details[open] figure')]"
    assert tab.evaluate(f"{shown}.length > 0 && {shown}.every(f => f.querySelector('svg'))")
