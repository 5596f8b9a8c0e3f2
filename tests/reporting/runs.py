"""Short runs that are recorded, logged and reported, and what a page of them says."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.monitors import CSV, JSONL

CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "rows": 8}
VOID = {"meta", "link", "input", "br"}


def loss_fn(params, batch):
    x, y = batch
    loss = ((x @ params["w"] - y) ** 2).mean()
    return loss, {"half": loss / 2}


def plain_step():
    step = fds.compose(fds.accumulate(2), fds.skip_nonfinite(), fds.clip_by_global_norm(1.0), fds.adamw(0.01))(loss_fn)
    return step, step.init({"w": torch.zeros(4)}, key=3)


def batch(i, wrong=()):
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(i))
    return (x * float("inf"), x.sum(1)) if i in wrong else (x, x.sum(1))


def train(folder, *, until, state=None, wrong=(), config=CONFIG, every=2):
    """Train until a call, and leave all that a plain run can leave: metrics twice, times, notes, `run.json`."""
    step, begun = plain_step()
    state = begun if state is None else state
    fds.record_run(folder, step, state, config=config, explain="fds.compose(...)")
    timed = fds.timed(every=every, samples=8, tokens=64, flops=1e6, peak_flops=1e9)
    with fds.monitor(CSV(folder), JSONL(folder / "log.jsonl"), batch_size=8) as monitor:
        while (calls := int(state.calls)) < until:
            with timed(state):
                state, metrics = step(state, batch(calls, wrong))
            monitor(state, {**metrics, **timed.metrics()})
            if int(state.calls) % 10 == 0:
                monitor.note(state, {"eval_loss": step.evaluate(state, batch(999))["loss"]})
    return step, state


def pipelined(folder):
    """Train two stages on two of four simulated ranks each, and trace one call."""

    def rank():
        mesh = fds.mesh(pp=2, dp=2)
        layers = [fds.LayerSpec(nn.Linear, 4, 8), torch.tanh, fds.LayerSpec(nn.Linear, 8, 1)]
        step = fds.compose(
            fds.pipeline(fds.plans.gpipe, mesh["pp"], num_microbatches=2),
            fds.shard_optimizer(mesh["dp"], stage=2),
            fds.adamw(0.01),
        )(fds.Layers(layers, lambda out, y: F.mse_loss(out.squeeze(1), y)))
        state = step.init(step.loss.init(fds.random.key(0)))
        fds.record_run(folder, step, state, config={"schedule": "gpipe"})
        timed = fds.timed()
        with fds.monitor(JSONL(folder / "log.jsonl")) as monitor:
            for i in range(3):
                with timed(state):
                    state, metrics = step(state, batch(2 * i + mesh["dp"].index))
                monitor(state, {**metrics, **timed.metrics()})
        fds.trace(step, state, batch(mesh["dp"].index), folder / "trace.json")

    fds.simulate(rank, 4)


class Page(HTMLParser):
    """A page, read strictly: every element is closed where it belongs.

    Attributes:
        text: section -> its words.
        data: what its program draws.
        addresses: what elements refer to.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.bytes = path.read_bytes()
        self.text: dict[str, str] = {}
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self._open: list[tuple[str, str]] = []
        self._section, self._data = "", ""
        self.feed(self.bytes.decode())
        assert not self._open
        self.data = json.loads(self._data)

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.addresses += [known[name] for name in ("href", "src", "action") if name in known]
        self.ids += [known["id"]] if "id" in known else []
        if tag == "section":
            self._section = known["id"]
        if tag not in VOID:
            self._open.append((tag, known.get("id", "")))

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self._open and self._open.pop()[0] == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, words):
        if self._open and self._open[-1] == ("script", "data"):
            self._data += words
        self.text[self._section] = self.text.get(self._section, "") + words + " "

    def line(self, title, label=None, run=0):
        """Return the x and y of a line of a chart."""
        [chart] = [one for one in self.data["charts"] if one["title"] == title]
        [line] = [one for one in chart["lines"] if one["label"] == (label or title) and one["run"] == run]
        return self.data["arrays"][line["x"]], self.data["arrays"][line["y"]]


def reported(*runs, path=None):
    """Return the page of runs."""
    return Page(fds.report(*runs, path=path))
