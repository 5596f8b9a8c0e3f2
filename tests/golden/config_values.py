"""Record which values DeepSpeed 0.19.6 takes for the keys of its JSON: null, wrong types, and numbers out of range.

    DS_ACCELERATOR=cpu .venv-peers/bin/python -m tests.golden.config_values

config_values.json: by JSON path, as in config_defaults.json, which of `values` are taken for the keys of its pydantic
models, and of null alone for all other keys; everything else is as a probe of config_defaults.py says. Only what reads
the configuration is asked, not what uses it later.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from unittest import mock

from tests.golden.config_defaults import PROBES, altered, drives, labelled, leaves, models

HERE = Path(__file__).parent
VALUES = [None, True, -1, 0, 1, 1.5, "no such word", [], {}]


def place_of(path: str) -> tuple[dict, str] | None:
    """Return a JSON and where a recorded key is there; None where no probe has its kind."""
    for name, probe in PROBES.items():
        for raw, _ in leaves(probe):
            if labelled(raw, name) == path:
                return probe, raw
    parent = path.rpartition(".")[0]
    there = [probe for probe in PROBES.values() if isinstance(dict(leaves(probe)).get(parent), dict)]
    return None if "[" in path else ([*there, PROBES["sections"]][0], path)


def main() -> None:
    """Write the file."""
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    known = json.loads((HERE / "config_defaults.json").read_text())
    declared = tuple(f"{section}." for section in models())
    rows = []
    with mock.patch("deepspeed.comm.get_rank", return_value=0):
        for path in known["keys"]:
            place = place_of(path)
            if place is None or path.startswith(("optimizer.params", "scheduler.params")):  # their classes read those
                continue
            tried = VALUES if path.startswith(declared) else [None]
            taken = [value for value in tried if drives(altered(*place, value))]
            rows.append(f"{json.dumps(path)}: {json.dumps(taken)}")
    inside = ",\n".join(rows)
    head = {"versions": known["versions"], "values": VALUES, "declared": [*models()]}
    text = f'{json.dumps(head)[:-1]}, "keys": {{\n{inside}\n}}}}\n'
    (HERE / "config_values.json").write_text(text)
    print(f"config_values.json: {len(rows)} keys")


if __name__ == "__main__":
    main()
