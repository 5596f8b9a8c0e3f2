"""A search on the ranks of a launcher: each writes what it has found."""

import json
import sys
from pathlib import Path

import fds
from fds.tuning import Budget, Space
from tests.tuning.problem import batch, layers, recipe


def main():
    folder, loss = Path(sys.argv[1]), layers()
    report = fds.tune(
        loss,
        loss.init,
        batch(),
        space=Space(recipe, {"dp": 2}, {"kind": sys.argv[3:]}),
        budget=Budget(measure=0.01, limit=120.0),
        order=sys.argv[2],
        journal=folder / "journal.jsonl",
    )
    rows = [(str(row.candidate), row.outcome, row.measured, row.num_bytes, row.why) for row in report.rows]
    predicted = [row.prediction and (row.prediction.computed, row.prediction.messages) for row in report.rows]
    (folder / f"rank{fds.mesh(ranks=-1).rank}.json").write_text(json.dumps([rows, predicted]))


if __name__ == "__main__":
    main()
