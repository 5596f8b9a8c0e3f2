"""A search on the ranks of a launcher: each writes what it has found."""

import json
import os
import sys

import pytest

import fds
from fds.tuning import Budget, Space
from tests.tuning import starting
from tests.tuning.problem import batch, layers, recipe


def search(environ, folder, order, kinds):
    os.environ.update(environ)
    loss = layers()
    with pytest.MonkeyPatch.context() as patch, (folder / f"rank{environ['RANK']}.log").open("w") as log:
        starting.warm(patch)
        patch.setattr(sys, "stdout", log)
        report = fds.tune(
            loss,
            loss.init,
            batch(),
            space=Space(recipe, {"dp": 2}, {"kind": kinds}),
            budget=Budget(measure=0.01, limit=120.0),
            order=order,
            journal=folder / "journal.jsonl",
        )
    rows = [(str(row.candidate), row.outcome, row.measured, row.num_bytes, row.why) for row in report.rows]
    predicted = [row.prediction and (row.prediction.computed, row.prediction.messages) for row in report.rows]
    (folder / f"rank{fds.mesh(ranks=-1).rank}.json").write_text(json.dumps([rows, predicted]))
