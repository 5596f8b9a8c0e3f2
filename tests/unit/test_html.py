"""What notebooks show: HTML that is balanced, escaped, small and without scripts, of values that nobody waits for."""

from html.parser import HTMLParser

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from fds import _html, plans

VOID = {"br", "hr", "img"}
NASTY = '<script>alert("x")</script>&amp;'


class Balanced(HTMLParser):
    """Holds that every tag is closed in order, and collects tags and text."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert tag not in VOID and all(not name.startswith("on") for name, _ in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


class Nasty(torch.nn.Module):
    def __repr__(self):
        return NASTY


def loss_fn(params, batch):
    return (params[NASTY] * batch).sum()


def composed():
    return fds.compose(fds.accumulate(2), fds.freeze(NASTY + "*"), fds.adamw(0.1), fds.ema(0.9))


def state_and_step():
    step = fds.compose(fds.accumulate(2), fds.adamw(0.1), fds.ema(0.9), fds.donate())(loss_fn)
    return step.init({NASTY: torch.ones(3, 4)}), step


PLAN = plans.Plan.of(plans.zb_v(2, 6))
SHOWN = {
    "state": lambda: state_and_step()[0],
    "step": lambda: state_and_step()[1],
    "description": lambda: state_and_step()[1].describe(state_and_step()[0]),
    "layers": lambda: fds.Layers([torch.nn.Linear(2, 3), torch.tanh, Nasty()], torch.nn.MSELoss()),
    "transform": lambda: fds.freeze(NASTY),
    "composition": composed,
    "plan": lambda: PLAN,
    "a lowered plan": lambda: plans.overlap(plans.communicate(PLAN)),
    "timeline": lambda: plans.simulate(PLAN),
    "an empty timeline": lambda: plans.Timeline(()),
}


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_balanced_small_and_without_scripts(name):
    html = SHOWN[name]()._repr_html_()
    page = Balanced(html)
    assert page.tags <= {
        "div",
        "strong",
        "table",
        "tr",
        "td",
        "th",
        "pre",
        "details",
        "summary",
        "svg",
        "rect",
        "span",
        "text",
        "title",
    }
    assert len(html) < 40_000 and "NaN" not in html and "script>" not in html.replace("script&gt;", "")


@pytest.mark.parametrize("name", ["state", "transform", "composition", "layers"])
def test_names_of_the_user_are_escaped_and_shown(name):
    page = Balanced(SHOWN[name]()._repr_html_())
    assert NASTY in page.words


def test_a_state_shows_shapes_and_bytes_without_reading_an_element():
    state, _ = state_and_step()
    on_meta = fds.tree.map(lambda x: x.to("meta"), state)  # has no elements that could be read
    page = Balanced(on_meta._repr_html_())
    assert "(3, 4)" in page.words and "48 B" in page.words and "meta" in page.words
    assert "slots.ema" in page.words and "opt.exp_avg" in page.words


def test_a_notebook_asks_for_nothing_else_of_a_state():
    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    state, step = state_and_step()
    with Nothing():
        shown = state._repr_mimebundle_()
    assert shown == {"text/plain": "State(224 B)", "text/html": state._repr_html_()}
    step(state, torch.ones(2, 1))
    assert state._repr_mimebundle_()["text/plain"] == "State(given to a donating step)"


def test_a_state_that_was_donated_says_so():
    state, step = state_and_step()
    step(state, torch.ones(2, 1))
    assert "given to a donating step" in state._repr_html_()


def test_a_description_shows_what_its_text_shows():
    state, step = state_and_step()
    described = step.describe(state, torch.ones(2, 1))
    page = Balanced(described._repr_html_())
    for words in [*described.stations.values(), *(f"{n:,}" for n in described.num_bytes.values())]:
        assert words in page.words


def test_a_timeline_has_a_bar_for_each_computation_that_says_when_it_ran():
    html = plans.simulate(PLAN)._repr_html_()
    assert html.count("<rect") == sum(len(row) for row in PLAN.rows) and "<title>0F0: 0 to 1</title>" in html


def test_what_is_long_is_counted():
    page = Balanced(_html.table([[str(i)] for i in range(300)]))
    assert "199and 100 more" in page.words and "200" not in page.words
    many = _html.lanes([[_html.Bar(i, i + 1, "000000", "") for i in range(3000)]] * 2, 3000)
    assert "6,000 bars in 2 lanes" in many and "rect" not in many
